// Command ut_tensor_worker is the worker of the unit tests. For batches of 1 to
// UTEST_WORKER_BATCH_MAX-1 rows it pushes UTEST_WORKER_TENSOR_NUM tensors 32 times,
// and compares the sum that every server (see ut_server) returns with its own.
package main

import (
	"context"
	"fmt"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/tests/internal/prog"
	"github.com/stepaf/stepaf-go/van"
)

const (
	columns = 7168
	rounds  = 32
)

func main() {
	prog.Main(prog.Program{Roles: []string{"worker"}, Worker: work, Ready: van.ServerGroup | van.WorkerGroup})
}

func work(ctx context.Context, n *prog.Node, w *af.Worker) error {
	gpu := n.Config().GPU
	for b := 1; b < n.Config().Bench.BatchMax; b++ {
		start := time.Now()
		failed, err := batch(ctx, n, w, b)
		if err != nil {
			return err
		}
		took := time.Since(start).Nanoseconds()
		if failed == 0 {
			fmt.Printf("GPU %d Batch %d: ALL PASS duration=%dns\n", gpu, b, took)
			continue
		}
		fmt.Printf("GPU %d Batch %d FAILED %d/%d duration=%dns\n", gpu, b, failed, rounds, took)
		n.Fail(fmt.Errorf("%s: wrong sums, see the FAILED lines", n.Name()))
	}
	return nil
}

// batch does all rounds with tensors of b rows and counts those that failed.
func batch(ctx context.Context, n *prog.Node, w *af.Worker, b int) (failed int, err error) {
	tensors := n.Config().Bench.Tensors
	size := b * columns * af.BFloat16.Size()
	sum, zero, got := make([]byte, size), make([]byte, size), make([]byte, size)
	r := prog.Random(n.Rank(), b)
	push := make([]af.KeyTensor, tensors)
	for t := range push {
		data := make([]byte, size)
		prog.FillBF16(r, data)
		prog.AddBF16(sum, data)
		if push[t], err = keyTensor(n, b<<16+t, b, data); err != nil {
			return 0, err
		}
	}
	pull := make([]af.KeyTensor, n.Topology().NumServers)
	for s := range pull {
		if pull[s], err = keyTensor(n, b<<16+tensors, b, zero); err != nil {
			return 0, err
		}
	}
	for round := range rounds {
		if err := n.PutAll(pull, zero); err != nil {
			return 0, err
		}
		h, err := w.PushPull(push, prog.OfEach(pull))
		if err != nil {
			return 0, err
		}
		if err := h.Wait(ctx); err != nil {
			return 0, err
		}
		ok := true
		for s := range pull {
			if err := n.Get(got, pull[s].Val); err != nil {
				return 0, err
			}
			if !prog.CloseBF16(got, sum) {
				n.Log().Warn("wrong sum", "batch", b, "round", round, "server", s)
				ok = false
			}
		}
		if !ok {
			failed++
		}
	}
	return failed, nil
}

func keyTensor(n *prog.Node, key, rows int, data []byte) (af.KeyTensor, error) {
	t, err := n.Tensor(af.BFloat16, int64(rows), columns)
	if err != nil {
		return af.KeyTensor{}, err
	}
	return af.KeyTensor{Key: uint64(key), Val: t}, n.Put(t, data)
}
