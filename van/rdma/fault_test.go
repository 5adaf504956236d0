package rdma

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/tests/fakeverbs"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/env"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

var errTest = errors.New("made to fail")

// failing returns a function for Fail: the first calls of that kind by n, or by any node if n is nil, fail with err.
func failing(n *testNode, k fakeverbs.OpKind, times int32, err error) func(fakeverbs.Op) error {
	var calls atomic.Int32
	return func(op fakeverbs.Op) error {
		if op.Kind == k && (n == nil || op.Stack == n.stack) && calls.Add(1) <= times {
			return err
		}
		return nil
	}
}

func TestBindErrors(t *testing.T) {
	for _, s := range []struct {
		name, host string
		fail       fakeverbs.OpKind
		want       error
	}{
		{name: "channel", fail: fakeverbs.OpNewChannel, want: errTest},
		{name: "ID", fail: fakeverbs.OpNewID, want: errTest},
		{name: "bind", fail: fakeverbs.OpBind, want: errTest},
		{name: "listen", fail: fakeverbs.OpListen, want: errTest},
		{name: "foreign address", host: "10.99.0.1", want: syscall.EADDRNOTAVAIL},
	} {
		t.Run(s.name, func(t *testing.T) {
			r := newRig(t)
			n := r.make(8)
			r.net.Fail(failing(nil, s.fail, math.MaxInt32, errTest))
			self := n.who
			if self.ID = van.Empty; s.host != "" {
				self.Hostname = s.host
			}
			_, err := n.Bind(context.Background(), self)
			var e *van.Error
			if !errors.Is(err, s.want) || !errors.As(err, &e) || !strings.Contains(err.Error(), self.Hostname) {
				t.Fatalf("Bind: %v, want a van.Error that names %s and wraps %v", err, self.Hostname, s.want)
			}
			if err := n.Connect(context.Background(), 9, n.who); !errors.Is(err, van.ErrClosed) {
				t.Errorf("Connect without Bind: %v, want %v", err, van.ErrClosed)
			}
			r.net.Fail(nil)
			if n.who.Port, err = n.Bind(context.Background(), n.who); err != nil {
				t.Errorf("a second Bind: %v", err)
			}
		})
	}
}

// TestListensEverywhere: a scheduler in Kubernetes listens at all addresses, since pods reach it at a service's address. Other nodes do not.
func TestListensEverywhere(t *testing.T) {
	for _, s := range []struct {
		id               int
		kubernetes, want bool
	}{{van.SchedulerID, true, true}, {van.SchedulerID, false, false}, {8, true, false}} {
		r := newRig(t)
		n := r.make(s.id, func(c *env.Config) { c.Kubernetes = s.kubernetes })
		n.listenOn(0)
		if got := n.accepted.listen.LocalAddr().Addr(); got.IsUnspecified() != s.want {
			t.Errorf("%s listens on %s (in Kubernetes: %t), want everywhere: %t", van.NodeName(s.id), got, s.kubernetes, s.want)
		}
	}
}

