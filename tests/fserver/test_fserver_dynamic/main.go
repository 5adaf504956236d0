// Command test_fserver_dynamic is the Go twin of test_fserver_dynamic.py: three
// stages whose tensors have another number of rows each time. The servers echo.
// BENCHMARK_ITER replaces the 2000 iterations.
package main

import (
	"context"
	"fmt"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/internal/prog"
)

const (
	iterations = 2000
	stages     = 3
	maxRows    = 128
	columns    = 7196
	limit      = 500 * time.Second
)

func main() {
	prog.Main(prog.Program{FServer: true, RoleBarrier: true, Serve: prog.ServeEcho, Worker: work})
}

func work(ctx context.Context, n *prog.Node, w *af.Worker) error {
	r := prog.Random(n.Rank())
	data := make([]byte, 2*maxRows*columns)
	var push [stages]af.Tensor
	var pull [stages][]af.KeyTensor
	for stage := range stages {
		var err error
		if push[stage], err = n.Tensor(af.BFloat16, maxRows, columns); err != nil {
			return err
		}
		if pull[stage], err = n.Pulls(0, af.BFloat16, maxRows, columns); err != nil {
			return err
		}
	}
	for i := range prog.Rounds(n.Iterations(iterations)) {
		for stage := range stages {
			rows := maxRows
			if i > 0 {
				rows = 1 + r.IntN(maxRows)
			}
			part := data[:2*rows*columns]
			prog.FillBytes(r, part)
			out, err := firstRows(push[stage], rows)
			if err != nil {
				return err
			}
			if err := n.Put(out, part); err != nil {
				return err
			}
			in := make([]af.KeyTensor, n.Topology().NumServers)
			for s := range in {
				in[s].Key = uint64(1000 + stage + s)
				if in[s].Val, err = firstRows(pull[stage][s].Val, rows); err != nil {
					return err
				}
			}
			h, err := w.PushPull([]af.KeyTensor{{Key: uint64(stage) + 1e6, Val: out}}, prog.OfEach(in), af.Within(limit))
			if err != nil {
				return err
			}
			if err := h.Wait(ctx); err != nil {
				return err
			}
			if h.Traces()[0] == (postoffice.Trace{}) {
				return fmt.Errorf("iteration %d, stage %d: no trace", i, stage)
			}
			for s := range in {
				if err := n.Equal(fmt.Sprintf("iteration %d, stage %d, server %d", i, stage, s), in[s].Val, part); err != nil {
					return err
				}
			}
		}
	}
	fmt.Println("worker test done")
	return nil
}

// firstRows is a view on the first rows of t.
func firstRows(t af.Tensor, rows int) (af.Tensor, error) {
	return af.NewTensor(t.Mem().Sub(0, 2*rows*columns), t.Dtype(), int64(rows), columns)
}
