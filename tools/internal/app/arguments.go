package app

import (
	"github.com/urfave/cli/v2"

	"github.com/stepaf/stepaf-go/tools/internal/exit"
)

// noArguments is the action f of a command that takes no arguments.
func noArguments(f cli.ActionFunc) cli.ActionFunc {
	return func(c *cli.Context) error {
		if c.Args().Present() {
			return exit.Usage("%s: unexpected argument %q", c.Command.Name, c.Args().First())
		}
		return f(c)
	}
}