// TestDialErrors lets each step of connecting fail a few times. Messages sent before still arrive, and no entries of the completion queue are lost.
func TestDialErrors(t *testing.T) {
	t.Parallel()
	for _, s := range []struct {
		name string
		op   fakeverbs.OpKind
		err  error
		peer bool // fails there
		say  string
	}{
		{name: "ID", op: fakeverbs.OpNewID, err: errTest, say: "made to fail"},
		{name: "address at once", op: fakeverbs.OpResolveAddr, err: errTest, say: "resolve address"},
		{name: "address", op: fakeverbs.OpResolveAddr, err: fakeverbs.EventError(-int(syscall.ENODEV)), say: "no such device"},
		{name: "route at once", op: fakeverbs.OpResolveRoute, err: errTest, say: "resolve route"},
		{name: "route", op: fakeverbs.OpResolveRoute, err: fakeverbs.EventError(-110), say: "route error"},
		{name: "queue pair", op: fakeverbs.OpCreateQP, err: syscall.ENOMEM, say: "create queue pair"},
		{name: "completion queue", op: fakeverbs.OpReserve, err: syscall.ENOMEM, say: "create queue pair"},
		{name: "connect at once", op: fakeverbs.OpConnect, err: errTest, say: "connect"},
		{name: "unreachable", op: fakeverbs.OpConnect, err: fakeverbs.EventError(-110), say: "unreachable"},
		{name: "no process listens", op: fakeverbs.OpConnect, err: fakeverbs.EventError(8), say: "no process listens"},
		{name: "rejected", op: fakeverbs.OpConnect, err: fakeverbs.EventError(28), say: "rejected by the peer (28)"},
		{name: "staging memory", op: fakeverbs.OpRegister, err: syscall.ENOMEM, say: "staging memory"},
		{name: "queue pair there", op: fakeverbs.OpCreateQP, err: syscall.ENOMEM, peer: true, say: "rejected"},
		{name: "memory there", op: fakeverbs.OpRegister, err: syscall.ENOMEM, peer: true, say: "rejected"},
		{name: "accept there", op: fakeverbs.OpAccept, err: errTest, peer: true, say: "rejected"},
	} {
		t.Run(s.name, func(t *testing.T) {
			r := newRig(t)
			w, srv := r.node(9), r.node(8)
			at := w
			if s.peer {
				at = srv
			}
			fail := failing(at, s.op, 3, s.err)
			var mu sync.Mutex
			most := map[*fakeverbs.Stack]int{}
			r.net.Fail(func(op fakeverbs.Op) error {
				if op.Kind == fakeverbs.OpReserve {
					mu.Lock()
					most[op.Stack] = max(most[op.Stack], op.Size)
					mu.Unlock()
				}
				return fail(op)
			})
			w.connect(srv)
			v := value(5000, 1)
			w.must(push(srv, 3, 1, v))
			c := w.wantChange("it cannot connect", func(c change) bool { return !c.up })
			if !errors.Is(c.cause, syscall.ECONNREFUSED) || !strings.Contains(c.cause.Error(), s.say) {
				t.Errorf("notified of %v, want ECONNREFUSED and %q", c.cause, s.say)
			}
			w.wantUp(srv)
			srv.wantValue(1, v)
			const again = "rdma: no connection yet, trying again"
			if n, right := w.lines(again), w.lines(again, van.NodeName(8), s.say); n != 1 || right != 1 {
				t.Errorf("%d lines say that there is no connection yet, %d of them name the peer and %q; want one that does", n, right, s.say)
			}
			if s.peer {
				line := "rdma: could not accept a connection"
				if s.op == fakeverbs.OpAccept {
					line = "rdma: a peer's connection ended"
				}
				srv.says(line, s.err.Error())
			}
			w.says("rdma: connected", van.NodeName(8))
			start, rx := w.cfg.RDMADepths()
			mu.Lock()
			defer mu.Unlock()
			// The peer may notice the end of a connection only after the next one has begun.
			if need := 2 * (start + rx + rx/2); most[w.stack] > need {
				t.Errorf("room for %d completions was reserved, want %d", most[w.stack], need)
			}
		})
	}
}

// TestRejects: after rejections for any reason, the node tries again until it is connected.
func TestRejects(t *testing.T) {
	r := newRig(t)
	r.net.RejectNext(9, 8)
	w, s := r.node(9), r.node(8)
	w.connect(s)
	w.must(control(s, 4))
	w.wantUp(s)
	if m := s.next(); m.Timestamp != 4 {
		t.Errorf("timestamp %d, want 4", m.Timestamp)
	} else {
		m.Release()
	}
}

func TestDifferentQPNum(t *testing.T) {
	r := newRig(t)
	w, s := r.node(9), r.node(8, func(c *env.Config) { c.QPNum = 1 })
	w.connect(s)
	w.wantDown(s, "STEPAF_QP_NUM is 1 here and 2 there")
}

