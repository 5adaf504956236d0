// Package faults tests that failures and bad input lead to an error in time. The error names
// the process, the cause and a remedy, and the rest of the cluster works on.
package faults

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/internal/nodetest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// Tasks of child processes.
const (
	echo   = "echo"   // a server that answers with the pushed tensors
	mute   = "mute"   // a server that says when it has a batch, and never answers
	panics = "panics" // a server whose handler panics
	begins = "begins" // a worker that begins a batch and does not end it
	asks   = "asks"   // a worker that asks once, and waits
	works  = "works"  // a worker that makes 20 round trips, and waits
	rules  = "rules"  // a scheduler
	learns = "learns" // a worker that says when its place was given to another
	obeys  = "obeys"  // a rank of a session; it says when its function runs, which does not end
	orders = "orders" // a controller, which says when all ranks run that
)

func TestMain(m *testing.M) { nodetest.Main(m, child) }

// child makes a node of a process of its own do what.
func child(c *nodetest.Child, what string) error {
	switch what {
	case echo:
		return nodetest.Serve(c.Node, func(b af.Batch) {
			if err := nodetest.Echo(b); err != nil {
				fmt.Fprintln(os.Stderr, err)
			}
		})
	case mute:
		return nodetest.Serve(c.Node, func(af.Batch) { c.Say("got a batch") })
	case panics:
		return nodetest.Serve(c.Node, func(af.Batch) { panic("no idea what to do with this batch") })
	case learns:
		c.Go(func(ctx context.Context) error {
			for range 2 { // a call that waits at that time, and a later call
				err := c.Node.InstanceBarrier(ctx, 0, van.WorkerGroup)
				if !errors.Is(err, postoffice.ErrRefused) || !strings.Contains(err.Error(), "was declared dead, and another process has replaced it as worker 1 (id 11)") {
					return fmt.Errorf("not refused as one that was replaced: %w", err)
				}
			}
			c.Say("refused")
			return nil
		})
	case obeys:
		return serveSession(c)
	case orders:
		return openSession(c)
	case begins, asks, works:
		return childWorker(c.Node, what)
	}
	return nil
}

func childWorker(n *postoffice.Node, what string) error {
	if what == begins {
		for _, id := range n.Topology().ServerInstances() {
			if err := (*cluster.Node)(n).App().Send(pushMessage(int(id), 0, van.BatchStart, 1, []byte("a batch that nobody ends"))); err != nil {
				return err
			}
		}
		return nil
	}
	w, err := af.NewWorker(n, af.WorkerOptions{})
	if err != nil {
		return err
	}
	if what == asks {
		_, _, err := request(w, n.Topology().NumServers, []byte("asked once"))
		return err
	}
	for i := range 20 {
		if err := roundTrip(context.Background(), w, n.Topology().NumServers, fmt.Appendf(nil, "round %d", i)); err != nil {
			return err
		}
	}
	return nil
}

// pushMessage is a push as a tensor worker sends it.
func pushMessage(to int, ts int32, flag van.BatchFlag, key uint64, x []byte) *van.Message {
	m := &van.Message{}
	m.Reset()
	m.Receiver, m.Request, m.Push, m.Head, m.AppID, m.CustomerID, m.Timestamp = to, true, true, flag, 0, 0, ts
	m.Key, m.ValLen, m.IsTensor, m.Dtype, m.Dim = key, int32(len(x)), true, int32(af.Uint8), 1
	m.Shape[0] = int64(len(x))
	m.DataTypes = append(m.DataTypes, van.TypeUint64, van.TypeOther)
	m.Frames, m.Keys, m.Vals = 2, backend.Slice([]uint64{key}), backend.Bytes(x)
	m.DataSize = int32(m.PayloadLen())
	return m
}
