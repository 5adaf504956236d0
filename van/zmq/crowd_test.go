package zmq

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/env"
)

// crowdOf returns the number of unauthenticated connections of n.
func crowdOf(n *node) int {
	n.guard.mu.Lock()
	defer n.guard.mu.Unlock()
	return n.guard.crowd.silent.n + n.guard.crowd.heard.n
}

// allOf lists all connections.
func (g *guard) allOf() (all []*incoming) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, in := range g.conns {
		all = append(all, in)
	}
	return all
}

// age makes all connections older.
func (g *guard) age(d time.Duration) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, in := range g.conns {
		in.since = in.since.Add(-d)
	}
}

// TestCrowd: an unknown process opens many connections, which stay silent, are idle after the handshake, or have sent a message. It
// keeps no more than the limit. A message of another process is received at once (A10).
func TestCrowd(t *testing.T) {
	for _, kind := range []string{"half-open", "idle", "after a message"} {
		t.Run(kind, func(t *testing.T) {
			s := newNode(t, van.SchedulerID, 5, nil, nil)
			s.guard.mu.Lock()
			s.guard.crowd.most = 20
			s.guard.mu.Unlock()
			for range 100 {
				c, err := net.Dial("tcp", s.self.Addr())
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { _ = c.Close() })
				r := &raw{c, t}
				if kind == "half-open" {
					continue
				}
				if r.handshake("DEALER", "") == nil && kind != "idle" {
					_, _ = r.Write(append(frame(nil, true), frame([]byte("x"), false)...))
				}
			}
			until(t, "no more connections than the limit", func() bool { return s.Stats().DroppedUnknown >= 80 && crowdOf(s) <= 20 })
			newcomer := dialRaw(t, s, "new.00000009")
			newcomer.send(packed(t, heartbeat(van.SchedulerID, 7)))
			if m := s.next(t); m.Timestamp != 7 || m.Sender != van.Empty {
				t.Errorf("got message %d of %d", m.Timestamp, m.Sender)
			}
			if lines := strings.Count(s.logged.String(), "closed the connection of an unknown process"); lines < 1 || lines > 20 {
				t.Errorf("%d log lines of %d connections", lines, s.Stats().DroppedUnknown)
			}
		})
	}
}

// TestCrowdSparesOthers: silent unauthenticated connections displace neither connections that have sent a message nor members'
// connections. A host keeps as many silent connections as its C++ StepMesh members may have.
func TestCrowdSparesOthers(t *testing.T) {
	s := newNode(t, 9, 5, nil, nil)
	s.guard.mu.Lock()
	s.guard.crowd.most = 3
	s.guard.mu.Unlock()
	// A server of the original, whose connection to a worker is silent, and a member of this library.
	for id, incarnation := range map[int]uint32{8: 0, 10: 7} {
		rec := van.Node{Role: van.Server, ID: id, Hostname: "127.0.0.1", Port: 1}
		if incarnation != 0 {
			rec.Endpoint = (&van.NodeExtension{Incarnation: incarnation}).Encode()
		}
		if err := s.Connect(t.Context(), id, rec); err != nil {
			t.Fatal(err)
		}
	}
	member := dialRaw(t, s, "ps10.00000007")
	member.send(packed(t, heartbeat(9, 1)))
	s.next(t).Release()
	heard := dialRaw(t, s, "new.00000009")
	heard.send(packed(t, heartbeat(9, 2)))
	s.next(t).Release()
	silent := []*raw{dialRaw(t, s, "")}
	until(t, "both", func() bool { return len(s.guard.allOf()) >= 3 })
	s.guard.age(time.Second)
	for range 10 {
		silent = append(silent, dialRaw(t, s, ""))
		until(t, "no more than the limit", func() bool { return crowdOf(s) <= 4 })
		s.guard.age(time.Second)
	}
	original := dialRaw(t, s, "ps8") // the youngest of that host
	until(t, "end of the silent ones", func() bool { return s.Stats().DroppedUnknown >= 7 })
	if n := crowdOf(s); n != 4 {
		t.Errorf("%d connections are not members', want 4", n)
	}
	for i, r := range []*raw{member, heard, original} {
		r.send(packed(t, heartbeat(9, 10+i)))
		if m := s.next(t); int(m.Timestamp) != 10+i {
			t.Errorf("got message %d, want %d", m.Timestamp, 10+i)
		}
	}
	_ = silent[0].SetReadDeadline(time.Now().Add(limit))
	if _, err := io.Copy(io.Discard, silent[0]); err != nil {
		t.Errorf("the oldest silent connection: %v, want its end", err)
	}
}

