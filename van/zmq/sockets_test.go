package zmq_test

import (
	"testing"

	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/env"
	"github.com/stepaf/stepaf-go/van/zmq"
)

// worker is a van that listens.
func worker(t *testing.T, edit func(*env.Config)) van.Van {
	t.Helper()
	cfg := env.Default()
	cfg.Role = "worker"
	edit(cfg)
	v, err := zmq.New(van.Options{Config: cfg})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := v.Bind(t.Context(), van.Node{Role: van.Worker, ID: van.Empty, Hostname: "127.0.0.1"}); err != nil {
		t.Fatal(err)
	}
	v.Start(func(*van.Message) {})
	return v
}

// TestMaxSockets: BYTEPS_ZMQ_MAX_SOCKET counts one socket for each peer and one for
// the node itself, however many more libzmq needs to watch them.
func TestMaxSockets(t *testing.T) {
	const peers = 40
	v := worker(t, func(c *env.Config) { c.ZMQMaxSockets = peers + 1 })
	defer v.Close(t.Context())
	for i := range peers {
		if err := v.Connect(t.Context(), van.ServerID(i), van.Node{Role: van.Server, Hostname: "127.0.0.1", Port: 1}); err != nil {
			t.Fatalf("peer %d of %d: %v", i+1, peers, err)
		}
	}
}

// TestIPv6: an IPv6 address is refused with an error that names the required kind. libzmq itself reports that the
// address is not this host's, or silently connects to no peer.
func TestIPv6(t *testing.T) {
	cfg := env.Default()
	cfg.Role = "worker"
	v, err := zmq.New(van.Options{Config: cfg})
	if err != nil {
		t.Fatal(err)
	}
	defer v.Close(t.Context())
	_, err = v.Bind(t.Context(), van.Node{Role: van.Worker, ID: van.Empty, Hostname: "::1"})
	vantest.Fails(t, err, van.ErrInvalid, "bind", "::1 is an IPv6 address, want an IPv4 address")
	if _, err := v.Bind(t.Context(), van.Node{Role: van.Worker, ID: van.Empty, Hostname: "127.0.0.1"}); err != nil {
		t.Fatal(err)
	}
	v.Start(func(*van.Message) {})
	err = v.Connect(t.Context(), van.SchedulerID, van.Node{Role: van.Scheduler, Hostname: "fd00::2", Port: 1})
	vantest.Fails(t, err, van.ErrInvalid, "connect", "scheduler", "fd00::2 is an IPv6 address, want an IPv4 address")
}
