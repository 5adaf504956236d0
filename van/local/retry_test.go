package local

import (
	"errors"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/internal/memfd"
	"github.com/stepaf/stepaf-go/tests/inproc"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/links"
)

// obstacle keeps a worker from making a link until it is removed.
type obstacle struct {
	worker, server func(*Van)
	remove         func()
}

// obstacles returns a new one of each kind.
func obstacles() map[string]obstacle {
	var memory, files atomic.Bool
	open := make(chan struct{})
	soon := func(v *Van) { v.own.linkTime = 200 * time.Millisecond }
	return map[string]obstacle{
		"no memory": {worker: func(v *Van) {
			v.tx.memory.make = func(n, have int) (int, error) {
				if !memory.Load() {
					return -1, unix.ENOMEM
				}
				return memfd.Part(n, have)
			}
		}, remove: func() { memory.Store(true) }},
		"a peer that does not answer in time": {worker: soon, server: func(v *Van) {
			v.acceptor.refuse = func() error { <-open; return nil }
		}, remove: func() { close(open) }},
		"a peer without files": {worker: soon, server: func(v *Van) {
			v.acceptor.refuse = func() error {
				if !files.Load() {
					return unix.EMFILE
				}
				return nil
			}
		}, remove: func() { files.Store(true) }},
	}
}

// TestLinkLater: a peer whose link cannot be made gets its data over the van inside. When the link can be made, the data moves to it in
// order: the messages of the van inside are delivered first.
func TestLinkLater(t *testing.T) {
	for name, x := range obstacles() {
		t.Run(name, func(t *testing.T) {
			n := inproc.NewNetwork()
			worker := newNode(t, n, 9, func(v *Van) {
				v.peers.O.Retry.Pause = time.Millisecond
				x.worker(v)
			})
			server := newNode(t, n, 8, x.server)
			remove := sync.OnceFunc(x.remove)
			t.Cleanup(remove)
			worker.start()
			gate, held := make(chan struct{}), make(chan struct{})
			server.Start(func(m *van.Message) {
				if m.Timestamp == 3 {
					close(held)
					<-gate
				}
				server.in <- m.Retain()
			})
			server.connect(worker)
			if err := worker.Connect(t.Context(), 8, server.self); err != nil {
				t.Fatal(err)
			}
			if worker.Linked(8) {
				t.Fatal("linked")
			}
			sent := 0
			send := func(k int) {
				for range k {
					worker.must(data(8, sent, []byte("x")))
					sent++
				}
			}
			send(10)
			<-held
			if path := van.PathTo(worker, 8, true); path.Over == SharedMemory || !strings.HasPrefix(path.Why, "not over shared memory: ") {
				t.Errorf("the path is %+v, want another one, and why", path)
			}
			remove()
			// The link is made while the messages before it wait for the application.
			eventually(t, "the link is made", func() bool { return worker.peers.link(8) != nil })
			worker.says("from now on, no longer over")
			if path := van.PathTo(worker, 8, true); path != (van.Path{Over: SharedMemory}) {
				t.Errorf("the path is %+v, want shared memory", path)
			}
			before := worker.stats.sentN.Load()
			send(10)
			if got := worker.stats.sentN.Load() - before; got != 10 {
				t.Errorf("%d messages went through the link, want 10", got)
			}
			eventually(t, "links of earlier tries have ended", func() bool { return len(server.peers.Ins()) == 1 })
			if !server.peers.Ins()[0].Marks.Missing() {
				t.Error("the receiver takes from the link before what was sent earlier was handed up")
			}
			close(gate)
			for i := range sent {
				m := server.next()
				if int(m.Timestamp) != i {
					t.Fatalf("message %d, want %d", m.Timestamp, i)
				}
				m.Release()
			}
			if worker.down(8) || server.down(9) {
				t.Error("a peer is held for lost")
			}
		})
	}
}

// pathInside is a van inside that calls asked before it returns a path.
type pathInside struct {
	van.Van
	asked func()
}

func (v *pathInside) Unwrap() van.Van { return v.Van }

func (v *pathInside) PathTo(int, bool) van.Path {
	v.asked()
	return van.Path{Over: "inside"}
}

