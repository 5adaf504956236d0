package fakeverbs

// This file owns the operations of IDs before Connect.

import (
	"fmt"
	"net/netip"
	"slices"
	"syscall"
	"time"

	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// idState is the state of an ID.
type idState int

const (
	idle idState = iota
	bound
	listening
	resolvingAddr
	addrResolved
	routeResolved
	connecting   // Connect was called
	requested    // made by a connect request that is not answered
	accepting    // Accept was called, the connector has not read the event
	connected    // at the acceptor, once the connector has read the event
	disconnected // either side has begun to disconnect
	failed       // rejected, unreachable, not resolved
)

var stateNames = [...]string{"idle", "bound", "listening", "resolving its address", "address resolved", "route resolved",
	"connecting", "requested", "accepting", "connected", "disconnected", "failed"}

func (s idState) String() string { return stateNames[s] }

// connID implements verbs.ID. net.mu guards all but the first fields.
type connID struct {
	net   *Net
	ch    *channel
	stack *Stack
	seq   int // number in its Stack

	cookie   uint64
	state    idState
	local    netip.AddrPort
	remote   netip.AddrPort
	at       []*host // the hosts where it has its port
	dev      *device
	qp       *qp
	peer     *connID // set by the connect request
	active   bool    // it is the connector
	param    verbs.ConnParam
	backlog  int
	waiting  int  // connect requests that were not read yet
	ack      int  // the argument of SetAckTimeout
	tos      int  // the argument of SetTOS
	unread   bool // made by a connect request that was not read yet
	notified bool // the Disconnected event was or will be added
	removed  bool // destroyed
}

func (id *connID) describe() string {
	s := fmt.Sprintf("%d (%v", id.seq, id.state)
	if id.local.IsValid() {
		s += ", " + id.local.String()
	}
	if id.remote.IsValid() {
		s += " to " + id.remote.String()
	}
	return s + ")"
}

func (id *connID) fault(op string, err error, detail string) error {
	return fault(op, err, "%s: ID %s: %s", id.stack.name, id.describe(), detail)
}

// begin counts a call that is allowed in the given states, and locks. The caller unlocks.
func (id *connID) begin(op Op, states ...idState) error {
	n := id.net
	n.mu.Lock()
	op.Local = id.local
	if !op.Peer.IsValid() {
		op.Peer = id.remote
	}
	n.mu.Unlock()
	err := id.stack.hook(op)
	n.mu.Lock()
	if err != nil {
		return err
	}
	if id.removed || id.ch.ended() {
		return id.fault(op.Kind.String(), verbs.ErrClosed, "its use")
	}
	if len(states) == 0 || slices.Contains(states, id.state) {
		return nil
	}
	return id.fault(op.Kind.String(), syscall.EINVAL, fmt.Sprintf("its state, want %v", states))
}

func (id *connID) SetCookie(cookie uint64) {
	id.net.mu.Lock()
	defer id.net.mu.Unlock()
	id.cookie = cookie
}

func (id *connID) LocalAddr() netip.AddrPort {
	id.net.mu.Lock()
	defer id.net.mu.Unlock()
	return id.local
}

func (id *connID) Bind(to netip.AddrPort) error {
	err := id.begin(Op{Kind: OpBind}, idle)
	defer id.net.mu.Unlock()
	if err != nil {
		return err
	}
	return id.bind("bind", to)
}

func (id *connID) bind(op string, to netip.AddrPort) error {
	hosts, err := id.stack.hostsFor(to.Addr())
	if err != nil {
		return fault(op, err, "%s: address %v", id.stack.name, to.Addr())
	}
	port := to.Port()
	if port == 0 {
		if port, err = freePort(hosts); err != nil {
			return fault(op, err, "%s: any port of %v", id.stack.name, to.Addr())
		}
	}
	for _, h := range hosts {
		if h.ports[port] != nil {
			return fault(op, syscall.EADDRINUSE, "%s: %v", id.stack.name, netip.AddrPortFrom(h.addr, port))
		}
	}
	if !to.Addr().IsUnspecified() && hosts[0].name != "" {
		if id.dev, err = id.ch.device(hosts[0]); err != nil {
			return fault(op, err, "%s", id.stack.name)
		}
	}
	for _, h := range hosts {
		h.ports[port] = id
	}
	id.at = hosts
	id.local = netip.AddrPortFrom(to.Addr().Unmap(), port)
	id.state = bound
	return nil
}

func (id *connID) Listen(backlog int) error {
	err := id.begin(Op{Kind: OpListen}, bound)
	defer id.net.mu.Unlock()
	if err != nil {
		return err
	}
	if backlog <= 0 {
		backlog = 1024
	}
	id.backlog = backlog
	id.state = listening
	return nil
}

func (id *connID) ResolveAddr(src netip.Addr, dst netip.AddrPort, timeout time.Duration) error {
	err := id.begin(Op{Kind: OpResolveAddr, Peer: dst}, idle, bound)
	n := id.net
	defer n.mu.Unlock()
	if status, ok := err.(EventError); ok {
		id.fail(verbs.AddrError, int(status))
		return nil
	}
	if err != nil {
		return err
	}
	if !dst.IsValid() || dst.Port() == 0 {
		return id.fault("resolve address", syscall.EINVAL, fmt.Sprintf("destination %v, want an address and a port", dst))
	}
	dst = netip.AddrPortFrom(dst.Addr().Unmap(), dst.Port())
	if id.state == idle {
		if !src.IsValid() {
			src = id.stack.sourceFor(dst.Addr())
		}
		if err := id.bind("resolve address", netip.AddrPortFrom(src, 0)); err != nil {
			return err
		}
	}
	id.remote = dst
	id.state = resolvingAddr
	h := n.hosts[dst.Addr()]
	if h == nil && !dst.Addr().IsLoopback() || n.cuts.has(id.local.Addr(), dst.Addr()) {
		if n.cfg.AddrAtOnce {
			timeout = 0
		}
		n.schedule.after(timeout, func() {
			if id.state == resolvingAddr {
				id.fail(verbs.AddrError, timedOut)
			}
		})
		return nil
	}
	if id.local.Addr().IsUnspecified() { // the route determines the address
		id.local = netip.AddrPortFrom(id.stack.sourceFor(dst.Addr()), id.local.Port())
	}
	if id.dev == nil {
		if hosts, err := id.stack.hostsFor(id.local.Addr()); err == nil {
			id.dev, _ = id.ch.device(hosts[0]) // without one, ResolveRoute fails
		}
	}
	id.state = addrResolved
	id.ch.push(id, verbs.Event{Type: verbs.AddrResolved}, nil, nil)
	return nil
}

// fail ends the pending operation of id with an event.
func (id *connID) fail(t verbs.EventType, status int) {
	id.state = failed
	id.ch.push(id, verbs.Event{Type: t, Status: status}, nil, nil)
}

func (id *connID) ResolveRoute(time.Duration) error {
	err := id.begin(Op{Kind: OpResolveRoute}, addrResolved)
	n := id.net
	defer n.mu.Unlock()
	if status, ok := err.(EventError); ok {
		id.fail(verbs.RouteError, int(status))
		return nil
	}
	if err != nil {
		return err
	}
	if id.dev == nil {
		return id.fault("resolve route", syscall.ENODEV, "no device on the route")
	}
	id.state = routeResolved
	id.ch.push(id, verbs.Event{Type: verbs.RouteResolved}, nil, nil)
	return nil
}

func (id *connID) SetAckTimeout(exp int) error {
	err := id.begin(Op{Kind: OpSetAckTimeout}, addrResolved, routeResolved, requested)
	defer id.net.mu.Unlock()
	if err != nil {
		return err
	}
	if id.net.cfg.NoAckTimeout {
		return id.fault("set ack timeout", syscall.ENOSYS, "this provider cannot")
	}
	if exp < 0 || exp > 31 {
		return id.fault("set ack timeout", syscall.EINVAL, fmt.Sprintf("exponent %d, want 0 to 31", exp))
	}
	id.ack = exp
	return nil
}

func (id *connID) SetTOS(tos int) error {
	err := id.begin(Op{Kind: OpSetTOS}, addrResolved)
	defer id.net.mu.Unlock()
	if err != nil {
		return err
	}
	if id.net.cfg.NoTOS {
		return id.fault("set type of service", syscall.ENOSYS, "this provider cannot")
	}
	if tos < 0 || tos > 255 {
		return id.fault("set type of service", syscall.EINVAL, fmt.Sprintf("it is %d, want 0 to 255", tos))
	}
	id.tos = tos
	return nil
}

func (id *connID) Device() (verbs.Device, error) {
	id.net.mu.Lock()
	defer id.net.mu.Unlock()
	if id.dev == nil {
		return nil, id.fault("device", syscall.ENODEV, "it is not on a device (yet)")
	}
	return id.dev, nil
}
