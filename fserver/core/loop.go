package core

// The end of a server's loop: the reason why get_batch ends, and the threads that call it.

import (
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/van"
)

// ErrLoopOver means that GetBatch returns no more batches because all workers have ended.
var ErrLoopOver = fmt.Errorf("%w: no worker sends anything any more", van.ErrFinished)

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