// TestOtherVersion: nodes of two versions of the protocol make no connection for data, since each would misread the other's messages. The
// scheduler and nodes of any version connect: the scheduler tells a node why it may not join.
func TestOtherVersion(t *testing.T) {
	r := newRig(t)
	w, s := r.node(9), r.node(8)
	older := func(node int) (*raw, func(q int) []byte) {
		p := newRaw(r, netip.MustParseAddr(fmt.Sprintf("10.77.8.%d", node)), van.Node{ID: node})
		return p, func(q int) []byte {
			b := p.privateData(true, 77, q, 2)
			b[offVersion] = 0
			return b
		}
	}
	p, private := older(11)
	id, err := p.ch.NewID(1)
	p.check(err)
	p.check(id.ResolveAddr(p.addr, netip.AddrPortFrom(s.addr, uint16(s.who.Port)), time.Second))
	p.event(verbs.AddrResolved)
	p.check(id.ResolveRoute(time.Second))
	p.event(verbs.RouteResolved)
	p.use(id)
	p.check(id.Connect(verbs.ConnParam{Private: private(0), RetryCount: 6, RNRRetryCount: 7}))
	if err := rejection(p.event(verbs.Rejected).Private); err == nil || !strings.Contains(err.Error(), "version") {
		t.Errorf("a node of an older version is rejected with %v, want the reason", err)
	}
	w.connect(&testNode{who: van.Node{ID: 11, Hostname: p.addr.String(), Port: p.port}})
	to := p.event(verbs.ConnectRequest).New
	p.use(to)
	p.check(to.Accept(verbs.ConnParam{Private: private(0), RetryCount: 6, RNRRetryCount: 7}))
	if c := w.wantChange("it cannot connect", func(c change) bool { return !c.up }); !strings.Contains(c.cause.Error(), "version") {
		t.Errorf("notified of %v, want the other version", c.cause)
	}
	w.Disconnect(11)
	p.end()
	scheduler, private := older(van.SchedulerID)
	scheduler.dial(s, 2, private)
	scheduler.end()
}

// TestSilentPeer connects to an address that never answers connect requests.
func TestSilentPeer(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	w := r.node(9)
	a := netip.MustParseAddr("10.77.2.1")
	p := newRaw(r, a, van.Node{ID: 8})
	defer p.end()
	w.times.connect = 100 * time.Millisecond
	w.connect(&testNode{who: van.Node{ID: 8, Hostname: a.String(), Port: p.port, Endpoint: (&van.NodeExtension{Incarnation: 1}).Encode()}})
	c := w.wantChange("it cannot connect", func(c change) bool { return !c.up })
	if !errors.Is(c.cause, van.ErrTimeout) || !strings.Contains(c.cause.Error(), "no answer") {
		t.Errorf("notified of %v, want a time-out", c.cause)
	}
}

func TestNoDevice(t *testing.T) {
	r := newRig(t)
	n := r.make(8)
	r.net.Fail(fakeverbs.FailNth(fakeverbs.OpDevices, 1, verbs.ErrUnavailable))
	if _, _, err := n.ChooseHost(); !errors.Is(err, verbs.ErrUnavailable) {
		t.Errorf("ChooseHost: %v, want %v", err, verbs.ErrUnavailable)
	}
	r.net.Fail(nil)
	n.cfg.NodeHost = "10.5.5.5"
	if host, _, err := n.ChooseHost(); err == nil {
		t.Errorf("ChooseHost for an address of no device: %s, want an error", host)
	}
}

