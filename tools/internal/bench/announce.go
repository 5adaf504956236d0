package bench

// The floor between a server and a worker: the server starts it, the worker connects.

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"strings"

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

// childWithFloor is a node of a benchmark. The server serves; the worker measures push_pulls, the floor and, if x.bare,
// libzmq alone, in turns.
func childWithFloor(c *cli.Context, node *postoffice.Node, x floors, serve func(*postoffice.Node) error,
	measure func(ctx context.Context, node *postoffice.Node, floor, bare baseline) (*result, error)) error {
	switch node.Role() {
	case van.Server:
		if err := serve(node); err != nil {
			return err
		}
		return announceFloor(c.App.Writer, node, x)
	case van.Worker:
		floor, bare, err := dialAnnounced(c.App.Reader, node, x)
		if err != nil {
			return err
		}
		defer floor.close()
		defer bare.close()
		r, err := measure(c.Context, node, floor, bare)
		if err != nil {
			return err
		}
		return json.NewEncoder(c.App.Writer).Encode(r)
	}
	return nil
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
