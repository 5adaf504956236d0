package app

import (
	"fmt"

	"github.com/urfave/cli/v2"

	"github.com/stepaf/stepaf-go/tools/internal/exit"
	"github.com/stepaf/stepaf-go/tools/internal/secret"
)

func secretCommand() *cli.Command {
	return &cli.Command{
		Name:  "secret",
		Usage: "make the secret of a cluster",
		Description: `Makes a secret of 32 random bytes and writes it to a new FILE, which only its owner
may read (mode 0600), or prints it. An existing file is not overwritten.

A node that has a secret talks only to processes that have the same one. Make one
secret for a cluster, copy it to every machine, and set its name for every node:

    stepaf secret cluster.secret
    STEPAF_SECRET_FILE=cluster.secret stepaf launch --role server ...

Each copy must belong to the user that runs the node, with mode 0600; scp -p keeps
the mode. "stepaf launch" makes a secret by itself for a cluster that it starts
whole. "stepaf doctor" shows the protection in force.`,
		ArgsUsage: "[FILE]", HideHelpCommand: true,
		Action: func(c *cli.Context) error {
			switch {
			case c.NArg() > 1:
				return exit.Usage("secret: unexpected argument %q: want one file", c.Args().Get(1))
			case c.NArg() == 1 && c.Args().First() == "":
				return exit.Usage(`secret: file "": want a name, or no argument to print the secret`)
			case c.NArg() == 1:
				if err := secret.Write(c.Args().First(), secret.Make()); err != nil {
					return fmt.Errorf("secret: %w", err)
				}
				return nil
			}
			_, err := fmt.Fprintln(c.App.Writer, secret.Make())
			return err
		},
	}
}
