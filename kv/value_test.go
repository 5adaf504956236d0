package kv

import (
	"errors"
	"slices"
	"testing"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

func TestTypeOf(t *testing.T) {
	type named uint16
	for name, x := range map[string]struct{ got, want van.DataType }{
		"int8": {typeOf[int8](), 1}, "int16": {typeOf[int16](), 2}, "int32": {typeOf[int32](), 3}, "int64": {typeOf[int64](), 4},
		"uint8": {typeOf[uint8](), 5}, "uint16": {typeOf[uint16](), 6}, "uint32": {typeOf[uint32](), 7}, "uint64": {typeOf[uint64](), 8},
		"float32": {typeOf[float32](), 9}, "float64": {typeOf[float64](), 10}, "named": {typeOf[named](), 6},
	} {
		if x.got != x.want {
			t.Errorf("%s: data type %s, want %s", name, x.got, x.want)
		}
	}
}

// TestUnaligned gives views that begin at odd addresses, as received frames may.
func TestUnaligned(t *testing.T) {
	keys, vals := []Key{3, 1 << 60}, []float64{1.5, -2, 3, 4}
	shift := func(m backend.Mem) backend.Mem {
		b := make([]byte, m.Len()+1)
		copy(b[1:], m.Host())
		return backend.Bytes(b[1:])
	}
	k, v := view[Key](shift(backend.Slice(keys))), view[float64](shift(backend.Slice(vals)))
	if !slices.Equal(k, keys) || !slices.Equal(v, vals) {
		t.Fatalf("views %v %v", k, v)
	}
	var h SummingHandler[float64]
	out := make([]float64, 4)
	for i := 1.0; i < 4; i++ {
		if err := h.Add(k, v, nil); err != nil {
			t.Fatal(err)
		}
		h.Get(k, out)
		for j := range out {
			if out[j] != i*vals[j] {
				t.Fatalf("sums %v after %g additions", out, i)
			}
		}
	}
}

func TestSummingHandlerRefuses(t *testing.T) {
	var h SummingHandler[int8]
	out := []int8{7, 7}
	h.Get([]Key{1, 2}, out)
	if !slices.Equal(out, []int8{0, 0}) || h.Len() != 0 || h.Each() != 0 {
		t.Errorf("before any push: %v, %d keys of %d values", out, h.Len(), h.Each())
	}
	if err := h.Add([]Key{1, 2}, []int8{1, 2, 3, 4}, []int32{2, 2}); err != nil {
		t.Error(err)
	}
	for _, err := range []error{
		h.Add([]Key{1, 2}, nil, nil), h.Add([]Key{1, 2}, make([]int8, 3), nil), h.Add([]Key{1, 2}, make([]int8, 5), nil), h.Add([]Key{1, 2}, make([]int8, 2), nil),
		h.Add([]Key{1, 2}, make([]int8, 4), []int32{1, 3}), h.Add([]Key{1, 2}, make([]int8, 4), []int32{2}), h.Add([]Key{1, 2}, make([]int8, 4), []int32{2, 2, 2}),
		h.Add([]Key{1, 2}, make([]int8, 4), []int32{2, 2, 3}), h.Add(nil, make([]int8, 4), nil),
	} {
		if !errors.Is(err, van.ErrInvalid) {
			t.Errorf("error %v, want one that wraps %q", err, van.ErrInvalid)
		}
	}
	got := make([]int8, 6)
	h.Get([]Key{1, 2, 3}, got)
	if !slices.Equal(got, []int8{1, 2, 3, 4, 0, 0}) {
		t.Errorf("got %v", got)
	}
}
