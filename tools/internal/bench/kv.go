package bench

import (
	"errors"

	"github.com/urfave/cli/v2"

	"github.com/stepaf/stepaf-go/postoffice"
)

type kvSpec struct {
	keys, values, batch, flight, rounds int
}

func runKV(c *cli.Context) error { return errors.New("bench kv: not yet") }

func childKV(c *cli.Context, node *postoffice.Node, s *kvSpec) error { return errors.New("not yet") }
