package fakeverbs

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// life makes every call once.
func life(w *world) error {
	c, err := w.sa.NewChannel()
	if err != nil {
		return err
	}
	w.ca = c
	if _, err = w.sa.Devices(); err != nil {
		return err
	}
	l, err := c.NewID(1)
	if err != nil {
		return err
	}
	if err = errors.Join(l.Bind(netip.AddrPortFrom(addrA, 0)), l.Listen(1)); err != nil {
		return err
	}
	id := must(c.NewID(2))
	if err = id.ResolveAddr(netip.Addr{}, l.LocalAddr(), time.Second); err != nil {
		return err
	}
	if _, err = c.Next(); err != nil {
		return err
	}
	if err = errors.Join(id.SetTOS(184), id.ResolveRoute(time.Second)); err != nil {
		return err
	}
	w.next(c, verbs.RouteResolved)
	d := must(id.Device())
	if err = errors.Join(id.SetAckTimeout(14), d.Reserve(100)); err != nil {
		return err
	}
	if _, err = d.Info(); err != nil {
		return err
	}
	if _, err = id.CreateQP(options); err != nil {
		return err
	}
	if err = id.Connect(params); err != nil {
		return err
	}
	e := &end{t: w.t, id: w.next(c, verbs.ConnectRequest).New, dev: d}
	e.qp = must(e.id.CreateQP(options))
	if err = e.id.Accept(params); err != nil {
		return err
	}
	w.next(c, verbs.Established)
	b := []byte("x")
	mr, err := d.Register(pointer(b), 1, 0)
	if err != nil {
		return err
	}
	if err = mr.Deregister(); err != nil {
		return err
	}
	m := e.memory(8, 0)
	if n, err := d.Post([]verbs.SendWR{e.send(1, 1, m), e.send(2, 2, m)}); err != nil {
		return fmt.Errorf("%d posted: %w", n, err)
	}
	if _, err = d.Poll(make([]verbs.Completion, 1), 0, 0); err != nil {
		return err
	}
	if err = id.Disconnect(); err != nil {
		return err
	}
	if err = id.Destroy(); err != nil {
		return err
	}
	id = must(c.NewID(3))
	check(w.t, id.ResolveAddr(netip.Addr{}, l.LocalAddr(), time.Second))
	check(w.t, id.ResolveRoute(time.Second))
	must(id.CreateQP(options))
	check(w.t, id.Connect(params))
	for {
		if ev, err := c.Next(); err != nil || ev.New != nil {
			return errors.Join(err, ev.New.Reject(nil))
		}
	}
}

func TestFail(t *testing.T) {
	failure := errors.New("injected")
	for kind := OpDevices; kind < opCount; kind++ {
		t.Run(kind.String(), func(t *testing.T) {
			w := newWorld(t)
			check(t, life(w))
			w = newWorld(t)
			w.net.Fail(FailNth(kind, int(w.sa.calls[kind].Load())+1, failure))
			if err := life(w); !errors.Is(err, failure) {
				t.Errorf("error %v, want the injected one", err)
			}
			w.net.Fail(nil)
			check(t, life(w))
		})
	}
}

func TestFailPost(t *testing.T) {
	w := newWorld(t)
	a, b := w.pair(options, params)
	failure := errors.New("injected")
	w.net.Fail(FailNth(OpPost, 3, failure))
	src, dst := a.memory(8, 0), b.memory(8, remote)
	wr := a.write(verbs.OpWrite, 1, 0, src, dst)
	n, err := a.dev.Post([]verbs.SendWR{wr, wr, wr, wr})
	if n != 2 {
		t.Errorf("posted %d, want 2", n)
	}
	wantErr(t, err, failure)
	a.poll(2)
}

