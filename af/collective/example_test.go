package collective_test

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/af/collective"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/inproc"
)

// Three workers exchange their values with AllGather, and add up a vector.
func Example() {
	ctx, network := context.Background(), inproc.NewNetwork()
	var all sync.WaitGroup
	for i, role := range []string{"scheduler", "server", "worker", "worker", "worker"} {
		cfg := postoffice.DefaultConfig()
		cfg.Role, cfg.NumWorkers, cfg.NumServers = role, 3, 1
		cfg.RootURI, cfg.RootPort, cfg.NodeHost = "127.0.0.1", 9000, "127.0.0.1"
		if role == "worker" {
			cfg.NodeRank = i - 2
		}
		all.Go(func() {
			n, err := postoffice.Start(ctx, postoffice.Options{Config: cfg, Van: network.Factory(), Log: slog.New(slog.DiscardHandler)})
			if err == nil && role == "worker" {
				err = exchange(ctx, n)
			}
			if err == nil {
				err = n.Shutdown(ctx) // returns when all have called it
			}
			if err != nil {
				fmt.Println(err)
			}
		})
	}
	all.Wait()
	// Output: [10 11 12] [0 3 6]
}

// exchange is what each worker does.
func exchange(ctx context.Context, n *postoffice.Node) error {
	comm, err := collective.New(ctx, n, collective.Options{Ranks: []int{0, 1, 2}, Timeout: 20 * time.Second})
	if err != nil {
		return err
	}
	gathered, sums := make([]int32, 3), []float32{0, 1, 2}
	out, _ := af.FromSlice(gathered)
	in, _ := af.FromSlice([]int32{10 + int32(comm.Rank())})
	vector, _ := af.FromSlice(sums)
	first, err := comm.AllGather(out, in)
	if err != nil {
		return err
	}
	second, err := comm.AllReduce(vector, vector, collective.Sum) // both are in flight
	if err != nil {
		return err
	}
	if err := first.Wait(ctx); err != nil {
		return err
	}
	if err := second.Wait(ctx); err != nil {
		return err
	}
	if comm.Rank() == 0 {
		fmt.Println(gathered, sums)
	}
	if err := comm.Barrier(ctx); err != nil { // else Close would end the others' calls
		return err
	}
	return comm.Close()
}
