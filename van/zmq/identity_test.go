package zmq

import (
	"net/netip"
	"testing"

	"github.com/stepaf/stepaf-go/internal/hostaddr"
	"github.com/stepaf/stepaf-go/van"
)

// TestRoutingIDs: only the exact form that a node produces names a node. Any other routing id, even with the same number
// in another form, is an unknown peer.
func TestRoutingIDs(t *testing.T) {
	for _, p := range []peerName{{1, 0}, {8, 0}, {9, 0}, {32766, 0}, {9, 1}, {9, 0xbadcafe}, {32766, 0xffffffff}, {1, 0x80000000}} {
		if got, ours := nameOf([]byte(routingID(p, 5)), 5); got != p || !ours {
			t.Errorf("%q is read as %+v, for this process: %t; want %+v", routingID(p, 5), got, ours, p)
		}
		if got, ours := nameOf([]byte(routingID(p, 6)), 5); got != p || ours != (p.incarnation == 0) {
			t.Errorf("%q is read as %+v, for this process: %t", routingID(p, 6), got, ours)
		}
	}
	if got := routingID(peerName{9, 0xbadcafe}, 5); got != "ps9.0badcafe.00000005" {
		t.Errorf("routing id %q, want ps9.0badcafe.00000005", got)
	}
	for name, want := range map[string]peerName{
		serialName(routingID(peerName{1, 0xbadcafe}, 5), 7): {1, 0xbadcafe},
		serialName(routingID(peerName{9, 0xbadcafe}, 5), 7): {id: van.Empty}, // only the scheduler's connections are numbered
		"ps1.0badcafe.00000005.0000007":                     {id: van.Empty},
		"ps1.0badcafe.00000005.0000000x":                    {id: van.Empty},
		"ps1.0badcafe.00000005-00000007":                    {id: van.Empty},
		"ps1.0badcafe.00000005.00000007.00000007":           {id: van.Empty},
		"ps1.00000007": {id: van.Empty},
	} {
		if got, _ := nameOf([]byte(name), 5); got != want {
			t.Errorf("%q is read as %+v, want %+v", name, got, want)
		}
	}
	for _, s := range []string{
		"", "p", "ps", "PS9", "xs9", "ps09", "ps009", "ps01", "ps0", "ps+9", "ps-9", "ps9 ", " ps9", "ps9\x00", "ps9x", "ps",
		"ps2", "ps3", "ps4", "ps5", "ps6", "ps7", // groups
		"ps32767", "ps32768", "ps65545", "ps99999", "ps999999", "ps4294967305", "ps18446744073709551625", "ps99999999999999999999999999",
		"ps9.", "ps9.1", "ps9.00000000", "ps9.0badcaf", "ps9.0badcafe0", "ps9.0BADCAFE", "ps9.0badcafg", "ps9.0badcafe.", "ps9..0badcafe", "ps.0badcafe",
		"ps09.0badcafe.00000005", "ps32767.0badcafe.00000005", "\x00abcd", "\x00\x80\x00\x41\xa7",
		"ps9.0badcafe", "ps9.00000000.00000005", "ps9.0badcafe.00000000", "ps9.0badcafe.0000000", "ps9.0badcafe.000000005",
		"ps9.0badcafe.0000000A", "ps9.0badcafe.00000005.", "ps9.0badcafe-00000005", "ps9.0badcafe..0000005", "ps.0badcafe.00000005",
	} {
		if got, _ := nameOf([]byte(s), 5); got != (peerName{id: van.Empty}) {
			t.Errorf("%q is read as %+v, want a stranger", s, got)
		}
	}
	if got, _ := nameOf([]byte("ps9.0badcafe.00000000"), 0); got != (peerName{id: van.Empty}) { // a node that speaks as one of the original
		t.Errorf("a name for nobody is read as %+v, want a stranger", got)
	}
	if n := testing.AllocsPerRun(100, func() { nameOf([]byte("ps9.0badcafe.00000005"), 5) }); n != 0 {
		t.Errorf("reading a routing id allocates %v times", n)
	}
}

