// Command wrong_server is a ut_server that answers with the first push tensor
// instead of the sum.
package main

import (
	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/tests/internal/prog"
	"github.com/stepaf/stepaf-go/van"
)

func main() { prog.Main(prog.Program{Serve: serve, Ready: van.ServerGroup | van.WorkerGroup}) }

func serve(n *prog.Node, s *af.Server) (prog.Handler, error) {
	return func(b af.Batch) error {
		return b.Respond([]af.KeyTensor{{Key: b.Pulls()[0].Key, Val: b.Pushes()[0].Val}}, af.ByKey)
	}, nil
}
