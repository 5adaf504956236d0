package replay

import (
	"context"
	"fmt"
	"math"
	"slices"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/kv"
	"github.com/stepaf/stepaf-go/postoffice"
)

// script is the work of the applications of a session between the barrier over
// workers and servers and the end.
type script struct {
	// serve sets a server up.
	serve func(r *run, n *postoffice.Node) error
	// work sets a worker up and returns its actions in order.
	work func(r *run, n *postoffice.Node) ([]action, error)
}

type action func(ctx context.Context) error

// scripts are the sessions' scripts.
var scripts = map[string]script{
	"s1w1_batch":     tensors(batches{{2, 1}}, small, 1000),
	"s2w2_batch":     tensors(batches{{2, 1}}, small, 1000),
	"group2_batch":   tensors(batches{{2, 1}}, small, 1000),
	"s2w2_norank":    tensors(batches{{2, 1}}, small, 0),
	"s1w1_kinds":     tensors(batches{{1, 0}, {0, 1}, {1, 1}, {2, 0}, {0, 2}, {3, 2}}, small, 0),
	"s1w1_big":       tensors(batches{{1, 1}}, big, 0),
	"s1w1_resend":    tensors(batches{{2, 1}}, small, 0),
	"s1w1_trace":     tensors(batches{{2, 1}}, small, 0),
	"s1w1_kv":        {serveSums, pushPullKeys},
	"s2w1_kv":        {serveSums, pushPullKeys},
	"s1w1_simple":    {serveSimple, askServers},
	"s2w1_simple":    {serveSimple, askServers},
	"s1w1_heartbeat": {func(*run, *postoffice.Node) error { return nil }, func(*run, *postoffice.Node) ([]action, error) { return nil, nil }},
}

// batches are calls of PushPull: the numbers of push tensors and of pull
// tensors for each server.
type batches [][2]int

// shapes are those of the first push tensor, the others, and pull tensors.
type shapes struct{ first, more, pull []int64 }

var (
	small = shapes{[]int64{2, 8}, []int64{4, 4, 8}, []int64{3, 5}}
	big   = shapes{first: []int64{64, 1024}, pull: []int64{64, 1024}}
)

// pushed is push tensor i of a worker, preset to the recorded values.
func (s *shapes) pushed(i int) (af.Tensor, error) {
	if i == 0 {
		return filled(1, s.first)
	}
	return filled(2, s.more)
}

// pullKey is the key of pull tensor i at a server; its answer is 0.5 + i.
func pullKey(worker, server, i int) uint64 { return uint64(worker + 200 + 10*server + i) }

func filled(x float32, shape []int64) (af.Tensor, error) {
	n := int64(1)
	for _, d := range shape {
		n *= d
	}
	return af.FromSlice(slices.Repeat([]float32{x}, int(n)), shape...)
}

// tensors is the script of a session with tensors. Keys of worker r begin at
// offset*r.
func tensors(calls batches, s shapes, offset int) script {
	return script{
		serve: func(r *run, n *postoffice.Node) error {
			server, err := af.NewServer(n, af.ServerOptions{})
			if err != nil {
				return err
			}
			return server.Handle(func(b af.Batch) {
				if err := s.answer(b); err != nil {
					r.t.Error(err)
				}
			})
		},
		work: func(r *run, n *postoffice.Node) ([]action, error) {
			w, err := af.NewWorker(n, af.WorkerOptions{})
			if err != nil {
				return nil, err
			}
			var actions []action
			for _, c := range calls {
				actions = append(actions, func(ctx context.Context) error {
					return s.pushPull(ctx, w, n.Topology().NumServers, offset*n.Rank(), c[0], c[1])
				})
			}
			return actions, nil
		},
	}
}

// answer checks the pushes of a worker and answers its pulls.
func (s *shapes) answer(b af.Batch) error {
	for i, p := range b.Pushes() {
		want, err := s.pushed(i)
		if err != nil {
			return err
		}
		if err := equal(p.Val, want); err != nil || p.Key%1000 != uint64(100+i) {
			return fmt.Errorf("push %d with key %d: %w", i, p.Key, err)
		}
	}
	var out []af.KeyTensor
	for _, p := range b.Pulls() {
		t, err := filled(0.5+float32(p.Key%10), p.Shape)
		if err != nil {
			return err
		}
		out = append(out, af.KeyTensor{Key: p.Key, Val: t})
	}
	return b.Respond(out, af.ByKey)
}

