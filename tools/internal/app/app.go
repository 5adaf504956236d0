// Package app is the stepaf command. It takes arguments and streams, and returns an exit status.
package app

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"

	"github.com/urfave/cli/v2"

	"github.com/stepaf/stepaf-go/tools/internal/bench"
	"github.com/stepaf/stepaf-go/tools/internal/demo"
	"github.com/stepaf/stepaf-go/tools/internal/doctor"
	"github.com/stepaf/stepaf-go/tools/internal/exit"
	"github.com/stepaf/stepaf-go/tools/internal/launch"
	"github.com/stepaf/stepaf-go/tools/internal/policy"
)

const description = `StepAF exchanges tensors between the attention and FFN processes of an inference
cluster. Workers (attention) push tensors to servers (FFN) and pull the results. A
scheduler assigns their ids and distributes their addresses.

Try it:              stepaf launch -n 1 -s 1 -- stepaf demo
Run a program:       stepaf launch -n 2 -s 1 -- ./program
Measure:             stepaf bench latency
Show settings:       stepaf env
Check this machine:  stepaf doctor

Options of a command come before its arguments.`

// output is the standard output of all commands. It keeps the first write error, with which the command then fails.
type output struct {
	io.Writer
	mu  sync.Mutex
	err error
}

func (o *output) Write(b []byte) (int, error) {
	n, err := o.Writer.Write(b)
	if err != nil {
		o.mu.Lock()
		o.err = cmp.Or(o.err, err)
		o.mu.Unlock()
	}
	return n, err
}

// Stat describes the file behind the output. A command that prints in color needs it to recognize a terminal.
func (o *output) Stat() (fs.FileInfo, error) {
	if f, ok := o.Writer.(interface{ Stat() (fs.FileInfo, error) }); ok {
		return f.Stat()
	}
	return nil, errors.ErrUnsupported
}

// fail returns the final error of a command whose own result is err. A failed write is the error of a command that succeeded, or that
// failed without a text. The caller calls fail after the command's last write.
func (o *output) fail(err error) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	switch {
	case o.err == nil || errors.Is(err, o.err):
		return err
	case err == nil:
		return fmt.Errorf("standard output: %w", o.err)
	case errors.Is(err, errSilent):
		return exit.With(exit.Status(err), fmt.Errorf("standard output: %w", o.err))
	}
	return err
}

// Run runs the command line args, whose first word is the program's name, and
// returns the exit status. Errors are printed to stderr.
func Run(args []string, stdout, stderr io.Writer) int {
	out := &output{Writer: stdout}
	self, err := os.Executable()
	if err != nil {
		self = args[0]
	}
	app := &cli.App{
		Name:                      "stepaf",
		Usage:                     "start, measure and inspect clusters of StepAF",
		UsageText:                 "stepaf COMMAND [OPTION...] [ARGUMENT...]",
		Description:               description,
		Writer:                    out,
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
			policy.Command(),
			secretCommand(),
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
		return exit.Usage("%w; see %s", wanted(err, c.Command.Flags), help)
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
	err = out.fail(app.Run(args))
	if err != nil && !errors.Is(err, errSilent) {
		fmt.Fprintln(stderr, "stepaf: "+strings.TrimSuffix(err.Error(), "\n"))
	}
	return exit.Status(err)
}

// badValue matches the error of package flag for an invalid value of an option. The groups are the value and the name.
var badValue = regexp.MustCompile(`^invalid (?:boolean )?value (".*") for (?:flag )?-([\w-]+): `)

// wanted returns an error that names the allowed values. The text of err is only "parse error".
func wanted(err error, flags []cli.Flag) error {
	m := badValue.FindStringSubmatch(err.Error())
	if m == nil {
		return err
	}
	for _, f := range flags {
		if !slices.Contains(f.Names(), m[2]) {
			continue
		}
		want := ""
		switch f.(type) {
		case *cli.IntFlag:
			if want = "an integer"; strings.HasSuffix(err.Error(), "out of range") {
				want = "an integer of at most 64 bits"
			}
		case *cli.IntSliceFlag:
			want = "an integer, or several separated by commas"
		case *cli.DurationFlag:
			want = "a duration with its unit, such as 300ms, 10s or 5m"
		case *cli.BoolFlag:
			want = "no value, true or false"
		default:
			return err
		}
		return fmt.Errorf("%s %s: want %s", exit.Option(m[2]), m[1], want)
	}
	return err
}

// errSilent is an error whose cause was printed already.
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
