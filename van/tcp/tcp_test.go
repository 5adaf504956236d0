package tcp

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"reflect"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/auth"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/engine"
	"github.com/stepaf/stepaf-go/van/env"
	"github.com/stepaf/stepaf-go/van/landing"
	"github.com/stepaf/stepaf-go/van/vantest"
	"github.com/stepaf/stepaf-go/van/zmq"
)

// limit is how long anything in these tests may take.
const limit = 20 * time.Second

// end is one node of a test.
type end struct {
	*Van
	t    *testing.T
	self van.Node
	in   chan *van.Message
	log  vantest.Log

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
	e.WatchPeers(func(id int, up bool, cause error) {
		e.mu.Lock()
		defer e.mu.Unlock()
		e.events = append(e.events, fmt.Sprintf("%d %t", id, up))
	})
	e.SetID(id)
	e.Start(func(m *van.Message) { e.in <- m.Retain() })
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

func pattern(n, seed int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i*31 + i>>8 + seed)
	}
	return b
}

// TestSizes: values of every length around the limits of buffers arrive as they were sent, alone and one after the other, pushed to a
// registered buffer, pulled into named memory, and without either.
func TestSizes(t *testing.T) { both(t, sizes) }

func sizes(t *testing.T, options func(*van.Options)) {
	worker, server := pair(t, options)
	sizes := []int{0, 1, 7, 33, 34, placeFrom - 1, placeFrom, lendFrom - 1, lendFrom, bufLen/2 - 400, bufLen / 2, bufLen - 1, bufLen, bufLen + 1, 3*bufLen + 5, readLimit + 77, 5 << 20}
	registered := make([]byte, 6<<20)
	for round := range 2 {
		for i, n := range sizes {
			worker.must(dataMessage(8, i, true, true, pattern(n, i)))
			pull := dataMessage(8, 100+i, true, false, nil)
			into := make([]byte, n)
			pull.Into = backend.Bytes(into)
			worker.must(pull)
			push := server.next()
			if got := push.Vals.Host(); !bytes.Equal(got, pattern(n, i)) || push.Placed != (round == 1 && n > 0) {
				t.Errorf("round %d: a push of %d bytes arrived as %d bytes, placed %t", round, n, len(got), push.Placed)
			}
			push.Release()
			server.next().Release()
			server.must(dataMessage(9, 100+i, false, false, pattern(n, i+1)))
			answer := worker.next()
			if got := answer.Vals.Host(); !bytes.Equal(got, pattern(n, i+1)) || answer.Placed != (n >= placeFrom) {
				t.Errorf("an answer of %d bytes arrived as %d bytes, placed %t", n, len(got), answer.Placed)
			} else if answer.Placed && !bytes.Equal(into, got) {
				t.Errorf("an answer of %d bytes is not in the memory of the request", n)
			}
			answer.Release()
		}
		if err := server.RegisterRecvBuffer(9, 1, backend.Bytes(registered)); err != nil {
			t.Fatal(err)
		}
	}
	if s := worker.Stats(); s.SentMessages != uint64(4*len(sizes)) {
		t.Errorf("sent %d messages, want %d", s.SentMessages, 4*len(sizes))
	}
}

// TestManyPartlyWritten: long and short messages follow each other while the receiver reads slowly, so that the
// socket accepts parts of messages. All arrive once, in order and intact, and each lent value is released.
func TestManyPartlyWritten(t *testing.T) { both(t, manyPartlyWritten) }

func manyPartlyWritten(t *testing.T, options func(*van.Options)) {
	worker, server := pair(t, options)
	var done atomic.Int32
	const count = 400
	go func() {
		for i := range count {
			m := dataMessage(8, i, true, true, pattern((i*7919)%200000, i))
			m.Done = counter{&done}
			if err := worker.Send(m); err != nil {
				t.Errorf("message %d: %v", i, err)
			}
		}
	}()
	for i := range count {
		m := server.next()
		if int(m.Timestamp) != i || !bytes.Equal(m.Vals.Host(), pattern((i*7919)%200000, i)) {
			t.Fatalf("message %d arrived as %d, %d bytes", i, m.Timestamp, m.Vals.Len())
		}
		m.Release()
	}
	vantest.Eventually(t, limit, "all values are given back", func() bool { return done.Load() == count })
}

type counter struct{ n *atomic.Int32 }

func (c counter) Sent() { c.n.Add(1) }

// stuck makes a server whose receiver does not take anything until open is called.
func stuck(t *testing.T, options func(*van.Options)) (worker, server *end, open func()) {
	worker, server = pair(t, options)
	gate := make(chan struct{})
	server.source.deliver = func(m *van.Message) {
		<-gate
		server.in <- m.Retain()
	}
	open = sync.OnceFunc(func() { close(gate) })
	t.Cleanup(open)
	return worker, server, open
}

// TestCancel: the memory of canceled requests is the caller's again. A message of which a part was written arrives as it was sent,
// the others do not arrive.
func TestCancel(t *testing.T) { both(t, cancelQueued) }

func cancelQueued(t *testing.T, options func(*van.Options)) {
	worker, server, open := stuck(t, func(o *van.Options) { options(o); o.Config.RecvBudgetPeer = 1 << 20 })
	var done atomic.Int32
	const count, size = 12, 4 << 20
	values := make([][]byte, count)
	for i := range values {
		values[i] = pattern(size, i)
		m := dataMessage(8, i, true, true, values[i])
		m.Done = counter{&done}
		worker.must(m)
	}
	before := int(done.Load())
	worker.Cancel(van.Requests{First: 0, Count: count})
	if n := done.Load(); n != count {
		t.Errorf("%d of %d values were given back", n, count)
	}
	for _, b := range values {
		clear(b)
	}
	worker.must(dataMessage(8, count, true, true, []byte("last")))
	open()
	got := 0
	for {
		m := server.next()
		if m.Timestamp == count {
			break
		}
		if !bytes.Equal(m.Vals.Host(), pattern(size, int(m.Timestamp))) {
			t.Errorf("message %d arrived with other bytes", m.Timestamp)
		}
		got++
		m.Release()
	}
	if got < before || got > before+1 || got == count {
		t.Errorf("%d messages arrived, %d had been written completely before", got, before)
	}
}

