package fakeverbs

import (
	"bytes"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	_ "github.com/stepaf/stepaf-go/tests/testlimit"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

func TestConnect(t *testing.T) {
	w := newWorld(t)
	a := w.resolved(1, options)
	if from := a.id.LocalAddr(); from.Addr() != addrA || from.Port() == 0 {
		t.Errorf("bound to %v", from)
	}
	check(t, a.id.SetAckTimeout(14))
	check(t, a.id.Connect(params))

	ev := w.next(w.cb, verbs.ConnectRequest)
	if ev.Cookie != 100 || ev.Peer != a.id.LocalAddr() || !bytes.Equal(ev.Private, padded([]byte("hello"), 56)) {
		t.Errorf("event %+v", ev)
	}
	if got := ev.New.LocalAddr(); got != w.at {
		t.Errorf("the new ID is at %v, want %v", got, w.at)
	}
	ev.New.SetCookie(101)
	b := &end{t: t, id: ev.New, dev: must(ev.New.Device())}
	b.qp = must(b.id.CreateQP(options))
	dst := a.memory(8, remote)
	if _, err := b.dev.Post([]verbs.SendWR{b.send(1, 1, dst)}); err == nil {
		t.Error("posted before it is connected")
	}
	check(t, b.id.Accept(verbs.ConnParam{Private: []byte("welcome")}))

	// The acceptor may post at once, but its message arrives when the connector has read the event.
	src := b.memory(8, 0)
	b.post(b.write(verbs.OpWriteImm, 1, 5, src, dst))
	w.none(w.cb)
	b.quiet()
	ev = w.next(w.ca, verbs.Established)
	if ev.Cookie != 1 || !bytes.Equal(ev.Private, padded([]byte("welcome"), 196)) {
		t.Errorf("event %+v", ev)
	}
	b.poll(1)
	if c := a.poll(1)[0]; c.Imm != 5 {
		t.Errorf("completion %+v", c)
	}
	if ev = w.next(w.cb, verbs.Established); ev.Cookie != 101 || ev.Private != nil {
		t.Errorf("event %+v", ev)
	}
}

func TestBind(t *testing.T) {
	n := NewNet()
	defer n.Close()
	one, other := n.Stack(addrA, addrB), n.Stack(addrA)
	c1, c2 := must(one.NewChannel()), must(other.NewChannel())
	bind := func(c verbs.Channel, addr string, port uint16) (netip.AddrPort, error) {
		id := must(c.NewID(0))
		err := id.Bind(netip.AddrPortFrom(netip.MustParseAddr(addr), port))
		return id.LocalAddr(), err
	}
	for _, test := range []struct {
		c    verbs.Channel
		addr string
		port uint16
		want error
	}{
		{c1, "10.0.0.1", 5000, nil},
		{c1, "10.0.0.1", 5000, syscall.EADDRINUSE},
		{c2, "10.0.0.1", 5000, syscall.EADDRINUSE}, // ports are those of the host
		{c2, "::ffff:10.0.0.1", 5000, syscall.EADDRINUSE},
		{c1, "10.0.0.2", 5000, nil},
		{c2, "10.0.0.2", 5001, syscall.EADDRNOTAVAIL},
		{c1, "0.0.0.0", 5000, syscall.EADDRINUSE},
		{c1, "0.0.0.0", 5001, nil},
		{c2, "10.0.0.1", 5001, syscall.EADDRINUSE},
		{c1, "127.0.0.1", 5000, nil},
		{c1, "10.0.0.1", 0, nil},
		{c1, "0.0.0.0", 0, nil},
	} {
		got, err := bind(test.c, test.addr, test.port)
		wantErr(t, err, test.want)
		if err == nil && (got.Port() == 0 || test.port != 0 && got.Port() != test.port) {
			t.Errorf("%s port %d: bound to %v", test.addr, test.port, got)
		}
	}
}

func TestPortIsFreeAfterDestroy(t *testing.T) {
	w := newWorld(t)
	check(t, w.listen.Destroy())
	id := must(w.cb.NewID(0))
	check(t, id.Bind(w.at))
}

func TestResolveFails(t *testing.T) {
	w := newWorld(t)
	start := time.Now()
	nobody := netip.MustParseAddrPort("10.0.0.77:1")
	resolve := func(dst netip.AddrPort, timeout time.Duration) verbs.ID {
		id := must(w.ca.NewID(3))
		check(t, id.ResolveAddr(addrA, dst, timeout))
		return id
	}
	resolve(nobody, 30*time.Millisecond)
	if ev := w.next(w.ca, verbs.AddrError); ev.Status != -110 || ev.Cookie != 3 {
		t.Errorf("event %+v", ev)
	}
	if d := time.Since(start); d < 30*time.Millisecond {
		t.Errorf("after %v, want 30 ms", d)
	}
	w.net.Configure(func(c *Config) { c.AddrAtOnce = true })
	resolve(nobody, time.Hour)
	w.next(w.ca, verbs.AddrError)
	w.net.Cut(addrA, addrB)
	resolve(w.at, time.Hour)
	w.next(w.ca, verbs.AddrError)

	loop := must(w.ca.NewID(0))
	check(t, loop.Bind(netip.MustParseAddrPort("127.0.0.1:0")))
	check(t, loop.Listen(1))
	id := must(w.ca.NewID(0))
	check(t, id.ResolveAddr(netip.Addr{}, loop.LocalAddr(), time.Hour))
	w.next(w.ca, verbs.AddrResolved)
	wantErr(t, id.ResolveRoute(time.Hour), syscall.ENODEV)
	_, err := id.Device()
	wantErr(t, err, syscall.ENODEV)
	wantErr(t, must(w.ca.NewID(0)).ResolveAddr(addrB, w.at, time.Second), syscall.EADDRNOTAVAIL)
}

func TestRejections(t *testing.T) {
	tests := []struct {
		name   string
		do     func(w *world) // before the connector reads the event
		status int
		text   string
	}{
		{"no listener", func(w *world) { check(w.t, w.listen.Destroy()) }, 8, ""},
		{"rejected", func(w *world) { check(w.t, w.next(w.cb, verbs.ConnectRequest).New.Reject([]byte("no"))) }, 28, "no"},
		{"not accepted", func(w *world) { check(w.t, w.next(w.cb, verbs.ConnectRequest).New.Destroy()) }, 28, ""},
		{"not read", func(w *world) { check(w.t, w.listen.Destroy()) }, 28, ""},
		{"channel closed", func(w *world) { check(w.t, w.listen.Destroy()); check(w.t, w.cb.Close()) }, 28, ""},
		{"killed", func(w *world) { w.net.KillTelling(w.sb) }, 28, ""},
		{"fault", func(w *world) {}, 3, ""},
		{"backlog", func(w *world) {
			w.listen = must(w.cb.NewID(0))
			check(w.t, w.listen.Bind(w.at))
			check(w.t, w.listen.Listen(1))
			check(w.t, w.resolved(2, options).id.Connect(params))
		}, 28, ""},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			w := newWorld(t)
			a := w.resolved(1, options)
			early := test.name == "no listener"
			switch test.name {
			case "backlog":
				check(t, w.listen.Destroy())
				early = true
			case "fault":
				w.net.RejectNext(1, 3)
			}
			if early {
				test.do(w)
			}
			check(t, a.id.Connect(params))
			if !early {
				test.do(w)
			}
			ev := w.next(w.ca, verbs.Rejected)
			if ev.Status != test.status || !bytes.Equal(ev.Private, padded([]byte(test.text), 148)) || ev.Cookie != 1 {
				t.Errorf("event %+v, want status %d", ev, test.status)
			}
			wantErr(t, a.id.Connect(params), syscall.EINVAL)
			check(t, a.id.Destroy())
			w.none(w.ca)
		})
	}
}

