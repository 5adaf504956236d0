package af

// Tensors: memory with an element type and a shape.

import (
	"fmt"
	"math"
	"unsafe"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/hostmem"
)

// MaxTensorBytes is the size of the largest tensor that the wire format supports: its length is a signed 32-bit
// number.
const MaxTensorBytes = math.MaxInt32

// Tensor is contiguous memory with an element type and a shape of up to 8
// dimensions. It is a view: it owns nothing. The zero Tensor is an empty uint8
// tensor of shape [0] on the host.
type Tensor struct {
	mem   backend.Mem
	dtype Dtype
	ndim  int8
	shape [van.MaxDims]int64
}

// Element is a Go type that a tensor can be made of without naming its Dtype.
type Element interface {
	~uint8 | ~int8 | ~uint16 | ~int16 | ~uint32 | ~int32 | ~uint64 | ~int64 | ~float32 | ~float64
}

// DtypeOf returns the element type of a Go type.
func DtypeOf[T Element]() Dtype {
	var z T
	half := T(1) / T(2)
	signed := z-1 < z
	switch size := unsafe.Sizeof(z); {
	case half != 0 && size == 4:
		return Float32
	case half != 0:
		return Float64
	case signed:
		return [...]Dtype{1: Int8, 2: Int16, 4: Int32, 8: Int64}[size]
	default:
		return [...]Dtype{1: Uint8, 2: Uint16, 4: Uint32, 8: Uint64}[size]
	}
}

// FromSlice returns a tensor that shares the memory of s. Without a shape it has
// one dimension. It fails when the shape does not have len(s) elements.
func FromSlice[T Element](s []T, shape ...int64) (Tensor, error) {
	if len(shape) == 0 {
		shape = []int64{int64(len(s))}
	}
	return NewTensor(backend.Slice(s), DtypeOf[T](), shape...)
}

// FromBytes returns a tensor of any element type that shares the memory of b.
func FromBytes(b []byte, d Dtype, shape ...int64) (Tensor, error) {
	return NewTensor(backend.Bytes(b), d, shape...)
}

// FromPointer returns a tensor over memory at p on device dev, whose length
// follows from element type and shape. owner, which may be nil, is kept reachable
// while the library uses the tensor. Memory that is not Go's and is freed by hand needs
// an owner that is a backend.Holder: a transport may keep it registered for a while
// after its last use, and must not find other memory there.
func FromPointer(p unsafe.Pointer, dev backend.Device, owner any, d Dtype, shape ...int64) (Tensor, error) {
	n, err := byteSize(d, shape)
	if err != nil {
		return Tensor{}, err
	}
	if p == nil && n > 0 {
		return Tensor{}, fmt.Errorf("%w: tensor of %d bytes at address 0", van.ErrInvalid, n)
	}
	return NewTensor(backend.At(p, n, dev, owner), d, shape...)
}

// AllocShared allocates a tensor on the host, with contents 0, that servers on this host can map (STEPAF_SHM_MAP). For such
// servers, a call with pulls does not copy, through shared memory:
//
//   - a pushed tensor of at least 32 KiB that lies in an allocation: the server reads the caller's memory until it answers;
//   - the answer to a pull of at least 32 KiB whose tensor is a whole allocation, and is not pushed by the same call, if the server
//     writes the answer into Pull.Out, and PS_RESEND is not set.
//
// Everywhere else it is like other memory. A server can write to all of an allocation that it maps. When a call fails, the library
// gives the allocations of its pull tensors other memory with the same contents, at the same address, so that a late answer
// changes nothing.
//
// Do not pin an allocation with CUDA: a device keeps the former memory. An allocation uses a file descriptor and whole pages. free frees it when the library does not use it any more; the caller must
// not use the tensor then.
func AllocShared(d Dtype, shape ...int64) (t Tensor, free func(), err error) {
	n, err := byteSize(d, shape)
	if err != nil {
		return Tensor{}, nil, err
	}
	mem, err := hostmem.Alloc(n)
	if err != nil {
		return Tensor{}, nil, err
	}
	if t, err = NewTensor(mem, d, shape...); err != nil {
		hostmem.Free(mem)
		return Tensor{}, nil, err
	}
	return t, func() { hostmem.Free(mem) }, nil
}

// NewTensor returns a tensor over mem, whose length must be that of the shape. A shape
// without dimensions is a scalar.
func NewTensor(mem backend.Mem, d Dtype, shape ...int64) (Tensor, error) {
	n, err := byteSize(d, shape)
	if err != nil {
		return Tensor{}, err
	}
	if n != mem.Len() {
		return Tensor{}, fmt.Errorf("%w: shape %v of %s is %d bytes, but the memory has %d", van.ErrInvalid, shape, d, n, mem.Len())
	}
	t := Tensor{mem: mem, dtype: d, ndim: int8(len(shape))}
	copy(t.shape[:], shape)
	return t, nil
}

