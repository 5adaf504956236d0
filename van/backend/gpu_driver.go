package backend

// The interface between the GPU backend and the CUDA driver.

import (
	"fmt"
	"sync/atomic"
	"unsafe"
)

// driver is the part of the CUDA driver API that the GPU backend uses: one method for one
// function, so that the backend's logic can be tested with a fake driver. Handles and
// device addresses are integers. Errors are *driverError. Each part of the backend sees the
// functions that it needs.
//
// Methods that need a context run between enter and leave, on one thread.
type driver interface {
	deviceDriver
	memoryDriver
	streamDriver
	shareDriver
	onceDriver
}

// deviceDriver tells of devices, and opens and enters them.
type deviceDriver interface {
	start() error // cuInit, once
	version() (int, error)
	count() (int, error)
	device(ordinal int) (int, error)
	name(dev int) (string, error)
	uuid(dev int) (string, error)
	pciBusID(dev int) (string, error)
	totalMem(dev int) (int64, error)
	attribute(dev int, a deviceAttribute) (int, error)
	canAccessPeer(dev, peer int) (bool, error)
	retain(dev int) (uintptr, error)
	release(dev int) error

	// mayBlock is set when streams of dev's primary context may wait for the CPU. All
	// backends of dev in this process share it.
	mayBlock(dev int) *atomic.Bool

	// enter makes ctx current on the calling thread, and allows calls that a graph
	// capture on another thread would forbid; leave restores the former state.
	enter(ctx uintptr) (driverState, error)
	leave(driverState) error
	synchronize() error // waits for all streams of the context
}

// memoryDriver allocates memory of the device, and pins the host's.
type memoryDriver interface {
	memInfo() (free, total int64, err error)
	memAlloc(n int) (uintptr, error)
	memFree(addr uintptr) error
	hostRegister(p unsafe.Pointer, n int) error
	hostUnregister(p unsafe.Pointer) error
	hostDeviceAddr(p unsafe.Pointer) (uintptr, error)
}

// streamDriver makes streams and events, and queues copies, writes, waits and kernels there.
type streamDriver interface {
	streamCreate() (uintptr, error)
	streamDestroy(s uintptr) error
	streamQuery(s uintptr) error // codeNotReady while busy
	streamCapturing(s uintptr) (bool, error)
	writeValue32(s, addr uintptr, v uint32) error
	writeValues32(s uintptr, w wordWrites) error
	waitValue32(s, addr uintptr, v uint32) error // int32(*addr - v) >= 0
	waitBits64(s, addr uintptr, v uint64) error  // *addr & v != 0
	waitValue64(s, addr uintptr, v uint64) error // int64(*addr - v) >= 0
	copyAsync(dst, src uintptr, n int, s uintptr) error
	copyToDevice(dst uintptr, src unsafe.Pointer, n int, s uintptr) error
	copyToHost(dst unsafe.Pointer, src uintptr, n int, s uintptr) error

	eventCreate() (uintptr, error)
	eventDestroy(e uintptr) error
	eventRecord(e, s uintptr) error
	eventQuery(e uintptr) error // codeNotReady while busy

	streamWait(s, e uintptr) error                     // s waits for the last record of e; if that is captured, s joins the capture
	capturePoint(s uintptr) (at [6]uintptr, err error) // see GraphFlagger.Point
	captureRewind(s uintptr, at [6]uintptr) error      // see GraphFlagger.Rewind

	moduleLoad(ptx string) (uintptr, error)
	moduleUnload(m uintptr) error
	moduleFunction(m uintptr, name string) (uintptr, error)
	launch(f, s, a, b uintptr) error // one thread of f
	launchCopies(f, s uintptr, g grid, c kernelCopies) error
}

// grid is the grid of the kernel that copies: so many blocks of threads for each copy.
type grid struct{ blocks, copies, threads int }

// kernelCopies are the argument of the kernel that copies.
type kernelCopies [16]kernelCopy

type kernelCopy struct{ dst, src, n, gate uintptr }

// stepaf_copies in gpu_cuda_extra.h, and copies in gpu_signal.ptx, have the same size.
var _ [512]byte = [unsafe.Sizeof(kernelCopies{})]byte{}

// wordWrites are the first n of some writes, in their order.
type wordWrites struct {
	n      int
	addrs  [4]uintptr
	values [4]uint32
}

