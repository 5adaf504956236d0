// Command stepmesh_pull_test measures how long it takes to pull BENCHMARK_SIZE
// bfloat16 numbers. DMLC_ROLE says which part the process plays. The worker
// compares what comes with what each server must have sent.
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

const key = 1

func serve(_ context.Context, n *prog.Node) error {
	s, err := af.NewServer(n.Node, af.ServerOptions{})
	if err != nil {
		return err
	}
	t, err := n.Tensor(af.BFloat16, int64(n.Config().Bench.Size))
	if err != nil {
		return err
	}
	if err := n.Put(t, n.Contents(n.GroupRank())); err != nil {
		return err
	}
	answer := []af.KeyTensor{{Key: key, Val: t}}
	return s.Handle(func(b af.Batch) {
		if err := b.Respond(answer, af.ByKey); err != nil {
			n.Log().Error("pull not answered", "worker", b.Worker(), "err", err)
			n.Fail(err)
		}
	})
}

func work(ctx context.Context, n *prog.Node) error {
	w, err := af.NewWorker(n.Node, af.WorkerOptions{})
	if err != nil {
		return err
	}
	size := n.Config().Bench.Size
	zero := make([]byte, 2*size)
	want := make([][]byte, n.NumServers())
	pull := make([]af.KeyTensor, n.NumServers())
	for s := range pull {
		want[s] = n.Contents(s)
		pull[s].Key = key
		if pull[s].Val, err = n.Tensor(af.BFloat16, int64(size)); err != nil {
			return err
		}
	}
	_, err = n.Measure(ctx, "pull", 1000, 1, func(i int) (time.Duration, error) {
		for s := range pull {
			if err := n.Put(pull[s].Val, zero); err != nil {
				return 0, err
			}
		}
		start := time.Now()
		h, err := w.PushPull(nil, pull)
		if err != nil {
			return 0, err
		}
		if err := h.Wait(ctx); err != nil {
			return 0, err
		}
		took := time.Since(start)
		for s := range pull {
			if err := n.Equal(fmt.Sprintf("round %d: pull from server %d", i, s), pull[s].Val, want[s]); err != nil {
				return 0, err
			}
		}
		return took, nil
	})
	return err
}
