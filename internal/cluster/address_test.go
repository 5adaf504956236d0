package cluster

import (
	"context"
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/stepaf/stepaf-go/internal/hostaddr"
	"github.com/stepaf/stepaf-go/postoffice/membership"
	"github.com/stepaf/stepaf-go/tests/inproc"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/env"
	"github.com/stepaf/stepaf-go/van/resend"
)

// choosy is a van that chooses its node's address.
type choosy struct {
	van.Van
	host  string
	err   error
	asked int
}

func (c *choosy) ChooseHost() (string, string, error) {
	c.asked++
	return c.host, "its device", c.err
}

// fakeHost has docker's bridge and a link-local address before the address that leads to 10.77.0.1.
func fakeHost() hostaddr.Host {
	up := func(name string, addrs ...string) hostaddr.Interface {
		i := hostaddr.Interface{Name: name, Up: true, Loopback: name == "lo"}
		for _, a := range addrs {
			i.Addrs = append(i.Addrs, netip.MustParseAddr(a))
		}
		return i
	}
	return hostaddr.Host{
		Interfaces: []hostaddr.Interface{up("lo", "127.0.0.1"), up("docker0", "172.17.0.1"), up("eth0", "169.254.1.1", "10.77.0.2")},
		Source: func(dest netip.Addr) (netip.Addr, error) {
			switch {
			case dest.IsLoopback():
				return netip.MustParseAddr("127.0.0.1"), nil
			case dest.String() == "10.77.0.1":
				return netip.MustParseAddr("10.77.0.2"), nil
			}
			return netip.Addr{}, errors.New("network is unreachable")
		},
	}
}

// TestAdvertiseTowardScheduler: without a setting a node listens at an address that its scheduler can reach. Without
// a route to the scheduler it does not choose a bridge for containers.
func TestAdvertiseTowardScheduler(t *testing.T) {
	for scheduler, want := range map[string]string{
		"10.77.0.1":         "10.77.0.2",
		"127.0.0.1":         "127.0.0.1", // a cluster on one host
		"192.0.2.1":         "169.254.1.1",
		"not.known.invalid": "169.254.1.1", // the first interface but the loopback and docker's
		"2001:db8::1":       "169.254.1.1",
	} {
		h := fakeHost()
		if strings.HasPrefix(want, "169") {
			h.Interfaces[2].Addrs = h.Interfaces[2].Addrs[:1]
			h.Interfaces[1].Addrs = nil
		}
		host, why, err := advertise(t.Context(), env.Default(), van.Worker, nil, h, scheduler)
		if err != nil || host != want {
			t.Errorf("scheduler at %s: %q (%s), %v; want %q", scheduler, host, why, err, want)
		}
	}
}

// TestUnreachableAddress: if the scheduler on another host cannot reach an address, the text has the address and the variables
// to set. The same holds if the name of the scheduler resolves to a loopback address on its host.
func TestUnreachableAddress(t *testing.T) {
	for _, c := range []struct {
		role                 van.Role
		host, scheduler, uri string
		want                 string
	}{
		{van.Worker, "127.0.0.1", "10.77.0.1", "", "10.77.0.1 cannot reach: it is a loopback address; the route there uses 10.77.0.2 (eth0); set DMLC_NODE_HOST or DMLC_INTERFACE"},
		{van.Server, "172.17.0.1", "10.77.0.1", "", "docker0"},
		{van.Server, "10.77.0.2", "10.77.0.1", "", ""},
		{van.Worker, "127.0.0.1", "127.0.0.1", "", ""},
		{van.Worker, "127.0.0.1", "name.invalid", "", ""},
		{van.Scheduler, "127.0.1.1", "127.0.1.1", "node1", "DMLC_PS_ROOT_URI=node1 is 127.0.1.1 on this host"},
		{van.Scheduler, "127.0.0.1", "127.0.0.1", "localhost", ""},
		{van.Scheduler, "127.0.0.1", "127.0.0.1", "127.0.0.1", ""},
		{van.Scheduler, "10.77.0.2", "10.77.0.2", "node1", ""},
	} {
		cfg := env.Default()
		cfg.RootURI = c.uri
		if got := unreachableReason(cfg, c.role, fakeHost(), c.host, c.scheduler); (got == "") != (c.want == "") || !strings.Contains(got, c.want) {
			t.Errorf("%s at %s, scheduler at %s (%s): %q, want %q", c.role, c.host, c.scheduler, c.uri, got, c.want)
		}
	}
}

