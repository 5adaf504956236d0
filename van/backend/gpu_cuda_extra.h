// The functions that gpu_cuda_extra.go calls. Each wraps several calls of the driver API, or one with a struct, in
// one call of C for Go. They are inlined into cgo's stubs, of that one file.
#ifndef STEPAF_GPU_CUDA_EXTRA_H
#define STEPAF_GPU_CUDA_EXTRA_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cuda.h>

#if CUDA_VERSION >= 12000
#define stepaf_write32 cuStreamWriteValue32
#define stepaf_wait32 cuStreamWaitValue32
#define stepaf_wait64 cuStreamWaitValue64
#define stepaf_batch cuStreamBatchMemOp
#else // the first version of these is switched off in today's drivers
#define stepaf_write32 cuStreamWriteValue32_v2
#define stepaf_wait32 cuStreamWaitValue32_v2
#define stepaf_wait64 cuStreamWaitValue64_v2
#define stepaf_batch cuStreamBatchMemOp_v2
#endif

int stepaf_cuda_init(char *text, size_t n); // gpu_cuda_load.c

static const char *stepaf_name(CUresult r) {
	const char *s = NULL;
	return cuGetErrorName(r, &s) == CUDA_SUCCESS && s ? s : "unknown result";
}

// Makes ctx current, unless it is, and allows calls on this thread that a graph capture on
// another one would forbid. *mode and *pushed are for stepaf_leave.
static CUresult stepaf_enter(uintptr_t ctx, int32_t *mode, int32_t *pushed) {
	CUcontext now = NULL;
	CUstreamCaptureMode m = CU_STREAM_CAPTURE_MODE_RELAXED;
	CUresult r = cuCtxGetCurrent(&now);
	if (r != CUDA_SUCCESS) return r;
	*pushed = now != (CUcontext)ctx;
	if (*pushed && (r = cuCtxPushCurrent((CUcontext)ctx)) != CUDA_SUCCESS) return r;
	if ((r = cuThreadExchangeStreamCaptureMode(&m)) != CUDA_SUCCESS && *pushed) cuCtxPopCurrent(&now);
	*mode = m;
	return r;
}

static CUresult stepaf_leave(int32_t mode, int32_t pushed) {
	CUcontext ctx;
	CUstreamCaptureMode m = mode;
	CUresult r = cuThreadExchangeStreamCaptureMode(&m), p = CUDA_SUCCESS;
	if (pushed) p = cuCtxPopCurrent(&ctx);
	return r != CUDA_SUCCESS ? r : p;
}

static CUresult stepaf_capturing(uintptr_t s, int *yes) {
	CUstreamCaptureStatus st = CU_STREAM_CAPTURE_STATUS_NONE;
	CUresult r = cuStreamIsCapturing((CUstream)s, &st);
	*yes = st != CU_STREAM_CAPTURE_STATUS_NONE;
	return r;
}

// cuda.h maps these names to newer functions with other parameters.
extern void *stepaf_cuStreamGetCaptureInfo_v2, *stepaf_cuStreamUpdateCaptureDependencies;

// stepaf_capture_point stores the number of nodes that the next work captured on s waits for in *n, the first 4 in nodes,
// and the capture's number in *id, 0 if there is none.
static CUresult stepaf_capture_point(uintptr_t s, uint64_t *id, size_t *n, uintptr_t nodes[4]) {
	CUresult (*info)(CUstream, CUstreamCaptureStatus *, cuuint64_t *, CUgraph *, const CUgraphNode **, size_t *) = stepaf_cuStreamGetCaptureInfo_v2;
	CUstreamCaptureStatus st = CU_STREAM_CAPTURE_STATUS_NONE;
	const CUgraphNode *all = NULL;
	cuuint64_t number = 0;
	CUresult r = info((CUstream)s, &st, &number, NULL, &all, n);
	*id = number;
	if (r != CUDA_SUCCESS || st != CU_STREAM_CAPTURE_STATUS_ACTIVE) *id = *n = 0;
	for (size_t i = 0; i < *n && i < 4; i++) nodes[i] = (uintptr_t)all[i];
	return r;
}

