package resend

import (
	"context"
	"strings"
	"testing"

	"github.com/stepaf/stepaf-go/van"
)

// Duplicates are delivered once, and the memory for that is limited.

func TestDuplicates(t *testing.T) {
	f := newFixture(t, Options{})
	other := func(change func(*van.Message)) *van.Message {
		m := request(9, 5)
		change(m)
		return from(8, m)
	}
	for i, c := range []struct {
		name string
		m    *van.Message
		up   bool
	}{
		{"first", other(func(*van.Message) {}), true},
		{"same", other(func(*van.Message) {}), false},
		{"pull of the same timestamp", other(func(m *van.Message) { m.Push = false }), true},
		{"other customer", other(func(m *van.Message) { m.CustomerID = 1 }), true},
		{"simple", other(func(m *van.Message) { m.SimpleApp = true }), true},
		{"control", other(func(m *van.Message) { m.Control.Cmd, m.Push = van.Barrier, false }), true},
		{"control again", other(func(m *van.Message) { m.Control.Cmd, m.Push = van.Barrier, false }), false},
		{"other sender", from(10, request(9, 5)), true},
	} {
		before := len(f.up)
		f.p.recv(c.m)
		if up := len(f.up) > before; up != c.up {
			t.Errorf("%d %s: handed up %t, want %t", i, c.name, up, c.up)
		}
		if s := f.p.take(); len(s) != 1 || s[0].meta.Control.Cmd != van.Ack {
			t.Errorf("%d %s: answered by %d messages, want one acknowledgement", i, c.name, len(s))
		}
	}
	// A restarted node counts from the beginning.
	for _, addr := range []string{"a", "b"} {
		if err := f.Connect(context.Background(), 8, van.Node{Hostname: addr}); err != nil {
			t.Fatal(err)
		}
	}
	before := len(f.up)
	f.p.recv(from(8, request(9, 5)))
	if len(f.up) != before+1 {
		t.Error("the first message of a replaced node was dropped")
	}
}

// TestDuplicateFlood: any number of duplicates causes only a few log lines.
func TestDuplicateFlood(t *testing.T) {
	f := newFixture(t, Options{})
	const times = 1000
	for range times + 1 {
		f.p.recv(from(8, request(9, 5)))
	}
	if len(f.up) != 1 {
		t.Errorf("%d messages were handed up, want 1", len(f.up))
	}
	if n := strings.Count(f.log.String(), "duplicate message"); n == 0 || n > 10 {
		t.Errorf("%d lines of %d duplicate messages, want 1 to 10", n, times)
	}
}

func TestWindow(t *testing.T) {
	type step struct {
		ts   int32
		want bool
	}
	for _, c := range []struct {
		name  string
		steps []step
	}{
		{"in order", []step{{0, false}, {1, false}, {1, true}, {0, true}}},
		{"late", []step{{5, false}, {3, false}, {3, true}, {4, false}}},
		{"gap", []step{{0, false}, {1000, false}, {999, false}, {999, true}, {1, false}, {0, true}}},
		{"too old", []step{{0, false}, {windowSize, false}, {0, true}, {1, false}}},
		{"jump", []step{{7, false}, {7 + 3*windowSize, false}, {8 + 2*windowSize, false}, {7 + 2*windowSize, true}}},
		{"reused bit", []step{{7, false}, {6 + windowSize, false}, {7 + windowSize, false}, {7 + windowSize, true}}},
		{"wrap", []step{{1<<31 - 1, false}, {-1 << 31, false}, {1<<31 - 1, true}, {-1<<31 + 1, false}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWindow(0)
			for i, s := range c.steps {
				if got := w.add(s.ts); got != s.want {
					t.Errorf("step %d: add(%d) = %t, want %t", i, s.ts, got, s.want)
				}
			}
		})
	}
}

// TestLateAnswer: an answer may be any number of timestamps later than others, since a node numbers its requests but answers those of
// others in any order. It is delivered, while a request that late counts as a duplicate.
func TestLateAnswer(t *testing.T) {
	for _, isRequest := range []bool{false, true} {
		f := newFixture(t, Options{})
		recv := func(ts int) bool {
			m := request(9, ts)
			m.Request = isRequest
			before := len(f.up)
			f.p.recv(from(8, m))
			if s := f.p.take(); len(s) != 1 || s[0].meta.Control.Cmd != van.Ack {
				t.Errorf("request %t, timestamp %d: answered by %d messages, want one acknowledgement", isRequest, ts, len(s))
			}
			return len(f.up) > before
		}
		for _, x := range []struct {
			ts   int
			want bool
		}{{10, true}, {11 + windowSize, true}, {11 + windowSize, false}, {5, !isRequest}, {12, true}, {12, false}} {
			if got := recv(x.ts); got != x.want {
				t.Errorf("request %t, timestamp %d: delivered %t, want %t", isRequest, x.ts, got, x.want)
			}
		}
	}
}

// TestOldestStreamForgotten: the most recently used streams are kept.
func TestOldestStreamForgotten(t *testing.T) {
	f := newFixture(t, Options{})
	recv := func(app, ts int) {
		m := request(9, ts)
		m.AppID = int32(app)
		f.p.recv(from(8, m))
	}
	for app := range maxStreams {
		recv(app, 1)
	}
	recv(0, 2)
	recv(maxStreams, 1) // one too many
	before := len(f.up)
	recv(0, 2)
	recv(maxStreams, 1)
	if n := len(f.up) - before; n != 0 {
		t.Errorf("%d messages of the streams used last were handed up twice", n)
	}
}

func TestMemoryIsBounded(t *testing.T) {
	f := newFixture(t, Options{})
	for app := range int32(10 * maxStreams) {
		m := request(9, 0)
		m.AppID = app
		f.p.recv(from(8, m))
	}
	if n := len(f.seen.peers[8].lives[0].streams); n != maxStreams {
		t.Errorf("%d streams of one peer, want %d", n, maxStreams)
	}
	for from := range uint32(10) {
		f.p.recv(of(from, 8, request(9, 0)))
	}
	if n := len(f.seen.peers[8].lives); n != maxLives {
		t.Errorf("%d processes of one peer, want %d", n, maxLives)
	}
	for id := range 2 * maxPeers {
		f.seen.note(from(100+id, request(9, 0)))
	}
	if n := len(f.seen.peers); n != maxPeers {
		t.Errorf("%d peers, want %d", n, maxPeers)
	}
}
