// Command stepmesh_pull_test measures how long it takes to pull BENCHMARK_SIZE
// bfloat16 numbers. DMLC_ROLE says which part the process plays. The worker
// compares the pulled numbers with the expected numbers of each server.
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

const key = 1

func serve(n *prog.Node, s *af.Server) (prog.Handler, error) {
	t, err := n.Tensor(af.BFloat16, int64(n.Config().Bench.Size))
	if err != nil {
		return nil, err
	}
	if err := n.Put(t, n.Contents(n.Topology().GroupRank)); err != nil {
		return nil, err
	}
	answer := []af.KeyTensor{{Key: key, Val: t}}
	return func(b af.Batch) error {
		return b.Respond(answer, af.ByKey)
	}, nil
}

func work(ctx context.Context, n *prog.Node, w *af.Worker) error {
	size := n.Config().Bench.Size
	zero := make([]byte, 2*size)
	want := make([][]byte, n.Topology().NumServers)
	for s := range want {
		want[s] = n.Contents(s)
	}
	pull, err := n.Pulls(key, af.BFloat16, int64(size))
	if err != nil {
		return err
	}
	_, err = n.Measure(ctx, "pull", 1000, 1, func(i int) (time.Duration, error) {
		if err := n.PutAll(pull, zero); err != nil {
			return 0, err
		}
		took, err := prog.PushPull(ctx, w, nil, pull)
		if err != nil {
			return 0, err
		}
		for s := range pull {
			if err := n.Equal(fmt.Sprintf("round %d: pull from server %d", i, s), pull[s].Val, want[s]); err != nil {
				return 0, err
			}
		}
		return took, nil
	})
	return err
}
