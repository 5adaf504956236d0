package af_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/postoffice/clustertest"
	"github.com/stepaf/stepaf-go/tests/inproc"
)

// inProcess runs a scheduler, a server and a worker in this process. Usually each runs in its own process and gets
// its configuration from postoffice.LoadConfig.
func inProcess(server, worker func(*postoffice.Node)) {
	ctx, network := context.Background(), inproc.NewNetwork()
	var all sync.WaitGroup
	for role, program := range map[string]func(*postoffice.Node){"scheduler": func(*postoffice.Node) {}, "server": server, "worker": worker} {
		cfg := postoffice.DefaultConfig()
		cfg.Role, cfg.NumWorkers, cfg.NumServers = role, 1, 1
		cfg.RootURI, cfg.RootPort, cfg.NodeHost = "127.0.0.1", 9000, "127.0.0.1"
		all.Go(func() {
			n, err := postoffice.Start(ctx, postoffice.Options{Config: cfg, Van: network.Factory(), Log: slog.New(slog.DiscardHandler)})
			if err != nil {
				panic(err)
			}
			program(n)
			if err := n.Shutdown(ctx); err != nil { // returns when all have called it
				panic(err)
			}
		})
	}
	all.Wait()
}

// A worker pushes a tensor, the server doubles it, and the worker pulls the result.
func Example() {
	inProcess(func(n *postoffice.Node) {
		server, _ := af.NewServer(n, af.ServerOptions{})
		_ = server.Handle(func(b af.Batch) {
			x, _ := af.Slice[float32](b.Pushes()[0].Val)
			for i := range x {
				x[i] *= 2
			}
			_ = b.Respond(b.Pushes()) // the first push answers the first pull
		})
	}, func(n *postoffice.Node) {
		worker, _ := af.NewWorker(n, af.WorkerOptions{})
		in, out := []float32{1, 2, 3}, make([]float32, 3)
		push, _ := af.FromSlice(in)
		pull, _ := af.FromSlice(out)
		call, err := worker.PushPull([]af.KeyTensor{{Key: 1, Val: push}}, [][]af.KeyTensor{{{Key: 2, Val: pull}}})
		if err == nil {
			err = call.Wait(context.Background()) // from here on the tensors are ours again
		}
		traces := call.Traces()
		fmt.Println(out, err, len(traces), traces[1].Response.Process > traces[1].Request.Start)
	})
	// Output: [2 4 6] <nil> 2 true
}

// Each of two servers receives the push tensor, and fills its own pull tensor.
func ExampleWorker_PushPull() {
	ctx := context.Background()
	c, err := clustertest.New(ctx, clustertest.Options{Servers: 2})
	if err != nil {
		panic(err)
	}
	defer c.Close()
	for rank := range 2 {
		server, _ := af.NewServer(c.Server(rank), af.ServerOptions{})
		_ = server.Handle(func(b af.Batch) {
			x, _ := af.Slice[float32](b.Pushes()[0].Val)
			for i := range x {
				x[i] *= float32(10 * (rank + 1))
			}
			_ = b.Respond(b.Pushes())
		})
	}
	worker, _ := af.NewWorker(c.Worker(0), af.WorkerOptions{})
	push, _ := af.FromSlice([]float32{1, 2})
	out := [2][]float32{make([]float32, 2), make([]float32, 2)}
	pull0, _ := af.FromSlice(out[0])
	pull1, _ := af.FromSlice(out[1])
	call, err := worker.PushPull([]af.KeyTensor{{Key: 1, Val: push}}, [][]af.KeyTensor{
		{{Key: 2, Val: pull0}}, // of server 0
		{{Key: 2, Val: pull1}}, // of server 1
	})
	if err == nil {
		err = call.Wait(ctx)
	}
	fmt.Println(out, err)
	// Output: [[10 20] [20 40]] <nil>
}

// Two rounds of the same exchange, the second one with the first row only.
func ExampleWorker_Prepare() {
	inProcess(func(n *postoffice.Node) {
		server, _ := af.NewServer(n, af.ServerOptions{})
		_ = server.Handle(func(b af.Batch) { _ = b.Respond(b.Pushes()) })
	}, func(n *postoffice.Node) {
		worker, _ := af.NewWorker(n, af.WorkerOptions{})
		in, out := []float32{1, 2, 3, 4}, make([]float32, 4)
		push, _ := af.FromSlice(in, 2, 2)
		pull, _ := af.FromSlice(out, 2, 2)
		x, err := worker.Prepare([]af.KeyTensor{{Key: 1, Val: push}}, [][]af.KeyTensor{{{Key: 2, Val: pull}}})
		if err != nil {
			panic(err)
		}
		defer x.Close()
		for _, rows := range []af.Rows{2, 1} {
			call, err := x.Start(rows)
			if err == nil {
				err = call.Wait(context.Background())
			}
			fmt.Println(out, err)
			in[0], in[3] = 10, 40
		}
	})
	// Output:
	// [1 2 3 4] <nil>
	// [10 2 3 4] <nil>
}

// A server that answers by key, from any goroutine, and learns when its tensors are its
// own again.
func ExampleBatch_Respond() {
	weights := []af.KeyTensor{}
	for key := range uint64(3) {
		x, _ := af.FromSlice([]uint64{key * key})
		weights = append(weights, af.KeyTensor{Key: key, Val: x})
	}
	var left sync.WaitGroup
	left.Add(2)
	inProcess(func(n *postoffice.Node) {
		server, _ := af.NewServer(n, af.ServerOptions{})
		_ = server.Handle(func(b af.Batch) {
			go b.Respond(weights[1:], af.ByKey, af.OnSent(completion(left.Done)))
		})
	}, func(n *postoffice.Node) {
		worker, _ := af.NewWorker(n, af.WorkerOptions{})
		one, two := make([]uint64, 1), make([]uint64, 1)
		x1, _ := af.FromSlice(one)
		x2, _ := af.FromSlice(two)
		call, err := worker.PushPull(nil, [][]af.KeyTensor{{{Key: 2, Val: x2}, {Key: 1, Val: x1}}})
		if err == nil {
			err = call.Wait(context.Background())
		}
		fmt.Println(one, two, err)
	})
	left.Wait()
	// Output: [1] [4] <nil>
}

// The server shuts down in order: it answers the batch in progress, and refuses the next one.
func ExampleServer_Shutdown() {
	begun, down := make(chan struct{}), make(chan struct{})
	inProcess(func(n *postoffice.Node) {
		server, _ := af.NewServer(n, af.ServerOptions{})
		_ = server.Handle(func(b af.Batch) {
			close(begun)
			_ = b.Respond(b.Pushes())
		})
		<-begun
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second) // the limit for the handlers
		defer cancel()
		if err := server.Shutdown(ctx); err != nil {
			fmt.Println(err) // the error names the workers that wait
		}
		close(down)
	}, func(n *postoffice.Node) {
		worker, _ := af.NewWorker(n, af.WorkerOptions{})
		for range 2 {
			x, _ := af.FromSlice(make([]float32, 3))
			call, err := worker.PushPull([]af.KeyTensor{{Key: 1, Val: x}}, [][]af.KeyTensor{{{Key: 2, Val: x}}})
			if err == nil {
				err = call.Wait(context.Background())
			}
			fmt.Println("answered:", err == nil, "finished:", errors.Is(err, postoffice.ErrFinished))
			<-down
		}
	})
	// Output:
	// answered: true finished: false
	// answered: false finished: true
}

// completion is a function as a van.Completion.
type completion func()

func (f completion) Sent() { f() }
