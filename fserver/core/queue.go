package core

import (
	"fmt"
	"sync"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/fifo"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van"
)

// Item is one batch handed out, which the caller must release after answering it.
type Item struct {
	ID uint64
	af.Batch
	acked bool // it needs no answer
}

// queue orders complete batches by worker.
type queue struct {
	node *postoffice.Node

	mu      sync.Mutex
	workers []fifo.Queue[Item] // by group rank, oldest first
	filled  int                // workers that have a batch
	next    uint64
	out     map[uint64]af.Batch // handed out and not answered
	acked   map[uint64]struct{} // handed out without pulls: an answer is allowed, but not needed
	oldest  fifo.Queue[uint64]  // of acked, in order
	lost    map[int]error       // workers by group rank
	changed chan struct{}       // one token when there may be something to take
	isReady func() bool         // ready, made once
}

func newQueue(n *postoffice.Node) *queue {
	q := &queue{node: n, workers: make([]fifo.Queue[Item], n.NumWorkers()), out: map[uint64]af.Batch{}, acked: map[uint64]struct{}{}, lost: map[int]error{}, changed: make(chan struct{}, 1)}
	q.isReady = q.ready
	n.OnPeer(func(id int, up bool, cause error) {
		if van.RoleOf(id) != van.Worker || van.RankOf(id)%n.GroupSize() != n.Instance() {
			return // its batches go to another instance
		}
		q.mu.Lock()
		defer q.mu.Unlock()
		rank := van.RankOf(id) / n.GroupSize()
		if up {
			delete(q.lost, rank)
		} else {
			q.lost[rank] = cause
		}
		q.signal()
	})
	return q
}

func (q *queue) signal() {
	select {
	case q.changed <- struct{}{}:
	default:
	}
}

// put is the server's handler. The batch is held for whoever takes it, beyond its
// answer.
func (q *queue) put(b af.Batch) {
	b.Retain()
	q.mu.Lock()
	w := &q.workers[b.SenderRank()]
	if w.Put(Item{ID: q.next, Batch: b}); w.Len() == 1 {
		q.filled++
	}
	q.next++
	ready := q.filled == len(q.workers)
	q.mu.Unlock()
	if ready {
		q.signal()
	}
}

// ready tells whether take has something to return.
func (q *queue) ready() bool {
	q.mu.Lock()
	full := q.filled == len(q.workers)
	q.mu.Unlock()
	return full
}

// take appends the oldest batch of every worker to items when all have one, else it
// returns false, or an error when one that has none is lost.
func (q *queue) take(items []Item) ([]Item, bool, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.filled < len(q.workers) {
		for rank, cause := range q.lost {
			if q.workers[rank].Len() == 0 {
				return items, false, &van.Error{Op: "get_batch", Node: q.node.Name(), Peer: q.node.PeerName(q.node.WorkerInstance(rank)), Err: cause,
					Hint: "batches of the other workers stay queued; a restarted worker takes its place"}
			}
		}
		return items, false, nil
	}
	for i := range q.workers {
		items = append(items, q.handOut(q.workers[i].Take()))
		if q.workers[i].Len() == 0 {
			q.filled--
		}
	}
	if q.filled == len(q.workers) {
		q.signal() // for another caller: its token may have been one with ours
	}
	return items, true, nil
}

// keepAcked is the number of batches without pulls that can still be answered.
const keepAcked = 4096

// handOut notes that a batch has left the queue. One of several pushes and no pull
// was acknowledged as it came, and few programs answer it: its memory is then
// Python's alone. q.mu is held.
func (q *queue) handOut(it Item) Item {
	// One that was given back may have been answered here before.
	it.acked = it.acked || !it.Single() && len(it.Pulls()) == 0 && it.ResponseInOrder(nil, nil) == nil
	if it.acked {
		q.noteAcked(it.ID)
	} else {
		q.out[it.ID] = it.Batch
	}
	return it
}

// noteAcked forgets the oldest when there are too many. q.mu is held.
func (q *queue) noteAcked(id uint64) {
	if q.oldest.Len() == keepAcked {
		delete(q.acked, q.oldest.Take())
	}
	q.acked[id] = struct{}{}
	q.oldest.Put(id)
}

// missing names the workers that have no batch.
func (q *queue) missing() (names []string) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for rank := range q.workers {
		if q.workers[rank].Len() == 0 {
			names = append(names, q.node.PeerName(q.node.WorkerInstance(rank)))
		}
	}
	return names
}

// unknown says why there is no batch to answer. Only one that was answered is no
// ErrUnknownHandler. q.mu is held.
func (q *queue) unknown(id uint64) error {
	if q.waits(id) {
		return fmt.Errorf("respond: %w: %w: get_batch has not returned handler %d yet", ErrMisuse, ErrUnknownHandler, id)
	}
	if id < q.next {
		return fmt.Errorf("respond: %w: handler %d was answered already; respond once to each batch", ErrMisuse, id)
	}
	return fmt.Errorf("respond: %w: %w %d, get_batch has returned handlers below %d", ErrMisuse, ErrUnknownHandler, id, q.next)
}

func misfit(id uint64, pulls, tensors int) error {
	return fmt.Errorf("respond: %w: %d tensors for handler %d, whose worker pulls %d", van.ErrInvalid, tensors, id, pulls)
}

// waits tells whether the batch with that id has not been handed out yet. q.mu is
// held.
func (q *queue) waits(id uint64) bool {
	for i := range q.workers {
		for _, it := range q.workers[i].All() {
			if it.ID == id {
				return true
			}
		}
	}
	return false
}

// putBack makes a batch answerable again after an answer that did not fit.
func (q *queue) putBack(id uint64, b af.Batch) {
	q.mu.Lock()
	q.out[id] = b
	q.mu.Unlock()
}
