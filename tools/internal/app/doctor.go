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
		Usage: "check this machine: configuration, ZeroMQ, RDMA, GPUs",
		Description: `Checks what a node needs that is started here with this environment: versions, memory,
environment variables, a message over ZeroMQ, RDMA (libraries, device files, ports, the
limit of locked memory, a round trip from each active port to itself), GPUs, and copies
between processes for each pair of GPUs. It changes nothing.

    stepaf doctor
    DMLC_ENABLE_RDMA=ibverbs DMLC_INTERFACE=auto stepaf doctor

Each line has a result (ok, warn, fail or skip), the subject and the finding. The next
line says what to do. A defect of RDMA is a failure only if DMLC_ENABLE_RDMA=ibverbs.

Exit status: 0 if no check failed, 1 if a check failed, 2 for a wrong command line, 130
or 143 after SIGINT or SIGTERM.`,
		ArgsUsage: " ", HideHelpCommand: true,
		Flags: []cli.Flag{
			&cli.BoolFlag{Name: "json", Usage: "print JSON"},
			&cli.BoolFlag{Name: "verbose", Aliases: []string{"v"}, Usage: "print all GIDs, limits and paths"},
			&cli.DurationFlag{Name: "timeout", Value: time.Minute, Usage: "time limit of all checks"},
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
			ctx, cancel := exit.Interruptible(c.Context)
			defer cancel()
			return exit.BySignal(ctx, examine(ctx, c.App.Writer, doctor.Host(versionText(), log), o))
		}),
	}
}

type doctorOptions struct {
	json, verbose bool
	timeout       time.Duration
}

// examine prints the findings of doctor.
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
