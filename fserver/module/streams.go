//go:build fserver

package main

// Prepared GPU exchanges. Python identifies them by handles.

/*
#include "abi.h"
*/
import "C"

import (
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/fserver/core"
)

//export sf_streams_prepare
func sf_streams_prepare(push *C.sf_tensor, nPush C.int, pull *C.sf_tensor, nPull C.int, peers *C.int64_t, nPeers C.int, timeoutMs, roundMs C.int64_t, host C.int, at, task *C.uint64_t, e *C.sf_error) C.int {
	a := argsPool.Get().(*args)
	defer a.release() // Prepare has references of its own
	if err := a.request(push, nPush, pull, nPull); err != nil {
		return fail(e, err)
	}
	return with(e, func(s *core.Session) error {
		x, t, err := s.Streams().Prepare(ranks(peers, nPeers), a.push, a.pull, time.Duration(timeoutMs)*time.Millisecond, time.Duration(roundMs)*time.Millisecond, host != 0)
		if err == nil {
			*at = newHandle(x)
			give(task, t)
		}
		return err
	})
}

func streamExchange(at C.uint64_t) *core.StreamExchange { return object[*core.StreamExchange](at) }

//export sf_streams_queue
func sf_streams_queue(at C.uint64_t, send C.int, stream C.uint64_t, e *C.sf_error) C.int {
	return result(e, streamExchange(at).Queue(send != 0, af.Stream(stream)))
}

//export sf_streams_send
func sf_streams_send(at C.uint64_t, stream C.uint64_t, e *C.sf_error) C.int {
	return result(e, streamExchange(at).Send(af.Stream(stream)))
}

//export sf_streams_receive
func sf_streams_receive(at C.uint64_t, sliceMs C.int64_t, last C.int, e *C.sf_error) C.int {
	return result(e, streamExchange(at).ReceiveWithin(time.Duration(sliceMs)*time.Millisecond, last != 0))
}

//export sf_streams_close
func sf_streams_close(at C.uint64_t, e *C.sf_error) C.int {
	return result(e, streamExchange(at).Close())
}
