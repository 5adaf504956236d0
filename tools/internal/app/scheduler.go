package app

import (
	"cmp"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/urfave/cli/v2"

	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tools/internal/doctor"
	"github.com/stepaf/stepaf-go/tools/internal/exit"
	"github.com/stepaf/stepaf-go/van"
)

func schedulerCommand() *cli.Command {
	return &cli.Command{
		Name:  "scheduler",
		Usage: "run the scheduler of a cluster until all nodes have left",
		Description: `The scheduler assigns ids to workers and servers, distributes their addresses, and runs
their barriers. It ends when all nodes have left the cluster. It needs the same
environment as the nodes:

    DMLC_PS_ROOT_URI=10.0.0.1 DMLC_PS_ROOT_PORT=8123 \
    DMLC_NUM_WORKER=1 DMLC_NUM_SERVER=1 stepaf scheduler

DMLC_ROLE may be unset. DMLC_PS_ROOT_URI must be an address of this machine.
PS_VERBOSE=1 logs every node that joins. For a cluster on one machine, "stepaf launch"
starts the scheduler as well.

The scheduler takes part in the barrier of fserver's stop() if a node of this library
announces it. If all workers and servers are C++ nodes that call stop(), use --fserver.`,
		ArgsUsage: " ", HideHelpCommand: true,
		Flags: []cli.Flag{
			&cli.BoolFlag{Name: "quiet", Aliases: []string{"q"}, Usage: "do not print the address and the progress"},
			&cli.BoolFlag{Name: "fserver", Usage: "take part in the barrier of fserver's stop(), although all nodes are C++ nodes, which do not announce it"},
		},
		Action: exit.WithoutArguments(runScheduler),
	}
}

func runScheduler(c *cli.Context) error {
	cfg, err := postoffice.LoadConfig()
	if err != nil {
		return exit.With(exit.Misuse, err)
	}
	if cfg.Role = cmp.Or(cfg.Role, "scheduler"); cfg.Role != "scheduler" {
		return exit.Usage("DMLC_ROLE=%s: want scheduler, or unset it", cfg.Role)
	}
	if err := cfg.Validate(); err != nil {
		return exit.With(exit.Misuse, err)
	}
	say := func(format string, args ...any) {
		if !c.Bool("quiet") {
			fmt.Fprintf(c.App.Writer, "stepaf scheduler: "+format+"\n", args...)
		}
	}
	ctx, cancel := exit.Interruptible(c.Context)
	defer cancel()
	// A cluster must outlive the reader of its scheduler's output. Go ends the process on a write to a pipe without a
	// reader, unless the program has registered for SIGPIPE.
	broken := make(chan os.Signal, 1)
	signal.Notify(broken, syscall.SIGPIPE)
	defer signal.Stop(broken)

	say("at %s:%d (%s), waiting for %s and %s", cfg.RootURI, cfg.RootPort, cfg.VanType,
		doctor.Count(cfg.NumServers*cfg.GroupSize, "server"), doctor.Count(cfg.NumWorkers*cfg.GroupSize, "worker"))
	node, err := postoffice.Start(ctx, postoffice.Options{Config: cfg})
	if err != nil {
		return exit.BySignal(ctx, err)
	}
	say("all nodes are here")
	if c.Bool("fserver") {
		if err := node.InstanceBarrier(ctx, 0, van.AllNodes); err != nil {
			node.Close()
			return exit.BySignal(ctx, err)
		}
	}
	if err := node.Shutdown(ctx); err != nil {
		return exit.BySignal(ctx, err)
	}
	say("all nodes have left")
	return nil
}
