//go:build cuda

package backend

// Functions of the driver API that gorgonia.org/cu lacks, and functions that are called for
// every message: cu allocates an error for "not ready", and does not accept host memory
// that lies in a Go object with pointers.
//
// The program is not linked with the driver's library: see gpu_cuda_load.c.

/*
#cgo linux CFLAGS: -I/usr/local/cuda/include
#cgo linux LDFLAGS: -Wl,--as-needed -ldl
#cgo noescape stepaf_enter
#cgo nocallback stepaf_enter
#cgo noescape stepaf_capturing
#cgo nocallback stepaf_capturing
#cgo noescape stepaf_range
#cgo nocallback stepaf_range
#cgo noescape stepaf_idle_in
#cgo nocallback stepaf_idle_in
#cgo noescape stepaf_copy_in
#cgo nocallback stepaf_copy_in
#cgo noescape stepaf_name_in
#cgo nocallback stepaf_name_in
#cgo noescape stepaf_handle_at
#cgo nocallback stepaf_handle_at
#cgo nocallback stepaf_handle_release
#include "gpu_cuda_extra.h"
*/
import "C"

import (
	"sync"
	"unsafe"
)

// The driver's handles are 64 bytes long; so is Export.Handle.
var _ [C.sizeof_CUipcMemHandle]byte = [64]byte{}

// result makes a *driverError of a CUresult, or nil of success.
func result(call string, code int) error {
	switch code {
	case C.CUDA_SUCCESS:
		return nil
	case codeNotReady: // frequent, so it must not allocate
		return errNotReady
	}
	return &driverError{call: call, code: code, name: C.GoString(C.stepaf_name(C.CUresult(code)))}
}

var errNotReady = &driverError{call: "cuStreamQuery or cuEventQuery", code: codeNotReady, name: "CUDA_ERROR_NOT_READY"}

// steps are the functions that calls of several may fail in.
var steps = [...]string{C.STEP_ENTER: "cuCtxPushCurrent", C.STEP_CAPTURING: "cuStreamIsCapturing", C.STEP_QUERY: "cuStreamQuery", C.STEP_COPY: "cuMemcpyAsync",
	C.STEP_WRITE: "cuStreamWriteValue32_v2", C.STEP_WRITES: batchWrites, C.STEP_RANGE: "cuMemGetAddressRange", C.STEP_ID: "cuPointerGetAttribute(BUFFER_ID)", C.STEP_EXPORT: "cuIpcGetMemHandle",
	C.STEP_LEAVE: callLeave}

func (cudaOnce) idleIn(ctx, s uintptr) (bool, error) {
	var captured, step C.int
	r := C.stepaf_idle_in(C.uintptr_t(ctx), C.uintptr_t(s), &captured, &step)
	if r == C.CUDA_ERROR_NOT_READY {
		return false, nil
	}
	return captured == 0 && r == C.CUDA_SUCCESS, result(steps[step], int(r))
}

func (cudaOnce) copyIn(ctx, dst, src uintptr, n int, s uintptr, w wordWrites) (bool, error) {
	a, v := &w.addrs, &w.values
	var captured, step C.int
	r := C.stepaf_copy_in(C.uintptr_t(ctx), C.CUdeviceptr(dst), C.CUdeviceptr(src), C.size_t(n), C.uintptr_t(s),
		C.unsigned(w.n), C.CUdeviceptr(a[0]), C.CUdeviceptr(a[1]), C.CUdeviceptr(a[2]), C.CUdeviceptr(a[3]),
		C.uint32_t(v[0]), C.uint32_t(v[1]), C.uint32_t(v[2]), C.uint32_t(v[3]), &captured, &step)
	return captured != 0, result(steps[step], int(r))
}

