package kv_test

import (
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/kv"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/van"
)

// TestAllocations counts the allocations of a whole push and pull, at the worker,
// the server, and the transport.
func TestAllocations(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector makes pools forget")
	}
	vans(t, func(t *testing.T, o testcluster.Options) {
		c := testcluster.Start(t, o)
		sums[float32](t, c)
		w := newWorker[float32](t, c.Workers[0])
		keys := make([]kv.Key, 1000)
		for i := range keys {
			keys[i] = kv.Key(i * 3)
		}
		vals, got := make([]float32, 4000), make([]float32, 4000)
		do(t, w)(w.Push(keys, vals, kv.NoCopy))
		var grown []float32
		lens, into := slices.Repeat([]int32{4}, 1000), make([]int32, 1000)
		n, limit, finished := int32(700), 20*time.Second, 0
		done := func(error) { finished++ }
		for name, f := range map[string]func() (kv.Call, error){
			"Push NoCopy": func() (kv.Call, error) { return w.Push(keys, vals, kv.NoCopy) },
			"Pull NoCopy": func() (kv.Call, error) { return w.Pull(keys, &got, kv.NoCopy) },
			"Push options": func() (kv.Call, error) {
				return w.Push(keys, vals, kv.Lens(lens), kv.Cmd(n), kv.Done(done), kv.Within(limit))
			},
			"Pull options": func() (kv.Call, error) {
				return w.Pull(keys, &got, kv.LensInto(&into), kv.Cmd(n), kv.Done(done), kv.Within(limit))
			},
			"Push":         func() (kv.Call, error) { return w.Push(keys, vals) },
			"Pull":         func() (kv.Call, error) { return w.Pull(keys, &got) },
			"Pull resized": func() (kv.Call, error) { grown = grown[:0]; return w.Pull(keys, &grown) },
		} {
			once := func() { do(t, w)(f()) }
			for range 100 {
				once()
			}
			if n := testing.AllocsPerRun(1000, once); n > 0 {
				t.Errorf("%s: %g allocations", name, n)
			}
		}
		c.Finalize(t)
	})
}

// TestConcurrent has many goroutines use one worker, over both ways to wait.
func TestConcurrent(t *testing.T) {
	vans(t, func(t *testing.T, o testcluster.Options) {
		o.Workers, o.Servers = 2, 2
		c := testcluster.Start(t, o)
		sums[int64](t, c)
		const users, rounds = 6, 50
		var wg sync.WaitGroup
		for _, n := range c.Workers {
			w := newWorker[int64](t, n)
			for u := range users {
				wg.Go(func() {
					mine := []kv.Key{kv.Key(int(n.ID())*100 + u), 1 << 62, maxKey - kv.Key(int(n.ID())*100+u), maxKey}
					for round := range int64(rounds) {
						done := make(chan error, 1)
						if _, err := w.Push(mine, []int64{1, 1, 1, 1}, kv.Done(func(err error) { done <- err })); err != nil {
							t.Error(err)
							return
						}
						if err := <-done; err != nil {
							t.Error(err)
						}
						var got []int64
						ts, err := w.Pull(mine, &got)
						if err == nil {
							err = ts.Wait(t.Context())
						}
						if err != nil || got[0] != round+1 || got[2] != round+1 || got[1] <= round || got[3] <= round {
							t.Errorf("round %d: %v %v", round, got, err)
							return
						}
					}
				})
			}
		}
		wg.Wait()
		w := secondWorker[int64](t, c.Workers[0])
		var got []int64
		do(t, w)(w.Pull([]kv.Key{1 << 62, maxKey}, &got))
		if want := int64(2 * users * rounds); !slices.Equal(got, []int64{want, want}) {
			t.Errorf("shared keys have %v, want %d", got, want)
		}
		c.Finalize(t)
	})
}

