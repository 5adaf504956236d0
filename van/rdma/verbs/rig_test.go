//go:build linux && cgo && !nordma

package verbs

import (
	"errors"
	"net/netip"
	"runtime"
	"sync"
	"testing"
	"time"
	"unsafe"
)

const patience = 20 * time.Second

// rig is a channel on the first device with an IPv4 address, and passes events to the ends that wait for them.
type rig struct {
	t    testing.TB
	s    Stack
	ch   Channel
	addr netip.Addr
	more []netip.Addr // IPv4 addresses of other devices

	mu     sync.Mutex
	cookie uint64
	wait   map[uint64]chan Event
	done   chan struct{}
	pins   runtime.Pinner
}

// newRig skips the test without a device. At the end, Close checks that nothing is left.
func newRig(t testing.TB) *rig {
	t.Helper()
	s := load(t, Options{})
	devices, err := s.Devices()
	if errors.Is(err, ErrUnavailable) {
		t.Skip(err)
	} else if err != nil {
		t.Fatal(err)
	}
	r := &rig{t: t, s: s, wait: map[uint64]chan Event{}, done: make(chan struct{})}
	first := ""
	for _, d := range devices {
		for _, p := range d.Ports {
			for _, g := range p.GIDs {
				switch {
				case !p.Active || !g.Addr.Is4():
				case !r.addr.IsValid():
					r.addr, first = g.Addr, d.Name
				case d.Name != first:
					r.more = append(r.more, g.Addr)
				}
			}
		}
	}
	if !r.addr.IsValid() {
		t.Skipf("no RDMA device with an active port and an IPv4 address among %+v", devices)
	}
	if r.ch, err = s.NewChannel(); errors.Is(err, ErrUnavailable) {
		t.Skip(err)
	} else if err != nil {
		t.Fatal(err)
	}
	go r.events()
	t.Cleanup(func() {
		if err := r.ch.Close(); err != nil {
			t.Error(err)
		}
		select {
		case <-r.done:
		case <-time.After(patience):
			t.Error("Next has not returned after Close")
		}
		r.pins.Unpin()
	})
	return r
}

func (r *rig) events() {
	defer close(r.done)
	for {
		e, err := r.ch.Next()
		if err != nil {
			if !errors.Is(err, ErrClosed) {
				r.t.Errorf("Next: %v", err)
			}
			return
		}
		r.mu.Lock()
		c := r.wait[e.Cookie]
		r.mu.Unlock()
		switch {
		case c != nil:
			c <- e
		case e.New != nil:
			if err := e.New.Destroy(); err != nil {
				r.t.Error(err)
			}
		}
	}
}

func (r *rig) must(err error) {
	r.t.Helper()
	if err != nil {
		r.t.Fatal(err)
	}
}

// end is one end of a connection.
type end struct {
	r      *rig
	id     ID
	qp     QP
	cookie uint64
	ev     chan Event
}

func (r *rig) end() *end {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.cookie++
	e := &end{r: r, cookie: r.cookie, ev: make(chan Event, 256)}
	r.wait[e.cookie] = e.ev
	return e
}

func (r *rig) newEnd() *end {
	r.t.Helper()
	e := r.end()
	var err error
	e.id, err = r.ch.NewID(e.cookie)
	r.must(err)
	r.t.Cleanup(func() {
		if err := e.id.Destroy(); err != nil {
			r.t.Error(err)
		}
	})
	return e
}

// next returns the next event, which must be of the type.
func (e *end) next(want EventType) Event {
	e.r.t.Helper()
	select {
	case ev := <-e.ev:
		if ev.Type != want {
			e.r.t.Fatalf("event %v (status %d), want %v", ev.Type, ev.Status, want)
		}
		return ev
	case <-time.After(patience):
		e.r.t.Fatalf("no %v", want)
		panic("unreachable")
	}
}

func (r *rig) listener() *end { return r.listenerOn(r.addr) }