func TestEventError(t *testing.T) {
	for _, test := range []struct {
		kind   OpKind
		status EventError
		want   verbs.EventType
	}{
		{OpResolveAddr, -19, verbs.AddrError},
		{OpResolveRoute, -110, verbs.RouteError},
		{OpConnect, -110, verbs.Unreachable},
		{OpConnect, 10, verbs.Rejected},
	} {
		w := newWorld(t)
		w.net.Fail(FailNth(test.kind, 1, test.status))
		id := must(w.ca.NewID(0))
		check(t, id.ResolveAddr(netip.Addr{}, w.at, time.Second))
		if test.kind != OpResolveAddr {
			w.next(w.ca, verbs.AddrResolved)
			check(t, id.ResolveRoute(time.Second))
		}
		if test.kind == OpConnect {
			w.next(w.ca, verbs.RouteResolved)
			must(id.CreateQP(options))
			check(t, id.Connect(params))
		}
		if ev := w.next(w.ca, test.want); ev.Status != int(test.status) {
			t.Errorf("status %d, want %d", ev.Status, test.status)
		}
	}
}

func TestFailWR(t *testing.T) {
	for _, test := range []struct {
		status verbs.Status
		both   bool
	}{{verbs.StatusRetryExceeded, false}, {verbs.StatusRemoteOp, true}} {
		w := newWorld(t)
		a, b := w.pair(options, params)
		w.net.FailWR(func(wr WR) verbs.Status {
			if wr.Stack == w.sa && wr.Num == a.qp.Num() && wr.N == 2 && wr.Peer == w.at {
				return test.status
			}
			return verbs.StatusOK
		})
		m := a.memory(4, 0)
		a.post(a.send(1, 1, m), a.send(2, 2, m), a.send(3, 3, m))
		c := a.poll(3)
		a.wantStatus(c[0], 1, verbs.StatusOK)
		a.wantStatus(c[1], 2, test.status)
		a.wantStatus(c[2], 3, verbs.StatusFlushed)
		b.poll(1)
		if test.both {
			b.poll(4)
		}
		b.quiet()
	}
}

func TestKill(t *testing.T) { synctest.Test(t, testKill) }

func testKill(t *testing.T) {
	for _, tell := range []bool{false, true} {
		w := newWorld(t)
		a, b := w.pair(options, params)
		pending := w.resolved(2, options)
		check(t, pending.id.Connect(params))
		m, dst := a.memory(4, 0), b.memory(4, remote)
		w.net.HoldQP(a.qp.Num())
		a.post(a.write(verbs.OpWrite, 1, 0, m, dst))
		m.b[0] = 9
		if tell {
			w.net.KillTelling(w.sb)
			w.next(w.ca, verbs.Rejected) // the listener exists
			w.next(w.ca, verbs.Disconnected)
		} else {
			w.net.Kill(w.sb)
			w.none(w.ca)
		}
		w.net.Release()
		a.wantStatus(a.poll(1)[0], 1, verbs.StatusRetryExceeded)
		a.poll(4)
		a.post(a.send(2, 0, m))
		a.wantStatus(a.poll(1)[0], 2, verbs.StatusFlushed)
		if !tell {
			if ev := w.next(w.ca, verbs.Unreachable); ev.Status != -110 || ev.Cookie != 2 {
				t.Errorf("event %+v", ev)
			}
		}
		w.none(w.ca)
		if dst.b[0] != 0 {
			t.Error("the dead were written to")
		}
		c := w.resolved(3, options) // its host exists
		check(t, c.id.Connect(params))
		if ev := w.next(w.ca, verbs.Rejected); ev.Status != 8 {
			t.Errorf("event %+v", ev)
		}
		if l := w.sb.Leaks(); len(l) != 0 || w.sb.Registered() != 0 {
			t.Errorf("leaks %v, %d bytes", l, w.sb.Registered())
		}
		_, err := w.cb.Next()
		wantErr(t, err, verbs.ErrClosed)
		_, err = b.dev.Poll(make([]verbs.Completion, 1), -1, 0)
		wantErr(t, err, verbs.ErrClosed)
		_, err = b.dev.Post([]verbs.SendWR{b.send(1, 1, dst)})
		wantErr(t, err, verbs.ErrClosed)
		_, err = w.sb.NewChannel()
		wantErr(t, err, verbs.ErrClosed)
		check(t, dst.Deregister())
		check(t, b.id.Destroy())
		check(t, w.listen.Destroy())
		check(t, w.cb.Close())
	}
}

