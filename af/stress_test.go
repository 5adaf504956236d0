package af_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/env"
)

var stress = flag.Duration("stress", time.Second/2, "how long TestStress runs for each transport and way of waiting")

// TestStress: many goroutines of two workers push and pull, wait, wait in slices, cancel, and abandon requests,
// and every answer is the right one. Then nothing is left in flight.
func TestStress(t *testing.T) {
	for _, mode := range []env.BusyPoll{env.SpinThenBlock, env.AlwaysBlock, env.SpinForever} {
		testcluster.Over(t, func(t *testing.T, o testcluster.Options) {
			t.Run(fmt.Sprint(mode), func(t *testing.T) { testStress(t, mode, o) })
		}, testcluster.TCP, testcluster.SHM)
	}
}

func testStress(t *testing.T, mode env.BusyPoll, o testcluster.Options) {
	const servers, goroutines = 2, 8
	o.Workers, o.Servers, o.Set = 2, servers, func(c *postoffice.Config) { c.BusyPoll = mode }
	c := testcluster.Start(t, o)
	var later sync.WaitGroup
	for _, n := range c.Servers {
		serve(t, n, func(b af.Batch) {
			answer := func() {
				out := make([]af.KeyTensor, len(b.Pulls()))
				for i, p := range b.Pulls() {
					out[i] = af.KeyTensor{Key: p.Key, Val: b.Pushes()[0].Val}
				}
				if err := b.Respond(out, af.ByKey); err != nil {
					t.Error(err)
				}
			}
			if rand.IntN(4) == 0 {
				later.Go(answer)
				return
			}
			answer()
		})
	}
	var done, gaveUp atomic.Int64
	end := time.Now().Add(*stress)
	var all sync.WaitGroup
	var ws []*af.Worker
	for _, n := range c.Workers {
		w := newWorker(t, n)
		ws = append(ws, w)
		for g := range goroutines {
			all.Go(func() {
				for i := 0; time.Now().Before(end) && !t.Failed(); i++ {
					ok, err := stressOne(t, w, servers, uint64(g)<<32|uint64(i))
					if err != nil {
						t.Error(err)
					}
					if ok {
						done.Add(1)
					} else {
						gaveUp.Add(1)
					}
				}
			})
		}
	}
	all.Wait()
	for _, w := range ws {
		if n := w.Customer().InFlight(); n > 0 {
			t.Errorf("%d push_pulls in flight, want 0", n)
		}
		works(t, w, servers)
	}
	later.Wait() // no more are added: canceled requests have arrived before those of works
	t.Logf("%d answered, %d given up", done.Load(), gaveUp.Load())
}

// stressOne makes one push_pull and waits for it, or gives it up.
func stressOne(t *testing.T, w *af.Worker, servers int, mark uint64) (answered bool, err error) {
	size := 8
	if rand.IntN(3) == 0 {
		size = 8 << rand.IntN(13)
	}
	data := bytes.Repeat(binary.LittleEndian.AppendUint64(nil, mark), size/8)
	push := []af.KeyTensor{{Key: 1, Val: bytesOf(t, data)}}
	if rand.IntN(2) == 0 {
		push = append(push, af.KeyTensor{Key: 2, Val: bytesOf(t, make([]byte, 100))})
	}
	var pull []af.KeyTensor
	for range servers {
		pull = append(pull, af.KeyTensor{Key: 3, Val: bytesOf(t, make([]byte, size))})
	}
	h, err := w.PushPull(push, testcluster.PerServer(pull, servers))
	if err != nil {
		return false, err
	}
	switch rand.IntN(4) {
	case 0:
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(rand.IntN(400))*time.Microsecond)
		defer cancel()
		if err := h.Wait(ctx); errors.Is(err, van.ErrTimeout) {
			return false, nil
		} else if err != nil {
			return false, err
		}
	case 1:
		slice := time.Duration(1+rand.IntN(300)) * time.Microsecond
		for err = postoffice.ErrPending; errors.Is(err, postoffice.ErrPending); {
			err = cluster.Call(h).Customer().WaitSlice(t.Context(), h.Timestamp(), 20*time.Second, slice)
		}
		if err != nil {
			return false, err
		}
	default:
		if err := h.Wait(t.Context()); err != nil {
			return false, err
		}
	}
	for s := range pull {
		if !bytes.Equal(pull[s].Val.Bytes(), data) {
			return false, fmt.Errorf("handler %d: the answer of server %d is another one's", h.Timestamp(), s)
		}
	}
	return true, nil
}
