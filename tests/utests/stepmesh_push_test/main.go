// Command stepmesh_push_test measures how long it takes to push BENCHMARK_SIZE
// bfloat16 numbers. DMLC_ROLE says which part the process plays. The server
// compares the pushed numbers with the expected numbers of their sender.
package main

import (
	"context"
	"fmt"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/tests/internal/prog"
	"github.com/stepaf/stepaf-go/van"
)

func main() { prog.Main(prog.Program{Serve: serve, Worker: work, Ready: van.WorkerGroup}) }

func serve(n *prog.Node, s *af.Server) (prog.Handler, error) {
	want := make([][]byte, n.Topology().NumWorkers)
	for rank := range want {
		want[rank] = n.Contents(rank)
	}
	return func(b af.Batch) error {
		return check(n, b, want[b.Worker()])
	}, nil
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

func work(ctx context.Context, n *prog.Node, w *af.Worker) error {
	push, err := n.Tensor(af.BFloat16, int64(n.Config().Bench.Size))
	if err != nil {
		return err
	}
	if err := n.Put(push, n.Contents(n.Topology().GroupRank)); err != nil {
		return err
	}
	_, err = n.Measure(ctx, "push", 1000, 1, func(int) (time.Duration, error) {
		return prog.PushPull(ctx, w, []af.KeyTensor{{Key: 0, Val: push}}, nil)
	})
	return err
}
