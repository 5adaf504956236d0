package backend

// Optional abilities of a device beyond Backend, and the errors that devices report.

import (
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
	// Spin is how long a wait spins before it sleeps: 0 not at all, negative forever.
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
	// FreeStream releases a stream of NewStream; work that is queued there still runs.
	FreeStream(stream uintptr) error
	// CopyAsync queues a copy of src into dst on stream. Both must stay valid until an
	// event recorded on stream afterwards is done. Host memory should be pinned, see
	// HostPinner; with other memory the call may wait for the copy, and for all that is
	// queued on stream before it.
	CopyAsync(dst, src Mem, stream uintptr) error
	// CopyRecord is CopyAsync, and e.Record behind it, at the price of less than both. Its error does not report whether the copy
	// is queued. e is of this backend.
	CopyRecord(dst, src Mem, stream uintptr, e Event) error
}

// StreamIdler is implemented by backends that can tell whether all work queued on a stream
// is done. Idle never waits; a stream that is being captured into a graph is not idle.
type StreamIdler interface {
	Idle(stream uintptr) (bool, error)
}

// HealthChecker is implemented by devices that can fail permanently. Health then returns
// an error that wraps ErrDeviceLost.
type HealthChecker interface{ Health() error }

// HostPinner is implemented by backends that copy faster, and asynchronously, from
// and to host memory that is pinned.
type HostPinner interface {
	// AllocPinned returns n bytes of pinned host memory (OnHost), aligned to pages and
	// mapped into the device.
	AllocPinned(n int) (Mem, error)
	// FreePinned releases memory of AllocPinned.
	FreePinned(Mem) error
	// RegisterHost pins the caller's host memory, such as a shared-memory segment, and
	// returns it as memory that the device can use. The range must not overlap another
	// registered one. It must not be Go heap memory, which no check detects.
	RegisterHost(Mem) (Mem, error)
	// UnregisterHost ends a RegisterHost. It takes what that returned.
	UnregisterHost(Mem) error
}

// PinTeller is implemented by HostPinners that know their memory.
type PinTeller interface {
	// Pinned reports whether all of m is host memory of AllocPinned or RegisterHost of this backend.
	Pinned(m Mem) bool
}

// StreamFlagger is implemented by backends whose streams write and await 32-bit words
// without the CPU and without a kernel.
type StreamFlagger interface {
	// WriteFlag makes stream write v into the first 4 bytes of word when all work queued
	// before is done and visible. word is 4-byte aligned and pinned or registered
	// host memory of this backend, or memory of the device.
	WriteFlag(stream uintptr, word Mem, v uint32) error
	// WriteFlags is WriteFlag for each of l, in their order, which costs about as much as one.
	WriteFlags(stream uintptr, l []FlagWrite) error
	// CopyFlags is AsyncCopier's CopyAsync, and WriteFlags behind it, at the price of less than both. On a stream that is
	// being captured into a graph it is an error that wraps ErrUnsupported, and nothing is queued; other errors do not report whether the copy is.
	CopyFlags(dst, src Mem, stream uintptr, l []FlagWrite) error
	// WaitFlag makes stream wait until int32(*word - v) >= 0.
	WaitFlag(stream uintptr, word Mem, v uint32) error
}

// FlagWrite is a word and the value to be written into it, see StreamFlagger.
type FlagWrite struct {
	Word Mem
	V    uint32
}

// GraphFlagger is implemented by StreamFlaggers whose WriteFlag and WaitBits may also be
// captured into a graph, to be done at each replay.
type GraphFlagger interface {
	StreamFlagger
	// WaitBits makes stream wait until one of bits is set in the first 8 bytes of word,
	// which are aligned, and otherwise as in StreamFlagger.
	WaitBits(stream uintptr, word Mem, bits uint64) error
	// WaitCount makes stream wait until the number in the first 8 bytes of word is n or more,
	// both below 1<<63, and otherwise as WaitBits.
	WaitCount(stream uintptr, word Mem, n uint64) error
	// Capturing reports whether work queued on stream now goes into a graph.
	Capturing(stream uintptr) (bool, error)
	// Follow makes stream wait for the work that is queued on other. If other is being captured, stream joins its capture.
	Follow(stream, other uintptr) error
	// Point returns the position in the work captured on stream. at[0] identifies the capture. It is 0 if stream is not being captured,
	// or if its next work depends on more than 4 nodes.
	Point(stream uintptr) (at [6]uintptr, err error)
	// Rewind makes later work of stream wait only for the work before at, a Point of the capture that stream has joined.
	Rewind(stream uintptr, at [6]uintptr) error
}

