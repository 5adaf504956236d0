// Command ut_server is the server of the unit tests: it answers each pull of a
// batch with the sum of the batch's push tensors, in bfloat16.
package main

import (
	"errors"
	"fmt"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/tests/internal/prog"
	"github.com/stepaf/stepaf-go/van"
)

func main() {
	prog.Main(prog.Program{Roles: []string{"server"}, Serve: serve, Ready: van.ServerGroup | van.WorkerGroup})
}

func serve(n *prog.Node, s *af.Server) (prog.Handler, error) {
	return func(b af.Batch) error {
		return answer(n, b)
	}, nil
}

func answer(n *prog.Node, b af.Batch) error {
	sum, err := add(n, b)
	if err != nil {
		b.Release()
		return err
	}
	out := make([]af.KeyTensor, len(b.Pulls()))
	for i, p := range b.Pulls() {
		out[i] = af.KeyTensor{Key: p.Key, Val: sum}
	}
	return b.Respond(out, af.ByKey)
}

// add returns the sum of the push tensors, which must be alike.
func add(n *prog.Node, b af.Batch) (af.Tensor, error) {
	pushes := b.Pushes()
	if len(pushes) == 0 {
		return af.Tensor{}, errors.New("batch without push tensors, want at least one")
	}
	first := pushes[0].Val
	sum, one := make([]byte, first.Len()), make([]byte, first.Len())
	for _, p := range pushes {
		if p.Val.Dtype() != af.BFloat16 || p.Val.Len() != len(sum) {
			return af.Tensor{}, fmt.Errorf("push tensor %s with key %d, want bfloat16 of %d bytes", p.Val.String(), p.Key, len(sum))
		}
		if err := n.Get(one, p.Val); err != nil {
			return af.Tensor{}, err
		}
		prog.AddBF16(sum, one)
	}
	t, err := n.Tensor(af.BFloat16, first.Dims()...)
	if err != nil {
		return af.Tensor{}, err
	}
	return t, n.Put(t, sum)
}
