//go:build fserver

package main

// Communicators and their tasks. Python identifies both by handles.

/*
#include "abi.h"
*/
import "C"

import (
	"cmp"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/fserver/core"
)

// comm returns the communicator of a handle. For SF_GROUP, sf_comm_group has created it.
func comm(at C.uint64_t) (*core.Comm, error) {
	if at != C.SF_GROUP {
		return object[*core.Comm](at), nil
	}
	s, err := session()
	if err != nil {
		return nil, err
	}
	c, t := s.Comms().Group()
	return c, t.Wait(0)
}

// give passes a task to Python.
func give(task *C.uint64_t, t core.Awaited) { *task = newHandle(t) }

//export sf_comm_new
func sf_comm_new(id C.int64_t, ranked *C.int64_t, n C.int, timeoutMs C.int64_t, at, task *C.uint64_t, e *C.sf_error) C.int {
	return with(e, func(s *core.Session) error {
		c, t := s.Comms().New(int(id), ranks(ranked, n), time.Duration(timeoutMs)*time.Millisecond)
		*at = newHandle(c)
		give(task, t)
		return nil
	})
}

// sf_comm_group returns the task that creates the group's communicator, and begins it if necessary.
//
//export sf_comm_group
func sf_comm_group(task *C.uint64_t, e *C.sf_error) C.int {
	return with(e, func(s *core.Session) error {
		_, t := s.Comms().Group()
		give(task, t)
		return nil
	})
}

//export sf_comm_place
func sf_comm_place(at C.uint64_t, rank, size *C.int, e *C.sf_error) C.int {
	c, err := comm(at)
	if err != nil {
		return fail(e, err)
	}
	*rank, *size = C.int(c.Rank()), C.int(c.Size())
	return C.SF_DONE
}

// sf_comm_call begins a call. It takes ownership of the tensors' owners unless it returns SF_PENDING.
//
//export sf_comm_call
func sf_comm_call(at C.uint64_t, kind C.int, out *C.sf_tensor, nOut C.int, in *C.sf_tensor, nIn C.int, stream C.uint64_t, root C.int64_t, reduction *C.char, task *C.uint64_t, e *C.sf_error) C.int {
	c, missing := comm(at)
	if missing == core.ErrPending { // the caller creates the group's communicator and repeats the call
		return C.SF_PENDING
	}
	a := argsPool.Get().(*args)
	defer a.release() // the call has references of its own
	var err, err2 error
	a.push, err = a.read(a.push, in, nIn, "x")
	a.pull, err2 = a.read(a.pull, out, nOut, "out")
	err = cmp.Or(err, err2, missing)
	var t *core.Pending
	if err == nil {
		t, err = c.Call(af.Stream(stream), core.Collective(kind), values(a.pull), values(a.push), int(root), C.GoString(reduction))
	}
	if err != nil {
		return fail(e, err)
	}
	give(task, t)
	return C.SF_DONE
}

func values(l []af.KeyTensor) []af.Tensor {
	v := make([]af.Tensor, len(l))
	for i := range l {
		v[i] = l[i].Val
	}
	return v
}

// sf_comm_task begins an operation without tensors. A negative limit means the limit of the communicator.
//
//export sf_comm_task
func sf_comm_task(at C.uint64_t, what C.int, timeoutMs C.int64_t, task *C.uint64_t, e *C.sf_error) C.int {
	limit := time.Duration(timeoutMs) * time.Millisecond
	if at == C.SF_GROUP { // the group's communicator has only Rebuild
		return with(e, func(s *core.Session) error {
			give(task, s.Comms().RebuildGroup(limit))
			return nil
		})
	}
	c, err := comm(at)
	if err != nil {
		return fail(e, err)
	}
	switch what {
	case C.SF_COMM_BARRIER:
		give(task, c.Barrier(limit))
	case C.SF_COMM_REBUILD:
		give(task, c.Rebuild(limit))
	default:
		give(task, c.Close(limit))
	}
	return C.SF_DONE
}

//export sf_task_wait
func sf_task_wait(task C.uint64_t, sliceMs C.int64_t, e *C.sf_error) C.int {
	return result(e, object[core.Awaited](task).Wait(time.Duration(sliceMs)*time.Millisecond))
}

//export sf_task_cancel
func sf_task_cancel(task C.uint64_t) { object[core.Awaited](task).Cancel() }

//export sf_task_interrupt
func sf_task_interrupt(task C.uint64_t) { object[core.Awaited](task).Interrupt() }