// Signaller is implemented by backends whose streams set, await and increment 64-bit
// words, also inside a graph: each replay uses the numbers that are in memory then.
// Each word is 8 aligned bytes of the device, or of MapHost.
type Signaller interface {
	// WriteSeq makes stream set *flag to *seq, visible to the CPU and to other devices,
	// when all work queued before is done.
	WriteSeq(stream uintptr, flag, seq Mem) error
	// WaitSeq makes stream wait until *flag >= *seq, as signed numbers; *seq is read
	// once, when the wait begins. One thread of the device is busy meanwhile.
	WaitSeq(stream uintptr, flag, seq Mem) error
	// AddSeq makes stream add 1 to *seq.
	AddSeq(stream uintptr, seq Mem) error
	// MapHost returns pinned host memory as memory of the device, with the same owner. It
	// need not have been pinned by this backend.
	MapHost(m Mem) (Mem, error)
}

// GatedCopy is a copy of Src to Dst, both memory of the device, as soon as one of the 8 bytes of Gate is not 0. If one of the last 4 is
// not 0, nothing is copied.
type GatedCopy struct{ Dst, Src, Gate Mem }

// GatedCopier is implemented by backends whose streams copy with a kernel. A copy by a copy engine that waits for the
// earlier work of its stream holds up the later copies of other streams.
type GatedCopier interface {
	// CopyGated makes stream do the copies, in any order or at the same time. It may be captured into a graph. The first call
	// loads the kernel, which can wait for all streams.
	CopyGated(copies []GatedCopy, stream uintptr) error
}

// StreamBlocker is implemented by devices whose driver waits for all their streams before
// it frees or unmaps memory, and begins no copy meanwhile.
type StreamBlocker interface {
	// MayBlock reports whether streams may be waiting for the CPU: whether WaitFlag, WaitBits or
	// WaitSeq was ever called on any backend of the device in this process. A captured
	// wait may run whenever its graph is launched. If a stream waits for a message, a
	// receiver that freed or unmapped memory would deadlock with it; it must leave that
	// to the backend's Close, which frees what is left when the streams have ended.
	MayBlock() bool
}

// MayBlockOf returns MayBlock of b, which is always false for backends without it.
func MayBlockOf(b Backend) func() bool {
	if s, is := b.(StreamBlocker); is {
		return s.MayBlock
	}
	return func() bool { return false }
}

// Export names device memory for another process of this host.
type Export struct {
	// Handle is the driver's name of the whole allocation (CUipcMemHandle).
	Handle [64]byte
	// Allocation is different for every allocation that the process ever makes. It
	// distinguishes freed memory from new memory at the same address.
	Allocation uint64
	// Base and Size are the allocation's address here and its length in bytes.
	Base uint64
	Size int
	// Offset is where the memory begins in it, in bytes.
	Offset int
}

// Exporter is implemented by backends that share device memory between processes.
type Exporter interface {
	// Export describes m, which must lie in one allocation. The error wraps
	// ErrNotExportable for memory that the driver cannot share (of a memory pool, or of
	// PyTorch with expandable segments).
	Export(m Mem) (Export, error)
	// Import maps the allocation that e names and returns all of it, as memory of this
	// device, also if it lies on another one. It fails in the exporting process. Every
	// Import needs one CloseImport; Imports of one allocation share the mapping. The
	// memory exists until then, even if the exporter frees it or ends.
	Import(e Export) (Mem, error)
	// CloseImport releases memory that Import returned.
	CloseImport(Mem) error
}

