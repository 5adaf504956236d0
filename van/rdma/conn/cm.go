package conn

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// This file owns the IDs of the connection manager, and the steps that connect one queue pair.

// Time limits of connecting.
const (
	ResolveTime = 1000 * time.Millisecond // the same as StepMesh's
	rejectTime  = 5 * time.Millisecond    // a round trip: the peer's kernel rejects at once without a listener
)

// Manager makes IDs and queue pairs. Set the exported fields before use. Any goroutine may call its methods.
type Manager struct {
	Log     *slog.Logger
	Channel verbs.Channel
	Source  netip.Addr // local address of outgoing connections; invalid: any
	// SendDepth and RecvDepth are the depths of one queue pair. Inline is the inline data in bytes that it accepts if the device can.
	SendDepth, RecvDepth, Inline int
	// AckTimeout is the exponent of the retransmission time-out, 4.096 us << AckTimeout.
	AckTimeout int
	// SplitPorts pins the queue pairs of outgoing connections alternately to the ports of a bonded device.
	SplitPorts bool
	// Rejection, if not nil, decodes the private data of a rejection. It returns nil if the data says nothing.
	Rejection func(private []byte) error

	mu       sync.Mutex
	ids      map[uint64]*ID
	reserved map[verbs.Device]int // entries reserved in completion queues
}

// ID is an ID of the connection manager whose events a goroutine can wait for.
type ID struct {
	verbs.ID
	cookie uint64
	events chan verbs.Event
}

// Cookie returns the cookie of queue pair q of the connection with this serial number.
func Cookie(serial uint32, q int) uint64 { return uint64(serial)<<8 | uint64(q) }

// CookieOf returns the serial number of the connection, and the queue pair, of a cookie.
func CookieOf(cookie uint64) (serial uint32, q int) { return uint32(cookie >> 8), int(cookie & 0xff) }

// NewID makes an ID. Its events can be waited for until Remove.
func (m *Manager) NewID(cookie uint64) (*ID, error) {
	x := &ID{cookie: cookie, events: make(chan verbs.Event, 8)}
	m.mu.Lock()
	if m.ids == nil {
		m.ids = map[uint64]*ID{}
	}
	m.ids[cookie] = x
	m.mu.Unlock()
	id, err := m.Channel.NewID(cookie)
	if err != nil {
		return nil, err
	}
	x.ID = id
	return x, nil
}

// Remove removes the IDs of n queue pairs of a connection from the table. It does not destroy them.
func (m *Manager) Remove(serial uint32, n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for q := range n {
		delete(m.ids, Cookie(serial, q))
	}
}

// Deliver passes an event to the goroutine that waits for it, if any.
func (m *Manager) Deliver(ev verbs.Event) {
	m.mu.Lock()
	x := m.ids[ev.Cookie]
	m.mu.Unlock()
	if x == nil || ev.Type == verbs.TimewaitExit {
		return
	}
	select {
	case x.events <- ev:
	default: // no goroutine waits
	}
}

// Prepare resolves the address and the route of a peer, and makes queue pair q of a connection to it. If class is positive, it sets this
// traffic class. classSet is false if the provider refuses it.
func (m *Manager) Prepare(ctx context.Context, x *ID, to netip.AddrPort, q, class int) (qp verbs.QP, dev verbs.Device, classSet bool, err error) {
	fail := func(what string, err error) (verbs.QP, verbs.Device, bool, error) {
		return nil, nil, false, fmt.Errorf("%s: %w", what, err)
	}
	if err := x.ResolveAddr(m.Source, to, ResolveTime); err != nil {
		return fail("resolve address", err)
	}
	if _, err := m.Wait(ctx, x, verbs.AddrResolved, 2*ResolveTime); err != nil {
		return fail("resolve address", err)
	}
	if err := x.SetAckTimeout(m.AckTimeout); err != nil {
		m.Log.Debug("rdma: the provider keeps its time-out of acknowledgements", "err", err)
	}
	classSet = true
	if class > 0 {
		if err := x.SetTOS(class << 2); err != nil {
			m.Log.Warn("rdma: the provider takes no traffic class", "class", class, "err", err)
			classSet = false
		}
	}
	if err := x.ResolveRoute(ResolveTime); err != nil {
		return fail("resolve route", err)
	}
	if _, err := m.Wait(ctx, x, verbs.RouteResolved, 2*ResolveTime); err != nil {
		return fail("resolve route", err)
	}
	if dev, err = x.Device(); err != nil {
		return fail("device", err)
	}
	port := 0
	if m.SplitPorts {
		port = 1 + q%2
	}
	if qp, err = m.CreateQP(x.ID, dev, x.cookie, port); err != nil {
		return fail("create queue pair", err)
	}
	return qp, dev, classSet, nil
}

