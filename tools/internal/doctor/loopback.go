package doctor

import (
	"context"
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

const (
	loopbackRounds = 300
	warmupRounds   = 20
	portTime       = 5 * time.Second // for connecting and all rounds of one port

	resolveTime = time.Second
	pollSpin    = 200 * time.Microsecond
	pollBlock   = 20 * time.Millisecond
	depth       = 16 // work requests in flight
)

// trips are the round trips of one port.
type trips struct {
	device   string
	rounds   int
	p50, p99 time.Duration
}

// Cookies name the three IDs of a loopback and their queue pairs.
const (
	listenerSide uint64 = iota + 1
	clientSide
	serverSide
)

// eventError is an event of the connection manager that should not have come.
type eventError struct {
	step  string
	event verbs.EventType
	code  int
}

func (e *eventError) Error() string {
	s := fmt.Sprintf("%s: %s", e.step, e.event)
	switch {
	case e.code < 0:
		s += ": " + syscall.Errno(-e.code).Error()
	case e.code > 0:
		s += fmt.Sprintf(" (reason %d)", e.code)
	}
	return s
}

// statusError is a work request that has failed.
type statusError struct{ status verbs.Status }

func (e *statusError) Error() string { return "a write failed: " + e.status.String() }

// memoryError says that memory could not be registered.
type memoryError struct {
	bytes int
	err   error
}

func (e *memoryError) Error() string {
	return fmt.Sprintf("register %s of memory: %v", size(uint64(e.bytes)), e.err)
}
func (e *memoryError) Unwrap() error { return e.err }

// pair is a connection from a port to itself, with a page of memory of which each
// side has a half.
type pair struct {
	ctx       context.Context
	ch        verbs.Channel
	events    chan verbs.Event
	done      chan struct{} // closed when nobody takes events any more
	pump      sync.WaitGroup
	ids       []verbs.ID
	connected []verbs.ID // those with a queue pair
	dev       verbs.Device
	mem       []byte
	mr        verbs.MR
	qps       map[uint64]verbs.QP // by side
	flying    int                 // work requests without completion
	out       [depth]verbs.Completion
	arrived   map[uint64]uint32 // immediate value by side, until looked at
}

// loopback connects addr with itself, lets a write with immediate go to and fro, and
// takes everything down again.
func loopback(ctx context.Context, stack verbs.Stack, addr netip.Addr, rounds int) (t trips, err error) {
	p := &pair{ctx: ctx, events: make(chan verbs.Event), done: make(chan struct{}), qps: map[uint64]verbs.QP{}, arrived: map[uint64]uint32{}}
	defer func() { err = errors.Join(err, p.close()) }()
	if p.ch, err = stack.NewChannel(); err != nil {
		return t, fmt.Errorf("event channel: %w", err)
	}
	p.pump.Go(p.pumpEvents)
	if err := p.connect(addr); err != nil {
		return t, err
	}
	took := make([]time.Duration, 0, rounds)
	for i := range warmupRounds + rounds {
		start := time.Now()
		if err := p.round(uint32(i)); err != nil {
			return t, fmt.Errorf("round %d: %w", i+1, err)
		}
		if i >= warmupRounds {
			took = append(took, time.Since(start))
		}
	}
	slices.Sort(took)
	return trips{device: p.dev.Name(), rounds: rounds, p50: took[len(took)/2], p99: took[len(took)*99/100]}, nil
}

func (p *pair) pumpEvents() {
	for {
		e, err := p.ch.Next()
		if err != nil {
			close(p.events)
			return
		}
		select {
		case p.events <- e:
		case <-p.done:
			if e.New != nil {
				_ = e.New.Destroy() // nobody wants it; the channel's end shows what remains
			}
		}
	}
}

// wait takes events until one of a type comes, and errs at a failure.
func (p *pair) wait(step string, want verbs.EventType) (verbs.Event, error) {
	for {
		select {
		case e, open := <-p.events:
			switch {
			case !open:
				return e, fmt.Errorf("%s: the event channel has closed", step)
			case e.Type == want:
				return e, nil
			case slices.Contains([]verbs.EventType{verbs.AddrError, verbs.RouteError, verbs.Unreachable, verbs.Rejected, verbs.Disconnected, verbs.DeviceRemoval}, e.Type):
				return e, &eventError{step, e.Type, e.Status}
			}
		case <-p.ctx.Done():
			return verbs.Event{}, fmt.Errorf("%s: %w", step, context.Cause(p.ctx))
		}
	}
}

func (p *pair) id(cookie uint64) (verbs.ID, error) {
	id, err := p.ch.NewID(cookie)
	if err == nil {
		p.ids = append(p.ids, id)
	}
	return id, err
}

// connect makes both sides.
func (p *pair) connect(addr netip.Addr) error {
	listener, err := p.id(listenerSide)
	if err != nil {
		return err
	}
	if err := listener.Bind(netip.AddrPortFrom(addr, 0)); err != nil {
		return fmt.Errorf("bind: %w", err)
	}
	if err := listener.Listen(1); err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	client, err := p.id(clientSide)
	if err != nil {
		return err
	}
	if err := client.ResolveAddr(addr, netip.AddrPortFrom(addr, listener.LocalAddr().Port()), resolveTime); err != nil {
		return fmt.Errorf("resolve the address: %w", err)
	}
	if _, err := p.wait("resolve the address", verbs.AddrResolved); err != nil {
		return err
	}
	if err := client.ResolveRoute(resolveTime); err != nil {
		return fmt.Errorf("resolve the route: %w", err)
	}
	if _, err := p.wait("resolve the route", verbs.RouteResolved); err != nil {
		return err
	}
	if err := p.register(client); err != nil {
		return err
	}
	if err := p.queuePair(client, clientSide); err != nil {
		return err
	}
	// Seven tries are for ever on Soft-RoCE.
	param := verbs.ConnParam{RetryCount: 6, RNRRetryCount: 6}
	if err := client.Connect(param); err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	e, err := p.wait("connect", verbs.ConnectRequest)
	if err != nil {
		return err
	}
	server := e.New
	p.ids = append(p.ids, server)
	server.SetCookie(serverSide)
	if err := p.queuePair(server, serverSide); err != nil {
		return err
	}
	if err := server.Accept(param); err != nil {
		return fmt.Errorf("accept: %w", err)
	}
	for range 2 {
		if _, err := p.wait("connect", verbs.Established); err != nil {
			return err
		}
	}
	return nil
}

// register maps a page and makes it known to the device.
func (p *pair) register(id verbs.ID) (err error) {
	if p.dev, err = id.Device(); err != nil {
		return fmt.Errorf("open the device: %w", err)
	}
	if p.mem, err = unix.Mmap(-1, 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON); err != nil {
		return os.NewSyscallError("mmap", err)
	}
	if p.mr, err = p.dev.Register(unsafe.Pointer(&p.mem[0]), len(p.mem), verbs.LocalWrite|verbs.RemoteWrite); err != nil {
		return &memoryError{len(p.mem), err}
	}
	if err := p.dev.Reserve(4 * depth); err != nil {
		return fmt.Errorf("completion queue: %w", err)
	}
	return nil
}

func (p *pair) queuePair(id verbs.ID, side uint64) error {
	qp, err := id.CreateQP(verbs.QPOptions{Cookie: side, SendDepth: depth, RecvDepth: depth})
	if err != nil {
		return fmt.Errorf("create a queue pair: %w", err)
	}
	p.qps[side] = qp
	p.connected = append(p.connected, id)
	return nil
}

// half is a side's part of the memory.
func (p *pair) half(side uint64) []byte {
	n := len(p.mem) / 2
	if side == clientSide {
		return p.mem[:n]
	}
	return p.mem[n:]
}

// round is one write to the server's side and one back.
func (p *pair) round(n uint32) error {
	for _, way := range [][2]uint64{{clientSide, serverSide}, {serverSide, clientSide}} {
		from, to := p.half(way[0]), p.half(way[1])
		mark := byte(n + uint32(way[0]))
		from[0] = mark
		p.flying++
		if _, err := p.dev.Post([]verbs.SendWR{{
			QP: p.qps[way[0]].Handle(), ID: uint64(n), Op: verbs.OpWriteImm, Flags: verbs.Signaled, Imm: n, Len: 8,
			LocalAddr: address(from), LKey: p.mr.LKey(), RemoteAddr: address(to), RKey: p.mr.RKey(),
		}}); err != nil {
			return fmt.Errorf("post: %w", err)
		}
		imm, err := p.arrival(way[1])
		if err != nil {
			return err
		}
		if imm != n || to[0] != mark {
			return fmt.Errorf("immediate %d and byte %d arrived, want %d and %d", imm, to[0], n, mark)
		}
	}
	for p.flying > depth/2 {
		if err := p.poll(); err != nil {
			return err
		}
	}
	return nil
}

func address(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(&b[0]))) }