// TestCancelAnywhere: a request is canceled after each possible number of its bytes was written. If no byte was written, none is sent.
// Otherwise the rest is sent from a copy. The next message follows intact.
func TestCancelAnywhere(t *testing.T) {
	next := dataMessage(8, 2, true, true, []byte("next"))
	queue := func(messages ...*van.Message) *outConn {
		c := newOutConn(&common{cfg: env.Default()}, 8, -1, nil)
		c.blocked = true // the test takes the bytes in place of the socket
		for _, m := range messages {
			if err := c.send(m); err != nil {
				t.Fatal(err)
			}
		}
		return c
	}
	long := func(value []byte) *van.Message { return dataMessage(8, 1, true, true, value) }
	rest, whole := unwritten(queue(next)), unwritten(queue(long(pattern(lendFrom, 1)), next))
	front := len(whole) - len(rest) - lendFrom
	for _, n := range append(rangeTo(front+2), front+lendFrom-1, front+lendFrom, front+lendFrom+1) {
		value, done := pattern(lendFrom, 1), atomic.Int32{}
		m := long(value)
		m.Done = counter{&done}
		c := queue(m, next)
		c.written(n)
		c.cancel(&van.Requests{First: 1, Count: 1})
		if done.Load() != 1 {
			t.Errorf("canceled after %d bytes: the value was given back %d times", n, done.Load())
		}
		clear(value)
		want := whole[n:]
		if n == 0 {
			want = rest
		}
		got := unwritten(c)
		if !bytes.Equal(got, want) {
			t.Errorf("canceled after %d bytes of %d: %d bytes follow, want %d", n, front+lendFrom, len(got), len(want))
		}
		if c.written(len(got)); c.unsent() != 0 || len(c.queue) != 0 {
			t.Errorf("canceled after %d bytes: %d bytes and %d messages count as unsent at the end", n, c.unsent(), len(c.queue))
		}
	}
}

// TestCancelOthers: only the named requests are canceled. Other requests, requests of other applications and customers, and answers
// stay in the queue.
func TestCancelOthers(t *testing.T) {
	const first, count, app, customer = 10, 2, 3, 4
	c := newOutConn(&common{cfg: env.Default()}, 8, -1, nil)
	c.blocked = true
	dones := map[string]*atomic.Int32{}
	add := func(name string, ts int, app, customer int32, request bool) {
		m := dataMessage(8, ts, request, true, pattern(lendFrom, ts))
		m.AppID, m.CustomerID = app, customer
		dones[name] = new(atomic.Int32)
		m.Done = counter{dones[name]}
		if err := c.send(m); err != nil {
			t.Fatal(err)
		}
	}
	canceled := []string{"first", "last"}
	add("the request before", first-1, app, customer, true)
	add("first", first, app, customer, true)
	add("another application", first, app+1, customer, true)
	add("another customer", first, app, customer+1, true)
	add("an answer", first, app, customer, false)
	add("last", first+count-1, app, customer, true)
	add("the request after", first+count, app, customer, true)
	c.cancel(&van.Requests{App: app, Customer: customer, First: first, Count: count})
	for name, n := range dones {
		if is := n.Load() == 1; is != slices.Contains(canceled, name) {
			t.Errorf("%s: canceled %t", name, is)
		}
	}
	if want := (len(dones) - len(canceled)) * lendFrom; c.lent != want {
		t.Errorf("%d bytes of values are unsent, want %d", c.lent, want)
	}
}

func rangeTo(n int) (l []int) {
	for i := range n {
		l = append(l, i)
	}
	return l
}

// unwritten returns the bytes that c has not written.
func unwritten(c *outConn) (b []byte) {
	for _, v := range c.iov[:c.parts()] {
		b = append(b, unsafe.Slice(v.Base, v.Len)...)
	}
	return b
}

// TestInvalidate: when Invalidate has returned, an answer that arrives, whole or in parts, is not written to the memory.
func TestInvalidate(t *testing.T) { both(t, invalidate) }

func invalidate(t *testing.T, options func(*van.Options)) {
	worker, server := pair(t, options)
	const size = 1 << 20
	into := make([]byte, size)
	for _, early := range []bool{false, true} {
		pull := dataMessage(8, 1, true, false, nil)
		pull.Into = backend.Bytes(into)
		worker.must(pull)
		server.next().Release()
		if early {
			worker.Invalidate(backend.Bytes(into))
			server.must(dataMessage(9, 1, false, false, pattern(size, 3)))
			if m := worker.next(); m.Placed {
				t.Error("an answer is in memory that was taken back")
			}
		} else { // in the middle of the value
			raw := rawAnswer(t, server, worker, 1, pattern(size, 3))
			raw.write(size / 2)
			vantest.Eventually(t, limit, "the first half arrives", func() bool { return worker.lacks(size / 2) })
			worker.Invalidate(backend.Bytes(into))
			clear(into)
			raw.write(size)
			_ = raw.c.Close() // until then, the process's next connection is not read
			server.must(dataMessage(9, 2, false, false, []byte("next")))
			if m := worker.next(); m.Timestamp != 2 {
				t.Errorf("message %d arrived, want that of the canceled request dropped", m.Timestamp)
			}
		}
		if !bytes.Equal(into, make([]byte, size)) {
			t.Error("memory that was taken back was written to")
		}
	}
}

