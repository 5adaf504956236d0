package faults

import (
	"bytes"
	"log/slog"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/internal/nodetest"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/env"
)

// TestTLS: with STEPAF_TLS=1, workers and servers exchange tensors of any length over connections of their own. A node with another
// STEPAF_TLS cannot join, and the cluster does not notice.
func TestTLS(t *testing.T) {
	l := &nodetest.Text{}
	secure := func(c *postoffice.Config) { c.Secret, c.TLS = env.Secret("a secret of a test's cluster"), true }
	c := testcluster.Start(t, testcluster.Options{Over: testcluster.TCP, Workers: 2, Servers: 2, Log: l.Logger(slog.LevelDebug), Set: secure})
	serveAll(t, c)
	w0, w1 := nodetest.Worker(t, c.Workers[0]), nodetest.Worker(t, c.Workers[1])
	work(t, 2, w0, w1)
	for _, n := range []int{1, 4 << 10, 1 << 20, 5<<20 + 3} {
		if err := roundTrip(t.Context(), w0, 2, bytes.Repeat([]byte("x"), n)); err != nil {
			t.Errorf("%d bytes: %v", n, err)
		}
	}
	for i, w := range c.Workers {
		if path := van.PathTo((*cluster.Node)(w).Van(), van.ServerID(i), false).Over; path != "tcp" {
			t.Errorf("data of %s goes over %s, want tcp", w.Name(), path)
		}
	}
	_, err := c.Join(nodetest.Within(t, 15*time.Second), "worker", 0, func(c *postoffice.Config) { c.TLS = false })
	vantest.Fails(t, err, postoffice.ErrRefused, "its STEPAF_TLS is 0, that of the scheduler", "is 1")
	work(t, 2, w0, w1)
	c.Finalize(t)
}
