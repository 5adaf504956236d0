//go:build fserver

// Command module is the Python extension module fserver_lib, built with -buildmode=c-shared. module.c is the Python
// side; the Go files export package core to it. This file exports the process and its calls.
package main

/*
#cgo pkg-config: python3
#cgo CFLAGS: -O2 -Wall -Wextra -DPy_LIMITED_API=0x03080000
#include <stdlib.h>
#include "abi.h"
extern char **environ;
*/
import "C"

import (
	"errors"
	"maps"
	"slices"
	"strings"
	"time"
	"unsafe"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/fserver/core"
)

func main() {} // never runs: the library is loaded by Python

// process is this process's membership of the cluster.
var process core.Process

// leaveLimit is the time for which Ctrl-C and the end of the interpreter wait for calls to end.
const leaveLimit = 10 * time.Second

func session() (*core.Session, error) { return process.Session() }

// fail fills e and returns SF_FAILED, or SF_PENDING for an unfinished wait.
func fail(e *C.sf_error, err error) C.int {
	if errors.Is(err, core.ErrPending) {
		return C.SF_PENDING
	}
	switch core.ClassOf(err) {
	case core.Finished:
		e.kind = C.SF_FINISHED
	case core.Timeout:
		e.kind = C.SF_TIMEOUT
	case core.Connection:
		e.kind = C.SF_CONNECTION
	case core.Value:
		e.kind = C.SF_VALUE
	default:
		e.kind = C.SF_RUNTIME
	}
	e.text = C.CString(strings.ToValidUTF8(err.Error(), "?")) // Python needs valid UTF-8
	return C.SF_FAILED
}

// with returns the result of f. Without a session it does not call f.
func with(e *C.sf_error, f func(*core.Session) error) C.int {
	s, err := session()
	if err == nil {
		err = f(s)
	}
	return result(e, err)
}

// result returns SF_DONE, or the result of fail.
func result(e *C.sf_error, err error) C.int {
	if err != nil {
		return fail(e, err)
	}
	return C.SF_DONE
}

//export sf_init
func sf_init(timeoutMs C.int64_t, e *C.sf_error) C.int {
	lookup, names := environment()
	return result(e, process.Init(time.Duration(timeoutMs)*time.Millisecond, lookup, names))
}

// environment reads C's environment: it has what Python puts into os.environ after the
// library was loaded; Go's copy does not.
func environment() (func(string) (string, bool), func() []string) {
	vars := map[string]string{}
	for p := C.environ; p != nil && *p != nil; p = (**C.char)(unsafe.Add(unsafe.Pointer(p), unsafe.Sizeof(p))) {
		if name, value, ok := strings.Cut(C.GoString(*p), "="); ok {
			vars[name] = value
		}
	}
	return func(name string) (string, bool) {
		v, ok := vars[name]
		return v, ok
	}, func() []string { return slices.Collect(maps.Keys(vars)) }
}

// sf_stop returns SF_PENDING when there is no job to wait for with sf_job. thread is the calling thread, and only says whether
// Python has no other.
//
//export sf_stop
func sf_stop(timeoutMs C.int64_t, thread C.uint64_t, only C.int, e *C.sf_error) C.int {
	if only != 0 {
		thread = core.OnlyThread
	}
	waits, err := process.Stop(time.Duration(timeoutMs)*time.Millisecond, uint64(thread))
	if err == nil && !waits {
		return C.SF_PENDING
	}
	return result(e, err)
}

// sf_finish is sf_stop at the end of the interpreter, for a server whose loop has ended because its workers have ended.
//
//export sf_finish
func sf_finish(e *C.sf_error) C.int {
	waits, err := process.Finish()
	if err == nil && !waits {
		return C.SF_PENDING
	}
	return result(e, err)
}

//export sf_barrier
func sf_barrier(servers, workers, instances C.int, timeoutMs C.int64_t, e *C.sf_error) C.int {
	return result(e, process.Barrier(time.Duration(timeoutMs)*time.Millisecond, servers != 0, workers != 0, instances != 0))
}

// sf_job waits for the job under way, for sliceMs at most.
//
//export sf_job
func sf_job(sliceMs C.int64_t, e *C.sf_error) C.int {
	return result(e, process.Wait(time.Duration(sliceMs)*time.Millisecond))
}

// sf_cancel cancels the job under way. It logs errors, since its caller raises the exception of a signal.
//
//export sf_cancel
func sf_cancel() { core.Within(leaveLimit, process.Cancel) }

