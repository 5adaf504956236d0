package backend

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// Errors that a device's backend wraps, for errors.Is.
var (
	ErrClosed        = errors.New("backend closed")
	ErrNoMemory      = errors.New("out of device memory")
	ErrWrongDevice   = errors.New("memory of another device")
	ErrInUse         = errors.New("memory in use")
	ErrUnsupported   = errors.New("not supported by this device or driver")
	ErrNotExportable = errors.New("memory that cannot be shared with another process or device")
	ErrDeviceLost    = errors.New("device failed; its context is unusable")
)

// Options are the choices that a backend leaves to its user.
type Options struct {
	// DriverEvents chooses the driver's own events (STEPMESH_MEM_SYNC=0) instead of a
	// word in host memory that the stream writes. It is for events made afterwards.
	DriverEvents bool
	// Spin is how long a wait looks before it sleeps: 0 not at all, negative for ever.
	Spin time.Duration
}

// DefaultOptions are those of a new backend.
func DefaultOptions() Options { return Options{Spin: 100 * time.Microsecond} }

// Tunable is implemented by backends that have Options. Configure may be called at
// any time, on any goroutine.
type Tunable interface{ Configure(Options) }

// AsyncCopier is implemented by backends that copy without waiting. Streams are the
// driver's handles (CUstream, cudaStream_t), so those of PyTorch serve as well as
// those of NewStream; 0 is the device's default stream.
type AsyncCopier interface {
	// NewStream makes a stream that does not wait for the default stream.
	NewStream() (uintptr, error)
	// FreeStream gives back a stream of NewStream; what is queued there still runs.
	FreeStream(stream uintptr) error
	// CopyAsync queues a copy of src into dst on stream. Both must stay valid until an
	// event recorded on stream afterwards is done. Host memory should be pinned, see
	// HostPinner; with other memory the call may wait for the copy, and for all that is
	// queued on stream before it.
	CopyAsync(dst, src Mem, stream uintptr) error
	// WaitEvent makes stream wait for e's latest Record. e is of this backend.
	WaitEvent(stream uintptr, e Event) error
}

// StreamIdler is implemented by backends that can tell whether a stream has come to its
// end. Idle never waits; a stream that is being captured into a graph is not idle.
type StreamIdler interface {
	Idle(stream uintptr) (bool, error)
}

// HealthChecker is implemented by devices that can fail for good. Health returns the
// error then, which wraps ErrDeviceLost.
type HealthChecker interface{ Health() error }

// HostPinner is implemented by backends that copy faster, and asynchronously, from
// and to host memory that is pinned.
type HostPinner interface {
	// AllocPinned returns n bytes of pinned host memory, aligned to pages. It is the
	// host's (OnHost) and mapped into the device.
	AllocPinned(n int) (Mem, error)
	// FreePinned gives back what AllocPinned returned.
	FreePinned(Mem) error
	// RegisterHost pins the caller's host memory, such as a shared-memory segment, and
	// returns it as memory that the device can use. The range must not overlap another
	// one. Go heap memory is refused by nobody and a mistake.
	RegisterHost(Mem) (Mem, error)
	// UnregisterHost ends a RegisterHost. It takes what that returned.
	UnregisterHost(Mem) error
}

// StreamFlagger is implemented by backends whose streams write and await 32-bit words
// without the CPU and without a kernel.
type StreamFlagger interface {
	// WriteFlag makes stream write v into the first 4 bytes of word when all queued
	// before it is done and visible. word is 4-byte aligned and pinned or registered
	// host memory of this backend, or memory of the device.
	WriteFlag(stream uintptr, word Mem, v uint32) error
	// WaitFlag makes stream wait until int32(*word - v) >= 0.
	WaitFlag(stream uintptr, word Mem, v uint32) error
}

// Signaller is implemented by backends whose streams set, await and count words of 64
// bits, also inside a graph, which repeats it with the numbers that are in memory then.
// Each word is 8 aligned bytes of the device, or of MapHost.
type Signaller interface {
	// WriteSeq makes stream set *flag to *seq when all queued before it is done, visible
	// to the CPU and to other devices.
	WriteSeq(stream uintptr, flag, seq Mem) error
	// WaitSeq makes stream wait until *flag >= *seq, as signed numbers; *seq is read
	// once, when the wait begins. It occupies a little of the device meanwhile.
	WaitSeq(stream uintptr, flag, seq Mem) error
	// AddSeq makes stream add 1 to *seq.
	AddSeq(stream uintptr, seq Mem) error
	// MapHost returns pinned host memory, whoever has pinned it, as memory of the
	// device, with the same owner.
	MapHost(m Mem) (Mem, error)
}

