package core

import (
	"fmt"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/van"
)

// AnswerTensor returns the worker's tensor for pull i of the batch with that id of s, and the batch, which the caller releases. The
// tensor is empty, and nothing is to be released, if the server does not map it, the batch needs no answer, or was canceled.
func AnswerTensor(s *Session, id uint64, i int) (af.Batch, af.Tensor, error) {
	q := s.queue
	if q == nil {
		return af.Batch{}, af.Tensor{}, wrongRole(s, "answer_tensor", "server")
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	b, ok := q.out[id]
	if !ok {
		_, canceled := q.canceled.of[id]
		_, acked := q.acked.of[id]
		if canceled || acked && i == 0 {
			return af.Batch{}, af.Tensor{}, nil
		}
		return af.Batch{}, af.Tensor{}, q.unknown("answer_tensor", id)
	}
	pulls := b.Pulls()
	if i < 0 || i >= len(pulls) {
		return af.Batch{}, af.Tensor{}, fmt.Errorf("answer_tensor: %w: pull %d of handler %d, which has %d pulls", van.ErrInvalid, i, id, len(pulls))
	}
	out := pulls[i].Out
	if out.Len() > 0 {
		b.Retain()
	}
	return b, out, nil
}
