package bench

// The floor between a server and a worker: the server starts it, the worker connects.

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van"
)

// end is a worker or a server of a benchmark with floors.
type end interface {
	// do makes n of the calls that the parent asks for, or answers them, and returns the nanoseconds of each.
	// An end with a method times also returns times by the clock of the host.
	do(ctx context.Context, what, form string, d time.Duration, n int) ([]int64, error)
	close()
}

// Measurements of the baselines, which each worker makes.
const (
	askFloor = "floor"
	askBare  = "bare" // libzmq alone
)

// childWithFloor is a node of a benchmark. It starts the floor, and then answers lines of the parent, whose amounts are nanoseconds.
// newEnd returns nil for a server whose handler does all the work; the parent sends it no lines.
func childWithFloor(c *cli.Context, node *postoffice.Node, x floors, newEnd func(*postoffice.Node) (end, error)) error {
	if node.Role() != van.Server && node.Role() != van.Worker {
		return nil
	}
	e, err := newEnd(node)
	if err != nil {
		return err
	}
	if e != nil {
		defer e.close()
	}
	kinds, err := x.kinds(node)
	if err != nil {
		return err
	}
	base := map[string]baseline{}
	defer func() {
		for _, b := range base {
			b.close()
		}
	}()
	if node.Role() == van.Server {
		err = announceFloors(c.App.Writer, node, kinds)
	} else if err = dialAnnounced(c.App.Reader, kinds, node.Rank() < x.clients, base); err == nil {
		_, err = fmt.Fprintln(c.App.Writer, "{}") // the parent may send lines from here on
	}
	if err != nil {
		return err
	}
	return answerLines(c, func(what, form string, d, n int) (*answer, error) {
		if b := base[what]; b != nil {
			return times(b.measure(n))
		}
		a, err := times(e.do(c.Context, what, form, time.Duration(d), n))
		if e, ok := e.(interface{ times() []int64 }); ok {
			a.At = e.times()
		}
		return a, err
	})
}

// announceFloors starts a server of each kind and prints the addresses.
func announceFloors(w io.Writer, node *postoffice.Node, kinds []floorKind) error {
	var addrs []string
	for _, k := range kinds {
		f, err := k.serve()
		if err != nil {
			return err
		}
		(*cluster.Node)(node).App().OnExit(f.close)
		addrs = append(addrs, f.addr)
	}
	_, err := fmt.Fprintln(w, strings.Join(addrs, " "))
	return err
}

// dialAnnounced reads the addresses that all servers have announced from the parent, and if dial is set, adds a client of
// each kind to base.
func dialAnnounced(r io.Reader, kinds []floorKind, dial bool, base map[string]baseline) error {
	line, err := bufio.NewReader(r).ReadString('\n')
	if err != nil {
		return fmt.Errorf("bench: no address of the floor: %w", err)
	}
	addrs := strings.Fields(line)
	if len(addrs) == 0 || len(addrs)%len(kinds) != 0 {
		return fmt.Errorf("bench: the parent has sent %d addresses of %d floors", len(addrs), len(kinds))
	}
	if !dial {
		return nil
	}
	of := make([][]string, len(kinds))
	for i, at := range addrs {
		of[i%len(kinds)] = append(of[i%len(kinds)], at)
	}
	for i, k := range kinds {
		b, err := k.dial(of[i])
		if err != nil {
			return err
		}
		base[[]string{askFloor, askBare}[i]] = b
	}
	return nil
}
