package cluster_test

import (
	"context"
	"log/slog"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/inproc"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// config is that of a worker of a cluster with one worker and one server.
func config(set func(*postoffice.Config)) *postoffice.Config {
	c := postoffice.DefaultConfig()
	c.Role, c.NumWorkers, c.NumServers = "worker", 1, 1
	c.RootURI, c.RootPort, c.NodeHost, c.Backend = "127.0.0.1", 9000, "127.0.0.1", "CPU"
	c.StartTimeout = 20 * time.Second
	if set != nil {
		set(c)
	}
	return c
}

var drop = slog.New(slog.DiscardHandler)

// start starts one node on network, or over ZMQ when that is nil.
func start(ctx context.Context, network *inproc.Network, cfg *postoffice.Config) (*postoffice.Node, error) {
	o := postoffice.Options{Config: cfg, Log: drop}
	if network != nil {
		o.Van = network.Factory()
	}
	return postoffice.Start(ctx, o)
}

// refuses checks that Start refuses a configuration at once.
func refuses(t *testing.T, cfg *postoffice.Config, sentinel error, texts ...string) {
	t.Helper()
	n, err := start(t.Context(), nil, cfg)
	if err == nil {
		n.Close()
	}
	vantest.Fails(t, err, sentinel, texts...)
}

func TestBadConfig(t *testing.T) {
	for _, x := range []struct {
		name     string
		set      func(*postoffice.Config)
		sentinel error
		texts    []string
	}{
		{"no role", func(c *postoffice.Config) { c.Role = "" }, van.ErrInvalid, []string{"DMLC_ROLE is not set", "worker, server"}},
		{"role", func(c *postoffice.Config) { c.Role = "clerk" }, van.ErrInvalid, []string{`DMLC_ROLE="clerk"`, "worker, server"}},
		{"joint", func(c *postoffice.Config) { c.Role = "joint" }, van.ErrInvalid, []string{"StartJoint"}},
		{"no scheduler", func(c *postoffice.Config) { c.RootURI = "" }, van.ErrInvalid, []string{"DMLC_PS_ROOT_URI is not set", "a host name or address"}},
		{"no port", func(c *postoffice.Config) { c.RootPort = 0 }, van.ErrInvalid, []string{"DMLC_PS_ROOT_PORT", "65535"}},
		{"several", func(c *postoffice.Config) { c.RootURI, c.NumServers = "", 0 }, van.ErrInvalid, []string{"DMLC_PS_ROOT_URI", "DMLC_NUM_SERVER"}},
		{"rank", func(c *postoffice.Config) { c.NodeRank = 1 }, van.ErrInvalid, []string{"rank", "DMLC_NODE_RANK 1", "0 to 0", "DMLC_NUM_WORKER 1"}},
		{"device", func(c *postoffice.Config) { c.GPU = 3 }, van.ErrInvalid, []string{"STEPMESH_GPU 3", "0 to 0"}},
		{"instance", func(c *postoffice.Config) { c.GroupSize, c.GPU, c.InstanceID = 2, 1, 0 }, van.ErrInvalid,
			[]string{`DMLC_INSTANCE_ID`, "want 1 = rank 1 mod DMLC_GROUP_SIZE 2"}},
		{"heartbeats", func(c *postoffice.Config) { c.HeartbeatInterval, c.HeartbeatTimeout = 5*time.Second, 5*time.Second }, van.ErrInvalid,
			[]string{"PS_HEARTBEAT_TIMEOUT", "more than PS_HEARTBEAT_INTERVAL (5s)"}},
		{"losses", func(c *postoffice.Config) { c.DropMsg = 101 }, van.ErrInvalid, []string{`PS_DROP_MSG="101"`}},
		{"transport", func(c *postoffice.Config) { c.VanType = "pigeon" }, van.ErrNoTransport, []string{`"pigeon"`, "zmq"}},
		{"other build", func(c *postoffice.Config) { c.VanType = "ucx" }, van.ErrInvalid, []string{`DMLC_ENABLE_RDMA="ucx"`, "zmq or ibverbs"}},
		{"backend", func(c *postoffice.Config) { c.Backend = "abacus" }, backend.ErrUnavailable, []string{"STEPMESH_BAKCEND=abacus", "CPU"}},
		{"interface", func(c *postoffice.Config) { c.NodeHost, c.Interface = "", "nosuch0" }, van.ErrInvalid,
			[]string{`DMLC_INTERFACE="nosuch0"`, "no such interface", "this host has", "127.0.0.1"}},
		{"node host", func(c *postoffice.Config) { c.NodeHost = "192.0.2.1" }, van.ErrInvalid,
			[]string{`DMLC_NODE_HOST="192.0.2.1"`, "not an address of this host", "this host has", "127.0.0.1"}},
		{"scheduler elsewhere", func(c *postoffice.Config) { c.Role, c.RootURI = "scheduler", "192.0.2.1" }, van.ErrInvalid,
			[]string{`DMLC_PS_ROOT_URI="192.0.2.1"`, "not an address of this host", "the scheduler must run on that host", "this host has"}},
	} {
		t.Run(x.name, func(t *testing.T) {
			refuses(t, config(x.set), x.sentinel, x.texts...)
		})
	}
	n, err := postoffice.Start(t.Context(), postoffice.Options{})
	if err == nil {
		n.Close()
	}
	vantest.Fails(t, err, van.ErrInvalid, "no Config")
}

// TestBindHint: the hint names the variable that changes the port or the address that could not be used.
func TestBindHint(t *testing.T) {
	for _, x := range []struct {
		err  error
		role van.Role
		port int
		want string
	}{
		{syscall.EACCES, van.Scheduler, 80, "set DMLC_PS_ROOT_PORT to a higher port on all nodes"},
		{syscall.EACCES, van.Worker, 1023, "CAP_NET_BIND_SERVICE: set DMLC_PORT to a higher port"},
		{syscall.EACCES, van.Scheduler, 1024, "DMLC_PS_ROOT_URI must be an address"},
		{syscall.EADDRNOTAVAIL, van.Server, 0, "set DMLC_NODE_HOST or DMLC_INTERFACE"},
		{syscall.EADDRINUSE, van.Scheduler, 80, "stop the process that uses it, or set DMLC_PS_ROOT_PORT on all nodes"},
		{syscall.EMFILE, van.Scheduler, 80, "ulimit -Hn"},
	} {
		if got := cluster.BindHint(&van.Error{Op: "bind", Err: x.err}, x.role, x.port); !strings.Contains(got, x.want) {
			t.Errorf("%v at port %d of a %s: %q, want %q", x.err, x.port, x.role, got, x.want)
		}
	}
}
