package core

import "github.com/stepaf/stepaf-go/af"

// Retake returns the item of GetBatch with that id, for GiveBack, if it was not answered;
// it has a hold of its own. b is the batch, if the caller still holds it: one that needs
// an answer is found without.
func (s *Session) Retake(id uint64, b *af.Batch) (Item, bool) {
	if s.queue == nil {
		return Item{}, false
	}
	q := s.queue
	q.mu.Lock()
	defer q.mu.Unlock()
	if out, ok := q.out[id]; ok {
		return Item{ID: id, Batch: out.Retain()}, true
	}
	if _, ok := q.acked[id]; ok && b != nil {
		return Item{ID: id, Batch: b.Retain(), acked: true}, true
	}
	return Item{}, false
}
