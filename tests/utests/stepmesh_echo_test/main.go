// Command stepmesh_echo_test measures how long it takes to push BENCHMARK_SIZE
// bfloat16 numbers under key 0 and to pull them back under key 1. DMLC_ROLE says
// which part the process plays. The pulled numbers are compared with the pushed ones.
package main

import (
	"context"
	"fmt"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/tests/internal/prog"
	"github.com/stepaf/stepaf-go/van"
)

func main() { prog.Main(prog.Program{Serve: prog.ServeEcho, Worker: work, Ready: van.WorkerGroup}) }

func work(ctx context.Context, n *prog.Node, w *af.Worker) error {
	size := n.Config().Bench.Size
	data, zero := make([]byte, 2*size), make([]byte, 2*size)
	r := prog.Random(n.Rank())
	push, err := n.Tensor(af.BFloat16, int64(size))
	if err != nil {
		return err
	}
	pull, err := n.Pulls(1, af.BFloat16, int64(size))
	if err != nil {
		return err
	}
	all, err := n.Measure(ctx, "pushpull", 1000, 1, func(i int) (time.Duration, error) {
		prog.FillBytes(r, data)
		if err := n.Put(push, data); err != nil {
			return 0, err
		}
		if err := n.PutAll(pull, zero); err != nil {
			return 0, err
		}
		took, err := prog.PushPull(ctx, w, []af.KeyTensor{{Key: 0, Val: push}}, pull)
		if err != nil {
			return 0, err
		}
		for s := range pull {
			if err := n.Equal(fmt.Sprintf("round %d: echo of server %d", i, s), pull[s].Val, data); err != nil {
				return 0, err
			}
		}
		return took, nil
	})
	if len(all) > 0 {
		n.Log().Error(all.Line("pushpull overall latency: "))
	}
	return err
}
