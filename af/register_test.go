package af_test

import (
	"bytes"
	"errors"
	"sync/atomic"
	"testing"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// holder counts the holds on a tensor's memory.
type holder struct{ refs atomic.Int32 }

func (h *holder) Retain()  { h.refs.Add(1) }
func (h *holder) Release() { h.refs.Add(-1) }

// heldTensor is a tensor of b whose owner counts.
func heldTensor(t testing.TB, b []byte) (af.Tensor, *holder) {
	t.Helper()
	h := &holder{}
	x, err := af.NewTensor(backend.Bytes(b).WithOwner(h), af.Uint8, int64(len(b)))
	if err != nil {
		t.Fatal(err)
	}
	return x, h
}

var errRefused = errors.New("refused by the test's van")

// registrar is a van that refuses a receive buffer.
type registrar struct {
	van.Van
	left int // registrations that it takes
}

func (r *registrar) RegisterRecvBuffer(int, uint64, backend.Mem) error {
	if r.left--; r.left < 0 {
		return errRefused
	}
	return nil
}

// push sends text under key and waits for the answer.
func push(t testing.TB, w *af.Worker, key uint64, text string) {
	t.Helper()
	h, err := w.PushPull([]af.KeyTensor{{Key: key, Val: bytesOf(t, []byte(text))}}, nil)
	if err == nil {
		err = h.Wait(t.Context())
	}
	if err != nil {
		t.Fatal(err)
	}
}

// TestRegisterAllOrNothing: if one part of a tensor cannot be registered, no part is: no push is written there,
// the memory is not retained, and a corrected call succeeds.
func TestRegisterAllOrNothing(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	s := serve(t, c.Servers[0], func(b af.Batch) {
		if err := b.Respond(nil); err != nil {
			t.Error(err)
		}
	})
	w := newWorker(t, c.Workers[0])
	taken, takenHolds := heldTensor(t, make([]byte, 4))
	if err := s.RegisterRecvTensor(taken, []int{0}, []uint64{9}); err != nil {
		t.Fatal(err)
	}
	if n := takenHolds.refs.Load(); n != 1 {
		t.Errorf("%d holds on one registered part, want 1", n)
	}
	mem := make([]byte, 8)
	x, holds := heldTensor(t, mem)
	for _, tt := range []struct {
		name  string
		ranks []int
		keys  []uint64
		text  string
	}{
		{"no such worker", []int{0, 99}, []uint64{1, 2}, "worker rank 99"},
		{"a key twice", []int{0, 0}, []uint64{1, 1}, "key 1 is there twice"},
		{"a key taken", []int{0, 0}, []uint64{1, 9}, "key 9 has one already"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			vantest.Fails(t, s.RegisterRecvTensor(x, tt.ranks, tt.keys), van.ErrInvalid, "register receive tensor", tt.text)
			push(t, w, 1, "abcd")
			if !bytes.Equal(mem, make([]byte, 8)) {
				t.Errorf("a push landed in a tensor that was refused: %q", mem)
			}
			if n := holds.refs.Load(); n != 0 {
				t.Errorf("%d holds on a tensor that was refused, want none", n)
			}
		})
	}
	if err := s.RegisterRecvTensor(x, []int{0, 0}, []uint64{1, 2}); err != nil {
		t.Fatalf("the corrected call: %v", err)
	}
	if n := holds.refs.Load(); n != 2 {
		t.Errorf("%d holds on two registered parts, want 2", n)
	}
	push(t, w, 2, "efgh")
	push(t, w, 1, "abcd")
	push(t, w, 9, "ijkl")
	if string(mem) != "abcdefgh" || string(taken.Bytes()) != "ijkl" {
		t.Errorf("the registered tensors hold %q and %q", mem, taken.Bytes())
	}
}

// TestRegisterWholeElements: each part holds whole elements of the tensor; with others a float32
// would begin at byte 66.
func TestRegisterWholeElements(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	s := serve(t, c.Servers[0], func(af.Batch) {})
	for _, tt := range []struct {
		dtype  af.Dtype
		shape  []int64
		keys   []uint64
		refuse bool
	}{
		{af.Float32, []int64{33}, []uint64{1, 2}, true},
		{af.Float32, []int64{33}, []uint64{1, 2, 3}, false},
		{af.Float32, []int64{11, 3}, []uint64{4, 5, 6}, false}, // not whole rows, as in the original
		{af.Uint8, []int64{132}, []uint64{7, 8}, false},
	} {
		x, err := af.NewTensor(backend.Bytes(make([]byte, 132)), tt.dtype, tt.shape...)
		if err != nil {
			t.Fatal(err)
		}
		err = s.RegisterRecvTensor(x, make([]int, len(tt.keys)), tt.keys)
		if tt.refuse {
			vantest.Fails(t, err, van.ErrInvalid, "register receive tensor", x.String(), "66 bytes", "2 keys", "whole elements")
		} else if err != nil {
			t.Errorf("%s for %d keys: %v", x.String(), len(tt.keys), err)
		}
	}
}

// TestTransportRefusesAPart: the parts that the van accepted before it refuses one stay registered and held; the
// refused part does not.
func TestTransportRefusesAPart(t *testing.T) {
	r := &registrar{left: 2}
	c := testcluster.Start(t, testcluster.Options{Wrap: func(role string, _ int, f van.Factory) van.Factory {
		if role != "server" {
			return f
		}
		return func(o van.Options) (v van.Van, err error) {
			r.Van, err = f(o)
			return r, err
		}
	}})
	s := serve(t, c.Servers[0], func(b af.Batch) {
		if err := b.Respond(nil); err != nil {
			t.Error(err)
		}
	})
	mem := make([]byte, 12)
	x, holds := heldTensor(t, mem)
	vantest.Fails(t, s.RegisterRecvTensor(x, []int{0, 0, 0}, []uint64{1, 2, 3}), errRefused, "key 3", "the 2 before it of 3 stay registered")
	if n := holds.refs.Load(); n != 2 {
		t.Errorf("%d holds, want one for each of the 2 parts that stay registered", n)
	}
	vantest.Fails(t, s.RegisterRecvTensor(x, []int{0}, []uint64{4}), errRefused)
	if n := holds.refs.Load(); n != 2 {
		t.Errorf("%d holds after a refusal of all, want the 2 from before", n)
	}
	w := newWorker(t, c.Workers[0])
	for key := range uint64(3) {
		push(t, w, key+1, "abcd")
	}
	if want := "abcdabcd\x00\x00\x00\x00"; string(mem) != want {
		t.Errorf("the tensor holds %q, want %q", mem, want)
	}
}
