package vantest

// The nodes of one test, and the messages that they send and receive.

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"testing"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// world is the nodes of one test.
type world struct {
	*testing.T
	suite  Suite
	before map[string]bool // goroutines that were there
	nodes  []*node
	expiry <-chan time.Time // of timeout
}

// node is a van with its record and its received messages.
type node struct {
	van.Van
	w    *world
	self van.Node
	in   chan *received // unless the test brings its own receiver

	knowsID bool // before Start
}

// received is a copy of a received message.
type received struct {
	meta             van.Meta
	sender, receiver int
	frames           int
	data             [3][]byte
	placed           bool
	parts            []part
}

// part is a copy of a received part.
type part struct {
	van.Part
	vals   []byte
	placed bool
}

func (w *world) context() (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), Limit)
}

// make makes a node's van. id is its future node id.
func (w *world) make(id int) *node {
	w.Helper()
	n := &node{Van: w.suite.New(w.T), w: w, in: make(chan *received, 1<<16)}
	n.self = van.Node{Role: van.RoleOf(id), ID: id, Hostname: w.suite.Host, AuxID: -1}
	w.nodes = append(w.nodes, n)
	return n
}

// tryBind binds n, which does not know its id yet unless it is the scheduler.
func (n *node) tryBind() error {
	ctx, cancel := n.w.context()
	defer cancel()
	self := n.self
	if self.Role != van.Scheduler {
		self.ID = van.Empty
	}
	port, err := n.Bind(ctx, self)
	if err == nil {
		n.self.Port, n.self.Ports = port, []int32{int32(port)}
	}
	return err
}

// bind binds and starts. A nil recv collects in n.in.
func (n *node) bind(recv van.Receiver) {
	n.w.Helper()
	if err := n.tryBind(); err != nil {
		n.w.Fatalf("Bind(%s): %v", n.self.Addr(), err)
	}
	n.start(recv)
}

// start lets n, which has bound, receive.
func (n *node) start(recv van.Receiver) {
	if recv == nil {
		recv = n.collect
	}
	if n.knowsID {
		n.SetID(n.self.ID)
	}
	n.Start(recv)
}

// node makes, binds and starts a node that knows its id.
func (w *world) node(id int, recv van.Receiver) *node {
	w.Helper()
	n := w.make(id)
	n.knowsID = true
	n.bind(recv)
	return n
}

// pair makes a worker and a server that are linked, and may both send data.
func (w *world) pair() (worker, server *node) {
	w.Helper()
	worker, server = w.node(9, nil), w.node(8, nil)
	link(worker, server)
	w.greet([]*node{worker}, []*node{server})
	return worker, server
}

// connect connects n to peer under the peer's id.
func (n *node) connect(peer *node) {
	n.w.Helper()
	n.connectAs(peer.self.ID, peer)
}

func (n *node) connectAs(id int, peer *node) {
	n.w.Helper()
	ctx, cancel := n.w.context()
	defer cancel()
	if err := n.Connect(ctx, id, peer.self); err != nil {
		n.w.Fatalf("Connect(%d, %s): %v", id, peer.self.Addr(), err)
	}
}

// link connects both ways.
func link(a, b *node) {
	a.w.Helper()
	a.connect(b)
	b.connect(a)
}

// greet lets each worker send to each server, so that the servers can send data
// back. The servers must collect.
func (w *world) greet(workers, servers []*node) {
	w.Helper()
	for _, a := range workers {
		for _, b := range servers {
			a.must(data(b.self.ID, -1, true))
		}
	}
	for _, b := range servers {
		for range workers {
			b.next()
		}
	}
}

func (n *node) collect(m *van.Message) { n.in <- copyOf(m) }

func copyOf(m *van.Message) *received {
	r := &received{sender: m.Sender, receiver: m.Receiver, frames: m.Frames, placed: m.Placed}
	r.meta.CopyFrom(&m.Meta)
	for _, p := range m.Parts {
		r.parts = append(r.parts, part{p, slices.Clone(p.Vals.Host()), p.Placed})
	}
	for i := range m.Frames {
		r.data[i] = slices.Clone(m.Frame(i).Host())
	}
	return r
}

// next waits for the next message.
func (n *node) next() *received {
	n.w.Helper()
	select {
	case r := <-n.in:
		return r
	case <-time.After(Limit):
		n.w.Fatalf("%s received nothing within %s", van.NodeName(n.self.ID), Limit)
		return nil
	}
}

