package rdma

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"testing"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// deviceless is a connect request on a device that cannot be used.
type deviceless struct{ requestedID }

func (*deviceless) Device() (verbs.Device, error) { return nil, errors.New("the device has gone") }

// lineCount counts the warnings of a log by their texts.
type lineCount struct {
	mu sync.Mutex
	n  map[string]int
}

// taken returns the counts since its last call.
func (c *lineCount) taken() map[string]int {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := c.n
	c.n = map[string]int{}
	return n
}

func (*lineCount) Enabled(_ context.Context, l slog.Level) bool { return l >= slog.LevelWarn }
func (c *lineCount) WithAttrs([]slog.Attr) slog.Handler         { return c }
func (c *lineCount) WithGroup(string) slog.Handler              { return c }
func (c *lineCount) Handle(_ context.Context, r slog.Record) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.n[r.Message]++
	return nil
}

// TestConnectFlood: rejected connect requests produce few log lines, however many arrive, and each reason is logged.
func TestConnectFlood(t *testing.T) {
	r := newRig(t)
	log := lineCount{n: map[string]int{}}
	s := r.make(8)
	s.log = slog.New(&log)
	s.listenOn(0)
	s.Start(func(*van.Message) {})
	old, next := r.node(9), r.node(9)
	r.link(old, s)
	before := s.incomingOf(9)
	s.connect(next)
	unknown := handshake{node: 11, port: 1, host: "10.77.1.99", native: true, qpCount: s.cfg.QPNum, incarnation: 77}
	other := unknown
	other.qpCount++
	for _, x := range []struct {
		line    string
		private []byte
		why     error
	}{
		{"rejected a connection", []byte("nonsense"), nil},
		{"rejected a connection", other.encode(), nil},
		{"could not accept a connection", unknown.encode(), nil},
		{"rejected a process that has been replaced", before.handshake.encode(), van.ErrReplaced},
	} {
		log.taken()
		const times = 1000
		for range times {
			id := &deviceless{}
			acceptor{s.rvan}.accept(verbs.Event{Type: verbs.ConnectRequest, New: id, Private: x.private, Peer: before.from})
			if id.rejected == nil {
				t.Fatalf("%s: not rejected", x.line)
			}
			if x.why != nil && !errors.Is(rejection(id.rejected), x.why) {
				t.Fatalf("%s: rejected with %v, want %v", x.line, rejection(id.rejected), x.why)
			}
		}
		lines := log.taken()
		for line, n := range lines { // including those of the old node, which retries meanwhile
			if n > 12 {
				t.Errorf("%s: %d lines for %d connect requests, want 1 to 12", line, n, times)
			}
		}
		if lines["rdma: "+x.line] == 0 {
			t.Errorf("%s: no line for %d connect requests", x.line, times)
		}
	}
}
