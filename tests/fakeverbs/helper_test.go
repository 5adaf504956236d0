package fakeverbs

import (
	"errors"
	"net/netip"
	"testing"
	"time"
	"unsafe"

	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

var (
	addrA = netip.MustParseAddr("10.0.0.1")
	addrB = netip.MustParseAddr("10.0.0.2")
)

const long = 10 * time.Second // time limit for events that must happen

// world is two hosts with a process and a channel each, b listening.
type world struct {
	t      *testing.T
	net    *Net
	sa, sb *Stack
	ca, cb verbs.Channel
	listen verbs.ID
	at     netip.AddrPort
}

func newWorld(t *testing.T, options ...func(*Config)) *world {
	t.Helper()
	n := NewNet(options...)
	w := &world{t: t, net: n, sa: n.Stack(addrA), sb: n.Stack(addrB)}
	w.ca, w.cb = must(w.sa.NewChannel()), must(w.sb.NewChannel())
	w.listen = must(w.cb.NewID(100))
	check(t, w.listen.Bind(netip.AddrPortFrom(addrB, 0)))
	check(t, w.listen.Listen(8))
	w.at = w.listen.LocalAddr()
	t.Cleanup(n.Close)
	return w
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func wantErr(t *testing.T, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Fatalf("error %v, want %v", err, want)
	}
}

// next reads an event, which must be of type want.
func (w *world) next(c verbs.Channel, want verbs.EventType) verbs.Event {
	w.t.Helper()
	ev, err := c.Next()
	check(w.t, err)
	if ev.Type != want {
		w.t.Fatalf("event %v (%d), want %v", ev.Type, ev.Status, want)
	}
	return ev
}

// none checks that there is no event.
func (w *world) none(c verbs.Channel) {
	w.t.Helper()
	w.net.mu.Lock()
	defer w.net.mu.Unlock()
	for _, q := range c.(*channel).queue.All() {
		if !q.id.removed {
			w.t.Fatalf("event %v, want none", q.Type)
		}
	}
}

// end is one end of a connection.
type end struct {
	t   *testing.T
	id  verbs.ID
	qp  verbs.QP
	dev verbs.Device
}

var options = verbs.QPOptions{Cookie: 7, SendDepth: 8, RecvDepth: 4, Inline: 1024}
var params = verbs.ConnParam{Private: []byte("hello"), RetryCount: 6, RNRRetryCount: 7}

// resolved makes an ID of a with a queue pair and a resolved route to b's listener.
func (w *world) resolved(cookie uint64, o verbs.QPOptions) *end {
	w.t.Helper()
	e := w.small(cookie, o)
	check(w.t, e.dev.Reserve(256))
	return e
}

// accept reads a connect request and accepts it.
func (w *world) accept(o verbs.QPOptions, p verbs.ConnParam) *end {
	w.t.Helper()
	id := w.next(w.cb, verbs.ConnectRequest).New
	e := &end{t: w.t, id: id, dev: must(id.Device())}
	check(w.t, e.dev.Reserve(256))
	e.qp = must(id.CreateQP(o))
	check(w.t, id.Accept(p))
	return e
}

// pair connects a to b.
func (w *world) pair(o verbs.QPOptions, p verbs.ConnParam) (a, b *end) {
	w.t.Helper()
	a = w.resolved(1, o)
	check(w.t, a.id.Connect(p))
	b = w.accept(o, p)
	w.next(w.ca, verbs.Established)
	w.next(w.cb, verbs.Established)
	return a, b
}

type memory struct {
	verbs.MR
	b []byte
}

func (m memory) addr() uint64 { return uint64(uintptr(unsafe.Pointer(&m.b[0]))) }

func (e *end) memory(n int, a verbs.Access) memory {
	e.t.Helper()
	b := make([]byte, n)
	return memory{must(e.dev.Register(unsafe.Pointer(&b[0]), n, a)), b}
}

const remote = verbs.LocalWrite | verbs.RemoteWrite

// write makes a work request that writes src to dst.
func (e *end) write(op verbs.Opcode, id uint64, imm uint32, src, dst memory) verbs.SendWR {
	return verbs.SendWR{QP: e.qp.Handle(), ID: id, Op: op, Flags: verbs.Signaled, Imm: imm, RKey: dst.RKey(),
		RemoteAddr: dst.addr(), LocalAddr: src.addr(), Len: uint32(len(src.b)), LKey: src.LKey()}
}

func (e *end) send(id uint64, imm uint32, src memory) verbs.SendWR {
	return verbs.SendWR{QP: e.qp.Handle(), ID: id, Op: verbs.OpSendImm, Flags: verbs.Signaled, Imm: imm, LocalAddr: src.addr(),
		Len: uint32(len(src.b)), LKey: src.LKey()}
}

func (e *end) post(wrs ...verbs.SendWR) {
	e.t.Helper()
	if n, err := e.dev.Post(wrs); err != nil || n != len(wrs) {
		e.t.Fatalf("posted %d of %d: %v", n, len(wrs), err)
	}
}

// poll waits for exactly n completions.
func (e *end) poll(n int) []verbs.Completion {
	e.t.Helper()
	out := make([]verbs.Completion, n)
	got := 0
	for got < n {
		k, err := e.dev.Poll(out[got:], 0, long)
		check(e.t, err)
		if k == 0 {
			e.t.Fatalf("%d completions, want %d", got, n)
		}
		got += k
	}
	return out
}

// quiet checks that there is no completion.
func (e *end) quiet() {
	e.t.Helper()
	var out [1]verbs.Completion
	if n, err := e.dev.Poll(out[:], 0, 0); n != 0 || err != nil {
		e.t.Fatalf("%d completions (%+v), error %v, want none", n, out[0], err)
	}
}

func (e *end) wantStatus(c verbs.Completion, id uint64, s verbs.Status) {
	e.t.Helper()
	if c.Type != verbs.SendDone || c.ID != id || c.Status != s {
		e.t.Fatalf("completion %+v, want work request %d with %v", c, id, s)
	}
}

// small is resolved without a reservation.
func (w *world) small(cookie uint64, o verbs.QPOptions) *end {
	w.t.Helper()
	e := &end{t: w.t, id: must(w.ca.NewID(cookie))}
	check(w.t, e.id.ResolveAddr(netip.Addr{}, w.at, time.Second))
	w.next(w.ca, verbs.AddrResolved)
	check(w.t, e.id.ResolveRoute(time.Second))
	w.next(w.ca, verbs.RouteResolved)
	e.dev = must(e.id.Device())
	e.qp = must(e.id.CreateQP(o))
	return e
}

func pointer(b []byte) unsafe.Pointer { return unsafe.Pointer(&b[0]) }
