// Command af is the smallest tensor program: a worker pushes a tensor, the server
// doubles it, the worker pulls the result.
package main

import (
	"context"
	"fmt"
	"log"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/postoffice"
)

func main() {
	ctx := context.Background()
	cfg, err := postoffice.LoadConfig() // DMLC_ROLE, DMLC_PS_ROOT_URI, ...
	check(err)
	node, err := postoffice.Start(ctx, postoffice.Options{Config: cfg})
	check(err)
	switch node.Role() {
	case postoffice.Server:
		server, err := af.NewServer(node, af.ServerOptions{})
		check(err)
		check(server.Handle(func(b af.Batch) {
			x, err := af.Slice[float32](b.Pushes()[0].Val)
			check(err)
			for i := range x {
				x[i] *= 2
			}
			check(b.Respond(b.Pushes())) // the first push answers the first pull
		}))
	case postoffice.Worker:
		worker, err := af.NewWorker(node, af.WorkerOptions{})
		check(err)
		in, out := []float32{1, 2, 3, 4}, make([]float32, 4)
		push, err := af.FromSlice(in, 2, 2)
		check(err)
		pull, err := af.FromSlice(out, 2, 2)
		check(err)
		call, err := worker.PushPull([]af.KeyTensor{{Key: 1, Val: push}}, [][]af.KeyTensor{{{Key: 2, Val: pull}}})
		check(err)
		check(call.Wait(ctx)) // from here on the tensors are ours again
		fmt.Println(in, "doubled is", out)
	}
	check(node.Shutdown(ctx)) // waits for everybody
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
