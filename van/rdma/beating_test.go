package rdma

import (
	"bytes"
	"log/slog"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/env"
)

// beats gives a node heartbeats.
func beats(c *env.Config) {
	c.HeartbeatInterval, c.HeartbeatTimeout = 500*time.Millisecond, 2*time.Second
}

// TestBeating: the scheduler knows of each node, and each node of the scheduler, that its thread
// answers, while the connection to it stands.
func TestBeating(t *testing.T) {
	r := newRig(t)
	r.real = true
	h, w, s := r.node(van.SchedulerID, beats), r.node(9, beats), r.node(8, beats)
	r.link(h, w)
	r.link(h, s)
	r.link(w, s)
	if h.answerer == nil {
		t.Skip("the scheduler's address is not this machine's")
	}
	for what, answers := range map[string]func() bool{
		"worker for the scheduler": func() bool { return h.Beating(9) }, "server for the scheduler": func() bool { return h.Beating(8) },
		"scheduler for the worker": func() bool { return w.Beating(van.SchedulerID) }, "scheduler for the server": func() bool { return s.Beating(van.SchedulerID) },
	} {
		r.until(what+" that answers", answers)
	}
	if w.Beating(8) || h.Beating(10) {
		t.Error("one answers who is not asked")
	}
	p := (*h.peers.Load())[9]
	r.net.Cut(h.addr, w.addr)
	h.must(control(w, 1))
	r.until("end of the connection", func() bool {
		_, stands := otherEnd(p)
		return !stands
	})
	if h.Beating(9) {
		t.Error("it answers without a connection")
	}
	r.net.Heal(h.addr, w.addr)
	r.until("answer", func() bool { return h.Beating(9) })
	s.answerer.Close() // as if its process were stopped
	s.answerer = nil
	r.until("end of the answers", func() bool { return !h.Beating(8) })
	w.close()
	if w.Beating(van.SchedulerID) {
		t.Error("a node that is closed has answers")
	}
}

// TestNotBeating: those who do not answer, and those who do not ask.
func TestNotBeating(t *testing.T) {
	silent := func(c *env.Config) { c.HeartbeatInterval, c.HeartbeatTimeout = 0, 0 }
	for name, x := range map[string]struct {
		real, original, taken bool
		edit                  func(*env.Config)
	}{
		"in memory":              {false, false, false, beats},
		"a node of the original": {true, true, false, beats},
		"no heartbeats":          {true, false, false, silent},
		"the port is taken":      {true, false, true, beats},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			r.real = x.real
			h := r.node(van.SchedulerID, x.edit)
			w := r.make(9, x.edit)
			if x.original {
				w.incarnation = 0
			}
			var log bytes.Buffer
			w.log = slog.New(slog.NewTextHandler(&log, nil))
			port := 0
			if x.taken {
				c, err := net.ListenUDP("udp4", &net.UDPAddr{IP: w.addr.AsSlice()})
				if err != nil {
					t.Skip(err)
				}
				defer c.Close()
				port = c.LocalAddr().(*net.UDPAddr).Port
			}
			w.listenOn(port)
			w.Start(func(m *van.Message) { w.in <- m.Retain() })
			r.link(h, w)
			<-time.After(time.Second) // several questions
			if h.Beating(9) {
				t.Error("the worker answers")
			}
			w.close()
			if said := strings.Contains(log.String(), "address already in use"); said != x.taken {
				t.Errorf("that the address is taken is said: %v, want %v", said, x.taken)
			}
		})
	}
}
