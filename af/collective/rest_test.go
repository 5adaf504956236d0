package collective

// The checks at the end of every test: no memory is lent, no goroutine waits, and objects for reuse hold nothing.

import (
	"testing"

	"github.com/stepaf/stepaf-go/tests/simgpu"
	"github.com/stepaf/stepaf-go/van/backend"
)

// lent counts the holds of the memory of most tests' tensors.
var lent simgpu.Holds

// atRest checks a communicator that is closed, or has no calls in flight.
func atRest(t *testing.T, c *Comm) {
	t.Helper()
	c.b.mu.Lock()
	defer c.b.mu.Unlock()
	l := &c.calls
	if l.sending != 0 || l.quiet != nil {
		t.Errorf("rank %d: %d parts are lent, or somebody waits for their return", c.b.self, l.sending)
	}
	for i, o := range l.window {
		if o != nil {
			t.Errorf("rank %d: call %d is in flight, at %d", c.b.self, o.seq, i)
		}
	}
	for r := range l.asked {
		for i := range l.asked[r] {
			if a := &l.asked[r][i]; a.kept {
				t.Errorf("rank %d: a request of rank %d for call %d waits", c.b.self, r, a.seq)
			}
		}
	}
	if c.b.closed && len(c.children.all) > 0 {
		t.Errorf("rank %d: %d children have not heard", c.b.self, len(c.children.all))
	}
	if c.b.joining || c.bootstrap.endRound != nil {
		t.Errorf("rank %d: a round is under way", c.b.self)
	}
	seen := map[*op]bool{}
	for _, o := range l.free {
		f := &o.reduction
		if seen[o] || o.refs != 0 || o.busy != 0 || !o.ended || o.begun && o.left.Load() != 0 {
			t.Errorf("rank %d: call %d may be used again, and has %d references, is busy %d times, ended %t, waits for %d, twice %t",
				c.b.self, o.seq, o.refs, o.busy, o.ended, o.left.Load(), seen[o])
		}
		if o.result != (result{}) || f.by != nil || f.scratch != nil || f.next != nil || o.waiter.work.Load() != nil || o.waiter.polls || o.device.copied != nil || o.device.err != nil {
			t.Errorf("rank %d: call %d may be used again, and holds something: %+v", c.b.self, o.seq, f)
		}
		for _, m := range append(o.receives.into[:len(o.receives.into):len(o.receives.into)], o.sends.parts...) {
			if m != (backend.Mem{}) {
				t.Errorf("rank %d: call %d may be used again, and holds memory", c.b.self, o.seq)
			}
		}
		seen[o] = true
	}
	if len(l.scratch) > maxScratch {
		t.Errorf("rank %d: %d pieces of memory for reductions are kept", c.b.self, len(l.scratch))
	}
}
