// Command test_fserver is the Go twin of test_fserver.py: each worker pushes three
// tensors and pulls their sum from every server.
package main

import (
	"context"
	"fmt"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/tests/internal/prog"
)

const (
	columns = 8192
	pushes  = 3
)

func main() { prog.Main(prog.Program{FServer: true, Server: serve, Worker: work}) }

func serve(_ context.Context, n *prog.Node) error {
	s, err := af.NewServer(n.Node, af.ServerOptions{})
	if err != nil {
		return err
	}
	return s.Handle(func(b af.Batch) {
		fmt.Printf("server %d: batch of worker %d: %d pushes, %d pulls\n", n.Rank(), b.Worker(), len(b.Pushes()), len(b.Pulls()))
		if err := answer(n, b); err != nil {
			n.Log().Error("batch not answered", "worker", b.Worker(), "err", err)
			n.Fail(err)
		}
	})
}

func answer(n *prog.Node, b af.Batch) error {
	sum := make([]float32, columns)
	for _, p := range b.Pushes() {
		x, err := prog.Floats(n, p.Val)
		if err == nil && len(x) != columns {
			err = fmt.Errorf("push tensor %s, want %d numbers", p.Val.String(), columns)
		}
		if err != nil {
			b.Release()
			return err
		}
		for i := range sum {
			sum[i] += x[i]
		}
	}
	out, err := prog.FromFloats(n, sum, 1, columns)
	if err != nil {
		b.Release()
		return err
	}
	return b.Respond([]af.KeyTensor{{Key: 0, Val: out}}, af.ByKey)
}

func work(ctx context.Context, n *prog.Node) error {
	w, err := af.NewWorker(n.Node, af.WorkerOptions{})
	if err != nil {
		return err
	}
	r := prog.Random(n.Rank())
	want := make([]float32, columns)
	var push, pull []af.KeyTensor
	for key := range pushes {
		x := make([]float32, columns)
		for i := range x {
			x[i] = r.Float32()
			want[i] += x[i]
		}
		t, err := prog.FromFloats(n, x, 1, columns)
		if err != nil {
			return err
		}
		push = append(push, af.KeyTensor{Key: uint64(key), Val: t})
	}
	for range n.NumServers() {
		t, err := n.Tensor(af.Float32, 1, columns)
		if err != nil {
			return err
		}
		pull = append(pull, af.KeyTensor{Key: 0, Val: t})
	}
	h, err := w.PushPull(push, pull)
	if err != nil {
		return err
	}
	if err := h.Wait(ctx); err != nil {
		return err
	}
	for s := range pull {
		got, err := prog.Floats(n, pull[s].Val)
		if err != nil {
			return err
		}
		for i := range want {
			if d := got[i] - want[i]; !(max(d, -d) <= 1e-8+1e-5*want[i]) {
				return fmt.Errorf("element %d of server %d's sum is %g, want %g", i, s, got[i], want[i])
			}
		}
	}
	fmt.Println("worker test done")
	return nil
}
