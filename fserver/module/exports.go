//go:build fserver

// Command module is the Python extension module fserver_lib, built with
// -buildmode=c-shared. module.c is the Python side; this file exports package core to it.
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
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/fserver/core"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

func main() {} // never runs: the library is loaded by Python

// process is this process's membership of the cluster.
var process core.Process

// leaveLimit is how long Ctrl-C and the end of the interpreter wait for calls to end.
const leaveLimit = 10 * time.Second

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

func session() (*core.Session, error) { return process.Session() }

// fail fills e and returns SF_FAILED, or SF_PENDING for an unfinished wait.
func fail(e *C.sf_error, err error) C.int {
	if errors.Is(err, core.ErrPending) {
		return C.SF_PENDING
	}
	switch {
	case errors.Is(err, van.ErrTimeout), errors.Is(err, context.DeadlineExceeded):
		e.kind = C.SF_TIMEOUT
	case errors.Is(err, van.ErrPeerLost), errors.Is(err, van.ErrUnknownPeer):
		e.kind = C.SF_CONNECTION
	case errors.Is(err, van.ErrInvalid), errors.Is(err, core.ErrUnknownHandler):
		e.kind = C.SF_VALUE
	default:
		e.kind = C.SF_RUNTIME
	}
	e.text = C.CString(strings.ToValidUTF8(err.Error(), "?")) // Python needs valid UTF-8
	return C.SF_FAILED
}

// begun is the result of a call that has begun a job for sf_job.
func begun(e *C.sf_error, err error) C.int {
	if err != nil {
		return fail(e, err)
	}
	return C.SF_DONE
}

//export sf_init
func sf_init(timeoutMs C.int64_t, e *C.sf_error) C.int {
	lookup, names := environment()
	return begun(e, process.Init(time.Duration(timeoutMs)*time.Millisecond, lookup, names))
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
		}, func() []string {
			var all []string
			for name := range vars {
				all = append(all, name)
			}
			return all
		}
}

// sf_stop returns SF_PENDING when there is no job to wait for with sf_job.
//
//export sf_stop
func sf_stop(timeoutMs C.int64_t, e *C.sf_error) C.int {
	waits, err := process.Stop(time.Duration(timeoutMs) * time.Millisecond)
	if err == nil && !waits {
		return C.SF_PENDING
	}
	return begun(e, err)
}

//export sf_barrier
func sf_barrier(servers, workers, instances C.int, timeoutMs C.int64_t, e *C.sf_error) C.int {
	return begun(e, process.Barrier(time.Duration(timeoutMs)*time.Millisecond, servers != 0, workers != 0, instances != 0))
}

// sf_job waits for the job under way, for sliceMs at most.
//
//export sf_job
func sf_job(sliceMs C.int64_t, e *C.sf_error) C.int {
	return begun(e, process.Wait(time.Duration(sliceMs)*time.Millisecond))
}

// sf_cancel cancels the job under way. The caller raises the exception of a signal, so an
// error can only be logged.
//
//export sf_cancel
func sf_cancel() { within(process.Cancel) }

// sf_exit leaves at once: the interpreter ends.
//
//export sf_exit
func sf_exit() { within(process.Exit) }

func within(f func(context.Context) error) {
	ctx, cancel := context.WithTimeout(context.Background(), leaveLimit)
	defer cancel()
	if err := f(ctx); err != nil {
		slog.Error("fserver: "+err.Error(), "limit", leaveLimit)
	}
}

// owner counts the uses of a Python object's memory.
type owner struct {
	object unsafe.Pointer
	refs   atomic.Int32
}

var owners = sync.Pool{New: func() any { return new(owner) }}

// garbage are Python objects that Go no longer needs. Only Python may drop its references
// to them; it does so in its next call.
var garbage struct {
	mu      sync.Mutex
	objects []unsafe.Pointer
}

// setDropped tells Python the length of garbage. garbage.mu is held.
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

