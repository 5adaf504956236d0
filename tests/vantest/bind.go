package vantest

// Tests of binding, connecting and node ids.

import (
	"context"
	"errors"
	"strconv"
	"strings"

	"github.com/stepaf/stepaf-go/internal/freeport"
	"github.com/stepaf/stepaf-go/van"
)

func bindAnyPort(w *world) {
	a, b := w.node(8, nil), w.node(10, nil)
	if a.self.Port <= 0 || b.self.Port <= 0 || a.self.Port == b.self.Port {
		w.Errorf("ports %d and %d, want two different positive ones", a.self.Port, b.self.Port)
	}
	if a.Type() == "" {
		w.Error("Type is empty")
	}
}

func bindPortInUse(w *world) {
	a := w.node(8, nil)
	b := w.make(10)
	b.self.Port = a.self.Port
	b.cannotBind("port", strconv.Itoa(a.self.Port))
	b.self.Port = 0
	b.bind(nil) // any other port works
}

func bindBadHost(w *world) {
	n := w.make(8)
	n.self.Hostname = w.suite.BadHost
	n.cannotBind("host", w.suite.BadHost)
}

// cannotBind checks that n cannot bind, and the texts of its error.
func (n *node) cannotBind(what, name string) {
	n.w.Helper()
	switch err := n.tryBind(); {
	case err == nil:
		n.w.Fatalf("Bind to %s %s succeeded", what, name)
	case !strings.Contains(err.Error(), name):
		n.w.Errorf("error %q does not name %s %s", err, what, name)
	}
}

func connectBeforeBind(w *world) {
	worker, server := w.node(9, nil), w.make(8)
	server.self.Port = w.freePort()
	if v, ok := van.As[interface{ WillBind(port int) }](server.Van); ok { // its peers look up its record by the port
		v.WillBind(server.self.Port)
	}
	worker.connect(server)
	const n = 10
	for i := range n {
		worker.must(data(8, i, true))
	}
	server.knowsID = true
	server.bind(nil)
	server.connect(worker)
	server.expect(9, n)
}

// freePort returns a port that the kernel does not assign to another socket meanwhile.
func (w *world) freePort() int {
	port, err := freeport.Find()
	if err != nil {
		w.Fatal(err)
	}
	return port
}

// expect receives n messages from sender with the timestamps 0 to n-1, in order
// unless the van is lossy.
func (n *node) expect(sender, count int) {
	n.w.Helper()
	seen := make([]bool, count)
	for i := range count {
		r := n.next()
		ts := int(r.meta.Timestamp)
		switch {
		case r.sender != sender || r.receiver != n.self.ID:
			n.w.Fatalf("message from %d to %d, want from %d to %d", r.sender, r.receiver, sender, n.self.ID)
		case ts < 0 || ts >= count || seen[ts]:
			n.w.Fatalf("timestamp %d is unknown or came twice", ts)
		case ts != i && !n.w.suite.Lossy:
			n.w.Fatalf("timestamp %d came as number %d", ts, i)
		}
		seen[ts] = true
	}
}

func unknownPeer(w *world) {
	n := w.node(9, nil)
	done := newCompletion()
	m := data(8, 0, true)
	m.Done = done
	if err := n.Send(m); !errors.Is(err, van.ErrUnknownPeer) {
		w.Errorf("Send without a connection: %v, want %v", err, van.ErrUnknownPeer)
	}
	if c := done.count.Load(); c != 0 {
		w.Errorf("Done was called %d times for a message that was refused, want 0", c)
	}
	n.Disconnect(8) // does nothing
	if err := n.Rename(-1, 8); !errors.Is(err, van.ErrUnknownPeer) {
		w.Errorf("Rename of an unknown peer: %v, want %v", err, van.ErrUnknownPeer)
	}
}

func senderID(w *world) {
	scheduler := w.node(1, nil)
	worker := w.make(9)
	worker.bind(nil)
	worker.connect(scheduler)
	worker.must(control(van.AddNode, 1, 0))
	if r := scheduler.next(); r.sender != van.Empty || r.receiver != 1 {
		w.Errorf("before SetID: message from %d to %d, want from %d to 1", r.sender, r.receiver, van.Empty)
	}
	worker.SetID(9)
	worker.connect(scheduler)
	scheduler.connect(worker)
	worker.must(control(van.Heartbeat, 1, 1))
	if r := scheduler.next(); r.sender != 9 {
		w.Errorf("after SetID and Connect: message from %d, want 9", r.sender)
	}
	scheduler.must(control(van.Heartbeat, 9, 0))
	if r := worker.next(); r.sender != 1 || r.receiver != 9 {
		w.Errorf("to the worker: message from %d to %d, want from 1 to 9", r.sender, r.receiver)
	}
}

func closeTwice(w *world) {
	n := w.node(9, nil)
	server := w.node(8, nil)
	link(n, server)
	n.close()
	n.close()
	if err := n.Send(data(8, 0, true)); !errors.Is(err, van.ErrClosed) {
		w.Errorf("Send after Close: %v, want %v", err, van.ErrClosed)
	}
	n.Disconnect(8)
	if err := n.Connect(context.Background(), 8, server.self); err == nil {
		w.Error("Connect after Close succeeded")
	}
	fresh := w.make(11)
	fresh.close() // a van that was never bound
}
