//go:build linux && cgo && !nordma

package verbs

/*
#include "shim.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"runtime"
	"syscall"
)

type qp struct {
	d      *device
	handle Handle
	num    uint32
	inline int
}

func (q *qp) Handle() Handle { return q.handle }
func (q *qp) Num() uint32    { return q.num }
func (q *qp) MaxInline() int { return q.inline }

// Pinned is valid once the connection is established.
func (q *qp) Pinned() bool {
	ok := C.sv_pinned(q.d.c, C.uint64_t(q.handle)) != 0
	runtime.KeepAlive(q.d)
	return ok
}

func (d *device) createQP(i *C.sv_id, o QPOptions) (*qp, error) {
	const op = "create a queue pair"
	limit := min(int(C.sv_max_wr(d.c)), C.SV_MAX_DEPTH)
	for _, v := range []struct {
		name         string
		n, low, high int
	}{{"SendDepth", o.SendDepth, 1, limit}, {"RecvDepth", o.RecvDepth, 0, limit}, {"Inline", o.Inline, 0, 1 << 20}, {"Port", o.Port, 0, 255}} {
		if v.n < v.low || v.n > v.high {
			return nil, &Error{Op: op, Device: d.name, What: fmt.Sprintf("with %s %d", v.name, v.n), Errno: syscall.EINVAL,
				Hint: fmt.Sprintf("want %d to %d", v.low, v.high)}
		}
	}
	if o.Port > 0 && C.sv_has_mlx5(d.s.c) == 0 {
		d.s.log.Debug("rdma: queue pair not pinned: libmlx5 is missing, or too old", "device", d.name, "port", o.Port)
	}
	c := C.sv_qp_opts{cookie: C.uint64_t(o.Cookie), send_depth: C.uint32_t(o.SendDepth), recv_depth: C.uint32_t(o.RecvDepth),
		inline_size: C.uint32_t(o.Inline), port: C.uint32_t(o.Port)}
	var what *C.char
	rc := C.sv_create_qp(d.c, i, &c, &what)
	err := failure(rc, C.GoString(what), d.name,
		fmt.Sprintf("(%d send, %d receive requests, %d bytes inline)", o.SendDepth, o.RecvDepth, o.Inline))
	if e, ok := errors.AsType[*Error](err); ok && e.Errno == syscall.EINVAL {
		e.Hint = "the device does not take these values, or the other end of the connection has ended meanwhile"
	}
	if err != nil {
		return nil, err
	}
	return &qp{d: d, handle: Handle(c.handle), num: uint32(c.num), inline: int(c.inline_size)}, nil
}
