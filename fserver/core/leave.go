package core

// A server that waits in stop() refuses the requests that nobody will answer.

import "time"

// Finished reports whether GetBatch, GetAny or the serving of sessions has ended with ErrLoopOver.
func (s *Session) Finished() bool { return s.over.Load() }

// OnlyThread instead of a thread says that the program has no other.
const OnlyThread = 1

// CalledBy notes which thread of the program is about to call GetBatch or GetAny. A thread is never 0.
func (s *Session) CalledBy(thread uint64) {
	if s.queue == nil {
		return
	}
	c := &s.queue.callers
	if c.thread.Load() != thread && !c.thread.CompareAndSwap(0, thread) {
		c.several.Store(true)
	}
}

// idleTime is how long no other thread must have called get_batch, nor hold a batch to answer, before a server in stop()
// refuses requests.
const idleTime = time.Second

// leave refuses, until done is closed, the requests that nobody will answer. If the thread that calls stop() is the only one, or
// the only one that has called get_batch, these are all requests. Otherwise another thread may serve: requests are refused
// while none has for idleTime.
func (q *queue) leave(thread uint64, done <-chan struct{}) {
	if thread == OnlyThread || thread != 0 && thread == q.callers.thread.Load() && !q.callers.several.Load() {
		q.refuseAll(true)
		return
	}
	go func() {
		const looks = 4
		for idle, calls := 0, q.callers.calls.Load(); ; {
			select {
			case <-done:
				return
			case <-time.After(idleTime / looks):
			}
			if was := calls; q.busy(was) {
				idle, calls = 0, q.callers.calls.Load()
			} else if idle++; idle == looks {
				q.refuseAll(false)
			}
		}
	}()
}

// busy reports whether a thread serves: it is in get_batch, has called it since there were so many calls, or has a batch to
// answer. Then requests are not refused.
func (q *queue) busy(calls uint64) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	busy := q.callers.inside.Load() > 0 || q.callers.calls.Load() != calls || len(q.out) > 0
	if busy {
		q.refuses = false
	}
	return busy
}

// refuseAll refuses the batches that are queued, with out also those that were handed out and not answered, and all that
// arrive from now on.
func (q *queue) refuseAll(out bool) {
	why := errLeft(q.node.Name())
	q.mu.Lock()
	defer q.mu.Unlock()
	q.refuses = true
	for rank := range q.workers {
		for w := &q.workers[rank]; w.Len() > 0; {
			it := w.Take()
			q.charge(rank, -weight(&it.Batch))
			if !it.acked {
				it.Refuse(why)
			}
			it.Release()
		}
	}
	q.filled = 0
	for id, b := range q.out {
		if out {
			delete(q.out, id)
			q.given.note(id, b.Worker(), keepGiven)
			b.Refuse(why)
		}
	}
}
