//go:build linux && cgo && !nordma

package verbs

import (
	"bytes"
	"errors"
	"net/netip"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"
)

func TestDevices(t *testing.T) {
	r := newRig(t)
	ds, err := r.s.Devices()
	r.must(err)
	e := r.resolve(r.listener().id.LocalAddr())
	info, err := e.dev().Info()
	r.must(err)
	for _, d := range ds {
		if d.Name != e.dev().Name() {
			continue
		}
		if d.Firmware != info.Firmware || d.MaxQP != info.MaxQP || len(d.Ports) != len(info.Ports) {
			t.Errorf("listed %+v, open %+v", d, info)
		}
		if d.MaxQP <= 0 || d.MaxCQE <= 0 || d.MaxMR <= 0 || d.MaxWR <= 0 || len(d.Ports) == 0 {
			t.Errorf("missing: %+v", d)
		}
		p := d.Ports[0]
		if p.Num != 1 || !p.Active || p.State != "ACTIVE" || p.MTU < 256 || p.MTU&(p.MTU-1) != 0 || p.MaxMsg == 0 || p.Rate <= 0 ||
			p.LinkLayer != "Ethernet" && p.LinkLayer != "InfiniBand" || len(p.GIDs) == 0 {
			t.Errorf("port: %+v", p)
		}
		for _, g := range p.GIDs {
			if !g.Addr.IsValid() || g.Type == "" || g.Addr.Is4In6() {
				t.Errorf("GID: %+v", g)
			}
		}
		return
	}
	t.Fatalf("%s is not among %+v", e.dev().Name(), ds)
}

func TestPrivateDataAndPeer(t *testing.T) {
	r := newRig(t)
	l := r.listener()
	a := r.resolve(l.id.LocalAddr())
	a.create(usual)
	r.must(a.id.Connect(param("hello")))
	req := l.next(ConnectRequest)
	if req.Cookie != l.cookie || req.New == nil || !bytes.HasPrefix(req.Private, []byte("hello\x00")) || req.Peer != a.id.LocalAddr() {
		t.Errorf("request %+v, want from %v", req, a.id.LocalAddr())
	}
	r.must(req.New.Reject([]byte("no")))
	rej := a.next(Rejected)
	if !bytes.HasPrefix(rej.Private, []byte("no")) || rej.Status == 8 {
		t.Errorf("rejection %+v", rej)
	}
	r.must(req.New.Destroy())

	b, c := r.pair(l, usual, usual, param("one"), ConnParam{Private: []byte("two"), RetryCount: 1, RNRRetryCount: 1})
	if b.qp.Num() == 0 || b.qp.MaxInline() < 64 || b.qp.Pinned() || b.qp.Handle() == c.qp.Handle() {
		t.Errorf("queue pair %d, inline %d", b.qp.Num(), b.qp.MaxInline())
	}
	for _, p := range []ConnParam{{Private: make([]byte, 57)}, {RetryCount: 8}, {RNRRetryCount: -1}} {
		if err := b.id.Connect(p); err == nil {
			t.Errorf("Connect(%+v) has been taken", p)
		}
	}
	if err := b.id.Reject(make([]byte, 200)); err == nil {
		t.Error("200 bytes have been taken")
	}
}

func TestNoListener(t *testing.T) {
	r := newRig(t)
	a := r.resolve(netip.AddrPortFrom(r.addr, 9))
	a.create(usual)
	r.must(a.id.Connect(param("")))
	if e := a.next(Rejected); e.Status != 8 {
		t.Errorf("status %d, want 8", e.Status)
	}
}

func TestAbsentHost(t *testing.T) {
	r := newRig(t)
	e := r.newEnd()
	b := r.addr.As4()
	b[3] = 250
	r.must(e.id.ResolveAddr(r.addr, netip.AddrPortFrom(netip.AddrFrom4(b), 9), 300*time.Millisecond))
	if ev := e.next(AddrError); ev.Status >= 0 {
		t.Errorf("status %d, want a negative errno", ev.Status)
	}
}