// TestInvalidatedOnArrival: memory is taken back between the arrival of an answer's head and the copy of those bytes of the value that arrived with
// it. These bytes and the rest of the value are dropped, and the next message arrives intact.
func TestInvalidatedOnArrival(t *testing.T) {
	const size, early = 2 * bufLen, 1000
	v := start(t, 9, nil)
	into := make([]byte, size)
	pull := dataMessage(8, 1, true, false, nil)
	pull.Into = backend.Bytes(into)
	if !v.own.places.Expect(pull) {
		t.Fatal("the answer has no place")
	}
	p := v.own.get()
	answer := dataMessage(9, 1, false, false, nil)
	answer.Sender = 8
	dst, placed := v.own.places.Find(answer, 0, size, p.spot(), false)
	if !placed {
		t.Fatal("the answer's place is not found")
	}
	v.Invalidate(backend.Bytes(into))
	c := &inConn{n: &v.own, from: &sender{id: 8}, buf: make([]byte, bufLen), w: early, cur: p, place: p.spots[0], rest: dst.Host()}
	copy(c.buf, pattern(early, 1))
	if c.fillValues() != nil || c.r != c.w || c.discard != size-early {
		t.Errorf("%d of %d bytes were taken, %d more are to be dropped, want %d", c.r, c.w, c.discard, size-early)
	}
	c.discard, c.r, c.w = early, 0, early+headLen
	if c.fillValues() != p || c.r != early {
		t.Errorf("the next message begins at byte %d, want %d", c.r, early)
	}
	if !bytes.Equal(into, make([]byte, size)) {
		t.Error("memory that was taken back was written to")
	}
}

// lacks reports whether the message that e is receiving lacks n bytes of its value.
func (e *end) lacks(n int) bool {
	e.peers.mu.Lock()
	defer e.peers.mu.Unlock()
	return slices.ContainsFunc(e.peers.ins, func(c *inConn) bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.cur != nil && len(c.rest) == n
	})
}

// raw writes the bytes of a message over a connection of its own.
type raw struct {
	t     *testing.T
	c     net.Conn
	bytes []byte
	done  int
}

// rawAnswer makes a connection in the name of from, which sends an answer.
func rawAnswer(t *testing.T, from, to *end, ts int, value []byte) *raw {
	t.Helper()
	c := dialRaw(t, from, to)
	m := dataMessage(to.self.ID, ts, false, false, nil)
	meta, err := m.AppendTo(nil)
	if err != nil {
		t.Fatal(err)
	}
	h := head{meta: len(meta), keys: 8, frames: 2, vals: len(value)}
	b := append(h.append(nil), meta...)
	b = append(b, m.Keys.Host()...)
	return &raw{t: t, c: c, bytes: append(b, value...)}
}

func dialRaw(t *testing.T, from, to *end) net.Conn {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	who, _ := to.self.Extension()
	c, err := from.own.meet(ctx, &callee{dataAddr(to), who.Incarnation, "the test's peer", false})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(limit))
	return c
}

func dataAddr(e *end) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(e.DataPort())) }

// write writes the bytes up to value byte n.
func (r *raw) write(n int) {
	r.t.Helper()
	end := min(len(r.bytes), len(r.bytes)-1<<20+n)
	if _, err := r.c.Write(r.bytes[r.done:end]); err != nil {
		r.t.Fatal(err)
	}
	r.done = end
}

// TestReplaced: when another process has a peer's id, nothing more of the former process is delivered, its connections end, and it
// gets no new ones.
func TestReplaced(t *testing.T) { both(t, replaced) }

func replaced(t *testing.T, options func(*van.Options)) {
	worker, server := pair(t, options)
	worker.must(dataMessage(8, 1, true, true, []byte("before")))
	server.next().Release()
	other := start(t, 9, options)
	other.connect(server)
	server.connect(other)
	server.Admit(9)
	vantest.Eventually(t, limit, "the former process loses its connection", func() bool { return worker.told("8 false") })
	vantest.Eventually(t, limit, "it is told why", func() bool { return strings.Contains(worker.log.String(), "takes no data of this process any more") })
	if err := worker.Send(dataMessage(8, 2, true, true, []byte("late"))); !errors.Is(err, van.ErrPeerLost) {
		t.Errorf("the replaced process sends: %v", err)
	}
	other.must(dataMessage(8, 3, true, true, []byte("other")))
	if m := server.next(); m.Timestamp != 3 || m.Sender != 9 {
		t.Errorf("message %d of %d arrived, want 3 of 9", m.Timestamp, m.Sender)
	}
}

// TestNotBeforeAdmit: messages of a replacement process wait for Admit.
func TestNotBeforeAdmit(t *testing.T) { both(t, notBeforeAdmit) }

func notBeforeAdmit(t *testing.T, options func(*van.Options)) {
	worker, server := pair(t, options)
	worker.must(dataMessage(8, 1, true, true, []byte("before")))
	server.next().Release()
	other := start(t, 9, options)
	other.connect(server)
	other.must(dataMessage(8, 2, true, true, []byte("of another process")))
	vantest.Eventually(t, limit, "its connection is there", func() bool {
		server.peers.mu.Lock()
		defer server.peers.mu.Unlock()
		for _, c := range server.peers.ins {
			if c.held {
				return true
			}
		}
		return false
	})
	worker.must(dataMessage(8, 3, true, true, []byte("of the first one")))
	if m := server.next(); m.Timestamp != 3 {
		t.Errorf("message %d arrived, want 3", m.Timestamp)
	}
	server.connect(other)
	server.Admit(9)
	if m := server.next(); m.Timestamp != 2 {
		t.Errorf("message %d arrived, want 2", m.Timestamp)
	}
}

// TestAdmittedByTime: a replacement process is admitted without Admit after holdTime.
func TestAdmittedByTime(t *testing.T) {
	worker, server := pair(t, nil)
	other := start(t, 9, nil)
	server.connect(other)
	admitted := func() bool {
		server.peers.mu.Lock()
		defer server.peers.mu.Unlock()
		return server.peers.of(9).admitted
	}
	vantest.Eventually(t, limit, "its admission", admitted)
	other.connect(server)
	other.must(dataMessage(8, 1, true, true, []byte("other")))
	server.next().Release()
	server.connect(worker)
	server.connect(worker)
	if admitted() {
		t.Error("a process that replaces another one was admitted at once")
	}
}

// TestBrokenConnection: a connection that breaks is reported, made again, and reported again.
func TestBrokenConnection(t *testing.T) { both(t, brokenConnection) }

