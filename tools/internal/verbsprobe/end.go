// Package verbsprobe is a connection for tests of RDMA: writes with immediate between two ends, through package verbs
// and nothing else of this library. Doctor checks a port with it, and bench compares figures with it.
package verbsprobe

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// End is one end of a connection, with registered memory for sending and receiving. Call Listen or Dial first, and
// Close last; these and Accept are for one goroutine. Write and Arrival are for one goroutine at a time.
type End struct {
	opts Options

	ch     verbs.Channel
	events chan verbs.Event
	done   chan struct{} // closed when events are no longer received
	pump   sync.WaitGroup
	ids    []verbs.ID
	joined verbs.ID // the ID with a queue pair
	dev    verbs.Device
	qp     verbs.QP
	mem    []byte // the sent bytes, and from inAt on the received bytes
	inAt   int
	mr     verbs.MR

	addr uint64 // address of the other end's receive memory
	rkey uint32
	most int // bytes of one message

	wrs []verbs.SendWR
	wcs [16]verbs.Completion
}

// Options are the options of an end.
type Options struct {
	Out, In int // bytes to send and to receive
	Depth   int // work requests in flight
	Inline  int // bytes that are posted inline, if the device can
}

const (
	resolveTime = time.Second
	helloLen    = 12 // bytes of private data: address and key
)

var le = binary.LittleEndian

// EventError is an unexpected event of the connection manager.
type EventError struct {
	Step  string // the step during which it arrived
	Event verbs.EventType
	Code  int // a negative errno, or the reason of a rejection
}

// Error implements error.
func (e *EventError) Error() string {
	s := fmt.Sprintf("%s: %s", e.Step, e.Event)
	switch {
	case e.Code < 0:
		s += ": " + syscall.Errno(-e.Code).Error()
	case e.Code > 0:
		s += fmt.Sprintf(" (reason %d)", e.Code)
	}
	return s
}

// StatusError is a failed work request.
type StatusError struct{ Status verbs.Status }

// Error implements error.
func (e *StatusError) Error() string { return "a write failed: " + e.Status.String() }

// MemoryError is a failure to register memory.
type MemoryError struct {
	Bytes int
	Err   error
}

// Error implements error.
func (e *MemoryError) Error() string {
	return fmt.Sprintf("register %.1f KiB of memory: %v", float64(e.Bytes)/1024, e.Err)
}

// Unwrap returns the cause.
func (e *MemoryError) Unwrap() error { return e.Err }

// New creates an end on stack.
func New(stack verbs.Stack, o Options) (*End, error) {
	e := &End{opts: o, events: make(chan verbs.Event), done: make(chan struct{})}
	var err error
	if e.ch, err = stack.NewChannel(); err != nil {
		return nil, fmt.Errorf("event channel: %w", err)
	}
	e.pump.Go(e.pumpEvents)
	return e, nil
}

func (e *End) pumpEvents() {
	defer close(e.events)
	for {
		ev, err := e.ch.Next()
		if err != nil {
			return
		}
		select {
		case e.events <- ev:
		case <-e.done:
			if ev.New != nil {
				_ = ev.New.Destroy() // not needed; the end of the channel reveals resources that remain
			}
		}
	}
}

// await receives events until one of a type arrives, and returns an error after a failure.
func (e *End) await(ctx context.Context, step string, want verbs.EventType) (verbs.Event, error) {
	for {
		select {
		case ev, open := <-e.events:
			switch {
			case !open:
				return ev, fmt.Errorf("%s: the event channel has closed", step)
			case ev.Type == want:
				return ev, nil
			case slices.Contains([]verbs.EventType{verbs.AddrError, verbs.RouteError, verbs.Unreachable, verbs.Rejected, verbs.Disconnected, verbs.DeviceRemoval}, ev.Type):
				return ev, &EventError{step, ev.Type, ev.Status}
			}
		case <-ctx.Done():
			return verbs.Event{}, fmt.Errorf("%s: %w", step, context.Cause(ctx))
		}
	}
}

