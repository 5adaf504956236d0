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

// Mem is a range of bytes on a device: an address, a length, and the owner, which must
// stay reachable while the range is in use. It is a small value; copy it freely.
// The zero Mem is an empty host range.
//
// A Mem does not own its bytes. The function that takes or returns it says who does, and
// until when.
type Mem struct {
	ptr   unsafe.Pointer
	size  extent
	owner any
}

// extent is a length and a device in one word, so that a Mem has four: the compiler keeps a struct of
// five in memory, and each message copies a dozen of them.
type extent uint64

const (
	typeBits   = 3
	idBits     = 15 // of a signed number: STEPMESH_GPU goes to 16378
	deviceBits = typeBits + idBits
	deviceMask = 1<<deviceBits - 1
	maxLen     = 1<<(64-deviceBits) - 1 // no process can have as much
)

// extentOf is n bytes on d. Impossible arguments give an empty range of an unknown device.
func extentOf(n int, d Device) extent {
	if n < 0 || n > maxLen || d.Type < 0 || d.Type >= 1<<typeBits || d.ID < -1<<(idBits-1) || d.ID >= 1<<(idBits-1) {
		return 0
	}
	return extent(n)<<deviceBits | extent(d.ID)<<typeBits&deviceMask | extent(d.Type)
}

func (e extent) len() int { return int(e >> deviceBits) }

func (e extent) deviceType() DeviceType { return DeviceType(e & (1<<typeBits - 1)) }

func (e extent) device() Device {
	return Device{e.deviceType(), int32(e) << (32 - deviceBits) >> (32 - idBits)}
}

// with is the same device with another length, which is no longer.
func (e extent) with(n int) extent { return extent(n)<<deviceBits | e&deviceMask }

// Bytes returns a Mem over the bytes of a Go slice.
func Bytes(b []byte) Mem {
	return Mem{ptr: unsafe.Pointer(unsafe.SliceData(b)), size: extentOf(len(b), Host)}
}

// Slice returns a Mem over the elements of a Go slice of any fixed-size type.
func Slice[T any](s []T) Mem {
	var zero T
	return Mem{ptr: unsafe.Pointer(unsafe.SliceData(s)), size: extentOf(len(s)*int(unsafe.Sizeof(zero)), Host)}
}

// At returns a Mem over n bytes at p on device d, or an empty one of an unknown device for a length that no
// process can have, or an ID beyond 15 bits. owner, which may be nil, is
// kept reachable for as long as the Mem is: use it for memory that another
// Go object frees.
func At(p unsafe.Pointer, n int, d Device, owner any) Mem {
	return Mem{ptr: p, size: extentOf(n, d), owner: owner}
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
func (m Mem) Len() int { return m.size.len() }

// Ptr is the address; for device memory it must not be dereferenced.
func (m Mem) Ptr() unsafe.Pointer { return m.ptr }

// Addr is the address as an integer, as it travels in a message.
func (m Mem) Addr() uint64 { return uint64(uintptr(m.ptr)) }

// Device is where the bytes are.
func (m Mem) Device() Device { return m.size.device() }

// Owner is what At was given.
func (m Mem) Owner() any { return m.owner }

// OnHost reports whether the bytes can be read by the CPU directly.
func (m Mem) OnHost() bool { return m.size.deviceType() == CPU || m.Len() == 0 }

// Host returns the bytes as a slice that shares the memory. It returns nil for
// device memory.
func (m Mem) Host() []byte {
	if m.Len() == 0 || m.size.deviceType() != CPU {
		return nil
	}
	return unsafe.Slice((*byte)(m.ptr), m.Len())
}

// Sub returns the n bytes from offset off. It panics when the range does not
// lie in m, as slicing does.
func (m Mem) Sub(off, n int) Mem {
	if off < 0 || n < 0 || off > m.Len()-n {
		panic(fmt.Sprintf("backend: Sub(%d, %d) of %d bytes", off, n, m.Len()))
	}
	return Mem{ptr: unsafe.Add(m.ptr, off), size: m.size.with(n), owner: m.owner}
}

// Overlaps reports whether m and o share bytes.
func (m Mem) Overlaps(o Mem) bool {
	return m.Len() > 0 && o.Len() > 0 && m.Device() == o.Device() && m.Addr() < o.Addr()+uint64(o.Len()) && o.Addr() < m.Addr()+uint64(m.Len())
}

// WithOwner returns m with another owner.
func (m Mem) WithOwner(owner any) Mem {
	m.owner = owner
	return m
}
