package testcluster

// The transports that a test's cluster can run over.

import (
	"context"
	"fmt"
	"reflect"
	"testing"

	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/local"
	"github.com/stepaf/stepaf-go/van/stack"
)

// Transport is the transport between the nodes of a cluster.
type Transport int

// The transports. Start checks that data is sent over the one that is named.
const (
	InProc Transport = iota // the in-process van, for data as well
	TCP                     // ZeroMQ over TCP, for data as well
	Unix                    // ZeroMQ over Unix sockets, for data as well
	SHM                     // ZeroMQ over TCP, and shared memory for data
	AsSet                   // as the configuration says; nothing is checked
)

// String is the name that Over gives the subtest.
func (x Transport) String() string {
	if x < 0 || int(x) >= len(transports) {
		return fmt.Sprintf("transport %d", int(x))
	}
	return transports[x]
}

var transports = [...]string{"inproc", "tcp", "unix", "shm", "as set"}

// Over runs a test once for each transport, as a subtest of its name.
func Over(t *testing.T, test func(t *testing.T, o Options), transports ...Transport) {
	for _, x := range transports {
		t.Run(x.String(), func(t *testing.T) { test(t, Options{Over: x}) })
	}
}

// sockets tells whether other processes can be nodes of the cluster.
func (x Transport) sockets() bool { return x != InProc }

// apply makes the configuration of a node one for the transport.
func (x Transport) apply(c *postoffice.Config) {
	switch x {
	case TCP:
		c.EnableIPC = 0
	case Unix:
		c.EnableIPC, c.Local = 0, true
	case SHM:
		c.EnableIPC = 1
	}
}

// environ is the same for a node that is a process of its own.
func (x Transport) environ() []string {
	switch x {
	case TCP:
		return []string{"BYTEPS_ENABLE_IPC=0"}
	case Unix:
		return []string{"BYTEPS_ENABLE_IPC=0", "DMLC_LOCAL=1"}
	case SHM:
		return []string{"BYTEPS_ENABLE_IPC=1"}
	}
	return nil
}

// SharesMemory tells whether data goes from n to node id through shared memory.
func SharesMemory(n *postoffice.Node, id int) bool {
	return van.PathTo((*cluster.Node)(n).Van(), id, false).Over == local.SharedMemory
}

// Stats are the counters of n's transports.
func Stats(n *postoffice.Node) van.Stats {
	if m, ok := van.As[van.Meter]((*cluster.Node)(n).Van()); ok {
		return m.Stats()
	}
	return van.Stats{}
}

// Counted compares the counters of n above its transports.
func Counted(t testing.TB, n *postoffice.Node, want postoffice.Stats) {
	t.Helper()
	got := n.Stats()
	got.Apps, got.Peers, got.Transport = nil, nil, van.Stats{}
	got.QueuedRequests, got.QueuedBytes, got.PendingMessages, got.PendingBytes = 0, 0, 0, 0
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%s has counted %+v, want %+v", n.Name(), got, want)
	}
}

// StopBarrier makes the barrier of Python's stop().
func StopBarrier(ctx context.Context, n *postoffice.Node) error {
	return (*cluster.Node)(n).StopBarrier(ctx)
}

// Dead lists the peers that n considers lost.
func Dead(n *postoffice.Node) (ids []postoffice.NodeID) {
	for _, p := range n.Stats().Peers {
		if p.Lost != nil {
			ids = append(ids, p.ID)
		}
	}
	return ids
}

// InFlight is the number of requests of all applications of n that are not finished or not waited for.
func InFlight(n *postoffice.Node) (requests int) {
	for _, a := range n.Stats().Apps {
		requests += a.InFlight
	}
	return requests
}

// wrapped makes the van that Options.Wrap is wrapped around. A node that is given a van
// does not add shared memory to it, so this does.
func (c *Cluster) wrapped(role string) van.Factory {
	if !c.o.Over.sockets() {
		return c.o.Network.Factory()
	}
	return func(o van.Options) (van.Van, error) {
		if role == "scheduler" {
			return stack.Configured(o, van.Scheduler)
		}
		return stack.Configured(o, van.Server) // as for a worker
	}
}

// check fails the test if the data of the nodes in this process takes another way than
// the one that the cluster is named after.
func (c *Cluster) check(t testing.TB) {
	t.Helper()
	if c.o.Over == AsSet {
		return
	}
	look := func(n *postoffice.Node, id int) {
		if n == nil {
			return // runs elsewhere
		}
		if got, want := SharesMemory(n, id), c.o.Over == SHM; got != want {
			t.Errorf("%s shares memory with %s: %t, want %t over %s", n.Name(), van.NodeName(id), got, want, c.o.Over)
		}
	}
	for i, w := range c.Workers {
		for k, s := range c.Servers {
			if i%c.o.Group == k%c.o.Group { // the others send each other nothing
				look(w, van.ServerID(k))
				look(s, van.WorkerID(i))
			}
		}
	}
}
