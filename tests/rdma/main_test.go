// Package rdma tests whole clusters over RDMA: values, failures and costs. The nodes
// are processes, or several in the process of the test. Without an RDMA device the
// tests are skipped; make rdma-test runs them in a virtual machine.
package rdma

import (
	"context"
	"fmt"
	"testing"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/kv"
	"github.com/stepaf/stepaf-go/tests/internal/nodetest"
	"github.com/stepaf/stepaf-go/tests/internal/real"
)

// Roles of children.
const (
	answers = "answers" // a server that answers as expected() says
	slots   = "slots"   // the same, with registered receive buffers
	mute    = "mute"    // a server that reports its batches, and never answers
	works   = "works"   // a worker that exchanges batches until the end
	sums    = "sums"    // a kv server that adds up
	rules   = "rules"   // a scheduler
	anyone  = "anyone"  // a server that takes any batches
	picks   = "picks"   // a worker that uses some of the servers until the end
)

func TestMain(m *testing.M) {
	real.Main() // for child processes of plans
	nodetest.Main(m, child)
}

// child runs a node in a process of its own with the role what.
func child(c *nodetest.Child, what string) error {
	switch what {
	case answers, slots:
		return serveAnswers(c.Node, what == slots, c.Fail)
	case mute:
		return nodetest.Serve(c.Node, func(af.Batch) { c.Say("got a batch") })
	case works:
		w, err := af.NewWorker(c.Node, af.WorkerOptions{})
		if err != nil {
			return err
		}
		c.Go(func(ctx context.Context) error {
			for i := 0; ctx.Err() == nil; i++ {
				if err := (&client{n: c.Node, w: w}).mixed(ctx, i); err != nil {
					return err
				}
				if i == 0 {
					c.Say("works")
				}
			}
			return nil
		})
	case anyone:
		c.Go(func(ctx context.Context) error { return serveAny(ctx, c.Node) })
	case picks:
		c.Go(func(ctx context.Context) error {
			p, err := newPicker(ctx, c.Node)
			for i := 0; err == nil && ctx.Err() == nil; i++ {
				if err = p.turns(6); err == nil && i == 0 {
					c.Say(picks)
				}
			}
			return err
		})
	case sums:
		s, err := kv.NewServer[float32](c.Node, kv.ServerOptions{})
		if err != nil {
			return err
		}
		s.SimpleApp().Handle(func(d kv.SimpleMessage) {
			if err := d.Respond(fmt.Appendf(nil, "%d %s", d.Head, d.Body)); err != nil {
				c.Fail(err)
			}
		})
		return s.Handle(new(kv.SummingHandler[float32]).Handle)
	}
	return nil
}

// notShort skips a test under -short. "make test" runs the same cases on simulated devices and over other transports.
func notShort(t *testing.T) {
	if testing.Short() {
		t.Skip("repeats on emulated devices what other tests show")
	}
}