func (cudaOnce) nameIn(ctx, addr uintptr) (n named, err error) {
	var out C.stepaf_named
	var step C.int
	r := C.stepaf_name_in(C.uintptr_t(ctx), C.CUdeviceptr(addr), &out, &step)
	n.base, n.n, n.id = uintptr(out.base), int(out.n), uint64(out.id)
	n.handle, n.known = *(*[64]byte)(unsafe.Pointer(&out.handle)), step >= C.STEP_EXPORT
	return n, result(steps[step], int(r))
}

// started opens the driver, once in a process.
var started = sync.OnceValue(func() error {
	var text [256]C.char
	code := C.stepaf_cuda_init(&text[0], C.size_t(len(text)))
	if code < 0 {
		return &driverError{call: "dlopen", code: int(code), name: C.GoString(&text[0])}
	}
	return result("cuInit", int(code))
})

func (cudaDevices) start() error { return started() }

func (cudaDevices) version() (int, error) {
	var v C.int
	r := C.cuDriverGetVersion(&v)
	return int(v), result("cuDriverGetVersion", int(r))
}

func (cudaDevices) pciBusID(dev int) (string, error) {
	var id [32]C.char
	r := C.cuDeviceGetPCIBusId(&id[0], C.int(len(id)), C.CUdevice(dev))
	return C.GoString(&id[0]), result("cuDeviceGetPCIBusId", int(r))
}

func (cudaDevices) enter(ctx uintptr) (driverState, error) {
	var mode, pushed C.int32_t
	r := C.stepaf_enter(C.uintptr_t(ctx), &mode, &pushed)
	return driverState{pushed: pushed != 0, mode: int32(mode)}, result("cuCtxPushCurrent", int(r))
}

func (cudaDevices) leave(s driverState) error {
	var pushed C.int32_t
	if s.pushed {
		pushed = 1
	}
	return result(callLeave, int(C.stepaf_leave(C.int32_t(s.mode), pushed)))
}

func (cudaMemory) hostRegister(p unsafe.Pointer, n int) error {
	r := C.cuMemHostRegister(p, C.size_t(n), C.CU_MEMHOSTREGISTER_PORTABLE|C.CU_MEMHOSTREGISTER_DEVICEMAP)
	return result("cuMemHostRegister", int(r))
}

func (cudaMemory) hostUnregister(p unsafe.Pointer) error {
	return result("cuMemHostUnregister", int(C.cuMemHostUnregister(p)))
}

func (cudaMemory) hostDeviceAddr(p unsafe.Pointer) (uintptr, error) {
	var d C.CUdeviceptr
	r := C.cuMemHostGetDevicePointer(&d, p, 0)
	return uintptr(d), result("cuMemHostGetDevicePointer", int(r))
}

func (cudaStreams) streamCapturing(s uintptr) (bool, error) {
	var yes C.int
	r := C.stepaf_capturing(C.uintptr_t(s), &yes)
	return yes != 0, result("cuStreamIsCapturing", int(r))
}

func (cudaStreams) writeValues32(s uintptr, w wordWrites) error {
	a, v := &w.addrs, &w.values
	r := C.stepaf_writes(C.uintptr_t(s), C.unsigned(w.n), C.CUdeviceptr(a[0]), C.CUdeviceptr(a[1]), C.CUdeviceptr(a[2]), C.CUdeviceptr(a[3]),
		C.uint32_t(v[0]), C.uint32_t(v[1]), C.uint32_t(v[2]), C.uint32_t(v[3]))
	return result(batchWrites, int(r))
}

func (cudaStreams) writeValue32(s, addr uintptr, v uint32) error {
	return result("cuStreamWriteValue32_v2", int(C.stepaf_write(C.uintptr_t(s), C.CUdeviceptr(addr), C.uint32_t(v))))
}

func (cudaStreams) waitValue32(s, addr uintptr, v uint32) error {
	return result("cuStreamWaitValue32_v2", int(C.stepaf_wait(C.uintptr_t(s), C.CUdeviceptr(addr), C.uint32_t(v))))
}

func (cudaStreams) waitBits64(s, addr uintptr, v uint64) error {
	return result("cuStreamWaitValue64_v2", int(C.stepaf_wait_bits(C.uintptr_t(s), C.CUdeviceptr(addr), C.uint64_t(v))))
}

