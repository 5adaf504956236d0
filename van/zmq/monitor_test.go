package zmq

import (
	"context"
	"net"
	"sync"
	"syscall"
	"testing"
	"time"

	zmq4 "github.com/pebbe/zmq4"
	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/env"
)

// stall makes the one I/O thread of n, which is connected to other, wait until goOn is called.
func stall(t *testing.T, n, other *node) (goOn func()) {
	t.Helper()
	// A monitor that is not read blocks the thread.
	z, err := n.zctx.NewSocket(zmq4.DEALER)
	if err != nil {
		t.Fatal(err)
	}
	_ = z.SetLinger(0)
	_ = z.SetReconnectIvl(time.Millisecond)
	if err := z.Monitor("inproc://stall", zmq4.EVENT_ALL); err != nil {
		t.Fatal(err)
	}
	pair, err := n.zctx.NewSocket(zmq4.PAIR)
	if err != nil {
		t.Fatal(err)
	}
	_ = pair.SetLinger(0)
	_ = pair.SetRcvhwm(1)
	if err := pair.Connect("inproc://stall"); err != nil {
		t.Fatal(err)
	}
	if err := z.Connect("tcp://127.0.0.1:1"); err != nil {
		t.Fatal(err)
	}
	stalled := false
	pace := time.Tick(100 * time.Millisecond)
	for end := time.Now().Add(limit); !stalled && time.Now().Before(end); <-pace {
		n.must(t, heartbeat(other.self.ID, 1))
		select {
		case m := <-other.in:
			m.Release()
		case <-time.After(2 * time.Second):
			stalled = true
		}
	}
	goOn = sync.OnceFunc(func() {
		go func() {
			for {
				if _, err := pair.RecvMessageBytes(0); err != nil {
					_ = pair.Close()
					return
				}
			}
		}()
		_ = z.Close()
	})
	t.Cleanup(goOn) // else the node's Close would wait
	if !stalled {
		t.Fatal("libzmq's thread does not wait for a monitor")
	}
	return goOn
}

// freed waits until libzmq has freed the socket of c.
func freed(t *testing.T, c *conn) {
	t.Helper()
	select {
	case <-c.mon.stopped:
	case <-time.After(limit):
		t.Fatal("libzmq does not free the socket of a connection that has ended")
	}
}

// TestMonitorOutlastsIOThread: a connection is ended while libzmq's thread is busy for longer than freeTime, as
// during a lookup of a host's name. The node's other connections go on afterwards.
func TestMonitorOutlastsIOThread(t *testing.T) {
	scheduler := newNode(t, 1, 5, nil, func(c *env.Config) { c.ZMQIOThreads = 1 })
	peer, other := newNode(t, 9, 7, nil, nil), newNode(t, 11, 7, nil, nil)
	scheduler.connect(t, peer)
	scheduler.connect(t, other)
	for _, n := range []*node{peer, other} {
		scheduler.must(t, heartbeat(n.self.ID, 0))
		n.next(t).Release()
	}
	goOn := stall(t, scheduler, other)
	// A connection that is replaced is ended without linger.
	if err := scheduler.Connect(t.Context(), 9, peer.self); err != nil {
		t.Fatal(err)
	}
	<-time.After(freeTime + freeTime/2)
	goOn()
	for range 3 { // libzmq frees the sockets of others that are ended
		c := (*scheduler.peers.Load())[11]
		if err := scheduler.Connect(t.Context(), 11, other.self); err != nil {
			t.Fatal(err)
		}
		freed(t, c)
	}
}

// TestCloseOutlastsIOThread: a node is closed while libzmq's thread is busy for longer than freeTime. Close returns
// when the thread goes on.
func TestCloseOutlastsIOThread(t *testing.T) {
	scheduler := newNode(t, 1, 5, nil, func(c *env.Config) { c.ZMQIOThreads = 1 })
	other := newNode(t, 11, 7, nil, nil)
	scheduler.connect(t, other)
	scheduler.must(t, heartbeat(11, 0))
	other.next(t).Release()
	goOn := stall(t, scheduler, other)
	ctx, cancel := context.WithTimeout(t.Context(), 0) // no linger
	defer cancel()
	closed := make(chan error, 1)
	go func() { closed <- scheduler.Close(ctx) }()
	<-time.After(freeTime + freeTime/2) // the context is being ended
	goOn()
	select {
	case <-closed:
	case <-time.After(limit):
		t.Fatal("Close does not return")
	}
}

// TestFilesLack: a connection for which this process may have no more descriptors is an error that says so, whichever of
// them is the first that is lacking. It does not keep libzmq from freeing the sockets of others.
func TestFilesLack(t *testing.T) {
	server, worker := newNode(t, 8, 5, nil, nil), newNode(t, 9, 7, nil, nil)
	link(t, worker, server)
	worker.must(t, push(8, 0, nil))
	server.next(t).Release()
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &l); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Setrlimit(unix.RLIMIT_NOFILE, &l) }()
	refused := 0
	for n := range 12 {
		next, err := unix.FcntlInt(0, unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		_ = unix.Close(next)
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: uint64(next + n), Max: l.Max}); err != nil {
			t.Fatal(err)
		}
		err = worker.Connect(t.Context(), van.ServerID(1+n), van.Node{Role: van.Server, Hostname: "127.0.0.1", Port: 1})
		if setErr := unix.Setrlimit(unix.RLIMIT_NOFILE, &l); setErr != nil {
			t.Fatal(setErr)
		}
		if err != nil {
			refused++
			vantest.Fails(t, err, syscall.EMFILE, "connect", "server", "too many open files")
		}
	}
	if refused == 0 { // 5 at least, unless libzmq closes sockets of earlier attempts meanwhile
		t.Error("none of 12 failed, want those that had less than 5 descriptors")
	}
	c := (*worker.peers.Load())[8]
	worker.Disconnect(8)
	freed(t, c)
}

// TestBusyGuard: while the guard does not read what libzmq reports of a flood of connections, libzmq's thread reads what members send.
func TestBusyGuard(t *testing.T) {
	scheduler, member := newNode(t, 1, 5, nil, nil), newNode(t, 9, 7, nil, nil)
	link(t, scheduler, member)
	member.must(t, heartbeat(1, 0))
	scheduler.next(t).Release()
	until(t, "connection that is the member's", (*scheduler.peers.Load())[9].seen)
	scheduler.guard.mu.Lock()
	defer scheduler.guard.mu.Unlock()
	for range 1500 { // two events each, and libzmq's default is 2000
		c, err := net.DialTimeout("tcp", scheduler.self.Addr(), limit)
		if err != nil {
			t.Fatal(err)
		}
		_ = c.(*net.TCPConn).SetLinger(0)
		_ = c.Close()
	}
	for i := range 3 {
		member.must(t, heartbeat(1, 1+i))
		if m := scheduler.next(t); int(m.Timestamp) != 1+i {
			t.Errorf("got message %d, want %d", m.Timestamp, 1+i)
		}
	}
}
