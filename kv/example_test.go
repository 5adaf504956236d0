package kv_test

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"

	"github.com/stepaf/stepaf-go/kv"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/inproc"
)

// A cluster of a scheduler, a server that sums, and a worker, all in this process. Usually each runs in its own
// process and gets its configuration from postoffice.LoadConfig.
func Example() {
	ctx, network := context.Background(), inproc.NewNetwork()
	node := func(role string) *postoffice.Node {
		cfg := postoffice.DefaultConfig()
		cfg.Role, cfg.NumWorkers, cfg.NumServers = role, 1, 1
		cfg.RootURI, cfg.RootPort, cfg.NodeHost = "127.0.0.1", 9000, "127.0.0.1"
		n, err := postoffice.Start(ctx, postoffice.Options{Config: cfg, Van: network.Factory(), Log: slog.New(slog.DiscardHandler)})
		if err != nil {
			panic(err)
		}
		return n
	}
	var wg sync.WaitGroup
	wg.Go(func() { node("scheduler").Shutdown(ctx) })
	wg.Go(func() {
		n := node("server")
		s, _ := kv.NewServer[float32](n, kv.ServerOptions{})
		var sums kv.SummingHandler[float32]
		s.Handle(sums.Handle)
		n.Shutdown(ctx) // returns when the worker has finished too
	})
	n := node("worker")
	w, _ := kv.NewWorker[float32](n, kv.WorkerOptions{})
	keys := []kv.Key{kv.SpreadKey(0), kv.SpreadKey(1), kv.SpreadKey(2)} // without SpreadKey all small keys are the first server's
	slices.Sort(keys)
	for range 2 {
		ts, _ := w.Push(keys, []float32{1, 10, 100})
		if err := ts.Wait(ctx); err != nil {
			fmt.Println(err)
		}
	}
	var vals []float32
	ts, _ := w.Pull(keys, &vals)
	err := ts.Wait(ctx)
	fmt.Println(vals, err)
	n.Shutdown(ctx)
	wg.Wait()
	// Output: [2 20 200] <nil>
}

// The handler computes for a long time. It stops when the worker no longer waits for the answer.
func ExampleRequest_Context() {
	next := make(chan float32) // results of a computation
	h := func(r kv.Request[float32]) {
		res := kv.Pairs[float32]{Keys: r.Keys}
		for range r.Keys {
			select {
			case v := <-next:
				res.Vals = append(res.Vals, v)
			case <-r.Context().Done():
				_ = r.Refuse(context.Cause(r.Context())) // the request is canceled, the worker is lost, or the server shuts down
				return
			}
		}
		_ = r.Respond(res)
	}
	_ = func(s *kv.Server[float32]) error { return s.Handle(h) }
}

// A handler of one's own: the server keeps the last value of each key.
func ExampleServer() {
	last := func(mu *sync.Mutex, m map[kv.Key]int64) kv.Handler[int64] {
		return func(r kv.Request[int64]) {
			mu.Lock()
			defer mu.Unlock()
			var res kv.Pairs[int64]
			if r.Push {
				for i, k := range r.Keys {
					m[k] = r.Vals[i]
				}
			} else {
				res.Keys = r.Keys
				for _, k := range r.Keys {
					res.Vals = append(res.Vals, m[k])
				}
			}
			r.Respond(res)
		}
	}
	_ = func(n *postoffice.Node) error { // n: a node with the server role
		s, err := kv.NewServer[int64](n, kv.ServerOptions{})
		if err != nil {
			return err
		}
		return s.Handle(last(new(sync.Mutex), map[kv.Key]int64{}))
	}
}
