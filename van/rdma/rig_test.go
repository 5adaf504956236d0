package rdma

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/tests/fakeverbs"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/env"
)

// patience is the time limit for events that must happen.
const patience = 20 * time.Second

// rig is an emulated network with vans, each on a host of its own.
type rig struct {
	*testing.T
	net    *fakeverbs.Net
	nodes  []*testNode
	probes bool // idle connections are probed as often as outside of tests
	real   bool // addresses are this machine's, and responders listen there
}

// testNode is a van with its received messages and notifications.
type testNode struct {
	*rvan
	r       *rig
	who     van.Node
	stack   *fakeverbs.Stack
	addr    netip.Addr
	in      chan *van.Message // retained
	changes chan change
	dones   atomic.Int32

	logged vantest.Log
}

// change is a notification of a watcher.
type change struct {
	id    int
	up    bool
	cause error
}

func (c change) String() string {
	return fmt.Sprintf("%s up: %t (%v)", van.NodeName(c.id), c.up, c.cause)
}

func newRig(t *testing.T, options ...func(*fakeverbs.Config)) *rig {
	t.Helper()
	r := &rig{T: t, net: fakeverbs.NewNet(options...)}
	r.net.OnError(func(err error) { t.Errorf("the network: %v", err) })
	t.Cleanup(func() {
		var all sync.WaitGroup
		for _, n := range r.nodes {
			all.Go(n.close)
		}
		all.Wait()
		for _, l := range r.net.Leaks() {
			t.Errorf("leaked: %s", l)
		}
		r.net.Close()
	})
	return r
}

// make makes a node that is not bound.
func (r *rig) make(id int, options ...func(*env.Config)) *testNode {
	cfg := env.Default()
	cfg.VanType = "ibverbs"
	for _, f := range options {
		f(cfg)
	}
	n := &testNode{r: r, addr: netip.AddrFrom4([4]byte{10, 77, 1, byte(len(r.nodes) + 1)}), in: make(chan *van.Message, 1<<14),
		changes: make(chan change, 1<<12)}
	if r.real { // emulated ports are alike in all processes, so that each process needs addresses of its own
		pid := os.Getpid()
		n.addr = netip.AddrFrom4([4]byte{127, 1 + byte(pid>>8)%254, byte(pid), n.addr.As4()[3]})
	}
	n.stack = r.net.Stack(n.addr)
	n.stack.SetName(van.NodeName(id))
	identity := van.NodeExtension{Incarnation: uint32(1000 + len(r.nodes))}
	n.rvan = NewOn(n.stack, van.Options{Config: cfg, Incarnation: identity.Incarnation, Log: n.logged.Logger()}).(*rvan)
	n.liveness.real = r.real
	LongNets(n.rvan)
	if r.probes {
		n.times.probe = probeTime
	}
	n.who = van.Node{Role: van.RoleOf(id), ID: id, Hostname: n.addr.String(), AuxID: -1, Endpoint: identity.Encode()}
	n.WatchPeers(func(id int, up bool, cause error) {
		select {
		case n.changes <- change{id, up, cause}:
		default:
		}
	})
	r.nodes = append(r.nodes, n)
	return n
}

// node makes a node that listens under its id.
func (r *rig) node(id int, options ...func(*env.Config)) *testNode {
	r.Helper()
	n := r.make(id, options...)
	n.listenOn(0)
	n.Start(func(m *van.Message) { n.in <- m.Retain() })
	return n
}

func (n *testNode) listenOn(port int) {
	n.r.Helper()
	self := n.who
	self.Port = port
	if self.Role != van.Scheduler {
		self.ID = van.Empty
	}
	id := n.who.ID
	p, err := n.Bind(context.Background(), self)
	if err != nil {
		n.r.Fatal(err)
	}
	n.who.Port, n.who.ID = p, id
	n.SetID(id)
}

func (n *testNode) connect(to *testNode) {
	n.r.Helper()
	if err := n.Connect(context.Background(), to.who.ID, to.who); err != nil {
		n.r.Fatal(err)
	}
}

// pair makes a worker and a server that have exchanged messages.
func (r *rig) pair(options ...func(*env.Config)) (w, s *testNode) {
	r.Helper()
	w, s = r.node(9, options...), r.node(8, options...)
	r.link(w, s)
	return w, s
}

func (r *rig) link(a, b *testNode) {
	r.Helper()
	a.connect(b)
	b.connect(a)
	a.wantUp(b)
	b.wantUp(a)
}

func (n *testNode) close() {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := n.Close(ctx); err != nil {
		n.r.Errorf("Close: %v", err)
	}
	for {
		select {
		case m := <-n.in:
			m.Release()
		default:
			return
		}
	}
}

// kill ends the node's process.
func (n *testNode) kill(tell bool) {
	if tell {
		n.r.net.KillTelling(n.stack)
	} else {
		n.r.net.Kill(n.stack)
	}
}

