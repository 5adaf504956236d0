package fakeverbs

import (
	"errors"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

func TestRegister(t *testing.T) {
	w := newWorld(t)
	a, b := w.pair(options, params)
	buf := make([]byte, 100)
	p := pointer(buf)
	for _, test := range []struct {
		n    int
		a    verbs.Access
		want error
	}{
		{0, 0, syscall.EINVAL},
		{-1, 0, syscall.EINVAL},
		{100, verbs.RemoteWrite, syscall.EINVAL},
		{100, 4, syscall.EINVAL},
		{100, 0, nil},
		{100, verbs.LocalWrite | verbs.RemoteWrite, nil},
	} {
		_, err := a.dev.Register(p, test.n, test.a)
		wantErr(t, err, test.want)
	}
	_, err := a.dev.Register(nil, 1, 0)
	wantErr(t, err, syscall.EINVAL)
	if got := w.sa.Registered(); got != 200 {
		t.Errorf("%d bytes, want 200", got)
	}
	w.sa.Limit(250)
	_, err = a.dev.Register(p, 51, 0)
	wantErr(t, err, syscall.ENOMEM)
	m := must(a.dev.Register(p, 50, 0))
	if m.LKey() == m.RKey() {
		t.Error("the keys are the same")
	}
	check(t, m.Deregister())
	w.net.Configure(func(c *Config) { c.MaxMR = 2 })
	_, err = a.dev.Register(p, 1, 0)
	wantErr(t, err, syscall.ENOMEM)
	if c := w.sa.Counters(); c.Registrations != 3 || c.Deregistrations != 1 || c.QueuePairs != 1 || c.IDs != 1 || c.Channels != 1 {
		t.Errorf("counters %+v", c)
	}
	if l := w.sa.Leaks(); len(l) != 5 { // channel, ID, queue pair, two regions
		t.Errorf("leaks %q", l)
	}
	if l := w.net.Leaks(); len(l) != 5+4 || !strings.HasPrefix(l[0], "stack0: ") {
		t.Errorf("leaks %q", l)
	}

	_, err = b.dev.RegisterDMABuf(3, 0, 10, 0, 0)
	wantErr(t, err, syscall.EOPNOTSUPP)
	w.sb.DMABuf(3, buf)
	_, err = b.dev.RegisterDMABuf(3, 91, 10, 0, 0)
	wantErr(t, err, syscall.EINVAL)
	w.net.Configure(func(c *Config) { c.MaxMR = 10 })
	mr := must(b.dev.RegisterDMABuf(3, 90, 10, 0xabc000, remote))
	src := a.memory(4, 0)
	src.b[3] = 7
	a.post(verbs.SendWR{QP: a.qp.Handle(), Op: verbs.OpWrite, Flags: verbs.Signaled, RemoteAddr: 0xabc006, RKey: mr.RKey(),
		LocalAddr: src.addr(), LKey: src.LKey(), Len: 4})
	a.wantStatus(a.poll(1)[0], 0, verbs.StatusOK)
	if buf[99] != 7 {
		t.Errorf("the dma-buf has %v", buf[90:])
	}
}

func TestDevices(t *testing.T) {
	n := NewNet()
	defer n.Close()
	n.Info(addrB, func(i *verbs.DeviceInfo) {
		i.Name = "mlx5_bond_0"
		second := i.Ports[0]
		second.Num = 2
		i.Ports = append(i.Ports, second)
	})
	s := n.Stack(addrA, addrB)
	d := must(s.Devices())
	if len(d) != 2 || len(d[0].Ports) != 1 || len(d[1].Ports) != 2 || d[1].Name != "mlx5_bond_0" || d[0].Ports[0].GIDs[1].Addr != addrA {
		t.Fatalf("devices %+v", d)
	}
	c := must(s.NewChannel())
	var devices []verbs.Device
	for _, test := range []struct {
		addr   netip.Addr
		port   int
		pinned bool
	}{{addrA, 1, false}, {addrB, 2, true}, {addrB, 1, true}, {addrB, 0, false}, {addrB, 3, false}} {
		id := must(c.NewID(0))
		check(t, id.Bind(netip.AddrPortFrom(test.addr, 0)))
		dev := must(id.Device())
		if !slices.Contains(devices, dev) {
			devices = append(devices, dev)
		}
		if qp := must(id.CreateQP(verbs.QPOptions{Port: test.port})); qp.Pinned() != test.pinned {
			t.Errorf("port %d of %v: pinned %v", test.port, test.addr, qp.Pinned())
		}
	}
	if len(devices) != 2 {
		t.Errorf("%d devices, want 2", len(devices))
	}
	if got := must(devices[1].Info()).Name; got != "mlx5_bond_0" {
		t.Errorf("name %s", got)
	}
}

func TestPostRefuses(t *testing.T) {
	w := newWorld(t)
	a, b := w.pair(options, params)
	m := a.memory(4, 0)
	for name, test := range map[string]struct {
		change func(*verbs.SendWR)
		want   error
	}{
		"opcode":  {func(wr *verbs.SendWR) { wr.Op = 4 }, syscall.EINVAL},
		"flags":   {func(wr *verbs.SendWR) { wr.Flags = 4 }, syscall.EINVAL},
		"id":      {func(wr *verbs.SendWR) { wr.ID = 1 << 63 }, syscall.EINVAL},
		"unknown": {func(wr *verbs.SendWR) { wr.QP = 99 }, verbs.ErrClosed},
		"foreign": {func(wr *verbs.SendWR) { wr.QP = b.qp.Handle() }, verbs.ErrClosed},
	} {
		t.Run(name, func(t *testing.T) {
			wr := a.send(1, 0, m)
			test.change(&wr)
			n, err := a.dev.Post([]verbs.SendWR{wr})
			wantErr(t, err, test.want)
			if n != 0 {
				t.Errorf("posted %d", n)
			}
		})
	}
}

func TestEventDelay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, func(c *Config) { c.EventDelay = time.Second })
		start := time.Now()
		a, b := w.pair(options, params)
		if d := time.Since(start); d != 5*time.Second {
			t.Errorf("connected after %v, want 5 events of a second", d)
		}
		check(t, a.id.Disconnect())
		w.net.Configure(func(c *Config) { c.EventDelay = 0 })
		check(t, b.id.Disconnect()) // undelayed, but after it
		w.next(w.cb, verbs.Disconnected)
		w.next(w.ca, verbs.Disconnected)

		a = w.resolved(1, options)
		w.net.Configure(func(c *Config) { c.EventDelay = time.Second })
		check(t, a.id.Connect(params))
		check(t, w.listen.Destroy()) // during the connect request
		w.next(w.ca, verbs.Rejected)
	})
}

func TestRetryTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, func(c *Config) { c.Retry = 3 * time.Second })
		a, _ := w.pair(options, params)
		w.net.Kill(w.sb)
		start := time.Now()
		a.post(a.send(1, 1, a.memory(4, 0)))
		a.wantStatus(a.poll(1)[0], 1, verbs.StatusRetryExceeded)
		if d := time.Since(start); d != 3*time.Second {
			t.Errorf("after %v, want 3 s", d)
		}
	})
}

// TestNetClose is in a bubble, which fails if a goroutine of the Net waits forever.
func TestNetClose(t *testing.T) { synctest.Test(t, testNetClose) }

func testNetClose(t *testing.T) {
	w := newWorld(t)
	_, b := w.pair(options, params)
	var wg sync.WaitGroup
	var next, poll error
	wg.Go(func() { _, next = w.cb.Next() })
	wg.Go(func() { _, poll = b.dev.Poll(make([]verbs.Completion, 1), -1, 0) })
	w.net.Close()
	wg.Wait()
	wantErr(t, next, verbs.ErrClosed)
	wantErr(t, poll, verbs.ErrClosed)
	_, err := w.ca.NewID(0)
	wantErr(t, err, verbs.ErrClosed)
	check(t, b.id.Destroy())
}

// TestTraffic writes in both directions over two queue pairs that overtake each other. The readers rely on completions only.
func TestTraffic(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.Jitter = 20 * time.Microsecond; c.Seed = 1 })
	o := verbs.QPOptions{SendDepth: 4, RecvDepth: 2}
	ends := make([][2]*end, 2)
	for i := range ends {
		ends[i][0], ends[i][1] = w.pair(o, params)
	}
	const rounds = 300
	var wg sync.WaitGroup
	for side := range 2 {
		from, to := ends[0][side], ends[0][1-side]
		src, dst := from.memory(16, 0), to.memory(16, remote)
		var free [2]chan struct{} // by queue pair: its byte was read
		for i := range free {
			free[i] = make(chan struct{}, 1)
			free[i] <- struct{}{}
		}
		wg.Go(func() { // the sender
			for i := range rounds {
				<-free[i%2]
				q := ends[i%2][side]
				off := uint64(i % 2)
				src.b[off] = byte(i)
				for {
					_, err := from.dev.Post([]verbs.SendWR{{QP: q.qp.Handle(), ID: uint64(i), Op: verbs.OpWriteImm, Flags: verbs.Signaled,
						Imm: uint32(i), RKey: dst.RKey(), RemoteAddr: dst.addr() + off, LocalAddr: src.addr() + off, Len: 1, LKey: src.LKey()}})
					if err == nil {
						break
					}
					if !errors.Is(err, verbs.ErrQueueFull) {
						t.Error(err)
						return
					}
					runtime.Gosched()
				}
			}
		})
		wg.Go(func() { // the receiver on the other side, which also polls the sender's completions
			out := make([]verbs.Completion, 3)
			last := [2]int{-1, -1}
			for got := 0; got < 2*rounds; {
				k, err := to.dev.Poll(out, 10*time.Microsecond, long)
				if err != nil || k == 0 {
					t.Errorf("%d completions, error %v", k, err)
					return
				}
				for _, c := range out[:k] {
					got++
					if c.Status != verbs.StatusOK {
						t.Errorf("completion %+v", c)
						return
					}
					if c.Type == verbs.SendDone {
						continue
					}
					i := int(c.Imm)
					if i <= last[i%2] || dst.b[i%2] != byte(i) {
						t.Errorf("round %d after %d has %d", i, last[i%2], dst.b[i%2])
						return
					}
					last[i%2] = i
					free[i%2] <- struct{}{}
				}
			}
		})
	}
	wg.Wait()
}
