package af_test

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// revoking is a van around another one that notes what is taken back.
type revoking struct {
	van.Van
	mu   sync.Mutex
	back []uint64
	gone int // the number of pulls in back whose memory had no holder any more
}

// Unwrap implements van.Wrapper.
func (v *revoking) Unwrap() van.Van { return v.Van }

// Invalidate implements van.Invalidator.
func (v *revoking) Invalidate(m backend.Mem) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.back = append(v.back, m.Addr())
	if h, ok := m.Owner().(*holder); ok && h.refs.Load() <= 0 {
		v.gone++
	}
}

// TestPullsAreRevoked: when a call has failed, no answer that is late may be written where it was wanted: all such memory
// is taken back before Wait returns, and before its owner may free it. Of a call that ends well nothing is.
func TestPullsAreRevoked(t *testing.T) {
	noted := &revoking{}
	c := testcluster.Start(t, testcluster.Options{Servers: 2, Wrap: func(role string, rank int, f van.Factory) van.Factory {
		if role != "worker" {
			return f
		}
		return func(o van.Options) (v van.Van, err error) {
			noted.Van, err = f(o)
			return noted, err
		}
	}})
	revoked := func() []uint64 {
		noted.mu.Lock()
		defer noted.mu.Unlock()
		return slices.Clone(noted.back)
	}
	serve(t, c.Servers[0], echoes(t))
	var silent atomic.Bool
	hold := make(chan af.Batch, 1)
	serve(t, c.Servers[1], func(b af.Batch) {
		if silent.Load() {
			hold <- b
			return
		}
		echoes(t)(b)
	})
	w := newWorker(t, c.Workers[0])
	works(t, w, 2)
	if l := revoked(); len(l) > 0 {
		t.Errorf("the memory of %d pulls of a call that has ended well is taken back", len(l))
	}
	silent.Store(true)
	var pulls []af.KeyTensor
	for range 2 {
		x, _ := heldTensor(t, make([]byte, 4))
		pulls = append(pulls, af.KeyTensor{Key: 2, Val: x})
	}
	call, err := w.PushPull([]af.KeyTensor{{Key: 1, Val: bytesOf(t, []byte("text"))}}, testcluster.PerServer(pulls, 2))
	if err != nil {
		t.Fatal(err)
	}
	b := <-hold // before the call is canceled: otherwise the cancellation may arrive first, and the handler never gets the batch
	defer b.Release()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	vantest.Fails(t, call.Wait(ctx), van.ErrTimeout)
	for i, p := range pulls {
		if !slices.Contains(revoked(), p.Val.Mem().Addr()) {
			t.Errorf("pull %d may still be written", i)
		}
	}
	noted.mu.Lock()
	defer noted.mu.Unlock()
	if noted.gone > 0 {
		t.Errorf("%d pulls were let go before they were taken back", noted.gone)
	}
}
