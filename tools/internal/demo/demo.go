// Package demo is a small cluster program: workers push a few tensors, servers add them, and workers check the sums.
package demo

import (
	"context"
	"fmt"
	"io"
	"os/signal"
	"slices"
	"syscall"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tools/internal/exit"
)

const (
	tensors  = 3
	elements = 1024
	sumKey   = 100 // of the answer
)

// Command returns "stepaf demo".
func Command() *cli.Command {
	return &cli.Command{
		Name:  "demo",
		Usage: "run a node of a small cluster that adds tensors, and print the time of a round",
		Description: `Runs as a worker, a server or the scheduler, depending on DMLC_ROLE. Each worker pushes
3 tensors of 1024 float32 to all servers and pulls their sum, many times. It checks every
sum, and prints the time of a round.

    stepaf launch -n 1 -s 1 -- stepaf demo`,
		ArgsUsage: " ", HideHelpCommand: true,
		Flags: []cli.Flag{&cli.IntFlag{Name: "rounds", Value: 1000, Usage: "rounds to run"}},
		Action: exit.WithoutArguments(func(c *cli.Context) error {
			if n := c.Int("rounds"); n < 1 {
				return exit.Usage("--rounds %d: want at least 1", n)
			}
			cfg, err := postoffice.LoadConfig()
			if err != nil {
				return exit.With(exit.Misuse, err)
			}
			if cfg.Role == "" {
				return exit.Usage("DMLC_ROLE is not set: start the demo with: stepaf launch -n 1 -s 1 -- stepaf demo")
			}
			ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
			defer stop()
			return run(ctx, cfg, c.App.Writer, c.Int("rounds"))
		}),
	}
}

// run runs a node with the role of cfg.
func run(ctx context.Context, cfg *postoffice.Config, out io.Writer, rounds int) error {
	node, err := postoffice.Start(ctx, postoffice.Options{Config: cfg})
	if err != nil {
		return err
	}
	switch cfg.Role {
	case "server":
		err = serve(node)
	case "worker":
		err = work(ctx, node, out, rounds)
	}
	if err != nil {
		node.Close()
		return err
	}
	return node.Shutdown(ctx)
}

// serve answers each batch with the sum of its tensors, until the node leaves.
func serve(node *postoffice.Node) error {
	s, err := af.NewServer(node, af.ServerOptions{})
	if err != nil {
		return err
	}
	return s.Handle(func(b af.Batch) {
		if err := answer(b); err != nil {
			node.Log().Warn("demo: a batch is not answered", "err", err)
		}
	})
}

func answer(b af.Batch) error {
	sum := make([]float32, elements)
	for _, p := range b.Pushes() {
		v, err := af.Slice[float32](p.Val)
		if err != nil {
			return err
		}
		if len(v) != elements {
			return fmt.Errorf("tensor of %d elements, want %d", len(v), elements)
		}
		for i := range v {
			sum[i] += v[i]
		}
	}
	t, err := af.FromSlice(sum)
	if err != nil {
		return err
	}
	var answers []af.KeyTensor
	for _, p := range b.Pulls() {
		answers = append(answers, af.KeyTensor{Key: p.Key, Val: t})
	}
	return b.Respond(answers, af.ByKey)
}

// newTensor returns a tensor and its elements.
func newTensor(key uint64) ([]float32, af.KeyTensor, error) {
	v := make([]float32, elements)
	t, err := af.FromSlice(v)
	return v, af.KeyTensor{Key: key, Val: t}, err
}

// work pushes, pulls and compares.
func work(ctx context.Context, node *postoffice.Node, out io.Writer, rounds int) error {
	w, err := af.NewWorker(node, af.WorkerOptions{})
	if err != nil {
		return err
	}
	servers := len(node.Topology().ServerInstances())
	var data [tensors][]float32
	push := make([]af.KeyTensor, tensors)
	for k := range push {
		if data[k], push[k], err = newTensor(uint64(k)); err != nil {
			return err
		}
	}
	sums := make([][]float32, servers)
	pull := make([][]af.KeyTensor, servers) // one tensor of each
	for s := range pull {
		pull[s] = make([]af.KeyTensor, 1)
		if sums[s], pull[s][0], err = newTensor(sumKey); err != nil {
			return err
		}
	}

	times := make([]time.Duration, 0, rounds)
	for round := range rounds {
		for k := range data {
			for i := range data[k] {
				data[k][i] = float32((round+i)%100 + 100*k)
			}
		}
		begin := time.Now()
		handler, err := w.PushPull(push, pull)
		if err != nil {
			return err
		}
		if err := handler.Wait(ctx); err != nil {
			return err
		}
		times = append(times, time.Since(begin))
		for s, sum := range sums {
			for i, got := range sum {
				if want := data[0][i] + data[1][i] + data[2][i]; got != want {
					return fmt.Errorf("round %d, server %d: element %d of the sum is %g, want %g", round, s, i, got, want)
				}
			}
		}
	}
	report(out, times, servers)
	return nil
}

// report prints the results.
func report(out io.Writer, times []time.Duration, servers int) {
	slices.Sort(times)
	var total time.Duration
	for _, t := range times {
		total += t
	}
	n := len(times)
	us := func(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 }
	fmt.Fprintf(out, "pushed %d tensors of %d float32 and pulled back their sum, %d times, servers: %d\n", tensors, elements, n, servers)
	fmt.Fprintln(out, "every sum is right")
	fmt.Fprintf(out, "time of a round: mean %.1f us, p50 %.1f us, p99 %.1f us, max %.1f us\n",
		us(total)/float64(n), us(times[n/2]), us(times[min(n*99/100, n-1)]), us(times[n-1]))
}
