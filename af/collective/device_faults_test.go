package collective

import (
	"context"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/kv"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/simgpu"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van/backend"
)

// TestServerRunsNoHandlers: a call of a server's rank runs none of the server's handlers on its own goroutine,
// regardless of the server's options.
func TestServerRunsNoHandlers(t *testing.T) {
	testcluster.Over(t, func(t *testing.T, o testcluster.Options) {
		o.Servers, o.Workers, o.Group = 1, 1, 2
		devs := []*simgpu.Device{simgpu.New(0), simgpu.New(1)}
		o.Backend = func(role string, r int) backend.Backend {
			if role != "server" {
				return nil
			}
			return devs[r]
		}
		c := testcluster.Start(t, o)
		var ran atomic.Bool
		for i, n := range c.Servers {
			s, err := af.NewServer(n, af.ServerOptions{})
			if err != nil {
				t.Fatal(err)
			}
			if err := s.Handle(func(b af.Batch) {
				if st := make([]byte, 1<<14); i == 0 && !ran.Load() && strings.Contains(string(st[:runtime.Stack(st, false)]), "startBehind") {
					ran.Store(true)
				}
				_ = b.Respond(nil)
			}); err != nil {
				t.Fatal(err)
			}
		}
		var comms [2]*Comm
		onAll(t, 2, func(r int) (err error) {
			comms[r], err = New(t.Context(), c.Servers[r], Options{Timeout: 20 * time.Second, Look: true})
			if err == nil {
				comms[r].b.polls = true
			}
			return err
		})
		defer onAll(t, 2, func(r int) error { return comms[r].Close() })
		stop := make(chan struct{})
		var wg sync.WaitGroup
		for _, n := range c.Workers {
			w, err := af.NewWorker(n, af.WorkerOptions{})
			if err != nil {
				t.Fatal(err)
			}
			wg.Go(func() {
				v := must(af.FromSlice(make([]float32, 8)))
				for {
					select {
					case <-stop:
						return
					default:
					}
					call, err := w.PushPull([]af.KeyTensor{{Key: 1, Val: v}}, nil)
					if err == nil {
						err = call.Wait(context.Background())
					}
					if err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
		defer wg.Wait()
		defer close(stop)
		at := []memory{{devs[0]}, {devs[1]}}
		for begun := time.Now(); time.Since(begun) < time.Second && !ran.Load(); {
			onAll(t, 2, func(r int) error { return wait(comms[r].AllGather(at[r].zeros(200), at[r].zeros(100), af.Complete)) })
		}
		if ran.Load() {
			t.Error("AllGather has run the server's handler on the caller's goroutine")
		}
	}, testcluster.TCP, testcluster.SHM)
}

// TestCallsRunNoHandlers: unless the options say so, a call runs no handlers, which may want a lock that its caller holds.
func TestCallsRunNoHandlers(t *testing.T) {
	var mu sync.Mutex
	dev := []memory{{simgpu.New(0)}, {simgpu.New(1)}}
	all, c := comms(t, testcluster.Options{Over: testcluster.SHM, Backend: func(role string, r int) backend.Backend {
		if role != "worker" {
			return nil
		}
		return dev[r].dev
	}}, 2)
	if _, err := kv.NewSimpleApp(c.Workers[0], kv.SimpleOptions{AppID: 3, CustomerID: 3, Handler: func(m kv.SimpleMessage) {
		mu.Lock()
		defer mu.Unlock()
		_ = m.Respond(nil)
	}}); err != nil {
		t.Fatal(err)
	}
	asks, err := kv.NewSimpleApp(c.Servers[0], kv.SimpleOptions{AppID: 3, CustomerID: 3})
	if err != nil {
		t.Fatal(err)
	}
	var stop atomic.Bool
	var wg sync.WaitGroup
	wg.Go(func() {
		for !stop.Load() {
			call, err := asks.Request(1, nil, postoffice.WorkerID(0))
			if err == nil {
				err = call.Wait(context.Background())
			}
			if err != nil {
				t.Error(err)
				return
			}
		}
	})
	for begun := time.Now(); time.Since(begun) < time.Second; {
		onAll(t, 2, func(r int) error {
			if r == 0 {
				mu.Lock()
			}
			op, err := all[r].AllGather(dev[r].zeros(200), dev[r].zeros(100), af.Complete)
			if r == 0 {
				mu.Unlock()
			}
			return wait(op, err)
		})
	}
	stop.Store(true)
	wg.Wait()
}

// TestOwnPartBehindClose: a call that has ended well gives its results also when the communicator is closed before Wait.
func TestOwnPartBehindClose(t *testing.T) {
	for _, early := range []bool{false, true} {
		all, at := onDevices(t, testcluster.Options{Over: testcluster.TCP}, 2)
		all[0].b.early, all[1].b.early = early, early
		out, in := at[0].zeros(200), at[0].zeros(100)
		copy(simgpu.Raw(in.Mem()), "rank 0")
		op, err := all[0].AllGather(out, in, af.Complete) // its poll ends before the other rank's call
		if err != nil {
			t.Fatal(err)
		}
		if err := wait(all[1].AllGather(at[1].zeros(200), at[1].zeros(100), af.Complete)); err != nil {
			t.Fatal(err)
		}
		onAll(t, 2, func(r int) error { return all[r].Barrier(t.Context()) })
		vantest.Eventually(t, 20*time.Second, "the call has ended on both ranks", op.o.Canceled)
		if err := all[0].Close(); err != nil {
			t.Fatal(err)
		}
		if err := op.Wait(t.Context()); err != nil {
			t.Error(err)
		} else if b := simgpu.Raw(out.Mem()); string(b[:6]) != "rank 0" {
			t.Errorf("early: %t: got %q", early, b[:6])
		}
	}
}