// pushPull makes one call and checks its pull tensors.
func (s *shapes) pushPull(ctx context.Context, w *af.Worker, servers, keys, push, pull int) error {
	var pushes []af.KeyTensor
	pulls := make([][]af.KeyTensor, servers)
	for i := range push {
		t, err := s.pushed(i)
		if err != nil {
			return err
		}
		pushes = append(pushes, af.KeyTensor{Key: uint64(keys + 100 + i), Val: t})
	}
	for server := range servers {
		for i := range pull {
			t, err := filled(-1, s.pull)
			if err != nil {
				return err
			}
			pulls[server] = append(pulls[server], af.KeyTensor{Key: pullKey(keys, server, i), Val: t})
		}
	}
	h, err := w.PushPull(pushes, pulls)
	if err != nil {
		return err
	}
	if err := h.Wait(ctx); err != nil {
		return err
	}
	for k, p := range slices.Concat(pulls...) {
		want, err := filled(0.5+float32(k%pull), s.pull)
		if err == nil {
			err = equal(p.Val, want)
		}
		if err != nil {
			return fmt.Errorf("pulled key %d: %w", p.Key, err)
		}
	}
	return nil
}

func equal(got, want af.Tensor) error {
	if got.String() != want.String() {
		return fmt.Errorf("tensor %s, want %s", got.String(), want.String())
	}
	if g, w := got.Bytes(), want.Bytes(); !slices.Equal(g, w) {
		return fmt.Errorf("values %.32x..., want %.32x...", g, w)
	}
	return nil
}

func serveSums(r *run, n *postoffice.Node) error {
	s, err := kv.NewServer[float32](n, kv.ServerOptions{})
	if err != nil {
		return err
	}
	return s.Handle(new(kv.SummingHandler[float32]).Handle)
}

func pushPullKeys(_ *run, n *postoffice.Node) ([]action, error) {
	w, err := kv.NewWorker[float32](n, kv.WorkerOptions{})
	if err != nil {
		return nil, err
	}
	keys, vals, want := []kv.Key{1, 3}, []float32{1.5, 2.5}, []float32{1.5, 11.5}
	if n.Topology().NumServers == 2 { // a key of the second one
		keys, vals, want = append(keys, math.MaxUint64/2+5), append(vals, 3.5), append(want, 3.5)
	}
	wait := func(ctx context.Context, call kv.Call, err error) error {
		if err != nil {
			return err
		}
		return call.Wait(ctx)
	}
	return []action{
		func(ctx context.Context) error {
			ts, err := w.Push(keys, vals, kv.NoCopy)
			return wait(ctx, ts, err)
		},
		func(ctx context.Context) error {
			ts, err := w.Push([]kv.Key{3}, []float32{9}, kv.NoCopy)
			return wait(ctx, ts, err)
		},
		func(ctx context.Context) error {
			got := make([]float32, len(keys))
			ts, err := w.Pull(keys, &got, kv.NoCopy)
			if err := wait(ctx, ts, err); err != nil {
				return err
			}
			if !slices.Equal(got, want) {
				return fmt.Errorf("pulled %v, want %v", got, want)
			}
			return nil
		},
	}, nil
}

// simpleID is application and customer id of the simple application.
const simpleID = 7

func serveSimple(r *run, n *postoffice.Node) error {
	_, err := kv.NewSimpleApp(n, kv.SimpleOptions{AppID: simpleID, CustomerID: simpleID, Handler: func(d kv.SimpleMessage) {
		if d.Head != 42 || string(d.Body) != "hello" {
			r.t.Errorf("request %d %q, want 42 hello", d.Head, d.Body)
		}
		if err := d.Respond(append([]byte("re:"), d.Body...)); err != nil {
			r.t.Error(err)
		}
	}})
	return err
}

func askServers(_ *run, n *postoffice.Node) ([]action, error) {
	a, err := kv.NewSimpleApp(n, kv.SimpleOptions{AppID: simpleID, CustomerID: simpleID})
	if err != nil {
		return nil, err
	}
	answers := make(chan kv.SimpleMessage, n.Topology().NumServers)
	a.OnAnswer(func(d kv.SimpleMessage) { answers <- d })
	return []action{func(ctx context.Context) error {
		ts, err := a.Request(42, []byte("hello"), postoffice.ServerGroup)
		if err != nil {
			return err
		}
		if err := ts.Wait(ctx); err != nil {
			return err
		}
		for range n.Topology().NumServers {
			if d := <-answers; d.Head != 42 || string(d.Body) != "re:hello" {
				return fmt.Errorf("answer %d %q, want 42 re:hello", d.Head, d.Body)
			}
		}
		return nil
	}}, nil
}
