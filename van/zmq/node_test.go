package zmq

import (
	"bytes"
	"context"
	"encoding/binary"
	"io"
	"net"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/auth"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/env"
)

// limit is how long anything may take.
const limit = 30 * time.Second

// node is a van under test with its record.
type node struct {
	*zvan
	self van.Node
	in   chan *van.Message // retained

	logged vantest.Log
}

// newNode makes a van that listens as id, of the given incarnation (0: one of the
// original). A nil recv collects in the node's channel.
func newNode(t *testing.T, id int, incarnation uint32, recv van.Receiver, edit func(*env.Config)) *node {
	t.Helper()
	return newNodeAt(t, id, incarnation, 0, recv, edit)
}

// newNodeAt is newNode with a port, 0 for any.
func newNodeAt(t *testing.T, id int, incarnation uint32, port int, recv van.Receiver, edit func(*env.Config)) *node {
	t.Helper()
	return newNodeWith(t, id, port, recv, edit, van.Options{Incarnation: incarnation})
}

// newNodeWith is newNodeAt with the options o, to which it adds the configuration, the log and the keys.
func newNodeWith(t *testing.T, id, port int, recv van.Receiver, edit func(*env.Config), o van.Options) *node {
	t.Helper()
	cfg, incarnation := env.Default(), o.Incarnation
	cfg.HeartbeatInterval, cfg.HeartbeatTimeout = 0, 0
	if edit != nil {
		edit(cfg)
	}
	n := &node{in: make(chan *van.Message, 1<<16)}
	keys, err := auth.Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	o.Config, o.Log, o.Keys = cfg, n.logged.Logger(), keys
	v, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	LongNets(v)
	n.zvan = v.(*zvan)
	n.self = van.Node{Role: van.RoleOf(id), ID: id, Hostname: "127.0.0.1", Port: port, AuxID: -1}
	self := n.self
	if self.Role != van.Scheduler {
		self.ID = van.Empty
	}
	if n.self.Port, err = v.Bind(t.Context(), self); err != nil {
		t.Fatal(err)
	}
	if incarnation != 0 {
		n.self.Endpoint = (&van.NodeExtension{Incarnation: incarnation}).Encode()
	}
	v.SetID(id)
	if recv == nil {
		recv = func(m *van.Message) { n.in <- m.Retain() }
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), limit)
		defer cancel()
		if err := v.Close(ctx); err != nil {
			t.Errorf("Close of %s: %v", van.NodeName(id), err)
		}
	})
	v.Start(recv)
	return n
}

// says checks that the log of n has a line.
func (n *node) says(t *testing.T, line string) {
	t.Helper()
	if !strings.Contains(n.logged.String(), line) {
		t.Errorf("the log does not say %q", line)
	}
}

// Connect makes the connection at once, also to a native node.
func (n *node) Connect(ctx context.Context, id int, peer van.Node) error {
	if err := n.zvan.Connect(ctx, id, peer); err != nil {
		return err
	}
	_, err := n.dial(id)
	return err
}

func (n *node) connect(t *testing.T, peer *node) {
	t.Helper()
	if err := n.Connect(t.Context(), peer.self.ID, peer.self); err != nil {
		t.Fatal(err)
	}
}

func link(t *testing.T, a, b *node) {
	t.Helper()
	a.connect(t, b)
	b.connect(t, a)
}

func (n *node) next(t *testing.T) *van.Message {
	t.Helper()
	select {
	case m := <-n.in:
		return m
	case <-time.After(limit):
		t.Fatalf("%s received nothing within %s", van.NodeName(n.self.ID), limit)
		return nil
	}
}

func (n *node) must(t *testing.T, m *van.Message) {
	t.Helper()
	if err := n.Send(m); err != nil {
		t.Fatal(err)
	}
}

// push makes a request to receiver with values.
func push(receiver, ts int, vals []byte) *van.Message {
	m := &van.Message{}
	m.Reset()
	m.Receiver, m.AppID, m.CustomerID, m.Head, m.Timestamp = receiver, 0, 0, 0, int32(ts)
	m.Request, m.Push = true, true
	m.Frames = 2
	m.Keys, m.Vals = backend.Bytes(make([]byte, 8)), backend.Bytes(vals)
	m.DataSize = int32(8 + len(vals))
	m.DataTypes = append(m.DataTypes, van.TypeUint64, van.TypeOther)
	return m
}