// Sent counts calls.
func (n *testNode) Sent() { n.dones.Add(1) }

// next waits for a message.
func (n *testNode) next() *van.Message {
	n.r.Helper()
	select {
	case m := <-n.in:
		return m
	case <-time.After(patience):
		n.r.Fatalf("%s received nothing", van.NodeName(n.who.ID))
		return nil
	}
}

// wantValue waits for a message with this timestamp and value.
func (n *testNode) wantValue(ts int, v []byte) {
	n.r.Helper()
	m := n.next()
	defer m.Release()
	if int(m.Timestamp) != ts || !bytes.Equal(m.Vals.Host(), v) {
		n.r.Fatalf("got timestamp %d with %d bytes, want %d with %d bytes, or their contents differ", m.Timestamp, m.Vals.Len(), ts, len(v))
	}
}

// wantChange waits for a notification for which f returns true.
func (n *testNode) wantChange(what string, f func(change) bool) change {
	n.r.Helper()
	limit := time.After(patience)
	var others []change
	for {
		select {
		case c := <-n.changes:
			if f(c) {
				return c
			}
			others = append(others, c)
		case <-limit:
			n.r.Fatalf("%s was not told: %s; it was told %v", van.NodeName(n.who.ID), what, others)
		}
	}
}

func (n *testNode) wantUp(peer *testNode) {
	n.r.Helper()
	n.wantChange("the peer is up", func(c change) bool { return c.id == peer.who.ID && c.up })
}

// wantDown waits for the notification that peer is lost, with a cause that contains these words.
func (n *testNode) wantDown(peer *testNode, words ...string) change {
	n.r.Helper()
	return n.wantChange("the peer is down: "+strings.Join(words, ", "), func(c change) bool {
		return c.id == peer.who.ID && !c.up && !slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(c.cause.Error(), w) })
	})
}

// until polls a condition.
func (r *rig) until(what string, f func() bool) {
	r.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	limit := time.After(patience)
	for !f() {
		select {
		case <-tick.C:
		case <-limit:
			r.Fatalf("it never came to be: %s", what)
		}
	}
}

// value returns n bytes that differ by seed. The race detector does not check it: no other goroutine has these bytes yet.
//
//go:norace
func value(n, seed int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i*7 + seed)
	}
	return b
}

// push makes a request with one tensor.
func push(to *testNode, key uint64, ts int, v []byte) *van.Message {
	m := &van.Message{}
	m.Reset()
	m.Receiver, m.AppID, m.CustomerID, m.Timestamp = to.who.ID, 0, 0, int32(ts)
	m.Request, m.Push, m.Key, m.ValLen = true, true, key, int32(len(v))
	keys := make([]byte, 8)
	le.PutUint64(keys, key)
	m.Frames, m.Keys, m.Vals = 2, backend.Bytes(keys), backend.Bytes(v)
	m.DataTypes = []van.DataType{van.TypeUint64, van.TypeOther}
	m.DataSize = int32(8 + len(v))
	return m
}

// pull makes a request for a tensor, with the destination dst.
func pull(to *testNode, key uint64, ts int, dst []byte) *van.Message {
	m := push(to, key, ts, nil)
	m.Push = false
	m.Into = backend.Bytes(dst)
	m.Addr, m.ValLen = m.Into.Addr(), int32(len(dst))
	return m
}

// answer makes the answer to a pull request.
func answer(q *van.Message, v []byte) *van.Message {
	m := push(&testNode{who: van.Node{ID: q.Sender}}, q.Key, int(q.Timestamp), v)
	m.Request, m.Push = false, false
	m.Addr, m.Option = q.Addr, q.Option
	return m
}

// control makes a control message.
func control(to *testNode, ts int) *van.Message {
	m := &van.Message{}
	m.Reset()
	m.Receiver, m.Timestamp = to.who.ID, int32(ts)
	m.Control.Cmd = van.Heartbeat
	return m
}

func (n *testNode) must(m *van.Message) {
	n.r.Helper()
	if err := n.Send(m); err != nil {
		n.r.Fatal(err)
	}
}

// lines counts the lines of the node's log that have all these words.
func (n *testNode) lines(words ...string) (count int) {
	for line := range strings.Lines(n.logged.String()) {
		if !slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(line, w) }) {
			count++
		}
	}
	return count
}

// says waits for a line of the node's log that has all these words.
func (n *testNode) says(words ...string) {
	n.r.Helper()
	n.r.until(van.NodeName(n.who.ID)+" logs: "+strings.Join(words, ", "), func() bool { return n.lines(words...) > 0 })
}

func lost(err error) bool { return errors.Is(err, van.ErrPeerLost) }

// device0 returns the node's first device.
func (n *testNode) device0() *device { return (*n.tables.devices.Load())[0] }