// TestCrowdByHost: above the limit, connections of the host with the most connections are closed, the oldest first, until the host has
// no more than others. Then the oldest of all connections are closed.
func TestCrowdByHost(t *testing.T) {
	s := newNode(t, van.SchedulerID, 5, nil, nil)
	g := s.guard
	g.mu.Lock()
	defer g.mu.Unlock()
	var all []*incoming
	start := time.Now()
	for i, n := range []int{6, 3, 1} { // of 127.0.1.0 to 127.0.1.2
		for k := range n {
			in := &incoming{tcpSocket: tcpSocket{fd: -1}, host: netip.AddrFrom4([4]byte{127, 0, 1, byte(i)}), held: 10, name: peerName{id: k}, since: start.Add(time.Duration(len(all)))}
			g.place(in)
			all = append(all, in)
		}
	}
	g.held += 100
	for _, x := range []struct {
		most int
		want string
	}{
		{9, "0/1 0/2 0/3 0/4 0/5 1/0 1/1 1/2 2/0"},
		{7, "0/3 0/4 0/5 1/0 1/1 1/2 2/0"},
		{4, "0/5 1/1 1/2 2/0"},
		{2, "1/2 2/0"},
		{0, ""},
	} {
		g.turnOutBut(x.most, &g.crowd.silent, "there are too many")
		var kept []string
		for _, in := range all {
			if !in.ended {
				kept = append(kept, fmt.Sprintf("%d/%d", in.host.As4()[3], in.name.id))
			}
		}
		if strings.Join(kept, " ") != x.want || g.held != int64(10*x.most) || g.crowd.silent.n != x.most {
			t.Errorf("%v are left, counted as %d, with %d bytes; want %s, with %d", kept, g.crowd.silent.n, g.held, x.want, 10*x.most)
		}
	}
	if n := len(g.crowd.silent.of); n != 0 {
		t.Errorf("%d hosts without a connection are kept", n)
	}
}

// TestSilentForTooLong: a silent connection is closed. A connection that has sent a message stays. In a cluster with C++ StepMesh nodes,
// silent connections stay, too, since they may be members'.
func TestSilentForTooLong(t *testing.T) {
	s := newNode(t, van.SchedulerID, 5, nil, nil)
	heard := dialRaw(t, s, "new.00000009")
	heard.send(packed(t, heartbeat(van.SchedulerID, 1)))
	s.next(t).Release()
	silent := dialRaw(t, s, "")
	until(t, "both", func() bool { return crowdOf(s) == 2 })
	s.guard.lookAround(time.Now().Add(silentTime / 2))
	if n := s.Stats().DroppedUnknown; n != 0 {
		t.Fatalf("%d connections were ended too early", n)
	}
	s.guard.lookAround(time.Now().Add(silentTime))
	_ = silent.SetReadDeadline(time.Now().Add(limit))
	if _, err := io.Copy(io.Discard, silent); err != nil {
		t.Errorf("the silent connection: %v, want its end", err)
	}
	heard.send(packed(t, heartbeat(van.SchedulerID, 2)))
	s.next(t).Release()
	if !strings.Contains(s.logged.String(), "it sent no message within 10s") {
		t.Errorf("the log is %q", s.logged.String())
	}
	if err := s.Connect(t.Context(), 9, van.Node{Role: van.Worker, ID: 9, Hostname: "127.0.0.9", Port: 1}); err != nil {
		t.Fatal(err)
	}
	dialRaw(t, s, "")
	until(t, "the next one", func() bool { return crowdOf(s) == 2 })
	s.guard.lookAround(time.Now().Add(time.Hour))
	if n := s.Stats().DroppedUnknown; n != 1 {
		t.Errorf("%d connections were ended, want 1", n)
	}
}