// CreateQP makes the queue pair of an ID, on a port if that is not 0, and reserves its entries in the completion queue; see Release.
func (m *Manager) CreateQP(id verbs.ID, dev verbs.Device, cookie uint64, port int) (verbs.QP, error) {
	m.mu.Lock()
	if m.reserved == nil {
		m.reserved = map[verbs.Device]int{}
	}
	m.reserved[dev] += m.SendDepth + m.RecvDepth
	err := dev.Reserve(m.reserved[dev])
	m.mu.Unlock()
	var qp verbs.QP
	if err == nil {
		qp, err = id.CreateQP(verbs.QPOptions{Cookie: cookie, SendDepth: m.SendDepth, RecvDepth: m.RecvDepth, Inline: m.Inline, Port: port})
	}
	if err != nil {
		m.Release(dev)
		return nil, err
	}
	return qp, nil
}

// Release releases the entries of one queue pair in the completion queue.
func (m *Manager) Release(dev verbs.Device) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.reserved[dev] -= m.SendDepth + m.RecvDepth
}

// Wait waits for the event that ends a step.
func (m *Manager) Wait(ctx context.Context, x *ID, want verbs.EventType, limit time.Duration) (verbs.Event, error) {
	select {
	case ev := <-x.events:
		if ev.Type != want {
			return ev, m.EventError(ev)
		}
		return ev, nil
	case <-time.After(limit):
		return verbs.Event{}, fmt.Errorf("%w after %s: no answer of the connection manager", van.ErrTimeout, limit)
	case <-ctx.Done():
		return verbs.Event{}, ctx.Err()
	}
}

// WaitRejected waits up to rejectTime for the answer to a connect request. It returns the error of a rejection, and leaves an acceptance
// for Wait. Without it, a StepMesh peer that begins to listen between two requests would receive the second one only, and would number
// the queue pairs of the next connection wrongly.
func (m *Manager) WaitRejected(ctx context.Context, x *ID) error {
	select {
	case ev := <-x.events:
		if ev.Type != verbs.Established {
			return m.EventError(ev)
		}
		x.events <- ev // does not block: its entry has just been taken out
		return nil
	case <-time.After(rejectTime):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// EventError returns the error for an event that ends a step unsuccessfully. It trusts the text of a rejection, so use it for connections
// that this node has requested.
func (m *Manager) EventError(ev verbs.Event) error {
	if ev.Type == verbs.Rejected && m.Rejection != nil {
		if err := m.Rejection(ev.Private); err != nil {
			return err
		}
	}
	return EventError(ev)
}

// EventError returns the error for an event that ends a step unsuccessfully. It ignores the event's private data.
func EventError(ev verbs.Event) error {
	switch {
	case ev.Type == verbs.Rejected && ev.Status == 8:
		return errors.New("rejected (8): no process listens there yet")
	case ev.Type == verbs.Rejected:
		return fmt.Errorf("rejected by the peer (%d)", ev.Status)
	case ev.Status < 0:
		return fmt.Errorf("%s: %w", ev.Type, syscall.Errno(-ev.Status))
	default:
		return fmt.Errorf("%s (%d)", ev.Type, ev.Status)
	}
}
