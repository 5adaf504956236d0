// Command test_fserver_diff_stage is the Go twin of test_fserver_diff_stage.py:
// three stages, each with a key and buffers of its own, one after the other. The
// servers echo. BENCHMARK_ITER replaces the 100 iterations.
package main

import (
	"context"
	"fmt"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/tests/internal/prog"
)

const (
	iterations = 100
	stages     = 3
	rows       = 128
	columns    = 4
)

func main() {
	prog.Main(prog.Program{FServer: true, RoleBarrier: true, Serve: prog.ServeEcho, Worker: work})
}

func work(ctx context.Context, n *prog.Node, w *af.Worker) error {
	r := prog.Random(n.Rank())
	data := make([]byte, 2*rows*columns)
	var push [stages]af.Tensor
	var pull [stages][]af.KeyTensor
	for stage := range stages {
		var err error
		if push[stage], err = n.Tensor(af.BFloat16, rows, columns); err != nil {
			return err
		}
		if pull[stage], err = n.Pulls(uint64(stage), af.BFloat16, rows, columns); err != nil {
			return err
		}
	}
	for i := range prog.Rounds(n.Iterations(iterations)) {
		for stage := range stages {
			prog.FillBytes(r, data)
			if err := n.Put(push[stage], data); err != nil {
				return err
			}
			h, err := w.PushPull([]af.KeyTensor{{Key: uint64(stage), Val: push[stage]}}, prog.OfEach(pull[stage]))
			if err != nil {
				return err
			}
			fmt.Printf("iter: %d, stage: %d, handler: %d\n", i, stage, h.Timestamp())
			if err := h.Wait(ctx); err != nil {
				return err
			}
			for s, p := range pull[stage] {
				if err := n.Equal(fmt.Sprintf("iteration %d, stage %d, server %d", i, stage, s), p.Val, data); err != nil {
					return err
				}
			}
		}
	}
	fmt.Println("worker test done")
	return nil
}