// TestNoDescriptorLeft: if a connection cannot be accepted, the node logs that and closes unauthenticated connections.
func TestNoDescriptorLeft(t *testing.T) {
	s := newNode(t, van.SchedulerID, 5, nil, nil)
	for range 10 {
		dialRaw(t, s, "")
	}
	until(t, "all", func() bool { return crowdOf(s) == 10 })
	for range 1000 { // libzmq tries without a pause
		s.guard.notAccepted()
	}
	if n := s.Stats().DroppedUnknown; n != 5 {
		t.Errorf("%d connections were ended, want 5", n)
	}
	if text := s.logged.String(); strings.Count(text, "a connection could not be accepted") != 1 {
		t.Errorf("the log is %q", text)
	}
	var old unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &old); err != nil {
		t.Skip(err)
	}
	if got := s.guard.crowd.most; got < 1 || got > max(int(min(old.Cur, 1<<30))/crowdShare, crowdBase+16) {
		t.Errorf("%d connections may be strangers', of %d descriptors", got, old.Cur)
	}
}

// TestEndlessMessageBesideADeadWorker: the death of a worker does not raise the limit of an endless message of an unknown process (A9). If the
// worker is of C++ StepMesh, its first message may be long; only its host may then send more.
func TestEndlessMessageBesideADeadWorker(t *testing.T) {
	for _, x := range []struct {
		name   string
		record van.Node
	}{
		{"of this library", van.Node{Role: van.Worker, ID: 9, Hostname: "127.0.0.1", Port: 1, Endpoint: (&van.NodeExtension{Incarnation: 7}).Encode()}},
		{"of the original, elsewhere", van.Node{Role: van.Worker, ID: 9, Hostname: "127.0.0.9", Port: 1}},
	} {
		t.Run(x.name, func(t *testing.T) {
			server := newNode(t, 8, 5, nil, func(c *env.Config) { c.StrangerBudget = 1 << 20 })
			if err := server.Connect(t.Context(), 9, x.record); err != nil {
				t.Fatal(err)
			}
			until(t, "nothing waits", server.flow.drained.Load)
			r := dialRaw(t, server, "")
			if sent := endless(r); sent >= 256<<20 {
				t.Errorf("the stranger could send %d MiB", sent>>20)
			}
			if n := server.Stats().DroppedUnknown; n != 1 {
				t.Errorf("%d connections were ended, want 1; %s", n, fmt.Sprint(counted(server)))
			}
		})
	}
}

// TestPause: while libzmq has many connections that are shut down and not freed, no process can connect; afterwards it can.
func TestPause(t *testing.T) {
	s := newNode(t, van.SchedulerID, 5, nil, nil)
	ending := func(n int) {
		s.guard.mu.Lock()
		defer s.guard.mu.Unlock()
		s.guard.ending = n
		s.guard.pause()
	}
	ending(endingMost + 1)
	if c, err := net.DialTimeout("tcp", s.self.Addr(), 50*time.Millisecond); err == nil {
		_ = c.Close()
		t.Error("a connection was made in the pause")
	}
	ending(endingMost/2 + 1)
	if !s.guard.paused {
		t.Error("the pause ended too early")
	}
	ending(0)
	c, err := net.DialTimeout("tcp", s.self.Addr(), limit)
	if err != nil {
		t.Fatal(err)
	}
	_ = c.Close()
	until(t, "its end", func() bool { return crowdOf(s) == 0 })
	for range 20 { // each one that is ended counts until libzmq has freed it
		r := dialRaw(t, s, "")
		until(t, "the connection", func() bool { return crowdOf(s) == 1 })
		s.guard.lookAround(time.Now().Add(silentTime))
		until(t, "its end", func() bool {
			s.guard.mu.Lock()
			defer s.guard.mu.Unlock()
			return s.guard.ending == 0
		})
		_ = r.Close()
	}
}
