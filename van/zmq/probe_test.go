package zmq

import (
	"context"
	"errors"
	"net"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/env"
)

// TestProbe: a probe distinguishes a listening node from an address without a listener and from other programs. The probed
// node is not affected.
func TestProbe(t *testing.T) {
	for _, local := range []bool{false, true} {
		n := newNode(t, 8, 5, nil, func(c *env.Config) { c.Local = local })
		from := newNode(t, 9, 6, nil, func(c *env.Config) { c.Local = local })
		for range 20 {
			if err := from.Probe(t.Context(), n.self); err != nil {
				t.Errorf("local=%t: a node that listens: %v", local, err)
			}
		}
		gone := n.self
		gone.Port = 1 // no process listens there
		want := error(syscall.ECONNREFUSED)
		if local {
			want = syscall.ENOENT
		}
		if err := from.Probe(t.Context(), gone); !errors.Is(err, want) {
			t.Errorf("local=%t: nobody listens: %v, want %v", local, err, want)
		}
		if n.guard != nil {
			until(t, "end of the connections", func() bool {
				n.guard.mu.Lock()
				defer n.guard.mu.Unlock()
				return len(n.guard.conns) == 0 && n.guard.held == 0
			})
		}
		if s := n.Stats(); s.Malformed != 0 || s.DroppedUnknown != 0 || n.logged.String() != "" && strings.Contains(n.logged.String(), "WARN") {
			t.Errorf("local=%t: the node that was tried has %+v and logs %q", local, s, n.logged.String())
		}
	}
}

// TestProbeOfOthers: a program that sends other bytes, or no bytes, is not taken for a node.
func TestProbeOfOthers(t *testing.T) {
	from := newNode(t, 9, 6, nil, nil)
	for _, c := range []struct {
		says string
		want error
	}{
		{"SSH-2.0-OpenSSH_9.2\r\n", van.ErrMalformed},
		{"\xff\x00", van.ErrMalformed},
		{"", van.ErrTimeout},
	} {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		go func() {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = conn.Write([]byte(c.says))
			if c.says != "" {
				_ = conn.Close()
			}
		}()
		if err := from.Probe(t.Context(), van.Node{Hostname: "127.0.0.1", Port: l.Addr().(*net.TCPAddr).Port}); !errors.Is(err, c.want) {
			t.Errorf("a program that says %q: %v, want %v", c.says, err, c.want)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Nanosecond)
	defer cancel()
	if err := from.Probe(ctx, van.Node{Hostname: "127.0.0.1", Port: 1}); !errors.Is(err, syscall.ETIMEDOUT) {
		t.Errorf("no answer in time: %v, want %v", err, syscall.ETIMEDOUT)
	}
}

// TestReply: a process without an id receives the scheduler's reply on the connection that the process has made.
func TestReply(t *testing.T) {
	s := newNode(t, van.SchedulerID, 1, nil, nil)
	for _, role := range []van.Role{van.Worker, van.Server} {
		cfg := env.Default()
		v, err := New(van.Options{Config: cfg, Incarnation: uint32(10 + role)})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = v.Close(t.Context()) })
		if _, err := v.Bind(t.Context(), van.Node{Role: role, ID: van.Empty, Hostname: "127.0.0.1"}); err != nil {
			t.Fatal(err)
		}
		in := make(chan *van.Message, 16)
		v.Start(func(m *van.Message) { in <- m.Retain() })
		if err := v.Connect(t.Context(), van.SchedulerID, s.self); err != nil {
			t.Fatal(err)
		}
		m := &van.Message{}
		m.Reset()
		m.Timestamp, m.Control.Cmd, m.Body = 3, van.Heartbeat, []byte("stepaf/1 waiting for you")
		until(t, "reply that leaves", func() bool { return s.Reply(uint32(10+role), m) == nil })
		select {
		case got := <-in:
			if got.Sender != van.SchedulerID || string(got.Body) != string(m.Body) {
				t.Errorf("%s: %q of %d", role, got.Body, got.Sender)
			}
		case <-time.After(limit):
			t.Errorf("%s: no reply", role)
		}
		if err := s.Reply(99, m); !errors.Is(err, van.ErrPeerLost) {
			t.Errorf("a process that is not connected: %v", err)
		}
	}
}
