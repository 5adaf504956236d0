package tcp

import (
	"errors"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/auth"
	"github.com/stepaf/stepaf-go/van/links"
)

// firewall stands before the data port of a node. While it is shut, connections to that port end at once, or get no answer.
type firewall struct {
	net.Listener
	to     string
	silent bool
	open   atomic.Bool
}

// behindFirewall puts a firewall, which is shut, before e. Other nodes must not know e yet.
func behindFirewall(e *end, silent bool) *firewall {
	e.t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		e.t.Fatal(err)
	}
	f := &firewall{Listener: l, to: dataAddr(e), silent: silent}
	who, _ := e.self.Extension()
	who.DataPort = uint16(l.Addr().(*net.TCPAddr).Port)
	e.self.Endpoint = who.Encode()
	var all sync.WaitGroup
	ends := make(chan struct{})
	all.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			all.Go(func() { f.pass(c, ends) })
		}
	})
	e.t.Cleanup(func() {
		_ = l.Close()
		close(ends)
		all.Wait()
	})
	return f
}

func (f *firewall) pass(c net.Conn, ends chan struct{}) {
	defer c.Close()
	if !f.open.Load() {
		if f.silent {
			<-ends
		}
		return
	}
	to, err := net.Dial("tcp", f.to)
	if err != nil {
		return
	}
	over := make(chan struct{}, 2)
	copies := func(to, from net.Conn) { _, _ = io.Copy(to, from); over <- struct{}{} }
	go copies(to, c)
	go copies(c, to)
	select {
	case <-over:
	case <-ends:
	}
	_ = to.Close()
}

// soon makes e repeat attempts to connect without long pauses.
func soon(e *end) { e.dialer.dialTime, e.peers.O.Retry.Pause = 200*time.Millisecond, time.Millisecond }

func (e *end) says(line string) {
	e.t.Helper()
	vantest.Eventually(e.t, limit, "the log says "+line, func() bool { return strings.Contains(e.log.String(), line) })
}

// holdAt makes the handler of e block in the message with that timestamp until open is called. held is closed then.
func (e *end) holdAt(ts int) (held chan struct{}, open func()) {
	held, gate := make(chan struct{}), make(chan struct{})
	f := func(m *van.Message) {
		if int(m.Timestamp) == ts {
			close(held)
			<-gate
		}
	}
	e.before.Store(&f)
	open = sync.OnceFunc(func() { close(gate) })
	e.t.Cleanup(open)
	return held, open
}

// wantOrder receives the messages with the timestamps 0 to n-1.
func (e *end) wantOrder(n int) {
	e.t.Helper()
	for i := range n {
		m := e.next()
		if int(m.Timestamp) != i {
			e.t.Fatalf("node %d: message %d arrived, want %d", e.self.ID, m.Timestamp, i)
		}
		m.Release()
	}
}

// TestFailback: data to a peer whose data port cannot be reached goes over the van inside. When the port can be reached, the data moves to a
// connection, in order: messages of the van inside are delivered first. That holds for requests and for answers.
func TestFailback(t *testing.T) {
	both(t, func(t *testing.T, options func(*van.Options)) { failsBack(t, options, false) })
	t.Run("silent", func(t *testing.T) { failsBack(t, nil, true) })
}

func failsBack(t *testing.T, options func(*van.Options), silent bool) {
	worker, server := start(t, 9, options), start(t, 8, options)
	soon(worker)
	soon(server)
	walls := []*firewall{behindFirewall(worker, silent), behindFirewall(server, silent)}
	worker.connect(server)
	server.connect(worker)
	worker.must(dataMessage(8, -1, true, true, nil)) // the server's answers take the worker's connection once it has sent a request
	server.next().Release()
	workerHeld, openWorker := worker.holdAt(3)
	serverHeld, openServer := server.holdAt(3)
	sent := 0
	send := func(n int) {
		t.Helper()
		for range n {
			worker.must(dataMessage(8, sent, true, true, pattern(100, sent)))
			server.must(dataMessage(9, sent, false, true, pattern(100, sent)))
			sent++
		}
	}
	send(10)
	<-workerHeld
	<-serverHeld
	for from, to := range map[*end]int{worker: 8, server: 9} {
		if path := van.PathTo(from, to, true); path.Over != "zmq" || !strings.HasPrefix(path.Why, "not over tcp: ") {
			t.Errorf("data to %d goes over %s (why: %q), want zmq, and why", to, path.Over, path.Why)
		}
		from.says("data goes over zmq, not over tcp")
	}
	for _, f := range walls {
		f.open.Store(true)
	}
	// The connections are made while the messages before them wait for the application.
	worker.says("data goes over tcp from now on, no longer over zmq")
	server.says("data goes over tcp from now on, no longer over zmq")
	before := worker.own.stats.sentMessages.Load() + server.own.stats.sentMessages.Load()
	send(10)
	if n := worker.own.stats.sentMessages.Load() + server.own.stats.sentMessages.Load() - before; n != 20 {
		t.Errorf("%d messages went over connections, want 20", n)
	}
	for _, to := range []*end{worker, server} {
		to.peers.Mu.Lock()
		if c := to.peers.Ins()[len(to.peers.Ins())-1]; !c.Marks.Missing() || !c.Held.Load() {
			t.Errorf("node %d reads the connection before the messages that were sent earlier", to.self.ID)
		}
		to.peers.Mu.Unlock()
	}
	openWorker()
	openServer()
	worker.wantOrder(sent)
	server.wantOrder(sent)
	for from, to := range map[*end]int{worker: 8, server: 9} {
		if path := van.PathTo(from, to, true); path != (van.Path{Over: "tcp"}) {
			t.Errorf("data to %d goes over %s (why: %q), want tcp", to, path.Over, path.Why)
		}
		if n := strings.Count(from.log.String(), "from now on"); n != 1 {
			t.Errorf("the log says %d times that the path has changed, want once:\n%s", n, from.log.String())
		}
		if len(from.events) > 0 && from.told("8 false") || from.told("9 false") {
			t.Errorf("the watcher knows of a loss: %v", from.events)
		}
	}
}

