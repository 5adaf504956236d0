package bench

// The floor between a server and a worker: the server starts it, the worker connects.

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// onGPU reports whether the node's tensors are on a GPU.
func onGPU(node *postoffice.Node) bool { return node.Backend().Device().Type == backend.GPU }

// floors describes the baselines of a push_pull.
type floors struct {
	push, pull int
	touch      bool // every byte is read and written between rounds
	bare       bool // libzmq alone is measured, too
	shared     bool // through shared memory instead of TCP
	clients    int  // of each server; 0 is 1
	pairs      int  // of all clients and servers
}

// end is a worker or a server of a benchmark with floors.
type end interface {
	// do makes n of the calls that the parent asks for, or answers them, and returns the nanoseconds of each.
	do(ctx context.Context, what, form string, d time.Duration, n int) ([]int64, error)
	close()
}

// Measurements of the baselines, which each worker makes.
const (
	askFloor = "floor"
	askBare  = "bare" // libzmq alone
)

// childWithFloor is a node of a benchmark. It starts the floor, and then answers lines of the parent: "WHAT FORM NANOSECONDS CALLS".
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
	base := map[string]baseline{}
	if node.Role() == van.Server {
		err = announceFloor(c.App.Writer, node, x)
	} else if base[askFloor], base[askBare], err = dialAnnounced(c.App.Reader, node, x); err == nil {
		defer base[askFloor].close()
		defer base[askBare].close()
		_, err = fmt.Fprintln(c.App.Writer, "{}") // the parent may send lines from here on
	}
	if err != nil {
		return err
	}
	var what, form string
	var d, n int
	return answerLines(c, func() (a *answer, err error) {
		a = &answer{}
		start, cpu := time.Now(), cpuTime()
		if b := base[what]; b != nil {
			a.NS, err = b.measure(n)
		} else {
			a.NS, err = e.do(c.Context, what, form, time.Duration(d), n)
		}
		a.Took, a.CPU = time.Since(start), cpuTime()-cpu
		return a, err
	}, &what, &form, &d, &n)
}

// announceFloor starts the servers and prints their addresses.
func announceFloor(w io.Writer, node *postoffice.Node, x floors) error {
	var f *floorServer
	host, err := floorHost(node)
	switch {
	case err != nil:
	case onGPU(node):
		f, err = newDeviceServer(node.Backend(), max(x.clients, 1), x.push, x.pull)
	case host.IsValid():
		f, err = newVerbsServer(host, x.push, x.pull)
	case x.shared:
		f, err = newSharedServer(x.clients, x.pairs, x.push, x.pull)
	default:
		f, err = newTCPServer(x.push, x.pull, x.touch)
	}
	if err != nil {
		return err
	}
	(*cluster.Node)(node).App().OnExit(f.close)
	at := f.addr
	if x.bare {
		z, err := newZMQServer(x.pull, x.touch)
		if err != nil {
			return err
		}
		(*cluster.Node)(node).App().OnExit(z.close)
		at += " " + z.addr
	}
	_, err = fmt.Fprintln(w, at)
	return err
}

// dialAnnounced reads the addresses of all servers from the parent and connects. A floor over RDMA and libzmq alone are
// measured with one server.
func dialAnnounced(r io.Reader, node *postoffice.Node, x floors) (floor, bare baseline, err error) {
	line, err := bufio.NewReader(r).ReadString('\n')
	if err != nil {
		return nil, nil, fmt.Errorf("bench: no address of the floor: %w", err)
	}
	addrs, bareAt := strings.Fields(line), ""
	if x.bare && len(addrs) > 1 {
		addrs, bareAt = addrs[:1], addrs[1]
	}
	if len(addrs) == 0 {
		return nil, nil, errors.New("bench: the parent has sent no address of the floor")
	}
	host, err := floorHost(node)
	switch {
	case err != nil:
		return nil, nil, err
	case onGPU(node):
		floor, err = dialDeviceFloor(node.Backend(), addrs, x.push, x.pull)
	case host.IsValid():
		floor, err = dialVerbsFloor(host, addrs[0], x.push, x.pull)
	case x.shared:
		floor, err = dialShared(addrs, node.Rank(), x.pairs, x.push, x.pull)
	default:
		floor, err = dialTCP(addrs, x.pairs, x.push, x.pull, x.touch)
	}
	if err != nil || !x.bare {
		return floor, none{}, err
	}
	if bare, err = dialZMQ(bareAt, x.push, x.pull, x.touch); err != nil {
		floor.close()
		return nil, nil, err
	}
	return floor, bare, nil
}

// floorHost returns the node's address if the floor uses RDMA.
func floorHost(node *postoffice.Node) (netip.Addr, error) {
	if node.Config().VanType != ibverbs {
		return netip.Addr{}, nil
	}
	return netip.ParseAddr(node.Config().NodeHost)
}
