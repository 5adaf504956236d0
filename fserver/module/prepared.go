//go:build fserver

package main

/*
#include "abi.h"
*/
import "C"

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/fserver/core"
)

// exchanges are the prepared exchanges of Python. Python identifies them by their index in all, and uses an index only
// while it holds the object. A round reads all without a lock; all is replaced, never changed.
var exchanges struct {
	mu   sync.Mutex
	free []int
	all  atomic.Pointer[[]*core.Exchange]
}

// put makes x the exchange at index i, or at a new index if i is -1, and returns the index. The caller holds
// exchanges.mu.
func put(x *core.Exchange, i int) int {
	var all []*core.Exchange
	if old := exchanges.all.Load(); old != nil {
		all = append(all, *old...)
	}
	if i < 0 {
		i = len(all)
		all = append(all, nil)
	}
	all[i] = x
	exchanges.all.Store(&all)
	return i
}

func exchange(at C.uint64_t) *core.Exchange { return (*exchanges.all.Load())[at] }

//export sf_prepare
func sf_prepare(push *C.sf_tensor, nPush C.int, pull *C.sf_tensor, nPull C.int, servers *C.int64_t, nServers C.int, at *C.uint64_t, e *C.sf_error) C.int {
	a := argsPool.Get().(*args)
	defer a.release() // Prepare has references of its own
	if err := a.request(push, nPush, pull, nPull); err != nil {
		return fail(e, err)
	}
	return with(e, func(s *core.Session) error {
		x, err := s.Prepare(ranks(servers, nServers), a.push, a.pull)
		if err != nil {
			return err
		}
		exchanges.mu.Lock()
		defer exchanges.mu.Unlock()
		i := -1
		if n := len(exchanges.free); n > 0 {
			i, exchanges.free = exchanges.free[n-1], exchanges.free[:n-1]
		}
		*at = C.uint64_t(put(x, i))
		return nil
	})
}

// sf_exchange_start returns the handler of the call, SF_CAPTURED or SF_FAILED. stream is the current stream, or
// SF_COMPLETE for tensors on the host.
//
//export sf_exchange_start
func sf_exchange_start(at C.uint64_t, rows C.int64_t, stream C.uint64_t, event C.int, e *C.sf_error) C.int64_t {
	h, err := exchange(at).Start(af.Stream(stream), event != 0, int(rows))
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

// sf_exchange_check returns the first error of the rounds of graphs.
//
//export sf_exchange_check
func sf_exchange_check(at C.uint64_t, e *C.sf_error) C.int {
	return result(e, exchange(at).Check())
}

//export sf_exchange_close
func sf_exchange_close(at C.uint64_t) { exchange(at).Close() }

// sf_exchange_drop closes an exchange that Python no longer uses.
//
//export sf_exchange_drop
func sf_exchange_drop(at C.uint64_t) {
	exchange(at).Close()
	exchanges.mu.Lock()
	defer exchanges.mu.Unlock()
	put(nil, int(at))
	exchanges.free = append(exchanges.free, int(at))
}