// TestLostPeer ends one of two servers during traffic, in every possible way. The other server is not affected, and every message's Done is called once.
func TestLostPeer(t *testing.T) {
	t.Parallel()
	for _, s := range []struct {
		name string
		end  func(r *rig, w, victim *testNode)
		say  []string
	}{
		{"killed", func(_ *rig, _, v *testNode) { v.kill(false) }, []string{"queue pair", "retries exceeded (12)"}},
		{"killed, telling", func(_ *rig, _, v *testNode) { v.kill(true) }, nil},
		{"cut off", func(r *rig, w, v *testNode) { r.net.Cut(w.addr, v.addr) }, []string{"queue pair", "retries exceeded (12)"}},
		{"device removed", func(r *rig, _, v *testNode) { r.net.RemoveDevice(v.addr) }, nil},
	} {
		t.Run(s.name, func(t *testing.T) {
			r := newRig(t)
			w, a, b := r.node(9), r.node(8), r.node(10)
			r.link(w, a)
			r.link(w, b)
			big := value(9000, 5)
			sent := 0
			send := func(to *testNode, i int) error {
				m := push(to, uint64(i%5), i, big)
				m.Done = w
				err := w.Send(m)
				if err == nil {
					sent++
				}
				return err
			}
			for i := range 40 {
				for _, to := range []*testNode{a, b} {
					if err := send(to, i); err != nil {
						t.Fatal(err)
					}
				}
			}
			s.end(r, w, b)
			r.until("Send to the lost peer fails", func() bool {
				err := send(b, 0)
				if err != nil && !lost(err) {
					t.Fatalf("Send to the lost peer: %v, want %v", err, van.ErrPeerLost)
				}
				return err != nil
			})
			w.wantDown(b, s.say...)
			for i := range 40 {
				if err := send(a, 40+i); err != nil {
					t.Fatal(err)
				}
			}
			for i := range 80 {
				a.wantValue(i, big)
			}
			w.Disconnect(b.who.ID)
			r.until("Done is called for every message", func() bool { return int(w.dones.Load()) >= sent })
			if n := int(w.dones.Load()); n != sent {
				t.Errorf("Done was called %d times for %d messages", n, sent)
			}
		})
	}
}

// TestSlowFlush: the device flushes all posted requests of a connection before the connection is destroyed, even if the first one takes a while.
func TestSlowFlush(t *testing.T) {
	r := newRig(t)
	w, s := r.node(9), r.node(8)
	w.connect(s) // s connects to no node
	w.wantUp(s)
	gate := make(chan struct{})
	var stuck, broken, gone atomic.Int32
	r.net.Fail(func(op fakeverbs.Op) error {
		switch {
		case op.Stack != s.stack:
		case op.Kind == fakeverbs.OpPoll:
			stuck.Add(1)
			<-gate
		case op.Kind == fakeverbs.OpDisconnect:
			broken.Add(1)
		case op.Kind == fakeverbs.OpDestroy:
			gone.Add(1)
		}
		return nil
	})
	w.must(push(s, 1, 1, value(100, 1))) // ends the poll in progress
	r.until("the server sees no completions", func() bool { return stuck.Load() > 0 })
	w.kill(true)
	r.until("the server ends it too", func() bool { return broken.Load() > 0 })
	<-time.After(3 * flushPause) // a few checks
	if n := gone.Load(); n != 0 {
		t.Errorf("%d are taken down though nothing of theirs has come back", n)
	}
	close(gate)
	r.until("all are taken down", func() bool { return gone.Load() > 0 })
}

// TestLinkHeals cuts a link and heals it: the connection is restored.
func TestLinkHeals(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	w, s := r.pair()
	for round := range 3 {
		r.net.Cut(w.addr, s.addr)
		r.until("Send fails", func() bool { return lost(w.Send(push(s, 1, 0, value(3000, 1)))) })
		w.wantDown(s, "queue pair")
		// A control message waits for the next connection.
		w.must(control(s, 100+round))
		r.net.Heal(w.addr, s.addr)
		w.wantUp(s)
		v := value(4000, round)
		w.must(push(s, 1, 200+round, v))
		seen := 0
		for seen != 3 {
			m := s.next()
			switch {
			case m.IsControl() && int(m.Timestamp) == 100+round:
				seen |= 1
			case int(m.Timestamp) == 200+round && string(m.Vals.Host()) == string(v):
				seen |= 2
			case m.Timestamp != 0:
				t.Fatalf("timestamp %d in round %d", m.Timestamp, round)
			}
			m.Release()
		}
	}
}