// arrival waits for a write to arrive at a side.
func (p *pair) arrival(side uint64) (imm uint32, err error) {
	for {
		if imm, ok := p.arrived[side]; ok {
			delete(p.arrived, side)
			return imm, nil
		}
		if err := p.poll(); err != nil {
			return 0, err
		}
	}
}

func (p *pair) poll() error {
	if p.ctx.Err() != nil {
		return fmt.Errorf("a write does not arrive: %w", context.Cause(p.ctx))
	}
	n, err := p.dev.Poll(p.out[:], pollSpin, pollBlock)
	if err != nil {
		return fmt.Errorf("poll: %w", err)
	}
	for _, c := range p.out[:n] {
		switch {
		case c.Status != verbs.StatusOK:
			return &statusError{c.Status}
		case c.Type == verbs.SendDone:
			p.flying--
		case c.Type == verbs.RecvWrite:
			p.arrived[c.Cookie] = c.Imm
		}
	}
	return nil
}

// close takes down what there is.
func (p *pair) close() error {
	var errs []error
	if p.ch != nil {
		close(p.done)
	}
	for _, id := range p.connected {
		_ = id.Disconnect() // it may not be connected
	}
	for _, id := range slices.Backward(p.ids) {
		errs = append(errs, id.Destroy())
	}
	if p.mr != nil {
		errs = append(errs, p.mr.Deregister())
	}
	if p.ch != nil {
		errs = append(errs, p.ch.Close())
		p.pump.Wait()
	}
	if p.mem != nil {
		errs = append(errs, unix.Munmap(p.mem))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("take down: %w", err)
	}
	return nil
}

