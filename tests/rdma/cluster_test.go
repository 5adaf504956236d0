package rdma

import (
	"cmp"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/internal/nodetest"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// soon is well below the time limit of a request, and enough for a busy machine to notice the end of a process.
const soon = 10 * time.Second

// patientAck is STEPAF_RDMA_ACK_TIMEOUT of tests that cut no link: an acknowledgement of an emulated device that is late by less than a second is not lost.
const patientAck = 18

// addresses returns the IPv4 addresses of the active RDMA ports, or skips.
func addresses(t testing.TB) (all []string) {
	t.Helper()
	stack, err := verbs.Load(verbs.Options{})
	if err != nil {
		t.Skipf("no RDMA here: %v", err)
	}
	devices, err := stack.Devices()
	if err != nil {
		t.Skipf("no RDMA here: %v", err)
	}
	for _, d := range devices {
		for _, p := range d.Ports {
			for _, g := range p.GIDs {
				if p.Active && g.Addr.Is4() {
					all = append(all, g.Addr.String())
				}
			}
		}
	}
	if len(all) == 0 {
		t.Skipf("no RDMA here: none of %d devices has an active port with an IPv4 address; make rdma-test runs this in a virtual machine", len(devices))
	}
	return all
}

// twoHosts returns the addresses of two hosts that tools/rdma-vm has made, or skips.
func twoHosts(t testing.TB) []string {
	t.Helper()
	all := addresses(t)
	if os.Getenv("RDMA_VM") == "" || os.Getenv("RDMA_VM_HOSTS") < "2" {
		t.Skip("needs two hosts of tools/rdma-vm, whose links it can cut")
	}
	if len(all) < 2 {
		all = append(all, "10.77.0.2") // in a network namespace of its own
	}
	return all
}

// place says where a node runs.
type place struct {
	what string // role of a child process; "": in this process
	host int    // from 1
}

// options of a cluster.
type options struct {
	workers, servers, group int // 0 means 1
	place                   func(role string, rank int) place
	ack                     int                      // STEPAF_RDMA_ACK_TIMEOUT; 0 means patientAck
	set                     func(*postoffice.Config) // of all nodes in this process
	env                     []string                 // of children
	wrap                    func(role string, rank int, f van.Factory) van.Factory
	log                     *slog.Logger
}

// cluster holds the nodes of a cluster over RDMA.
type cluster struct {
	*testcluster.Cluster
	t        testing.TB
	o        options
	hosts    []string
	children []*nodetest.Process
	mu       sync.Mutex
}

// start starts a cluster. Its servers are children with role answers, unless o says otherwise.
func start(t testing.TB, o options) *cluster {
	t.Helper()
	c := prepare(t, o)
	tc := c.testOptions()
	tc.Elsewhere = func(tc *testcluster.Cluster, role string, rank int) bool {
		c.Cluster = tc
		at := c.o.place(role, rank)
		if at.what == "" {
			return false
		}
		p := c.spawn(role, rank, at.what, max(at.host, 1))
		c.mu.Lock()
		defer c.mu.Unlock()
		c.children = append(c.children, p)
		return true
	}
	c.Cluster = testcluster.Start(t, tc)
	for _, p := range c.children {
		p.Ready()
	}
	return c
}

// prepare makes a cluster without nodes.
func prepare(t testing.TB, o options) *cluster {
	t.Helper()
	c := &cluster{t: t, o: o, hosts: addresses(t)}
	if c.o.place == nil {
		c.o.place = func(role string, _ int) place {
			if role == "server" {
				return place{what: answers}
			}
			return place{}
		}
	}
	return c
}

func (c *cluster) testOptions() testcluster.Options {
	return testcluster.Options{Over: testcluster.AsSet, Workers: c.o.workers, Servers: c.o.servers, Group: c.o.group, Wrap: c.o.wrap, Log: c.o.log,
		Set: func(cfg *postoffice.Config) {
			cfg.VanType, cfg.EnableIPC = "ibverbs", 0
			cfg.RootURI, cfg.NodeHost = c.hosts[0], c.hosts[0]
			cfg.RDMAAckTimeout = cmp.Or(c.o.ack, patientAck)
			if c.o.set != nil {
				c.o.set(cfg)
			}
		}}
}

// environ returns the environment of a child.
func (c *cluster) environ(role string, rank, host int) []string {
	return slices.Concat(os.Environ(), c.Environ(role, rank), []string{"DMLC_ENABLE_RDMA=ibverbs", "BYTEPS_ENABLE_IPC=0", "DMLC_PS_ROOT_URI=" + c.hosts[0],
		"DMLC_NODE_HOST=" + c.hosts[host-1], "STEPMESH_BAKCEND=CPU", fmt.Sprintf("STEPAF_RDMA_ACK_TIMEOUT=%d", cmp.Or(c.o.ack, patientAck)), "STEPAF_START_TIMEOUT=25", "STEPAF_STOP_TIMEOUT=20"}, c.o.env)
}

// spawn starts the test binary as a node of c on host, which is from 1.
func (c *cluster) spawn(role string, rank int, what string, host int) *nodetest.Process {
	c.t.Helper()
	opts := []nodetest.Option{nodetest.Env(c.environ(role, rank, host))}
	if host > 1 {
		opts = append(opts, nodetest.Under("rdma-host", strconv.Itoa(host)))
	}
	return nodetest.Spawn(c.t, c.Cluster, role, rank, what, opts...)
}

// end makes all nodes leave together.
func (c *cluster) end() {
	c.t.Helper()
	for _, p := range c.children {
		p.Leave()
	}
	c.Finalize(c.t)
	for _, p := range c.children {
		p.Left()
	}
}

// clients makes clients of the workers in this process.
func (c *cluster) clients() (all []*client) {
	c.t.Helper()
	for _, n := range c.Workers {
		if n != nil {
			all = append(all, newClient(c.t, n))
		}
	}
	return all
}

// child returns the process that runs a node.
func (c *cluster) child(role string, rank int) *nodetest.Process {
	c.t.Helper()
	i := slices.IndexFunc(c.children, func(p *nodetest.Process) bool { return p.Role == role && p.Rank == rank })
	if i < 0 {
		c.t.Fatalf("%s %d is no child", role, rank)
	}
	return c.children[i]
}

// work checks that the requests of all clients are answered.
func work(t testing.TB, all ...*client) {
	t.Helper()
	nodetest.Together(t, all, func(c *client) error {
		for i := range 3 {
			if err := c.mixed(t.Context(), i); err != nil {
				return fmt.Errorf("round %d: %w", i, err)
			}
		}
		return nil
	})
}
