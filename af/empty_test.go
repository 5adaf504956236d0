package af_test

import (
	"bytes"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/testcluster"
)

// everyVan runs test over every transport, plain and with PS_RESEND.
func everyVan(t *testing.T, test func(t *testing.T, o testcluster.Options)) {
	for _, over := range []testcluster.Transport{testcluster.InProc, testcluster.TCP, testcluster.Unix, testcluster.SHM} {
		for _, resend := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s resend %t", over, resend), func(t *testing.T) {
				test(t, testcluster.Options{Over: over, Set: func(c *postoffice.Config) {
					c.Resend, c.ResendTimeout = resend, time.Second
				}})
			})
		}
	}
}

func bytesOf(t testing.TB, b []byte, shape ...int64) af.Tensor {
	t.Helper()
	if shape == nil {
		shape = []int64{int64(len(b))}
	}
	x, err := af.FromBytes(b, af.Uint8, shape...)
	if err != nil {
		t.Fatal(err)
	}
	return x
}

// serve makes n a tensor server.
func serve(t testing.TB, n *postoffice.Node, h af.Handler) *af.Server {
	t.Helper()
	s, err := af.NewServer(n, af.ServerOptions{})
	if err == nil {
		err = s.Handle(h)
	}
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func newWorker(t testing.TB, n *postoffice.Node) *af.Worker {
	t.Helper()
	w, err := af.NewWorker(n, af.WorkerOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return w
}

// TestEmptyTensors: tensors without elements travel as others do, with their
// shapes, alone, together, and between tensors that have some.
func TestEmptyTensors(t *testing.T) {
	shapes := map[uint64][]int64{1: {0}, 2: {3, 0, 5}, 3: {2}, 4: {0, 7}}
	values := func(key uint64, servers int) []af.KeyTensor {
		kts := make([]af.KeyTensor, servers)
		for i := range kts {
			n := int64(1)
			for _, d := range shapes[key] {
				n *= d
			}
			kts[i] = af.KeyTensor{Key: key, Val: bytesOf(t, bytes.Repeat([]byte{byte(key)}, int(n)), shapes[key]...)}
		}
		return kts
	}
	everyVan(t, func(t *testing.T, o testcluster.Options) {
		o.Servers = 2
		c := testcluster.Start(t, o)
		seen := [2]chan []uint64{make(chan []uint64, 1), make(chan []uint64, 1)} // keys that each server saw
		for s, n := range c.Servers {
			serve(t, n, func(b af.Batch) {
				var keys []uint64
				for _, p := range b.Pushes() {
					keys = append(keys, p.Key)
					if !slices.Equal(p.Val.Dims(), shapes[p.Key]) || p.Val.Len() != len(values(p.Key, 1)[0].Val.Bytes()) {
						t.Errorf("push of key %d came as %s", p.Key, p.Val.String())
					}
				}
				var out []af.KeyTensor
				for _, p := range b.Pulls() {
					keys = append(keys, p.Key)
					if !slices.Equal(p.Shape, shapes[p.Key]) {
						t.Errorf("pull of key %d came as %v", p.Key, p.Shape)
					}
					out = append(out, values(p.Key, 1)...)
				}
				if err := b.Respond(out, af.ByKey); err != nil {
					t.Error(err)
				}
				seen[s] <- keys
			})
		}
		w := newWorker(t, c.Workers[0])
		for _, x := range []struct{ push, pull []uint64 }{
			{push: []uint64{1}}, {pull: []uint64{1}}, {push: []uint64{1}, pull: []uint64{2}}, {push: []uint64{1, 2}}, {pull: []uint64{1, 2}},
			{push: []uint64{1, 3, 2}, pull: []uint64{4, 3, 1}}, {push: []uint64{3}, pull: []uint64{1}}, {push: []uint64{2}, pull: []uint64{3}},
			{push: []uint64{1, 2, 4}, pull: []uint64{1, 2, 4}},
		} {
			var push, pull []af.KeyTensor
			for _, k := range x.push {
				push = append(push, values(k, 1)...)
			}
			for range c.Servers {
				for _, k := range x.pull {
					kt := values(k, 1)[0]
					clear(kt.Val.Bytes())
					pull = append(pull, kt)
				}
			}
			h, err := w.PushPull(push, testcluster.PerServer(pull, len(c.Servers)))
			if err == nil {
				err = h.Wait(t.Context())
			}
			if err != nil {
				t.Fatalf("push %v pull %v: %v", x.push, x.pull, err)
			}
			for _, kt := range pull {
				if want := values(kt.Key, 1)[0].Val.Bytes(); !bytes.Equal(kt.Val.Bytes(), want) {
					t.Errorf("push %v pull %v: key %d has %v, want %v", x.push, x.pull, kt.Key, kt.Val.Bytes(), want)
				}
			}
			for i := range seen {
				if got, want := <-seen[i], slices.Concat(x.push, x.pull); !slices.Equal(got, want) {
					t.Errorf("push %v pull %v: server %d saw %v", x.push, x.pull, i, got)
				}
			}
		}
		c.Finalize(t)
	})
}

// TestEmptyKinds: every way to write an empty tensor is one.
func TestEmptyKinds(t *testing.T) {
	var zero af.Tensor
	none, err := af.FromSlice[float32](nil)
	if err != nil {
		t.Fatal(err)
	}
	flat, err := af.FromSlice([]float32{}, 4, 0)
	if err != nil {
		t.Fatal(err)
	}
	c := testcluster.Start(t, testcluster.Options{})
	serve(t, c.Servers[0], func(b af.Batch) {
		if err := b.Respond([]af.KeyTensor{{Key: 9}}, af.ByKey); err != nil { // the zero Tensor
			t.Error(err)
		}
	})
	w := newWorker(t, c.Workers[0])
	for _, x := range []af.Tensor{zero, none, flat} {
		h, err := w.PushPull([]af.KeyTensor{{Key: 1, Val: x}}, [][]af.KeyTensor{{{Key: 9, Val: x}}})
		if err == nil {
			err = h.Wait(t.Context())
		}
		if err != nil || x.Len() != 0 {
			t.Errorf("%s of %d bytes: %v", x.String(), x.Len(), err)
		}
	}
	c.Finalize(t)
}
