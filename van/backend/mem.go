package backend

// Addresses on devices: DeviceType, Device, and Mem.

import (
	"fmt"
	"unsafe"
)

// DeviceType says what kind of memory an address belongs to. The values are
// those of ps-lite's DeviceType, which travel in the device fields of a message.
type DeviceType int32

// Device types as they appear on the wire.
const (
	Unknown DeviceType = 0
	CPU     DeviceType = 1
	GPU     DeviceType = 2
)

// String returns "cpu", "gpu" or "unknown".
func (t DeviceType) String() string {
	switch t {
	case CPU:
		return "cpu"
	case GPU:
		return "gpu"
	default:
		return "unknown"
	}
}

// Device names one device of this host.
type Device struct {
	Type DeviceType
	ID   int32
}

// Host is the device of ordinary memory.
var Host = Device{Type: CPU}

// String returns the device as "cpu" or "gpu:3".
func (d Device) String() string {
	if d.Type == CPU {
		return "cpu"
	}
	return fmt.Sprintf("%s:%d", d.Type, d.ID)
}

// Mem is a range of bytes on a device: an address, a length, and whatever must
// stay reachable while the range is in use. It is a small value; copy it freely.
// The zero Mem is an empty host range.
//
// A Mem does not own its bytes. The function that takes or returns it says who does, and
// until when.
type Mem struct {
	ptr   unsafe.Pointer
	n     int
	dev   Device
	owner any
}

// Bytes returns a Mem over the bytes of a Go slice.
func Bytes(b []byte) Mem {
	return Mem{ptr: unsafe.Pointer(unsafe.SliceData(b)), n: len(b), dev: Host}
}

// Slice returns a Mem over the elements of a Go slice of any fixed-size type.
func Slice[T any](s []T) Mem {
	var zero T
	return Mem{ptr: unsafe.Pointer(unsafe.SliceData(s)), n: len(s) * int(unsafe.Sizeof(zero)), dev: Host}
}

// At returns a Mem over n bytes at p on device d. owner, which may be nil, is
// kept reachable for as long as the Mem is: use it for memory that another
// Go object frees.
func At(p unsafe.Pointer, n int, d Device, owner any) Mem {
	return Mem{ptr: p, n: n, dev: d, owner: owner}
}

// Holder is an owner that counts the users of its memory, for memory that is freed
// explicitly. A transport that uses a Mem beyond Send retains its owner meanwhile.
// Both methods may be called on any goroutine and must not block.
type Holder interface {
	Retain()
	Release()
}

// Retain adds a user to the memory if its owner is a Holder.
func (m Mem) Retain() {
	if h, ok := m.owner.(Holder); ok {
		h.Retain()
	}
}

// Release ends a Retain.
func (m Mem) Release() {
	if h, ok := m.owner.(Holder); ok {
		h.Release()
	}
}

// Len is the length in bytes.
func (m Mem) Len() int { return m.n }

// Ptr is the address; for device memory it must not be dereferenced.
func (m Mem) Ptr() unsafe.Pointer { return m.ptr }

// Addr is the address as an integer, as it travels in a message.
func (m Mem) Addr() uint64 { return uint64(uintptr(m.ptr)) }

// Device is where the bytes are.
func (m Mem) Device() Device { return m.dev }

// Owner is what At was given.
func (m Mem) Owner() any { return m.owner }

// OnHost tells whether the bytes can be read by the CPU directly.
func (m Mem) OnHost() bool { return m.dev.Type == CPU || m.n == 0 }

// Host returns the bytes as a slice that shares the memory. It returns nil for
// device memory.
func (m Mem) Host() []byte {
	if m.n == 0 || m.dev.Type != CPU {
		return nil
	}
	return unsafe.Slice((*byte)(m.ptr), m.n)
}

// Sub returns the n bytes from offset off. It panics when the range does not
// lie in m, as slicing does.
func (m Mem) Sub(off, n int) Mem {
	if off < 0 || n < 0 || off > m.n-n {
		panic(fmt.Sprintf("backend: Sub(%d, %d) of %d bytes", off, n, m.n))
	}
	return Mem{ptr: unsafe.Add(m.ptr, off), n: n, dev: m.dev, owner: m.owner}
}

// Overlaps tells whether m and o share bytes.
func (m Mem) Overlaps(o Mem) bool {
	return m.n > 0 && o.n > 0 && m.dev == o.dev && m.Addr() < o.Addr()+uint64(o.n) && o.Addr() < m.Addr()+uint64(m.n)
}

// WithOwner returns m with another owner.
func (m Mem) WithOwner(owner any) Mem {
	m.owner = owner
	return m
}
