package simgpu

// Whether memory of tensors is let go.

import (
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/van/backend"
)

// Holds counts the holds of memory that it owns, see Bytes.
type Holds struct{ n atomic.Int64 }

// Bytes is b as memory of the host whose holds count.
func (h *Holds) Bytes(b []byte) backend.Mem { return backend.Bytes(b).WithOwner(h) }

// Retain implements backend.Holder.
func (h *Holds) Retain() { h.n.Add(1) }

// Release implements backend.Holder.
func (h *Holds) Release() { h.n.Add(-1) }

// N is how often the memory is held.
func (h *Holds) N() int { return int(h.n.Load()) }

// Watch fails the test if at its end memory is held that is not held now. It is called before nodes are started, so that
// they have been closed then.
func (h *Holds) Watch(t testing.TB) {
	before := h.N()
	t.Cleanup(func() {
		h.settle(t, before)
		h.n.Store(int64(before)) // the next test starts from here
	})
}

// settle fails the test if the memory is not held as often as want before long: a transport releases it a little later.
func (h *Holds) settle(t testing.TB, want int) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); h.N() != want; runtime.Gosched() {
		if time.Now().After(end) {
			t.Errorf("memory of tensors is held %d times, want %d", h.N(), want)
			return
		}
	}
}