func (cudaStreams) waitValue64(s, addr uintptr, v uint64) error {
	return result("cuStreamWaitValue64_v2", int(C.stepaf_wait_count(C.uintptr_t(s), C.CUdeviceptr(addr), C.uint64_t(v))))
}

func (cudaStreams) streamQuery(s uintptr) error {
	return result("cuStreamQuery", int(C.stepaf_stream_query(C.uintptr_t(s))))
}

func (cudaStreams) streamWait(s, e uintptr) error {
	return result("cuStreamWaitEvent", int(C.stepaf_wait_event(C.uintptr_t(s), C.uintptr_t(e))))
}

func (cudaStreams) capturePoint(s uintptr) (at [6]uintptr, err error) {
	var id C.uint64_t
	var n C.size_t
	var nodes [4]C.uintptr_t
	if err := result("cuStreamGetCaptureInfo_v2", int(C.stepaf_capture_point(C.uintptr_t(s), &id, &n, &nodes[0]))); err != nil || n > 4 {
		return at, err
	}
	at = [6]uintptr{uintptr(id), uintptr(n)}
	for i := range nodes {
		at[2+i] = uintptr(nodes[i])
	}
	return at, nil
}

func (cudaStreams) captureRewind(s uintptr, at [6]uintptr) error {
	r := C.stepaf_capture_rewind(C.uintptr_t(s), C.size_t(at[1]), C.uintptr_t(at[2]), C.uintptr_t(at[3]), C.uintptr_t(at[4]), C.uintptr_t(at[5]))
	return result("cuStreamUpdateCaptureDependencies", int(r))
}

func (cudaStreams) eventQuery(e uintptr) error {
	return result("cuEventQuery", int(C.stepaf_event_query(C.uintptr_t(e))))
}

func (cudaStreams) copyAsync(dst, src uintptr, n int, s uintptr) error {
	return result("cuMemcpyAsync", int(C.stepaf_copy(C.uintptr_t(dst), C.uintptr_t(src), C.size_t(n), C.uintptr_t(s))))
}

// The caller keeps the host memory reachable until the copy is done. Go does not move heap
// memory.
func (cudaStreams) copyToDevice(dst uintptr, src unsafe.Pointer, n int, s uintptr) error {
	return result("cuMemcpyHtoDAsync", int(C.stepaf_copy_htod(C.uintptr_t(dst), C.uintptr_t(uintptr(src)), C.size_t(n), C.uintptr_t(s))))
}

func (cudaStreams) copyToHost(dst unsafe.Pointer, src uintptr, n int, s uintptr) error {
	return result("cuMemcpyDtoHAsync", int(C.stepaf_copy_dtoh(C.uintptr_t(uintptr(dst)), C.uintptr_t(src), C.size_t(n), C.uintptr_t(s))))
}

func (cudaSharing) addressRange(addr uintptr) (base uintptr, n int, err error) {
	var b C.uintptr_t
	var size C.size_t
	r := C.stepaf_range(C.CUdeviceptr(addr), &b, &size)
	return uintptr(b), int(size), result("cuMemGetAddressRange", int(r))
}

func (cudaSharing) ipcOpen(h [64]byte) (uintptr, error) {
	var p C.CUdeviceptr
	r := C.stepaf_ipc_open(unsafe.Pointer(&h), &p)
	return uintptr(p), result("cuIpcOpenMemHandle", int(r))
}

func (cudaSharing) ipcClose(addr uintptr) error {
	return result("cuIpcCloseMemHandle", int(C.cuIpcCloseMemHandle(C.CUdeviceptr(addr))))
}

func (cudaSharing) dmabuf(addr uintptr, n int) (int, error) {
	fd := C.int(-1)
	r := C.stepaf_dmabuf(C.CUdeviceptr(addr), C.size_t(n), &fd)
	return int(fd), result("cuMemGetHandleForAddressRange", int(r))
}

