package vantest

// Tests that frames and metas arrive intact, and of Done and Retain.

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"reflect"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// Pattern returns n bytes that depend on seed. The race detector does not check this function, since the checks would multiply its
// time, and no other goroutine has these bytes yet.
//
//go:norace
func Pattern(seed, n int) []byte {
	b := make([]byte, n)
	x := uint64(seed)*0x9e3779b97f4a7c15 + 1
	var w [8]byte
	for i := 0; i < n; i += 8 {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		binary.LittleEndian.PutUint64(w[:], x)
		copy(b[i:], w[:])
	}
	return b
}

func intact(w *world) {
	checkShapes(w, [][]int{{}, {8, 0}, {8, 1}, {8, 7}, {8, 64}, {16, 4096, 8}, {0, 0}, {0, 0, 0}, {8, 100_000, 4}, {8, 1 << 20}})
}

// large sends frames that exceed the transports' buffers. The race detector's time grows with the bytes.
func large(w *world) {
	first, second := 20<<20+1, 6<<20
	if Race {
		first, second = 5<<20+1, 3<<20
	}
	checkShapes(w, [][]int{{8, first}, {8, 1}, {8, second}})
}

// checkShapes sends messages with frames of these sizes to a server, which sends
// each back.
func checkShapes(w *world, shapes [][]int) {
	worker, server := w.pair()
	for i, shape := range shapes {
		var frames [][]byte
		for k, n := range shape {
			frames = append(frames, Pattern(10*i+k, n))
		}
		worker.must(data(8, i, true, frames...))
		r := server.next()
		checkFrames(w, fmt.Sprintf("request %v", shape), r, frames)
		server.must(data(9, i, false, r.data[:r.frames]...))
		checkFrames(w, fmt.Sprintf("response %v", shape), worker.next(), frames)
	}
}

func checkFrames(w *world, what string, r *received, want [][]byte) {
	w.Helper()
	if r.frames != len(want) {
		w.Fatalf("%s: %d frames, want %d", what, r.frames, len(want))
	}
	for i, f := range want {
		if !bytes.Equal(r.data[i], f) {
			w.Errorf("%s: frame %d has %d bytes that differ from the %d sent", what, i, len(r.data[i]), len(f))
		}
	}
}

func metaIntact(w *world) {
	worker, server, scheduler := w.node(9, nil), w.node(8, nil), w.node(1, nil)
	link(worker, server)
	link(worker, scheduler)

	m := data(8, 77, true, Pattern(1, 8), Pattern(2, 24))
	m.Head, m.CustomerID, m.Push = van.BatchEnd, 3, false
	m.Body = []byte("a body \x00 with anything")
	m.Src, m.Dst = backend.Device{Type: backend.CPU, ID: 2}, backend.Device{Type: backend.GPU, ID: 5}
	m.Key, m.Addr, m.ValLen, m.Option = 1<<63+5, 1<<62+9, 24, -4
	m.IsTensor, m.Dtype, m.Dim = true, 15, 3
	m.Shape = [van.MaxDims]int64{2, 3, 4}
	m.RequestTrace.Start = 12345
	worker.must(m)
	checkMeta(w, "data message", &server.next().meta, &m.Meta)

	for _, n := range []int{1, 64} {
		m = control(van.AddNode, 9, n)
		for i := range n {
			m.Control.Nodes = append(m.Control.Nodes, van.Node{Role: van.Server, ID: van.ServerID(i), Hostname: "host-" + fmt.Sprint(i),
				Ports: []int32{4000, 4001}, Port: 4000, DevTypes: []int32{1, 2}, DevIDs: []int32{0, 3}, IsRecovery: i%2 == 0,
				CustomerID: 0, Endpoint: []byte{1, 2, 3}, AuxID: i})
		}
		scheduler.must(m)
		checkMeta(w, fmt.Sprintf("table of %d nodes", n), &worker.next().meta, &m.Meta)
	}
	m = control(van.InstanceBarrier, 1, 3)
	m.Request, m.AppID, m.CustomerID, m.Control.BarrierGroup = true, 0, 0, 7
	worker.must(m)
	checkMeta(w, "barrier", &scheduler.next().meta, &m.Meta)
}

// checkMeta compares all fields except those that transports set or may not carry.
func checkMeta(w *world, what string, got, want *van.Meta) {
	w.Helper()
	norm := func(m *van.Meta) van.Meta {
		var c van.Meta
		c.CopyFrom(m)
		c.RequestTrace.PostSend, c.RequestTrace.PostRecv, c.RequestTrace.Process = 0, 0, 0
		c.ResponseTrace = van.Trace{}
		c.RequestTrace.PreStart = 0
		if len(c.Body) == 0 {
			c.Body = nil
		}
		if len(c.DataTypes) == 0 {
			c.DataTypes = nil
		}
		if len(c.Control.Nodes) == 0 {
			c.Control.Nodes = nil
		}
		for i := range c.Control.Nodes {
			n := &c.Control.Nodes[i]
			n.DevTypes, n.DevIDs, n.Endpoint = nil, nil, nil // only RDMA means something by them
		}
		return c
	}
	g, x := norm(got), norm(want)
	if !reflect.DeepEqual(g, x) {
		w.Errorf("%s: meta\n  %+v, want\n  %+v", what, g, x)
	}
}

