// Package exit gives the errors of the stepaf command an exit status.
package exit

import (
	"errors"
	"fmt"
	"strings"

	"github.com/urfave/cli/v2"
)

// Exit statuses of the command.
const (
	Failure = 1   // the command has failed
	Misuse  = 2   // the command line or the environment is wrong
	Timeout = 124 // a time limit has passed, as in timeout(1)
)

// Usage returns an error of the command line, with status Misuse.
func Usage(format string, args ...any) error { return With(Misuse, fmt.Errorf(format, args...)) }

// With gives err a status.
func With(status int, err error) error { return cli.Exit(err, status) }

// Option returns an option as it is written on the command line: with one dash before a single letter, else with two.
func Option(name string) string {
	if len(name) == 1 {
		return "-" + name
	}
	return "--" + name
}

// WithoutArguments adds to the action f the refusal of arguments. An option after an argument would be ignored
// silently.
func WithoutArguments(f cli.ActionFunc) cli.ActionFunc {
	return func(c *cli.Context) error {
		if c.Args().Present() {
			return Usage("%s: unexpected argument %q", strings.TrimPrefix(c.Command.HelpName, "stepaf "), c.Args().First())
		}
		return f(c)
	}
}

// Status returns the exit status for err: 0 for nil, else that of the first error in its chain that has an ExitCode,
// else Failure.
func Status(err error) int {
	if err == nil {
		return 0
	}
	if e, ok := errors.AsType[cli.ExitCoder](err); ok {
		return e.ExitCode()
	}
	return Failure
}

// Unjoin returns the errors that errors.Join has joined.
func Unjoin(err error) []error {
	if err == nil {
		return nil
	}
	var many interface{ Unwrap() []error }
	if errors.As(err, &many) {
		return many.Unwrap()
	}
	return []error{err}
}
