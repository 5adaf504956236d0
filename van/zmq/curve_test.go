package zmq

import (
	"errors"
	"io"
	"net"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/env"
)

const (
	testSecret  = "the secret of this cluster"
	otherSecret = "the secret of another cluster"
)

// withSecret sets a node's secret, none if it is empty, and its cluster's id.
func withSecret(secret, cluster string) func(*env.Config) {
	return func(c *env.Config) { c.Secret, c.ClusterID = env.Secret(secret), cluster }
}

// TestProofs connects a worker to a scheduler. Messages arrive if both have the same secret and cluster id.
// Otherwise none arrives, and both nodes log the reason, without a part of the secret.
func TestProofs(t *testing.T) {
	const (
		noneHere  = "it requires the cluster's secret, which this node does not have (STEPAF_SECRET_FILE)"
		noneThere = "it has no cluster secret, or STEPAF_AUTH is not require there"
		another   = "its secret (STEPAF_SECRET_FILE) or its STEPAF_CLUSTER_ID is another one"
		maybe     = "its secret (STEPAF_SECRET_FILE) may be missing or another one, or its STEPAF_CLUSTER_ID another one"
	)
	tests := []struct {
		name              string
		scheduler, worker func(*env.Config)
		accepts, dials    string // log lines of the scheduler and the worker
	}{
		{"no secret", withSecret("", ""), withSecret("", ""), "", ""},
		{"no secret, cluster ids are not compared here", withSecret("", "a"), withSecret("", "b"), "", ""},
		{"the same secret", withSecret(testSecret, ""), withSecret(testSecret, ""), "", ""},
		{"the same secret and cluster", withSecret(testSecret, "a"), withSecret(testSecret, "a"), "", ""},
		{"another secret", withSecret(testSecret, ""), withSecret(otherSecret, ""), another, maybe},
		{"another cluster", withSecret(testSecret, "a"), withSecret(testSecret, "b"), another, maybe},
		{"only the scheduler has one", withSecret(testSecret, ""), withSecret("", ""), noneThere, noneHere},
		{"both have it, and one does not require it", withSecret(testSecret, ""), func(c *env.Config) {
			withSecret(testSecret, "")(c)
			c.Auth = env.AuthOff
		}, noneThere, "STEPAF_AUTH is not require here"},
		{"only the worker has one", withSecret("", ""), withSecret(testSecret, ""), noneHere, noneThere},
	}
	for _, local := range []bool{false, true} {
		for _, c := range tests {
			t.Run(c.name, func(t *testing.T) {
				where := func(edit func(*env.Config)) func(*env.Config) {
					return func(cfg *env.Config) { edit(cfg); cfg.Local = local }
				}
				scheduler, worker := newNode(t, 1, 5, nil, where(c.scheduler)), newNode(t, 9, 7, nil, where(c.worker))
				lost := make(chan error, 100)
				worker.WatchPeers(func(_ int, up bool, cause error) {
					if !up {
						lost <- cause
					}
				})
				worker.connect(t, scheduler)
				err := worker.Send(heartbeat(1, 1))
				if c.accepts == "" {
					if err != nil {
						t.Error(err)
					}
					if m := scheduler.next(t); m.Timestamp != 1 {
						t.Errorf("message %d arrived, want 1", m.Timestamp)
					}
					if s := scheduler.Stats(); s.Unauthenticated != 0 {
						t.Errorf("%d connections without proof were counted, want 0", s.Unauthenticated)
					}
					return
				}
				// The handshake may have failed already, and this node may not know it yet.
				if err != nil && !errors.Is(err, van.ErrUnauthenticated) && !errors.Is(err, van.ErrQueueFull) {
					t.Error(err)
				}
				awaitUnauthenticated(t, lost)
				until(t, "line of the worker", func() bool { return strings.Contains(worker.logged.String(), c.dials) })
				from := "addr=127.0.0.1"
				if local {
					from = "a process of this user"
				}
				// The kernel does not name the owner of a connection that had ended when the node checked it; the next try is
				// named.
				until(t, "line of the scheduler", func() bool {
					return strings.Contains(scheduler.logged.String(), c.accepts) && strings.Contains(scheduler.logged.String(), from)
				})
				if scheduler.Stats().Unauthenticated == 0 || worker.Stats().Unauthenticated == 0 {
					t.Errorf("scheduler and worker counted %d and %d connections without proof", scheduler.Stats().Unauthenticated, worker.Stats().Unauthenticated)
				}
				for _, n := range []*node{scheduler, worker} {
					for _, secret := range []string{testSecret, otherSecret} {
						if strings.Contains(n.logged.String(), secret) {
							t.Errorf("a log shows the secret")
						}
					}
				}
				if len(scheduler.in) > 0 {
					t.Error("a message arrived")
				}
			})
		}
	}
}