func (e *End) newID() (verbs.ID, error) {
	id, err := e.ch.NewID(0)
	if err == nil {
		e.ids = append(e.ids, id)
	}
	return id, err
}

// Listen listens at a port of host, which it returns, for one Dial.
func (e *End) Listen(host netip.Addr) (netip.AddrPort, error) {
	id, err := e.newID()
	if err != nil {
		return netip.AddrPort{}, err
	}
	if err := id.Bind(netip.AddrPortFrom(host, 0)); err != nil {
		return netip.AddrPort{}, fmt.Errorf("bind: %w", err)
	}
	if err := id.Listen(1); err != nil {
		return netip.AddrPort{}, fmt.Errorf("listen: %w", err)
	}
	return id.LocalAddr(), nil
}

// Accept accepts the connection of a Dial. When it returns, the other end may not know yet that the connection is
// established; data written then arrives later.
func (e *End) Accept(ctx context.Context) error {
	ev, err := e.await(ctx, "connect", verbs.ConnectRequest)
	if err != nil {
		return err
	}
	e.ids = append(e.ids, ev.New)
	if err := e.meet(ev.Private); err != nil {
		return err
	}
	if err := e.prepare(ev.New); err != nil {
		return err
	}
	if err := ev.New.Accept(e.param()); err != nil {
		return fmt.Errorf("accept: %w", err)
	}
	_, err = e.await(ctx, "connect", verbs.Established)
	return err
}

// Dial connects from the address host to an end that listens.
func (e *End) Dial(ctx context.Context, host netip.Addr, to netip.AddrPort) error {
	id, err := e.newID()
	if err != nil {
		return err
	}
	if err := id.ResolveAddr(host, to, resolveTime); err != nil {
		return fmt.Errorf("resolve the address: %w", err)
	}
	if _, err := e.await(ctx, "resolve the address", verbs.AddrResolved); err != nil {
		return err
	}
	if err := id.ResolveRoute(resolveTime); err != nil {
		return fmt.Errorf("resolve the route: %w", err)
	}
	if _, err := e.await(ctx, "resolve the route", verbs.RouteResolved); err != nil {
		return err
	}
	if err := e.prepare(id); err != nil {
		return err
	}
	if err := id.Connect(e.param()); err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	ev, err := e.await(ctx, "connect", verbs.Established)
	if err != nil {
		return err
	}
	return e.meet(ev.Private)
}

// prepare creates the memory and the queue pair of an ID whose device is known.
func (e *End) prepare(id verbs.ID) (err error) {
	if e.dev, err = id.Device(); err != nil {
		return fmt.Errorf("open the device: %w", err)
	}
	page := os.Getpagesize()
	if e.inAt = (e.opts.Out + 63) &^ 63; e.inAt >= page {
		e.inAt = (e.inAt + page - 1) &^ (page - 1)
	}
	size := (e.inAt + max(e.opts.In, 1) + page - 1) &^ (page - 1)
	if e.mem, err = unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON); err != nil {
		return os.NewSyscallError("mmap", err)
	}
	if e.mr, err = e.dev.Register(unsafe.Pointer(&e.mem[0]), size, verbs.LocalWrite|verbs.RemoteWrite); err != nil {
		return &MemoryError{size, err}
	}
	info, err := e.dev.Info()
	if err != nil {
		return fmt.Errorf("ask the device: %w", err)
	}
	e.most = 1 << 30
	for _, p := range info.Ports {
		if p.MaxMsg > 0 {
			e.most = min(e.most, int(p.MaxMsg))
		}
	}
	if err := e.dev.Reserve(2 * e.opts.Depth); err != nil {
		return fmt.Errorf("completion queue: %w", err)
	}
	if e.qp, err = id.CreateQP(verbs.QPOptions{SendDepth: e.opts.Depth, RecvDepth: e.opts.Depth, Inline: e.opts.Inline}); err != nil {
		return fmt.Errorf("create a queue pair: %w", err)
	}
	e.joined = id
	return nil
}

