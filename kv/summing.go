package kv

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/stepaf/stepaf-go/internal/logx"
	"github.com/stepaf/stepaf-go/van"
)

// SummingHandler keeps a sum for every key: a push adds to the values of its
// keys, a pull gets their present values. Keys that were never pushed have zeros,
// as in the original.
//
// Every key has the same number of values, which the first push determines; a
// pull before that gets one zero for each key, as in the original, even if the worker's
// buffer is larger: a few bytes of a request must not make a server allocate gigabytes. A
// push with another number, or with no values, is refused with a log line: the worker's call
// fails with postoffice.ErrInvalid. One of the original waits for its limit, as its protocol has no
// answer that says no. Each key's addition is atomic, a request with many keys is not.
//
// The zero value is ready for use:
//
//	var sums kv.SummingHandler[float32]
//	err := server.Handle(sums.Handle)
//
// It is safe for concurrent use, by several servers too, and costs little more than
// the memory traffic of the values when keys arrive in their first order.
type SummingHandler[V Value] struct {
	mu      sync.Mutex
	store   atomic.Pointer[store[V]] // set once
	results sync.Pool                // of *result[V]
}

// result holds the values of an answer until they have left.
type result[V Value] struct {
	h    *SummingHandler[V]
	vals []V
}

// Sent puts the memory back for use again.
func (r *result[V]) Sent() { r.h.results.Put(r) }

// Handle is the Handler.
func (h *SummingHandler[V]) Handle(r Request[V]) {
	if err := h.handle(r); err != nil {
		_ = r.Refuse(err) // unless it is answered
		r.s.node.Rarely("kv: summing: "+logx.Kind(err)).Warn("summing handler: request failed",
			"err", err, "worker", r.Worker, "handler", r.Timestamp)
	}
}

func (h *SummingHandler[V]) handle(r Request[V]) error {
	if r.Push {
		if err := h.Add(r.Keys, r.Vals, r.Lens); err != nil {
			return err
		}
		return r.Respond(Pairs[V]{})
	}
	k := max(h.Each(), 1)
	if bytes := (k*sizeOf[V]() + 8) * len(r.Keys); bytes > maxPayload {
		return fmt.Errorf("%w: pull of %d bytes, want at most %d", van.ErrInvalid, bytes, maxPayload)
	}
	res, _ := h.results.Get().(*result[V])
	if res == nil {
		res = &result[V]{h: h}
	}
	n := k * len(r.Keys)
	res.vals = slices.Grow(res.vals[:0], n)[:n]
	h.Get(r.Keys, res.vals)
	return r.Respond(Pairs[V]{Keys: r.Keys, Vals: res.vals}, OnSent(res)) // after an error the transport may still hold res
}

// Each is the number of values of a key, 0 before the first push.
func (h *SummingHandler[V]) Each() int {
	if s := h.store.Load(); s != nil {
		return s.k
	}
	return 0
}

// Len is the number of keys that have been pushed.
func (h *SummingHandler[V]) Len() int {
	if s := h.store.Load(); s != nil {
		return s.len()
	}
	return 0
}

// Add adds vals to the values of keys, which must ascend without repeats. lens,
// if not empty, must say what the division of vals says. Errors wrap
// postoffice.ErrInvalid; then nothing was added.
func (h *SummingHandler[V]) Add(keys []Key, vals []V, lens []int32) error {
	if len(keys) == 0 && len(vals) == 0 && len(lens) == 0 {
		return nil
	}
	if len(lens) > 0 && len(lens) != len(keys) {
		return fmt.Errorf("%w: push of %d lengths for %d keys, want none or one for each", van.ErrInvalid, len(lens), len(keys))
	}
	if len(keys) == 0 || len(vals) == 0 || len(vals)%len(keys) != 0 {
		return fmt.Errorf("%w: push of %d values for %d keys, want the same number for each", van.ErrInvalid, len(vals), len(keys))
	}
	k := len(vals) / len(keys)
	for i, l := range lens {
		if int(l) != k {
			return fmt.Errorf("%w: push of %d values for key %d and %d for others, want the same number for each", van.ErrInvalid, l, keys[i], k)
		}
	}
	s := h.store.Load()
	if s == nil {
		h.mu.Lock()
		if s = h.store.Load(); s == nil {
			s = newStore[V](k)
			h.store.Store(s)
		}
		h.mu.Unlock()
	}
	if s.k != k {
		return fmt.Errorf("%w: push of %d values for each key (%d to %d), the store has %d", van.ErrInvalid, k, keys[0], keys[len(keys)-1], s.k)
	}
	s.add(keys, vals)
	return nil
}

// Get sets out to the values of keys, which must ascend without repeats: Each of
// them for every key. out must have that length; before the first push it is
// cleared.
func (h *SummingHandler[V]) Get(keys []Key, out []V) {
	s := h.store.Load()
	if s == nil || len(out) != s.k*len(keys) {
		clear(out)
		return
	}
	s.get(keys, out)
}