// remedyFor says what to do about an error of loopback.
func remedyFor(err error) string {
	if e, ok := errors.AsType[*eventError](err); ok {
		switch e.event {
		case verbs.AddrError, verbs.RouteError:
			return "see that the interface is up and has a route to itself (ip addr, ip route get); InfiniBand needs a subnet manager"
		case verbs.Rejected:
			return "another network namespace or program may have taken the port; run it again"
		}
		return "see dmesg, and try rping -s and rping -c on this machine"
	}
	if e, ok := errors.AsType[*statusError](err); ok {
		if e.status == verbs.StatusRetryExceeded {
			return "packets are lost: see the cable, the switch, and that no firewall drops UDP port 4791"
		}
		return "see dmesg, and compare with ib_write_lat on this machine"
	}
	_, memory := errors.AsType[*memoryError](err)
	switch {
	case errors.Is(err, syscall.ENOMEM), memory && errors.Is(err, syscall.EPERM): // a limit of 0 is EPERM
		return "ulimit -l unlimited (docker: --ulimit memlock=-1)"
	case errors.Is(err, syscall.EACCES), errors.Is(err, syscall.EPERM):
		return "give this user access to /dev/infiniband (docker: --device=/dev/infiniband)"
	case errors.Is(err, syscall.EADDRNOTAVAIL), errors.Is(err, syscall.ENODEV):
		return "see that the address is that of an RDMA interface in this network namespace (rdma link, ip addr)"
	case errors.Is(err, context.DeadlineExceeded):
		return "see that no firewall drops UDP port 4791 on the interface, and dmesg"
	}
	return "see dmesg, and try rping -s and rping -c on this machine"
}
