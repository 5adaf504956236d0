//go:build fserver

package main

// Windows on devices, which Python knows by handles.

/*
#include "abi.h"
*/
import "C"

import (
	"fmt"
	"runtime/cgo"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/fserver/core"
	"github.com/stepaf/stepaf-go/van/backend"
)

//export sf_window_open
func sf_window_open(of C.uint64_t, size, signals, timeoutMs C.int64_t, at, task *C.uint64_t, e *C.sf_error) C.int {
	c, err := comm(of)
	if err != nil {
		return fail(e, err)
	}
	w, t := c.OpenWindow(int(size), int(signals), time.Duration(timeoutMs)*time.Millisecond)
	*at = C.uint64_t(cgo.NewHandle(w))
	give(task, t)
	return C.SF_DONE
}

func windowOf(at C.uint64_t) *core.Window { return cgo.Handle(at).Value().(*core.Window) }

// sf_window_tensor describes the window's memory here.
//
//export sf_window_tensor
func sf_window_tensor(at C.uint64_t, t *C.sf_tensor) {
	x := windowOf(at).Tensor()
	m := x.Mem()
	*t = C.sf_tensor{ptr: m.Ptr(), nbytes: C.int64_t(m.Len()), ndim: 1, dtype: C.int32_t(x.Dtype()), device_type: C.SF_GPU, device_id: C.int32_t(m.Device().ID)}
	t.shape[0] = t.nbytes
}

// sf_window_queue puts one of SF_WINDOW_PUT and so on into a stream. x stays the caller's.
//
//export sf_window_queue
func sf_window_queue(at C.uint64_t, what C.int, rank, offset, signal C.int64_t, x *C.sf_tensor, stream C.uint64_t, e *C.sf_error) C.int {
	w, s := windowOf(at), af.Stream(stream)
	switch what {
	case C.SF_WINDOW_PUT:
		dev := backend.Device{Type: backend.DeviceType(x.device_type), ID: int32(x.device_id)}
		t, err := af.FromPointer(x.ptr, dev, nil, af.Uint8, int64(x.nbytes))
		if err == nil {
			err = w.Put(s, int(rank), int(offset), t, int(signal))
		}
		return result(e, err)
	case C.SF_WINDOW_SIGNAL:
		return result(e, w.Signal(s, int(rank), int(signal)))
	case C.SF_WINDOW_WAIT:
		return result(e, w.WaitSignal(s, int(rank), int(signal)))
	case C.SF_WINDOW_FLUSH:
		return result(e, w.Flush(s, int(rank)))
	}
	return fail(e, fmt.Errorf("no such call of a window: %d", what))
}

//export sf_window_check
func sf_window_check(at C.uint64_t, e *C.sf_error) C.int { return result(e, windowOf(at).Check()) }

//export sf_window_close
func sf_window_close(at C.uint64_t, task *C.uint64_t) { give(task, windowOf(at).Close()) }

// sf_window_drop closes a window that Python has let go of, in the background.
//
//export sf_window_drop
func sf_window_drop(at C.uint64_t) {
	windowOf(at).Drop()
	cgo.Handle(at).Delete()
}