// shareDriver names memory for other processes and devices, and maps theirs.
type shareDriver interface {
	addressRange(addr uintptr) (base uintptr, n int, err error)
	ipcOpen(h [64]byte) (uintptr, error)
	ipcClose(addr uintptr) error
	dmabuf(addr uintptr, n int) (fd int, err error)

	handleAt(addr uintptr) (h uint64, err error)      // of the allocation that is mapped there; the caller releases it
	handleRelease(h uint64) error                     // gives back one hold
	handleShareable(h uint64) (bool, error)           // whether it is a device's, and has a descriptor
	handleExport(h uint64) (fd int, err error)        // the caller closes fd
	handleImport(fd int) (h uint64, err error)        // leaves fd to the caller
	addressReserve(n int) (uintptr, error)            // addresses without memory
	addressFree(addr uintptr, n int) error            // ends addressReserve
	memMap(addr uintptr, n int, h uint64) error       // of h's first n bytes
	memUnmap(addr uintptr, n int) error               // ends memMap
	memAccess(addr uintptr, n int, ordinal int) error // lets that device read and write
}

// onceDriver has what is called for every message, each a single call of C, which enters ctx and
// leaves it. Their errors name the function of the driver that has failed.
type onceDriver interface {
	// idleIn reports whether all work queued on s is done. A stream that is being captured is not idle.
	idleIn(ctx, s uintptr) (bool, error)
	// copyIn queues a copy from device to device, and behind it the writes. On a stream that is being captured it queues
	// nothing. Several writes may be what the driver does not support, with the copy queued.
	copyIn(ctx, dst, src uintptr, n int, s uintptr, w wordWrites) (captured bool, err error)
	// nameIn finds the allocation in which addr lies, and its name for other processes. With an error it returns what it has found.
	nameIn(ctx, addr uintptr) (named, error)
}

// named is an allocation, and its name for other processes.
type named struct {
	base   uintptr
	n      int
	id     uint64
	handle [64]byte
	known  bool // all but the handle
}

// callLeave is what errors of leaving the context name.
const callLeave = "cuCtxPopCurrent"

// driverState is what leave restores.
type driverState struct {
	pushed bool
	mode   int32
}

// deviceAttribute is CUdevice_attribute.
type deviceAttribute int

const (
	attrComputeMajor deviceAttribute = 75
	attrComputeMinor deviceAttribute = 76
	attrDMABuf       deviceAttribute = 124
)

// Results of the driver that the backend distinguishes (CUresult).
const (
	codeOutOfMemory        = 2
	codeDeinitialized      = 4
	codeNoDevice           = 100
	codeECC                = 214
	codeNVLink             = 220
	codeNotReady           = 600
	codeIllegalAddress     = 700
	codeLaunchTimeout      = 702
	codeContextDestroyed   = 709
	codeAssert             = 710
	codeHardwareStack      = 714
	codeIllegalInstruction = 715
	codeMisaligned         = 716
	codeInvalidSpace       = 717
	codeInvalidPC          = 718
	codeLaunchFailed       = 719
	codeNotPermitted       = 800
	codeNotSupported       = 801
)

// driverError is a result other than success.
type driverError struct {
	call string // the function
	code int
	name string // of the code
}

func (e *driverError) Error() string { return fmt.Sprintf("%s: %s (%d)", e.call, e.name, e.code) }

// kind returns the package's error for the code, or nil.
func (e *driverError) kind() error {
	switch e.code {
	case codeOutOfMemory:
		return ErrNoMemory
	case codeNotSupported, codeNotPermitted:
		return ErrUnsupported
	case codeDeinitialized, codeECC, codeNVLink, codeIllegalAddress, codeLaunchTimeout, codeContextDestroyed, codeAssert,
		codeHardwareStack, codeIllegalInstruction, codeMisaligned, codeInvalidSpace, codeInvalidPC, codeLaunchFailed:
		return ErrDeviceLost
	}
	return nil
}

// notReady reports whether err is the driver's result for "not done yet".
func notReady(err error) bool {
	e, ok := err.(*driverError) // never wrapped here, and errors.As would allocate
	return ok && e.code == codeNotReady
}

// batchWrites is the function that writes several words at once.
const batchWrites = "cuStreamBatchMemOp"

// notSupported reports whether err is the driver's result for an unsupported operation.
func notSupported(err error) bool {
	e, ok := err.(*driverError)
	return ok && e.code == codeNotSupported
}

// pointer converts addr, which must not be on Go's heap, to a pointer.
func pointer(addr uintptr) unsafe.Pointer { return *(*unsafe.Pointer)(unsafe.Pointer(&addr)) }
