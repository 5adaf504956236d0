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

func main() { prog.Main(prog.Program{FServer: true, Serve: serve, Worker: work}) }

func serve(n *prog.Node, s *af.Server) (prog.Handler, error) {
	return func(b af.Batch) error {
		fmt.Printf("server %d: batch of worker %d: %d pushes, %d pulls\n", n.Rank(), b.Worker(), len(b.Pushes()), len(b.Pulls()))
		return answer(n, b)
	}, nil
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

func work(ctx context.Context, n *prog.Node, w *af.Worker) error {
	r := prog.Random(n.Rank())
	want := make([]float32, columns)
	var push []af.KeyTensor
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
	pull, err := n.Pulls(0, af.Float32, 1, columns)
	if err != nil {
		return err
	}
	if _, err := prog.PushPull(ctx, w, push, pull); err != nil {
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
