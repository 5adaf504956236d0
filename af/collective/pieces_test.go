package collective

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"runtime"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van/backend"
)

// TestFoldInPieces: a reduction in pieces has the same result as the reduction of the whole, for every length.
func TestFoldInPieces(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	random := func(n int) []byte {
		b := make([]byte, n)
		for i := range b {
			b[i] = byte(rng.Uint32())
		}
		return b
	}
	for _, n := range []int{8, pieceBytes - 8, pieceBytes, pieceBytes + 8, 2*pieceBytes + 24} {
		f := &reduction{by: numbers[int64]()[Sum]}
		a, b, got, want := random(n), random(n), random(n), make([]byte, n)
		f.by(backend.Slice(want), backend.Slice(a), backend.Slice(b))
		f.fold(backend.Slice(got), backend.Slice(a), backend.Slice(b))
		if !bytes.Equal(got, want) {
			t.Errorf("%d bytes: the reduction in pieces differs from the whole", n)
		}
	}
}

// TestReductionAfterBegin: the reduction of a call does not start before begin has ended, also if no other rank sends a part.
// Otherwise the reduction could end the use of the call before begin has recorded its request, which nobody would wait for.
func TestReductionAfterBegin(t *testing.T) {
	all, _ := comms(t, testcluster.Options{}, 1)
	c, seen := all[0], false
	c.b.customer.OnUnreported(func(n int) { // called by begin when the request has ended
		if n == 0 || seen {
			return
		}
		seen = true
		c.b.mu.Lock()
		defer c.b.mu.Unlock()
		if o := c.calls.window[0]; o == nil || o.left.Load() == 0 {
			t.Error("the reduction may start while begin runs")
		}
	})
	x := filled(reduceWhole, 1)
	op, err := c.AllReduce(x, x, Sum)
	if err == nil {
		err = op.Wait(t.Context())
	}
	if err != nil || !seen {
		t.Errorf("%v; a request has ended: %t", err, seen)
	}
}

// TestFailureWhileBegun: if the communicator fails while begin opens the request of the first call of a large AllReduce, the use of
// the call ends after begin has recorded the request. Otherwise nobody would wait for the request, which keeps the call.
func TestFailureWhileBegun(t *testing.T) {
	for range 20 {
		all, _ := comms(t, testcluster.Options{}, 1)
		c, failed := all[0], errors.New("a failure")
		c.b.customer.OnUnreported(func(n int) { // called by begin when the request has ended
			if n > 0 {
				c.fail(failed)
				for range 100 {
					runtime.Gosched() // the use of the call may end
				}
			}
		})
		x := filled(reduceWhole, 1)
		op, err := c.AllReduce(x, x, Sum)
		if err == nil {
			err = op.Wait(t.Context())
		}
		vantest.Fails(t, err, failed)
		vantest.Eventually(t, 5*time.Second, "both calls are free", func() bool {
			c.b.mu.Lock()
			defer c.b.mu.Unlock()
			return len(c.calls.free) == 2
		})
		_ = c.Close()
	}
}
