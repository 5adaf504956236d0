package tcp

import (
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
)

// beats returns options with limit as PS_HEARTBEAT_TIMEOUT.
func beats(limit time.Duration) func(*van.Options) {
	return func(o *van.Options) {
		o.Config.RecvBudgetPeer, o.Config.HeartbeatInterval, o.Config.HeartbeatTimeout = 1<<20, limit/4, limit
	}
}

// TestClosedWindow: a connection stays while its receiver accepts no bytes for longer than PS_HEARTBEAT_TIMEOUT, because a handler is
// slow. Then all messages arrive.
func TestClosedWindow(t *testing.T) {
	worker, server, open := stuck(t, beats(500*time.Millisecond))
	const count = 24
	for i := range count {
		worker.must(dataMessage(8, i, true, true, pattern(4<<20, i)))
	}
	c := worker.peers.Of(8).Link()
	vantest.Eventually(t, limit, "the kernel has probed the window for three seconds", func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.gone {
			t.Fatalf("the connection has ended: %v", c.cause)
		}
		i, err := unix.GetsockoptTCPInfo(c.fd, unix.IPPROTO_TCP, unix.TCP_INFO)
		return err == nil && i.Backoff >= 4
	})
	open()
	for i := range count {
		m := server.next()
		if int(m.Timestamp) != i {
			t.Fatalf("message %d arrived, want %d", m.Timestamp, i)
		}
		m.Release()
	}
	if worker.told("8 false") {
		t.Errorf("the worker's events: %v", worker.events)
	}
}

// TestSilentHost: a connection whose packets vanish ends after PS_HEARTBEAT_TIMEOUT, also if its ends send nothing, and is made again.
func TestSilentHost(t *testing.T) {
	t.Run("sends", func(t *testing.T) { silentHost(t, true) })
	t.Run("waits", func(t *testing.T) { silentHost(t, false) })
}

func silentHost(t *testing.T, sends bool) {
	worker, server := pair(t, beats(time.Second))
	worker.must(dataMessage(8, 1, true, true, []byte("before")))
	server.next().Release()
	drop := unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K}
	server.peers.Mu.Lock()
	err := unix.SetsockoptSockFprog(server.peers.Ins()[0].fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: 1, Filter: &drop})
	server.peers.Mu.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	if sends {
		worker.must(dataMessage(8, 2, true, true, []byte("lost")))
	}
	vantest.Eventually(t, limit, "the loss and the return are reported", func() bool { return worker.told("8 false", "8 true") })
	worker.must(dataMessage(8, 3, true, true, []byte("after")))
	if m := server.next(); m.Timestamp != 3 {
		t.Errorf("message %d arrived, want 3", m.Timestamp)
	}
}
