package core

// The end of a server's loop: the reason why get_batch ends, and the threads that call it.

import (
	"cmp"
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/van"
)

// ErrLoopOver means that GetBatch returns no more batches because all workers have ended.
var ErrLoopOver = fmt.Errorf("%w: all workers have ended", van.ErrFinished)

// loopOver returns an error that wraps ErrLoopOver if no worker will send another batch: the program of at least one worker has
// ended, and every other worker has ended or been lost for STEPAF_REPLACE_TIMEOUT. lost has the lost workers by group rank.
func loopOver(node cluster.App, lost map[int]loss) error {
	var ended, gone []string
	for rank := range node.Topology().NumWorkers {
		id := node.Topology().WorkerInstance(rank)
		l, is := lost[rank]
		switch {
		case node.HasEnded(id):
			ended = append(ended, node.PeerName(id))
		case is && time.Since(l.at) >= node.Config().ReplaceTimeout:
			gone = append(gone, fmt.Sprintf("; %s is lost: %s", node.PeerName(id), l.cause))
		default:
			return nil
		}
	}
	if len(ended) == 0 {
		return nil
	}
	return &van.Error{Op: "get_batch", Node: node.Name(), Err: fmt.Errorf("%w: in stop(): %s%s", ErrLoopOver, strings.Join(ended, ", "), strings.Join(gone, ""))}
}

// overdue returns the workers (group ranks) without a batch that are lost and were not replaced within STEPAF_REPLACE_TIMEOUT. due
// is one of them whose error may be returned now, or -1. next is the time until the result may change, or 0. The caller holds q.mu.
func overdue(q *queue) (late []int, due int, next time.Duration) {
	limit := q.node.Config().ReplaceTimeout
	again := cmp.Or(limit, time.Second)
	due = -1
	for rank, l := range q.lost {
		left := limit - time.Since(l.at)
		if left <= 0 && q.workers[rank].Len() == 0 {
			late = append(late, rank)
			if left = again - time.Since(l.told); left <= 0 {
				due = rank
			}
		}
		if left > 0 && (next == 0 || left < next) {
			next = left
		}
	}
	return late, due, next
}

// errLeft is the reason with which the server of that name refuses a request.
func errLeft(server string) error {
	return fmt.Errorf("%w: %s has left its loop of get_batch and waits in stop()", van.ErrFinished, server)
}

// callers describes the threads that call get_batch.
type callers struct {
	thread  atomic.Uint64 // the first thread that called
	several atomic.Bool   // other threads have called, too
	calls   atomic.Uint64
	inside  atomic.Int32 // calls under way
}