func brokenConnection(t *testing.T, options func(*van.Options)) {
	worker, server := pair(t, options)
	worker.must(dataMessage(8, 1, true, true, []byte("before")))
	server.next().Release()
	vantest.Eventually(t, limit, "the transport inside is connected", func() bool { return worker.told("8 true") })
	worker.mu.Lock()
	worker.events = nil
	worker.mu.Unlock()
	server.peers.mu.Lock()
	_ = unix.Shutdown(server.peers.ins[0].fd, unix.SHUT_RDWR)
	server.peers.mu.Unlock()
	vantest.Eventually(t, limit, "the loss and the return are reported", func() bool { return worker.told("8 false", "8 true") })
	worker.must(dataMessage(8, 2, true, true, []byte("after")))
	if m := server.next(); m.Timestamp != 2 {
		t.Errorf("message %d arrived, want 2", m.Timestamp)
	}
}

// TestLostOnTheWay: messages are lost with the connection that they were sent over. The receiver reports the loss, too, before it delivers
// messages of the next connection, and delivers no further message of the first one.
func TestLostOnTheWay(t *testing.T) { both(t, lostOnTheWay) }

func lostOnTheWay(t *testing.T, options func(*van.Options)) {
	worker, server, open := stuck(t, func(o *van.Options) { options(o); o.Config.RecvBudgetPeer = 1 << 20 })
	vantest.Eventually(t, limit, "the transport inside is connected", func() bool { return server.told("9 true") || worker.told("8 true") })
	for i := range 4 {
		worker.must(dataMessage(8, i, true, true, pattern(8<<20, i)))
	}
	c := worker.peers.of(8).conn.Load()
	_ = unix.Shutdown(c.fd, unix.SHUT_RDWR)
	vantest.Eventually(t, limit, "the sender reports the loss and the return", func() bool { return worker.told("8 false", "8 true") })
	worker.must(dataMessage(8, 5, true, true, []byte("after")))
	vantest.Eventually(t, limit, "the receiver reports them", func() bool { return server.told("9 false", "9 true") })
	open()
	m := server.next()
	if m.Timestamp == 0 { // message 0 was being delivered
		m = server.next()
	}
	if m.Timestamp != 5 {
		t.Errorf("message %d arrived after the loss was reported, want 5", m.Timestamp)
	}
}

// TestNoDataPort: data to a peer whose data port does not answer goes over the van inside, and the log says why.
func TestNoDataPort(t *testing.T) {
	worker, server := start(t, 9, nil), start(t, 8, nil)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_ = l.Close()
	who, _ := server.self.Extension()
	who.DataPort = uint16(l.Addr().(*net.TCPAddr).Port)
	server.self.Endpoint = who.Encode()
	worker.connect(server)
	server.connect(worker)
	for i := range 3 {
		worker.must(dataMessage(8, i, true, true, pattern(100, i)))
		if m := server.next(); int(m.Timestamp) != i {
			t.Errorf("message %d arrived, want %d", m.Timestamp, i)
		}
	}
	if path := van.PathTo(worker, 8).Over; path != "zmq" {
		t.Errorf("data goes over %s, want zmq", path)
	}
	if !strings.Contains(worker.log.String(), "data goes over zmq, not over tcp") {
		t.Errorf("the log does not say why:\n%s", worker.log.String())
	}
}

// TestSendBudget: for a peer that does not read, STEPAF_SEND_BUDGET bytes are accepted.
func TestSendBudget(t *testing.T) { both(t, sendBudget) }

func sendBudget(t *testing.T, options func(*van.Options)) {
	for _, size := range []int{1 << 20, lendFrom / 2} { // values that are written from where they lie, and values that are copied
		worker, _, open := stuck(t, func(o *van.Options) { options(o); o.Config.SendBudget, o.Config.RecvBudgetPeer = 8<<20, 1<<20 })
		var err error
		for i := 0; err == nil && i < 200<<20/size; i++ {
			err = worker.Send(dataMessage(8, i, true, true, pattern(size, i)))
		}
		vantest.Fails(t, err, van.ErrQueueFull, "STEPAF_SEND_BUDGET", "8388608")
		if n := worker.Stats().RefusedSends; n != 1 {
			t.Errorf("values of %d bytes: counted %d refused messages, want 1", size, n)
		}
		pull := dataMessage(8, 1<<20, true, false, nil)
		pull.Into = backend.Bytes(make([]byte, placeFrom))
		vantest.Fails(t, worker.Send(pull), van.ErrQueueFull)
		if n := worker.own.places.Expected(); n != 0 {
			t.Errorf("answers to %d pulls are expected, and none was sent", n)
		}
		open()
	}
}

// TestFull: a connection accepts messages until the budget or the number of messages is used up. Every unsent byte counts.
func TestFull(t *testing.T) {
	const budget = 1000
	for _, c := range []struct {
		budget, encoded, written, lent, messages int
		full                                     bool
	}{
		{budget, budget - 1, 0, 0, 1, false},
		{budget, budget, 0, 0, 1, true},
		{budget, budget, 1, 0, 1, false},
		{budget, 0, 0, budget - 1, 1, false},
		{budget, 0, 0, budget, 1, true},
		{budget, budget / 2, 0, budget / 2, 1, true},
		{budget, 0, 0, 0, maxQueue - 1, false},
		{budget, 0, 0, 0, maxQueue, true},
		{0, budget, 0, budget, maxQueue - 1, false},
		{0, 0, 0, 0, maxQueue, true},
	} {
		cfg := env.Default()
		cfg.SendBudget = c.budget
		o := newOutConn(&common{cfg: cfg}, 8, -1, nil)
		o.buf, o.read, o.lent, o.queue = make([]byte, c.encoded), c.written, c.lent, make([]outEntry, c.messages)
		if o.full() != c.full {
			t.Errorf("%+v: full %t", c, o.full())
		}
	}
}

