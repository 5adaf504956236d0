//go:build cuda

// Opens libcuda.so.1 when the first GPU is used, so that a program with CUDA also starts
// on a machine without a driver. gorgonia.org/cu expects to be linked with the library;
// the functions that it and gpu_cuda_extra.go use are therefore defined here, hidden from
// other libraries, and jump to the real ones. A function that is missing in the list
// would make the program need libcuda.so.1 to start: TestCUDANeedsNoLibrary fails then,
// and says what to add.
//
// cu also calls cuInit when the program starts, and ends the program when that fails.
// cuInit would also fix CUDA_VISIBLE_DEVICES, and forbid forking, before Python code runs.
// So cuInit does nothing here; stepaf_cuda_init calls the real one.

#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>

#define FUNCTIONS(F) \
	F(cuArray3DCreate_v2) F(cuArray3DGetDescriptor_v2) F(cuArrayCreate_v2) F(cuArrayDestroy) F(cuArrayGetDescriptor_v2) \
	F(cuCtxCreate_v2) F(cuCtxDestroy_v2) F(cuCtxDisablePeerAccess) F(cuCtxEnablePeerAccess) F(cuCtxGetApiVersion) \
	F(cuCtxGetCacheConfig) F(cuCtxGetCurrent) F(cuCtxGetDevice) F(cuCtxGetFlags) F(cuCtxGetLimit) \
	F(cuCtxGetSharedMemConfig) F(cuCtxGetStreamPriorityRange) F(cuCtxPopCurrent_v2) F(cuCtxPushCurrent_v2) \
	F(cuCtxResetPersistingL2Cache) F(cuCtxSetCacheConfig) F(cuCtxSetCurrent) F(cuCtxSetLimit) F(cuCtxSetSharedMemConfig) \
	F(cuCtxSynchronize) F(cuDeviceCanAccessPeer) F(cuDeviceGet) F(cuDeviceGetAttribute) F(cuDeviceGetCount) \
	F(cuDeviceGetName) F(cuDeviceGetP2PAttribute) F(cuDeviceGetPCIBusId) F(cuDeviceGetUuid) \
	F(cuDevicePrimaryCtxGetState) F(cuDevicePrimaryCtxRelease_v2) F(cuDevicePrimaryCtxReset_v2) \
	F(cuDevicePrimaryCtxRetain) F(cuDevicePrimaryCtxSetFlags_v2) F(cuDeviceTotalMem_v2) F(cuDriverGetVersion) \
	F(cuEventCreate) F(cuEventDestroy_v2) F(cuEventElapsedTime) F(cuEventQuery) F(cuEventRecord) F(cuEventSynchronize) \
	F(cuFuncGetAttribute) F(cuFuncSetCacheConfig) F(cuFuncSetSharedMemConfig) F(cuGetErrorName) \
	F(cuGraphAddChildGraphNode) F(cuGraphAddDependencies) F(cuGraphAddEmptyNode) F(cuGraphAddHostNode) \
	F(cuGraphAddKernelNode) F(cuGraphAddMemcpyNode) F(cuGraphAddMemsetNode) F(cuGraphClone) F(cuGraphCreate) \
	F(cuGraphDestroy) F(cuGraphDestroyNode) F(cuGraphExecDestroy) F(cuGraphGetEdges) F(cuIpcCloseMemHandle) \
	F(cuIpcGetMemHandle) F(cuIpcOpenMemHandle_v2) F(cuLaunchKernel) F(cuLinkAddData_v2) F(cuLinkAddFile_v2) \
	F(cuLinkComplete) F(cuLinkCreate_v2) F(cuLinkDestroy) F(cuMemAdvise) F(cuMemAllocManaged) F(cuMemAllocPitch_v2) \
	F(cuMemAlloc_v2) F(cuMemFreeHost) F(cuMemFree_v2) F(cuMemGetAddressRange_v2) F(cuMemGetHandleForAddressRange) \
	F(cuMemGetInfo_v2) F(cuMemAddressFree) F(cuMemAddressReserve) F(cuMemExportToShareableHandle) \
	F(cuMemGetAllocationPropertiesFromHandle) F(cuMemImportFromShareableHandle) F(cuMemMap) F(cuMemRelease) \
	F(cuMemRetainAllocationHandle) F(cuMemSetAccess) F(cuMemUnmap) F(cuMemHostAlloc) F(cuMemHostGetDevicePointer_v2) F(cuMemHostRegister_v2) F(cuMemHostUnregister) \
	F(cuMemPrefetchAsync) F(cuMemcpy) F(cuMemcpy2DAsync_v2) F(cuMemcpy2DUnaligned_v2) F(cuMemcpy2D_v2) \
	F(cuMemcpy3DAsync_v2) F(cuMemcpy3DPeer) F(cuMemcpy3DPeerAsync) F(cuMemcpy3D_v2) F(cuMemcpyAsync) F(cuMemcpyAtoA_v2) \
	F(cuMemcpyAtoD_v2) F(cuMemcpyAtoHAsync_v2) F(cuMemcpyAtoH_v2) F(cuMemcpyDtoA_v2) F(cuMemcpyDtoDAsync_v2) \
	F(cuMemcpyDtoD_v2) F(cuMemcpyDtoHAsync_v2) F(cuMemcpyDtoH_v2) F(cuMemcpyHtoAAsync_v2) F(cuMemcpyHtoA_v2) \
	F(cuMemcpyHtoDAsync_v2) F(cuMemcpyHtoD_v2) F(cuMemcpyPeer) F(cuMemcpyPeerAsync) F(cuMemsetD16Async) \
	F(cuMemsetD16_v2) F(cuMemsetD2D16Async) F(cuMemsetD2D16_v2) F(cuMemsetD2D32Async) F(cuMemsetD2D32_v2) \
	F(cuMemsetD2D8Async) F(cuMemsetD2D8_v2) F(cuMemsetD32Async) F(cuMemsetD32_v2) F(cuMemsetD8Async) F(cuMemsetD8_v2) \
	F(cuModuleGetFunction) F(cuModuleGetGlobal_v2) F(cuModuleGetSurfRef) F(cuModuleGetTexRef) F(cuModuleLoad) \
	F(cuModuleLoadData) F(cuModuleLoadDataEx) F(cuModuleLoadFatBinary) F(cuModuleUnload) \
	F(cuOccupancyMaxActiveBlocksPerMultiprocessor) F(cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags) \
	F(cuPointerGetAttribute) F(cuPointerSetAttribute) F(cuStreamAttachMemAsync) F(cuStreamBatchMemOp) F(cuStreamBatchMemOp_v2) F(cuStreamCreate) \
	F(cuStreamCreateWithPriority) F(cuStreamDestroy_v2) F(cuStreamGetCaptureInfo_v2) F(cuStreamGetFlags) F(cuStreamGetPriority) \
	F(cuStreamIsCapturing) F(cuStreamQuery) F(cuStreamSynchronize) F(cuStreamUpdateCaptureDependencies) F(cuStreamWaitEvent) F(cuStreamWaitValue32) \
	F(cuStreamWaitValue32_v2) F(cuStreamWaitValue64) F(cuStreamWaitValue64_v2) F(cuStreamWriteValue32) F(cuStreamWriteValue32_v2) F(cuSurfRefGetArray) \
	F(cuSurfRefSetArray) F(cuTexRefGetAddressMode) F(cuTexRefGetAddress_v2) F(cuTexRefGetArray) \
	F(cuTexRefGetBorderColor) F(cuTexRefGetFilterMode) F(cuTexRefGetFlags) F(cuTexRefGetFormat) \
	F(cuTexRefGetMaxAnisotropy) F(cuTexRefSetAddress2D_v3) F(cuTexRefSetAddressMode) F(cuTexRefSetAddress_v2) \
	F(cuTexRefSetArray) F(cuTexRefSetBorderColor) F(cuTexRefSetFilterMode) F(cuTexRefSetFlags) F(cuTexRefSetFormat) \
	F(cuTexRefSetMaxAnisotropy) F(cuTexRefSetMipmapFilterMode) F(cuTexRefSetMipmapLevelBias) \
	F(cuTexRefSetMipmapLevelClamp) F(cuThreadExchangeStreamCaptureMode)

