//go:build fserver

package main

// Tensors in memory that the processes of a host share.

/*
#include "abi.h"
*/
import "C"

import (
	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/fserver/core"
)

// sharedMemory is the memory of one empty_shared.
type sharedMemory struct{ free func() }

func (m sharedMemory) Drop() { m.free() }

// sf_shared_alloc allocates n bytes; *at is the handle of the memory.
//
//export sf_shared_alloc
func sf_shared_alloc(n C.int64_t, at *C.uint64_t, t *C.sf_tensor, e *C.sf_error) C.int {
	x, free, err := af.AllocShared(af.Uint8, int64(n))
	if err != nil {
		return fail(e, err)
	}
	fill(t, &af.KeyTensor{Val: x})
	*at = newHandle(sharedMemory{free})
	return C.SF_DONE
}

// sf_answer_tensor describes the worker's pull tensor i of a batch, with a lease, if the server maps it; *have tells.
//
//export sf_answer_tensor
func sf_answer_tensor(id C.uint64_t, i C.int64_t, t *C.sf_tensor, lease *C.uint64_t, have *C.int, e *C.sf_error) C.int {
	return with(e, func(s *core.Session) error {
		b, x, err := core.AnswerTensor(s, uint64(id), int(i))
		if err != nil || x.Len() == 0 {
			return err
		}
		fill(t, &af.KeyTensor{Val: x})
		leases.mu.Lock()
		defer leases.mu.Unlock()
		*lease, *have = C.uint64_t(lend(b, 1)), 1
		return nil
	})
}
