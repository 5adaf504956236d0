package core

// Batches that GetBatch has returned and that go back into the queue.

import (
	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/failpoint"
)

// GiveBack returns batches of GetBatch to the queue that the caller could not use. The next GetBatch returns them, each
// before later batches of its worker. The items no longer belong to the caller. A batch that was answered or canceled
// by its worker in the meantime is released.
func (s *Session) GiveBack(items []Item) { s.queue.giveBack(items) }

func (q *queue) giveBack(items []Item) {
	q.mu.Lock()
	defer q.unlock(false)
	for _, it := range items {
		if it.acked {
			delete(q.acked.of, it.ID)
		} else if _, ok := q.out[it.ID]; ok {
			delete(q.out, it.ID)
		} else {
			it.Release()
			continue
		}
		if !it.Wanted() && !failpoint.On("lost-batches") {
			release(it)
			continue
		}
		q.charge(it.Worker(), weight(&it.Batch))
		w := &q.workers[it.Worker()]
		w.PutFront(it)
		for i, all := 0, w.All(); i+1 < len(all) && all[i].ID > all[i+1].ID; i++ {
			all[i], all[i+1] = all[i+1], all[i]
		}
		if w.Len() == 1 {
			q.filled++
		}
	}
}

// Retake returns the item of GetBatch with that id, for GiveBack, if it is not answered yet. The item has a reference
// of its own. b is the batch, if the caller still has it. A batch that needs an answer is found without b.
func (s *Session) Retake(id uint64, b *af.Batch) (Item, bool) {
	q := s.queue
	if q == nil {
		return Item{}, false
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if out, ok := q.out[id]; ok {
		return Item{ID: id, Batch: out.Retain()}, true
	}
	if _, ok := q.acked.of[id]; ok && b != nil {
		return Item{ID: id, Batch: b.Retain(), acked: true}, true
	}
	return Item{}, false
}
