package bench

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// The floor of RDMA is a write with immediate each way between the same two
// processes, through package verbs and nothing else of this library.

// verbsEnd is one end of the floor's connection, with memory for what it sends and,
// behind that, for what it receives.
type verbsEnd struct {
	ch     verbs.Channel
	events chan verbs.Event
	done   chan struct{} // closed when the end is not wanted any more
	ids    []verbs.ID
	dev    verbs.Device
	qp     verbs.QP
	mem    []byte
	mr     verbs.MR
	out    int // bytes to send
	from   int // where what is received begins in mem

	addr uint64 // where the other end receives
	rkey uint32
	most int // bytes of one message

	wrs []verbs.SendWR
	wcs [16]verbs.Completion
}

const (
	floorDepth   = 256
	floorPatient = 10 * time.Second
	pageSize     = 4096
	floorHello   = 12 // bytes of private data: address and key
)

var le = binary.LittleEndian

func newVerbsEnd() (*verbsEnd, error) {
	stack, err := verbs.Load(verbs.Options{})
	if err != nil {
		return nil, err
	}
	e := &verbsEnd{events: make(chan verbs.Event), done: make(chan struct{})}
	if e.ch, err = stack.NewChannel(); err != nil {
		return nil, err
	}
	go func() {
		defer close(e.events)
		for {
			ev, err := e.ch.Next()
			if err != nil {
				return
			}
			select {
			case e.events <- ev:
			case <-e.done:
			}
		}
	}()
	return e, nil
}

// await waits for an event; others are failures. No limit: 0.
func (e *verbsEnd) await(want verbs.EventType, limit time.Duration) (verbs.Event, error) {
	var late <-chan time.Time
	if limit > 0 {
		late = time.After(limit)
	}
	select {
	case ev, open := <-e.events:
		if !open {
			return ev, verbs.ErrClosed
		}
		if ev.Type != want {
			return ev, fmt.Errorf("floor: %s (%d), want: %s", ev.Type, ev.Status, want)
		}
		return ev, nil
	case <-e.done:
		return verbs.Event{}, verbs.ErrClosed
	case <-late:
		return verbs.Event{}, fmt.Errorf("floor: no event %q within %s", want, limit)
	}
}

// prepare makes the memory and the queue pair of an ID whose device is known.
func (e *verbsEnd) prepare(id verbs.ID, out, in int) (err error) {
	if e.dev, err = id.Device(); err != nil {
		return err
	}
	e.out, e.from = out, (out+pageSize-1)&^(pageSize-1)
	if e.mem, err = unix.Mmap(-1, 0, e.from+max(in, 1), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON); err != nil {
		return os.NewSyscallError("mmap", err)
	}
	if e.mr, err = e.dev.Register(unsafe.Pointer(&e.mem[0]), len(e.mem), verbs.LocalWrite|verbs.RemoteWrite); err != nil {
		return err
	}
	info, err := e.dev.Info()
	if err != nil {
		return err
	}
	e.most = 1 << 30
	for _, p := range info.Ports {
		if p.MaxMsg > 0 {
			e.most = min(e.most, int(p.MaxMsg))
		}
	}
	if err := e.dev.Reserve(2 * floorDepth); err != nil {
		return err
	}
	e.qp, err = id.CreateQP(verbs.QPOptions{SendDepth: floorDepth, RecvDepth: floorDepth, Inline: 1024})
	return err
}

// hello says where this end receives.
func (e *verbsEnd) hello() []byte {
	var b [floorHello]byte
	le.PutUint64(b[:], uint64(uintptr(unsafe.Pointer(&e.mem[0])))+uint64(e.from))
	le.PutUint32(b[8:], e.mr.RKey())
	return b[:]
}

func (e *verbsEnd) meet(hello []byte) error {
	if len(hello) < floorHello {
		return fmt.Errorf("floor: %d bytes of private data, want %d", len(hello), floorHello)
	}
	e.addr, e.rkey = le.Uint64(hello), le.Uint32(hello[8:])
	return nil
}

// param is for both ends; 6 tries, as 7 are for ever with some providers.
func (e *verbsEnd) param() verbs.ConnParam {
	return verbs.ConnParam{Private: e.hello(), RetryCount: 6, RNRRetryCount: 7}
}

// write sends everything, in as few messages as the device takes.
func (e *verbsEnd) write() error {
	e.wrs = e.wrs[:0]
	for off := 0; off == 0 || off < e.out; {
		n := min(e.out-off, e.most)
		wr := verbs.SendWR{QP: e.qp.Handle(), Op: verbs.OpWrite, Len: uint32(n), LKey: e.mr.LKey(), RKey: e.rkey,
			LocalAddr: uint64(uintptr(unsafe.Pointer(&e.mem[0]))) + uint64(off), RemoteAddr: e.addr + uint64(off)}
		if n <= e.qp.MaxInline() {
			wr.Flags |= verbs.Inline
		}
		off += max(n, 1)
		if off >= e.out {
			wr.Op, wr.Flags = verbs.OpWriteImm, wr.Flags|verbs.Signaled
		}
		e.wrs = append(e.wrs, wr)
	}
	_, err := e.dev.Post(e.wrs)
	return err
}

