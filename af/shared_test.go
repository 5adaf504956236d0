package af_test

import (
	"bytes"
	"context"
	"fmt"
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

// TestSharedTensorTakenBack: writes of a server for a call that has failed do not reach the tensor, also if the next call pulls into the
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

// TestSharedTensorsOfOneCall: tensors of a call may be parts of one allocation, and pushed and pulled. A server writes only to a pull tensor that is
// a whole allocation, and its input never changes.
func TestSharedTensorsOfOneCall(t *testing.T) {
	const n = 1 << 16
	whole := shared(t, 2*n, 0)
	first, second := bytesOf(t, whole.Bytes()[:n]), bytesOf(t, whole.Bytes()[n:])
	x, z := shared(t, n, 0), shared(t, n, 0)
	for _, c := range []struct {
		name       string
		push, pull []af.Tensor
		out        int // the number of pulls that the server can write to
	}{
		{"whole allocations", []af.Tensor{x}, []af.Tensor{z}, 1},
		{"parts", []af.Tensor{first}, []af.Tensor{second}, 0},
		{"a part, and what it is a part of", []af.Tensor{second}, []af.Tensor{whole}, 1},
		{"in place", []af.Tensor{x}, []af.Tensor{x}, 1},
		{"in place, two", []af.Tensor{x, z}, []af.Tensor{x, z}, 2},
		{"exchanged", []af.Tensor{x, z}, []af.Tensor{z, x}, 2},
		{"exchanged parts", []af.Tensor{first, second}, []af.Tensor{second, first}, 0},
	} {
		for _, echoes := range []bool{false, true} { // the server answers with its input
			t.Run(fmt.Sprintf("%s, echo %t", c.name, echoes), func(t *testing.T) {
				cluster := mapsMemory(t)
				w, s := pair(t, cluster)
				if err := s.Handle(func(b af.Batch) {
					var outs []af.KeyTensor
					written := 0
					for i, p := range b.Pulls() {
						in := b.Pushes()[i].Val
						o := p.Out
						if o.Len() > 0 {
							written++
						}
						if echoes && in.Len() == p.Len {
							o = in
						} else if o.Len() == 0 {
							o = bytesOf(t, make([]byte, p.Len))
						}
						if !echoes {
							for k := range o.Bytes() {
								o.Bytes()[k] = 0
								for j := range b.Pushes() {
									o.Bytes()[k] += b.Pushes()[j].Val.Bytes()[min(k, n-1)] * byte(1+j+2*i)
								}
							}
						} else if in.Len() != p.Len {
							fill(o.Bytes(), in.Bytes()[0])
						}
						outs = append(outs, af.KeyTensor{Key: p.Key, Val: o})
					}
					if written != c.out {
						t.Errorf("the server can write to %d pull tensors, want %d", written, c.out)
					}
					if err := b.Respond(outs); err != nil {
						t.Error(err)
					}
				}); err != nil {
					t.Fatal(err)
				}
				var push, pull []af.KeyTensor
				for i, x := range c.push {
					fill(x.Bytes(), byte(10+i))
					push = append(push, af.KeyTensor{Key: uint64(i), Val: x})
					pull = append(pull, af.KeyTensor{Key: uint64(i), Val: c.pull[i]})
				}
				h, err := w.PushPull(push, [][]af.KeyTensor{pull})
				if err == nil {
					err = h.Wait(t.Context())
				}
				if err != nil {
					t.Fatal(err)
				}
				for i, y := range c.pull {
					want := byte(10 + i)
					if !echoes {
						want = 0
						for j := range c.push {
							want += byte(10+j) * byte(1+j+2*i)
						}
					}
					if !isAll(y, want) {
						t.Errorf("answer %d begins with %d, want %d", i, y.Bytes()[0], want)
					}
				}
				cluster.Finalize(t)
			})
		}
	}
}

// TestSharedTensorOfAnotherPull: an answer in the memory of another pull is refused: the answers would change each other.
func TestSharedTensorOfAnotherPull(t *testing.T) {
	c := mapsMemory(t)
	w, s := pair(t, c)
	if err := s.Handle(func(b af.Batch) {
		first, second := b.Pulls()[0].Out, b.Pulls()[1].Out
		fill(first.Bytes(), 1)
		fill(second.Bytes(), 2)
		vantest.Fails(t, b.Respond([]af.KeyTensor{{Val: second}, {Val: first}}), van.ErrInvalid, "key 5", "another pull")
		if err := b.Respond([]af.KeyTensor{{Val: first}, {Val: second}}); err != nil {
			t.Error(err)
		}
	}); err != nil {
		t.Fatal(err)
	}
	x, y, z := shared(t, 1<<16, 7), shared(t, 1<<16, 0), shared(t, 1<<16, 0)
	h, err := w.PushPull([]af.KeyTensor{{Key: 1, Val: x}}, [][]af.KeyTensor{{{Key: 5, Val: y}, {Key: 6, Val: z}}})
	if err == nil {
		err = h.Wait(t.Context())
	}
	if err != nil || !isAll(y, 1) || !isAll(z, 2) {
		t.Errorf("%v, answers begin with %d and %d, want 1 and 2", err, y.Bytes()[0], z.Bytes()[0])
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

// TestManySharedTensors: a call with more values in shared allocations than a link has slots is answered, and so is the next one.
func TestManySharedTensors(t *testing.T) {
	const n, count = 32 << 10, 600
	c := mapsMemory(t)
	w, s := pair(t, c)
	if err := s.Handle(func(b af.Batch) {
		var outs []af.KeyTensor
		for i, p := range b.Pulls() {
			if p.Out.Len() == 0 {
				t.Errorf("the memory of pull %d is not known", i)
				p.Out = bytesOf(t, make([]byte, p.Len))
			}
			copy(p.Out.Bytes(), b.Pushes()[i].Val.Bytes())
			outs = append(outs, af.KeyTensor{Key: p.Key, Val: p.Out})
		}
		if err := b.Respond(outs); err != nil {
			t.Error(err)
		}
	}); err != nil {
		t.Fatal(err)
	}
	whole := shared(t, count*n, 0)
	var push, pull []af.KeyTensor
	for i := range count {
		push = append(push, af.KeyTensor{Key: uint64(i), Val: bytesOf(t, whole.Bytes()[i*n:(i+1)*n])})
		pull = append(pull, af.KeyTensor{Key: uint64(i), Val: shared(t, n, 0)})
	}
	for round := range 2 {
		for i := range push {
			fill(push[i].Val.Bytes(), byte(i+round))
		}
		h, err := w.PushPull(push, [][]af.KeyTensor{pull}, af.Within(20*time.Second))
		if err == nil {
			err = h.Wait(t.Context())
		}
		if err != nil {
			t.Fatal(err)
		}
		for i := range pull {
			if !isAll(pull[i].Val, byte(i+round)) {
				t.Fatalf("round %d: answer %d begins with %d, want %d", round, i, pull[i].Val.Bytes()[0], byte(i+round))
			}
		}
	}
	c.Finalize(t)
}