func TestCut(t *testing.T) { synctest.Test(t, testCut) }

func testCut(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.Retry = time.Hour; c.Unreachable = time.Millisecond })
	a, b := w.pair(options, params)
	again := w.resolved(2, options)
	m := a.memory(4, 0)
	w.net.Cut(addrB, addrA)
	a.post(a.send(1, 1, m))
	a.quiet()
	w.net.Heal(addrA, addrB)
	a.wantStatus(a.poll(1)[0], 1, verbs.StatusOK)
	b.poll(1)

	w.net.Cut(addrA, addrB)
	check(t, again.id.Connect(params))
	w.next(w.ca, verbs.Unreachable)
	w.net.Configure(func(c *Config) { c.Retry = time.Millisecond })
	a.post(a.send(2, 1, m))
	a.wantStatus(a.poll(1)[0], 2, verbs.StatusRetryExceeded)
	check(t, a.id.Disconnect())
	w.next(w.ca, verbs.Disconnected) // the peer has not answered
	w.none(w.cb)
	b.quiet()
}

func TestSevenForever(t *testing.T) { synctest.Test(t, testSevenForever) }

func testSevenForever(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.Retry = time.Millisecond; c.SevenForever = true })
	p := params
	p.RetryCount = 7
	a, _ := w.pair(options, p)
	b, _ := w.pair(options, params)
	m := a.memory(4, 0)
	w.net.Cut(addrA, addrB)
	a.post(a.send(1, 1, m))
	b.post(b.send(2, 1, m))
	b.wantStatus(b.poll(1)[0], 2, verbs.StatusRetryExceeded)
	if got := w.net.Pending(); !slices.Equal(got, []uint32{a.qp.Num()}) {
		t.Errorf("pending %v, want %d", got, a.qp.Num())
	}
}

func TestHold(t *testing.T) {
	w := newWorld(t)
	a, b := w.pair(options, params)
	a2, _ := w.pair(options, params)
	m := a.memory(4, 0)
	post := func(imm ...uint32) {
		for _, i := range imm {
			q := a
			if i >= 10 {
				q = a2
			}
			q.post(q.send(0, i, m))
		}
	}
	want := func(imm ...uint32) {
		t.Helper()
		for _, i := range imm {
			if got := b.poll(1)[0].Imm; got != i {
				t.Fatalf("got %d, want %d", got, i)
			}
		}
		b.quiet()
		a.poll(len(imm))
	}
	w.net.Hold()
	post(1, 10, 2, 11)
	want()
	if got := w.net.Pending(); !slices.Equal(got, []uint32{a.qp.Num(), a2.qp.Num()}) {
		t.Errorf("pending %v", got)
	}
	if !w.net.Step(a2.qp.Num()) || w.net.Step(99) {
		t.Error("step")
	}
	want(10)
	w.net.Release(a2.qp.Num())
	want(11, 1, 2)
	w.net.HoldQP(a.qp.Num())
	post(1, 10)
	want(10)
	w.net.Release()
	want(1)
	post(1, 10)
	want(1, 10)
}

func TestRemoveDevice(t *testing.T) {
	w := newWorld(t)
	a, b := w.pair(options, params)
	w.net.RemoveDevice(addrB)
	w.next(w.cb, verbs.DeviceRemoval) // the listener's
	w.next(w.cb, verbs.DeviceRemoval)
	b.poll(4)
	a.post(a.send(1, 1, a.memory(4, 0)))
	a.wantStatus(a.poll(1)[0], 1, verbs.StatusRetryExceeded)
	if d := must(w.sb.Devices()); len(d) != 0 {
		t.Errorf("devices %v", d)
	}
	if _, err := b.dev.Info(); err == nil {
		t.Error("information on a device that is gone")
	}
}

