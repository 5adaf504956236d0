package collective

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// revoking is a van around another one that notes what is taken back.
type revoking struct {
	van.Van
	mu   sync.Mutex
	back []backend.Mem
}

func (v *revoking) Unwrap() van.Van { return v.Van }

// Invalidate implements van.Invalidator.
func (v *revoking) Invalidate(m backend.Mem) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.back = append(v.back, m)
}

// TestPartsAreRevoked: when a call has failed, no part that is late may be written where it was wanted: all such memory
// is taken back before Wait returns. Of a call that ends well nothing is.
func TestPartsAreRevoked(t *testing.T) {
	const n, size = 3, 8
	noted := &revoking{}
	all, _ := comms(t, testcluster.Options{Wrap: func(role string, rank int, f van.Factory) van.Factory {
		if role != "worker" || rank != 0 {
			return f
		}
		return func(o van.Options) (v van.Van, err error) {
			noted.Van, err = f(o)
			return noted, err
		}
	}}, n)
	onAll(t, n, func(r int) error { return wait(all[r].AllGather(zeros(n*size), zeros(size))) })
	revoked := func() []backend.Mem {
		noted.mu.Lock()
		defer noted.mu.Unlock()
		return slices.Clone(noted.back)
	}
	if l := revoked(); len(l) > 0 {
		t.Errorf("%d parts of a call that has ended well are taken back", len(l))
	}
	out := zeros(n * size)
	op, err := all[0].AllGather(out, zeros(size)) // which no other rank calls
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := op.Wait(ctx); !errors.Is(err, van.ErrTimeout) {
		t.Fatalf("%v, want %v", err, van.ErrTimeout)
	}
	mem := out.Mem()
	for r := 1; r < n; r++ {
		if part := mem.Sub(r*size, size); !slices.ContainsFunc(revoked(), func(m backend.Mem) bool { return m.Addr() == part.Addr() && m.Len() == part.Len() }) {
			t.Errorf("the part of rank %d may still be written", r)
		}
	}
}
