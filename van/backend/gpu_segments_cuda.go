//go:build cuda

package backend

// The driver's functions for memory that is mapped from allocations (cuMemCreate).

/*
#cgo noescape stepaf_handle_at
#cgo nocallback stepaf_handle_at
#cgo nocallback stepaf_handle_release
#include <stdint.h>
#include <cuda.h>

static CUresult stepaf_handle_at(uintptr_t addr, uint64_t *out) {
	CUmemGenericAllocationHandle h = 0;
	CUresult r = cuMemRetainAllocationHandle(&h, (void *)addr);
	*out = h;
	return r;
}

static CUresult stepaf_handle_release(uint64_t h) { return cuMemRelease(h); }

static CUresult stepaf_handle_shareable(uint64_t h, int *yes) {
	CUmemAllocationProp p = {0};
	CUresult r = cuMemGetAllocationPropertiesFromHandle(&p, h);
	*yes = p.location.type == CU_MEM_LOCATION_TYPE_DEVICE && (p.requestedHandleTypes & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
	return r;
}

static CUresult stepaf_handle_export(uint64_t h, int *fd) { return cuMemExportToShareableHandle(fd, h, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0); }

static CUresult stepaf_handle_import(int fd, uint64_t *out) {
	CUmemGenericAllocationHandle h = 0;
	CUresult r = cuMemImportFromShareableHandle(&h, (void *)(uintptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
	*out = h;
	return r;
}

static CUresult stepaf_mem_access(uintptr_t addr, size_t n, int device) {
	CUmemAccessDesc d = {0};
	d.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
	d.location.id = device;
	d.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE; // the driver has no other that peers may use
	return cuMemSetAccess(addr, n, &d, 1);
}
*/
import "C"

func (cuda) handleAt(addr uintptr) (uint64, error) {
	var h C.uint64_t
	r := C.stepaf_handle_at(C.uintptr_t(addr), &h)
	return uint64(h), result("cuMemRetainAllocationHandle", int(r))
}

func (cuda) handleRelease(h uint64) error {
	return result("cuMemRelease", int(C.stepaf_handle_release(C.uint64_t(h))))
}

func (cuda) handleShareable(h uint64) (bool, error) {
	var yes C.int
	r := C.stepaf_handle_shareable(C.uint64_t(h), &yes)
	return yes != 0, result("cuMemGetAllocationPropertiesFromHandle", int(r))
}

func (cuda) handleExport(h uint64) (int, error) {
	fd := C.int(-1)
	r := C.stepaf_handle_export(C.uint64_t(h), &fd)
	return int(fd), result("cuMemExportToShareableHandle", int(r))
}

func (cuda) handleImport(fd int) (uint64, error) {
	var h C.uint64_t
	r := C.stepaf_handle_import(C.int(fd), &h)
	return uint64(h), result("cuMemImportFromShareableHandle", int(r))
}

func (cuda) addressReserve(n int) (uintptr, error) {
	var p C.CUdeviceptr
	r := C.cuMemAddressReserve(&p, C.size_t(n), 0, 0, 0)
	return uintptr(p), result("cuMemAddressReserve", int(r))
}

func (cuda) addressFree(addr uintptr, n int) error {
	return result("cuMemAddressFree", int(C.cuMemAddressFree(C.CUdeviceptr(addr), C.size_t(n))))
}

func (cuda) memMap(addr uintptr, n int, h uint64) error {
	return result("cuMemMap", int(C.cuMemMap(C.CUdeviceptr(addr), C.size_t(n), 0, C.CUmemGenericAllocationHandle(h), 0)))
}

func (cuda) memUnmap(addr uintptr, n int) error {
	return result("cuMemUnmap", int(C.cuMemUnmap(C.CUdeviceptr(addr), C.size_t(n))))
}

func (cuda) memAccess(addr uintptr, n, ordinal int) error {
	return result("cuMemSetAccess", int(C.stepaf_mem_access(C.uintptr_t(addr), C.size_t(n), C.int(ordinal))))
}