func heartbeat(receiver, ts int) *van.Message {
	m := &van.Message{}
	m.Reset()
	m.Receiver, m.Timestamp, m.Control.Cmd = receiver, int32(ts), van.Heartbeat
	return m
}

// packed is the meta of m as it travels.
func packed(t *testing.T, m *van.Message) []byte {
	t.Helper()
	b, err := m.AppendTo(nil)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// until polls ok, for conditions without a signal.
func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	vantest.Eventually(t, limit, what, ok)
}

// counter counts Sent.
type counter struct{ n atomic.Int64 }

func (c *counter) Sent() { c.n.Add(1) }

// raw is a connection that speaks ZMTP by hand.
type raw struct {
	net.Conn
	t *testing.T
}

// dialRaw connects to a node as a DEALER with that routing id.
func dialRaw(t *testing.T, n *node, id string) *raw {
	t.Helper()
	c, err := net.Dial("tcp", n.self.Addr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	r := &raw{c, t}
	if strings.HasPrefix(id, "ps") && strings.Count(id, ".") == 1 { // the name is for n
		id += "." + digits(n.incarnation)
	}
	r.shake("DEALER", id)
	return r
}

// shake does the handshake of ZMTP 3.0 with the NULL mechanism.
func (r *raw) shake(kind, id string) {
	r.t.Helper()
	if err := r.handshake(kind, id); err != nil {
		r.t.Fatal(err)
	}
}

// handshake is shake for goroutines that may outlast the test.
func (r *raw) handshake(kind, id string) error {
	_ = r.SetDeadline(time.Now().Add(limit))
	greeting := make([]byte, 64)
	greeting[0], greeting[9], greeting[10] = 0xff, 0x7f, 3
	copy(greeting[12:], "NULL")
	ready := []byte("\x05READY")
	for _, p := range [][2]string{{"Socket-Type", kind}, {"Identity", id}} {
		ready = append(ready, byte(len(p[0])))
		ready = append(ready, p[0]...)
		ready = binary.BigEndian.AppendUint32(ready, uint32(len(p[1])))
		ready = append(ready, p[1]...)
	}
	if _, err := r.Write(append(append(greeting, 4, byte(len(ready))), ready...)); err != nil {
		return err
	}
	var head [66]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return err
	}
	_, err := io.CopyN(io.Discard, r, int64(head[65]))
	return err
}

// frame is a frame as it travels.
func frame(b []byte, more bool) []byte {
	flags := byte(2)
	if more {
		flags |= 1
	}
	return append(binary.BigEndian.AppendUint64([]byte{flags}, uint64(len(b))), b...)
}

// send sends one message.
func (r *raw) send(frames ...[]byte) {
	r.t.Helper()
	var b bytes.Buffer
	for i, f := range frames {
		b.Write(frame(f, i < len(frames)-1))
	}
	if _, err := r.Write(b.Bytes()); err != nil {
		r.t.Fatal(err)
	}
}

// resident is the memory of this process, in bytes.
func resident(t *testing.T) int64 {
	t.Helper()
	b, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		t.Fatal(err)
	}
	n, err := strconv.ParseInt(strings.Fields(string(b))[1], 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return n * int64(os.Getpagesize())
}

// heapInUse is what Go's heap holds after a collection.
func heapInUse() uint64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// TestBytesCounted: both sides count the same bytes for a message, independent of the message before it.
func TestBytesCounted(t *testing.T) {
	server, worker := newNode(t, 8, 5, nil, nil), newNode(t, 9, 7, nil, nil)
	link(t, server, worker)
	for i, size := range []int{100_000, 10, 0, 3000} {
		for _, lens := range []bool{true, false} {
			m := push(8, i, make([]byte, size))
			if lens {
				m.Frames = 3
				m.SetFrame(2, backend.Bytes(make([]byte, 4)))
			}
			worker.must(t, m)
			server.next(t).Release()
			until(t, "as many bytes received as sent", func() bool { return worker.Stats().SentBytes == server.Stats().ReceivedBytes })
		}
	}
}
