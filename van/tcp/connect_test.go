package tcp

// This file tests connections: replaced and broken connections, admission, handshakes, and the counters of a node.

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"os"
	"reflect"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/auth"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/links"
)

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
	for _, now := range []bool{true, false} {
		if path := van.PathTo(worker, 8, now); path.Over != "" || !strings.Contains(path.Why, van.ErrReplaced.Error()) {
			t.Errorf("the path to a peer that takes no data of this process, now %t: %+v", now, path)
		}
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
		server.peers.Mu.Lock()
		defer server.peers.Mu.Unlock()
		for _, c := range server.peers.Ins() {
			if c.Held.Load() {
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

// TestAdmittedByTime: a replacement process is admitted without Admit after HoldTime.
func TestAdmittedByTime(t *testing.T) {
	worker, server := pair(t, nil)
	other := start(t, 9, nil)
	server.connect(other)
	admitted := func() bool {
		server.peers.Mu.Lock()
		defer server.peers.Mu.Unlock()
		return server.peers.Of(9).Admitted
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
	server.peers.Mu.Lock()
	_ = unix.Shutdown(server.peers.Ins()[0].fd, unix.SHUT_RDWR)
	server.peers.Mu.Unlock()
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
	for i := range 4 {
		worker.must(dataMessage(8, i, true, true, pattern(8<<20, i)))
	}
	c := worker.peers.Of(8).Link()
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

// TestNoDataPort: data to a peer whose data port does not answer goes over the van inside, and the log says why. That holds for each
// direction on its own.
func TestNoDataPort(t *testing.T) {
	for name, closed := range map[string]struct{ server, worker bool }{"server": {true, false}, "worker": {false, true}, "both": {true, true}} {
		t.Run(name, func(t *testing.T) {
			worker, server := start(t, 9, nil), start(t, 8, nil)
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			_ = l.Close()
			for e, is := range map[*end]bool{worker: closed.worker, server: closed.server} {
				if is {
					who, _ := e.self.Extension()
					who.DataPort = uint16(l.Addr().(*net.TCPAddr).Port)
					e.self.Endpoint = who.Encode()
				}
			}
			worker.connect(server)
			server.connect(worker)
			if path := van.PathTo(worker, 8, true); path != van.Undecided() {
				t.Errorf("before any data the path is %+v, want an undecided one", path)
			}
			for i := range 3 {
				worker.must(dataMessage(8, i, true, true, pattern(100, i)))
				if m := server.next(); int(m.Timestamp) != i {
					t.Errorf("message %d arrived, want %d", m.Timestamp, i)
				}
				server.must(dataMessage(9, i, false, true, pattern(100, i)))
				if m := worker.next(); int(m.Timestamp) != i || m.Request {
					t.Errorf("%s arrived, want answer %d", m.Meta.String(), i)
				}
			}
			for _, x := range []struct {
				from   *end
				to     int
				closed bool
			}{{worker, 8, closed.server}, {server, 9, closed.worker}} {
				want := map[bool]string{true: "zmq", false: "tcp"}[x.closed]
				if path := van.PathTo(x.from, x.to, false).Over; path != want {
					t.Errorf("data to %d goes over %s, want %s", x.to, path, want)
				}
				if says := strings.Contains(x.from.log.String(), "data goes over zmq, not over tcp"); says != x.closed {
					t.Errorf("the log says why: %t, want %t:\n%s", says, x.closed, x.from.log.String())
				}
			}
		})
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

// TestStrangersFewLines: an unknown process cannot invent causes of log lines.
func TestStrangersFewLines(t *testing.T) {
	_, server := pair(t, nil)
	const tries = 300
	for i := range tries {
		c, err := net.Dial("tcp", dataAddr(server))
		if err != nil {
			t.Fatal(err)
		}
		_ = c.SetDeadline(time.Now().Add(limit))
		_, _ = c.Write(append([]byte{'a' + byte(i%26), 'a' + byte(i/26), '"', 'x'}, make([]byte, helloLen-4)...))
		_, _ = io.Copy(io.Discard, c) // until the server ends it
		_ = c.Close()
	}
	if n := strings.Count(server.log.String(), "a connection for data is refused"); n < 1 || n > 10 {
		t.Errorf("%d lines of %d tries, want those of the 1st, 2nd, 4th, ...", n, tries)
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
		tos, err := unix.GetsockoptInt(worker.peers.Of(8).Link().fd, unix.IPPROTO_IP, unix.IP_TOS)
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
	before := worker.peers.Of(8).Link()
	server.peers.Mu.Lock()
	_ = unix.Shutdown(server.peers.Ins()[0].fd, unix.SHUT_RDWR)
	server.peers.Mu.Unlock()
	vantest.Eventually(t, limit, "another connection", func() bool { return worker.peers.Of(8).Link() != before })
	exchange()
	has("after a break", 10)
	worker.SetTrafficClasses(nil)
	has("removed", 0)
}

// TestForgets: the place for an answer is released when its peer is lost or disconnected.
func TestForgets(t *testing.T) {
	for name, leave := range map[string]func(worker *end){
		"lost":         func(worker *end) { _ = unix.Shutdown(worker.peers.Of(8).Link().fd, unix.SHUT_RDWR) },
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
	if path := van.PathTo(worker, 8, false).Over; path != "tcp" {
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

func (c *silentConn) RemoteAddr() net.Addr { return &net.TCPAddr{} }

func (c *silentConn) Close() error { c.closed = true; return nil }

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
	for i := range links.MaxHeld + 10 {
		fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
		if err != nil {
			t.Skipf("this machine has no more descriptors: %v", err)
		}
		if v := p.enter(&inConn{Inbound: links.Inbound{From: 11, Process: processOf(uint32(i))}, n: &server.own, fd: fd}, &hello{}); v != verdictYes {
			t.Fatalf("connection %d: verdict %d", i, v)
		}
	}
	p.Mu.Lock()
	n, first := len(p.Ins()), p.Ins()[0].Process
	p.Mu.Unlock()
	if n != links.MaxHeld || first != processOf(10) {
		t.Errorf("%d connections wait, the first is of process %x; want %d and process 10", n, first, links.MaxHeld)
	}
	worker.must(dataMessage(8, 1, true, true, []byte("member")))
	server.next().Release()
}

// TestEndOfHold: when its time is over, a connection that waits is read if this node knows its process, and otherwise ends.
func TestEndOfHold(t *testing.T) {
	for name, c := range map[string]struct {
		known    uint32 // the incarnation of the process that has the id
		admitted bool
		timer    bool // the test waits for the end of the time
		reads    bool
	}{
		"no process has the id":                      {0, false, false, false},
		"another process has the id":                 {2, true, false, false},
		"the process is known, and was not admitted": {1, false, false, true},
		"the time passes":                            {1, false, true, true},
	} {
		t.Run(name, func(t *testing.T) {
			server := start(t, 8, nil)
			p, read := server.peers, 0
			p.read = func(*inConn) error { read++; return nil }
			if c.known != 0 {
				n := &peer{}
				n.Init(9, processOf(c.known), c.known)
				p.Connect(n)
				n.Admitted = c.admitted
			}
			fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
			if err != nil {
				t.Fatal(err)
			}
			in := &inConn{Inbound: links.Inbound{From: 9, Process: processOf(1)}, n: &server.own, fd: fd}
			if v := p.enter(in, &hello{}); v != verdictYes {
				t.Fatalf("verdict %d, want a connection that waits", v)
			}
			held := func() bool {
				p.Mu.Lock()
				defer p.Mu.Unlock()
				return in.Held.Load()
			}
			if c.timer {
				vantest.Eventually(t, limit, "the end of the time", func() bool { return !held() })
			} else if !held() {
				t.Fatal("it does not wait")
			}
			p.EndHold(in)
			p.Mu.Lock()
			defer p.Mu.Unlock()
			if in.Held.Load() || (read == 1) != c.reads || (len(p.Ins()) == 1) != c.reads {
				t.Errorf("held %t, read %d times, %d connections; want it to be read: %t", in.Held.Load(), read, len(p.Ins()), c.reads)
			}
		})
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
	c := worker.peers.Of(8).Link()
	c.broke()
	worker.must(dataMessage(8, 2, true, true, []byte("second")))
	if m := server.next(); m.Timestamp != 2 || worker.peers.Of(8).Link() != c {
		t.Errorf("message %d arrived, over another connection: %t", m.Timestamp, worker.peers.Of(8).Link() != c)
	}
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