// TestStrangers: connections that prove nothing, are cut off, replay a handshake, reflect it, or are for another process end without a
// message, and members go on.
func TestStrangers(t *testing.T) {
	k, err := auth.New([]byte("a secret of at least sixteen bytes"), "", true)
	if err != nil {
		t.Fatal(err)
	}
	worker, server := pair(t, func(o *van.Options) { o.Keys = k })
	who, _ := server.self.Extension()
	me, _ := worker.self.Extension()
	good := hello{id: 9, own: me.Incarnation, peer: who.Incarnation, proves: true, number: newNumber()}
	unproved := good
	unproved.proves = false
	elsewhere := good
	elsewhere.peer++
	noID := good
	noID.id = 1
	proof := k.Proof(dialerProof, good.number[:], good.number[:], good.append(nil)) // of another number of the listener
	strangers := map[string][]byte{
		"noise":             bytes.Repeat([]byte("GET / HTTP/1.1\r\n"), 4),
		"zeros":             make([]byte, 200),
		"nothing":           {},
		"cut in the hello":  good.append(nil)[:20],
		"unproved":          unproved.append(nil),
		"for another":       elsewhere.append(nil),
		"a scheduler":       noID.append(nil),
		"another version":   append([]byte("SAFT\x63\x00\x00\x00"), good.append(nil)[8:]...),
		"replayed proof":    append(good.append(nil), proof[:]...),
		"cut in the proof":  append(good.append(nil), proof[:3]...),
		"message, no proof": append(good.append(nil), make([]byte, 4096)...),
	}
	for name, text := range strangers {
		c, err := net.Dial("tcp", dataAddr(server))
		if err != nil {
			t.Fatal(err)
		}
		_ = c.SetDeadline(time.Now().Add(limit))
		if _, err := c.Write(text); err != nil && !errors.Is(err, syscall.ECONNRESET) && !errors.Is(err, syscall.EPIPE) {
			t.Errorf("%s: %v", name, err)
		}
		_ = c.(*net.TCPConn).CloseWrite()
		b, _ := io.ReadAll(c)
		if len(b) > replyLen+4 || len(b) == replyLen+4 && verdict(binary.LittleEndian.Uint32(b[replyLen:])) == verdictYes {
			t.Errorf("%s: was admitted: % x", name, b)
		}
		_ = c.Close()
	}
	worker.must(dataMessage(8, 1, true, true, []byte("member")))
	if m := server.next(); string(m.Vals.Host()) != "member" {
		t.Errorf("%q arrived", m.Vals.Host())
	}
	vantest.Eventually(t, limit, "each is counted", func() bool { return server.Stats().Unauthenticated >= uint64(len(strangers)) })
	if n := server.Stats().Unauthenticated; n != uint64(len(strangers)) {
		t.Errorf("counted %d connections without proof, want %d", n, len(strangers))
	}
	if text := server.log.String(); strings.Contains(text, "sixteen") {
		t.Errorf("the log has the secret:\n%s", text)
	}
}

// TestClass: packets to a peer have its traffic class, over a connection that exists, that is made later, and that is made again.
func TestClass(t *testing.T) {
	worker, server := pair(t, nil)
	ts := 0
	exchange := func() {
		t.Helper()
		ts++
		worker.must(dataMessage(8, ts, true, true, nil))
		server.next().Release()
	}
	has := func(when string, class int) {
		t.Helper()
		tos, err := unix.GetsockoptInt(worker.peers.of(8).conn.Load().fd, unix.IPPROTO_IP, unix.IP_TOS)
		if err != nil || tos != class<<2 {
			t.Errorf("%s: the connection has class %d, %v, want %d", when, tos>>2, err, class)
		}
		if now, ever := worker.TrafficClassApplied(8); !ever {
			t.Errorf("%s: applied %t, ever %t", when, now, ever)
		}
	}
	worker.SetTrafficClasses(map[int]int{8: 46, 10: 1})
	exchange()
	has("set before the connection", 46)
	worker.SetTrafficClasses(map[int]int{8: 10})
	has("changed", 10)
	before := worker.peers.of(8).conn.Load()
	server.peers.mu.Lock()
	_ = unix.Shutdown(server.peers.ins[0].fd, unix.SHUT_RDWR)
	server.peers.mu.Unlock()
	vantest.Eventually(t, limit, "another connection", func() bool { return worker.peers.of(8).conn.Load() != before })
	exchange()
	has("after a break", 10)
	worker.SetTrafficClasses(nil)
	has("removed", 0)
}

// TestForgets: the place for an answer is released when its peer is lost or disconnected.
func TestForgets(t *testing.T) {
	for name, leave := range map[string]func(worker *end){
		"lost":         func(worker *end) { _ = unix.Shutdown(worker.peers.of(8).conn.Load().fd, unix.SHUT_RDWR) },
		"disconnected": func(worker *end) { worker.Disconnect(8) },
	} {
		t.Run(name, func(t *testing.T) {
			worker, server := pair(t, nil)
			pull := dataMessage(8, 1, true, false, nil)
			pull.Into = backend.Bytes(make([]byte, 1<<20))
			worker.must(pull)
			server.next().Release()
			if n := worker.own.places.Expected(); n != 1 {
				t.Fatalf("%d places, want 1", n)
			}
			leave(worker)
			vantest.Eventually(t, limit, "it is forgotten", func() bool { return worker.own.places.Expected() == 0 })
		})
	}
}

// TestHalfOpen: thousands of connections without a handshake do not keep a member out.
func TestHalfOpen(t *testing.T) { both(t, halfOpen) }

func halfOpen(t *testing.T, options func(*van.Options)) {
	server := start(t, 8, options)
	var conns []net.Conn
	defer func() {
		for _, c := range conns {
			_ = c.Close()
		}
	}()
	for range 3 * maxHandshakes {
		c, err := net.Dial("tcp", dataAddr(server))
		if err != nil {
			t.Skipf("this machine has no more connections: %v", err)
		}
		conns = append(conns, c)
	}
	worker := start(t, 9, options)
	worker.connect(server)
	server.connect(worker)
	begun := time.Now()
	worker.must(dataMessage(8, 1, true, true, []byte("member")))
	server.next().Release()
	if path := van.PathTo(worker, 8).Over; path != "tcp" {
		t.Errorf("data goes over %s after %s", path, time.Since(begun))
	}
	server.acceptor.mu.Lock()
	n := server.acceptor.conns.Len()
	server.acceptor.mu.Unlock()
	if n > maxHandshakes {
		t.Errorf("%d handshakes are under way, want at most %d", n, maxHandshakes)
	}
}

