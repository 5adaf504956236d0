package tcp

// Nodes of tests: how they start, connect, send and receive.

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/env"
	"github.com/stepaf/stepaf-go/van/zmq"
)

// limit is how long anything in these tests may take.
const limit = 30 * time.Second

// end is one node of a test.
type end struct {
	*Van
	t    *testing.T
	self van.Node
	in   chan *van.Message
	log  vantest.Log

	before atomic.Pointer[func(*van.Message)] // called with each received message first; may be nil
	event  atomic.Pointer[func(up bool)]      // called by the watcher; may be nil

	mu     sync.Mutex
	events []string
}

// start makes a node that listens on the loopback. options may be nil.
func start(t *testing.T, id int, options func(*van.Options)) *end {
	t.Helper()
	e := &end{t: t, in: make(chan *van.Message, 1024)}
	o := van.Options{Config: env.Default(), Log: e.log.Logger(), Incarnation: incarnations.Add(1)}
	if options != nil {
		options(&o)
	}
	in, err := zmq.New(o)
	if err != nil {
		t.Fatal(err)
	}
	e.Van = New(in, o)
	e.self = van.Node{Role: van.RoleOf(id), ID: id, Hostname: "127.0.0.1", AuxID: -1}
	self := e.self
	self.ID = van.Empty
	if e.self.Port, err = e.Bind(t.Context(), self); err != nil {
		t.Fatal(err)
	}
	e.self.Ports = []int32{int32(e.self.Port)}
	e.self.Endpoint = (&van.NodeExtension{Incarnation: o.Incarnation, DataPort: uint16(e.DataPort())}).Encode()
	e.WatchPeers(e.watch)
	e.SetID(id)
	e.Start(func(m *van.Message) {
		if f := e.before.Load(); f != nil {
			(*f)(m)
		}
		e.in <- m.Retain()
	})
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), limit)
		defer cancel()
		_ = e.Close(ctx)
	})
	return e
}

// both runs a test without a secret, and with TLS.
func both(t *testing.T, test func(t *testing.T, options func(*van.Options))) {
	t.Run("plain", func(t *testing.T) { test(t, func(*van.Options) {}) })
	t.Run("tls", func(t *testing.T) { test(t, withTLS(t)) })
}

// pair makes a worker and a server that know each other.
func pair(t *testing.T, options func(*van.Options)) (worker, server *end) {
	worker, server = start(t, 9, options), start(t, 8, options)
	worker.connect(server)
	server.connect(worker)
	return worker, server
}

func (e *end) connect(to *end) {
	e.t.Helper()
	if err := e.Connect(e.t.Context(), to.self.ID, to.self); err != nil {
		e.t.Fatal(err)
	}
}

func (e *end) must(m *van.Message) {
	e.t.Helper()
	if err := e.Send(m); err != nil {
		e.t.Fatal(err)
	}
}

func (e *end) next() *van.Message {
	e.t.Helper()
	select {
	case m := <-e.in:
		return m
	case <-time.After(limit):
		e.t.Fatalf("nothing within %s; log:\n%s", limit, e.log.String())
		return nil
	}
}

// watch is the watcher of e's peers.
func (e *end) watch(id int, up bool, _ error) {
	if f := e.event.Load(); f != nil {
		(*f)(up)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.events = append(e.events, fmt.Sprintf("%d %t", id, up))
}

// told reports whether the watcher was called with these events, one after the other, perhaps with others between them.
func (e *end) told(events ...string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, x := range e.events {
		if len(events) > 0 && x == events[0] {
			events = events[1:]
		}
	}
	return len(events) == 0
}

// dataMessage makes a push of value under key 1, or an answer to a pull.
func dataMessage(to, ts int, request, push bool, value []byte) *van.Message {
	m := &van.Message{}
	m.Reset()
	m.Receiver, m.Timestamp, m.Request, m.Push = to, int32(ts), request, push
	m.AppID, m.CustomerID, m.Head = 0, 0, 0
	m.Frames = 2
	m.Keys, m.Vals = backend.Bytes([]byte{1, 0, 0, 0, 0, 0, 0, 0}), backend.Bytes(value)
	m.DataTypes = []van.DataType{van.TypeUint64, van.TypeChar}
	m.DataSize = int32(8 + len(value))
	return m
}

// pattern returns n bytes that differ by seed. The race detector does not check it: no other goroutine has these bytes yet.
//
//go:norace
func pattern(n, seed int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i*31 + i>>8 + seed)
	}
	return b
}
