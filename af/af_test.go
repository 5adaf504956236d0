package af_test

import (
	"fmt"
	"sync"
	"testing"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/tests/testcluster"
)

func tensor(t testing.TB, s []float32, shape ...int64) af.Tensor {
	t.Helper()
	x, err := af.FromSlice(s, shape...)
	if err != nil {
		t.Fatal(err)
	}
	return x
}

// all are the transports that need no device.
var all = []testcluster.Transport{testcluster.InProc, testcluster.TCP, testcluster.SHM}

func TestPushPull(t *testing.T) {
	testcluster.Over(t, func(t *testing.T, o testcluster.Options) {
		o.Workers, o.Servers = 2, 2
		c := testcluster.Start(t, o)
		for _, n := range c.Servers {
			s, err := af.NewServer(n, af.ServerOptions{})
			if err != nil {
				t.Fatal(err)
			}
			rank := float32(n.Rank() + 1)
			err = s.Handle(func(b af.Batch) {
				sum := make([]float32, 8)
				for _, p := range b.Pushes() {
					v, err := af.Slice[float32](p.Val)
					if err != nil {
						t.Error(err)
					}
					for i := range v {
						sum[i] += v[i] * rank
					}
				}
				var out []af.KeyTensor
				for _, p := range b.Pulls() {
					out = append(out, af.KeyTensor{Key: p.Key, Val: tensor(t, sum, 2, 4)})
				}
				if err := b.Respond(out, af.ByKey); err != nil {
					t.Error(err)
				}
			})
			if err != nil {
				t.Fatal(err)
			}
		}
		for _, n := range c.Workers {
			w, err := af.NewWorker(n, af.WorkerOptions{})
			if err != nil {
				t.Fatal(err)
			}
			a, b := make([]float32, 8), make([]float32, 8)
			for round := range 100 {
				for i := range a {
					a[i], b[i] = float32(i+round), float32(10*i)
				}
				out := [2][]float32{make([]float32, 8), make([]float32, 8)}
				h, err := w.PushPull(
					[]af.KeyTensor{{Key: 1, Val: tensor(t, a, 8)}, {Key: 2, Val: tensor(t, b, 8)}},
					[][]af.KeyTensor{{{Key: 3, Val: tensor(t, out[0], 8)}}, {{Key: 3, Val: tensor(t, out[1], 8)}}})
				if err != nil {
					t.Fatal(err)
				}
				if err := h.Wait(t.Context()); err != nil {
					t.Fatal(err)
				}
				for s := range out {
					for i, got := range out[s] {
						if want := (a[i] + b[i]) * float32(s+1); got != want {
							t.Fatalf("round %d server %d element %d: got %g, want %g", round, s, i, got, want)
						}
					}
				}
				x := h.Traces()[2]
				req, res := x.Request, x.Response
				if !(req.Start <= req.PostSend && req.PostSend <= req.PostRecv && req.PostRecv <= req.Process &&
					res.Start <= res.PostSend && res.PostSend <= res.PostRecv && res.PostRecv <= res.Process && req.Start > 0 && res.Start >= req.Process) {
					t.Fatalf("trace %+v", x)
				}
			}
		}
		c.Finalize(t)
	}, all...)
}

// TestPipeline keeps several batches in flight and waits for them in order, on two goroutines. Every answer must
// be delivered, also one that arrives while no goroutine waits for it.
func TestPipeline(t *testing.T) {
	const flight = 6
	rounds := 2500
	if testing.Short() {
		rounds = 500
	}
	testcluster.Over(t, func(t *testing.T, o testcluster.Options) {
		o.Servers = 2
		c := testcluster.Start(t, o)
		for _, n := range c.Servers {
			s, err := af.NewServer(n, af.ServerOptions{})
			if err != nil {
				t.Fatal(err)
			}
			if err := s.Handle(func(b af.Batch) {
				v, err := af.Slice[float32](b.Pushes()[0].Val)
				if err != nil {
					t.Error(err)
				}
				out := append([]float32(nil), v...)
				if err := b.Respond([]af.KeyTensor{{Key: b.Pulls()[0].Key, Val: tensor(t, out)}}, af.ByKey); err != nil {
					t.Error(err)
				}
			}); err != nil {
				t.Fatal(err)
			}
		}
		w, err := af.NewWorker(c.Workers[0], af.WorkerOptions{})
		if err != nil {
			t.Fatal(err)
		}
		type slot struct {
			h   af.Call
			in  []float32
			out [2][]float32
		}
		wait := func(s *slot) error {
			if err := s.h.Wait(t.Context()); err != nil {
				return err
			}
			for k := range s.out {
				if s.out[k][0] != s.in[0] || s.out[k][63] != s.in[63] {
					return fmt.Errorf("server %d: got %g, want %g", k, s.out[k][0], s.in[0])
				}
			}
			return nil
		}
		var wg sync.WaitGroup
		for g := range 2 {
			wg.Go(func() {
				var slots [flight]*slot
				for r := range rounds {
					s := slots[r%flight]
					if s == nil {
						s = &slot{in: make([]float32, 64), out: [2][]float32{make([]float32, 64), make([]float32, 64)}}
						slots[r%flight] = s
					} else if err := wait(s); err != nil {
						t.Errorf("round %d: %v", r, err)
						return
					}
					for i := range s.in {
						s.in[i] = float32(r + i)
					}
					key := uint64(g<<8 | r%flight)
					var err error
					if s.h, err = w.PushPull([]af.KeyTensor{{Key: key, Val: tensor(t, s.in)}},
						[][]af.KeyTensor{{{Key: key, Val: tensor(t, s.out[0])}}, {{Key: key, Val: tensor(t, s.out[1])}}}); err != nil {
						t.Error(err)
						return
					}
				}
				for _, s := range slots {
					if err := wait(s); err != nil {
						t.Error(err)
					}
				}
			})
		}
		wg.Wait()
		c.Finalize(t)
	}, testcluster.TCP, testcluster.SHM)
}