// silentConn is a connection that sends nothing. It ends when its deadline has been set, and counts reads before that.
type silentConn struct {
	net.Conn
	deadline time.Time
	early    int
	closed   bool
}

func (c *silentConn) Read([]byte) (int, error) {
	if c.deadline.IsZero() {
		c.early++
	}
	return 0, os.ErrDeadlineExceeded
}

func (c *silentConn) SetDeadline(at time.Time) error { c.deadline = at; return nil }
func (c *silentConn) RemoteAddr() net.Addr           { return &net.TCPAddr{} }
func (c *silentConn) Close() error                   { c.closed = true; return nil }

// TestOldestHandshakeEnds: if there are too many handshakes, the oldest one ends.
func TestOldestHandshakeEnds(t *testing.T) {
	const more = 3
	a, conns := acceptor{}, make([]*silentConn, maxHandshakes+more)
	for i := range conns {
		conns[i] = &silentConn{}
		if a.enter(conns[i]) == nil {
			t.Fatalf("connection %d is refused", i)
		}
	}
	for i, c := range conns {
		if c.closed != (i < more) {
			t.Errorf("connection %d of %d: ended %t", i, len(conns), c.closed)
		}
	}
}

// TestSilentDialer: a connection without a handshake has a deadline before anything is read from it, and ends.
func TestSilentDialer(t *testing.T) {
	server := start(t, 8, nil)
	c := &silentConn{}
	before := time.Now()
	server.acceptor.serve(c)
	if c.early > 0 || c.deadline.Before(before) || c.deadline.After(time.Now().Add(handshakeTime)) {
		t.Errorf("read %d times without a deadline; the deadline is %v after the start, want at most %v", c.early, c.deadline.Sub(before), handshakeTime)
	}
	if !c.closed {
		t.Error("the connection is open")
	}
}

// TestHeldAreFew: processes that this node does not know keep a bounded number of connections, the newest, and members go on.
func TestHeldAreFew(t *testing.T) {
	worker, server := pair(t, nil)
	p := server.peers
	for i := range maxHeld + 10 {
		fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
		if err != nil {
			t.Skipf("this machine has no more descriptors: %v", err)
		}
		if v := p.enter(&inConn{n: &server.own, from: p.sender(11), incarnation: uint32(1<<20 + i), fd: fd}, false); v != verdictYes {
			t.Fatalf("connection %d: verdict %d", i, v)
		}
	}
	p.mu.Lock()
	n, first := len(p.ins), p.ins[0].incarnation
	p.mu.Unlock()
	if n != maxHeld || first != 1<<20+10 {
		t.Errorf("%d connections wait, the first is number %d; want %d and number 10", n, first-1<<20, maxHeld)
	}
	worker.must(dataMessage(8, 1, true, true, []byte("member")))
	server.next().Release()
}

// TestEndOfHold: when its time is over, a connection that waits is read if this node knows its process, and otherwise ends.
func TestEndOfHold(t *testing.T) {
	for name, c := range map[string]struct {
		known *peer // under the id of the connection's process
		timer bool  // the test waits for the end of the time
		reads bool
	}{
		"no process has the id":                      {nil, false, false},
		"another process has the id":                 {&peer{incarnation: 2, admitted: true}, false, false},
		"the process is known, and was not admitted": {&peer{incarnation: 1}, false, true},
		"the time passes":                            {&peer{incarnation: 1}, true, true},
	} {
		t.Run(name, func(t *testing.T) {
			server := start(t, 8, nil)
			p, read := server.peers, 0
			p.read = func(*inConn) error { read++; return nil }
			if c.known != nil {
				c.known.id.Store(9)
				p.change(func(all map[int]*peer) { all[9] = c.known })
			}
			fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
			if err != nil {
				t.Fatal(err)
			}
			in := &inConn{n: &server.own, from: p.sender(9), incarnation: 1, fd: fd}
			if v := p.enter(in, false); v != verdictYes {
				t.Fatalf("verdict %d, want a connection that waits", v)
			}
			held := func() bool {
				p.mu.Lock()
				defer p.mu.Unlock()
				return in.held
			}
			if c.timer {
				vantest.Eventually(t, limit, "the end of the time", func() bool { return !held() })
			} else if !held() {
				t.Fatal("it does not wait")
			}
			p.endHold(in)
			p.mu.Lock()
			defer p.mu.Unlock()
			if in.held || (read == 1) != c.reads || (len(p.ins) == 1) != c.reads {
				t.Errorf("held %t, read %d times, %d connections; want it to be read: %t", in.held, read, len(p.ins), c.reads)
			}
		})
	}
}

// TestBusyPeer: a peer whose socket is never empty does not delay the messages of another peer, whether its messages are short or long.
func TestBusyPeer(t *testing.T) {
	for _, c := range []struct{ size, count, most int }{{1000, 900, 300}, {300 << 10, 40, 20}} {
		server, busy, other := start(t, 8, nil), start(t, 9, nil), start(t, 11, nil)
		for _, e := range []*end{busy, other} {
			e.connect(server)
			server.connect(e)
			e.must(dataMessage(8, 0, true, true, []byte("first")))
			server.next().Release()
		}
		s := &server.source
		s.feed.Lock()
		for i := range c.count {
			busy.must(dataMessage(8, i, true, true, pattern(c.size, i)))
		}
		take := func() (sender int) {
			vantest.Eventually(t, limit, "a message", func() bool {
				p, _, found := s.Take(0, false)
				if found == engine.Message {
					sender = p.msg.Sender
					s.Discard(p)
				}
				return found == engine.Message
			})
			return sender
		}
		take()
		other.must(dataMessage(8, 1, true, true, []byte("second")))
		before := 0
		for before < c.most && take() == 9 {
			before++
		}
		s.feed.Unlock()
		if before == c.most {
			t.Errorf("%d messages of %d bytes of the busy peer arrived before that of the other one", before, c.size)
		}
	}
}

