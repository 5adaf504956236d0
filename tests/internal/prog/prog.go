// Package prog has the common parts of the test programs: joining the cluster by the
// environment, tensors on the node's device, latency lines, and a clean end.
package prog

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van"
)

// Program is a test program. DMLC_ROLE says which part of it runs.
type Program struct {
	// Roles that the program has, all when empty: scheduler, server, worker, joint.
	Roles []string

	// Serve sets the server up and returns the handler of its batches. It returns before
	// the server is announced as ready; the node serves until the end.
	Serve func(*Node, *af.Server) (Handler, error)

	// Worker does the worker's work.
	Worker func(context.Context, *Node, *af.Worker) error

	// FServer adds the barriers that fserver's init and stop have.
	FServer bool

	// RoleBarrier adds an instance barrier over servers and another over workers
	// after those of init.
	RoleBarrier bool

	// Ready is the group whose members wait for each other between Server and
	// Worker; 0 none. A sum of van.ServerGroup and van.WorkerGroup.
	Ready postoffice.Group
}

// Handler answers a batch. Its error is logged, and makes the program fail.
type Handler func(af.Batch) error

// Node is a member of the cluster and the errors that occurred there.
type Node struct {
	*postoffice.Node

	mu  sync.Mutex
	err error
}

// Fail notes that a check failed. The program goes on; its exit status will be 1.
// Only the first error is kept. It is safe for concurrent use.
func (n *Node) Fail(err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.err == nil {
		n.err = err
	}
}

func (n *Node) failure() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.err
}

// Main runs p and ends the process: status 0 when all went well, 1 with the
// error on standard error, 128 plus the number of the signal after SIGINT or
// SIGTERM, upon which the node leaves the cluster.
//
// Before that it reads the command line, unless the program has done so: --help prints the usage of
// the program, and an unknown option ends the process with status 2. Arguments that
// are not options are ignored, as the original's programs ignore them.
func Main(p Program) {
	if !flag.Parsed() {
		flag.Usage = p.usage
		flag.Parse()
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
	go func() {
		cancel(stopped{(<-signals).(syscall.Signal)})
		signal.Stop(signals) // a second one kills
	}()
	err := p.Run(ctx)
	var s stopped
	switch {
	case err == nil:
		os.Exit(0)
	case errors.As(context.Cause(ctx), &s):
		fmt.Fprintln(os.Stderr, s.Error())
		os.Exit(128 + int(s.Signal))
	default:
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// usage prints the usage of the program.
func (p *Program) usage() {
	roles := p.Roles
	if len(roles) == 0 {
		roles = []string{"scheduler", "server", "worker", "joint"}
	}
	fmt.Fprintf(flag.CommandLine.Output(), `usage: DMLC_ROLE=%s %s
The program joins the cluster that the environment describes; it has no options.
"stepaf env" lists the variables; "stepaf launch" and the scripts of tests/ set them.
`, strings.Join(roles, "|"), filepath.Base(os.Args[0]))
}

// stopped is why a program ends before its time.
type stopped struct{ syscall.Signal }

func (s stopped) Error() string { return "ended by signal: " + s.Signal.String() }

// Run joins the cluster, does this process's part, and leaves.
func (p *Program) Run(ctx context.Context) error {
	cfg, err := postoffice.LoadConfig()
	if err != nil {
		return err
	}
	if len(p.Roles) > 0 && !slices.Contains(p.Roles, cfg.Role) {
		return fmt.Errorf("DMLC_ROLE=%q: this program has %v", cfg.Role, p.Roles)
	}
	o := postoffice.Options{Config: cfg}
	if cfg.Role != "joint" {
		n, err := postoffice.Start(ctx, o)
		if err != nil {
			return err
		}
		return p.part(ctx, &Node{Node: n})
	}
	server, worker, err := postoffice.StartJoint(ctx, o)
	if err != nil {
		return err
	}
	var wg sync.WaitGroup
	var errs [2]error
	for i, n := range []*postoffice.Node{server, worker} {
		wg.Go(func() { errs[i] = p.part(ctx, &Node{Node: n}) })
	}
	wg.Wait()
	return errors.Join(errs[:]...)
}

// part does the work of one node, from start to end.
func (p *Program) part(ctx context.Context, n *Node) error {
	defer n.Close() // at once, unless Finalize has been called
	if err := p.work(ctx, n); err != nil {
		return err
	}
	if p.FServer {
		if err := n.InstanceBarrier(ctx, 0, van.AllNodes); err != nil {
			return err
		}
	}
	if err := n.Shutdown(ctx); err != nil {
		return err
	}
	return n.failure()
}

func (p *Program) work(ctx context.Context, n *Node) error {
	if n.Role() == van.Scheduler {
		return nil
	}
	if n.Role() == van.Server && p.Serve != nil {
		if err := p.serve(n); err != nil {
			return err
		}
	}
	if p.FServer {
		if err := n.InstanceBarrier(ctx, 0, van.ServerGroup|van.WorkerGroup); err != nil {
			return err
		}
	}
	if p.RoleBarrier {
		if err := n.InstanceBarrier(ctx, 0, group(n.Role())); err != nil {
			return err
		}
	}
	if p.Ready&group(n.Role()) != 0 {
		if err := n.Barrier(ctx, 0, p.Ready); err != nil {
			return err
		}
	}
	if n.Role() == van.Worker && p.Worker != nil {
		w, err := af.NewWorker(n.Node, af.WorkerOptions{})
		if err != nil {
			return err
		}
		return p.Worker(ctx, n, w)
	}
	return nil
}

func (p *Program) serve(n *Node) error {
	s, err := af.NewServer(n.Node, af.ServerOptions{})
	if err != nil {
		return err
	}
	handle, err := p.Serve(n, s)
	if err != nil {
		return err
	}
	return s.Handle(func(b af.Batch) {
		worker := b.Worker()
		if err := handle(b); err != nil {
			n.Log().Error("batch failed", "worker", worker, "err", err)
			n.Fail(err)
		}
	})
}

func group(r van.Role) postoffice.Group {
	if r == van.Server {
		return van.ServerGroup
	}
	return van.WorkerGroup
}

// Iterations is BENCHMARK_ITER if it is set, else n. 0 is endless.
func (n *Node) Iterations(otherwise int) int {
	c := n.Config()
	if c.Origin("BENCHMARK_ITER") == "default" {
		return otherwise
	}
	return c.Bench.Iterations
}

// Rounds yields 0, 1, ... n-1, without end when n is 0.
func Rounds(n int) func(yield func(int) bool) {
	return func(yield func(int) bool) {
		for i := 0; (n == 0 || i < n) && yield(i); i++ {
		}
	}
}
