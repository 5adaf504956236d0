// Package app is the stepaf command without its process: arguments and streams
// in, exit status out.
package app

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/urfave/cli/v2"

	"github.com/stepaf/stepaf-go/tools/internal/bench"
	"github.com/stepaf/stepaf-go/tools/internal/demo"
	"github.com/stepaf/stepaf-go/tools/internal/doctor"
	"github.com/stepaf/stepaf-go/tools/internal/exit"
	"github.com/stepaf/stepaf-go/tools/internal/launch"
	"github.com/stepaf/stepaf-go/tools/internal/policy"
)

const description = `StepAF carries tensors between the attention and FFN processes of an inference
cluster: workers push tensors to servers and pull results back, and a scheduler
introduces them to each other.

Try it:          stepaf launch -n 1 -s 1 -- stepaf demo
Run a program:   stepaf launch -n 2 -s 1 -- ./program
Measure:         stepaf bench latency
See settings:    stepaf env
Look for faults: stepaf doctor

Options of a command come before its arguments.`

// Run runs the command line args, whose first word is the program's name, and
// returns the exit status. Errors are printed to stderr.
func Run(args []string, stdout, stderr io.Writer) int {
	self, err := os.Executable()
	if err != nil {
		self = args[0]
	}
	app := &cli.App{
		Name:                      "stepaf",
		Usage:                     "start, measure and inspect clusters of StepAF",
		UsageText:                 "stepaf COMMAND [OPTION...] [ARGUMENT...]",
		Description:               description,
		Writer:                    stdout,
		ErrWriter:                 stderr,
		HideVersion:               true,
		DisableSliceFlagSeparator: true,
		ExitErrHandler:            func(*cli.Context, error) {}, // the caller exits
		Commands: []*cli.Command{
			launch.Command(self, args),
			schedulerCommand(),
			bench.Command(),
			envCommand(),
			doctorCommand(),
			policy.Command(interruptible),
			demo.Command(),
			doctor.ChildCommand(),
			versionCommand(),
		},
		Action: func(c *cli.Context) error {
			if c.Args().Present() {
				return exit.Usage("unknown command %q: want one of %s", c.Args().First(), names(c.App.Commands))
			}
			return cli.ShowAppHelp(c)
		},
	}
	usage := func(c *cli.Context, err error, sub bool) error {
		help := "stepaf --help"
		if sub {
			help = c.Command.HelpName + " --help"
		}
		return exit.Usage("%w; see %s", err, help)
	}
	app.OnUsageError = usage
	for _, c := range app.Commands {
		c.OnUsageError = usage
		if len(c.Subcommands) > 0 && c.Action == nil {
			c.Action = func(ctx *cli.Context) error {
				if ctx.Args().Present() {
					return exit.Usage("%s: unknown command %q: want one of %s", c.Name, ctx.Args().First(), names(c.Subcommands))
				}
				return cli.ShowSubcommandHelp(ctx)
			}
		}
		for _, sub := range c.Subcommands {
			sub.OnUsageError = usage
		}
	}
	err = app.Run(args)
	if err != nil && !errors.Is(err, errSilent) {
		fmt.Fprintln(stderr, "stepaf: "+strings.TrimSuffix(err.Error(), "\n"))
	}
	return exit.Status(err)
}

// errSilent is an error whose cause has been printed.
var errSilent = errors.New("failed")

func names(commands []*cli.Command) string {
	var l []string
	for _, c := range commands {
		if !c.Hidden {
			l = append(l, c.Name)
		}
	}
	return strings.Join(l, ", ")
}
