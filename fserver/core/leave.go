package core

// The refusal of requests by a server that waits in stop(), and whose program will not answer them.

import "time"

// Finished reports whether GetBatch, GetAny or the serving of sessions has ended with ErrLoopOver.
func (s *Session) Finished() bool { return s.over.Load() }

// OnlyThread, in place of a thread, means that the program has only one thread.
const OnlyThread = 1

// CalledBy records the thread of the program that is about to call GetBatch or GetAny. A thread is never 0.
func (s *Session) CalledBy(thread uint64) {
	if s.queue == nil {
		return
	}
	c := &s.queue.callers
	if c.thread.Load() != thread && !c.thread.CompareAndSwap(0, thread) {
		c.several.Store(true)
	}
}

// idleTime is the time after which a server in stop() refuses requests, if during all of it no other thread called get_batch or
// had an unanswered batch.
const idleTime = time.Second

// leave refuses, until done is closed, the requests that the program will not answer. If the thread that calls stop() is the only
// one of the program, or the only one that has called get_batch, leave refuses all requests. Otherwise another thread may serve:
// leave then refuses requests while no thread has served for idleTime.
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

// busy reports whether a thread serves: it is in get_batch, has called get_batch since the number of calls was calls, or has an
// unanswered batch. If so, busy also ends the refusing of requests.
func (q *queue) busy(calls uint64) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	busy := q.callers.inside.Load() > 0 || q.callers.calls.Load() != calls || len(q.out) > 0
	if busy {
		q.refuses = false
	}
	return busy
}

// refuseAll refuses the queued batches and all batches that arrive from now on. If out is true, it also refuses the batches that
// get_batch has returned and that have no answer yet.
func (q *queue) refuseAll(out bool) {
	why := errLeft(q.node.Name())
	q.mu.Lock()
	defer q.unlock(false)
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
			q.canceled.add(id, b.Worker(), keepCanceled)
			b.Refuse(why)
		}
	}
}
