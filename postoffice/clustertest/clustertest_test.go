package clustertest_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/postoffice/clustertest"
	_ "github.com/stepaf/stepaf-go/tests/testlimit"
)

// double serves batches: it answers with the doubled values.
func double(n *postoffice.Node) error {
	server, err := af.NewServer(n, af.ServerOptions{})
	if err != nil {
		return err
	}
	return server.Handle(func(b af.Batch) {
		x, _ := af.Slice[float32](b.Pushes()[0].Val)
		for i := range x {
			x[i] *= 2
		}
		_ = b.Respond(b.Pushes())
	})
}

// doubled pushes 1, 2, 3 and returns the answer.
func doubled(ctx context.Context, worker *af.Worker) ([]float32, error) {
	in, out := []float32{1, 2, 3}, make([]float32, 3)
	push, err := af.FromSlice(in)
	if err != nil {
		return nil, err
	}
	pull, err := af.FromSlice(out)
	if err != nil {
		return nil, err
	}
	call, err := worker.PushPull([]af.KeyTensor{{Key: 1, Val: push}}, [][]af.KeyTensor{{{Key: 2, Val: pull}}})
	if err == nil {
		err = call.Wait(ctx)
	}
	return out, err
}

// TestKillAndReplace: a killed server fails the calls to it, and its replacement serves the same worker.
func TestKillAndReplace(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	c := clustertest.Start(t, clustertest.Options{Workers: 2})
	if err := double(c.Server(0)); err != nil {
		t.Fatal(err)
	}
	worker, err := af.NewWorker(c.Worker(1), af.WorkerOptions{})
	if err != nil {
		t.Fatal(err)
	}
	want := []float32{2, 4, 6}
	if out, err := doubled(ctx, worker); err != nil || !slices.Equal(out, want) {
		t.Fatalf("got %v, %v; want %v", out, err, want)
	}
	first, lost, back := c.Server(0), make(chan struct{}), make(chan struct{})
	defer c.Worker(1).OnPeer(func(id postoffice.NodeID, up bool, _ error) {
		if id == postoffice.ServerID(0) && up {
			close(back)
		} else if id == postoffice.ServerID(0) {
			close(lost)
		}
	})()
	if err := c.Kill(ctx, first); err != nil {
		t.Fatal(err)
	}
	<-lost
	if _, err := doubled(ctx, worker); !errors.Is(err, postoffice.ErrPeerLost) {
		t.Errorf("to a killed server: %v, want an error that wraps ErrPeerLost", err)
	}
	next, err := c.Replace(ctx, first)
	if err != nil {
		t.Fatal(err)
	}
	if next != c.Server(0) || next == first || next.ID() != first.ID() || !next.IsRecovery() {
		t.Errorf("the replacement is %s (recovery %t), want %s", next.Name(), next.IsRecovery(), first.Name())
	}
	if err := double(next); err != nil {
		t.Fatal(err)
	}
	<-back
	if out, err := doubled(ctx, worker); err != nil || !slices.Equal(out, want) {
		t.Errorf("after the replacement: got %v, %v; want %v", out, err, want)
	}
}

// TestStartFails: the error of a node that cannot start is the error of the cluster, and the other nodes end.
func TestStartFails(t *testing.T) {
	_, err := clustertest.New(t.Context(), clustertest.Options{Servers: 2, Node: func(o *postoffice.Options) {
		if c := o.Config; c.Role == "server" && c.NodeRank == 1 {
			c.NumWorkers = -1
		}
	}})
	if !errors.Is(err, postoffice.ErrInvalid) {
		t.Errorf("got %v, want an error that wraps ErrInvalid", err)
	}
}

// A program for each role, run by all nodes of a cluster of one worker and two servers.
func ExampleCluster_Run() {
	ctx := context.Background()
	c, err := clustertest.New(ctx, clustertest.Options{Workers: 1, Servers: 2})
	if err != nil {
		panic(err)
	}
	defer c.Close()
	err = c.Run(ctx, func(ctx context.Context, n *postoffice.Node) error {
		if n.Role() == postoffice.Worker {
			fmt.Println(n.Name(), "talks to", n.Topology().ServerInstances())
		}
		return n.InstanceBarrier(ctx, 0, postoffice.AllNodes)
	})
	fmt.Println(err)
	// Output:
	// worker 0 (id 9) talks to [server 0 (id 8) server 1 (id 10)]
	// <nil>
}

// A server is killed and replaced: the worker's call fails, and a later one succeeds.
func ExampleCluster_Kill() {
	ctx := context.Background()
	c, err := clustertest.New(ctx, clustertest.Options{})
	if err != nil {
		panic(err)
	}
	defer c.Close()
	worker, err := af.NewWorker(c.Worker(0), af.WorkerOptions{})
	if err != nil {
		panic(err)
	}
	failed := make(chan error)
	go func() {
		_, err := doubled(ctx, worker) // there is no af.Server yet: the call waits
		failed <- err
	}()
	if err := c.Kill(ctx, c.Server(0)); err != nil {
		panic(err)
	}
	fmt.Println(errors.Is(<-failed, postoffice.ErrPeerLost))
	n, err := c.Replace(ctx, c.Server(0))
	fmt.Println(n.Name(), n.IsRecovery(), err)
	// Output:
	// true
	// server 0 (id 8) true <nil>
}

// TestKillNotNoticed: Kill does not wait without end for a loss that the scheduler cannot notice.
func TestKillNotNoticed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := clustertest.Start(t, clustertest.Options{})
		if err := c.Kill(t.Context(), c.Scheduler()); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v, want an error that wraps DeadlineExceeded", err)
		}
	})
}
