package zmq

import (
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/env"
)

// beats gives a node heartbeats.
func beats(c *env.Config) {
	c.HeartbeatInterval, c.HeartbeatTimeout = 500*time.Millisecond, time.Second
}

// TestBeating: Alive is true for a peer of this library while the connections of both are established and this
// node has heartbeats.
func TestBeating(t *testing.T) {
	for name, x := range map[string]struct {
		edit        func(*env.Config)
		incarnation uint32
		want        bool
	}{
		"heartbeats":                 {beats, 5, true},
		"none":                       {nil, 5, false},
		"no limit":                   {func(c *env.Config) { c.HeartbeatInterval = time.Second }, 5, false},
		"to one of the original":     {beats, 0, false},
		"without a stranger's guard": {func(c *env.Config) { beats(c); c.StrangerBudget = 0 }, 5, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server, worker := newNode(t, 8, x.incarnation, nil, nil), newNode(t, 9, 7, nil, x.edit)
			link(t, server, worker)
			server.must(t, heartbeat(9, 1))
			worker.next(t)
			c := (*worker.peers.Load())[8]
			until(t, "connection", c.up.Load)
			if x.want {
				until(t, "answers", func() bool { return worker.Alive(8) })
			} else if worker.Alive(8) {
				t.Error("server 0 answers by itself")
			}
			if worker.Alive(10) {
				t.Error("an unknown peer answers by itself")
			}
			if server.Alive(9) {
				t.Error("a peer answers a node that sends no heartbeats")
			}
			worker.Disconnect(8)
			if worker.Alive(8) {
				t.Error("a peer answers behind the end of the connection")
			}
		})
	}
}

// TestBeatingEnds: Alive is false if the peer is silent although its connections are established, and if the peer's
// connection to this node has ended: another process may listen at its address.
func TestBeatingEnds(t *testing.T) {
	for name, ends := range map[string]func(t *testing.T, server *node, cut func()){
		"a peer that is silent":         func(_ *testing.T, _ *node, cut func()) { cut() },
		"a peer without its connection": func(_ *testing.T, server *node, _ func()) { server.Disconnect(9) },
		"another process at its address": func(t *testing.T, server *node, _ func()) {
			if err := server.Close(t.Context()); err != nil {
				t.Fatal(err)
			}
			v, err := New(van.Options{Config: server.cfg, Incarnation: 6})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = v.Close(t.Context()) })
			if _, err := v.Bind(t.Context(), server.self); err != nil {
				t.Fatal(err)
			}
			v.Start(func(*van.Message) {})
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server, worker := newNode(t, 8, 5, nil, nil), newNode(t, 9, 7, nil, beats)
			port, cut := proxyTo(t, server.self.Addr())
			rec := server.self
			if name == "a peer that is silent" {
				rec.Port = port
			}
			if err := worker.Connect(t.Context(), 8, rec); err != nil {
				t.Fatal(err)
			}
			server.connect(t, worker)
			server.must(t, heartbeat(9, 1))
			worker.next(t)
			until(t, "answers", func() bool { return worker.Alive(8) })
			ends(t, server, cut)
			until(t, "end of the answers", func() bool { return !worker.Alive(8) })
			if name == "another process at its address" {
				until(t, "connection", (*worker.peers.Load())[8].up.Load)
				if worker.Alive(8) {
					t.Error("another process answers for it")
				}
			}
		})
	}
}
