package hostaddr

import (
	"net/netip"
	"testing"
)

// TestSame: two spellings of one address are the same.
func TestSame(t *testing.T) {
	for _, x := range []struct {
		a, b string
		want bool
	}{
		{"10.0.0.1", "10.0.0.1", true},
		{"10.0.0.1", "::ffff:10.0.0.1", true},
		{"10.0.0.1", "::ffff:a00:1", true},
		{"fd00::1", "fd00:0:0::0001", true},
		{"FD00::A", "fd00::a", true},
		{"Host.Example", "host.EXAMPLE", true},
		{"host.example", "host.example.", false},
		{"10.0.0.1", "10.0.0.2", false},
		{"10.0.0.1", "::a00:1", false}, // compatible, not mapped: another address
		{"fe80::1%a", "fe80::1%b", false},
		{"a", "b", false},
	} {
		if Same(x.a, x.b) != x.want || Same(x.b, x.a) != x.want {
			t.Errorf("Same(%q, %q) is not %t", x.a, x.b, x.want)
		}
	}
}

// TestCheck: an address that is not one host's, or that only the resolver accepts in its notation, is refused.
func TestCheck(t *testing.T) {
	for _, bad := range []string{"0.0.0.0", "::", "::ffff:0.0.0.0", "224.0.0.1", "ff02::1", "255.255.255.255",
		"127.1", "0x7f000001", "0X7F.0.0.1", "2130706433", "010.0.0.1", "127.0.0.01", "0", "127.0.0.1.", "10.0.0.256", "1.2.3.4.5", "host.7", "a.0x"} {
		if Check(bad) == nil {
			t.Errorf("%q is accepted", bad)
		}
	}
	for _, good := range []string{"10.0.0.1", "127.0.0.1", "fd00::1", "::1", "::ffff:10.0.0.1", "host", "node-7", "n7", "7n", "a.b.c", "a.b.", "0x7f.example", "xn--p1ai"} {
		if err := Check(good); err != nil {
			t.Errorf("%q: %v", good, err)
		}
	}
}

// TestChoose: addresses that are not one host's are ignored.
func TestChoose(t *testing.T) {
	for _, c := range []struct {
		all  []string
		want string
	}{
		{[]string{"fd00::1", "10.0.0.1", "10.0.0.2"}, "10.0.0.1"},
		{[]string{"::ffff:10.0.0.1"}, "10.0.0.1"},
		{[]string{"0.0.0.0", "10.0.0.1"}, "10.0.0.1"},
		{[]string{"0.0.0.0", "fd00::1", "fd00::2"}, "fd00::1"},
		{[]string{"0.0.0.0", "::"}, "it has the address 0.0.0.0: it names no host that others can connect to"},
		{nil, "it has no address"},
	} {
		var all []netip.Addr
		for _, a := range c.all {
			all = append(all, netip.MustParseAddr(a))
		}
		got := ""
		if a, err := Choose(all); err != nil {
			got = err.Error()
		} else {
			got = a.String()
		}
		if got != c.want {
			t.Errorf("%v: %s, want %s", c.all, got, c.want)
		}
	}
}

// TestResolve: an address is not looked up, and is IPv4 if it can be.
func TestResolve(t *testing.T) {
	for host, want := range map[string]string{"10.0.0.1": "10.0.0.1", "::ffff:10.0.0.1": "10.0.0.1", "fd00::1": "fd00::1", "no.such.host.invalid": ""} {
		got, err := Resolve(t.Context(), "ip4", host)
		if (err != nil) != (want == "") || err == nil && got.String() != want {
			t.Errorf("%s: %v, %v; want %q", host, got, err, want)
		}
	}
}
