//go:build fserver

package main

// The batches of a server: get_batch gives them to Python; Python returns each tensor with sf_release.

/*
#include <stdlib.h>
#include "abi.h"
*/
import "C"

import (
	"sync"
	"time"
	"unsafe"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/fserver/core"
)

// leases are the batches whose tensors Python holds. Python identifies them by their
// index in all; free indices are reused.
var leases struct {
	mu   sync.Mutex
	all  []lease
	free []uint64
}

// lease is a batch with the number of its tensors that Python holds.
type lease struct {
	batch af.Batch
	n     int
}

// sf_batch_timeout returns the error of a get_batch that has waited for ms.
//
//export sf_batch_timeout
func sf_batch_timeout(ms C.int64_t, e *C.sf_error) C.int {
	return with(e, func(s *core.Session) error { return s.BatchTimeout(time.Duration(ms) * time.Millisecond) })
}

// sf_get_batch waits, for sliceMs at most, for one batch of each worker. If most is not SF_ONE, it waits for at most
// most batches of any workers (0: no limit). *out points to room, which has size bytes. If the batches do not fit, *out
// points to one malloc'ed block that the caller frees. thread is the calling thread.
//
//export sf_get_batch
func sf_get_batch(sliceMs, most C.int64_t, thread C.uint64_t, room unsafe.Pointer, size C.size_t, out **C.sf_batch, n *C.int, e *C.sf_error) C.int {
	s, err := session()
	if err != nil {
		return fail(e, err)
	}
	s.CalledBy(uint64(thread))
	buf := itemPool.Get().(*[]core.Item)
	defer func() {
		clear(*buf)
		itemPool.Put(buf)
	}()
	if slice := time.Duration(sliceMs) * time.Millisecond; most == C.SF_ONE {
		*buf, err = s.GetBatch((*buf)[:0], slice)
	} else {
		*buf, err = s.GetAny((*buf)[:0], int(most), slice)
	}
	if err != nil {
		return fail(e, err)
	}
	return handOut(*buf, room, size, out, n)
}

var itemPool = sync.Pool{New: func() any { return new([]core.Item) }}

// handOut writes items for Python, to room if it is large enough.
func handOut(items []core.Item, room unsafe.Pointer, size C.size_t, out **C.sf_batch, n *C.int) C.int {
	total := 0
	for i := range items {
		total += len(items[i].Pushes())
	}
	block := room
	if need := C.size_t(len(items))*C.sizeof_sf_batch + C.size_t(total)*C.sizeof_sf_tensor; need > size {
		block = C.malloc(need) // never nil, see cmd/cgo
	}
	batches := unsafe.Slice((*C.sf_batch)(block), len(items))
	ts := unsafe.Slice((*C.sf_tensor)(unsafe.Add(block, uintptr(len(items))*C.sizeof_sf_batch)), total)
	leases.mu.Lock()
	for i := range items {
		pushes := items[i].Pushes()
		b := &batches[i]
		*b = C.sf_batch{id: C.uint64_t(items[i].ID), n: C.int32_t(len(pushes))}
		if len(pushes) == 0 {
			items[i].Release()
			continue
		}
		b.tensors = &ts[0]
		for k := range pushes {
			fill(&ts[k], &pushes[k])
		}
		ts = ts[len(pushes):]
		b.lease = C.uint64_t(lend(items[i].Batch, len(pushes)))
	}
	leases.mu.Unlock()
	*out, *n = (*C.sf_batch)(block), C.int(len(items))
	return C.SF_DONE
}

// lend makes a lease of n tensors and returns its index. The caller holds leases.mu.
func lend(b af.Batch, n int) uint64 {
	if k := len(leases.free); k > 0 {
		at := leases.free[k-1]
		leases.free = leases.free[:k-1]
		leases.all[at] = lease{b, n}
		return at
	}
	leases.all = append(leases.all, lease{b, n})
	return uint64(len(leases.all) - 1)
}

func fill(c *C.sf_tensor, kt *af.KeyTensor) {
	mem := kt.Val.Mem()
	c.ptr, c.nbytes = mem.Ptr(), C.int64_t(mem.Len())
	c.dtype, c.key = C.int32_t(kt.Val.Dtype()), C.uint64_t(kt.Key)
	dev := kt.Val.Device()
	c.device_type, c.device_id = C.int32_t(dev.Type), C.int32_t(dev.ID)
	c.ndim = 0
	for d, n := range kt.Val.Dims() {
		c.shape[d] = C.int64_t(n)
		c.ndim = C.int32_t(d + 1)
	}
}

// sf_release returns one tensor of a lease. If stream is not SF_COMPLETE, work queued in it may still read the tensor.
//
//export sf_release
func sf_release(at, stream C.uint64_t) {
	leases.mu.Lock()
	l := &leases.all[at]
	batch := l.batch
	if stream != C.SF_COMPLETE {
		batch.Retain()
	}
	l.n--
	last := l.n == 0
	if last {
		*l = lease{}
		leases.free = append(leases.free, uint64(at))
	}
	leases.mu.Unlock()
	if stream != C.SF_COMPLETE {
		batch.Release(af.Stream(stream))
	}
	if last {
		batch.Release()
	}
}

// sf_check_respond reports whether each of n batches can be answered with one tensor. The keys of ts are the handlers.
// If one batch cannot be answered, nothing is sent.
//
//export sf_check_respond
func sf_check_respond(ts *C.sf_tensor, n C.int, e *C.sf_error) C.int {
	ids := make([]uint64, n)
	for i, t := range unsafe.Slice(ts, int(n)) {
		ids[i] = uint64(t.key)
	}
	return with(e, func(s *core.Session) error { return s.CanRespond(ids, 1) })
}