// TestOrigin: a message is of its sender's host if it arrives from that address, or if both addresses are this
// host's.
func TestOrigin(t *testing.T) {
	lo, eth := netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("10.0.0.5")
	here := hostaddr.Host{Interfaces: []hostaddr.Interface{{Name: "lo", Up: true, Loopback: true, Addrs: []netip.Addr{lo}}, {Name: "eth0", Up: true, Addrs: []netip.Addr{eth}}}}
	for _, x := range []struct {
		from, host string
		want       van.Origin
	}{
		{"10.0.0.1", "10.0.0.1", van.OriginHost},
		{"10.0.0.1", "::ffff:10.0.0.1", van.OriginHost},
		{"10.0.0.2", "10.0.0.1", van.OriginOther},
		{"10.0.0.5", "127.0.0.1", van.OriginHost}, // the scheduler of this host connects to this node's address
		{"127.0.0.1", "10.0.0.5", van.OriginHost},
		{"10.0.0.5", "0.0.0.0", van.OriginHost},
		{"10.0.0.2", "127.0.0.1", van.OriginOther},
		{"127.0.0.1", "10.0.0.1", van.OriginOther},
		{"10.0.0.1", "scheduler.example", van.OriginOther}, // the name has no address yet
		{"10.0.0.5", "scheduler.example", van.OriginOther},
		{"", "10.0.0.1", van.OriginOther},
		{"", "", van.OriginOther},
	} {
		from, _ := netip.ParseAddr(x.from)
		if got := originOf(from, (&conn{peer: van.Node{Hostname: x.host}}).address(), func() hostaddr.Host { return here }); got != x.want {
			t.Errorf("from %q, of %q: %d, want %d", x.from, x.host, got, x.want)
		}
	}
}

// TestOriginOfTheScheduler: a message that calls itself the scheduler's is of the scheduler's host only if its name is not for another process
// (A2), and if the address of the scheduler is known. No TCP connection is of an unknown origin.
func TestOriginOfTheScheduler(t *testing.T) {
	scheduler := newNode(t, 1, 5, nil, nil)
	free := newNode(t, 8, 6, nil, nil)
	nobody := free.self.Port
	if err := free.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, x := range []struct {
		what, host string // of the scheduler's record; "": there is no connection to it
		port       int
		name       string
		want       van.Origin
	}{
		{"a plain name", "127.0.0.1", nobody, "ps1", van.OriginHost},
		{"a name for this process", "127.0.0.1", nobody, "ps1.00000001.00000007", van.OriginHost},
		{"a name for another process", "127.0.0.1", nobody, "ps1.00000001.00000001", van.OriginOther},
		{"the scheduler's name for another process", "127.0.0.1", nobody, "ps1.00000005.00000008", van.OriginOther},
		{"another host's", "192.0.2.1", nobody, "ps1", van.OriginOther},
		{"another host's, for this process", "192.0.2.1", nobody, "ps1.00000001.00000007", van.OriginOther},
		{"no scheduler", "", nobody, "ps1", van.OriginOther},
		{"a name without an address", "localhost", nobody, "ps1", van.OriginOther},
		{"a name with an address", "localhost", scheduler.self.Port, "ps1", van.OriginHost},
		{"a name with an address, for another process", "localhost", scheduler.self.Port, "ps1.00000005.00000008", van.OriginOther},
	} {
		t.Run(x.what, func(t *testing.T) {
			n := newNode(t, 9, 7, nil, nil)
			if x.host != "" {
				rec := van.Node{Role: van.Scheduler, ID: 1, Hostname: x.host, Port: x.port}
				if err := n.Connect(t.Context(), 1, rec); err != nil {
					t.Fatal(err)
				}
				if x.port != nobody {
					until(t, "connection", func() bool { return (*n.peers.Load())[1].up.Load() })
				}
			}
			dialRaw(t, n, x.name).send(packed(t, heartbeat(9, 3)))
			m := n.next(t)
			defer m.Release()
			if m.Sender != 1 || m.Origin != x.want {
				t.Errorf("a message of %d has origin %d, want %d", m.Sender, m.Origin, x.want)
			}
		})
	}
}
