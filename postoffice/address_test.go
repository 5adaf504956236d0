package postoffice

import (
	"context"
	"errors"
	"strings"
	"testing"

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

func TestAdvertise(t *testing.T) {
	none := errors.New("no device")
	for _, x := range []struct {
		name            string
		role            van.Role
		nodeHost, iface string
		host            string // what the van chooses
		err             error
		want, why       string
		fails           string
		asked           int
	}{
		{name: "nothing set", host: "10.0.0.9", want: "10.0.0.9", why: "its device", asked: 1},
		{name: "nothing set, no preference", asked: 1, why: "interface"},
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
			host, why, err := advertise(t.Context(), cfg, role, c)
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

// TestAdvertiseWithoutChooser: a van that does not choose leaves everything as it is.
func TestAdvertiseWithoutChooser(t *testing.T) {
	cfg := env.Default()
	cfg.NodeHost, cfg.Interface = "127.0.0.2", "auto"
	if host, why, err := advertise(t.Context(), cfg, van.Worker, nil); err != nil || host != "127.0.0.2" || why != "DMLC_NODE_HOST" {
		t.Errorf("%q because %q, %v; want DMLC_NODE_HOST", host, why, err)
	}
}

// TestChooserIsBound: Start asks a wrapped van and binds what it says.
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
	if _, ok := van.As[*resend.Van](n.van); !ok {
		t.Fatalf("the van is a %T, want a wrapped one", n.van)
	}
	if err := n.bind(context.Background()); err != nil || n.self.Hostname != "chosen" {
		t.Errorf("bound %q, %v; want what the van chose", n.self.Hostname, err)
	}
}

// TestLookUpScheduler: that the scheduler's name has no address is no longer said once it has
// one.
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
	n := &Node{identity: identity{cfg: cfg}}
	n.machine = m
	m.Start(0)
	m.SchedulerNotFound(errors.New("lookup localhost: no such host"))
	if got := m.Report(0).Note; !strings.Contains(got, "no such host") {
		t.Errorf("the report is %q, want why there is no address", got)
	}
	n.lookUpScheduler(t.Context())
	if got := m.Report(0).Note; strings.Contains(got, "no such host") || !strings.Contains(got, "does not run there") {
		t.Errorf("the report is %q, want that nobody answers at the address", got)
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
