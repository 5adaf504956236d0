package window

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/van"
)

// TestStories: any puts, signals, waits and flushes of all ranks, to themselves as well, against a model of the
// pending signals and of each rank's memory. From time to time everything is flushed, and all memory and all
// accounts are compared.
func TestStories(t *testing.T) {
	transports(t, func(t *testing.T, o testcluster.Options) {
		const n, room, signals = 3, 5000, 2
		r := newRig(t, o, n, Options{Size: n * room, Signals: signals})
		rng := rand.New(rand.NewPCG(7, uint64(len(t.Name()))))
		var there [n][]byte          // the expected contents of each rank's memory
		var count [n][n][signals]int // signals that have not been taken, by sender and receiver
		for i := range there {
			there[i] = make([]byte, n*room)
		}
		ctx := t.Context()
		for step := range 600 {
			from, to, signal := rng.IntN(n), rng.IntN(n), rng.IntN(signals)
			w := r.windows[from]
			var err error
			switch what := rng.IntN(8); what {
			case 0, 1, 2, 3:
				size := []int{0, 1, 100, 4096, 4999, 5000}[rng.IntN(6)]
				at := from*room + rng.IntN(room-size+1)
				b := content(size, rng.Uint64())
				copy(there[to][at:], b)
				if what < 2 {
					err = w.Put(ctx, to, at, tensor(b))
				} else {
					count[from][to][signal]++
					err = w.PutSignal(ctx, to, at, tensor(b), signal)
				}
			case 4:
				count[from][to][signal]++
				err = w.Signal(ctx, to, signal)
			case 5, 6:
				at := r.windows[to]
				if count[from][to][signal] == 0 {
					short, cancel := context.WithTimeout(ctx, time.Millisecond)
					if late := at.WaitSignal(short, from, signal); !errors.Is(late, van.ErrTimeout) {
						t.Fatalf("step %d: a signal of rank %d that there is not came to rank %d: %v", step, from, to, late)
					}
					cancel()
					continue
				}
				count[from][to][signal]--
				err = at.WaitSignal(ctx, from, signal)
			case 7:
				err = w.Flush(ctx, to)
			}
			if err != nil {
				t.Fatalf("step %d: %v", step, err)
			}
			if step%60 > 0 {
				continue
			}
			r.settled()
			for i, w := range r.windows {
				w.peers[(i+1)%n].in.mu.Lock() // the writers there held these
				w.peers[(i+2)%n].in.mu.Lock()
				if !bytes.Equal(w.Bytes(), there[i]) {
					t.Fatalf("step %d: the memory of rank %d is wrong", step, i)
				}
				w.peers[(i+1)%n].in.mu.Unlock()
				w.peers[(i+2)%n].in.mu.Unlock()
				for from := range n {
					for k := range signals {
						if got := int(w.peers[from].in.signals[k].Load()); got != count[from][i][k] {
							t.Fatalf("step %d: rank %d has %d of signal %d of rank %d, want %d", step, i, got, k, from, count[from][i][k])
						}
					}
				}
			}
		}
	})
}
