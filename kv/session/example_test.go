package session_test

import (
	"context"
	"fmt"
	"sync"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/af/collective"
	"github.com/stepaf/stepaf-go/kv/session"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/inproc"
)

// Example multiplies a vector with a matrix whose columns are divided among two ranks. The nodes are in one
// process here; normally each has its own, and its configuration comes from the environment
// (postoffice.LoadConfig). During a call, the ranks exchange data directly, by a communicator.
func Example() {
	network := inproc.NewNetwork()
	var wg sync.WaitGroup
	for i, role := range []string{"server", "server", "worker", "scheduler"} {
		wg.Go(func() {
			ctx := context.Background()
			node, err := start(ctx, network, role, i%2)
			check(err)
			switch role {
			case "server":
				check(rank(ctx, node))
			case "worker":
				check(controller(ctx, node))
			}
			check(node.Shutdown(ctx))
		})
	}
	wg.Wait()
	// Output: [14 320]
}

func rank(ctx context.Context, node *postoffice.Node) error {
	comm, err := collective.New(ctx, node, collective.Options{Ranks: []int{0, 1}})
	if err != nil {
		return err
	}
	defer comm.Close()
	r, err := session.NewRank(node, session.Options{})
	if err != nil {
		return err
	}
	err = r.Register("times my columns", func(ctx context.Context, args []any) (any, error) {
		x, err := session.Elements[float32](args[0].(session.Array))
		if err != nil {
			return nil, err
		}
		columns := [][]float32{{1, 2, 3}, {10, 20, 90}}[node.Rank()]
		own, all := make([]float32, 1), make([]float32, 2)
		for i := range columns {
			own[0] += columns[i] * x[i]
		}
		in, err := af.FromSlice(own)
		if err != nil {
			return nil, err
		}
		out, err := af.FromSlice(all)
		if err != nil {
			return nil, err
		}
		op, err := comm.AllGather(out, in)
		if err != nil {
			return nil, err
		}
		if err := op.Wait(ctx); err != nil {
			return nil, err
		}
		return session.NewArray(all)
	})
	if err != nil {
		return err
	}
	return r.Serve(ctx)
}

func controller(ctx context.Context, node *postoffice.Node) error {
	s, err := session.Open(ctx, node, session.Options{})
	if err != nil {
		return err
	}
	defer s.Close()
	x, err := session.NewArray([]float32{1, 2, 3})
	if err != nil {
		return err
	}
	y, err := s.Call(ctx, "times my columns", x)
	if err != nil {
		return err
	}
	v, err := s.CopyFrom(ctx, y)
	if err != nil {
		return err
	}
	sums, err := session.Elements[float32](v.(session.Array))
	if err != nil {
		return err
	}
	fmt.Println(sums)
	return s.Shutdown(ctx)
}

func start(ctx context.Context, network *inproc.Network, role string, rank int) (*postoffice.Node, error) {
	cfg := postoffice.DefaultConfig()
	cfg.Role, cfg.NodeRank, cfg.NumWorkers, cfg.NumServers = role, rank, 1, 2
	cfg.RootURI, cfg.RootPort, cfg.NodeHost = "127.0.0.1", 8000, "127.0.0.1"
	return postoffice.Start(ctx, postoffice.Options{Config: cfg, Van: network.Factory()})
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}
