//go:build fserver

package main

/*
#include "abi.h"
*/
import "C"

import (
	"cmp"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/fserver/core"
	"github.com/stepaf/stepaf-go/van"
)

// answer is the result of respond(). The state is in C memory, since Python and the library both refer to it, and
// either may release it last.
type answer C.sf_answer

func (a *answer) missing() *int32 { return (*int32)(unsafe.Pointer(&a.c().left)) }
func (a *answer) waiting() *int32 { return (*int32)(unsafe.Pointer(&a.c().waiters)) }
func (a *answer) c() *C.sf_answer { return (*C.sf_answer)(a) }

// sent wakes all callers that wait for any answer. Few programs wait for answers.
var sent = struct {
	sync.Mutex
	ch chan struct{} // closed and replaced
}{ch: make(chan struct{})}

// Sent implements van.Completion: one tensor of the answer was sent, or will not be sent.
func (a *answer) Sent() {
	if atomic.AddInt32(a.missing(), -1) > 0 {
		return
	}
	if atomic.LoadInt32(a.waiting()) > 0 {
		sent.Lock()
		close(sent.ch)
		sent.ch = make(chan struct{})
		sent.Unlock()
	}
	C.sf_answer_drop(a.c())
}

// sf_answer_wait waits until all tensors of the answer are sent, for sliceMs at most.
//
//export sf_answer_wait
func sf_answer_wait(p *C.sf_answer, sliceMs C.int64_t, e *C.sf_error) C.int {
	a := (*answer)(p)
	atomic.AddInt32(a.waiting(), 1)
	defer atomic.AddInt32(a.waiting(), -1)
	timer := time.NewTimer(time.Duration(sliceMs) * time.Millisecond)
	defer timer.Stop()
	for {
		sent.Lock()
		ch := sent.ch
		sent.Unlock()
		if atomic.LoadInt32(a.missing()) == 0 {
			return C.SF_DONE
		}
		if _, err := session(); err != nil {
			return fail(e, fmt.Errorf("wait: %w", err))
		}
		select {
		case <-ch:
		case <-timer.C:
			return C.SF_PENDING
		}
	}
}

// sf_answer_timeout returns the error of a wait that has lasted ms.
//
//export sf_answer_timeout
func sf_answer_timeout(p *C.sf_answer, ms C.int64_t, e *C.sf_error) C.int {
	limit := time.Duration(ms) * time.Millisecond
	err := &van.Error{Op: "wait", Detail: fmt.Sprintf("%d tensors of an answer are not sent yet", atomic.LoadInt32((*answer)(p).missing())),
		Limit: limit, Elapsed: limit, Err: van.ErrTimeout, Hint: "the worker does not read, or its link is slow; call wait again"}
	if s, e := session(); e == nil {
		err.Node = s.Name()
	}
	return fail(e, err)
}

// sf_respond answers a batch. If p is not NULL, sf_respond counts in p the tensors that are not sent yet. With locked != 0 the caller
// holds Python's lock, and sf_respond may return SF_CONNECTS: it then did nothing. In all other cases it takes ownership of the tensors'
// owners.
//
//export sf_respond
func sf_respond(id C.uint64_t, t *C.sf_tensor, n C.int, stream C.uint64_t, p *C.sf_answer, locked C.int, e *C.sf_error) C.int {
	s, err2 := session()
	if err2 == nil && locked != 0 && core.MayConnectTo(s, uint64(id)) {
		return C.SF_CONNECTS
	}
	x := argsPool.Get().(*args)
	defer x.release()
	var err error
	x.pull, err = x.read(x.pull, t, n, "tensors")
	err = cmp.Or(err, err2)
	if err != nil {
		return fail(e, err)
	}
	var done van.Completion
	if p != nil && n > 0 {
		atomic.AddInt32((*int32)(unsafe.Pointer(&p.holds)), 1) // until the last Sent
		done = (*answer)(p)
	}
	told, err := s.Answer(af.Stream(stream), uint64(id), x.pull, done)
	if done != nil && !told {
		C.sf_answer_drop(p)
	}
	return result(e, err)
}

// sf_refuse refuses a batch.
//
//export sf_refuse
func sf_refuse(id C.uint64_t, why *C.char, size C.int64_t, e *C.sf_error) C.int {
	return with(e, func(s *core.Session) error { return s.Refuse(uint64(id), C.GoStringN(why, C.int(size))) })
}
