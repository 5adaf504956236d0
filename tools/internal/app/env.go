package app

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/stepaf/stepaf-go/internal/hostaddr"
	"github.com/stepaf/stepaf-go/tools/internal/doctor"
	"github.com/stepaf/stepaf-go/tools/internal/exit"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/env"
)

func envCommand() *cli.Command {
	return &cli.Command{
		Name:  "env",
		Usage: "show every variable, its value in force and where that comes from",
		Description: `StepAF is configured by environment variables, which each process reads once when
it starts. This shows what a process started here would see.

A node needs DMLC_ROLE (worker, server or scheduler), DMLC_NUM_WORKER and
DMLC_NUM_SERVER (how many of each there are, the same everywhere), and
DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT (where the scheduler is). All others have
defaults. "stepaf launch" sets these for its processes.

Names that nothing reads but that look like ours are listed as perhaps misspelt.
The exit status is 1 if a value makes no sense; with --check also if something
that a node needs is missing, contradictory, or not in this build, or if the scheduler, on another host, cannot
reach the address at which a node would listen.`,
		ArgsUsage: " ", HideHelpCommand: true,
		Flags: []cli.Flag{
			&cli.BoolFlag{Name: "json", Usage: "print JSON"},
			&cli.BoolFlag{Name: "set", Usage: "only what is not a default"},
			&cli.BoolFlag{Name: "explain", Usage: "with allowed values and meaning"},
			&cli.BoolFlag{Name: "check", Usage: "check also that a node could start"},
		},
		Action: exit.WithoutArguments(func(c *cli.Context) error {
			return showEnv(c.App.Writer, env.OS(), envOptions{c.Bool("json"), c.Bool("set"), c.Bool("explain"), c.Bool("check")})
		}),
	}
}

// lookupTime limits the resolution of names.
const lookupTime = 5 * time.Second

type envOptions struct{ json, set, explain, check bool }

// envReport is what "stepaf env --json" prints.
type envReport struct {
	Variables []env.Effective  `json:"variables"`
	Misspelt  []env.Suggestion `json:"misspelt"` // names and the ones perhaps meant
	Warnings  []string         `json:"warnings"`
	Errors    []string         `json:"errors"`
}

func showEnv(w io.Writer, src env.Source, o envOptions) error {
	cfg, err := env.LoadFrom(src)
	if o.check {
		ctx, cancel := context.WithTimeout(context.Background(), lookupTime)
		defer cancel()
		// Validate repeats what LoadFrom refused.
		errs := append(exit.Unjoin(cfg.Validate()), doctor.Absent(cfg, "DMLC_ENABLE_RDMA", cfg.VanType, van.Transports()),
			doctor.Absent(cfg, "STEPMESH_BAKCEND", cfg.Backend, backend.Names()))
		err = errors.Join(append(errs, doctor.Unreachable(ctx, cfg, hostaddr.This(), doctor.Resolve)...)...)
	}
	r := envReport{Misspelt: cfg.Unknown(), Warnings: cfg.Warnings}
	for _, v := range cfg.Table() {
		if !o.set || v.Origin != "default" {
			r.Variables = append(r.Variables, v)
		}
	}
	for _, e := range doctor.Unwarned(cfg, err) {
		r.Errors = append(r.Errors, e.Error())
	}
	if o.json {
		b, err := json.MarshalIndent(r, "", "  ")
		if err != nil {
			return err
		}
		fmt.Fprintf(w, "%s\n", b)
	} else if err := r.text(w, o); err != nil {
		return err
	}
	if err != nil {
		return exit.With(exit.Failure, errSilent)
	}
	return nil
}

func (r *envReport) text(w io.Writer, o envOptions) error {
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	topic := ""
	for _, v := range r.Variables {
		if v.Topic != topic {
			if topic != "" {
				fmt.Fprintln(t)
			}
			topic = v.Topic
			fmt.Fprintln(t, topic)
		}
		fmt.Fprintf(t, "  %s\t%s\t%s\n", v.Name, cmp.Or(v.Value, "-"), v.Origin)
		if o.explain {
			fmt.Fprintf(t, "      %s: %s\n", v.Allowed, v.Help)
		}
	}
	if err := t.Flush(); err != nil {
		return err
	}
	section := func(title string, lines []string) {
		if len(lines) > 0 {
			fmt.Fprintf(w, "\n%s\n", title)
		}
		for _, l := range lines {
			fmt.Fprintf(w, "  %s\n", l)
		}
	}
	section("Warnings", r.Warnings)
	section("Errors", r.Errors)
	return nil
}
