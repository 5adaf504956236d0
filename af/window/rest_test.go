package window

// The checks at the end of every test: nothing is lent, no goroutine waits, and windows are off their nodes.

import (
	"fmt"
	"slices"

	"github.com/stepaf/stepaf-go/tests/simgpu"
	"github.com/stepaf/stepaf-go/tests/vantest"
)

// held counts the holds of the memory of all tensors of the tests that are on the host.
var held simgpu.Holds

// atRest checks the windows of r, which are closed, as their communicators are.
func (r *rig) atRest() {
	r.Helper()
	for i, w := range r.windows {
		if w == nil {
			continue
		}
		for from, p := range w.peers {
			if p.sleepers.n.Load() != 0 || len(p.sleepers.waiting) != 0 {
				r.Errorf("rank %d: %d calls wait for rank %d", i, len(p.sleepers.waiting), from)
			}
			for k, x := range p.sleepers.idle {
				if slices.Index(p.sleepers.idle, x) != k {
					r.Errorf("rank %d: a waiter for rank %d is to be used twice", i, from)
				}
			}
			p.in.mu.Lock()
			for k, m := range p.in.early {
				if m != nil {
					r.Errorf("rank %d: a message of rank %d is kept, at %d", i, from, k)
				}
			}
			p.in.mu.Unlock()
			if w.dev != nil {
				w.dev.outs[from].p.out.mu.Lock()
				if n := len(w.dev.outs[from].lent); n > 0 {
					r.Errorf("rank %d: %d sources of puts to rank %d are held", i, n, from)
				}
				w.dev.outs[from].p.out.mu.Unlock()
			}
		}
		if w.peers.lends() {
			r.Errorf("rank %d: memory is lent to the transport", i)
		}
		if w.base.app.Alive() == nil {
			r.free(w)
		}
	}
}

// settled waits until all that was put is taken, and checks what the ranks have counted of each other: of windows on the host
// that are not over.
func (r *rig) settled() {
	r.Helper()
	for i, w := range r.windows {
		for k, p := range w.peers {
			if i == k {
				continue
			}
			if err := w.Flush(r.Context(), k); err != nil {
				r.Fatalf("rank %d: %v", i, err)
			}
			in := &r.windows[k].peers[i].in
			vantest.Eventually(r, testTime, fmt.Sprintf("rank %d has taken what rank %d has sent", k, i), func() bool {
				return in.expected.Load() == p.out.next.Load() // the last one may have asked only
			})
			in.mu.Lock()
			if p.out.bytes.Load() != in.takenBytes.Load() || p.out.placedBytes.Load() != in.takenBytes.Load() {
				r.Errorf("rank %d has sent rank %d %d bytes, which has taken %d and told of %d", i, k, p.out.bytes.Load(), in.takenBytes.Load(), p.out.placedBytes.Load())
			}
			if p.out.placed.Load() > in.expected.Load() || in.told > in.expected.Load() || p.out.puts > p.out.placed.Load() || p.out.asked > p.out.next.Load() {
				r.Errorf("rank %d believes that rank %d has taken %d messages of %d, which has told of %d; puts are before %d, asked for was %d", i, k,
					p.out.placed.Load(), in.expected.Load(), in.told, p.out.puts, p.out.asked)
			}
			in.mu.Unlock()
		}
		if w.peers.lends() {
			r.Errorf("rank %d: memory is lent to the transport", i)
		}
		if n := w.Refused(); n > 0 {
			r.Errorf("rank %d has refused %d messages", i, n)
		}
	}
}
