//go:build fserver

package main

/*
#include "abi.h"
*/
import "C"

import (
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/fserver/core"
)

// exchange returns the prepared exchange of a handle.
func exchange(at C.uint64_t) *core.Exchange { return object[*core.Exchange](at) }

//export sf_prepare
func sf_prepare(push *C.sf_tensor, nPush C.int, pull *C.sf_tensor, nPull C.int, servers *C.int64_t, nServers C.int, at *C.uint64_t, e *C.sf_error) C.int {
	a := argsPool.Get().(*args)
	defer a.release() // Prepare has references of its own
	if err := a.request(push, nPush, pull, nPull); err != nil {
		return fail(e, err)
	}
	return with(e, func(s *core.Session) error {
		x, err := s.Prepare(ranks(servers, nServers), a.push, a.pull)
		if err == nil {
			*at = newHandle(x)
		}
		return err
	})
}

// sf_exchange_start returns the handler of the call, SF_CAPTURED or SF_FAILED. With locked != 0 the caller holds Python's lock, and
// sf_exchange_start may return SF_CONNECTS: it then did nothing. stream is the current stream, or SF_COMPLETE for tensors on the host.
//
//export sf_exchange_start
func sf_exchange_start(at C.uint64_t, rows C.int64_t, stream C.uint64_t, event, locked C.int, e *C.sf_error) C.int64_t {
	x := exchange(at)
	if locked != 0 && x.MayConnect() {
		return C.SF_CONNECTS
	}
	h, err := x.Start(af.Stream(stream), event != 0, int(rows))
	if err != nil {
		return C.int64_t(unlessCaptured(e, err))
	}
	return C.int64_t(h)
}

// unlessCaptured is fail for calls that may go into a graph.
func unlessCaptured(e *C.sf_error, err error) C.int {
	if err == core.ErrCaptured {
		return C.SF_CAPTURED
	}
	return fail(e, err)
}

//export sf_exchange_wait
func sf_exchange_wait(at C.uint64_t, stream C.uint64_t, timeoutMs, sliceMs C.int64_t, e *C.sf_error) C.int {
	if err := exchange(at).Wait(af.Stream(stream), time.Duration(timeoutMs)*time.Millisecond, time.Duration(sliceMs)*time.Millisecond); err != nil {
		return unlessCaptured(e, err)
	}
	return C.SF_DONE
}

//export sf_exchange_close
func sf_exchange_close(at C.uint64_t) { exchange(at).Close() }
