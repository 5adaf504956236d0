package af_test

import (
	"bytes"
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
)

// shared allocates a tensor of n bytes in shared memory, of which each is b.
func shared(t testing.TB, n int, b byte) af.Tensor {
	t.Helper()
	x, free, err := af.AllocShared(af.Uint8, int64(n))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(free)
	fill(x.Bytes(), b)
	return x
}

// pair makes a worker and a server.
func pair(t testing.TB, c *testcluster.Cluster) (*af.Worker, *af.Server) {
	t.Helper()
	w, err := af.NewWorker(c.Workers[0], af.WorkerOptions{})
	if err != nil {
		t.Fatal(err)
	}
	s, err := af.NewServer(c.Servers[0], af.ServerOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return w, s
}

// mapsMemory is a cluster through shared memory whose server maps the tensors of its workers.
func mapsMemory(t testing.TB) *testcluster.Cluster {
	return testcluster.Start(t, testcluster.Options{Over: testcluster.SHM, Set: func(c *postoffice.Config) { c.SHMMap = true }})
}

// isAll reports whether each byte of x is b.
func isAll(x af.Tensor, b byte) bool { return bytes.Count(x.Bytes(), []byte{b}) == x.Len() }

// TestSharedTensors: a pushed tensor in shared memory is the server's input without a copy, and the server computes the answer in the
// memory of the worker's pull tensor. Without STEPAF_SHM_MAP the same program copies. Tensors in other memory, short ones, and pushes
// without a pull are copied.
func TestSharedTensors(t *testing.T) {
	for name, maps := range map[string]bool{"mapped": true, "not mapped": false} {
		t.Run(name, func(t *testing.T) {
			c := testcluster.Start(t, testcluster.Options{Over: testcluster.SHM, Set: func(c *postoffice.Config) { c.SHMMap = maps }})
			w, s := pair(t, c)
			const n = 1 << 20
			var in, ordinary, short []byte
			handled := make(chan bool, 1)
			if err := s.Handle(func(b af.Batch) {
				defer func() { handled <- true }()
				in = b.Pushes()[0].Val.Bytes()
				if len(b.Pulls()) == 0 {
					_ = b.Respond(nil)
					return
				}
				ordinary, short = b.Pushes()[1].Val.Bytes(), b.Pushes()[2].Val.Bytes()
				var outs []af.KeyTensor
				for _, p := range b.Pulls() {
					out, ok := p.Out, p.Out.Len() > 0
					if want := maps && p.Key == 10; ok != want {
						t.Errorf("the memory of pull %d is known: %t, want %t", p.Key, ok, want)
					}
					if !ok {
						out = bytesOf(t, make([]byte, p.Len))
					}
					for k := range out.Bytes() {
						out.Bytes()[k] = in[0] + byte(p.Key)
					}
					outs = append(outs, af.KeyTensor{Key: p.Key, Val: out})
				}
				if err := b.Respond(outs); err != nil {
					t.Error(err)
				}
			}); err != nil {
				t.Fatal(err)
			}
			x, y := shared(t, n, 1), shared(t, n, 0)
			other, sum := bytesOf(t, bytes.Repeat([]byte{7}, n)), bytesOf(t, make([]byte, n))
			small := shared(t, 1000, 9)
			for round := range byte(3) {
				fill(x.Bytes(), round)
				h, err := w.PushPull([]af.KeyTensor{{Key: 1, Val: x}, {Key: 2, Val: other}, {Key: 3, Val: small}},
					[][]af.KeyTensor{{{Key: 10, Val: y}, {Key: 11, Val: sum}, {Key: 12, Val: shared(t, 64, 0)}}})
				if err != nil {
					t.Fatal(err)
				}
				if err := h.Wait(t.Context()); err != nil {
					t.Fatal(err)
				}
				<-handled
				if !isAll(y, round+10) || !isAll(sum, round+11) || !bytes.Equal(ordinary[:2], []byte{7, 7}) && maps || len(short) != 1000 {
					t.Fatalf("round %d: answers %d and %d, want %d and %d", round, y.Bytes()[0], sum.Bytes()[0], round+10, round+11)
				}
			}
			x.Bytes()[0] = 77
			if in[0] == 77 != maps {
				t.Errorf("the server's input is the worker's memory: %t, want %t", in[0] == 77, maps)
			}
			h, err := w.PushPull([]af.KeyTensor{{Key: 1, Val: x}, {Key: 2, Val: x}}, nil) // no answer follows
			if err == nil {
				err = h.Wait(t.Context())
			}
			if err != nil {
				t.Fatal(err)
			}
			<-handled
			c.Finalize(t)
		})
	}
}

// TestSharedTensorTakenBack: what a server writes for a call that has failed does not reach the tensor, also if the next call pulls into the
// same one.
func TestSharedTensorTakenBack(t *testing.T) {
	c := mapsMemory(t)
	w, s := pair(t, c)
	batches := make(chan af.Batch, 2)
	if err := s.Handle(func(b af.Batch) { batches <- b }); err != nil {
		t.Fatal(err)
	}
	const n = 100_000
	x, y := shared(t, n, 1), shared(t, n, 2)
	call := func() af.Call {
		h, err := w.PushPull([]af.KeyTensor{{Key: 1, Val: x}}, [][]af.KeyTensor{{{Key: 2, Val: y}}})
		if err != nil {
			t.Fatal(err)
		}
		return h
	}
	out := func(b af.Batch) af.Tensor {
		o := b.Pulls()[0].Out
		if o.Len() == 0 {
			t.Fatal("the memory of the pull is not known")
		}
		return o
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	first := call()
	old := <-batches
	cancel(van.ErrTimeout)
	vantest.Fails(t, first.Wait(ctx), van.ErrTimeout)
	fill(out(old).Bytes(), 66)
	if !isAll(y, 2) {
		t.Fatal("a server has written to a tensor whose call had failed")
	}
	second := call()
	b := <-batches
	fill(out(b).Bytes(), 5)
	fill(out(old).Bytes(), 66)
	for _, x := range []af.Batch{old, b} {
		o := out(x)
		if err := x.Respond([]af.KeyTensor{{Val: o}}); err != nil {
			t.Fatal(err)
		}
	}
	if err := second.Wait(t.Context()); err != nil || !isAll(y, 5) {
		t.Fatalf("second call: %v, first byte %d, want 5", err, y.Bytes()[0])
	}
	c.Finalize(t)
}

// TestSharedTensorOfTwoCalls: two tensors of one allocation are pulled at once. One call fails; the answer to the other one is whole,
// although the allocation has other memory by then.
func TestSharedTensorOfTwoCalls(t *testing.T) {
	c := mapsMemory(t)
	w, s := pair(t, c)
	batches := make(chan af.Batch, 2)
	if err := s.Handle(func(b af.Batch) { batches <- b }); err != nil {
		t.Fatal(err)
	}
	const n = 1 << 16
	whole := shared(t, 2*n, 0)
	half := func(i int) af.Tensor { return bytesOf(t, whole.Bytes()[i*n:(i+1)*n]) }
	x := shared(t, n, 1)
	call := func(y af.Tensor) (af.Call, af.Batch, af.Tensor) {
		h, err := w.PushPull([]af.KeyTensor{{Key: 1, Val: x}}, [][]af.KeyTensor{{{Key: 2, Val: y}}})
		if err != nil {
			t.Fatal(err)
		}
		b := <-batches
		o := b.Pulls()[0].Out
		if o.Len() == 0 {
			t.Fatal("the memory of the pull is not known")
		}
		return h, b, o
	}
	failing, _, _ := call(half(0))
	h, b, o := call(half(1))
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	vantest.Fails(t, failing.Wait(ctx), van.ErrTimeout)
	fill(o.Bytes(), 8)
	if err := b.Respond([]af.KeyTensor{{Val: o}}); err != nil {
		t.Fatal(err)
	}
	if err := h.Wait(t.Context()); err != nil || !isAll(half(1), 8) || !isAll(half(0), 0) {
		t.Fatalf("%v, first bytes %d and %d, want 0 and 8", err, half(0).Bytes()[0], half(1).Bytes()[0])
	}
	c.Finalize(t)
}

// TestSharedTensorFreed: tensors that are freed and allocated again, at the same address or another one, are never mixed up.
func TestSharedTensorFreed(t *testing.T) {
	c := mapsMemory(t)
	w, s := pair(t, c)
	var once sync.Once
	if err := s.Handle(func(b af.Batch) {
		o := b.Pulls()[0].Out
		if o.Len() == 0 {
			once.Do(func() { t.Error("the memory of the pull is not known") })
		}
		copy(o.Bytes(), b.Pushes()[0].Val.Bytes())
		_ = b.Respond([]af.KeyTensor{{Val: o}})
	}); err != nil {
		t.Fatal(err)
	}
	for i := range 100 {
		n := 32<<10 + 10_000*(i%7)
		x, freeX, err := af.AllocShared(af.Uint8, int64(n))
		if err != nil {
			t.Fatal(err)
		}
		y, freeY, err := af.AllocShared(af.Uint8, int64(n))
		if err != nil {
			t.Fatal(err)
		}
		fill(x.Bytes(), byte(i))
		h, err := w.PushPull([]af.KeyTensor{{Key: 1, Val: x}}, [][]af.KeyTensor{{{Key: 2, Val: y}}})
		if err == nil {
			err = h.Wait(t.Context())
		}
		if err != nil || !isAll(y, byte(i)) {
			t.Fatalf("call %d: %v, %d", i, err, y.Bytes()[0])
		}
		freeX()
		freeY()
	}
	c.Finalize(t)
}
