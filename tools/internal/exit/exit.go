// Package exit gives errors of the stepaf command an exit status.
package exit

import (
	"errors"
	"fmt"
	"strings"

	"github.com/urfave/cli/v2"
)

// Exit statuses of the command.
const (
	Failure = 1   // what was asked for went wrong
	Misuse  = 2   // the command line or the environment makes no sense
	Timeout = 124 // a time limit passed, as with timeout(1)
)

// Usage is an error of the caller's, with status Misuse.
func Usage(format string, args ...any) error { return With(Misuse, fmt.Errorf(format, args...)) }

// With gives err a status.
func With(status int, err error) error { return cli.Exit(err, status) }

// WithoutArguments is the action f of a command that takes no arguments: an option after one would
// be left out without a word.
func WithoutArguments(f cli.ActionFunc) cli.ActionFunc {
	return func(c *cli.Context) error {
		if c.Args().Present() {
			return Usage("%s: unexpected argument %q", strings.TrimPrefix(c.Command.HelpName, "stepaf "), c.Args().First())
		}
		return f(c)
	}
}

// Status returns the exit status for err: 0 for nil, that of the first error in
// its chain that has an ExitCode, else Failure.
func Status(err error) int {
	if err == nil {
		return 0
	}
	if e, ok := errors.AsType[cli.ExitCoder](err); ok {
		return e.ExitCode()
	}
	return Failure
}

// Unjoin lists what errors.Join has joined.
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