// sf_files lists the descriptors that a forked child must close.
//
//export sf_files
func sf_files(files *C.sf_file, n C.int) C.int {
	s, err := session()
	if err != nil {
		return 0
	}
	all := unsafe.Slice(files, int(n))
	own := s.Files()
	for i, f := range own[:min(len(own), len(all))] {
		all[i].fd, all[i].device, all[i].num = C.int(f.FD), C.uint64_t(f.Device), C.uint64_t(f.Num)
	}
	return C.int(min(len(own), len(all)))
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

// read appends n tensors of Python to ts. All owners are taken over, also after an
// error.
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

// ranks copies ranks of servers; nil means all.
func ranks(servers *C.int64_t, n C.int) []int {
	if servers == nil {
		return nil
	}
	to := make([]int, n)
	for i, rank := range unsafe.Slice(servers, int(n)) {
		to[i] = int(rank)
	}
	return to
}

//export sf_push_pull
func sf_push_pull(push *C.sf_tensor, nPush C.int, pull *C.sf_tensor, nPull C.int, stream C.uint64_t, servers *C.int64_t, nServers C.int, e *C.sf_error) C.int64_t {
	a := argsPool.Get().(*args)
	defer a.release()
	var err, err2 error
	a.push, err = a.read(a.push, push, nPush, "push_tensors")
	a.pull, err2 = a.read(a.pull, pull, nPull, "pull_tensors")
	if err != nil || err2 != nil {
		return C.int64_t(fail(e, errors.Join(err, err2)))
	}
	s, err := session()
	if err != nil {
		return C.int64_t(fail(e, err))
	}
	var h int32
	if to := ranks(servers, nServers); to == nil {
		h, err = s.PushPull(af.Stream(stream), a.push, a.pull)
	} else {
		h, err = s.PushPullTo(af.Stream(stream), to, a.push, a.pull)
	}
	if err != nil {
		return C.int64_t(fail(e, err))
	}
	return C.int64_t(h)
}

//export sf_wait
func sf_wait(handler, timeoutMs, sliceMs C.int64_t, e *C.sf_error) C.int {
	s, err := session()
	if err == nil {
		err = s.Wait(int64(handler), time.Duration(timeoutMs)*time.Millisecond, time.Duration(sliceMs)*time.Millisecond)
	}
	if err != nil {
		return fail(e, err)
	}
	return C.SF_DONE
}

//export sf_handlers
func sf_handlers(handler C.int64_t, n *C.int, e *C.sf_error) C.int {
	s, err := session()
	count := 0
	if err == nil {
		count, err = s.AllHandlers(int64(handler))
	}
	if err != nil {
		return fail(e, err)
	}
	*n = C.int(count)
	return C.SF_DONE
}

//export sf_trace
func sf_trace(handler C.int64_t, out *C.uint64_t, e *C.sf_error) C.int {
	s, err := session()
	var stamps [8]uint64
	if err == nil {
		stamps, err = s.FetchTrace(int64(handler))
	}
	if err != nil {
		return fail(e, err)
	}
	for i, v := range stamps {
		unsafe.Slice(out, 8)[i] = C.uint64_t(v)
	}
	return C.SF_DONE
}

//export sf_now
func sf_now() C.uint64_t { return C.uint64_t(core.Nanosecond()) }

// sf_batch_timeout is the error of a get_batch that has waited for ms.
//
//export sf_batch_timeout
func sf_batch_timeout(ms C.int64_t, e *C.sf_error) C.int {
	s, err := session()
	if err == nil {
		err = s.BatchTimeout(time.Duration(ms) * time.Millisecond)
	}
	return fail(e, err)
}

// sf_get_batch waits for one batch of each worker, or, if most is not SF_ONE, for at most
// most batches of any (0: no limit), for sliceMs at most. *out points to
// room, which has size bytes, or, if the batches do not fit, to one malloc'ed block that
// the caller frees.
//
//export sf_get_batch
func sf_get_batch(sliceMs, most C.int64_t, room unsafe.Pointer, size C.size_t, out **C.sf_batch, n *C.int, e *C.sf_error) C.int {
	s, err := session()
	if err != nil {
		return fail(e, err)
	}
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

// handOut writes items for Python, to room if that is large enough.
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

// lend makes a lease of n tensors and returns its index. leases.mu is held.
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

// sf_release gives back one tensor of a lease. Work queued in stream, unless it is
// SF_COMPLETE, may still read the tensor.
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

// sf_check_respond tells whether each of n batches, whose handlers are the keys of
// ts, can be answered with one tensor: nothing is sent when one cannot.
//
//export sf_check_respond
func sf_check_respond(ts *C.sf_tensor, n C.int, e *C.sf_error) C.int {
	ids := make([]uint64, n)
	for i, t := range unsafe.Slice(ts, int(n)) {
		ids[i] = uint64(t.key)
	}
	s, err := session()
	if err == nil {
		err = s.CanRespond(ids, 1)
	}
	if err != nil {
		return fail(e, err)
	}
	return C.SF_DONE
}

//export sf_register
func sf_register(t *C.sf_tensor, ranks *C.int64_t, keys *C.uint64_t, n C.int, e *C.sf_error) C.int {
	a := argsPool.Get().(*args)
	defer a.release() // RegisterRecvBuffer keeps references of its own
	var err error
	a.push, err = a.read(a.push, t, 1, "tensor")
	var s *core.Session
	if err == nil {
		s, err = session()
	}
	if err == nil {
		rs, ks := make([]int, n), make([]uint64, n)
		for i := range rs {
			rs[i], ks[i] = int(unsafe.Slice(ranks, n)[i]), uint64(unsafe.Slice(keys, n)[i])
		}
		err = s.RegisterRecvBuffer(a.push[0].Val, rs, ks)
	}
	if err != nil {
		return fail(e, err)
	}
	return C.SF_DONE
}
