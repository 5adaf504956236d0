package cluster_test

import (
	"context"
	"fmt"
	"net"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/inproc"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
)

// result is the result of Start.
type result struct {
	n   *postoffice.Node
	err error
}

// begin starts a node and delivers the result. The node is closed at the end of the test.
func begin(t testing.TB, network *inproc.Network, cfg *postoffice.Config) <-chan result {
	done := make(chan result, 1)
	over := make(chan struct{})
	go func() {
		defer close(over)
		n, err := start(t.Context(), network, cfg)
		done <- result{n, err}
		if err == nil {
			t.Cleanup(func() { _ = n.Close() })
		}
	}()
	t.Cleanup(func() { <-over })
	return done
}

// eachAlone runs a test for a worker and a server, in a network of its own and, with nil, over ZeroMQ.
func eachAlone(t *testing.T, test func(t *testing.T, role string, network *inproc.Network)) {
	for _, role := range []string{"worker", "server"} {
		for _, zmq := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s zmq %t", role, zmq), func(t *testing.T) {
				t.Parallel()
				network := inproc.NewNetwork()
				if zmq {
					network = nil
				}
				test(t, role, network)
			})
		}
	}
}

// TestNoScheduler: a missing scheduler is an error at the deadline.
func TestNoScheduler(t *testing.T) {
	eachAlone(t, func(t *testing.T, role string, network *inproc.Network) {
		port := testcluster.FreePort(t)
		cfg := config(func(c *postoffice.Config) { c.Role, c.RootPort = role, port })
		// bound calls start with a limit, and with longer ones while the node does not even bind its port in time.
		bound := func(limit time.Duration, start func(time.Duration) (*postoffice.Node, error)) error {
			for {
				n, err := start(limit)
				if err == nil {
					n.Close()
				} else if strings.Contains(err.Error(), "bind") {
					vantest.Fails(t, err, van.ErrTimeout)
					limit *= 2
					continue
				}
				return err
			}
		}
		began := time.Now()
		err := bound(300*time.Millisecond, func(limit time.Duration) (*postoffice.Node, error) {
			cfg.StartTimeout = limit
			return start(t.Context(), network, cfg)
		})
		vantest.Fails(t, err, van.ErrTimeout, role, fmt.Sprintf("the scheduler at 127.0.0.1:%d has not answered", port),
			"DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "limit "+cfg.StartTimeout.String())
		if d := time.Since(began); d > 10*time.Second {
			t.Errorf("it took %s", d)
		}

		// The caller's deadline counts as well.
		cfg.StartTimeout = time.Hour
		err = bound(200*time.Millisecond, func(limit time.Duration) (*postoffice.Node, error) {
			ctx, cancel := context.WithTimeout(t.Context(), limit)
			defer cancel()
			return start(ctx, network, cfg)
		})
		vantest.Fails(t, err, van.ErrTimeout, fmt.Sprintf("the scheduler at 127.0.0.1:%d has not answered", port))
		vantest.Fails(t, err, context.DeadlineExceeded)
	})
}

// TestSchedulerNotFound: a scheduler whose name has no address is waited for, since names may appear later; the error
// at the deadline has the reason.
func TestSchedulerNotFound(t *testing.T) {
	const name = "no..such.host" // no name service is asked for it
	eachAlone(t, func(t *testing.T, role string, network *inproc.Network) {
		cfg := config(func(c *postoffice.Config) {
			c.Role, c.RootURI, c.RootPort, c.StartTimeout = role, name, 8123, 300*time.Millisecond
		})
		n, err := start(t.Context(), network, cfg)
		if err == nil {
			n.Close()
		}
		vantest.Fails(t, err, van.ErrTimeout, role, "the scheduler at "+name+":8123 has not answered", "lookup "+name+": no such host",
			"DMLC_PS_ROOT_URI", "limit 300ms")
		if strings.Contains(err.Error(), "does not run there") {
			t.Errorf("%v: nobody has looked there", err)
		}
	})
}

// TestMissingNodes: at the deadline all nodes report the missing ones, and the same port serves a complete cluster
// afterwards.
func TestMissingNodes(t *testing.T) {
	port := testcluster.FreePort(t)
	set := func(role string, rank int, limit time.Duration) *postoffice.Config {
		return config(func(c *postoffice.Config) {
			c.Role, c.NumWorkers, c.NumServers, c.NodeRank, c.RootPort, c.StartTimeout = role, 2, 1, rank, port, limit
		})
	}
	w := begin(t, nil, set("worker", 1, 20*time.Second))
	s := begin(t, nil, set("scheduler", 0, 3*time.Second))
	missing := []string{"waiting for 1 of 2 workers (rank 0), 1 of 1 servers (rank 0)", "present: worker ", "(rank 1)"}
	r := <-s
	vantest.Fails(t, r.err, van.ErrTimeout, append(missing, "present: worker 127.0.0.1:", "scheduler", "limit 3s")...)
	r = <-w
	if r.err == nil || !strings.Contains(r.err.Error(), "start-up timed out on the scheduler after 3s") {
		t.Fatalf("worker: %v, want the scheduler's word", r.err)
	}
	for _, text := range missing {
		if !strings.Contains(r.err.Error(), text) {
			t.Errorf("worker: %q does not say %q", r.err, text)
		}
	}
	var all []<-chan result
	for role, count := range map[string]int{"scheduler": 1, "server": 1, "worker": 2} {
		for rank := range count {
			all = append(all, begin(t, nil, set(role, rank, 20*time.Second)))
		}
	}
	for _, done := range all {
		if r := <-done; r.err != nil {
			t.Error(r.err)
		}
	}
}

// TestSchedulerPortInUse: a scheduler cannot take another port.
func TestSchedulerPortInUse(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	port := l.Addr().(*net.TCPAddr).Port
	refuses(t, config(func(c *postoffice.Config) { c.Role, c.RootPort = "scheduler", port }), syscall.EADDRINUSE,
		"scheduler", fmt.Sprintf("127.0.0.1:%d", port), "another process listens there", "DMLC_PS_ROOT_PORT")
}

// TestRankTwice: of two nodes that ask for one rank the second is refused, and the cluster waits for a right one.
func TestRankTwice(t *testing.T) {
	network := inproc.NewNetwork()
	set := func(role string, rank int) *postoffice.Config {
		return config(func(c *postoffice.Config) { c.Role, c.NumWorkers, c.NodeRank = role, 2, rank })
	}
	s := begin(t, network, set("scheduler", 0))
	left, right := begin(t, network, set("worker", 1)), begin(t, network, set("worker", 1))
	var refused result
	winner := left
	select {
	case refused = <-left:
		winner = right
	case refused = <-right:
	}
	vantest.Fails(t, refused.err, postoffice.ErrRefused, "worker 127.0.0.1:", "both want rank 1", "DMLC_NODE_RANK", "STEPMESH_GPU")
	for _, done := range []<-chan result{s, winner, begin(t, network, set("worker", 0)), begin(t, network, set("server", 0))} {
		if r := <-done; r.err != nil {
			t.Error(r.err)
		}
	}
}

// TestTooManyNodes: an additional node is refused, before and after the cluster is complete.
func TestTooManyNodes(t *testing.T) {
	network := inproc.NewNetwork()
	set := func(role string, numbers int) *postoffice.Config {
		return config(func(c *postoffice.Config) {
			c.Role, c.NumWorkers, c.NumServers, c.NodeRank = role, numbers, numbers, numbers-1
		})
	}
	s := begin(t, network, set("scheduler", 1))
	early := <-begin(t, network, set("worker", 2)) // is configured for two of each
	vantest.Fails(t, early.err, postoffice.ErrRefused, "(rank 1)", "its DMLC_NUM_WORKER x DMLC_GROUP_SIZE is 2, that of the scheduler", "is 1; give all nodes the same numbers")
	for _, done := range []<-chan result{begin(t, network, set("server", 1)), begin(t, network, set("worker", 1)), s} {
		if r := <-done; r.err != nil {
			t.Fatal(r.err)
		}
	}
	for _, role := range []string{"worker", "server"} {
		late := <-begin(t, network, set(role, 1))
		vantest.Fails(t, late.err, postoffice.ErrRefused, "the cluster is complete: all 1 places for a "+role+" are taken", "none of its nodes is dead", "rank 0")
	}
}