static CUresult stepaf_capture_rewind(uintptr_t s, size_t n, uintptr_t a, uintptr_t b, uintptr_t c, uintptr_t d) {
	CUresult (*set)(CUstream, CUgraphNode *, size_t, unsigned) = stepaf_cuStreamUpdateCaptureDependencies;
	CUgraphNode nodes[] = {(CUgraphNode)a, (CUgraphNode)b, (CUgraphNode)c, (CUgraphNode)d};
	return set((CUstream)s, nodes, n, CU_STREAM_SET_CAPTURE_DEPENDENCIES);
}

static CUresult stepaf_wait_event(uintptr_t s, uintptr_t e) { return cuStreamWaitEvent((CUstream)s, (CUevent)e, 0); }

static CUresult stepaf_write(uintptr_t s, CUdeviceptr p, uint32_t v) { return stepaf_write32((CUstream)s, p, v, CU_STREAM_WRITE_VALUE_DEFAULT); }
static CUresult stepaf_writes(uintptr_t s, unsigned n, CUdeviceptr a, CUdeviceptr b, CUdeviceptr c, CUdeviceptr d, uint32_t va, uint32_t vb, uint32_t vc, uint32_t vd) {
	CUdeviceptr addr[] = {a, b, c, d};
	uint32_t value[] = {va, vb, vc, vd};
	CUstreamBatchMemOpParams ops[4];
	memset(ops, 0, sizeof ops);
	for (unsigned i = 0; i < n; i++) {
		ops[i].operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
		ops[i].writeValue.address = addr[i];
		ops[i].writeValue.value = value[i];
		ops[i].writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
	}
	return stepaf_batch((CUstream)s, n, ops, 0);
}
static CUresult stepaf_wait(uintptr_t s, CUdeviceptr p, uint32_t v) { return stepaf_wait32((CUstream)s, p, v, CU_STREAM_WAIT_VALUE_GEQ); }
static CUresult stepaf_wait_bits(uintptr_t s, CUdeviceptr p, uint64_t v) { return stepaf_wait64((CUstream)s, p, v, CU_STREAM_WAIT_VALUE_AND); }
static CUresult stepaf_wait_count(uintptr_t s, CUdeviceptr p, uint64_t v) { return stepaf_wait64((CUstream)s, p, v, CU_STREAM_WAIT_VALUE_GEQ); }

static CUresult stepaf_stream_query(uintptr_t s) { return cuStreamQuery((CUstream)s); }
static CUresult stepaf_event_query(uintptr_t e) { return cuEventQuery((CUevent)e); }

// Either address may be in host memory.
static CUresult stepaf_copy(uintptr_t dst, uintptr_t src, size_t n, uintptr_t s) { return cuMemcpyAsync(dst, src, n, (CUstream)s); }
static CUresult stepaf_copy_htod(uintptr_t dst, uintptr_t src, size_t n, uintptr_t s) { return cuMemcpyHtoDAsync(dst, (const void *)src, n, (CUstream)s); }
static CUresult stepaf_copy_dtoh(uintptr_t dst, uintptr_t src, size_t n, uintptr_t s) { return cuMemcpyDtoHAsync((void *)dst, src, n, (CUstream)s); }

static CUresult stepaf_buffer_id(CUdeviceptr p, uint64_t *id) {
	unsigned long long n = 0;
	CUresult r = cuPointerGetAttribute(&n, CU_POINTER_ATTRIBUTE_BUFFER_ID, p);
	*id = n;
	return r;
}

static CUresult stepaf_range(CUdeviceptr p, uintptr_t *base, size_t *n) {
	CUdeviceptr b = 0;
	CUresult r = cuMemGetAddressRange(&b, n, p);
	*base = b;
	return r;
}

static CUresult stepaf_ipc_export(CUdeviceptr p, void *out) {
	CUipcMemHandle h;
	CUresult r = cuIpcGetMemHandle(&h, p);
	memcpy(out, &h, sizeof h);
	return r;
}

