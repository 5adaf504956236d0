//go:build cuda

package backend

import (
	"errors"
	"reflect"
	"sync"
	"sync/atomic"
	"unsafe"

	"gorgonia.org/cu"
)

func init() { Register("GPU", func(id int) (Backend, error) { return newGPU(cuda{}, id) }) }

// missing says why a backend of this library is not in this build.
var missing = map[string]string{}

// GPUs describes the GPUs that this process sees, without opening any. The error wraps
// ErrUnavailable when there is no driver or no GPU.
func GPUs() ([]Info, error) { return describeAll(cuda{}) }

// cuda is the CUDA driver API, a type for each part of driver: the functions that
// gorgonia.org/cu has here, the others in gpu_cuda_extra.go.
type cuda struct {
	cudaDevices
	cudaMemory
	cudaStreams
	cudaSharing
	cudaOnce
}

type (
	cudaDevices struct{}
	cudaMemory  struct{}
	cudaStreams struct{}
	cudaSharing struct{}
	cudaOnce    struct{}
)

// fail makes a *driverError of cu's error. Its type is not exported; it is an integer,
// perhaps wrapped.
func fail(call string, err error) error {
	for e := err; e != nil; e = errors.Unwrap(e) {
		if v := reflect.ValueOf(e); v.Kind() == reflect.Int {
			return result(call, int(v.Int()))
		}
	}
	if err != nil {
		return &driverError{call: call, code: -1, name: err.Error()}
	}
	return nil
}

// cu keeps the C handle of streams, events and contexts as the only field of a struct.
func stream(s uintptr) cu.Stream { return *(*cu.Stream)(unsafe.Pointer(&s)) }
func event(e uintptr) cu.Event   { return *(*cu.Event)(unsafe.Pointer(&e)) }

func (cudaDevices) count() (int, error) {
	n, err := cu.NumDevices()
	return n, fail("cuDeviceGetCount", err)
}

func (cudaDevices) device(ordinal int) (int, error) {
	d, err := cu.GetDevice(ordinal)
	return int(d), fail("cuDeviceGet", err)
}

func (cudaDevices) name(dev int) (string, error) {
	s, err := cu.Device(dev).Name()
	return s, fail("cuDeviceGetName", err)
}

func (cudaDevices) uuid(dev int) (string, error) {
	u, err := cu.Device(dev).UUID()
	return "GPU-" + u.String(), fail("cuDeviceGetUuid", err)
}

func (cudaDevices) totalMem(dev int) (int64, error) {
	n, err := cu.Device(dev).TotalMem()
	return n, fail("cuDeviceTotalMem", err)
}

func (cudaDevices) attribute(dev int, a deviceAttribute) (int, error) {
	v, err := cu.Device(dev).Attribute(cu.DeviceAttribute(a))
	return v, fail("cuDeviceGetAttribute", err)
}

func (cudaDevices) canAccessPeer(dev, peer int) (bool, error) {
	v, err := cu.Device(dev).CanAccessPeer(cu.Device(peer))
	return v != 0, fail("cuDeviceCanAccessPeer", err)
}

func (cudaDevices) retain(dev int) (uintptr, error) {
	ctx, err := cu.Device(dev).RetainPrimaryCtx()
	return *(*uintptr)(unsafe.Pointer(&ctx)), fail("cuDevicePrimaryCtxRetain", err)
}

func (cudaDevices) release(dev int) error {
	return fail("cuDevicePrimaryCtxRelease", cu.Device(dev).ReleasePrimaryCtx())
}

// blocking has mayBlock's marks by device. It is global because the primary contexts are:
// when one backend of a device frees memory, the driver waits for the streams of all of
// them, such as those of the Python module's wait_flag.
var blocking sync.Map

func (cudaDevices) mayBlock(dev int) *atomic.Bool {
	m, _ := blocking.LoadOrStore(dev, new(atomic.Bool))
	return m.(*atomic.Bool)
}

func (cudaMemory) memInfo() (free, total int64, err error) {
	free, total, err = cu.MemInfo()
	return free, total, fail("cuMemGetInfo", err)
}

func (cudaMemory) memAlloc(n int) (uintptr, error) {
	p, err := cu.MemAlloc(int64(n))
	return uintptr(p), fail("cuMemAlloc", err)
}

func (cudaMemory) memFree(addr uintptr) error {
	return fail("cuMemFree", cu.MemFree(cu.DevicePtr(addr)))
}

func (cudaStreams) streamCreate() (uintptr, error) {
	s, err := cu.MakeStream(cu.NonBlocking)
	return *(*uintptr)(unsafe.Pointer(&s)), fail("cuStreamCreate", err)
}

func (cudaStreams) streamDestroy(s uintptr) error {
	st := stream(s)
	return fail("cuStreamDestroy", st.Destroy())
}

func (cudaDevices) synchronize() error { return fail("cuCtxSynchronize", cu.Synchronize()) }

func (cudaStreams) eventCreate() (uintptr, error) {
	e, err := cu.MakeEvent(cu.DisableTiming)
	return *(*uintptr)(unsafe.Pointer(&e)), fail("cuEventCreate", err)
}

func (cudaStreams) eventDestroy(e uintptr) error {
	ev := event(e)
	return fail("cuEventDestroy", cu.DestroyEvent(&ev))
}

func (cudaStreams) eventRecord(e, s uintptr) error {
	return fail("cuEventRecord", event(e).Record(stream(s)))
}
