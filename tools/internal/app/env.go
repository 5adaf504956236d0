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
		Usage: "show every environment variable, its effective value and the origin of the value",
		Description: `Environment variables configure StepAF. Each process reads them once, at its start. This
command shows the values that a process started here would use.

    stepaf env --set
    DMLC_ROLE=worker DMLC_NUM_WORKER=1 DMLC_NUM_SERVER=1 \
    DMLC_PS_ROOT_URI=10.0.0.1 DMLC_PS_ROOT_PORT=8123 stepaf env --check

A node needs DMLC_ROLE (worker, server or scheduler), DMLC_NUM_WORKER and DMLC_NUM_SERVER
(the numbers of workers and servers, the same on all nodes), and DMLC_PS_ROOT_URI and
DMLC_PS_ROOT_PORT (the address of the scheduler). All other variables have defaults.
"stepaf launch" sets these variables for its processes.

Unknown names that are similar to known ones are listed as possible misspellings.
Exit status: 1 if a value is invalid. With --check also 1 if a required variable is
missing, if variables contradict each other, if this build lacks a transport or backend,
if a host has no address or this host no such interface, or if a scheduler on another host cannot reach the address of a node started here.`,
		ArgsUsage: " ", HideHelpCommand: true,
		Flags: []cli.Flag{
			&cli.BoolFlag{Name: "json", Usage: "print JSON"},
			&cli.BoolFlag{Name: "set", Usage: "show only variables that differ from their defaults"},
			&cli.BoolFlag{Name: "explain", Usage: "show allowed values and meaning"},
			&cli.BoolFlag{Name: "check", Usage: "check also that a node could start here"},
		},
		Action: exit.WithoutArguments(func(c *cli.Context) error {
			return showEnv(c.App.Writer, env.OS(), envOptions{c.Bool("json"), c.Bool("set"), c.Bool("explain"), c.Bool("check")})
		}),
	}
}

// lookupTime limits the resolution of names.
const lookupTime = 5 * time.Second

type envOptions struct{ json, set, explain, check bool }

// envReport is the output of "stepaf env --json".
type envReport struct {
	Variables []env.Effective  `json:"variables"`
	Misspelt  []env.Suggestion `json:"misspelt"` // unknown names, and known names that are similar
	Warnings  []string         `json:"warnings"`
	Errors    []string         `json:"errors"`
}

func showEnv(w io.Writer, src env.Source, o envOptions) error {
	cfg, err := env.LoadFrom(src)
	if o.check {
		ctx, cancel := context.WithTimeout(context.Background(), lookupTime)
		defer cancel()
		// Validate repeats the errors of LoadFrom.
		errs := append(exit.Unjoin(cfg.Validate()), doctor.Absent(cfg, "DMLC_ENABLE_RDMA", cfg.VanType, van.Transports()),
			doctor.Absent(cfg, "STEPMESH_BAKCEND", cfg.Backend, backend.Names()))
		here := hostaddr.This()
		own := here.Interfaces
		if cfg.VanType == "ibverbs" { // its interface is that of a device: "stepaf doctor" checks it
			own = nil
		}
		errs = append(errs, doctor.AbsentAddresses(ctx, cfg, own, doctor.Resolve)...)
		err = errors.Join(append(errs, doctor.Unreachable(ctx, cfg, here, doctor.Resolve)...)...)
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