func TestBind(t *testing.T) {
	r := newRig(t)
	l := r.listener()
	at := l.id.LocalAddr()
	if at.Addr() != r.addr || at.Port() == 0 {
		t.Fatalf("bound to %v, want %v and a port", at, r.addr)
	}
	busy := r.newEnd()
	err := busy.id.Bind(at)
	if err == nil {
		err = busy.id.Listen(1)
	}
	wantText(t, err, syscall.EADDRINUSE, "bind", at.String())
	foreign := netip.MustParseAddrPort("192.0.2.1:7")
	wantText(t, r.newEnd().id.Bind(foreign), syscall.EADDRNOTAVAIL, "bind", "192.0.2.1:7")
	if err := r.newEnd().id.Bind(netip.AddrPort{}); err == nil {
		t.Error("no address has been bound")
	}
	if _, err := r.newEnd().id.Device(); err == nil {
		t.Error("an ID without an address has a device")
	}
	any := r.newEnd()
	r.must(any.id.Bind(netip.AddrPortFrom(netip.IPv4Unspecified(), 0)))
	r.must(any.id.Listen(1))
	if p := any.id.LocalAddr(); p.Port() == 0 {
		t.Errorf("bound to %v", p)
	}
}

// IDs can be destroyed in every state.
func TestDestroyAnytime(t *testing.T) {
	r := newRig(t)
	l := r.listener()
	gone := func(e *end) {
		t.Helper()
		r.must(e.id.Destroy())
		r.must(e.id.Destroy())
	}
	gone(r.newEnd())
	e := r.newEnd()
	b := r.addr.As4()
	b[3] = 251
	r.must(e.id.ResolveAddr(r.addr, netip.AddrPortFrom(netip.AddrFrom4(b), 9), 5*time.Second))
	gone(e)
	e = r.resolve(l.id.LocalAddr())
	gone(e)
	e = r.resolve(l.id.LocalAddr())
	e.create(usual)
	gone(e)
	// A connecting ID, whose request is in flight or never answered.
	e = r.resolve(l.id.LocalAddr())
	e.create(usual)
	r.must(e.id.Connect(param("")))
	gone(e)
	e = r.resolve(l.id.LocalAddr())
	e.create(usual)
	r.must(e.id.Connect(param("")))
	for {
		req := l.next(ConnectRequest)
		r.must(req.New.Destroy())
		if req.Peer == e.id.LocalAddr() {
			break
		}
	}
	e.next(Rejected)
	gone(e)
	for name, err := range map[string]error{"Bind": e.id.Bind(netip.AddrPortFrom(r.addr, 0)), "Listen": e.id.Listen(1),
		"ResolveRoute": e.id.ResolveRoute(time.Second), "Accept": e.id.Accept(param("")), "Disconnect": e.id.Disconnect()} {
		wantText(t, err, ErrClosed)
		if t.Failed() {
			t.Fatal(name)
		}
	}
	if a := e.id.LocalAddr(); a.IsValid() {
		t.Errorf("a destroyed ID has the address %v", a)
	}
	// A listener with an unread request, and established ends.
	a, c := r.pair(l, usual, usual, param(""), param(""))
	gone(a)
	c.next(Disconnected)
	gone(c)
	gone(l)
}

func TestCreateQPErrors(t *testing.T) {
	r := newRig(t)
	e := r.resolve(r.listener().id.LocalAddr())
	for _, o := range []QPOptions{{RecvDepth: 1}, {SendDepth: 1 << 30, RecvDepth: 1}, {SendDepth: 1, RecvDepth: -1},
		{SendDepth: 1, RecvDepth: 1, Inline: -1}, {SendDepth: 1, RecvDepth: 1, Port: 256}} {
		_, err := e.id.CreateQP(o)
		wantText(t, err, syscall.EINVAL, "create a queue pair", e.dev().Name(), "want ")
	}
	e.create(QPOptions{SendDepth: 1, RecvDepth: 1, Inline: 1 << 16}) // more than any device has
	if _, err := e.id.CreateQP(usual); err == nil {
		t.Error("a second queue pair")
	}
}

func TestRegisterErrors(t *testing.T) {
	r := newRig(t)
	d := r.resolve(r.listener().id.LocalAddr()).dev()
	buf := r.memory(10)
	for _, n := range []int{0, -1} {
		_, err := d.Register(unsafe.Pointer(&buf[0]), n, LocalWrite)
		wantText(t, err, syscall.EINVAL, d.Name(), "register", "at least one byte")
	}
	_, err := d.Register(nil, 10, LocalWrite)
	wantText(t, err, syscall.EINVAL)
	gap, err := syscall.Mmap(-1, 0, 8192, syscall.PROT_READ, syscall.MAP_PRIVATE|syscall.MAP_ANON)
	r.must(err)
	p := unsafe.Pointer(&gap[0])
	m, err := d.Register(p, 8192, 0)
	if err != nil {
		t.Errorf("read-only memory for sending: %v", err)
	} else {
		r.must(m.Deregister())
		r.must(m.Deregister())
	}
	_, err = d.Register(p, 8192, RemoteWrite)
	wantText(t, err, syscall.EFAULT, "8192 bytes at 0x", "read-only")
	r.must(syscall.Munmap(gap))
	_, err = d.RegisterDMABuf(0, 0, 4096, 0, LocalWrite)
	if err == nil {
		t.Error("standard input is a dma-buf")
	}
	var e *Error
	if !errors.As(err, &e) && !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("dma-buf: %v", err)
	}
}