// TestFailedWorkRequest lets one work request fail with each status. The watcher is notified of queue pair and status, and the connection is restored.
func TestFailedWorkRequest(t *testing.T) {
	for _, status := range []verbs.Status{verbs.StatusLocalLength, verbs.StatusLocalProt, verbs.StatusRemoteInvalid,
		verbs.StatusRemoteAccess, verbs.StatusRemoteOp, verbs.StatusRetryExceeded, verbs.StatusRNRExceeded, 21} {
		for _, op := range []verbs.Opcode{verbs.OpSendImm, verbs.OpWrite, verbs.OpWriteImm} {
			t.Run(fmt.Sprintf("%v of %d", status, op), func(t *testing.T) {
				r := newRig(t)
				w, s := r.pair()
				var once sync.Once
				r.net.FailWR(func(wr fakeverbs.WR) (st verbs.Status) {
					if wr.Stack == w.stack && wr.Op == op {
						once.Do(func() { st = status })
					}
					return st
				})
				m := push(s, 1, 1, value(8000, 1))
				m.Done = w
				err := w.Send(m)
				if err != nil && !lost(err) { // an earlier work request may have failed
					t.Fatal(err)
				}
				// Where the peer's queue pair breaks, too, its end may be noticed first.
				w.wantChange("which queue pair and status", func(c change) bool {
					return !c.up && lost(c.cause) && (strings.Contains(c.cause.Error(), "queue pair 0") &&
						strings.Contains(c.cause.Error(), status.String()) || strings.Contains(c.cause.Error(), "disconnected"))
				})
				w.wantUp(s)
				if err == nil {
					r.until("Done", func() bool { return w.dones.Load() == 1 })
				}
				v := value(8000, 2)
				w.must(push(s, 1, 2, v))
				s.wantValue(2, v)
			})
		}
	}
}

// TestFailedCalls lets calls fail during traffic. A connection that is lost is restored, and later messages arrive.
func TestFailedCalls(t *testing.T) {
	anyone := func(_, _ *testNode) *testNode { return nil }
	worker := func(w, _ *testNode) *testNode { return w }
	server := func(_, s *testNode) *testNode { return s }
	for _, c := range []struct {
		name  string
		op    fakeverbs.OpKind
		by    func(w, s *testNode) *testNode
		times int32
		used  bool // after other messages
		lost  bool // the connection is lost
		say   []string
		log   string // in the line with the reason; "connection": the end of one, in either direction
	}{
		{name: "post", op: fakeverbs.OpPost, by: worker, times: 1, lost: true, say: []string{"post", "made to fail"}, log: "connection"},
		{name: "answer to a slot request", op: fakeverbs.OpPost, by: server, times: 1, lost: true, log: "connection"},
		{name: "poll", op: fakeverbs.OpPoll, by: anyone, times: 10, log: "rdma: polling completions failed"},
		{name: "register a value", op: fakeverbs.OpRegister, by: worker, times: 1, used: true, lost: true, say: []string{"value of 8000 bytes", "made to fail"},
			log: "rdma: a message could not be sent"},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t)
			w, s := r.pair()
			if c.used {
				w.must(push(s, 1, 1, value(8000, 1)))
				s.wantValue(1, value(8000, 1))
			}
			r.net.Fail(failing(c.by(w, s), c.op, c.times, errTest))
			if c.lost {
				m := push(s, 1, 2, value(8000, 2))
				m.Done = w
				err := w.Send(m)
				if err != nil && !lost(err) { // an earlier call may have failed
					t.Fatal(err)
				}
				if lostChange := w.wantDown(s, c.say...); !lost(lostChange.cause) {
					t.Errorf("notified of %v, want %v", lostChange.cause, van.ErrPeerLost)
				}
				w.wantUp(s)
				if err == nil {
					r.until("Done", func() bool { return w.dones.Load() == 1 })
				}
			}
			w.must(push(s, 1, 3, value(8000, 3)))
			for {
				m := s.next()
				ts, right := int(m.Timestamp), bytes.Equal(m.Vals.Host(), value(8000, int(m.Timestamp)))
				m.Release()
				if !right || ts != 3 && (ts != 2 || !c.lost) {
					t.Fatalf("got message %d, its value is right: %t", ts, right)
				}
				if ts == 3 {
					break // message 2 has arrived because another call than its own failed
				}
			}
			r.until("a line: "+c.log, func() bool { return w.lines(c.log, "made to fail")+s.lines(c.log, "made to fail") > 0 })
		})
	}
}
