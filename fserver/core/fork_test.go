package core

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/internal/cluster"
)

// TestSocketsOf: hosts are resolved, and entries without an address are left out.
func TestSocketsOf(t *testing.T) {
	got := socketsOf([]int{7000, 7001}, []string{"10.0.0.7:4021", "[fd00::1]:4022", "nonsense", "127.0.0.1:99999", "no-such-host.invalid:4023"})
	want := []netip.AddrPort{netip.AddrPortFrom(netip.Addr{}, 4023), netip.MustParseAddrPort("10.0.0.7:4021"), netip.MustParseAddrPort("[fd00::1]:4022")}
	if !slices.Equal(got.Ports, []int{7000, 7001}) || !slices.Equal(got.Peers, want) {
		t.Errorf("got %v, want ports 7000 and 7001 and %v", got, want)
	}
}

// TestWatchSockets: the sockets are published while the node is in the cluster. After it has left, an empty list is
// published.
func TestWatchSockets(t *testing.T) {
	worker, _ := sessions(t)
	published := make(chan Sockets, 100)
	worker.watchSockets(func(s Sockets) { published <- s })
	next := func() Sockets {
		t.Helper()
		select {
		case s := <-published:
			return s
		case <-time.After(30 * time.Second):
			t.Fatal("nothing was published")
			return Sockets{}
		}
	}
	port, peers := (*cluster.Node)(worker.node).App().Addresses()
	if first := next(); !slices.Equal(first.Ports, port) || len(first.Peers) < len(peers) {
		t.Errorf("got %v, want port %d and the addresses of %v", first, port, peers)
	}
	worker.Close()
	for last := next(); last.Ports != nil || last.Peers != nil; last = next() {
	}
}
