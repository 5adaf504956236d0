//go:build fserver

package main

// Handles: Python identifies objects of Go by them, for as long as a Python object exists.

/*
#include "abi.h"
*/
import "C"

import (
	"runtime/cgo"
	"strings"
)

// newHandle makes the handle of an object with a method Drop.
func newHandle(x interface{ Drop() }) C.uint64_t { return C.uint64_t(cgo.NewHandle(x)) }

// object returns the object of a handle.
func object[T any](at C.uint64_t) T { return cgo.Handle(at).Value().(T) }

// sf_handle_drop ends the use of an object by Python. Drop of a communicator, a window
// or an exchange in streams closes it in the background; a prepared exchange closes at once.
//
//export sf_handle_drop
func sf_handle_drop(at C.uint64_t) {
	object[interface{ Drop() }](at).Drop()
	cgo.Handle(at).Delete()
}

// sf_handle_error returns why an exchange or a window has ended, or the first error of the rounds of graphs.
//
//export sf_handle_error
func sf_handle_error(at C.uint64_t, e *C.sf_error) C.int {
	return result(e, object[interface{ Check() error }](at).Check())
}

// sf_path sets text, which the caller frees, to the path of an exchange.
//
//export sf_path
func sf_path(at C.uint64_t, text **C.char) {
	*text = C.CString(strings.ToValidUTF8(object[interface{ Path() string }](at).Path(), "?"))
}