static CUresult stepaf_ipc_open(const void *in, CUdeviceptr *p) {
	CUipcMemHandle h;
	memcpy(&h, in, sizeof h);
	return cuIpcOpenMemHandle(p, h, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
}

// Several functions of the driver in one call. *step is which one has failed.
enum { STEP_ENTER, STEP_CAPTURING, STEP_QUERY, STEP_COPY, STEP_WRITE, STEP_WRITES, STEP_RANGE, STEP_ID, STEP_EXPORT, STEP_LEAVE };

static CUresult stepaf_end(CUresult r, int32_t mode, int32_t pushed, int *step) {
	CUresult e = stepaf_leave(mode, pushed);
	if (r != CUDA_SUCCESS || e == CUDA_SUCCESS) return r;
	*step = STEP_LEAVE;
	return e;
}

static CUresult stepaf_idle_in(uintptr_t ctx, uintptr_t s, int *captured, int *step) {
	int32_t mode, pushed;
	*step = STEP_ENTER;
	CUresult r = stepaf_enter(ctx, &mode, &pushed);
	if (r != CUDA_SUCCESS) return r;
	*step = STEP_CAPTURING;
	r = stepaf_capturing(s, captured);
	if (r == CUDA_SUCCESS && !*captured) {
		*step = STEP_QUERY;
		r = cuStreamQuery((CUstream)s);
	}
	return stepaf_end(r, mode, pushed, step);
}

static CUresult stepaf_copy_in(uintptr_t ctx, CUdeviceptr dst, CUdeviceptr src, size_t n, uintptr_t s, unsigned writes, CUdeviceptr a, CUdeviceptr b, CUdeviceptr c, CUdeviceptr d,
		uint32_t va, uint32_t vb, uint32_t vc, uint32_t vd, int *captured, int *step) {
	int32_t mode, pushed;
	*step = STEP_ENTER;
	CUresult r = stepaf_enter(ctx, &mode, &pushed);
	if (r != CUDA_SUCCESS) return r;
	*step = STEP_CAPTURING;
	r = stepaf_capturing(s, captured);
	if (r == CUDA_SUCCESS && !*captured) {
		*step = STEP_COPY;
		r = cuMemcpyAsync(dst, src, n, (CUstream)s);
		if (r == CUDA_SUCCESS && writes == 1) {
			*step = STEP_WRITE;
			r = stepaf_write(s, a, va);
		} else if (r == CUDA_SUCCESS) {
			*step = STEP_WRITES;
			r = stepaf_writes(s, writes, a, b, c, d, va, vb, vc, vd);
		}
	}
	return stepaf_end(r, mode, pushed, step);
}

typedef struct {
	uint64_t base, n, id;
	unsigned char handle[sizeof(CUipcMemHandle)];
} stepaf_named;

static CUresult stepaf_name_in(uintptr_t ctx, CUdeviceptr p, stepaf_named *out, int *step) {
	int32_t mode, pushed;
	uintptr_t base = 0;
	size_t n = 0;
	*step = STEP_ENTER;
	CUresult r = stepaf_enter(ctx, &mode, &pushed);
	if (r != CUDA_SUCCESS) return r;
	*step = STEP_RANGE;
	r = stepaf_range(p, &base, &n);
	out->base = base;
	out->n = n;
	if (r == CUDA_SUCCESS) {
		*step = STEP_ID;
		r = stepaf_buffer_id(base, &out->id);
	}
	if (r == CUDA_SUCCESS) {
		*step = STEP_EXPORT;
		r = stepaf_ipc_export(base, out->handle);
	}
	return stepaf_end(r, mode, pushed, step);
}

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

static CUresult stepaf_launch(CUfunction f, uintptr_t s, uint64_t a, uint64_t b) {
	void *args[] = {&a, &b};
	return cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, (CUstream)s, args, NULL);
}

typedef struct { uint64_t words[64]; } stepaf_copies; // kernelCopies

static CUresult stepaf_launch_copies(CUfunction f, uintptr_t s, unsigned blocks, unsigned copies, unsigned threads, stepaf_copies c) {
	void *args[] = {&c};
	return cuLaunchKernel(f, blocks, copies, 1, threads, 1, 1, 0, (CUstream)s, args, NULL);
}

static CUresult stepaf_dmabuf(CUdeviceptr p, size_t n, int *fd) { return cuMemGetHandleForAddressRange(fd, p, n, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0); }

#endif