func (r *rig) listenerOn(a netip.Addr) *end {
	r.t.Helper()
	l := r.newEnd()
	r.must(l.id.Bind(netip.AddrPortFrom(a, 0)))
	r.must(l.id.Listen(16))
	return l
}

// resolve makes an ID with a resolved route to dst.
func (r *rig) resolve(dst netip.AddrPort) *end {
	r.t.Helper()
	e := r.newEnd()
	r.must(e.id.ResolveAddr(r.addr, dst, 2*time.Second))
	e.next(AddrResolved)
	r.must(e.id.ResolveRoute(2 * time.Second))
	e.next(RouteResolved)
	return e
}

func (e *end) create(o QPOptions) {
	e.r.t.Helper()
	o.Cookie = e.cookie
	var err error
	e.qp, err = e.id.CreateQP(o)
	e.r.must(err)
}

var usual = QPOptions{SendDepth: 64, RecvDepth: 64, Inline: 64}

func param(private string) ConnParam {
	return ConnParam{Private: []byte(private), RetryCount: 3, RNRRetryCount: 7}
}

// pair connects a, the active end, with b.
func (r *rig) pair(l *end, oa, ob QPOptions, pa, pb ConnParam) (a, b *end) {
	r.t.Helper()
	a = r.resolve(l.id.LocalAddr())
	_ = a.id.SetAckTimeout(14)
	a.create(oa)
	r.must(a.id.Connect(pa))
	req := l.next(ConnectRequest)
	b = r.end()
	b.id = req.New
	r.t.Cleanup(func() {
		if err := b.id.Destroy(); err != nil {
			r.t.Error(err)
		}
	})
	b.id.SetCookie(b.cookie)
	b.create(ob)
	r.must(b.id.Accept(pb))
	a.next(Established)
	b.next(Established)
	return a, b
}

func (r *rig) usualPair() (a, b *end) {
	r.t.Helper()
	return r.pair(r.listener(), usual, usual, param(""), param(""))
}

func (e *end) dev() Device {
	e.r.t.Helper()
	d, err := e.id.Device()
	e.r.must(err)
	return d
}

func (e *end) post(wrs ...SendWR) {
	e.r.t.Helper()
	for i := range wrs {
		wrs[i].QP = e.qp.Handle()
	}
	if n, err := e.dev().Post(wrs); n != len(wrs) || err != nil {
		e.r.t.Fatalf("Post = %d, %v, want %d", n, err, len(wrs))
	}
}

// poll takes n completions.
func (r *rig) poll(d Device, n int) []Completion {
	r.t.Helper()
	var got []Completion
	var out [8]Completion
	for deadline := time.Now().Add(patience); len(got) < n; {
		k, err := d.Poll(out[:min(n-len(got), len(out))], 0, time.Until(deadline))
		r.must(err)
		if got = append(got, out[:k]...); k == 0 && time.Now().After(deadline) {
			r.t.Fatalf("%d completions, want %d: %+v", len(got), n, got)
		}
	}
	return got
}

// none checks that there are no more completions.
func (r *rig) none(d Device) {
	r.t.Helper()
	var out [8]Completion
	if n, err := d.Poll(out[:], 0, 50*time.Millisecond); n != 0 || err != nil {
		r.t.Fatalf("Poll = %d, %v: %+v, want none", n, err, out[:n])
	}
}

// memory returns memory that is pinned until the test ends.
func (r *rig) memory(n int) []byte {
	b := make([]byte, n)
	r.pins.Pin(&b[0])
	return b
}

func (r *rig) register(d Device, b []byte, a Access) MR {
	r.t.Helper()
	m, err := d.Register(unsafe.Pointer(&b[0]), len(b), a)
	r.must(err)
	r.t.Cleanup(func() {
		if err := m.Deregister(); err != nil {
			r.t.Error(err)
		}
	})
	return m
}

func addr(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(&b[0]))) }
