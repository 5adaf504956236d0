//go:build fserver

package main

/*
#include <stdlib.h>
#include "abi.h"
*/
import "C"

import (
	"runtime/cgo"
	"time"
	"unsafe"

	"github.com/stepaf/stepaf-go/fserver/core"
)

// sf_session begins a call of a session; see core.SessionCall. If it returns SF_PENDING, the caller waits with sf_job
// and then calls sf_session_fetch.
//
//export sf_session
func sf_session(op C.int, handle C.uint64_t, rank C.int64_t, name *C.char, data unsafe.Pointer, n C.int64_t, timeoutMs C.int64_t, ticket *C.uint64_t, e *C.sf_error) C.int {
	c := &core.SessionCall{Op: core.SessionOp(op), Handle: uint64(handle), Rank: int(rank), Name: C.GoString(name)}
	if n > 0 {
		c.Data = append([]byte(nil), unsafe.Slice((*byte)(data), int(n))...)
	}
	waits, err := process.SessionCall(time.Duration(timeoutMs)*time.Millisecond, c)
	if err != nil {
		return fail(e, err)
	}
	if !waits {
		return C.SF_DONE
	}
	*ticket = C.uint64_t(cgo.NewHandle(c))
	return C.SF_PENDING
}

// sf_session_fetch returns the result of a successful call, or undoes an interrupted call. name and data are malloc'ed.
//
//export sf_session_fetch
func sf_session_fetch(ticket C.uint64_t, ended C.int, handle *C.uint64_t, rank *C.int64_t, name **C.char, data *unsafe.Pointer, n *C.int64_t) {
	c := cgo.Handle(ticket).Value().(*core.SessionCall)
	cgo.Handle(ticket).Delete()
	if ended == 0 {
		process.SessionDrop(c)
		return
	}
	*handle, *rank, *n = C.uint64_t(c.Handle), C.int64_t(c.Rank), C.int64_t(len(c.Data))
	*name, *data = C.CString(c.Name), C.CBytes(c.Data)
}
