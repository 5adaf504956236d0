//go:build fserver

package main

// The tensors of a call: the arguments from Python, and the references to them that Go holds.

/*
#include "abi.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/van/backend"
)

// owner counts the uses of a Python object's memory.
type owner struct {
	object unsafe.Pointer
	refs   atomic.Int32
}

var owners = sync.Pool{New: func() any { return new(owner) }}

// garbage are Python objects that Go no longer needs. Only Python may drop its references to them; its next call does
// so.
var garbage struct {
	mu      sync.Mutex
	objects []unsafe.Pointer
}

// setDropped tells the C side the length of garbage. The caller holds garbage.mu.
func setDropped() { atomic.StoreInt32((*int32)(&C.sf_dropped), int32(len(garbage.objects))) }

func (o *owner) Retain() { o.refs.Add(1) }

func (o *owner) Release() {
	if o.refs.Add(-1) > 0 {
		return
	}
	garbage.mu.Lock()
	garbage.objects = append(garbage.objects, o.object)
	setDropped()
	garbage.mu.Unlock()
	o.object = nil
	owners.Put(o)
}

// sf_drain moves up to n objects of garbage to out.
//
//export sf_drain
func sf_drain(out *unsafe.Pointer, n C.int) C.int {
	garbage.mu.Lock()
	defer garbage.mu.Unlock()
	k := copy(unsafe.Slice(out, int(n)), garbage.objects)
	rest := copy(garbage.objects, garbage.objects[k:])
	clear(garbage.objects[rest:])
	garbage.objects = garbage.objects[:rest]
	setDropped()
	return C.int(k)
}

// args are the tensors of one call, with a reference to each owner.
type args struct {
	held       []*owner
	push, pull []af.KeyTensor
}

var argsPool = sync.Pool{New: func() any { return new(args) }}

// release drops the references and the tensors.
func (a *args) release() {
	for _, o := range a.held {
		o.Release()
	}
	clear(a.held)
	clear(a.push)
	clear(a.pull)
	a.held, a.push, a.pull = a.held[:0], a.push[:0], a.pull[:0]
	if cap(a.held) <= 1024 {
		argsPool.Put(a)
	}
}

// request reads the tensors of a request.
func (a *args) request(push *C.sf_tensor, nPush C.int, pull *C.sf_tensor, nPull C.int) error {
	var err, err2 error
	a.push, err = a.read(a.push, push, nPush, "push_tensors")
	a.pull, err2 = a.read(a.pull, pull, nPull, "pull_tensors")
	return errors.Join(err, err2)
}

// read appends n tensors of Python to ts. It takes ownership of all owners, also after an error.
func (a *args) read(ts []af.KeyTensor, t *C.sf_tensor, n C.int, what string) (_ []af.KeyTensor, err error) {
	in := unsafe.Slice(t, int(n))
	for i := range in {
		c := &in[i]
		o := owners.Get().(*owner)
		o.object = c.owner
		o.refs.Store(1)
		a.held = append(a.held, o)
		if err != nil {
			continue
		}
		shape := unsafe.Slice((*int64)(&c.shape[0]), len(c.shape))[:c.ndim]
		dev := backend.Device{Type: backend.DeviceType(c.device_type), ID: int32(c.device_id)}
		var x af.Tensor
		if x, err = af.FromPointer(c.ptr, dev, o, af.Dtype(c.dtype), shape...); err != nil {
			err = fmt.Errorf("%s[%d]: %w", what, i, err)
			continue
		}
		ts = append(ts, af.KeyTensor{Key: uint64(c.key), Val: x})
	}
	return ts, err
}
