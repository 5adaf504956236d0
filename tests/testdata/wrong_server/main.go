// Command wrong_server is a ut_server that answers with the first push tensor
// instead of the sum.
package main

import (
	"context"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/tests/internal/prog"
	"github.com/stepaf/stepaf-go/van"
)

func main() { prog.Main(prog.Program{Server: serve, Ready: van.ServerGroup | van.WorkerGroup}) }

func serve(_ context.Context, n *prog.Node) error {
	s, err := af.NewServer(n.Node, af.ServerOptions{})
	if err != nil {
		return err
	}
	return s.Handle(func(b af.Batch) {
		if err := b.Respond([]af.KeyTensor{{Key: b.Pulls()[0].Key, Val: b.Pushes()[0].Val}}, af.ByKey); err != nil {
			n.Fail(err)
		}
	})
}
