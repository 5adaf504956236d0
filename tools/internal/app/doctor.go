package app

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/stepaf/stepaf-go/tools/internal/doctor"
	"github.com/stepaf/stepaf-go/tools/internal/exit"
)

func doctorCommand() *cli.Command {
	return &cli.Command{
		Name:  "doctor",
		Usage: "examine this machine: configuration, ZeroMQ, RDMA, GPUs",
		Description: `Looks at what a node needs that is started here with this environment, and changes
nothing: versions, memory, the variables, a message over ZeroMQ, RDMA from libraries
and device files over ports and the limit of locked memory up to a round trip from
each active port to itself, the GPUs, and copies between processes from each GPU to
each other.

Each line is ok, warn, fail or skip, what was looked at, and what was found; below
it stands what to do. A defect of RDMA fails only if DMLC_ENABLE_RDMA=ibverbs:

    DMLC_ENABLE_RDMA=ibverbs DMLC_INTERFACE=auto stepaf doctor

The exit status is 0 if nothing has failed, 1 if something has, 2 for a wrong
command line, and 130 or 143 after SIGINT or SIGTERM.`,
		ArgsUsage: " ", HideHelpCommand: true,
		Flags: []cli.Flag{
			&cli.BoolFlag{Name: "json", Usage: "print JSON"},
			&cli.BoolFlag{Name: "verbose", Aliases: []string{"v"}, Usage: "with all GIDs, limits and paths"},
			&cli.DurationFlag{Name: "timeout", Value: time.Minute, Usage: "stop looking after this long"},
		},
		Action: exit.WithoutArguments(func(c *cli.Context) error {
			o := doctorOptions{c.Bool("json"), c.Bool("verbose"), c.Duration("timeout")}
			if o.timeout <= 0 {
				return exit.Usage("--timeout %v: want more than 0", o.timeout)
			}
			log := slog.New(slog.DiscardHandler)
			if o.verbose {
				log = slog.New(slog.NewTextHandler(c.App.ErrWriter, nil))
			}
			ctx, cancel := interruptible()
			defer cancel()
			return bySignal(ctx, examine(ctx, c.App.Writer, doctor.Host(versionText(), log), o))
		}),
	}
}

type doctorOptions struct {
	json, verbose bool
	timeout       time.Duration
}

// examine prints what doctor finds.
func examine(ctx context.Context, w io.Writer, m *doctor.Machine, o doctorOptions) error {
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	r, err := doctor.Run(ctx, m, func(f doctor.Finding) {
		if !o.json {
			doctor.PrintFinding(w, f, o.verbose)
		}
	})
	if o.json {
		err = errors.Join(err, r.JSON(w))
	} else if err == nil {
		r.PrintSummary(w)
	}
	switch {
	case err != nil:
		return fmt.Errorf("doctor: %w", err)
	case !r.Healthy:
		return exit.With(exit.Failure, errSilent)
	}
	return nil
}