func TestMisuse(t *testing.T) {
	w := newWorld(t)
	a, _ := w.pair(options, params)
	done := make(chan struct{})
	go func() {
		defer close(done)
		a.dev.Poll(make([]verbs.Completion, 1), -1, 0)
	}()
	for len(w.net.Errors()) == 0 {
		a.dev.Poll(make([]verbs.Completion, 1), 0, 0)
	}
	a.dev.Wake()
	<-done
	m := a.memory(4, 0)
	check(t, m.Deregister())
	wantErr(t, m.Deregister(), verbs.ErrClosed)
	if e := w.net.Errors(); len(e) != 2 {
		t.Errorf("errors %v, want two", e)
	}
}

func TestStop(t *testing.T) { synctest.Test(t, testStop) }

func testStop(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.Retry = time.Second })
	a, b := w.pair(options, params)
	src, dst, back := a.memory(4, 0), b.memory(4, remote), a.memory(4, remote)
	src.b[0] = 9
	w.net.HoldQP(b.qp.Num())
	b.post(b.write(verbs.OpWrite, 1, 0, dst, back))
	w.net.Stop(w.sb)
	w.net.Release()
	b.post(b.write(verbs.OpWriteImm, 2, 0, dst, back))

	// Its device receives while it has receive requests, and sends requests posted before.
	for i := range 5 {
		a.post(a.write(verbs.OpWriteImm, uint64(i), 0, src, dst))
	}
	a.poll(4)
	if dst.b[0] != 9 || back.b[0] != 0 {
		t.Errorf("written %d to it and %d by it, want 9 and 0", dst.b[0], back.b[0])
	}
	time.Sleep(time.Minute)
	a.quiet()

	// It does not read, and peers do not notice the calls of its timers.
	polled := make(chan int)
	go func() {
		n, _ := b.dev.Poll(make([]verbs.Completion, 9), 0, time.Second)
		polled <- n
	}()
	request := w.resolved(2, options)
	check(t, request.id.Connect(params))
	read := make(chan verbs.Event)
	go func() {
		ev, _ := w.cb.Next()
		read <- ev
	}()
	time.Sleep(time.Minute)
	select {
	case n := <-polled:
		t.Errorf("it polled %d completions", n)
	case ev := <-read:
		t.Errorf("it read %v", ev.Type)
	default:
	}
	check(t, b.id.Disconnect())
	check(t, b.id.Destroy())
	time.Sleep(time.Minute)
	w.none(w.ca)
	a.quiet()

	w.net.Wake(w.sb)
	if n := <-polled; n != 0 { // its queue pair was destroyed with them
		t.Errorf("%d completions, want none", n)
	}
	if ev := <-read; ev.Type != verbs.ConnectRequest {
		t.Errorf("event %v, want the connect request", ev.Type)
	} else {
		check(t, ev.New.Reject(nil))
	}
	w.next(w.ca, verbs.Disconnected)
	w.next(w.ca, verbs.Rejected)
	a.wantStatus(a.poll(1)[0], 4, verbs.StatusRetryExceeded)
	if back.b[0] != 0 {
		t.Error("what a queue pair had posted that has gone was carried out")
	}
}

// TestStopThenWake: requests posted while the process was stopped are carried out when it continues, and it reads what arrived meanwhile.
func TestStopThenWake(t *testing.T) {
	w := newWorld(t)
	a, b := w.pair(options, params)
	src, dst, back := a.memory(4, 0), b.memory(4, remote), a.memory(4, remote)
	w.net.Stop(w.sb)
	b.post(b.write(verbs.OpWriteImm, 1, 7, dst, back))
	a.post(a.write(verbs.OpWriteImm, 2, 8, src, dst))
	a.wantStatus(a.poll(1)[0], 2, verbs.StatusOK)
	a.quiet()
	w.net.Wake(w.sb)
	if c := a.poll(1)[0]; c.Imm != 7 {
		t.Errorf("completion %+v, want the write of the one who was woken", c)
	}
	for _, c := range b.poll(2) {
		if c.Type == verbs.RecvWrite && c.Imm != 8 || c.Type == verbs.SendDone && c.ID != 1 {
			t.Errorf("completion %+v", c)
		}
	}
	w.net.Stop(w.sb)
	w.net.KillTelling(w.sb)
	w.next(w.ca, verbs.Disconnected)
	w.net.Wake(w.sb) // no effect on a dead process
}
