//go:build fserver

package main

// Windows. Python identifies them by handles.

/*
#include "abi.h"
*/
import "C"

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/fserver/core"
	"github.com/stepaf/stepaf-go/van/backend"
)

// sf_window_where returns where a window is opened by default: SF_CPU or SF_GPU.
//
//export sf_window_where
func sf_window_where(of C.uint64_t, where *C.int, e *C.sf_error) C.int {
	c, err := comm(of)
	if err != nil {
		return fail(e, err)
	}
	*where = C.SF_CPU
	if c.OnDevice() {
		*where = C.SF_GPU
	}
	return C.SF_DONE
}

// sf_window_open begins to open a window on devices, or in the given host memory, whose owner it takes.
//
//export sf_window_open
func sf_window_open(of C.uint64_t, size, signals C.int64_t, memory *C.sf_tensor, timeoutMs C.int64_t, at, task *C.uint64_t, e *C.sf_error) C.int {
	a := argsPool.Get().(*args)
	defer a.release() // the window has references of its own
	c, err := comm(of)
	var mem af.Tensor
	if memory != nil && memory.owner != nil {
		var err2 error
		if a.push, err2 = a.read(a.push, memory, 1, "size"); err2 == nil {
			mem = a.push[0].Val
		}
		err = cmp.Or(err, err2)
	}
	if err != nil {
		return fail(e, err)
	}
	limit := time.Duration(timeoutMs) * time.Millisecond
	var w *core.Window
	var t *core.Task
	if memory == nil {
		w, t = c.OpenWindow(int(size), int(signals), limit)
	} else {
		w, t = c.OpenHostWindow(mem, int(size), int(signals), limit)
	}
	*at = newHandle(w)
	give(task, t)
	return C.SF_DONE
}

func windowOf(at C.uint64_t) *core.Window { return object[*core.Window](at) }

// sf_window_tensor describes the memory of this rank's part of the window.
//
//export sf_window_tensor
func sf_window_tensor(at C.uint64_t, t *C.sf_tensor) {
	x := windowOf(at).Tensor()
	m := x.Mem()
	*t = C.sf_tensor{ptr: m.Ptr(), nbytes: C.int64_t(m.Len()), ndim: 1, dtype: C.int32_t(x.Dtype()), device_type: C.SF_CPU}
	if !m.OnHost() {
		t.device_type, t.device_id = C.SF_GPU, C.int32_t(m.Device().ID)
	}
	t.shape[0] = t.nbytes
}

// windowCall makes one of the calls SF_WINDOW_PUT and so on.
func windowCall(ctx context.Context, w *core.Window, what C.int, rank, offset, signal int, x af.Tensor, s af.Stream) error {
	switch what {
	case C.SF_WINDOW_PUT:
		return w.Put(ctx, rank, offset, x, signal, s)
	case C.SF_WINDOW_SIGNAL:
		return w.Signal(ctx, rank, signal, s)
	case C.SF_WINDOW_WAIT:
		return w.WaitSignal(ctx, rank, signal, s)
	case C.SF_WINDOW_FLUSH:
		return w.Flush(ctx, rank, s)
	}
	return fmt.Errorf("no such call of a window: %d", what)
}

// sf_window_queue queues a call of a window on devices to a stream. x remains the caller's.
//
//export sf_window_queue
func sf_window_queue(at C.uint64_t, what C.int, rank, offset, signal C.int64_t, x *C.sf_tensor, stream C.uint64_t, e *C.sf_error) C.int {
	var t af.Tensor
	if what == C.SF_WINDOW_PUT {
		dev := backend.Device{Type: backend.DeviceType(x.device_type), ID: int32(x.device_id)}
		var err error
		if t, err = af.FromPointer(x.ptr, dev, nil, af.Uint8, int64(x.nbytes)); err != nil {
			return fail(e, err)
		}
	}
	return result(e, windowCall(context.Background(), windowOf(at), what, int(rank), int(offset), int(signal), t, af.Stream(stream)))
}

// sf_window_slice makes a call of a window in host memory, in slices. After SF_PENDING the caller repeats the call,
// with the time since the first one. Each call takes ownership of the owner of x.
//
//export sf_window_slice
func sf_window_slice(at C.uint64_t, what C.int, rank, offset, signal C.int64_t, x *C.sf_tensor, sliceMs, timeoutMs C.int64_t, waitedMs C.int64_t, e *C.sf_error) C.int {
	a := argsPool.Get().(*args)
	defer a.release() // an operation under way has references of its own
	var t af.Tensor
	if what == C.SF_WINDOW_PUT {
		var err error
		if a.push, err = a.read(a.push, x, 1, "x"); err != nil {
			return fail(e, err)
		}
		t = a.push[0].Val
	}
	w, ms := windowOf(at), time.Millisecond
	return result(e, w.InSlice(time.Duration(sliceMs)*ms, time.Duration(timeoutMs)*ms, time.Now().Add(-time.Duration(waitedMs)*ms), func(ctx context.Context) error {
		return windowCall(ctx, w, what, int(rank), int(offset), int(signal), t, af.Complete)
	}))
}

//export sf_window_close
func sf_window_close(at C.uint64_t, task *C.uint64_t) { give(task, windowOf(at).Close()) }
