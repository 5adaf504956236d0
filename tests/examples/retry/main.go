// Command retry calls a server ten times, once a second. If the server is lost, calls fail
// until a replacement process has joined; the worker goes on.
package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/postoffice"
)

func main() {
	ctx := context.Background()
	cfg, err := postoffice.LoadConfig()
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
			x[0] *= 2
			if err := b.Respond(b.Pushes()); err != nil {
				log.Print(err) // the worker was lost
			}
		}))
	case postoffice.Worker:
		worker, err := af.NewWorker(node, af.WorkerOptions{})
		check(err)
		in, out := []float32{0}, []float32{0}
		push, err := af.FromSlice(in, 1)
		check(err)
		pull, err := af.FromSlice(out, 1)
		check(err)
		for i := range 10 {
			in[0] = float32(i)
			call, err := worker.PushPull([]af.KeyTensor{{Key: 1, Val: push}}, [][]af.KeyTensor{{{Key: 2, Val: pull}}})
			check(err)
			switch err := call.Wait(ctx); {
			case errors.Is(err, postoffice.ErrPeerLost):
				fmt.Println("failed:", err)
			case err != nil:
				log.Fatal(err)
			default:
				fmt.Println(in, "doubled is", out)
			}
			time.Sleep(time.Second)
		}
	}
	check(node.Shutdown(ctx))
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
