package bench

/*
#cgo pkg-config: libzmq
#include <stdlib.h>
#include <zmq.h>
#include "floor_zmq.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"runtime"
	"unsafe"
)

// The cost of libzmq alone, measured in turns with the floor and with a push_pull over zmq.

type zmqFloor struct{ floors }

// serve starts the ROUTER, in a thread of its own.
func (x zmqFloor) serve() (*floorServer, error) {
	const endpointLen = 256
	ctx := C.zmq_ctx_new()
	at := (*C.char)(C.calloc(1, endpointLen))
	defer C.free(unsafe.Pointer(at))
	soc := C.zmq_floor_bind(ctx, at, endpointLen)
	if soc == nil {
		C.zmq_ctx_term(ctx)
		return nil, errors.New("bench: no ROUTER for the floor")
	}
	return serving(C.GoString(at), func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		out := (*C.char)(C.calloc(1, C.size_t(max(x.pull, 1)))) // libzmq uses it after the call
		defer C.free(unsafe.Pointer(out))
		C.zmq_floor_serve(soc, out, C.size_t(x.pull), flag(x.touch))
	}, func() { C.zmq_ctx_shutdown(ctx) }, func() { C.zmq_ctx_term(ctx) }), nil
}

// zmqClient is the DEALER.
type zmqClient struct {
	floors
	ctx, soc unsafe.Pointer
	out      *C.char
}

// dial connects the DEALER.
func (x zmqFloor) dial(addrs []string) (baseline, error) {
	c := &zmqClient{floors: x.floors, ctx: C.zmq_ctx_new()}
	name := C.CString(addrs[0])
	defer C.free(unsafe.Pointer(name))
	if c.soc = C.zmq_floor_connect(c.ctx, name); c.soc == nil {
		C.zmq_ctx_term(c.ctx)
		return nil, fmt.Errorf("bench: no DEALER for the floor at %s", addrs[0])
	}
	c.out = (*C.char)(C.calloc(1, C.size_t(max(c.push, 1))))
	return c, nil
}

func (c *zmqClient) close() {
	C.zmq_close(c.soc)
	C.zmq_ctx_term(c.ctx)
	C.free(unsafe.Pointer(c.out))
}

// measure does n rounds and returns the nanoseconds of each.
func (c *zmqClient) measure(n int) ([]int64, error) {
	ns := make([]int64, n)
	if n == 0 {
		return ns, nil
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	return ns, errno(C.zmq_floor_measure(c.soc, c.out, C.size_t(c.push), C.size_t(c.pull), C.int(n), flag(c.touch),
		(*C.int64_t)(unsafe.Pointer(&ns[0]))))
}
