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
		Usage: "create the secret of a cluster",
		Description: `Creates a secret of 32 random bytes. It writes the secret to a new FILE that only its
owner can read (mode 0600), or without FILE prints it. It does not overwrite a file.

A node with a secret communicates only with processes that have the same secret. Create
one secret for a cluster, copy the file to every machine, and set its path for every node:

    stepaf secret cluster.secret
    STEPAF_SECRET_FILE=cluster.secret stepaf launch --role server ...

Each copy must belong to the user that runs the node, with mode 0600; "scp -p" keeps
the mode. "stepaf launch" creates a secret itself if it starts the whole cluster.
"stepaf doctor" shows the protection in force.`,
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
