package hostaddr

import (
	"errors"
	"net"
	"net/netip"
	"slices"
	"testing"

	_ "github.com/stepaf/stepaf-go/tests/testlimit"
)

func ip(s string) netip.Addr { return netip.MustParseAddr(s) }

func up(name string, addrs ...string) Interface {
	i := Interface{Name: name, Up: true, Loopback: name == "lo"}
	for _, a := range addrs {
		i.Addrs = append(i.Addrs, ip(a))
	}
	return i
}

// host has a route to 10.77.0.0/16 by eth0 and to nothing else, besides itself.
func host(interfaces ...Interface) Host {
	h := Host{Interfaces: interfaces}
	h.Source = func(dest netip.Addr) (netip.Addr, error) {
		switch {
		case dest.IsLoopback() || dest.IsUnspecified():
			return ip("127.0.0.1"), nil
		case h.Has(dest):
			return dest, nil
		case netip.MustParsePrefix("10.77.0.0/16").Contains(dest):
			return ip("10.77.0.2"), nil
		}
		return netip.Addr{}, errors.New("network is unreachable")
	}
	return h
}

func usual() Host {
	down := up("eth9", "10.99.0.2")
	down.Up = false
	return host(up("lo", "127.0.0.1", "::1"), up("docker0", "172.17.0.1"), up("eth1", "fe80::1", "169.254.3.4", "10.88.0.2"), up("eth0", "10.77.0.2"), down)
}

// TestToward: a node advertises the address from which packets to its scheduler leave.
func TestToward(t *testing.T) {
	for dest, want := range map[string]string{
		"10.77.0.1": "10.77.0.2 eth0", // docker0 and a link-local address come first
		"127.0.0.1": "127.0.0.1 lo",
		"127.0.1.1": "127.0.0.1 lo",
		"0.0.0.0":   "127.0.0.1 lo",
		"10.88.0.2": "10.88.0.2 eth1", // this host's own
		"192.0.2.1": "",
		"fe80::2":   "",
	} {
		got := ""
		if addr, name, ok := usual().Toward(ip(dest)); ok {
			got = addr.String() + " " + name
		}
		if got != want {
			t.Errorf("toward %s: %q, want %q", dest, got, want)
		}
	}
}

func TestFirst(t *testing.T) {
	for _, c := range []struct {
		host Host
		want string
	}{
		{usual(), "10.88.0.2 eth1"},
		{host(up("lo", "127.0.0.1"), up("br-12ab", "172.18.0.1"), up("eth0", "192.0.2.7")), "192.0.2.7 eth0"},
		{host(up("lo", "127.0.0.1"), up("docker0", "172.17.0.1")), "172.17.0.1 docker0"},
		{host(up("lo", "127.0.0.1"), up("eth0", "fe80::1")), "invalid IP "},
		{host(up("lo", "127.0.0.1"), Interface{Name: "eth0", Addrs: []netip.Addr{ip("192.0.2.7")}}), "invalid IP "},
	} {
		if addr, name := c.host.First(); addr.String()+" "+name != c.want {
			t.Errorf("first of %v: %s %s, want %s", c.host.Interfaces, addr, name, c.want)
		}
	}
}

// TestOf: if an interface has several addresses, Of returns the one with the route to the scheduler.
func TestOf(t *testing.T) {
	for _, c := range []struct {
		i          Interface
		dest, want string
	}{
		{up("eth1", "169.254.3.4", "10.88.0.2"), "192.0.2.1", "10.88.0.2"},
		{up("eth0", "10.66.0.2", "10.77.0.2"), "10.77.0.1", "10.77.0.2"},
		{up("eth0", "10.66.0.2", "10.77.0.2"), "192.0.2.1", "10.66.0.2"},
		{up("eth2", "fe80::1", "169.254.3.4"), "10.77.0.1", "169.254.3.4"},
		{up("eth2", "fe80::1"), "10.77.0.1", "invalid IP"},
	} {
		if got := host(up("lo", "127.0.0.1"), c.i).Of(c.i, ip(c.dest)); got.String() != c.want {
			t.Errorf("%v toward %s: %s, want %s", c.i, c.dest, got, c.want)
		}
	}
}

// TestDoubt: Doubt finds an unreachable address only if the scheduler is on another host.
func TestDoubt(t *testing.T) {
	const leads = "; the route there uses 10.77.0.2 (eth0)"
	for _, c := range []struct{ addr, dest, want string }{
		{"127.0.0.1", "10.77.0.1", "it is a loopback address" + leads},
		{"127.0.1.1", "10.77.0.1", "it is a loopback address" + leads},
		{"0.0.0.0", "10.77.0.1", "it is the unspecified address" + leads},
		{"169.254.3.4", "10.77.0.1", "it is link-local" + leads},
		{"172.17.0.1", "10.77.0.1", "it belongs to docker0, a bridge inside this host" + leads},
		{"10.99.0.2", "10.77.0.1", "its interface eth9 is down" + leads},
		{"127.0.0.1", "192.0.2.1", "it is a loopback address"}, // no route there
		{"10.77.0.2", "10.77.0.1", ""},
		{"10.88.0.2", "10.77.0.1", ""}, // another network for data
		{"127.0.0.1", "127.0.0.1", ""},
		{"127.0.0.1", "10.77.0.2", ""}, // the scheduler is on this host
		{"172.17.0.1", "172.17.0.1", ""},
	} {
		if got := usual().Doubt(ip(c.addr), ip(c.dest)); got != c.want {
			t.Errorf("%s beside a scheduler at %s: %q, want %q", c.addr, c.dest, got, c.want)
		}
	}
	if got := usual().Doubt(ip("127.0.0.1"), netip.Addr{}); got != "" {
		t.Errorf("beside a scheduler without an address: %q", got)
	}
	linked := host(up("docker0", "10.77.0.2")) // a container bridge with the route to the scheduler
	if got := linked.Doubt(ip("10.77.0.2"), ip("10.77.0.1")); got != "" {
		t.Errorf("the only way to the scheduler: %q", got)
	}
}

// TestThisHost: the flags of each interface are the kernel's, and the route to the loopback is the loopback.
func TestThisHost(t *testing.T) {
	real, err := net.Interfaces()
	if err != nil {
		t.Fatal(err)
	}
	mine, err := Interfaces()
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range real {
		k := slices.IndexFunc(mine, func(i Interface) bool { return i.Name == r.Name })
		if k < 0 {
			t.Errorf("%s is not listed", r.Name)
			continue
		}
		if i := mine[k]; i.Up != (r.Flags&net.FlagUp != 0) || i.Loopback != (r.Flags&net.FlagLoopback != 0) {
			t.Errorf("%+v, want the flags %s", i, r.Flags)
		}
		for _, a := range mine[k].Addrs {
			if a.IsLoopback() && !mine[k].Loopback {
				t.Errorf("%s has %s and is no loopback", r.Name, a)
			}
		}
	}
	if !slices.ContainsFunc(mine, func(i Interface) bool { return i.Loopback && i.Up }) {
		t.Skip("this host has no loopback interface that is up")
	}
	if a, name, ok := This().Toward(ip("127.0.0.1")); !ok || a != ip("127.0.0.1") {
		t.Errorf("toward the loopback: %s (%s), %t", a, name, ok)
	}
}
