//go:build fserver

package main

// Handles: Python identifies objects of Go by them, for as long as a Python object exists.

/*
#include "abi.h"
*/
import "C"

import "runtime/cgo"

// newHandle makes the handle of an object with a method Drop.
func newHandle(x interface{ Drop() }) C.uint64_t { return C.uint64_t(cgo.NewHandle(x)) }

// object returns the object of a handle.
func object[T any](at C.uint64_t) T { return cgo.Handle(at).Value().(T) }

// sf_handle_drop ends the use of an object by Python. It does not block: what must be closed is closed in the background.
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