// StreamBlocker is implemented by devices whose driver waits for all their streams before
// it frees or unmaps memory, and begins no copy meanwhile.
type StreamBlocker interface {
	// MayBlock tells whether streams may wait for what the CPU does, that is, whether one
	// was ever told to by WaitFlag or WaitSeq, of this backend or of another one of the
	// device in this process: in a graph it waits at any time. If what it waits for is a
	// message, whoever receives must not free or unmap anything, but leaves it to the
	// backend's Close, which frees what is left when the streams have ended.
	MayBlock() bool
}

// Export names device memory for another process of this host.
type Export struct {
	// Handle is the driver's name of the whole allocation (CUipcMemHandle).
	Handle [64]byte
	// Allocation is different for every allocation that the process ever makes, so that
	// freed memory is told from new memory at the same address.
	Allocation uint64
	// Base and Size are the allocation's address here and its length in bytes.
	Base uint64
	Size int
	// Offset is where the memory begins in it, in bytes.
	Offset int
}

// Exporter is implemented by backends that share device memory between processes.
type Exporter interface {
	// Export describes m, which must lie in one allocation. It wraps ErrNotExportable
	// for memory that the driver cannot share (of a memory pool, or of PyTorch with
	// expandable segments).
	Export(m Mem) (Export, error)
	// Import maps the allocation that e names and returns all of it, as memory of this
	// device, which reaches it wherever it lies. Only another process than the exporting
	// one can do so. Every Import needs one CloseImport; those of one allocation share the
	// mapping. The memory exists until then, also when the exporter frees it or ends.
	Import(e Export) (Mem, error)
	// CloseImport gives back what Import returned.
	CloseImport(Mem) error
}

// DMABufExporter is implemented by backends that give device memory to other devices,
// such as a network card, as a Linux dma-buf.
type DMABufExporter interface {
	// ExportDMABuf returns a file descriptor, which the caller closes, and where in it m
	// begins, in bytes. It wraps ErrUnsupported or ErrNotExportable.
	ExportDMABuf(m Mem) (fd int, offset int, err error)
}

// Info describes a device.
type Info struct {
	Device       Device
	Name         string // such as "NVIDIA H200"
	UUID         string
	PCIBusID     string // such as "0000:18:00.0"
	Memory       int64  // bytes in all
	Driver       string // what the driver supports, such as "CUDA 13.0"
	StreamFlags  bool   // streams write and await words, see StreamFlagger
	DMABuf       bool   // see DMABufExporter
	ComputeMajor int
	ComputeMinor int
	Peers        []int // devices of this process that it reaches directly
}

// Describer is implemented by backends that know their device. Free is the memory that
// nobody uses, in bytes.
type Describer interface {
	Describe() (info Info, free int64, err error)
}

// DeviceError is a call of a device's driver that failed.
type DeviceError struct {
	Device Device
	Op     string // what was being done, such as "Alloc of 4096 bytes"
	Call   string // the driver's function
	Code   int    // its result
	Name   string // and that in words, such as "CUDA_ERROR_OUT_OF_MEMORY"
	Detail string // more of the circumstances; may be empty
	Kind   error  // one of the errors above, or nil
}

// Error names device, operation, driver call and result.
func (e *DeviceError) Error() string {
	s := fmt.Sprintf("%s: %s: %s: %s (%d)", e.Device, e.Op, e.Call, e.Name, e.Code)
	if e.Kind != nil {
		s += ": " + e.Kind.Error()
	}
	if e.Detail != "" {
		s += "; " + e.Detail
	}
	return s
}

// Unwrap returns Kind.
func (e *DeviceError) Unwrap() error { return e.Kind }

// CheckDevice refuses memory that a node with backend b cannot use: that of another
// device. Host memory is always fine. The error wraps ErrWrongDevice.
func CheckDevice(b Backend, m Mem) error {
	switch own := b.Device(); {
	case m.OnHost() || m.dev == own:
		return nil
	case own.Type == CPU:
		return fmt.Errorf("tensor on %s but this node's backend is %s (STEPMESH_BAKCEND): %w", m.dev, b.Name(), ErrWrongDevice)
	default:
		return fmt.Errorf("tensor on %s but this node owns %s (STEPMESH_GPU): %w", m.dev, own, ErrWrongDevice)
	}
}

// SyncCopy is Copy for memory whose contents another stream is still making: it waits
// for e first, which may be nil.
func SyncCopy(ctx context.Context, b Backend, dst, src Mem, e Event) error {
	if e != nil {
		if err := e.Sync(ctx); err != nil {
			return err
		}
	}
	return b.Copy(dst, src)
}
