package af_test

import (
	"slices"
	"testing"
	"unsafe"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/van/backend"
)

// dtypeOf checks that a tensor of Ts is a view on the slice, both ways.
func dtypeOf[T af.Element](t *testing.T, want af.Dtype) {
	t.Helper()
	s := []T{1, 2, 3, 4, 5, 6}
	x, err := af.FromSlice(s, 2, 3)
	if err != nil {
		t.Fatal(err)
	}
	if x.Dtype() != want || x.Len() != 6*int(unsafe.Sizeof(s[0])) || !slices.Equal(x.Dims(), []int64{2, 3}) {
		t.Errorf("tensor of %T is %s of %d bytes, want %s", s, x.String(), x.Len(), want)
	}
	back, err := af.Slice[T](x)
	if err != nil || !slices.Equal(back, s) {
		t.Errorf("%s as a slice: %v %v", x.String(), back, err)
	}
	s[5] = 9
	if back[5] != 9 {
		t.Errorf("the tensor of %T does not share its memory", s)
	}
}

func TestElements(t *testing.T) {
	type mine uint16
	dtypeOf[uint8](t, af.Uint8)
	dtypeOf[int8](t, af.Int8)
	dtypeOf[uint16](t, af.Uint16)
	dtypeOf[mine](t, af.Uint16)
	dtypeOf[int16](t, af.Int16)
	dtypeOf[uint32](t, af.Uint32)
	dtypeOf[int32](t, af.Int32)
	dtypeOf[uint64](t, af.Uint64)
	dtypeOf[int64](t, af.Int64)
	dtypeOf[float32](t, af.Float32)
	dtypeOf[float64](t, af.Float64)
}

func TestTensorString(t *testing.T) {
	mem := make([]byte, 48)
	for _, x := range []struct {
		d     af.Dtype
		n     int
		shape []int64
		want  string
	}{
		{af.BFloat16, 48, []int64{2, 3, 4}, "bfloat16[2 3 4] on cpu"},
		{af.Float8E4M3FN, 48, []int64{48}, "float8_e4m3fn[48] on cpu"},
		{af.Complex128, 16, nil, "complex128[] on cpu"},
		{af.Bool, 0, []int64{4, 0}, "bool[4 0] on cpu"},
	} {
		y, err := af.FromBytes(mem[:x.n], x.d, x.shape...)
		if err != nil {
			t.Error(err)
		}
		if y.String() != x.want {
			t.Errorf("got %q, want %q", y.String(), x.want)
		}
	}
	var zero af.Tensor
	if zero.String() != "uint8[0] on cpu" || !slices.Equal(zero.Dims(), []int64{0}) || zero.Len() != 0 || zero.Device() != backend.Host {
		t.Errorf("the zero tensor is %q with shape %v and %d bytes", zero.String(), zero.Dims(), zero.Len())
	}
	if s, err := af.Slice[uint8](zero); err != nil || len(s) != 0 {
		t.Errorf("the zero tensor as a slice: %v %v", s, err)
	}
	if d := af.Dtype(99); d.Valid() || d.Size() != 0 || d.String() != "dtype(99)" {
		t.Errorf("dtype 99 is %s of size %d", d, d.Size())
	}
	for d := af.Uint8; d <= af.Float8E8M0x4; d++ {
		if !d.Valid() || d.Size() < 1 || d.Size() > 16 {
			t.Errorf("%s has %d bytes", d, d.Size())
		}
	}
}

// TestFromPointer: memory that is not Go's.
func TestFromPointer(t *testing.T) {
	mem := []float64{1, 2, 3, 4}
	x, err := af.FromPointer(unsafe.Pointer(&mem[0]), backend.Host, mem, af.Float64, 4)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := af.Slice[float64](x); err != nil || !slices.Equal(got, mem) {
		t.Errorf("got %v %v, want %v", got, err, mem)
	}
	if _, err := af.FromPointer(nil, backend.Host, nil, af.Float64, 0); err != nil {
		t.Errorf("an empty tensor at address 0: %v", err)
	}
}