// TestPathWhileTheLinkIsMade: PathTo does not return the path of the van inside, as if there were no reason for it, while the
// link is made.
func TestPathWhileTheLinkIsMade(t *testing.T) {
	n := inproc.NewNetwork()
	inside := &pathInside{asked: func() {}}
	worker := newNode(t, n, 9, func(v *Van) { inside.Van, v.inner = v.inner, inside; v.peers.O.Inner = inside })
	server := newNode(t, n, 8, nil)
	worker.start()
	server.start()
	server.connect(worker)
	if err := worker.Connect(t.Context(), 8, server.self); err != nil {
		t.Fatal(err)
	}
	inside.asked = func() { worker.Linked(8) }
	if path := worker.PathTo(8, true); path != van.Undecided() && path.Over != SharedMemory {
		t.Errorf("the path is %+v, want shared memory, or that it is undecided", path)
	}
	if !worker.Linked(8) {
		t.Fatal("not linked")
	}
	inside.asked = func() { t.Error("the van inside was asked, and may make a connection that nothing needs") }
	for _, now := range []bool{true, false} {
		if path := worker.PathTo(8, now); path != (van.Path{Over: SharedMemory}) {
			t.Errorf("the path is %+v, want shared memory", path)
		}
	}
}

// TestChangeUnderTraffic: if a goroutine sends all the time while its data moves to a link, the order of its messages is kept.
func TestChangeUnderTraffic(t *testing.T) {
	var free atomic.Bool
	n := inproc.NewNetwork()
	worker, server := newNode(t, n, 9, func(v *Van) {
		v.peers.O.Retry.Pause = time.Millisecond
		v.tx.memory.make = func(n, have int) (int, error) {
			if !free.Load() {
				return -1, unix.ENOMEM
			}
			return memfd.Part(n, have)
		}
	}), newNode(t, n, 8, nil)
	worker.start()
	server.start()
	server.connect(worker)
	if err := worker.Connect(t.Context(), 8, server.self); err != nil {
		t.Fatal(err)
	}
	sent, got := 0, 0
	take := func() {
		m := server.next()
		if int(m.Timestamp) != got {
			t.Fatalf("message %d, want %d", m.Timestamp, got)
		}
		got++
		m.Release()
	}
	for after := 0; after < 1000; sent++ {
		worker.must(data(8, sent, []byte("x")))
		if worker.peers.link(8) != nil {
			after++
		} else if sent == 500 {
			free.Store(true)
		}
		if sent-got > 100 {
			take()
		}
	}
	for got < sent {
		take()
	}
}

// TestMarksLost: a link whose marks are lost with the van inside's connection ends as a broken link does, at both ends.
func TestMarksLost(t *testing.T) {
	ignore := func(int, bool, error) {}
	for name, lose := range map[string]func(worker, server *node){
		"the sender":   func(worker, _ *node) { worker.peers.Inside(ignore, 8, false, errLinkBroke) },
		"the receiver": func(_, server *node) { server.peers.Inside(ignore, 9, false, errLinkBroke) },
		"time is over": func(_, server *node) {
			eventually(t, "links of earlier tries have ended", func() bool { return len(server.peers.Ins()) == 1 })
			server.peers.marksLate(server.peers.Ins()[0])
		},
	} {
		t.Run(name, func(t *testing.T) {
			inside := &losing{}
			inside.all.Store(true)
			worker, server, free := unlinked(t, func(v *Van) { inside.Van, v.peers.O.Inner = v.peers.O.Inner, inside })
			worker.must(data(8, 0, []byte("x")))
			server.next().Release()
			free.Store(true)
			eventually(t, "the link is made", func() bool { return worker.peers.link(8) != nil })
			worker.must(data(8, 1, []byte("x")))
			inside.all.Store(false)
			lose(worker, server)
			worker.event(8, false)
			worker.event(8, true)
			worker.resend(data(8, 2, []byte("x")))
			if m := server.next(); m.Timestamp != 2 {
				t.Errorf("message %d, want 2", m.Timestamp)
			}
		})
	}
}

// heldBehindMarks returns a pair whose link waits for its marks: they are behind messages 0 and 1, and the handler of message 0 runs until
// gate is closed.
func heldBehindMarks(t *testing.T) (worker, server *node, gate chan struct{}) {
	worker, server, free := unlinked(t, func(*Van) {})
	gate = make(chan struct{})
	held := make(chan struct{})
	hold := func(m *van.Message) {
		if m.Timestamp == 0 {
			close(held)
			<-gate
		}
	}
	server.before.Store(&hold)
	worker.must(data(8, 0, []byte("x")))
	worker.must(data(8, 1, []byte("x")))
	<-held
	free.Store(true)
	eventually(t, "the link is made", func() bool { return worker.peers.link(8) != nil })
	eventually(t, "links of earlier tries have ended", func() bool { return len(server.peers.Ins()) == 1 })
	return worker, server, gate
}