// TestLongMeta: the body of a simple message may be as long as over the other transports.
func TestLongMeta(t *testing.T) {
	worker, server := pair(t, nil)
	m := dataMessage(8, 1, true, false, nil)
	m.Frames, m.SimpleApp, m.Body = 0, true, bytes.Repeat([]byte("body"), 20<<20)
	worker.must(m)
	worker.must(dataMessage(8, 2, true, true, []byte("next")))
	if got := server.next(); got.Timestamp != 1 || !bytes.Equal(got.Body, m.Body) {
		t.Errorf("message %d arrived with a body of %d bytes, want %d", got.Timestamp, len(got.Body), len(m.Body))
	}
	server.next().Release()
	server.source.feed.Lock()
	defer server.source.feed.Unlock()
	if n := len(server.peers.ins[0].buf); n > keepLen {
		t.Errorf("the connection keeps a buffer of %d bytes, want at most %d", n, keepLen)
	}
}

// TestMemoryIsUsedAgain: the memory of a received value, and of encoded messages, is used again, and an idle van and connection keep no
// more of it than their limits.
func TestMemoryIsUsedAgain(t *testing.T) {
	n := &common{cfg: env.Default(), places: landing.New(placeFrom)}
	const size, class = 3 << 10, 4 << 10
	for range 3 {
		p := n.get()
		b := n.memory(size, size)
		if p.mems = append(p.mems, b); len(b) != size || cap(b) != class || n.kept != 0 {
			t.Fatalf("%d of %d bytes, while %d are kept", len(b), cap(b), n.kept)
		}
		if n.release(p); n.kept != class || len(n.mem[sizeClass(size)]) != 1 {
			t.Fatalf("%d bytes are kept in %d pieces, want %d in one", n.kept, len(n.mem[sizeClass(size)]), class)
		}
	}
	n.kept = keepMemory - class + 1
	if n.release(&inbound{mems: [][]byte{make([]byte, class)}}); len(n.mem[sizeClass(size)]) != 1 {
		t.Errorf("more than %d bytes are kept", keepMemory)
	}
	for _, count := range []int{1, keepBuf/lendFrom + 1, 2 * keepBuf / lendFrom} {
		c := newOutConn(n, 8, -1, nil)
		c.blocked = true
		for i := range count {
			if err := c.send(dataMessage(8, i, true, true, pattern(lendFrom-1, i))); err != nil {
				t.Fatal(err)
			}
		}
		grown := cap(c.buf)
		if c.written(c.unsent()); len(c.queue) != 0 || (cap(c.buf) > 0) != (grown <= keepBuf) {
			t.Errorf("a connection keeps %d of %d bytes, want up to %d", cap(c.buf), grown, keepBuf)
		}
	}
}

// meter is a van inside with these counters.
type meter struct {
	van.Van
	stats van.Stats
}

func (m *meter) Stats() van.Stats { return m.stats }

// TestStats: Stats has all counters of the connections for data, and adds those of the van inside.
func TestStats(t *testing.T) {
	inside := &meter{}
	v := &Van{inner: inside}
	s := &v.own.stats
	for i, n := range []*atomic.Uint64{&s.sentMessages, &s.sentBytes, &s.receivedMessages, &s.receivedBytes, &s.malformed, &s.refused, &s.fenced} {
		n.Store(uint64(i + 2))
	}
	v.own.guard.Refuse()
	want := van.Stats{SentMessages: 2, SentBytes: 3, ReceivedMessages: 4, ReceivedBytes: 5, Malformed: 6, RefusedSends: 7, FencedMessages: 8, Unauthenticated: 1}
	if got := v.Stats(); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
	inside.stats = want
	got, once := reflect.ValueOf(v.Stats()), reflect.ValueOf(want)
	for i := range got.NumField() {
		if got.Field(i).Uint() != 2*once.Field(i).Uint() {
			t.Errorf("%s: %d, want %d of each van", got.Type().Field(i).Name, got.Field(i).Uint(), once.Field(i).Uint())
		}
	}
}

// TestStaleEvent: an event of a connection that has ended does not end the one that has its descriptor now.
func TestStaleEvent(t *testing.T) {
	worker, server := pair(t, nil)
	worker.must(dataMessage(8, 1, true, true, []byte("first")))
	server.next().Release()
	c := worker.peers.of(8).conn.Load()
	c.broke()
	worker.must(dataMessage(8, 2, true, true, []byte("second")))
	if m := server.next(); m.Timestamp != 2 || worker.peers.of(8).conn.Load() != c {
		t.Errorf("message %d arrived, over another connection: %t", m.Timestamp, worker.peers.of(8).conn.Load() != c)
	}
}

// TestMalformed: a member's connection with bytes that are no message ends, is counted, and the log says what was wrong.
func TestMalformed(t *testing.T) { both(t, malformed) }