// param describes this end's receive memory. It allows 6 retries: 7 means forever on Soft-RoCE.
func (e *End) param() verbs.ConnParam {
	hello := le.AppendUint64(nil, e.address(e.inAt))
	return verbs.ConnParam{Private: le.AppendUint32(hello, e.mr.RKey()), RetryCount: 6, RNRRetryCount: 7}
}

func (e *End) meet(hello []byte) error {
	if len(hello) < helloLen {
		return fmt.Errorf("connect: %d bytes of private data, want %d", len(hello), helloLen)
	}
	e.addr, e.rkey = le.Uint64(hello), le.Uint32(hello[8:])
	return nil
}

func (e *End) address(off int) uint64 {
	return uint64(uintptr(unsafe.Pointer(&e.mem[0]))) + uint64(off)
}

// Out returns the memory that Write sends.
func (e *End) Out() []byte { return e.mem[:e.opts.Out] }

// In returns the memory that the other end writes.
func (e *End) In() []byte { return e.mem[e.inAt : e.inAt+e.opts.In] }

// Device returns the name of the connection's device.
func (e *End) Device() string { return e.dev.Name() }

// Write sends all of Out, in as few messages as the device allows, the last one with imm.
func (e *End) Write(imm uint32) error {
	e.wrs = e.wrs[:0]
	for off := 0; off == 0 || off < e.opts.Out; {
		n := min(e.opts.Out-off, e.most)
		wr := verbs.SendWR{QP: e.qp.Handle(), Op: verbs.OpWrite, Len: uint32(n), LKey: e.mr.LKey(), RKey: e.rkey,
			LocalAddr: e.address(off), RemoteAddr: e.addr + uint64(off)}
		if n <= e.qp.MaxInline() {
			wr.Flags |= verbs.Inline
		}
		off += max(n, 1)
		if off >= e.opts.Out {
			wr.Op, wr.Flags, wr.Imm = verbs.OpWriteImm, wr.Flags|verbs.Signaled, imm
		}
		e.wrs = append(e.wrs, wr)
	}
	if _, err := e.dev.Post(e.wrs); err != nil {
		return fmt.Errorf("post: %w", err)
	}
	return nil
}

// ErrEnded means that the other end has ended.
var ErrEnded = errors.New("the other end has ended")

// Arrival polls for a Write of the other end for the time of spin, and then sleeps for up to block. It reports whether
// a Write has arrived, and its immediate value.
func (e *End) Arrival(spin, block time.Duration) (imm uint32, came bool, err error) {
	n, err := e.dev.Poll(e.wcs[:], spin, block)
	if err != nil {
		return 0, false, fmt.Errorf("poll: %w", err)
	}
	for i := range e.wcs[:n] {
		switch c := &e.wcs[i]; {
		case c.Status == verbs.StatusFlushed:
			return 0, false, ErrEnded
		case c.Status != verbs.StatusOK:
			return 0, false, &StatusError{c.Status}
		case c.Type == verbs.RecvWrite:
			imm, came = c.Imm, true
		}
	}
	return imm, came, nil
}

// Close releases all resources.
func (e *End) Close() error {
	close(e.done)
	var errs []error
	if e.joined != nil {
		_ = e.joined.Disconnect() // fails if it is not connected
	}
	for _, id := range slices.Backward(e.ids) {
		errs = append(errs, id.Destroy())
	}
	if e.mr != nil {
		errs = append(errs, e.mr.Deregister())
	}
	errs = append(errs, e.ch.Close())
	e.pump.Wait()
	if e.mem != nil {
		errs = append(errs, unix.Munmap(e.mem))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("take down: %w", err)
	}
	return nil
}