// TestUnprotected: a node that other hosts can reach warns if no secret is set and the user has not decided to do
// without.
func TestUnprotected(t *testing.T) {
	for _, c := range []struct {
		role van.Role
		host string
		set  func(*env.Config)
		want string
	}{
		{van.Worker, "10.77.0.2", func(*env.Config) {}, "no secret is set: any process that reaches 10.77.0.2:4711 can join the cluster"},
		{van.Server, "10.77.0.2", func(*env.Config) {}, `set STEPAF_SECRET_FILE on all nodes ("stepaf secret" makes one), or STEPAF_AUTH=off`},
		{van.Scheduler, "10.77.0.2", func(*env.Config) {}, "10.77.0.2:4711"},
		{van.Server, "2001:db8::1", func(*env.Config) {}, "[2001:db8::1]:4711"},
		{van.Worker, "0.0.0.0", func(*env.Config) {}, "0.0.0.0:4711"},
		{van.Scheduler, "127.0.0.1", func(c *env.Config) { c.Kubernetes = true }, "port 4711 of any address of this host"},
		{van.Worker, "127.0.0.1", func(c *env.Config) { c.Kubernetes = true }, ""},
		{van.Worker, "127.0.0.1", func(*env.Config) {}, ""},
		{van.Worker, "127.3.2.1", func(*env.Config) {}, ""},
		{van.Worker, "::1", func(*env.Config) {}, ""},
		{van.Worker, "::ffff:127.0.0.1", func(*env.Config) {}, ""},
		{van.Worker, "10.77.0.2", func(c *env.Config) { c.Auth = env.AuthOff }, ""},
		{van.Worker, "10.77.0.2", func(c *env.Config) { c.Secret = "0123456789abcdef" }, ""},
		{van.Worker, "10.77.0.2", func(c *env.Config) { c.SecretFile = "file" }, ""},
		{van.Worker, "10.77.0.2", func(c *env.Config) { c.Local = true }, ""},
	} {
		cfg := env.Default()
		c.set(cfg)
		got := unprotectedReason(cfg, van.Node{Role: c.role, Hostname: c.host, Port: 4711})
		if (got == "") != (c.want == "") || !strings.Contains(got, c.want) || strings.Contains(got, "\n") {
			t.Errorf("%s at %s: %q, want %q", c.role, c.host, got, c.want)
		}
	}
}

func TestAdvertise(t *testing.T) {
	none := errors.New("no device")
	for _, x := range []struct {
		name            string
		role            van.Role
		nodeHost, iface string
		host            string // the van's choice
		err             error
		want, why       string
		fails           string
		asked           int
	}{
		{name: "nothing set", host: "10.0.0.9", want: "10.0.0.9", why: "its device", asked: 1},
		{name: "nothing set, no preference", want: "10.77.0.2", asked: 1, why: "leads to DMLC_PS_ROOT_URI 10.77.0.1: eth0"},
		{name: "interface with several addresses", iface: "eth", want: "10.77.0.2", why: "DMLC_INTERFACE eth0", asked: 1},
		{name: "nothing set, nothing found", err: none, fails: "choose address: no device", asked: 1},
		{name: "host", nodeHost: "127.0.0.2", host: "10.0.0.9", want: "127.0.0.2", why: "DMLC_NODE_HOST"},
		{name: "host and interface", nodeHost: "127.0.0.2", iface: "nosuch0", host: "10.0.0.9", want: "127.0.0.2", why: "DMLC_NODE_HOST"},
		{name: "interface", iface: "ib0", host: "10.0.0.9", want: "10.0.0.9", why: "its device", asked: 1},
		{name: "interface fails", iface: "ib0", err: none, fails: "no device", asked: 1},
		{name: "interface, no preference", iface: "nosuch0", fails: `DMLC_INTERFACE="nosuch0"`, asked: 1},
		{name: "auto", iface: "AUTO", host: "10.0.0.9", want: "10.0.0.9", why: "its device", asked: 1},
		{name: "auto before host", iface: "auto", nodeHost: "127.0.0.2", host: "10.0.0.9", want: "10.0.0.9", why: "its device", asked: 1},
		{name: "auto fails, host", iface: "auto", nodeHost: "127.0.0.2", err: none, want: "127.0.0.2",
			why: "DMLC_NODE_HOST, because DMLC_INTERFACE=auto found nothing: no device", asked: 1},
		{name: "auto, no preference, host", iface: "auto", nodeHost: "127.0.0.2", want: "127.0.0.2", why: "DMLC_NODE_HOST", asked: 1},
		{name: "auto fails", iface: "auto", err: none, fails: "no device", asked: 1},
		{name: "scheduler", role: van.Scheduler, host: "10.0.0.9", want: "127.0.0.3", why: "DMLC_PS_ROOT_URI"},
	} {
		t.Run(x.name, func(t *testing.T) {
			cfg := env.Default()
			cfg.RootURI, cfg.NodeHost, cfg.Interface = "127.0.0.3", x.nodeHost, x.iface
			role := van.Worker
			if x.role != 0 {
				role = x.role
			}
			c := &choosy{host: x.host, err: x.err}
			host, why, err := advertise(t.Context(), cfg, role, c, fakeHost(), "10.77.0.1")
			if c.asked != x.asked {
				t.Errorf("asked %d times, want %d", c.asked, x.asked)
			}
			if x.fails != "" {
				if err == nil || !strings.Contains(err.Error(), x.fails) || x.err != nil && !errors.Is(err, x.err) {
					t.Errorf("%q, %v; want an error with %q", host, err, x.fails)
				}
				return
			}
			if err != nil || x.want != "" && host != x.want || host == "" || !strings.Contains(why, x.why) {
				t.Errorf("%q because %q, %v; want %q because %q", host, why, err, x.want, x.why)
			}
		})
	}
}