// awaitUnauthenticated waits until a connection is lost because of a proof. The peer may have closed earlier ones before
// this node found the reason.
func awaitUnauthenticated(t *testing.T, lost <-chan error) {
	t.Helper()
	for end := time.After(limit); ; {
		select {
		case err := <-lost:
			if errors.Is(err, van.ErrUnauthenticated) {
				return
			}
		case <-end:
			t.Fatalf("no connection was lost because of a proof within %s", limit)
		}
	}
}

// TestRepeatedProofs: a peer with another secret retries repeatedly. Only few of its attempts are logged.
func TestRepeatedProofs(t *testing.T) {
	scheduler, worker := newNode(t, 1, 5, nil, withSecret(testSecret, "")), newNode(t, 9, 7, nil, withSecret(otherSecret, ""))
	worker.connect(t, scheduler)
	until(t, "ten tries", func() bool { return scheduler.Stats().Unauthenticated >= 10 })
	// A try has one of two causes: a wrong proof, or the end of the connection.
	if n := strings.Count(scheduler.logged.String(), "a connection was refused"); n > 8 {
		t.Errorf("%d lines for %d tries, want the 1st, 2nd, 4th and 8th of each cause", n, scheduler.Stats().Unauthenticated)
	}
	// A peer that leaves may end a handshake once, so only the second time is a warning.
	var levels []string
	until(t, "two lines of the worker", func() bool {
		levels = nil
		for line := range strings.Lines(worker.logged.String()) {
			if _, after, is := strings.Cut(line, "level="); is && strings.Contains(line, "may be missing or another one") {
				levels = append(levels, strings.Fields(after)[0])
			}
		}
		return len(levels) >= 2
	})
	if levels[0] != "INFO" || levels[1] != "WARN" {
		t.Errorf("the levels are %v, want INFO, WARN", levels)
	}
}

