package resend

import (
	"context"
	"math"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stepaf/stepaf-go/van"
)

// TestWindowWraps: after the largest timestamp, the small ones are new, once.
func TestWindowWraps(t *testing.T) {
	for _, jump := range []int32{0, 2, 100, windowSize - 300, 3 * windowSize} { // left out at the end
		w := newWindow(0)
		last := int32(math.MaxInt32) - jump
		for ts := last - 100; ; ts++ {
			if w.add(ts) {
				t.Fatalf("timestamp %d is taken for a duplicate", ts)
			}
			if ts == last {
				break
			}
		}
		for ts := range int32(200) {
			if w.add(ts) {
				t.Fatalf("timestamp %d after %d is taken for a duplicate", ts, last)
			}
			if !w.add(ts) {
				t.Fatalf("timestamp %d is not taken for a duplicate", ts)
			}
		}
		if !w.add(last) {
			t.Errorf("timestamp %d is not taken for a duplicate after the wrap", last)
		}
	}
}

// TestWindowForgets: a timestamp older than the window counts as a duplicate.
func TestWindowForgets(t *testing.T) {
	w := newWindow(0)
	w.add(10)
	w.add(windowSize + 20)
	if !w.add(11) {
		t.Error("a timestamp behind the window is taken for a new one")
	}
	if w.add(windowSize + 19) {
		t.Error("a timestamp inside the window is taken for a duplicate")
	}
}

// TestWindowGrows: a window that a process passes fast grows, and forgets no timestamp that was received within life. It grows no further
// than it may, and not without need.
func TestWindowGrows(t *testing.T) {
	for _, x := range []struct {
		name       string
		step, each int           // timestamps of a message; messages between two ticks of the clock
		life       time.Duration // in ticks
		room       int
		size       int
	}{
		{"slow", 1, windowSize / 2, 1, maxGrowth, windowSize},
		{"fast", 1, windowSize / 2, 2, maxGrowth, 2 * windowSize},
		{"very fast", 3, windowSize / 2, 10, maxGrowth, 32 * windowSize},
		{"batches", 16384, 1, 16, maxGrowth, 8 * windowSize},
		{"jumps", 100_000, 1, 4, maxGrowth, 16 * windowSize},
		{"limited", 1, windowSize / 2, 100, 3 * windowSize, 4 * windowSize},
	} {
		t.Run(x.name, func(t *testing.T) {
			w, grown := newWindow(0), 0
			add := func(n int, now uint64) bool {
				ts := int32((math.MaxInt32 - 500_000 + n*x.step) & math.MaxInt32)
				grown += w.reserve(func() uint64 { return now }, ts, x.life, x.room-grown)
				return w.add(ts)
			}
			isLost := func(n int) bool { return n%101 == 50 }
			total := min(40*x.each*int(x.life), 3_000_000)
			for n := range total {
				now := uint64(n / x.each)
				if !isLost(n) && add(n, now) {
					t.Fatalf("message %d is taken for a duplicate", n)
				}
				if old := n - x.each*int(x.life-1); x.name != "limited" && old > 0 && isLost(old) && add(old, now) {
					t.Fatalf("message %d, sent again after %d others, is taken for a duplicate", old, n-old)
				}
				if old := n - 1000; old > 0 && !isLost(old) && !add(old, now) {
					t.Fatalf("message %d is delivered twice", old)
				}
			}
			if w.size() != x.size {
				t.Errorf("the window has %d timestamps, want %d", w.size(), x.size)
			}
			for n := range min(windowSize, total) { // the oldest ones, forgotten or not
				if !isLost(n) && !add(n, 0) {
					t.Fatalf("message %d is delivered twice", n)
				}
			}
		})
	}
}

// TestWindowAfterPause: a message that was lost after a pause is no duplicate, although the jump after it ends one half and begins the next.
func TestWindowAfterPause(t *testing.T) {
	const life, lost = 10, 1
	w := newWindow(0)
	for _, x := range []struct {
		ts  int32
		now uint64
	}{{0, 0}, {40_002, 2 * life}, {72_003, 2*life + 1}} {
		w.reserve(func() uint64 { return x.now }, x.ts, life, maxGrowth)
		if w.add(x.ts) {
			t.Errorf("%d is taken for a duplicate", x.ts)
		}
	}
	if w.add(lost) {
		t.Error("the lost message is taken for a duplicate")
	}
}