func TestConnectorGivesUp(t *testing.T) {
	w := newWorld(t)
	a := w.resolved(1, options)
	check(t, a.id.Connect(params))
	ev := w.next(w.cb, verbs.ConnectRequest)
	check(t, a.id.Destroy())
	if r := w.next(w.cb, verbs.Rejected); r.Status != 4 {
		t.Errorf("event %+v", r)
	}
	must(ev.New.CreateQP(options))
	wantErr(t, ev.New.Accept(params), syscall.EINVAL)

	a = w.resolved(1, options)
	check(t, a.id.Connect(params))
	w.accept(options, params)
	check(t, a.id.Destroy()) // it has not read that it is accepted
	if r := w.next(w.cb, verbs.Rejected); r.Status != 28 {
		t.Errorf("event %+v", r)
	}

	a = w.resolved(1, options)
	check(t, a.id.Connect(params))
	wantErr(t, a.id.Reject(nil), syscall.EINVAL) // there is no answer yet
	w.accept(options, params)
	check(t, a.id.Reject([]byte("no")))
	if r := w.next(w.cb, verbs.Rejected); r.Status != 28 || !bytes.Equal(r.Private, padded([]byte("no"), 148)) {
		t.Errorf("event %+v", r)
	}
	w.next(w.ca, verbs.Established) // which was added before
	check(t, a.id.Destroy())
	w.none(w.ca)
}

