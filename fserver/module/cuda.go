//go:build fserver

package main

/*
#include "abi.h"
*/
import "C"

import (
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/stepaf/stepaf-go/fserver/core"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// gpus are the devices for signals of processes without a session, by number. They stay open, since Python's tensors
// and graphs may refer to them.
var gpus = struct {
	sync.Mutex
	m map[int]backend.Backend
}{m: map[int]backend.Backend{}}

// gpu returns device id. If it is the session's device, gpu returns that.
func gpu(id int) (backend.Backend, error) {
	if s, err := session(); err == nil && s.Device().Device() == (backend.Device{Type: backend.GPU, ID: int32(id)}) {
		return s.Device(), nil
	}
	gpus.Lock()
	defer gpus.Unlock()
	if b := gpus.m[id]; b != nil {
		return b, nil
	}
	b, err := backend.New("GPU", id)
	if err != nil {
		return nil, err
	}
	gpus.m[id] = b
	return b, nil
}

// signaller returns device id if it supports signals.
func signaller(id int) (backend.Signaller, error) {
	b, err := gpu(id)
	if err != nil {
		return nil, err
	}
	s, ok := b.(backend.Signaller)
	if !ok {
		return nil, fmt.Errorf("backend %s: %w", b.Name(), backend.ErrUnsupported)
	}
	return s, nil
}

// sf_cuda reports whether the library was built with CUDA.
//
//export sf_cuda
func sf_cuda() C.int {
	if slices.Contains(backend.Names(), "GPU") {
		return 1
	}
	return 0
}

// sf_need_cuda fails if signals are not available. It is called before the arguments are read.
//
//export sf_need_cuda
func sf_need_cuda(e *C.sf_error) C.int {
	return result(e, haveGPUs())
}

// haveGPUs returns nil, or the reason why no GPU is available. It checks once.
var haveGPUs = sync.OnceValue(func() error {
	_, err := backend.GPUs()
	return err
})

// sf_map_pinned changes t from pinned host memory to the address of the same memory on a device.
//
//export sf_map_pinned
func sf_map_pinned(t *C.sf_tensor, device C.int64_t, e *C.sf_error) C.int {
	s, err := signaller(int(device))
	if err == nil && (t.device_type != C.SF_CPU || t.nbytes == 0) {
		err = fmt.Errorf("map_pinned_tensor: %w: %d bytes on %s, want a tensor in pinned host memory", van.ErrInvalid, t.nbytes, backend.DeviceType(t.device_type))
	}
	var m backend.Mem
	if err == nil {
		m, err = s.MapHost(backend.At(t.ptr, int(t.nbytes), backend.Host, nil))
	}
	if err != nil {
		return fail(e, err)
	}
	t.ptr, t.device_type, t.device_id = m.Ptr(), C.SF_GPU, C.int32_t(m.Device().ID)
	return C.SF_DONE
}

// sf_signal queues one of the operations SF_WRITE_FLAG and so on.
//
//export sf_signal
func sf_signal(what C.int, flag, seq *C.sf_tensor, stream C.uint64_t, e *C.sf_error) C.int {
	at := func(t *C.sf_tensor) backend.Mem {
		return backend.At(t.ptr, 8, backend.Device{Type: backend.DeviceType(t.device_type), ID: int32(t.device_id)}, nil)
	}
	s, err := signaller(int(flag.device_id))
	if err == nil {
		switch what {
		case C.SF_WRITE_FLAG:
			err = s.WriteSeq(uintptr(stream), at(flag), at(seq))
		case C.SF_WAIT_FLAG:
			err = s.WaitSeq(uintptr(stream), at(flag), at(seq))
		default:
			err = s.AddSeq(uintptr(stream), at(seq))
		}
	}
	return result(e, err)
}

// sf_notify_new creates the Go part of a SimpleNotify: its init() calls it. The handle is not 0.
//
//export sf_notify_new
func sf_notify_new(id *C.uint64_t, e *C.sf_error) C.int {
	if code := sf_need_cuda(e); code != C.SF_DONE {
		return code
	}
	n, err := process.NewNotify()
	if err != nil {
		return fail(e, err)
	}
	*id = newHandle(n)
	return C.SF_DONE
}

// sf_notify_device returns the device of the object's streams. It is known after init() of the module.
//
//export sf_notify_device
func sf_notify_device(id C.uint64_t, device *C.int32_t, e *C.sf_error) C.int {
	n, err := notify(id)
	var d backend.Device
	if err == nil {
		d, err = n.Attach()
	}
	if err != nil {
		return fail(e, err)
	}
	*device = C.int32_t(d.ID)
	return C.SF_DONE
}

func notify(id C.uint64_t) (*core.Notify, error) {
	if id == 0 {
		return nil, fmt.Errorf("%w: call init() of this SimpleNotify first", core.ErrMisuse)
	}
	return object[*core.Notify](id), nil
}

// sf_notify_stream makes stream wait for one of SF_STREAM_WAIT and so on.
//
//export sf_notify_stream
func sf_notify_stream(id C.uint64_t, what C.int, handler C.int64_t, stream C.uint64_t, e *C.sf_error) C.int {
	n, err := notify(id)
	if err == nil {
		switch what {
		case C.SF_STREAM_WAIT:
			err = n.StreamWait(uintptr(stream), int64(handler))
		case C.SF_STREAM_GET_BATCH:
			err = n.BlockAndGetBatch(uintptr(stream))
		default:
			err = n.Block(uintptr(stream))
		}
	}
	return result(e, err)
}

//export sf_notify_done
func sf_notify_done(id C.uint64_t, sliceMs C.int64_t, e *C.sf_error) C.int {
	n, err := notify(id)
	if err == nil {
		err = n.Done(time.Duration(sliceMs) * time.Millisecond)
	}
	return result(e, err)
}

//export sf_notify_batch
func sf_notify_batch(id C.uint64_t, sliceMs C.int64_t, out **C.sf_batch, count *C.int, e *C.sf_error) C.int {
	n, err := notify(id)
	var items []core.Item
	if err == nil {
		items, err = n.Batch(time.Duration(sliceMs) * time.Millisecond)
	}
	if err != nil {
		return fail(e, err)
	}
	return handOut(items, nil, 0, out, count)
}
