//go:build fserver

package main

/*
#include "abi.h"
*/
import "C"

import (
	"unsafe"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/fserver/core"
)

// sf_put_back returns n batches of sf_get_batch to the queue. Of each batch with tensors, sf_release must not have
// returned all tensors yet. The caller must still return all of them with sf_release.
//
//export sf_put_back
func sf_put_back(batches *C.sf_batch, n C.int) {
	s, err := session()
	if err != nil {
		return // the queue has ended with the session
	}
	var items []core.Item
	for _, b := range unsafe.Slice(batches, int(n)) {
		var held *af.Batch
		if b.n > 0 {
			leases.mu.Lock()
			batch := leases.all[b.lease].batch
			leases.mu.Unlock()
			held = &batch
		}
		if it, ok := s.Retake(uint64(b.id), held); ok {
			items = append(items, it)
		}
	}
	if len(items) > 0 {
		s.GiveBack(items)
	}
}