// TestLostBatch: a request that was lost is delivered when it is sent again, however many timestamps its sender has used since.
func TestLostBatch(t *testing.T) {
	f := newFixture(t, Options{Timeout: time.Hour})
	if err := f.Connect(context.Background(), 8, van.Node{Hostname: "a"}); err != nil {
		t.Fatal(err)
	}
	handed := func(ts int) bool {
		before := len(f.up)
		f.p.recv(from(8, request(9, ts)))
		return len(f.up) > before
	}
	const lost, last, batch = 40, 1_000_000, 16
	for ts := 0; ts <= last; ts += batch {
		if ts != lost*batch && !handed(ts) {
			t.Fatalf("request %d is dropped", ts)
		}
	}
	if !handed(lost * batch) {
		t.Error("the lost request is dropped")
	}
	for _, ts := range []int{lost, lost + 1, last / batch} {
		if handed(ts * batch) {
			t.Errorf("request %d is delivered twice", ts*batch)
		}
	}
}

// of is a message of the process with incarnation inc.
func of(inc uint32, sender int, m *van.Message) *van.Message {
	m.SetIncarnations(inc, 1)
	return from(sender, m)
}

// Messages that a process has sent before its record arrived are still recognised afterwards: the
// acknowledgements may not have reached it, so that it sends them again.
func TestSentBeforeItsRecord(t *testing.T) {
	record := func(inc uint32, port int32) van.Node {
		n := van.Node{Hostname: "a", Ports: []int32{port}}
		if inc != 0 {
			n.Endpoint = (&van.NodeExtension{Incarnation: inc}).Encode()
		}
		return n
	}
	for _, c := range []struct {
		name         string
		id           int
		before, next uint32 // of the records; 0: none
		mark         uint32 // of the next process's messages
		up           bool   // a repeat after the record is delivered
	}{
		{"replaced", 9, 5, 6, 6, false},
		{"the same again", 9, 6, 6, 6, false},
		{"another one follows", 9, 5, 7, 6, true},
		{"the original's", 9, 0, 0, 0, true}, // its processes count from 0 again
		{"the original's with trace stamps", 9, 0, 0, 6, true},
		{"the scheduler", van.SchedulerID, 0, 0, 6, false}, // its record has no incarnation
	} {
		t.Run(c.name, func(t *testing.T) {
			f := newFixture(t, Options{})
			connect := func(inc uint32, port int32) {
				t.Helper()
				if err := f.Connect(context.Background(), c.id, record(inc, port)); err != nil {
					t.Fatal(err)
				}
			}
			handed := func(inc uint32, ts int) bool {
				before := len(f.up)
				f.p.recv(of(inc, c.id, request(8, ts)))
				return len(f.up) > before
			}
			connect(c.before, 1)
			if !handed(c.before, 1) {
				t.Error("the first message was dropped")
			}
			if !handed(c.mark, 70) {
				t.Error("a message before its sender's record was dropped")
			}
			if handed(c.mark, 70) {
				t.Error("handed up twice before the record")
			}
			connect(c.next, 2)
			if up := handed(c.mark, 70); up != c.up {
				t.Errorf("sent again after the record: handed up %t, want %t", up, c.up)
			}
			if !handed(c.mark, 71) {
				t.Error("a new message was dropped")
			}
		})
	}
}

// A process without an id gets one by Rename; the same holds.
func TestSentBeforeItsName(t *testing.T) {
	f := newFixture(t, Options{})
	who := van.Node{Hostname: "a", Ports: []int32{1}, Endpoint: (&van.NodeExtension{Incarnation: 6}).Encode()}
	if err := f.Connect(context.Background(), 9, van.Node{Hostname: "a", Endpoint: (&van.NodeExtension{Incarnation: 5}).Encode()}); err != nil {
		t.Fatal(err)
	}
	if err := f.Connect(context.Background(), -2, who); err != nil {
		t.Fatal(err)
	}
	f.p.recv(of(5, 9, request(8, 1)))
	f.p.recv(of(6, 9, request(8, 2)))
	if err := f.Rename(-2, 9); err != nil {
		t.Fatal(err)
	}
	f.p.recv(of(6, 9, request(8, 2)))
	if n := len(f.up); n != 2 {
		t.Errorf("%d messages handed up, want 2", n)
	}
	if n := len(f.seen.peers[9].lives); n != 1 {
		t.Errorf("%d processes are remembered, want 1", n)
	}
}

