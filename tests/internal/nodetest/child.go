// Package nodetest has helpers of tests of clusters of processes: nodes that are
// processes of the test binary, and functions that wait for events of these and other nodes.
package nodetest

import (
	"bufio"
	"context"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/stepaf/stepaf-go/postoffice"
)

// behaviour is the variable that makes a test binary a node of a cluster.
const behaviour = "NODETEST_CHILD"

// Lines between a child and the test that has started it.
const (
	ready  = "ready"    // from the child: it is set up
	failed = "failed: " // from the child, at the beginning: fails the test
	leave  = "leave"    // to the child, the last one: leave in order
)

// As is the variable of the environment that makes the test binary a child with that
// behaviour, for tests that start one without Spawn.
func As(what string) string { return behaviour + "=" + what }

// Child is a node that is a process of its own, seen from inside.
type Child struct {
	*postoffice.Node

	ctx    context.Context
	beside sync.WaitGroup
	once   sync.Once
}

// Main is TestMain. In a process that Spawn has started it starts the node that the
// environment describes, and calls setup with the task of the node. Then the process
// says "ready", and ends when its standard input does.
func Main(m *testing.M, setup func(c *Child, what string) error) {
	what := os.Getenv(behaviour)
	if what == "" {
		os.Exit(m.Run())
	}
	if err := run(func(c *Child) error { return setup(c, what) }); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

func run(setup func(c *Child) error) error {
	cfg, err := postoffice.LoadConfig()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	n, err := postoffice.Start(ctx, postoffice.Options{Config: cfg, Log: slog.New(slog.NewTextHandler(os.Stderr, nil))})
	if err != nil {
		return err
	}
	defer n.Close()
	c := &Child{Node: n, ctx: ctx}
	if err := setup(c); err != nil {
		return err
	}
	c.Say(ready)
	last := ""
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() {
		last = in.Text()
	}
	cancel()
	c.beside.Wait()
	if last == leave {
		return n.Shutdown(context.Background())
	}
	return in.Err()
}

// Say writes a line for Process.Expect. It is safe for concurrent use.
func (c *Child) Say(line string) { fmt.Println(line) }

// Fail fails the test that has started the child. Only the first error is reported. It is
// safe for concurrent use.
func (c *Child) Fail(err error) {
	c.once.Do(func() { c.Say(failed + strings.ReplaceAll(err.Error(), "\n", " ")) })
}

// Go runs f in a goroutine. Its context ends when the child is to end, which
// waits for f; an error before that fails the test.
func (c *Child) Go(f func(ctx context.Context) error) {
	c.beside.Go(func() {
		if err := f(c.ctx); err != nil && c.ctx.Err() == nil {
			c.Fail(err)
		}
	})
}
