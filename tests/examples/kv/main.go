// Command kv is the smallest key-value program: every worker pushes numbers under
// three keys, the servers add them up, and the workers pull the sums.
package main

import (
	"context"
	"fmt"
	"log"
	"slices"

	"github.com/stepaf/stepaf-go/kv"
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
		server, err := kv.NewServer[float32](node, kv.ServerOptions{})
		check(err)
		var sums kv.SummingHandler[float32]
		check(server.Handle(sums.Handle))
	case postoffice.Worker:
		worker, err := kv.NewWorker[float32](node, kv.WorkerOptions{})
		check(err)
		// Each server owns a range of keys: small numbers by themselves would all be the first server's.
		keys := []kv.Key{kv.SpreadKey(0), kv.SpreadKey(1), kv.SpreadKey(2)}
		slices.Sort(keys) // a request's keys ascend
		push, err := worker.Push(keys, []float32{1, 2, 3})
		check(err)
		check(push.Wait(ctx))
		check(node.InstanceBarrier(ctx, 0, postoffice.WorkerGroup)) // all workers have pushed
		var sums []float32
		pull, err := worker.Pull(keys, &sums)
		check(err)
		check(pull.Wait(ctx))
		fmt.Println("worker", node.Rank(), "pulled", sums)
	}
	check(node.Shutdown(ctx)) // waits for everybody
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