// TestFailbackUnderTraffic: if a goroutine sends all the time while its data moves to a connection, the order of its messages is kept.
func TestFailbackUnderTraffic(t *testing.T) {
	worker, server := start(t, 9, nil), start(t, 8, nil)
	soon(worker)
	wall := behindFirewall(server, false)
	worker.connect(server)
	server.connect(worker)
	sent, got := 0, 0
	take := func() {
		t.Helper()
		m := server.next()
		if int(m.Timestamp) != got {
			t.Fatalf("message %d arrived, want %d", m.Timestamp, got)
		}
		m.Release()
		got++
	}
	for after := 0; after < 1000; sent++ {
		worker.must(dataMessage(8, sent, true, true, pattern(100, sent)))
		if worker.peers.Of(8).Link() != nil {
			after++
		} else if sent == 500 {
			wall.open.Store(true)
		}
		if sent-got > 100 {
			take()
		}
	}
	for got < sent {
		take()
	}
}

// lossy is a van inside that loses marks while lose is set.
type lossy struct {
	van.Van
	lose atomic.Bool
}

func (l *lossy) Send(m *van.Message) error {
	if _, ok := links.ReadMark(markKind, m); ok && l.lose.Load() {
		return nil
	}
	return l.Van.Send(m)
}

// TestMarksLost: a connection whose marks are lost ends as a broken connection does, at both ends. So it is if the van inside loses the
// peer, or if the time for marks is over.
func TestMarksLost(t *testing.T) {
	broke := errors.New("a test")
	for name, lose := range map[string]func(worker, server *end, c *inConn){
		"the sender":   func(worker, _ *end, _ *inConn) { worker.peers.Inside(worker.watch, 8, false, broke) },
		"the receiver": func(_, server *end, _ *inConn) { server.peers.Inside(server.watch, 9, false, broke) },
		"time is over": func(_, server *end, c *inConn) { server.peers.EndMarks(c, 0) },
	} {
		t.Run(name, func(t *testing.T) {
			worker, server := start(t, 9, nil), start(t, 8, nil)
			soon(worker)
			inside := &lossy{Van: worker.inner}
			inside.lose.Store(true)
			worker.peers.O.Inner = inside
			wall := behindFirewall(server, false)
			worker.connect(server)
			server.connect(worker)
			worker.must(dataMessage(8, 0, true, true, nil))
			wall.open.Store(true)
			worker.says("from now on, no longer over")
			worker.must(dataMessage(8, 1, true, true, nil)) // is lost
			inside.lose.Store(false)
			server.wantOrder(1)
			server.peers.Mu.Lock()
			c := server.peers.Ins()[len(server.peers.Ins())-1]
			server.peers.Mu.Unlock()
			if !c.Marks.Missing() {
				t.Fatal("the connection does not wait for its marks")
			}
			lose(worker, server, c)
			vantest.Eventually(t, limit, "the sender reports the loss and the return", func() bool { return worker.told("8 false", "8 true") })
			vantest.Eventually(t, limit, "so does the receiver", func() bool { return server.told("9 false", "9 true") })
			worker.must(dataMessage(8, 2, true, true, nil))
			if m := server.next(); m.Timestamp != 2 {
				t.Errorf("message %d arrived, want 2", m.Timestamp)
			}
		})
	}
}

// TestMarksAgain: if a connection breaks while the receiver still has messages that were sent before over the van inside, the next connection
// is read after these messages, too.
func TestMarksAgain(t *testing.T) {
	worker, server := start(t, 9, nil), start(t, 8, nil)
	soon(worker)
	wall := behindFirewall(server, false)
	worker.connect(server)
	server.connect(worker)
	held, open := server.holdAt(0)
	worker.must(dataMessage(8, 0, true, true, nil))
	worker.must(dataMessage(8, 1, true, true, nil))
	<-held
	wall.open.Store(true)
	worker.says("from now on, no longer over")
	worker.must(dataMessage(8, -1, true, true, nil)) // is lost
	c := worker.peers.Of(8).Link()
	c.mu.Lock()
	c.fail(errGone)
	c.mu.Unlock()
	vantest.Eventually(t, limit, "the loss and the return are reported", func() bool { return worker.told("8 false", "8 true") })
	vantest.Eventually(t, limit, "so are they at the receiver", func() bool { return server.told("9 false", "9 true") })
	worker.must(dataMessage(8, 2, true, true, nil))
	open()
	server.wantOrder(3)
}

// TestHopeless: after an error that no later try can change, there are no more tries, and the log says so.
func TestHopeless(t *testing.T) {
	worker, server := start(t, 9, nil), start(t, 8, nil)
	soon(worker)
	worker.connect(server)
	server.connect(worker)
	server.connect(start(t, 9, nil))
	worker.must(dataMessage(8, 0, true, true, nil))
	worker.says("for as long as both processes run")
	worker.peers.WG.Wait() // there is no goroutine that tries again
	for err, want := range map[error]bool{verdictVersion.err(): true, verdictReplaced.err(): true, auth.ErrOtherSecret: true, van.ErrClosed: true,
		verdictClosed.err(): false, verdictOther.err(): false, io.EOF: false, errors.New("i/o timeout"): false} {
		if hopeless(err) != want {
			t.Errorf("%v is hopeless: %t, want %t", err, !want, want)
		}
	}
}