enum { SUCCESS = 0, NOT_INITIALIZED = 3 };

static int absent(void) { return NOT_INITIALIZED; }

#define ADDRESS(f) __attribute__((visibility("hidden"))) void *stepaf_##f = (void *)absent;
FUNCTIONS(ADDRESS)

#if defined(__x86_64__)
#define JUMP(f) "jmp *stepaf_" #f "(%rip)\n"
#elif defined(__aarch64__)
#define JUMP(f) "adrp x16, stepaf_" #f "\nldr x16, [x16, :lo12:stepaf_" #f "]\nbr x16\n"
#else
#error "the backend GPU is for x86-64 and arm64"
#endif
#define DEFINE(f) __asm__(".text\n.balign 16\n.globl " #f "\n.hidden " #f "\n.type " #f ", %function\n" #f ":\n" JUMP(f) ".size " #f ", .-" #f "\n");
FUNCTIONS(DEFINE)

__attribute__((visibility("hidden"))) int cuInit(unsigned int flags) {
	(void)flags;
	return SUCCESS;
}

// Opens libcuda.so.1 and calls its cuInit. If there is none it returns -1 and the reason
// in text. Call it once.
__attribute__((visibility("hidden"))) int stepaf_cuda_init(char *text, size_t n) {
	static const struct {
		void **address;
		const char *name;
	} all[] = {
#define ENTRY(f) {&stepaf_##f, #f},
		FUNCTIONS(ENTRY)};
	void *lib = dlopen("libcuda.so.1", RTLD_NOW);
	int (*init)(unsigned int) = lib ? (int (*)(unsigned int))dlsym(lib, "cuInit") : NULL;
	if (!init) {
		const char *why = dlerror();
		snprintf(text, n, "%s", why ? why : "no cuInit in libcuda.so.1");
		return -1;
	}
	for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
		void *p = dlsym(lib, all[i].name);
		if (p) *all[i].address = p; // an older driver lacks some
	}
	return init(0);
}