// TestAdvertiseWithoutChooser: a van that does not choose changes nothing.
func TestAdvertiseWithoutChooser(t *testing.T) {
	cfg := env.Default()
	cfg.NodeHost, cfg.Interface = "127.0.0.2", "auto"
	if host, why, err := advertise(t.Context(), cfg, van.Worker, nil, fakeHost(), "10.77.0.1"); err != nil || host != "127.0.0.2" || why != "DMLC_NODE_HOST" {
		t.Errorf("%q because %q, %v; want DMLC_NODE_HOST", host, why, err)
	}
}

// TestChooserIsBound: Start asks a wrapped van and binds the address that it chooses.
func TestChooserIsBound(t *testing.T) {
	cfg := env.Default()
	cfg.Role, cfg.NumWorkers, cfg.NumServers, cfg.RootURI, cfg.RootPort = "worker", 1, 1, "127.0.0.1", 9000
	cfg.Backend, cfg.Resend = "CPU", true
	inner := inproc.NewNetwork().Factory()
	n, err := newNode(Options{Config: cfg, Van: func(o van.Options) (van.Van, error) {
		v, err := inner(o)
		return &choosy{Van: v, host: "chosen"}, err
	}})
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	if _, ok := van.As[*resend.Van](n.transport.van); !ok {
		t.Fatalf("the van is a %T, want a wrapped one", n.transport.van)
	}
	if err := n.bind(context.Background(), van.Node{Hostname: cfg.RootURI}); err != nil || n.self.Hostname != "chosen" {
		t.Errorf("bound %q, %v; want what the van chose", n.self.Hostname, err)
	}
}

// TestLookUpScheduler: the report that the scheduler's name has no address ends once it has one.
func TestLookUpScheduler(t *testing.T) {
	t.Parallel()
	cfg := env.Default()
	cfg.RootURI, cfg.RootPort = "localhost", 9000
	m, err := membership.New(membership.Config{Role: van.Worker, NumWorkers: 1, NumServers: 1, GroupSize: 1,
		Self:      van.Node{Role: van.Worker, ID: van.Empty, Hostname: "127.0.0.1", Port: 9001},
		Scheduler: van.Node{Role: van.Scheduler, ID: van.SchedulerID, Hostname: cfg.RootURI, Port: cfg.RootPort}})
	if err != nil {
		t.Fatal(err)
	}
	n := &Node{nodeInfo: nodeInfo{cfg: cfg}}
	n.control.self, n.control.machine = &n.nodeInfo, m
	m.Start(0)
	m.SchedulerNotFound(errors.New("lookup localhost: no such host"))
	if got := m.Report(0).Note; !strings.Contains(got, "no such host") {
		t.Errorf("the report is %q, want why there is no address", got)
	}
	n.control.lookUpScheduler(t.Context())
	if got := m.Report(0).Note; strings.Contains(got, "no such host") || !strings.Contains(got, "does not run there") {
		t.Errorf("the report is %q, want that no process answers at the address", got)
	}
}

// TestAddressIsNotLookedUp: an address needs no name service, and no time.
func TestAddressIsNotLookedUp(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for _, host := range []string{"10.9.9.9", "::1"} {
		if got, err := resolve(ctx, host); got != host || err != nil {
			t.Errorf("%s: %q, %v", host, got, err)
		}
	}
	if got, err := resolve(ctx, "no.such.host.invalid"); err == nil {
		t.Errorf("a name is looked up after the end of its context: %q", got)
	}
}
