// Command stepmesh_push_test measures how long it takes to push BENCHMARK_SIZE
// bfloat16 numbers. DMLC_ROLE says which part the process plays. The server
// compares what comes with what its sender must have sent.
package main

import (
	"context"
	"fmt"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/tests/internal/prog"
	"github.com/stepaf/stepaf-go/van"
)

func main() { prog.Main(prog.Program{Server: serve, Worker: work, Ready: van.WorkerGroup}) }

func serve(_ context.Context, n *prog.Node) error {
	s, err := af.NewServer(n.Node, af.ServerOptions{})
	if err != nil {
		return err
	}
	want := make([][]byte, n.NumWorkers())
	for rank := range want {
		want[rank] = n.Contents(rank)
	}
	return s.Handle(func(b af.Batch) {
		if err := check(n, b, want[b.Worker()]); err != nil {
			n.Log().Error("wrong push", "worker", b.Worker(), "err", err)
			n.Fail(err)
		}
	})
}

// check answers first, so that comparing is not measured.
func check(n *prog.Node, b af.Batch, want []byte) error {
	defer b.Retain().Release()
	pushes, worker := b.Pushes(), b.Worker()
	if err := b.Respond(nil); err != nil {
		return err
	}
	if len(pushes) != 1 || pushes[0].Key != 0 {
		return fmt.Errorf("batch of %d pushes of worker %d, want one with key 0", len(pushes), worker)
	}
	return n.Equal(fmt.Sprintf("push of worker %d", worker), pushes[0].Val, want)
}

func work(ctx context.Context, n *prog.Node) error {
	w, err := af.NewWorker(n.Node, af.WorkerOptions{})
	if err != nil {
		return err
	}
	push, err := n.Tensor(af.BFloat16, int64(n.Config().Bench.Size))
	if err != nil {
		return err
	}
	if err := n.Put(push, n.Contents(n.GroupRank())); err != nil {
		return err
	}
	_, err = n.Measure(ctx, "push", 1000, 1, func(int) (time.Duration, error) {
		start := time.Now()
		h, err := w.PushPull([]af.KeyTensor{{Key: 0, Val: push}}, nil)
		if err != nil {
			return 0, err
		}
		err = h.Wait(ctx)
		return time.Since(start), err
	})
	return err
}