// byteSize checks a shape and returns its size in bytes.
func byteSize(d Dtype, shape []int64) (int, error) {
	if !d.Valid() {
		return 0, fmt.Errorf("%w: dtype code %d, want 0 to %d", van.ErrInvalid, int32(d), len(dtypes)-1)
	}
	if len(shape) > van.MaxDims {
		return 0, fmt.Errorf("%w: tensor with %d dimensions, want at most %d", van.ErrInvalid, len(shape), van.MaxDims)
	}
	n, empty := int64(d.Size()), false
	for i, s := range shape {
		switch {
		case s < 0:
			return 0, fmt.Errorf("%w: dimension %d of shape %v is negative", van.ErrInvalid, i, shape)
		case s == 0:
			empty = true
		case n > MaxTensorBytes/s:
			n = math.MaxInt64 / 2 // too large, unless another dimension is 0
			if s > 1 && n > math.MaxInt64/s {
				n = MaxTensorBytes + 1
			}
		default:
			n *= s
		}
	}
	switch {
	case empty:
		return 0, nil
	case n > MaxTensorBytes:
		return 0, fmt.Errorf("%w: shape %v of %s exceeds the maximum of %d bytes", van.ErrInvalid, shape, d, MaxTensorBytes)
	}
	return int(n), nil
}

// Mem returns the tensor's memory.
func (t Tensor) Mem() backend.Mem { return t.mem }

// Bytes returns the tensor's memory as a slice that shares it, nil on a device.
func (t Tensor) Bytes() []byte { return t.mem.Host() }

// Len returns the tensor's size in bytes.
func (t Tensor) Len() int { return t.mem.Len() }

// Dtype returns the element type.
func (t Tensor) Dtype() Dtype { return t.dtype }

// Dims returns the shape; the slice is a copy.
func (t Tensor) Dims() []int64 { return append([]int64(nil), t.shape[:t.rank()]...) }

// rank returns the number of dimensions. A scalar has memory; the tensor with neither dimensions nor memory is the
// zero Tensor, of shape [0].
func (t Tensor) rank() int {
	if t.ndim == 0 && t.mem.Len() == 0 {
		return 1
	}
	return int(t.ndim)
}

// rows is the size of the first dimension, -1 without dimensions.
func (t Tensor) rows() int64 {
	if t.rank() == 0 {
		return -1
	}
	return t.shape[0]
}

// head cuts the tensor to its first n rows, of which it must have as many.
func (t *Tensor) head(n int64) {
	if all := t.shape[0]; all > 0 {
		t.mem = t.mem.Sub(0, int(int64(t.mem.Len())/all*n))
		t.shape[0] = n
	}
}

// Device returns the device of the tensor's memory.
func (t Tensor) Device() backend.Device {
	if t.mem.Len() == 0 && t.mem.Device() == (backend.Device{}) {
		return backend.Host
	}
	return t.mem.Device()
}

// String describes the tensor: "bfloat16[128 7168] on cpu".
func (t Tensor) String() string {
	return fmt.Sprintf("%s%v on %s", t.dtype, t.shape[:t.rank()], t.Device())
}

// Slice returns the elements as a Go slice that shares the tensor's memory. It
// fails when T is not the tensor's element type or the tensor is not on the host.
func Slice[T Element](t Tensor) ([]T, error) {
	if d := DtypeOf[T](); d != t.dtype {
		return nil, fmt.Errorf("%w: tensor of %s taken as %s", van.ErrInvalid, t.dtype, d)
	}
	if t.mem.Len() == 0 {
		return nil, nil
	}
	if !t.mem.OnHost() {
		return nil, fmt.Errorf("%w: tensor on %s taken as host memory", van.ErrInvalid, t.Device())
	}
	return unsafe.Slice((*T)(t.mem.Ptr()), t.mem.Len()/t.dtype.Size()), nil
}

// KeyTensor is a tensor and the key by which workers and servers identify it.
type KeyTensor struct {
	Key uint64
	Val Tensor
}

// onDevice reports whether one of the tensors is on a device. If tensor i is on a device that the node does not own, onDevice returns
// i and an error.
func onDevice(b backend.Backend, list []KeyTensor) (i int, device bool, err error) {
	for i := range list {
		m := &list[i].Val.mem
		if m.OnHost() {
			continue
		}
		device = true
		if err := backend.CheckDevice(b, *m); err != nil {
			return i, true, err
		}
	}
	return 0, device, nil
}