// sf_exit leaves the cluster at once, because the interpreter ends.
//
//export sf_exit
func sf_exit() { core.Within(leaveLimit, process.Exit) }

// ranks copies ranks of nodes; nil means all.
func ranks(nodes *C.int64_t, n C.int) []int {
	if nodes == nil {
		return nil
	}
	to := make([]int, n)
	for i, rank := range unsafe.Slice(nodes, int(n)) {
		to[i] = int(rank)
	}
	return to
}

// sf_push_pull returns a handler or SF_FAILED. With locked != 0 the caller holds Python's lock, and sf_push_pull may return SF_CONNECTS:
// it then did nothing. In all other cases it takes ownership of the tensors' owners.
//
//export sf_push_pull
func sf_push_pull(push *C.sf_tensor, nPush C.int, pull *C.sf_tensor, nPull C.int, stream C.uint64_t, servers *C.int64_t, nServers, locked C.int, e *C.sf_error) C.int64_t {
	s, err := session()
	to := ranks(servers, nServers)
	if err == nil && locked != 0 && core.MayConnect(s, to) {
		return C.SF_CONNECTS
	}
	a := argsPool.Get().(*args)
	defer a.release()
	if err := a.request(push, nPush, pull, nPull); err != nil {
		return C.int64_t(fail(e, err))
	}
	if err != nil {
		return C.int64_t(fail(e, err))
	}
	h, err := s.PushPull(af.Stream(stream), to, a.push, a.pull)
	if err != nil {
		return C.int64_t(fail(e, err))
	}
	return C.int64_t(h)
}

//export sf_wait
func sf_wait(handler, timeoutMs, sliceMs C.int64_t, e *C.sf_error) C.int {
	return with(e, func(s *core.Session) error {
		return s.Wait(int64(handler), time.Duration(timeoutMs)*time.Millisecond, time.Duration(sliceMs)*time.Millisecond)
	})
}

// sf_poll returns SF_PENDING while the request is not complete.
//
//export sf_poll
func sf_poll(handler C.int64_t, e *C.sf_error) C.int {
	return with(e, func(s *core.Session) error { return core.Poll(s, int64(handler)) })
}

// sf_fileno returns the number of a descriptor (core.Descriptor), or SF_FAILED.
//
//export sf_fileno
func sf_fileno(any C.int, e *C.sf_error) C.int {
	var fd int
	if rc := with(e, func(s *core.Session) (err error) {
		fd, err = core.Descriptor(s, any != 0)
		return err
	}); rc != C.SF_DONE {
		return rc
	}
	C.sf_keep_descriptor(any, C.int(fd))
	return C.int(fd)
}

//export sf_handlers
func sf_handlers(handler C.int64_t, n *C.int, e *C.sf_error) C.int {
	return with(e, func(s *core.Session) error {
		count, err := s.AllHandlers(int64(handler))
		*n = C.int(count)
		return err
	})
}

//export sf_trace
func sf_trace(handler C.int64_t, out *C.uint64_t, e *C.sf_error) C.int {
	return with(e, func(s *core.Session) error {
		stamps, err := s.FetchTrace(int64(handler))
		for i, v := range stamps {
			unsafe.Slice(out, 8)[i] = C.uint64_t(v)
		}
		return err
	})
}

// sf_stats returns the snapshot as JSON, which the caller frees.
//
//export sf_stats
func sf_stats(text **C.char, e *C.sf_error) C.int {
	return with(e, func(s *core.Session) error {
		b, err := core.Stats(s)
		if err == nil {
			*text = C.CString(strings.ToValidUTF8(string(b), "?"))
		}
		return err
	})
}

//export sf_now
func sf_now() C.uint64_t { return C.uint64_t(core.Nanosecond()) }

//export sf_register
func sf_register(t *C.sf_tensor, workers *C.int64_t, keys *C.uint64_t, n C.int, e *C.sf_error) C.int {
	a := argsPool.Get().(*args)
	defer a.release() // RegisterRecvBuffer has references of its own
	var err error
	if a.push, err = a.read(a.push, t, 1, "tensor"); err != nil {
		return fail(e, err)
	}
	return with(e, func(s *core.Session) error {
		return s.RegisterRecvBuffer(a.push[0].Val, ranks(workers, n), unsafe.Slice((*uint64)(keys), n))
	})
}