func TestReserve(t *testing.T) {
	r := newRig(t)
	a, _ := r.usualPair()
	d := a.dev()
	capacity := d.(*device).capacity
	have := capacity()
	r.must(d.Reserve(1))
	if capacity() != have {
		t.Errorf("capacity %d has become %d", have, capacity())
	}
	buf := r.memory(8)
	a.post(inline(buf, 1)) // its completions remain
	r.must(d.Reserve(have + 1000))
	if capacity() < have+1000 {
		t.Errorf("capacity %d, want %d", capacity(), have+1000)
	}
	r.poll(d, 2)
	info, err := d.Info()
	r.must(err)
	wantText(t, d.Reserve(info.MaxCQE+1), syscall.EINVAL, d.Name(), "max_cqe")
}

func TestPollWaits(t *testing.T) {
	r := newRig(t)
	a, _ := r.usualPair()
	d := a.dev()
	var out [4]Completion
	for _, c := range []struct{ spin, block, least time.Duration }{
		{0, 0, 0}, {30 * time.Millisecond, 0, 30 * time.Millisecond}, {0, 30 * time.Millisecond, 30 * time.Millisecond},
		{20 * time.Millisecond, 20 * time.Millisecond, 40 * time.Millisecond},
	} {
		start := time.Now()
		n, err := d.Poll(out[:], c.spin, c.block)
		if took := time.Since(start); n != 0 || err != nil || took < c.least || took > c.least+5*time.Second {
			t.Errorf("Poll(%v, %v) = %d, %v after %v", c.spin, c.block, n, err, took)
		}
	}
	if _, err := d.Poll(nil, 0, 0); err == nil {
		t.Error("Poll into nothing")
	}
	// A wake-up before the wait ends the next wait, once.
	d.Wake()
	d.Wake()
	for _, wait := range []struct{ spin, block time.Duration }{{0, 0}, {-1, 0}} {
		if n, err := d.Poll(out[:], wait.spin, wait.block); n != 0 || err != nil {
			t.Fatalf("Poll = %d, %v", n, err)
		}
	}
	start := time.Now()
	if n, err := d.Poll(out[:], 0, 30*time.Millisecond); n != 0 || err != nil || time.Since(start) < 30*time.Millisecond {
		t.Errorf("Poll = %d, %v after %v: woken twice", n, err, time.Since(start))
	}
	// A wake-up, and a completion, during the wait.
	buf := r.memory(8)
	for _, wait := range []struct{ spin, block time.Duration }{{-1, 0}, {0, patience}, {patience, 0}, {time.Millisecond, patience}} {
		got := make(chan int)
		poll := func() {
			n, err := d.Poll(out[:1], wait.spin, wait.block)
			if err != nil {
				t.Error(err)
			}
			got <- n
		}
		go poll()
		d.Wake()
		select {
		case n := <-got:
			if n != 0 {
				t.Errorf("%+v: %d completions after a wake", wait, n)
			}
		case <-time.After(patience / 2):
			t.Fatalf("%+v: not woken", wait)
		}
		go poll()
		a.post(inline(buf, 1))
		select {
		case n := <-got:
			if n != 1 {
				t.Errorf("%+v: %d completions, want 1", wait, n)
			}
		case <-time.After(patience / 2):
			t.Fatalf("%+v: no completion", wait)
		}
		r.poll(d, 1)
	}
}

// eventfds counts the process's eventfds.
func eventfds(t *testing.T) (n int) {
	t.Helper()
	all, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range all {
		if to, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil && strings.Contains(to, "eventfd") {
			n++
		}
	}
	return n
}

