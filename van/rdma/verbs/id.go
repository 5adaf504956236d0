//go:build linux && cgo && !nordma

package verbs

// This file owns the IDs of the connection manager.

/*
#include "shim.h"
*/
import "C"

import (
	"fmt"
	"math"
	"net/netip"
	"strconv"
	"sync"
	"syscall"
	"time"
	"unsafe"
)

type id struct {
	ch *channel

	mu     sync.Mutex
	c      *C.sv_id // nil: destroyed
	qp     *qp
	device *device // of qp; kept alive for C
}

// do calls f with the ID if it is not destroyed.
func (i *id) do(op, what string, f func(c *C.sv_id) C.int) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	rc := C.int(C.SV_ESTALE)
	if i.c != nil {
		rc = f(i.c)
	}
	return failure(rc, op, i.deviceName(), what)
}

func (i *id) deviceName() string {
	if i.device == nil {
		return ""
	}
	return i.device.name
}

// SetCookie sets the ID's cookie. Events that were read before have the old one.
func (i *id) SetCookie(cookie uint64) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.c != nil {
		C.sv_id_set_cookie(i.c, C.uint64_t(cookie))
	}
}

// Bind binds the ID to a.
func (i *id) Bind(a netip.AddrPort) error {
	sa, err := toAddr(a)
	if err != nil {
		return fmt.Errorf("rdma: bind: %w", err)
	}
	return i.do("bind", a.String(), func(c *C.sv_id) C.int { return C.sv_bind(c, &sa) })
}

// Listen begins to accept connect requests.
func (i *id) Listen(backlog int) error {
	return i.do("listen", "", func(c *C.sv_id) C.int { return C.sv_listen(c, C.int(backlog)) })
}

// LocalAddr is the address that the ID is bound to.
func (i *id) LocalAddr() netip.AddrPort {
	i.mu.Lock()
	defer i.mu.Unlock()
	var a C.sv_addr
	if i.c != nil {
		C.sv_id_addr(i.c, &a)
	}
	return fromAddr(&a)
}

// ResolveAddr begins to resolve the device and path to dst.
func (i *id) ResolveAddr(src netip.Addr, dst netip.AddrPort, timeout time.Duration) error {
	d, err := toAddr(dst)
	if err != nil {
		return fmt.Errorf("rdma: resolve address: destination: %w", err)
	}
	what := dst.String()
	var s C.sv_addr
	if src.IsValid() {
		if s, err = toAddr(netip.AddrPortFrom(src, 0)); err != nil {
			return fmt.Errorf("rdma: resolve address: source: %w", err)
		}
		what += " from " + src.String()
	}
	return i.do("resolve address", what, func(c *C.sv_id) C.int { return C.sv_resolve_addr(c, &s, &d, millis(timeout)) })
}

// ResolveRoute begins to resolve the route.
func (i *id) ResolveRoute(timeout time.Duration) error {
	return i.do("resolve route", "", func(c *C.sv_id) C.int { return C.sv_resolve_route(c, millis(timeout)) })
}

// millis rounds up, since 0 would be no time at all.
func millis(d time.Duration) C.int {
	return C.int(min(max((d+time.Millisecond-1)/time.Millisecond, 1), math.MaxInt32))
}

// SetAckTimeout sets the retransmission time-out.
func (i *id) SetAckTimeout(exp int) error {
	if exp < 0 || exp > 31 {
		return fmt.Errorf("rdma: set ACK timeout: exponent is %d, want 0 to 31", exp)
	}
	return i.do("set ACK timeout", strconv.Itoa(exp), func(c *C.sv_id) C.int { return C.sv_set_ack_timeout(c, C.int(exp)) })
}

// SetTOS sets the type of service of the packets.
func (i *id) SetTOS(tos int) error {
	if tos < 0 || tos > 255 {
		return fmt.Errorf("rdma: set type of service: %d, want 0 to 255", tos)
	}
	return i.do("set type of service", strconv.Itoa(tos), func(c *C.sv_id) C.int { return C.sv_set_tos(c, C.int(tos)) })
}

// Device returns the device of the ID.
func (i *id) Device() (Device, error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.open()
}

func (i *id) open() (*device, error) {
	if i.c == nil {
		return nil, failure(C.SV_ESTALE, "find the device of an ID", "", "")
	}
	return i.ch.device(i.c)
}

// CreateQP makes the queue pair.
func (i *id) CreateQP(o QPOptions) (QP, error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	d, err := i.open()
	if err != nil {
		return nil, err
	}
	if i.qp != nil {
		return nil, fmt.Errorf("rdma: %s: create a queue pair: the ID has one", d.name)
	}
	q, err := d.createQP(i.c, o)
	if err != nil {
		return nil, err
	}
	i.qp, i.device = q, d
	return q, nil
}

// Connect begins to connect.
func (i *id) Connect(p ConnParam) error {
	return i.join("connect", p, MaxConnectData, func(c *C.sv_id, data unsafe.Pointer, n C.int) C.int {
		return C.sv_connect(c, data, n, C.int(p.RetryCount), C.int(p.RNRRetryCount))
	})
}

// Accept accepts a connect request.
func (i *id) Accept(p ConnParam) error {
	return i.join("accept", p, MaxAcceptData, func(c *C.sv_id, data unsafe.Pointer, n C.int) C.int {
		return C.sv_accept(c, data, n, C.int(p.RetryCount), C.int(p.RNRRetryCount))
	})
}

func (i *id) join(op string, p ConnParam, most int, f func(*C.sv_id, unsafe.Pointer, C.int) C.int) error {
	switch {
	case len(p.Private) > most:
		return fmt.Errorf("rdma: %s: %d bytes of private data, want at most %d", op, len(p.Private), most)
	case p.RetryCount < 0 || p.RetryCount > 7:
		return fmt.Errorf("rdma: %s: retry count is %d, want 0 to 7", op, p.RetryCount)
	case p.RNRRetryCount < 0 || p.RNRRetryCount > 7:
		return fmt.Errorf("rdma: %s: RNR retry count is %d, want 0 to 7", op, p.RNRRetryCount)
	}
	return i.do(op, "", func(c *C.sv_id) C.int {
		if i.qp == nil {
			return C.int(syscall.ENOTCONN) // without a queue pair, librdmacm would leave its state changes to the caller
		}
		return f(c, unsafe.Pointer(unsafe.SliceData(p.Private)), C.int(len(p.Private)))
	})
}

// Reject rejects a connect request.
func (i *id) Reject(private []byte) error {
	if len(private) > MaxRejectData {
		return fmt.Errorf("rdma: reject: %d bytes of private data, want at most %d", len(private), MaxRejectData)
	}
	return i.do("reject", "", func(c *C.sv_id) C.int {
		return C.sv_reject(c, unsafe.Pointer(unsafe.SliceData(private)), C.int(len(private)))
	})
}

// Disconnect ends the connection. All posted work requests are flushed.
func (i *id) Disconnect() error {
	return i.do("disconnect", "", func(c *C.sv_id) C.int { return C.sv_disconnect(c) })
}

// Destroy ends the ID in any state. A Poll or Next in progress may still return an event or completion of it. A second Destroy does nothing.
func (i *id) Destroy() error {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.c == nil {
		return nil
	}
	if err := failure(C.sv_id_free(i.c), "destroy the ID", i.deviceName(), ""); err != nil {
		return err
	}
	i.c = nil
	i.ch.mu.Lock()
	i.ch.ids--
	i.ch.mu.Unlock()
	return nil
}