// TestMarksBehindAHandler: a link whose marks wait for a running handler does not end, however long that takes. Its messages follow.
func TestMarksBehindAHandler(t *testing.T) {
	worker, server, gate := heldBehindMarks(t)
	l := server.peers.Ins()[0]
	for range maxTries + 1 {
		server.peers.marksLate(l)
	}
	worker.must(data(8, 2, []byte("x")))
	if ins := server.peers.Ins(); len(ins) != 1 || ins[0] != l || !l.Marks.Missing() || l.lost.Load() {
		t.Errorf("of %d links the first one waits for marks: %t; want the one that was made first", len(ins), l.Marks.Missing())
	}
	close(gate)
	for i := range 3 {
		if m := server.next(); int(m.Timestamp) != i {
			t.Errorf("message %d, want %d", m.Timestamp, i)
		}
	}
	if worker.down(8) || server.down(9) {
		t.Error("a peer is held for lost")
	}
}

// TestMarksAgain: if a link breaks, or its marks are late, while the receiver still has messages that were sent before over the van inside, the
// next link is read after these messages, too.
func TestMarksAgain(t *testing.T) {
	for name, end := range map[string]func(worker, server *node){
		"broken": func(worker, _ *node) {
			l := worker.peers.link(8)
			l.mu.Lock()
			_ = l.fail(errLinkBroke)
			l.mu.Unlock()
		},
		"late": func(_, server *node) { server.peers.EndMarks(server.peers.Ins()[0], slog.LevelWarn) },
	} {
		t.Run(name, func(t *testing.T) {
			worker, server, gate := heldBehindMarks(t)
			end(worker, server)
			worker.event(8, false)
			worker.event(8, true)
			worker.must(data(8, 2, []byte("x")))
			eventually(t, "the ended link is removed", func() bool { return len(server.peers.Ins()) == 1 })
			if !server.peers.Ins()[0].Marks.Missing() {
				t.Error("the next link does not wait for marks")
			}
			close(gate)
			for i := range 3 {
				if m := server.next(); int(m.Timestamp) != i {
					t.Errorf("message %d, want %d", m.Timestamp, i)
				}
			}
		})
	}
}

// unlinked makes worker 9 and server 8. The worker makes no link before free is set.
func unlinked(t *testing.T, set func(*Van)) (worker, server *node, free *atomic.Bool) {
	n := inproc.NewNetwork()
	free = &atomic.Bool{}
	worker, server = newNode(t, n, 9, func(v *Van) {
		v.peers.O.Retry.Pause = time.Millisecond
		v.tx.memory.make = func(n, have int) (int, error) {
			if !free.Load() {
				return -1, unix.ENOMEM
			}
			return memfd.Part(n, have)
		}
		set(v)
	}), newNode(t, n, 8, nil)
	worker.start()
	server.start()
	server.connect(worker)
	if err := worker.Connect(t.Context(), 8, server.self); err != nil {
		t.Fatal(err)
	}
	return worker, server, free
}

// losing is a van inside that loses its connection, and the message with it, when it sends the first mark, or that loses all marks while all is set.
type losing struct {
	van.Van
	all  atomic.Bool
	lose func()
	once sync.Once
}

func (l *losing) Send(m *van.Message) (err error) {
	lost := false
	if _, is := links.ReadMark(markKind, m); is {
		lost = l.all.Load()
		if l.lose != nil {
			l.once.Do(func() {
				lost = true
				l.lose()
			})
		}
	}
	if lost {
		return nil
	}
	return l.Van.Send(m)
}

// TestMarksLostBefore: a link whose marks are lost before it is installed is not used. The next one is.
func TestMarksLostBefore(t *testing.T) {
	worker, server, free := unlinked(t, func(v *Van) {
		lose := func() { v.peers.Inside(func(int, bool, error) {}, 8, false, errLinkBroke) }
		v.peers.O.Inner = &losing{Van: v.peers.O.Inner, lose: lose}
	})
	worker.must(data(8, 0, []byte("x")))
	free.Store(true)
	eventually(t, "the link is made", func() bool { return worker.peers.link(8) != nil })
	worker.must(data(8, 1, []byte("x")))
	for i := range 2 {
		if m := server.next(); int(m.Timestamp) != i {
			t.Errorf("message %d, want %d", m.Timestamp, i)
		}
	}
	worker.says(links.ErrMarksLost.Error())
}

// TestHopeless: after an error that no later try can change, there are no more tries, and the log says so.
func TestHopeless(t *testing.T) {
	worker, _, _ := unlinked(t, func(v *Van) { v.tx.memory.make = func(int, int) (int, error) { return -1, errProtocol } })
	if worker.Linked(8) {
		t.Fatal("linked")
	}
	worker.says("for as long as both processes run")
	if s := worker.peers.Of(8).State(); s != links.Unlinked {
		t.Errorf("state %d: it is tried again", s)
	}
	for err, want := range map[error]bool{errProtocol: true, van.ErrReplaced: true, unix.EMFILE: false, errNoBudget: false, errRefused: false,
		errors.New("i/o timeout"): false} {
		if hopeless(err) != want {
			t.Errorf("%v is hopeless: %t, want %t", err, !want, want)
		}
	}
}