var errFloorEnded = errors.New("floor: the other end has gone")

// arrival waits for what the other end writes, up to limit.
func (e *verbsEnd) arrival(spin, limit time.Duration) (came bool, err error) {
	n, err := e.dev.Poll(e.wcs[:], spin, limit)
	if err != nil {
		return false, err
	}
	for i := range e.wcs[:n] {
		switch c := &e.wcs[i]; {
		case c.Status == verbs.StatusFlushed:
			return false, errFloorEnded
		case c.Status != verbs.StatusOK:
			return false, fmt.Errorf("floor: %s", c.Status)
		case c.Type == verbs.RecvWrite:
			came = true
		}
	}
	return came, nil
}

// close ends everything. Nobody uses the end any more.
func (e *verbsEnd) close() {
	for _, id := range e.ids {
		_ = id.Disconnect()
	}
	for _, id := range e.ids {
		_ = id.Destroy()
	}
	if e.mr != nil {
		_ = e.mr.Deregister()
	}
	_ = e.ch.Close()
	if e.mem != nil {
		_ = unix.Munmap(e.mem)
	}
}

// verbsServer answers the rounds of one client.
type verbsServer struct {
	e     *verbsEnd
	at    netip.AddrPort
	ended chan struct{}
}

func newVerbsServer(host netip.Addr, push, pull int) (_ *verbsServer, err error) {
	e, err := newVerbsEnd()
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			close(e.done)
			e.close()
		}
	}()
	listener, err := e.ch.NewID(0)
	if err != nil {
		return nil, err
	}
	e.ids = append(e.ids, listener)
	if err := listener.Bind(netip.AddrPortFrom(host, 0)); err != nil {
		return nil, err
	}
	if err := listener.Listen(1); err != nil {
		return nil, err
	}
	s := &verbsServer{e, listener.LocalAddr(), make(chan struct{})}
	go func() {
		defer close(s.ended)
		if err := s.serve(push, pull); err != nil && !errors.Is(err, verbs.ErrClosed) && !errors.Is(err, errFloorEnded) {
			fmt.Fprintln(os.Stderr, "bench: floor:", err)
		}
	}()
	return s, nil
}

func (s *verbsServer) serve(push, pull int) error {
	ev, err := s.e.await(verbs.ConnectRequest, 0)
	if err != nil {
		return err
	}
	e := s.e
	e.ids = append(e.ids, ev.New)
	if err := e.meet(ev.Private); err != nil {
		return err
	}
	if err := e.prepare(ev.New, pull, push); err != nil {
		return err
	}
	if err := ev.New.Accept(e.param()); err != nil {
		return err
	}
	for {
		// It sleeps while the library is measured.
		came, err := e.arrival(floorSpin, time.Second)
		if err == nil && came {
			err = e.write()
		}
		if err != nil {
			return err
		}
		select {
		case <-e.done:
			return nil
		default:
		}
	}
}

// floorSpin is how long an end looks before it sleeps.
const floorSpin = 5 * time.Millisecond

func (s *verbsServer) addr() string { return s.at.String() }

func (s *verbsServer) close() {
	close(s.e.done)
	<-s.ended
	s.e.close()
}

// verbsClient measures rounds.
type verbsClient struct{ e *verbsEnd }

// dialVerbsFloor connects to a verbsServer from the address host.
func dialVerbsFloor(host netip.Addr, to string, push, pull int) (_ *verbsClient, err error) {
	dst, err := netip.ParseAddrPort(to)
	if err != nil {
		return nil, err
	}
	e, err := newVerbsEnd()
	if err != nil {
		return nil, err
	}
	c := &verbsClient{e}
	defer func() {
		if err != nil {
			c.close()
		}
	}()
	id, err := e.ch.NewID(0)
	if err != nil {
		return nil, err
	}
	e.ids = append(e.ids, id)
	if err := id.ResolveAddr(host, dst, floorPatient); err != nil {
		return nil, err
	}
	if _, err := e.await(verbs.AddrResolved, floorPatient); err != nil {
		return nil, err
	}
	if err := id.ResolveRoute(floorPatient); err != nil {
		return nil, err
	}
	if _, err := e.await(verbs.RouteResolved, floorPatient); err != nil {
		return nil, err
	}
	if err := e.prepare(id, push, pull); err != nil {
		return nil, err
	}
	if err := id.Connect(e.param()); err != nil {
		return nil, err
	}
	ev, err := e.await(verbs.Established, floorPatient)
	if err != nil {
		return nil, err
	}
	return c, e.meet(ev.Private)
}

func (c *verbsClient) close() {
	close(c.e.done)
	c.e.close()
}

// measure does n rounds and returns the nanoseconds of each.
func (c *verbsClient) measure(n int) ([]int64, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	ns := make([]int64, n)
	for i := range ns {
		start := time.Now()
		if err := c.e.write(); err != nil {
			return nil, err
		}
		for came := false; !came; {
			var err error
			if came, err = c.e.arrival(floorPatient, 0); err != nil {
				return nil, err
			}
			if !came && time.Since(start) > floorPatient {
				return nil, fmt.Errorf("floor: no answer within %s", floorPatient)
			}
		}
		ns[i] = int64(time.Since(start))
	}
	return ns, nil
}