// Segment is a part of device memory that was mapped from an allocation of its own
// (cuMemCreate, cuMemMap).
type Segment struct {
	// ID is different for every allocation that the process ever shares: memory that was
	// unmapped and mapped anew at the same address has another one.
	ID uint64
	// Base and Size are where the allocation is mapped here, and its length in bytes.
	Base uint64
	Size int
	// Offset and Len are the selected part of it, in bytes.
	Offset, Len int
}

// Shared names device memory of any kind for another process of this host.
type Shared struct {
	// Export is set, and Segments is empty, for memory that Exporter shares.
	Export
	// Segments are the parts in which the memory lies, in order.
	Segments []Segment
}

// Sharer is implemented by exporters that also share memory which is mapped from several
// allocations, as PyTorch's is with expandable segments. Each of these travels once to each
// process, as a file descriptor, and keeps its name, Segment.ID, until it is unmapped.
type Sharer interface {
	Exporter
	// Share describes m in s, whose Segments it uses again. The error wraps
	// ErrNotExportable for memory that the driver cannot share, as of a memory pool.
	Share(s *Shared, m Mem) error
	// SegmentFile returns a file descriptor of the whole allocation, which the caller
	// closes.
	SegmentFile(s Segment) (fd int, err error)
	// HasSegment reports whether s was still mapped at the last call of TidySegments. It is cheap.
	HasSegment(s Segment) bool
	// TidySegments removes memory that is not mapped any more, and thereby releases it.
	TidySegments() error
	// ImportSegment maps the allocation of size bytes whose descriptor fd is, which the
	// caller closes. It returns it as memory of this device, also if it lies on another
	// one, until CloseImport, even if the exporter unmaps it or ends.
	ImportSegment(fd, size int) (Mem, error)
}

// DMABufExporter is implemented by backends that give device memory to other devices,
// such as a network card, as a Linux dma-buf.
type DMABufExporter interface {
	// ExportDMABuf returns a file descriptor, which the caller closes, and the offset of m
	// in it, in bytes. The error wraps ErrUnsupported or ErrNotExportable.
	ExportDMABuf(m Mem) (fd int, offset int, err error)
}

// Info describes a device.
type Info struct {
	Device       Device
	Name         string // such as "NVIDIA H200"
	UUID         string
	PCIBusID     string // such as "0000:18:00.0"
	Memory       int64  // bytes in all
	Driver       string // the version that the driver supports, such as "CUDA 13.0"
	StreamFlags  bool   // streams write and await words, see StreamFlagger
	DMABuf       bool   // see DMABufExporter
	ComputeMajor int
	ComputeMinor int
	Peers        []int // devices of this process that it reaches directly
}

// Describer is implemented by backends that know their device. free is the unused memory
// in bytes.
type Describer interface {
	Describe() (info Info, free int64, err error)
}

// DeviceError is a call of a device's driver that failed.
type DeviceError struct {
	Device Device
	Op     string // the failed operation, such as "Alloc of 4096 bytes"
	Call   string // the driver's function
	Code   int    // its result
	Name   string // the name of Code, such as "CUDA_ERROR_OUT_OF_MEMORY"
	Detail string // circumstances; may be empty
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

// CheckDevice returns an error that wraps ErrWrongDevice if m lies on a device other than
// b's. Host memory is always accepted.
func CheckDevice(b Backend, m Mem) error { return checkDevice(b.Device(), b.Name(), m) }

func checkDevice(own Device, backend string, m Mem) error {
	switch {
	case m.OnHost() || m.Device() == own:
		return nil
	case own.Type == CPU:
		return fmt.Errorf("tensor on %s but this node's backend is %s (STEPMESH_BAKCEND): %w", m.Device(), backend, ErrWrongDevice)
	default:
		return fmt.Errorf("tensor on %s but this node owns %s (STEPMESH_GPU): %w", m.Device(), own, ErrWrongDevice)
	}
}