func TestClose(t *testing.T) {
	r := newRig(t)
	before := eventfds(t)
	ch, err := r.s.NewChannel()
	r.must(err)
	next := make(chan error)
	go func() {
		_, err := ch.Next()
		next <- err
	}()
	id, err := ch.NewID(1)
	r.must(err)
	r.must(id.Bind(netip.AddrPortFrom(r.addr, 0)))
	d, err := id.Device()
	r.must(err)
	if same, err := id.Device(); err != nil || same != d {
		t.Errorf("Device = %v, %v, want the same", same, err)
	}
	buf := r.memory(64)
	mr, err := d.Register(unsafe.Pointer(&buf[0]), 64, LocalWrite)
	r.must(err)

	polled := make(chan error)
	poll := func() {
		var out [1]Completion
		for {
			if n, err := d.Poll(out[:], 0, time.Hour); n != 0 || err != nil {
				polled <- err
				return
			}
		}
	}
	go poll()
	if err := ch.Close(); err == nil || !strings.Contains(err.Error(), "1 IDs") {
		t.Errorf("Close with an ID: %v", err)
	}
	wantText(t, <-next, ErrClosed)
	if _, err := ch.NewID(2); !errors.Is(err, ErrClosed) {
		t.Errorf("NewID after Close: %v", err)
	}
	r.must(id.Destroy())
	if err := ch.Close(); err == nil || !strings.Contains(err.Error(), "1 memory regions") || !strings.Contains(err.Error(), d.Name()) {
		t.Errorf("Close with a region: %v", err)
	}
	r.must(mr.Deregister())
	r.must(ch.Close())
	r.must(ch.Close())
	if after := eventfds(t); after > before { // d is still in use, so only Close can have closed it
		t.Errorf("%d event descriptors, %d before", after, before)
	}
	wantText(t, <-polled, ErrClosed)
	_, err = ch.Next()
	wantText(t, err, ErrClosed)
	// Every call of the device returns an error, and nothing crashes.
	d.Wake()
	_, err = d.Register(unsafe.Pointer(&buf[0]), 64, LocalWrite)
	wantText(t, err, ErrClosed)
	_, err = d.Info()
	wantText(t, err, ErrClosed)
	wantText(t, d.Reserve(10), ErrClosed)
	_, err = d.Post([]SendWR{{QP: 5, Op: OpWrite}})
	wantText(t, err, ErrClosed)
	if d.(*device).capacity() == 0 || d.Name() == "" {
		t.Error("a closed device has forgotten its name or size")
	}
}

// The active end is destroyed while the connection manager connects it, at various moments.
func TestDestroyWhileConnecting(t *testing.T) {
	const rounds = 24
	r := newRig(t)
	l := r.listener()
	to := l.id.LocalAddr()
	accepted := make(chan struct{}, rounds)
	var serve sync.WaitGroup
	stop := make(chan struct{})
	serve.Add(1)
	go func() {
		defer serve.Done()
		for {
			select {
			case req := <-l.ev:
				if req.Type != ConnectRequest {
					t.Errorf("%v at the listener", req.Type)
					continue
				}
				// Both fail if the other end has already been destroyed.
				if _, err := req.New.CreateQP(usual); err == nil {
					_ = req.New.Accept(param(""))
				} else if !errors.Is(err, syscall.EINVAL) {
					t.Error(err)
				}
				accepted <- struct{}{}
				if err := req.New.Destroy(); err != nil {
					t.Error(err)
				}
			case <-stop:
				return
			}
		}
	}()
	for i := range rounds {
		a := r.resolve(to)
		a.create(usual)
		r.must(a.id.Connect(param("")))
		switch i % 3 {
		case 1:
			<-accepted
		case 2:
			<-a.ev // with any result
		}
		r.must(a.id.Destroy())
	}
	close(stop)
	serve.Wait()
}

// A channel has one Device for each RDMA device. Handles distinguish the queue pairs of both.
func TestTwoDevices(t *testing.T) {
	r := newRig(t)
	if len(r.more) == 0 {
		t.Skip("one RDMA device with an IPv4 address, want two")
	}
	a, b := r.pair(r.listenerOn(r.more[0]), usual, usual, param(""), param(""))
	if a.dev() == b.dev() || a.dev().Name() == b.dev().Name() || a.qp.Handle() == b.qp.Handle() {
		t.Fatalf("%s, %s: handles %#x, %#x", a.dev().Name(), b.dev().Name(), a.qp.Handle(), b.qp.Handle())
	}
	buf := r.memory(8)
	w := inline(buf, 3)
	a.post(w)
	if c := r.poll(b.dev(), 1)[0]; c.Type != RecvSend || c.QP != b.qp.Handle() || c.Imm != 3 {
		t.Errorf("received %+v", c)
	}
	if c := r.poll(a.dev(), 1)[0]; c.Type != SendDone || c.ID != 3 {
		t.Errorf("sent %+v", c)
	}
	w.QP = a.qp.Handle()
	if n, err := b.dev().Post([]SendWR{w}); n != 0 || !errors.Is(err, ErrClosed) {
		t.Errorf("Post on the other device = %d, %v", n, err)
	}
}