// send sends, waiting while the queue is full.
func (n *node) send(m *van.Message) error {
	for end := time.Now().Add(Limit); ; {
		err := n.Send(m)
		if !errors.Is(err, van.ErrQueueFull) || time.Now().After(end) {
			return err
		}
		time.Sleep(time.Millisecond) // a full queue has no signal to wait for
	}
}

func (n *node) must(m *van.Message) {
	n.w.Helper()
	if err := n.send(m); err != nil {
		n.w.Fatalf("Send to %s: %v", van.NodeName(m.Receiver), err)
	}
}

// close closes n's van within Limit.
func (n *node) close() {
	n.w.Helper()
	ctx, cancel := n.w.context()
	defer cancel()
	if err := n.Close(ctx); err != nil {
		n.w.Errorf("Close of %s: %v", van.NodeName(n.self.ID), err)
	}
}

// end closes all open nodes of the test and checks for leaks.
func (w *world) end() {
	// Nodes that resend wait for answers of the others: close them together.
	var all sync.WaitGroup
	for _, n := range w.nodes {
		all.Go(func() {
			ctx, cancel := w.context()
			defer cancel()
			_ = n.Close(ctx) // the tests of Close check its errors
		})
	}
	all.Wait()
	var left []string
	for end := time.Now().Add(20 * time.Second); ; {
		left = left[:0]
		for g := range stacks() {
			if !w.before[g] {
				left = append(left, g)
			}
		}
		if len(left) == 0 || time.Now().After(end) {
			break
		}
		time.Sleep(time.Millisecond) // the end of a goroutine has no signal
	}
	for _, g := range left {
		w.Errorf("goroutine leaked: %s", g)
	}
}

// stacks returns where each goroutine was created, with its number.
func stacks() map[string]bool {
	all := map[string]bool{}
	for _, g := range Stacks() {
		number, _, _ := strings.Cut(g, " [")
		_, creator, ok := strings.Cut(g, "created by ")
		if !ok || strings.HasPrefix(creator, "testing.") || strings.HasPrefix(creator, "runtime.") ||
			strings.Contains(creator, "os/signal") {
			continue
		}
		all[number+" created by "+creator] = true
	}
	return all
}

// Stacks are those of all goroutines, the caller's first.
func Stacks() []string {
	for buf := make([]byte, 1<<20); ; buf = make([]byte, 2*len(buf)) {
		if n := runtime.Stack(buf, true); n < len(buf) {
			return strings.Split(string(buf[:n]), "\n\n")
		}
	}
}

// data makes a data message as the kv layer does: a request from a worker to a
// server, or the response to one, with the given data frames.
func data(receiver, ts int, request bool, frames ...[]byte) *van.Message {
	m := &van.Message{}
	m.Reset()
	m.Receiver = receiver
	m.AppID, m.CustomerID, m.Head = 0, 0, 0
	m.Timestamp = int32(ts)
	m.Request, m.Push = request, true
	m.Frames = len(frames)
	for i, f := range frames {
		m.SetFrame(i, backend.Bytes(f))
		m.DataSize += int32(len(f))
		m.DataTypes = append(m.DataTypes, []van.DataType{van.TypeUint64, van.TypeOther, van.TypeInt32}[i])
	}
	return m
}

// control makes a control message.
func control(cmd van.Command, receiver, ts int) *van.Message {
	m := &van.Message{}
	m.Reset()
	m.Receiver = receiver
	m.Control.Cmd = cmd
	m.Timestamp = int32(ts)
	return m
}

// timeout returns a channel that is the same at each call, so that waiting in a
// loop does not allocate. It fires Limit after the first call.
func (w *world) timeout() <-chan time.Time {
	if w.expiry == nil {
		w.expiry = time.After(Limit)
	}
	return w.expiry
}

// waitAll waits for all of g.
func (w *world) waitAll(g *sync.WaitGroup, what string) {
	w.Helper()
	done := make(chan struct{})
	go func() { g.Wait(); close(done) }()
	w.wait(done, what)
}

// wait waits for c.
func (w *world) wait(c <-chan struct{}, what string) {
	w.Helper()
	select {
	case <-c:
	case <-time.After(Limit):
		w.Fatalf("no %s within %s", what, Limit)
	}
}