func TestDisconnect(t *testing.T) {
	for _, destroy := range []bool{false, true} {
		w := newWorld(t)
		a, b := w.pair(options, params)
		src, dst := b.memory(8, 0), a.memory(8, remote)
		w.net.HoldQP(b.qp.Num())
		w.net.HoldQP(a.qp.Num())
		b.post(b.write(verbs.OpWrite, 1, 0, src, dst))
		a.post(a.write(verbs.OpWrite, 2, 0, dst, memory{src.MR, src.b}))
		if destroy {
			check(t, a.id.Destroy())
		} else {
			check(t, a.id.Disconnect())
			c := a.poll(5)
			a.wantStatus(c[0], 2, verbs.StatusFlushed)
		}
		a.quiet()
		w.next(w.cb, verbs.Disconnected)
		b.quiet() // this alone flushes nothing
		w.net.Release()
		b.wantStatus(b.poll(1)[0], 1, verbs.StatusRetryExceeded)
		for _, c := range b.poll(4) {
			if c.Status != verbs.StatusFlushed {
				t.Errorf("completion %+v", c)
			}
		}
		w.none(w.ca)
		check(t, b.id.Disconnect())
		if !destroy {
			w.next(w.ca, verbs.Disconnected)
			check(t, a.id.Destroy())
		}
		check(t, b.id.Destroy())
		w.none(w.ca)
		w.none(w.cb)
		check(t, src.Deregister())
		check(t, dst.Deregister())
		check(t, w.listen.Destroy())
		check(t, w.ca.Close())
		check(t, w.cb.Close())
		if l, e := w.net.Leaks(), w.net.Errors(); len(l) != 0 || len(e) != 0 {
			t.Errorf("leaks %v, errors %v", l, e)
		}
	}
}

func TestDestroyDropsAll(t *testing.T) {
	w := newWorld(t)
	a, b := w.pair(options, params)
	a.post(a.send(1, 1, a.memory(4, 0)))
	check(t, b.id.Disconnect())
	check(t, a.id.Destroy()) // with a completion and an event
	a.quiet()
	w.none(w.ca) // but its Disconnected event reaches the other side
	w.next(w.cb, verbs.Disconnected)
	_, err := a.dev.Post([]verbs.SendWR{{QP: a.qp.Handle(), Op: verbs.OpSendImm}})
	wantErr(t, err, verbs.ErrClosed)
	wantErr(t, a.id.Disconnect(), verbs.ErrClosed)
	wantErr(t, a.id.Destroy(), verbs.ErrClosed)
}

func TestCloseChannel(t *testing.T) {
	w := newWorld(t)
	got := make(chan error)
	go func() { _, err := w.cb.Next(); got <- err }()
	wantErr(t, w.cb.Close(), syscall.EBUSY)
	wantErr(t, <-got, verbs.ErrClosed)
	_, err := w.cb.NewID(0)
	wantErr(t, err, verbs.ErrClosed)
	if e := w.net.Errors(); len(e) != 1 {
		t.Errorf("errors %v, want one", e)
	}
	if l := w.sb.Leaks(); len(l) != 1 || !strings.Contains(l[0], w.at.String()) {
		t.Errorf("leaks %q, want the listener", l)
	}
}

func TestWrongState(t *testing.T) {
	w := newWorld(t)
	id := must(w.ca.NewID(0))
	wantErr(t, id.Listen(1), syscall.EINVAL)
	wantErr(t, id.ResolveRoute(time.Second), syscall.EINVAL)
	wantErr(t, id.Connect(params), syscall.EINVAL)
	wantErr(t, id.Accept(params), syscall.EINVAL)
	wantErr(t, id.Reject(nil), syscall.EINVAL)
	wantErr(t, id.Disconnect(), syscall.EINVAL)
	wantErr(t, id.SetAckTimeout(14), syscall.EINVAL)
	wantErr(t, id.SetTOS(184), syscall.EINVAL)
	wantErr(t, id.ResolveAddr(netip.Addr{}, netip.AddrPort{}, time.Second), syscall.EINVAL)
	_, err := id.CreateQP(options)
	wantErr(t, err, syscall.EINVAL)
	check(t, id.Bind(netip.AddrPortFrom(addrA, 0)))
	wantErr(t, id.Bind(netip.AddrPortFrom(addrA, 0)), syscall.EINVAL)

	a := w.resolved(1, options)
	_, err = a.id.CreateQP(options)
	wantErr(t, err, syscall.EINVAL)
	p := params
	p.Private = make([]byte, 57)
	wantErr(t, a.id.Connect(p), syscall.EINVAL)
	wantErr(t, a.id.Connect(verbs.ConnParam{RetryCount: 8}), syscall.EINVAL)
	wantErr(t, a.id.SetAckTimeout(32), syscall.EINVAL)
	wantErr(t, a.id.SetTOS(256), syscall.EINVAL)
	w.net.Configure(func(c *Config) { c.NoAckTimeout = true })
	wantErr(t, a.id.SetAckTimeout(14), syscall.ENOSYS)
	check(t, a.id.Connect(params))
	b := w.next(w.cb, verbs.ConnectRequest).New
	wantErr(t, b.Accept(params), syscall.EINVAL) // no queue pair
	wantErr(t, b.Reject(make([]byte, 149)), syscall.EINVAL)
	_, err = b.CreateQP(verbs.QPOptions{SendDepth: 1 << 20})
	wantErr(t, err, syscall.EINVAL)
}