// TestLivesOfOthers: messages of processes that claim an id do not remove the history of the process
// that has it.
func TestLivesOfOthers(t *testing.T) {
	p := &peer{}
	p.follow(9, 5)
	mine := p.of(9, 5)
	for inc := uint32(6); inc < 10; inc++ {
		p.of(9, inc)
		if p.of(9, 5) != mine || len(p.lives) > maxLives {
			t.Fatalf("after a message of %d, the history of the process that has the id is another, or there are too many (%d)", inc, len(p.lives))
		}
	}
}

// Two processes have the id 9, one after the other, and send messages with the same signature.
// The acknowledgement of one is not that of the other, and a repeated heartbeat of the
// replaced process is delivered.
func TestAcknowledgedToAnother(t *testing.T) {
	record := func(inc uint32) van.Node {
		return van.Node{Hostname: "a", Ports: []int32{int32(inc)}, Endpoint: (&van.NodeExtension{Incarnation: inc}).Encode()}
	}
	marked := func(from, to uint32, m *van.Message) *van.Message {
		m.SetIncarnations(from, to)
		return m
	}
	t.Run("acknowledgement", func(t *testing.T) {
		for _, c := range []struct {
			by, of uint32 // 0: not in the message
			ends   bool
		}{{7, 5, true}, {0, 0, true}, {7, 4, false}, {6, 5, false}, {6, 4, false}} {
			f := newFixture(t, Options{Timeout: time.Hour, CloseWait: time.Nanosecond})
			m := marked(5, 7, request(8, 3))
			if err := f.Send(m); err != nil {
				t.Fatal(err)
			}
			f.p.recv(marked(c.by, c.of, ack(8, signature(&m.Meta, 9, 8))))
			if ended := len(f.kept.byKey) == 0; ended != c.ends {
				t.Errorf("acknowledged by %d to %d: ended %t, want %t", c.by, c.of, ended, c.ends)
			}
		}
	})
	t.Run("answered", func(t *testing.T) {
		f := newFixture(t, Options{})
		f.p.recv(from(8, marked(5, 7, request(9, 3))))
		f.p.recv(from(8, request(9, 4)))
		sent := f.p.take()
		for i, want := range [][2]uint32{{7, 5}, {0, 0}} {
			if by, of := sent[i].meta.Incarnations(); by != want[0] || of != want[1] {
				t.Errorf("acknowledgement %d is by %d to %d, want %d", i, by, of, want)
			}
		}
	})
	t.Run("heartbeat", func(t *testing.T) {
		f := newFixture(t, Options{})
		if err := f.Connect(context.Background(), 10, record(6)); err != nil {
			t.Fatal(err)
		}
		for _, c := range []struct {
			inc  uint32
			cmd  van.Command
			want int
		}{{5, van.Heartbeat, 2}, {6, van.Heartbeat, 1}, {5, van.Barrier, 1}} {
			before := len(f.up)
			for range 2 {
				m := marked(c.inc, 7, request(9, 3))
				m.Control.Cmd, m.Control.Nodes = c.cmd, make([]van.Node, 1)
				f.p.recv(from(10, m))
			}
			if got := len(f.up) - before; got != c.want {
				t.Errorf("%s of incarnation %d, sent twice: handed up %d times, want %d", c.cmd, c.inc, got, c.want)
			}
		}
	})
	t.Run("a sign of life", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			f := newFixture(t, Options{Timeout: time.Second, MaxTries: 2})
			var told []bool
			f.WatchPeers(func(_ int, up bool, _ error) { told = append(told, up) })
			if err := f.Connect(context.Background(), 10, record(6)); err != nil {
				t.Fatal(err)
			}
			if err := f.Send(marked(7, 6, request(10, 1))); err != nil {
				t.Fatal(err)
			}
			time.Sleep(2500 * time.Millisecond)
			synctest.Wait()
			beat := func(inc uint32) *van.Message {
				m := marked(inc, 7, request(9, 3))
				m.Control.Cmd, m.Control.Nodes = van.Heartbeat, make([]van.Node, 1)
				return from(10, m)
			}
			f.p.recv(beat(5))
			f.p.recv(marked(5, 7, ack(10, 1)))
			if len(told) != 1 || told[0] {
				t.Errorf("told %v when the one that was replaced was heard, want only that the peer is lost", told)
			}
			f.p.recv(beat(6))
			if len(told) != 2 || !told[1] {
				t.Errorf("told %v, want that the peer is back when it is heard", told)
			}
		})
	})
}