// TestStrangersWithASecret: data of a peer without a proof is never delivered. The peer is counted, and members are not affected.
func TestStrangersWithASecret(t *testing.T) {
	scheduler, member := newNode(t, 1, 5, nil, withSecret(testSecret, "")), newNode(t, 9, 7, nil, withSecret(testSecret, ""))
	link(t, scheduler, member)
	member.must(t, heartbeat(1, 1))
	scheduler.next(t)

	// A recorded handshake and message of another process of the cluster.
	tapped := newNode(t, 11, 8, nil, withSecret(testSecret, ""))
	behind := scheduler.self
	proxy, record := tap(t, scheduler.self.Addr())
	behind.Port = proxy.Addr().(*net.TCPAddr).Port
	if err := tapped.Connect(t.Context(), 1, behind); err != nil {
		t.Fatal(err)
	}
	tapped.must(t, heartbeat(1, 1))
	scheduler.next(t)
	recorded := record()

	plain := []byte{0xff, 0, 0, 0, 0, 0, 0, 0, 0, 0x7f, 3, 0}
	plain = append(plain, "NULL"...)
	plain = append(plain, make([]byte, 64-len(plain))...)
	ready := []byte("\x04\x26\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity")
	ready = append(ready, 0, 0, 0, 3, 'p', 's', '9')
	ready[1] = byte(len(ready) - 2)
	greeting := recorded[:64]
	for _, c := range []struct {
		name  string
		bytes []byte
		stays bool // the scheduler waits for more, and the test ends the connection
	}{
		{"nothing", nil, true},
		{"another protocol", []byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n"), false},
		{"ZMTP 2", append([]byte{0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 1, 5, 0, 3}, "ps9"...), false},
		{"a member's name without CURVE", append(append([]byte{}, plain...), ready...), false},
		{"a recorded handshake and message", recorded, false},
		{"a recorded handshake, cut off", recorded[:len(recorded)/2], true},
		{"a recorded first command", recorded[:64+2+200], true},
		{"commands of zeros", append(append([]byte{}, greeting...), append([]byte{4, 200, 5, 'H', 'E', 'L', 'L', 'O'}, make([]byte, 194)...)...), false},
		{"a message instead of the first command", append(append([]byte{}, greeting...), frame([]byte("hello"), false)...), false},
	} {
		t.Run(c.name, func(t *testing.T) {
			before := scheduler.Stats().Unauthenticated
			conn, err := net.Dial("tcp", scheduler.self.Addr())
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			_ = conn.SetDeadline(time.Now().Add(limit))
			if _, err := conn.Write(c.bytes); err != nil {
				t.Fatal(err)
			}
			if c.stays {
				_ = conn.Close()
			} else {
				_, _ = io.Copy(io.Discard, conn) // until the scheduler ends it
			}
			until(t, "counter", func() bool { return scheduler.Stats().Unauthenticated > before })
		})
	}
	t.Run("an echo", func(t *testing.T) { // the scheduler receives its own bytes
		conn, err := net.Dial("tcp", scheduler.self.Addr())
		if err != nil {
			t.Fatal(err)
		}
		_ = conn.SetDeadline(time.Now().Add(limit))
		if _, err := io.CopyN(conn, conn, 64); err != nil { // the greeting; then the scheduler waits for a command
			t.Error(err)
		}
		_ = conn.Close()
	})
	member.must(t, heartbeat(1, 2))
	if m := scheduler.next(t); m.Sender != 9 || m.Timestamp != 2 {
		t.Errorf("message %d of %d arrived, want 2 of 9", m.Timestamp, m.Sender)
	}
	if len(scheduler.in) > 0 {
		t.Error("a message of an unknown process arrived")
	}
	if cause := "it ended the handshake before it proved"; strings.Count(scheduler.logged.String(), cause) < 1 || strings.Count(scheduler.logged.String(), cause) > 4 {
		t.Errorf("the log says %q %d times, want the 1st, 2nd and 4th", cause, strings.Count(scheduler.logged.String(), cause))
	}
}

// TestProbesWithASecret: a member's probe completes the handshake, so that the probed node does not count it as an attempt without the secret.
// The probe of a node with another secret finds that something listens there.
func TestProbesWithASecret(t *testing.T) {
	for _, local := range []bool{false, true} {
		with := func(secret string) func(*env.Config) {
			return func(c *env.Config) { withSecret(secret, "")(c); c.Local = local }
		}
		probed, from := newNode(t, 8, 5, nil, with(testSecret)), newNode(t, 1, 6, nil, with(testSecret))
		from.proofs.limit = limit // a busy machine takes longer than the constant
		for range 20 {
			if err := from.Probe(t.Context(), probed.self); err != nil {
				t.Errorf("local=%t: a node that listens: %v", local, err)
			}
		}
		gone := probed.self
		gone.Port = 1 // no process listens there
		if err := from.Probe(t.Context(), gone); !errors.Is(err, syscall.ECONNREFUSED) && !errors.Is(err, syscall.ENOENT) {
			t.Errorf("local=%t: nobody listens: %v", local, err)
		}
		if n := probed.Stats().Unauthenticated; n != 0 {
			t.Errorf("local=%t: %d probes of a member were counted as attempts without the secret:\n%s", local, n, probed.logged.String())
		}
		if err := newNode(t, 1, 7, nil, with(otherSecret)).Probe(t.Context(), probed.self); err != nil {
			t.Errorf("local=%t: the probe of a node with another secret: %v", local, err)
		}
		until(t, "count of the attempt", func() bool { return probed.Stats().Unauthenticated > 0 })
	}
}

// TestNotZMTP: libzmq does not report connections that do not begin with ZMTP 3. With a secret each of them is counted, and few are logged.
// Probes and connections of members at the same time are not counted.
func TestNotZMTP(t *testing.T) {
	s := newNode(t, van.SchedulerID, 5, nil, withSecret(testSecret, ""))
	done := make(chan error, 1)
	prober := newNode(t, 8, 6, nil, withSecret(testSecret, ""))
	prober.proofs.limit = limit // a busy machine takes longer than the constant
	go func() {
		var err error
		for range 20 {
			err = errors.Join(err, prober.Probe(t.Context(), s.self))
		}
		done <- err
	}()
	const tries = 40
	for i := range tries {
		if i%4 == 0 {
			member := newNode(t, 9+2*i, uint32(100+i), nil, withSecret(testSecret, ""))
			member.connect(t, s) // one way: the scheduler counts its own connections that end in the handshake
			member.must(t, heartbeat(van.SchedulerID, i))
			s.next(t).Release()
			if i%8 == 0 {
				_ = member.Close(t.Context())
			}
		}
		c, err := net.Dial("tcp", s.self.Addr())
		if err != nil {
			t.Fatal(err)
		}
		_ = c.SetDeadline(time.Now().Add(limit))
		_, _ = c.Write([]byte("GET / HTTP/1.1\r\n\r\n"))
		_, _ = io.Copy(io.Discard, c) // until the scheduler ends it
		_ = c.Close()
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
	until(t, "all", func() bool { return s.Stats().Unauthenticated >= tries })
	if err := prober.Probe(t.Context(), s.self); err != nil {
		t.Error(err)
	}
	if n := s.Stats().Unauthenticated; n != tries {
		t.Errorf("%d connections without proof were counted, want %d\n%s", n, tries, s.logged.String())
	}
	if n := strings.Count(s.logged.String(), "it does not speak ZMTP 3"); n < 1 || n > 12 { // the 1st, 2nd, 4th ... with and without a known host
		t.Errorf("%d lines of %d tries", n, tries)
	}
}

// tap forwards a connection to addr and records what its client sends; the returned function returns that.
func tap(t *testing.T, addr string) (net.Listener, func() []byte) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	var mu sync.Mutex
	var record []byte
	go func() {
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		to, err := net.Dial("tcp", addr)
		if err != nil {
			return
		}
		defer to.Close()
		go func() { _, _ = io.Copy(c, to) }()
		b := make([]byte, 4096)
		for {
			n, err := c.Read(b)
			mu.Lock()
			record = append(record, b[:n]...)
			mu.Unlock()
			if err != nil {
				return
			}
			if _, err := to.Write(b[:n]); err != nil {
				return
			}
		}
	}()
	return l, func() []byte { mu.Lock(); defer mu.Unlock(); return append([]byte{}, record...) }
}

// TestRedial: a process without the secret listens at the address of a peer. When the peer has taken its place, the
// connection is made: libzmq alone would not try again.
func TestRedial(t *testing.T) {
	for _, c := range []struct{ first, then, worker string }{
		{"", testSecret, testSecret},
		{testSecret, "", ""},
		{otherSecret, testSecret, testSecret},
	} {
		wrong := newNode(t, 1, 5, nil, withSecret(c.first, ""))
		worker := newNode(t, 9, 7, nil, withSecret(c.worker, ""))
		up := make(chan bool, 100)
		lost := make(chan error, 100)
		worker.WatchPeers(func(_ int, is bool, cause error) {
			if is {
				up <- true
			} else {
				lost <- cause
			}
		})
		worker.connect(t, wrong)
		awaitUnauthenticated(t, lost)
		port := wrong.self.Port
		if err := wrong.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		right := newNodeAt(t, 1, 5, port, nil, withSecret(c.then, ""))
		<-up
		worker.must(t, heartbeat(1, 3))
		if m := right.next(t); m.Timestamp != 3 {
			t.Errorf("message %d arrived, want 3", m.Timestamp)
		}
	}
}

// TestWarn: with STEPAF_AUTH=warn nodes with and without the secret are admitted; the latter are counted and named.
func TestWarn(t *testing.T) {
	warn := func(edit func(*env.Config)) func(*env.Config) {
		return func(c *env.Config) { edit(c); c.Auth = env.AuthWarn }
	}
	for _, c := range []struct {
		name   string
		worker func(*env.Config)
		line   string // of the scheduler; "": the worker has proved itself
	}{
		{"the same secret", warn(withSecret(testSecret, "")), ""},
		{"no secret", withSecret("", ""), "it has no cluster secret"},
		{"another secret", warn(withSecret(otherSecret, "")), "is another one"},
		{"another cluster", warn(withSecret(testSecret, "b")), "is another one"},
	} {
		t.Run(c.name, func(t *testing.T) {
			scheduler, worker := newNode(t, 1, 5, nil, warn(withSecret(testSecret, ""))), newNode(t, van.Empty, 7, nil, c.worker)
			worker.connect(t, scheduler)
			register := heartbeat(1, 1)
			register.Control.Cmd = van.AddNode
			register.Control.Nodes = []van.Node{worker.self}
			worker.must(t, register)
			scheduler.next(t)
			register.Body = []byte("stepaf/1 register 0123456789abcdef") // with the proof of its address, when it is to replace another
			worker.must(t, register)
			if m := scheduler.next(t); string(m.Body) != "stepaf/1 register 0123456789abcdef" {
				t.Errorf("the registration has the text %q", m.Body)
			}
			said := strings.Contains(scheduler.logged.String(), "a node without proof was admitted (STEPAF_AUTH=warn)")
			if n := scheduler.Stats().Unauthenticated; said != (c.line != "") || (n == 2) != said || !strings.Contains(scheduler.logged.String(), c.line) {
				t.Errorf("%d nodes without proof were counted, want %t; log: %s", n, c.line != "", scheduler.logged.String())
			}
		})
	}
}

// TestRestartWithASecret: a scheduler is started again at its address; a worker connects to it again.
func TestRestartWithASecret(t *testing.T) {
	first, worker := newNode(t, 1, 5, nil, withSecret(testSecret, "")), newNode(t, 9, 7, nil, withSecret(testSecret, ""))
	up := make(chan bool, 100)
	worker.WatchPeers(func(_ int, is bool, cause error) {
		t.Log(is, cause)
		if is {
			up <- true
		}
	})
	link(t, first, worker)
	<-up
	worker.must(t, heartbeat(1, 1))
	first.next(t)
	first.must(t, heartbeat(9, 1))
	worker.next(t)
	port := first.self.Port
	if err := first.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	second := newNodeAt(t, 1, 6, port, nil, withSecret(testSecret, ""))
	<-up
	second.connect(t, worker)
	worker.must(t, heartbeat(1, 2))
	if m := second.next(t); m.Timestamp != 2 {
		t.Errorf("message %d arrived, want 2", m.Timestamp)
	}
}