func malformed(t *testing.T, options func(*van.Options)) {
	meta, err := dataMessage(8, 1, true, true, nil).AppendTo(nil)
	if err != nil {
		t.Fatal(err)
	}
	frame := func(h head, rest ...byte) []byte { return append(h.append(nil), rest...) }
	for name, c := range map[string]struct {
		bytes []byte
		says  string
	}{
		"long meta":      {frame(head{meta: 1 << 31}), "length of the meta"},
		"long values":    {frame(head{meta: len(meta), frames: 2, vals: 1 << 40}), "length of the values"},
		"one frame":      {frame(head{meta: len(meta), frames: 1}), "data frames"},
		"keys no frames": {frame(head{meta: len(meta), keys: 8}), "data frames"},
		"no meta":        {frame(head{}), "meta length"},
		"wrong meta":     {frame(head{meta: len(meta)}, bytes.Repeat([]byte{0xff}, len(meta))...), "body_size"},
	} {
		t.Run(name, func(t *testing.T) {
			worker, server := pair(t, options)
			conn := dialRaw(t, worker, server)
			if _, err := conn.Write(c.bytes); err != nil {
				t.Fatal(err)
			}
			if _, err := conn.Read(make([]byte, 1)); err == nil {
				t.Error("the connection has not ended")
			}
			vantest.Eventually(t, limit, "it is counted", func() bool { return server.Stats().Malformed == 1 })
			if !strings.Contains(server.log.String(), c.says) {
				t.Errorf("the log does not say %q:\n%s", c.says, server.log.String())
			}
			worker.must(dataMessage(8, 1, true, true, []byte("member")))
			server.next().Release()
		})
	}
}

// TestAnnouncedLength: a peer that announces a long value and sends little of it makes the receiver reserve little. A value that arrives
// gets memory as it arrives.
func TestAnnouncedLength(t *testing.T) { both(t, announcedLength) }

func announcedLength(t *testing.T, options func(*van.Options)) {
	worker, server := pair(t, options)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	m := dataMessage(8, 1, true, true, nil)
	meta, err := m.AppendTo(nil)
	if err != nil {
		t.Fatal(err)
	}
	conn := dialRaw(t, worker, server)
	h := head{meta: len(meta), keys: 8, frames: 2, vals: math.MaxInt32}
	if _, err := conn.Write(append(append(append(h.append(nil), meta...), m.Keys.Host()...), make([]byte, 100)...)); err != nil {
		t.Fatal(err)
	}
	vantest.Eventually(t, limit, "the value begins", func() bool {
		server.source.feed.Lock()
		defer server.source.feed.Unlock()
		server.peers.mu.Lock()
		defer server.peers.mu.Unlock()
		return len(server.peers.ins) > 0 && server.peers.ins[0].cur != nil
	})
	runtime.ReadMemStats(&after)
	if n := after.TotalAlloc - before.TotalAlloc; n > 8*startMemory {
		t.Errorf("the node has allocated %d KiB for a value of which 100 bytes have arrived", n>>10)
	}
	if err := conn.Close(); err != nil {
		t.Fatal(err)
	}
	for i, n := range []int{startMemory, startMemory + 1, growMemory*startMemory + 3, 33 << 20} {
		worker.must(dataMessage(8, 2+i, true, true, pattern(n, i)))
		push := server.next()
		if got := push.Vals.Host(); !bytes.Equal(got, pattern(n, i)) {
			t.Errorf("a push of %d bytes arrived as %d bytes, not as it was sent", n, len(got))
		}
		push.Release()
	}
}

// FuzzParse: any bytes, in any pieces, are messages or an error, and take no more memory than they have bytes.
func FuzzParse(f *testing.F) {
	meta, err := dataMessage(8, 1, true, true, nil).AppendTo(nil)
	if err != nil {
		f.Fatal(err)
	}
	h := head{meta: len(meta), keys: 8, frames: 2, vals: 3}
	one := append(append(h.append(nil), meta...), 1, 0, 0, 0, 0, 0, 0, 0, 'a', 'b', 'c')
	f.Add(one, 7)
	f.Add(append(append([]byte{}, one...), one...), 1)
	f.Add((&head{meta: 5, frames: 3, lens: 9}).append(nil), 100)
	for _, request := range []bool{true, false} {
		m := batch(9, 1, request, nil, []byte("first"), nil, []byte("second"))
		meta, err := m.AppendTo(nil)
		if err != nil {
			f.Fatal(err)
		}
		h := head{meta: len(meta), frames: batchFrames, vals: m.PayloadLen()}
		f.Add(append(append(h.append(nil), meta...), "firstsecond"...), 9)
	}
	in, err := zmq.New(van.Options{Config: env.Default()})
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { _ = in.Close(context.Background()) })
	v := New(in, van.Options{Config: env.Default()})
	f.Fuzz(func(t *testing.T, text []byte, piece int) {
		if len(text) > bufLen {
			return
		}
		c := &inConn{n: &v.own, from: &sender{id: 9}, buf: make([]byte, bufLen)}
		left := text
		for len(left) > 0 {
			if c.r == c.w {
				c.r, c.w = 0, 0
			}
			n := copy(c.buf[c.w:], left[:min(len(left), max(piece, 1))])
			if n == 0 {
				break // a message that is longer than the buffer
			}
			c.w += n
			left = left[n:]
			for {
				p, err := c.parse()
				if err != nil {
					return
				}
				if c.cur != nil && c.cur.weight()-messageBytes > startMemory+2*growMemory*len(text)+2*bufLen {
					t.Fatalf("%d bytes of memory for a message of which %d bytes have arrived", c.cur.weight(), len(text))
				}
				if p == nil {
					break
				}
				if p.msg.PayloadLen() > len(text) {
					t.Fatalf("a message of %d bytes out of %d", p.msg.PayloadLen(), len(text))
				}
				for i := range p.msg.Parts {
					if x := &p.msg.Parts[i]; p.msg.HasValue(i) && x.Vals.Len() != x.Len {
						t.Fatalf("part %d of %d has %d bytes, want %d", i, len(p.msg.Parts), x.Vals.Len(), x.Len)
					}
				}
				v.own.release(p)
			}
		}
	})
}

// FuzzHello: any hello is an introduction with a valid id and incarnation, or an error.
func FuzzHello(f *testing.F) {
	f.Add((&hello{id: 9, own: 1, peer: 2, proves: true}).append(nil))
	f.Add(make([]byte, helloLen))
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) != helloLen {
			return
		}
		h, _, err := parseHello(b)
		if err == nil && (h.id <= van.AllNodes || h.id >= van.Empty || h.own == 0) {
			t.Errorf("%+v", h)
		}
		if err == nil && !bytes.Equal(h.append(nil)[:20], b[:20]) {
			t.Errorf("%+v is not % x", h, b)
		}
	})
}
