package rdma

import (
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/env"
	"github.com/stepaf/stepaf-go/van/rdma/liveness"
)

// withHeartbeats enables heartbeats.
func withHeartbeats(c *env.Config) {
	c.HeartbeatInterval, c.HeartbeatTimeout = 500*time.Millisecond, 2*time.Second
}

// needsThread skips a test in a build without the responder's thread.
func needsThread(t *testing.T) {
	t.Helper()
	a, err := liveness.StartResponder(netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), 0), 1)
	if err != nil {
		t.Skip(err)
	}
	a.Close()
}

// TestLiveness: the scheduler knows of each node, and each node of the scheduler, that its thread answers, as long as the connection to it is
// up.
func TestLiveness(t *testing.T) {
	needsThread(t)
	r := newRig(t)
	r.real = true
	h, w, s := r.node(van.SchedulerID, withHeartbeats), r.node(9, withHeartbeats), r.node(8, withHeartbeats)
	r.link(h, w)
	r.link(h, s)
	r.link(w, s)
	if h.liveness.responder == nil {
		t.Fatal("no thread answers for the scheduler")
	}
	for what, answers := range map[string]func() bool{
		"worker for the scheduler": func() bool { return h.Alive(9) }, "server for the scheduler": func() bool { return h.Alive(8) },
		"scheduler for the worker": func() bool { return w.Alive(van.SchedulerID) }, "scheduler for the server": func() bool { return s.Alive(van.SchedulerID) },
	} {
		r.until(what+" that answers", answers)
	}
	if w.Alive(8) || h.Alive(10) {
		t.Error("one answers who is not asked")
	}
	p := (*h.tables.peers.Load())[9]
	r.net.Cut(h.addr, w.addr)
	h.must(control(w, 1))
	r.until("end of the connection", func() bool {
		_, stands := remoteProcess(p)
		return !stands
	})
	if h.Alive(9) {
		t.Error("it answers without a connection")
	}
	r.net.Heal(h.addr, w.addr)
	r.until("answer", func() bool { return h.Alive(9) })
	s.liveness.responder.Close() // as if its process were stopped
	s.liveness.responder = nil
	r.until("end of the answers", func() bool { return !h.Alive(8) })
	w.close()
	if w.Alive(van.SchedulerID) {
		t.Error("a node that is closed has answers")
	}
}

// TestNotProbed: nodes that do not probe, and nodes that are not probed.
func TestNotProbed(t *testing.T) {
	needsThread(t)
	silent := func(c *env.Config) { c.HeartbeatInterval, c.HeartbeatTimeout = 0, 0 }
	for name, x := range map[string]struct {
		real, original, asks bool
		edit                 func(*env.Config)
	}{
		"in memory":              {false, false, false, withHeartbeats},
		"a node of the original": {true, true, true, withHeartbeats},
		"no heartbeats":          {true, false, false, silent},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			r.real = x.real
			h := r.node(van.SchedulerID, x.edit)
			w := r.make(9, x.edit)
			if x.original {
				w.local.incarnation = 0
			}
			w.listenOn(0)
			w.Start(func(m *van.Message) { w.in <- m.Retain() })
			r.link(h, w)
			if asks := h.liveness.prober != nil; asks != x.asks {
				t.Errorf("the scheduler asks: %v, want %v", asks, x.asks)
			}
			if all := h.liveness.probedProcesses(); x.original && len(all) > 0 {
				t.Errorf("a node of the original is asked: %v", all)
			}
			if h.Alive(9) {
				t.Error("the worker answers")
			}
		})
	}
}

// TestLivenessPortTaken: a node logs that another program uses its UDP port, and probes of it are not answered.
func TestLivenessPortTaken(t *testing.T) {
	needsThread(t)
	r := newRig(t)
	r.real = true
	h, w := r.node(van.SchedulerID, withHeartbeats), r.make(9, withHeartbeats)
	c, err := net.ListenUDP("udp4", &net.UDPAddr{IP: w.addr.AsSlice()})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	w.listenOn(c.LocalAddr().(*net.UDPAddr).Port)
	w.Start(func(m *van.Message) { w.in <- m.Retain() })
	r.link(h, w)
	if err := c.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if _, _, err := c.ReadFromUDP(make([]byte, 100)); err != nil {
			t.Fatalf("a question: %v", err)
		}
	}
	if h.Alive(9) {
		t.Error("the worker answers")
	}
	if !strings.Contains(w.logged.String(), "address already in use") {
		t.Errorf("that the address is taken is not said:\n%s", w.logged.String())
	}
}