func postSend(w *world) {
	worker, server := w.pair()
	worker.must(data(8, 0, true))
	r := server.next()
	server.must(data(9, 0, false))
	q := worker.next()
	if a, b := r.meta.RequestTrace, q.meta.ResponseTrace; a.PostSend == 0 || a.PostRecv < a.PostSend || b.PostSend == 0 || b.PostRecv < b.PostSend {
		w.Errorf("traces: request %+v, response %+v: want PostSend and a PostRecv that is not before", a, b)
	}
}

// overwrite writes other bytes than a test has sent. It copies, since the race detector watches a copy as one access.
func overwrite(b []byte) {
	other := bytes.Repeat([]byte{0xee}, min(len(b), 64<<10))
	for len(b) > 0 {
		b = b[copy(b, other):]
	}
}

// completion counts its calls.
type completion struct {
	count atomic.Int32
	first chan struct{}
	bytes []byte // overwritten at the first call
}

func newCompletion() *completion { return &completion{first: make(chan struct{})} }

func (c *completion) Sent() {
	if c.count.Add(1) == 1 {
		overwrite(c.bytes)
		close(c.first)
	}
}

// calledOnce checks that each of dones, those of messages of what, was called once.
func (w *world) calledOnce(what string, dones []*completion) {
	w.Helper()
	for i, c := range dones {
		w.wait(c.first, fmt.Sprintf("Done of message %d%s", i, what))
		if k := c.count.Load(); k != 1 {
			w.Errorf("Done of message %d%s was called %d times, want 1", i, what, k)
		}
	}
}

func done(w *world) {
	const n = 100
	var bad atomic.Int64
	var all sync.WaitGroup
	all.Add(n)
	server := w.node(8, func(m *van.Message) {
		if !bytes.Equal(m.Vals.Host(), Pattern(int(m.Timestamp), m.Vals.Len())) {
			bad.Add(1)
		}
		all.Done()
	})
	worker := w.node(9, nil)
	link(worker, server)
	var dones []*completion
	for i := range n {
		c := newCompletion()
		c.bytes = Pattern(i, 1+i*700)
		m := data(8, i, true, make([]byte, 8), c.bytes)
		m.Done = c
		worker.must(m)
		dones = append(dones, c)
	}
	w.waitAll(&all, "arrival of all messages")
	if b := bad.Load(); b > 0 {
		w.Errorf("%d of %d values changed: Done came before the transport was done", b, n)
	}
	for i, c := range dones {
		w.wait(c.first, fmt.Sprintf("Done of message %d", i))
	}
	worker.close()
	w.calledOnce("", dones)
}

// holder is memory with a reference count. The last Release overwrites the memory.
type holder struct {
	users atomic.Int32
	bytes []byte
	freed chan struct{}
}

func newHolder(b []byte) *holder {
	h := &holder{bytes: b, freed: make(chan struct{})}
	h.users.Store(1)
	return h
}

func (h *holder) Retain() { h.users.Add(1) }

func (h *holder) Release() {
	if h.users.Add(-1) == 0 {
		overwrite(h.bytes)
		close(h.freed)
	}
}

// holders sends memory that its owner frees at once, to a receiver that does not read at first. The transport must
// retain the memory of messages that it has not sent.
func holders(w *world) {
	// The values exceed the sockets' buffers. Over a lossy network they are sent repeatedly, and must fit into a peer's queue.
	n, size := 6, 4<<20
	switch {
	case w.suite.Lossy:
		size = 256 << 10
	case Race:
		n = 3
	}
	read := make(chan struct{})
	var bad atomic.Int64
	var all sync.WaitGroup
	all.Add(n)
	server := w.node(8, func(m *van.Message) {
		<-read
		if !bytes.Equal(m.Vals.Host(), Pattern(int(m.Timestamp), m.Vals.Len())) {
			bad.Add(1)
		}
		all.Done()
	})
	worker := w.node(9, nil)
	link(worker, server)
	var sent []*holder
	for i := range n {
		h := newHolder(Pattern(i, size))
		m := data(8, i, true, make([]byte, 8), h.bytes)
		m.Vals = backend.At(unsafe.Pointer(&h.bytes[0]), size, backend.Host, h)
		worker.must(m)
		h.Release()
		sent = append(sent, h)
	}
	close(read)
	w.waitAll(&all, "arrival of all messages")
	if b := bad.Load(); b > 0 {
		w.Errorf("%d of %d values changed: the transport has used memory that it had not retained", b, n)
	}
	worker.close()
	for i, h := range sent {
		w.wait(h.freed, fmt.Sprintf("the last Release of the memory of message %d", i))
	}
}

func retain(w *world) {
	held := make(chan *van.Message, 16)
	var rest atomic.Int64
	passed := make(chan struct{})
	const hold = 16
	more := int64(1000)
	if Race {
		more = 300
	}
	server := w.node(8, func(m *van.Message) {
		if m.Timestamp < hold {
			held <- m.Retain()
			return
		}
		if rest.Add(1) == more {
			close(passed)
		}
	})
	worker := w.node(9, nil)
	link(worker, server)
	size := func(i int) int { return []int{1, 100, 5000, 70_000}[i%4] }
	for i := range hold + int(more) {
		worker.must(data(8, i, true, Pattern(-i, 8), Pattern(i, size(i))))
	}
	w.wait(passed, "arrival of the other messages")
	for range hold {
		m := <-held
		i := int(m.Timestamp)
		if !bytes.Equal(m.Keys.Host(), Pattern(-i, 8)) || !bytes.Equal(m.Vals.Host(), Pattern(i, size(i))) || m.Sender != 9 {
			w.Errorf("retained message %d has changed", i)
		}
		m.Release()
	}
}
