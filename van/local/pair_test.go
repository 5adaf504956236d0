package local

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/tests/inproc"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/env"
)

// limit is how long anything may take.
const limit = 20 * time.Second

// node is a van with its received messages and peer events.
type node struct {
	*Van
	t      testing.TB
	self   van.Node
	in     chan *van.Message // retained
	events chan event
	logged *vantest.Log
	before atomic.Pointer[func(*van.Message)] // the handler calls it first; may be nil
}

type event struct {
	id    int
	up    bool
	cause error
}

// newNode makes a van on network n that is bound and has not been started.
func newNode(t testing.TB, n *inproc.Network, id int, set func(*Van)) *node {
	t.Helper()
	logged := &vantest.Log{}
	o := van.Options{Config: env.Default(), Log: logged.Logger()}
	inner, err := n.Factory()(o)
	if err != nil {
		t.Fatal(err)
	}
	x := &node{Van: New(inner, o), t: t, in: make(chan *van.Message, 1<<17), events: make(chan event, 100), logged: logged}
	x.own.linkTime = limit // tests are about links, not about the speed of the machine
	LongNets(x.Van)
	if set != nil {
		set(x.Van)
	}
	x.WatchPeers(func(id int, up bool, cause error) { x.events <- event{id, up, cause} })
	x.self = van.Node{Role: van.RoleOf(id), ID: van.Empty, Hostname: "127.0.0.1"}
	if x.self.Port, err = x.Bind(t.Context(), x.self); err != nil {
		t.Fatal(err)
	}
	x.self.ID, x.self.Endpoint = id, Endpoint(x.Endpoint())
	x.SetID(id)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), limit)
		defer cancel()
		if err := x.Close(ctx); err != nil {
			t.Errorf("close %d: %v", id, err)
		}
	})
	return x
}

// says waits until the log of x has a line.
func (x *node) says(line string) {
	x.t.Helper()
	eventually(x.t, fmt.Sprintf("the log says %q", line), func() bool { return strings.Contains(x.logged.String(), line) })
}

func (x *node) start() {
	x.Start(func(m *van.Message) {
		if f := x.before.Load(); f != nil {
			(*f)(m)
		}
		x.in <- m.Retain()
	})
}

// connect links x to peer and checks that it did.
func (x *node) connect(peer *node) {
	x.t.Helper()
	if err := x.Connect(x.t.Context(), peer.self.ID, peer.self); err != nil {
		x.t.Fatal(err)
	}
	if !x.Linked(peer.self.ID) {
		x.t.Fatalf("%d is not linked to %d", x.self.ID, peer.self.ID)
	}
}

// pair makes worker 9 and server 8, linked both ways.
func pair(t testing.TB) (worker, server *node) { return pairWith(t, nil) }

// pairWith is pair with something set for both.
func pairWith(t testing.TB, set func(*Van)) (worker, server *node) {
	n := inproc.NewNetwork()
	worker, server = newNode(t, n, 9, set), newNode(t, n, 8, set)
	worker.start()
	server.start()
	worker.connect(server)
	server.connect(worker)
	return worker, server
}

// unread is pair with a server that is not started yet, so it reads nothing.
func unread(t testing.TB, setWorker, setServer func(*Van)) (worker, server *node) {
	n := inproc.NewNetwork()
	worker, server = newNode(t, n, 9, setWorker), newNode(t, n, 8, setServer)
	worker.start()
	worker.connect(server)
	server.connect(worker)
	return worker, server
}

// data makes a message for node to: a push of values under key 1.
func data(to, ts int, vals []byte) *van.Message {
	m := &van.Message{}
	m.Reset()
	m.Receiver, m.Timestamp, m.Request, m.Push = to, int32(ts), true, true
	m.AppID, m.CustomerID, m.Head = 0, 0, 0
	m.Frames, m.Keys, m.Vals = 2, backend.Slice([]uint64{1}), backend.Bytes(vals)
	m.DataTypes = append(m.DataTypes, van.TypeUint64, van.TypeOther)
	m.DataSize = int32(m.PayloadLen())
	return m
}

func (x *node) must(m *van.Message) {
	x.t.Helper()
	if err := x.Send(m); err != nil {
		x.t.Fatal(err)
	}
}

// next waits for a message.
func (x *node) next() *van.Message {
	x.t.Helper()
	select {
	case m := <-x.in:
		return m
	case <-time.After(limit):
		x.t.Fatalf("%d received nothing", x.self.ID)
		return nil
	}
}

// event waits until x reports an event of peer id.
func (x *node) event(id int, up bool) event {
	x.t.Helper()
	for end := time.After(limit); ; {
		select {
		case e := <-x.events:
			if e.id == id && e.up == up {
				return e
			}
		case <-end:
			x.t.Fatalf("%d was not told that %d is up=%t", x.self.ID, id, up)
		}
	}
}

// eventually polls for a condition that has no signal.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	vantest.Eventually(t, limit, what, ok)
}

// resend sends until the peer is there again.
func (x *node) resend(m *van.Message) {
	x.t.Helper()
	eventually(x.t, fmt.Sprintf("%d can send to %d again", x.self.ID, m.Receiver), func() bool {
		err := x.Send(m)
		if err != nil && !errors.Is(err, van.ErrPeerLost) {
			x.t.Fatal(err)
		}
		return err == nil
	})
}

// pattern is n bytes that differ by seed. The race detector does not check it: no other goroutine has these bytes yet.
//
//go:norace
func pattern(seed, n int) []byte {
	b := make([]byte, n)
	x := uint32(seed)*2654435761 + 1
	for i := range b {
		x = x*1664525 + 1013904223
		b[i] = byte(x >> 24)
	}
	return b
}

// readModes are how a node gets large values: by reading the sender's memory, and, where that
// is forbidden, as streams only.
var readModes = []struct {
	name string
	set  func(*Van)
}{{"read", nil}, {"stream", func(v *Van) { v.acceptor.streamOnly = true }}}