// BenchmarkLoopback pushes and pulls 2^20 keys of 16 float32 in batches; compare
// with BenchmarkTCP.
func BenchmarkLoopback(b *testing.B) {
	const n, k = 1 << 20, 16
	for _, per := range []int{1 << 12, 1 << 14, 1 << 16} {
		for _, pull := range []bool{false, true} {
			b.Run(fmt.Sprintf("batch=%d/pull=%t", per, pull), func(b *testing.B) {
				c := testcluster.Start(b, testcluster.Options{Over: testcluster.TCP})
				sums[float32](b, c)
				w := newWorker[float32](b, c.Workers[0])
				keys, vals := make([]kv.Key, n), make([]float32, n*k)
				for i := range keys {
					keys[i] = kv.Key(i) * 5
				}
				var inFlight []kv.Call
				all := func(pull bool) {
					for i := 0; i < n; i += per {
						part := vals[i*k : (i+per)*k]
						var ts kv.Call
						var err error
						if pull {
							ts, err = w.Pull(keys[i:i+per], &part, kv.NoCopy)
						} else {
							ts, err = w.Push(keys[i:i+per], part, kv.NoCopy)
						}
						if err != nil {
							b.Fatal(err)
						}
						if inFlight = append(inFlight, ts); len(inFlight) >= 8 {
							do(b, w)(inFlight[0], nil)
							inFlight = inFlight[1:]
						}
					}
					for _, ts := range inFlight {
						do(b, w)(ts, nil)
					}
					inFlight = inFlight[:0]
				}
				all(false)
				b.SetBytes(n * (8 + 4*k))
				b.ReportAllocs()
				for b.Loop() {
					all(pull)
				}
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/n, "ns/key")
				b.StopTimer()
				c.Finalize(b)
			})
		}
	}
}

// BenchmarkTCP is what the loopback carries in one stream.
func BenchmarkTCP(b *testing.B) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	defer l.Close()
	const chunk, total = 1 << 18, 72 << 20
	ack := make(chan struct{})
	go func() {
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		buf := make([]byte, chunk)
		for {
			for range total / chunk {
				if _, err := io.ReadFull(c, buf); err != nil {
					return
				}
			}
			ack <- struct{}{}
		}
	}()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		b.Fatal(err)
	}
	defer c.Close()
	buf := make([]byte, chunk)
	b.SetBytes(total)
	for b.Loop() {
		for range total / chunk {
			if _, err := c.Write(buf); err != nil {
				b.Fatal(err)
			}
		}
		<-ack
	}
}

// TestFlood makes 100000 requests as fast as it can, without a window. Requests that the transport cannot queue
// fail with van.ErrQueueFull; the others are counted exactly.
func TestFlood(t *testing.T) {
	vans(t, func(t *testing.T, o testcluster.Options) {
		// The answer to a heartbeat waits behind megabytes: for more than the usual 10 s where the processor is short.
		o.Set = func(c *postoffice.Config) { c.HeartbeatTimeout = 5 * time.Minute }
		c := testcluster.Start(t, o)
		sums[int64](t, c)
		w := newWorker[int64](t, c.Workers[0])
		const total = 12_000 // several times the number of finished requests that a worker remembers
		var wg sync.WaitGroup
		var ok, full atomic.Int64
		wg.Add(total)
		for range total {
			if _, err := w.Push([]kv.Key{1}, []int64{1}, kv.Done(func(err error) {
				switch {
				case err == nil:
					ok.Add(1)
				case errors.Is(err, van.ErrQueueFull):
					full.Add(1)
				default:
					t.Error(err)
				}
				wg.Done()
			})); err != nil {
				t.Fatal(err)
			}
		}
		wg.Wait()
		t.Logf("%d pushed, %d refused", ok.Load(), full.Load())
		var got []int64
		do(t, w)(w.Pull([]kv.Key{1}, &got))
		if ok.Load()+full.Load() != total || got[0] != ok.Load() {
			t.Errorf("sum %d of %d accepted and %d refused pushes, want %d in all", got[0], ok.Load(), full.Load(), total)
		}
		if n := testcluster.InFlight(c.Workers[0]); n > 4096 {
			t.Errorf("%d requests remembered, want at most 4096", n)
		}
		c.Finalize(t)
	})
}

// TestResend loses messages and repeats them: every push counts once.
func TestResend(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{Servers: 2, Set: func(cfg *postoffice.Config) {
		cfg.Resend, cfg.ResendTimeout, cfg.DropMsg = true, 100*time.Millisecond, 10
	}})
	sums[int64](t, c)
	w := newWorker[int64](t, c.Workers[0])
	keys := []kv.Key{1, maxKey}
	got := make([]int64, 2)
	for i := range int64(60) {
		do(t, w)(w.Push(keys, []int64{1, 2}, kv.NoCopy))
		do(t, w)(w.Pull(keys, &got, kv.NoCopy))
		if !slices.Equal(got, []int64{i + 1, 2 * (i + 1)}) {
			t.Fatalf("round %d: %v", i, got)
		}
	}
}
