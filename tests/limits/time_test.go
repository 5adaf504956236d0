package limits

import (
	"bytes"
	"fmt"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/testcluster"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/internal/nodetest"
	"github.com/stepaf/stepaf-go/van/vantest"
)

// slower multiplies limits of time for the race detector.
func slower(d time.Duration) time.Duration {
	if vantest.Race {
		return 4 * d
	}
	return d
}

// TestStartUp: four workers and four servers are ready in a moment.
func TestStartUp(t *testing.T) {
	limit := slower(3 * time.Second)
	began := time.Now()
	c := testcluster.Start(t, testcluster.Options{Over: testcluster.SHM, Workers: 4, Servers: 4})
	if took := time.Since(began); took > limit {
		t.Errorf("4 workers and 4 servers took %s to start, want less than %s", took, limit)
	} else {
		t.Logf("started in %s", took)
	}
	c.Finalize(t)
}

// TestManyNodes: 129 nodes in one process start and leave in a moment.
func TestManyNodes(t *testing.T) {
	limit := slower(5 * time.Second)
	began := time.Now()
	c := testcluster.Start(t, testcluster.Options{Workers: 64, Servers: 64})
	started := time.Since(began)
	c.Finalize(t)
	if took := time.Since(began); took > limit {
		t.Errorf("64 workers and 64 servers took %s to start and %s in all, want less than %s", started, took, limit)
	} else {
		t.Logf("started in %s, left after %s", started, took)
	}
}

// TestIdle: a cluster in which nothing happens costs next to nothing, with and
// without heartbeats.
func TestIdle(t *testing.T) {
	for _, over := range []testcluster.Transport{testcluster.TCP, testcluster.SHM} {
		for _, beat := range []time.Duration{0, time.Second} {
			t.Run(fmt.Sprintf("%s heartbeats %s", over, beat), func(t *testing.T) {
				c := testcluster.Start(t, testcluster.Options{Over: over, Workers: 2, Servers: 2, Set: func(c *postoffice.Config) {
					c.HeartbeatInterval, c.HeartbeatTimeout = beat, 5*beat
				}})
				for _, n := range c.Servers {
					nodetest.Server(t, n, nodetest.Echoes(t))
				}
				for _, n := range c.Workers { // what spins does so after traffic
					busy(t, n)
				}
				most := time.Second / 100
				if beat > 0 {
					most = slower(most)
				}
				nodetest.Settle()
				<-time.After(100 * time.Millisecond) // for spinning to end
				vantest.Idle(t, "5 nodes", func() time.Duration { return vantest.ProcessorTime(t) }, 3*time.Second, most.Seconds())
				c.Finalize(t)
			})
		}
	}
}

// busy makes some requests of servers that echo.
func busy(t testing.TB, n *postoffice.Node) {
	t.Helper()
	w := nodetest.Worker(t, n)
	push := tensor(t)
	for i := range push.Bytes() {
		push.Bytes()[i] = byte(i)
	}
	var pull []af.KeyTensor
	for range n.Topology().NumServers {
		pull = append(pull, af.KeyTensor{Key: 2, Val: tensor(t)})
	}
	for range 200 {
		h, err := w.PushPull([]af.KeyTensor{{Key: 1, Val: push}}, pull)
		if err == nil {
			err = h.Wait(t.Context())
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	for i := range pull {
		if !bytes.Equal(pull[i].Val.Bytes(), push.Bytes()) {
			t.Errorf("server %d answered something else", i)
		}
	}
}