func (cudaStreams) moduleLoad(ptx string) (uintptr, error) {
	text := C.CString(ptx)
	defer C.free(unsafe.Pointer(text))
	var m C.CUmodule
	r := C.cuModuleLoadData(&m, unsafe.Pointer(text))
	return uintptr(unsafe.Pointer(m)), result("cuModuleLoadData", int(r))
}

func (cudaStreams) moduleUnload(m uintptr) error {
	return result("cuModuleUnload", int(C.cuModuleUnload(C.CUmodule(pointer(m)))))
}

func (cudaStreams) moduleFunction(m uintptr, name string) (uintptr, error) {
	text := C.CString(name)
	defer C.free(unsafe.Pointer(text))
	var f C.CUfunction
	r := C.cuModuleGetFunction(&f, C.CUmodule(pointer(m)), text)
	return uintptr(unsafe.Pointer(f)), result("cuModuleGetFunction", int(r))
}

func (cudaStreams) launch(f, s, a, b uintptr) error {
	return result("cuLaunchKernel", int(C.stepaf_launch(C.CUfunction(pointer(f)), C.uintptr_t(s), C.uint64_t(a), C.uint64_t(b))))
}

func (cudaStreams) launchCopies(f, s uintptr, g grid, c kernelCopies) error {
	r := C.stepaf_launch_copies(C.CUfunction(pointer(f)), C.uintptr_t(s), C.unsigned(g.blocks), C.unsigned(g.copies), C.unsigned(g.threads), *(*C.stepaf_copies)(unsafe.Pointer(&c)))
	return result("cuLaunchKernel", int(r))
}

func (cudaSharing) handleAt(addr uintptr) (uint64, error) {
	var h C.uint64_t
	r := C.stepaf_handle_at(C.uintptr_t(addr), &h)
	return uint64(h), result("cuMemRetainAllocationHandle", int(r))
}

func (cudaSharing) handleRelease(h uint64) error {
	return result("cuMemRelease", int(C.stepaf_handle_release(C.uint64_t(h))))
}

func (cudaSharing) handleShareable(h uint64) (bool, error) {
	var yes C.int
	r := C.stepaf_handle_shareable(C.uint64_t(h), &yes)
	return yes != 0, result("cuMemGetAllocationPropertiesFromHandle", int(r))
}

func (cudaSharing) handleExport(h uint64) (int, error) {
	fd := C.int(-1)
	r := C.stepaf_handle_export(C.uint64_t(h), &fd)
	return int(fd), result("cuMemExportToShareableHandle", int(r))
}

func (cudaSharing) handleImport(fd int) (uint64, error) {
	var h C.uint64_t
	r := C.stepaf_handle_import(C.int(fd), &h)
	return uint64(h), result("cuMemImportFromShareableHandle", int(r))
}

func (cudaSharing) addressReserve(n int) (uintptr, error) {
	var p C.CUdeviceptr
	r := C.cuMemAddressReserve(&p, C.size_t(n), 0, 0, 0)
	return uintptr(p), result("cuMemAddressReserve", int(r))
}

func (cudaSharing) addressFree(addr uintptr, n int) error {
	return result("cuMemAddressFree", int(C.cuMemAddressFree(C.CUdeviceptr(addr), C.size_t(n))))
}

func (cudaSharing) memMap(addr uintptr, n int, h uint64) error {
	return result("cuMemMap", int(C.cuMemMap(C.CUdeviceptr(addr), C.size_t(n), 0, C.CUmemGenericAllocationHandle(h), 0)))
}

func (cudaSharing) memUnmap(addr uintptr, n int) error {
	return result("cuMemUnmap", int(C.cuMemUnmap(C.CUdeviceptr(addr), C.size_t(n))))
}

func (cudaSharing) memAccess(addr uintptr, n, ordinal int) error {
	return result("cuMemSetAccess", int(C.stepaf_mem_access(C.uintptr_t(addr), C.size_t(n), C.int(ordinal))))
}
