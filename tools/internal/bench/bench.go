// Package bench is the command "stepaf bench": round trips between processes,
// beside the floor that plain TCP sets on the same machine in the same run.
package bench

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// Command returns the command, to be added to the application's.
func Command() *cli.Command {
	common := []cli.Flag{
		&cli.StringFlag{Name: "van", Value: zmq, Usage: "transport, as DMLC_ENABLE_RDMA names it, or local: shared memory"},
		&cli.StringFlag{Name: "host", Usage: "address of the processes (default: 127.0.0.1; with ibverbs an RDMA port's, chosen as a node would)"},
		&cli.IntFlag{Name: "rounds", Value: 10, Usage: "blocks of measurements, each beside one of the floor"},
		&cli.DurationFlag{Name: "timeout", Value: 5 * time.Minute, Usage: "give up after this long"},
		&cli.BoolFlag{Name: "json", Usage: "print one line of JSON instead of a table"},
	}
	return &cli.Command{
		Name:  "bench",
		Usage: "measure latency and bandwidth between processes on this machine",
		Description: "Starts a scheduler, one server and one worker as processes, measures, and checks every answer.\n" +
			"The floor is the baseline, measured in the same run: the same bytes to and fro between the same\n" +
			"processes over plain TCP on loopback, blocking sockets, one thread each; with --van ibverbs, one\n" +
			"RDMA write with immediate each way; with --device gpu, one copy from GPU to GPU each way.\n" +
			"Compare ratios, not times: they depend on the machine.",
		Subcommands: []*cli.Command{
			{
				Name:      "latency",
				Usage:     "push_pull round trips of one tensor each way",
				UsageText: "stepaf bench latency --push BYTES --pull BYTES [--iters N]\nstepaf bench latency --van ibverbs [--check]\nstepaf bench latency --van local --device gpu [--check]",
				Description: "With --van ibverbs and neither --push nor --pull it measures 1 KiB and 64 KiB each way and the default.\n" +
					"If the package perftest is installed, it runs ib_write_lat and ib_write_bw on the same port, too.\n\n" +
					"With --van zmq a round trip of libzmq by itself stands beside: one message each way between a DEALER and a ROUTER, in C.\n\n" +
					"With --device gpu the tensors are device memory, the worker's and the server's each on a GPU of its own. The floor\n" +
					"is a copy into the other GPU's memory and a word written into host memory behind it, each way. Without sizes it\n" +
					"measures 1 KiB, the default, 16 MiB and 256 MiB each way. The timed round trips move what lies on the devices;\n" +
					"every byte is checked in others, not timed, before and after each block, and so is a block's last answer.",
				Flags: append([]cli.Flag{
					&cli.IntFlag{Name: "push", Value: attention.push, Usage: "bytes from worker to server"},
					&cli.IntFlag{Name: "pull", Value: attention.pull, Usage: "bytes from server to worker"},
					&cli.StringFlag{Name: "device", Value: cpu, Usage: "where tensors lie: cpu or gpu"},
					&cli.StringFlag{Name: "gpus", Usage: "the worker's and the server's GPU (default: 0,1; with one GPU 0,0)"},
					&cli.BoolFlag{Name: "stream", Usage: "with --device gpu: tensors are said to be made in a stream, which costs a look at it or an event"},
					&cli.IntFlag{Name: "iters", Usage: "measured round trips; 0 chooses by size"},
					&cli.IntFlag{Name: "warmup", Usage: "round trips before; 0 chooses by size"},
					&cli.BoolFlag{Name: "load", Usage: "meanwhile keep every core busy with a loop"},
					&cli.BoolFlag{Name: "touch", Usage: "read and write every byte between rounds, at both ends, also of the floor"},
					&cli.BoolFlag{Name: "check", Usage: "with --van ibverbs, or local and --device gpu: status 1 when a goal is missed or could not be looked at"},
				}, common...),
				Action: runLatency,
			},
			{
				Name:      "kv",
				Usage:     "key-value pushes and pulls in batches",
				UsageText: "stepaf bench kv [--keys N] [--values K] [--batch N]",
				Flags: append([]cli.Flag{
					&cli.IntFlag{Name: "keys", Value: 1000000, Usage: "number of float32 keys"},
					&cli.IntFlag{Name: "values", Value: 16, Usage: "values of a key"},
					&cli.IntFlag{Name: "batch", Value: 20000, Usage: "keys of a request"},
					&cli.IntFlag{Name: "flight", Value: 4, Usage: "requests in flight"},
				}, common...),
				Action: runKV,
			},
			collectiveCommand(common),
			sessionCommand(common),
			windowCommand(common),
			softwareCommand(),
			{Name: "child", Hidden: true, Action: runChild, SkipFlagParsing: true},
		},
	}
}

// runCluster runs the three children and returns the worker's result and the CPU
// seconds of each.
func runCluster(c *cli.Context, host string, at place, spec []string) (*result, map[string]float64, error) {
	ctx, cancel := context.WithTimeout(c.Context, c.Duration("timeout"))
	defer cancel()
	cl, err := startCluster(ctx, c.String("van"), host, at, 1, 1, spec, os.Stderr)
	if err != nil {
		return nil, nil, err
	}
	// The server says where its floor listens; the worker is told.
	addr, err := cl.outs["server"].line()
	if err == nil {
		_, err = fmt.Fprintln(cl.ins["worker"], addr)
	}
	var text string
	if err == nil {
		text, err = cl.outs["worker"].line()
	}
	cpu, failed := cl.wait()
	switch {
	case ctx.Err() != nil:
		return nil, nil, fmt.Errorf("bench: %w (--timeout %s)", context.Cause(ctx), c.Duration("timeout"))
	case failed != nil:
		return nil, nil, fmt.Errorf("bench: %w", failed)
	case err != nil:
		return nil, nil, fmt.Errorf("bench: a child ended early: %w", err)
	}
	var r result
	if err := json.Unmarshal([]byte(text), &r); err != nil {
		return nil, nil, fmt.Errorf("bench: worker's report: %w", err)
	}
	return &r, cpu, nil
}

// runChild is one node of a benchmark.
func runChild(c *cli.Context) error {
	a := c.Args().Slice()
	if len(a) < 1 {
		return cli.Exit("bench child is started by stepaf bench", 2)
	}
	n := make([]int, len(a)-1)
	for i := range n {
		var err error
		if n[i], err = strconv.Atoi(a[i+1]); err != nil {
			return cli.Exit(fmt.Sprintf("bench child: %q: want a number", a[i+1]), 2)
		}
	}
	node, err := startNode(c.Context)
	if err != nil {
		return err
	}
	if node.Role() == van.Worker {
		if err := checkTransport(node, node.Topology().ServerInstances()); err != nil {
			node.Close()
			return err
		}
	}
	switch {
	case a[0] == "latency" && len(n) == 7:
		err = childLatency(c, node, &latency{push: n[0], pull: n[1], iters: n[2], warmup: n[3], rounds: n[4], stream: n[5] != 0, touch: n[6] != 0})
	case a[0] == "kv" && len(n) == 5:
		err = childKV(c, node, &kvSpec{keys: n[0], values: n[1], batch: n[2], flight: n[3], rounds: n[4]})
	case a[0] == "collective" && len(n) == 0:
		err = childCollective(c, node)
	case a[0] == "window" && len(n) == 1:
		err = childWindow(c, node, n[0])
	case a[0] == "session" && len(n) == 2:
		err = childSession(c, node, n[0], n[1])
	default:
		err = cli.Exit("bench child is started by stepaf bench", 2)
	}
	if err != nil {
		node.Close()
		return err
	}
	return node.Finalize(c.Context)
}

func childLatency(c *cli.Context, node *postoffice.Node, l *latency) error {
	serve, measure := l.serve, l.measure
	if onGPU(node) {
		serve, measure = l.serveDevice, l.measureDevice
	}
	switch node.Role().String() {
	case "server":
		if err := serve(node); err != nil {
			return err
		}
		return announceFloor(c.App.Writer, node, l.floors(node))
	case "worker":
		var floor baseline
		var err error
		if floor, l.bare, err = dialAnnounced(c.App.Reader, node, l.floors(node)); err != nil {
			return err
		}
		defer floor.close()
		if l.bare != nil {
			defer l.bare.close()
		}
		r, err := measure(c.Context, node, floor)
		if err != nil {
			return err
		}
		return report(c.App.Writer, r)
	}
	return nil
}

// onGPU tells whether the node's tensors lie on a GPU.
func onGPU(node *postoffice.Node) bool { return node.Backend().Device().Type == backend.GPU }

// floors is what a push_pull is measured beside.
type floors struct {
	push, pull int
	touch      bool // every byte is read and written between rounds
	bare       bool // ZMQ by itself is measured, too
}

func (l *latency) floors(node *postoffice.Node) floors {
	cfg := node.Config()
	return floors{l.push, l.pull, l.touch, cfg.VanType == zmq && cfg.EnableIPC == 0 && !onGPU(node)}
}

// announceFloor starts the servers and says where they listen.
func announceFloor(w io.Writer, node *postoffice.Node, x floors) error {
	var f interface {
		addr() string
		close()
	}
	host, err := floorHost(node)
	switch {
	case err != nil:
	case onGPU(node):
		f, err = newDeviceServer(node.Backend(), x.push, x.pull)
	case host.IsValid():
		f, err = newVerbsServer(host, x.push, x.pull)
	default:
		f, err = newFloorServer(x.push, x.pull, x.touch)
	}
	if err != nil {
		return err
	}
	node.App().OnExit(f.close)
	at := f.addr()
	if x.bare {
		z, err := newZMQServer(x.pull, x.touch)
		if err != nil {
			return err
		}
		node.App().OnExit(z.close)
		at += " " + z.at
	}
	_, err = fmt.Fprintln(w, at)
	return err
}

// dialAnnounced reads the addresses from the parent and connects. bare is nil where ZMQ
// by itself is not measured.
func dialAnnounced(r io.Reader, node *postoffice.Node, x floors) (floor, bare baseline, err error) {
	line, err := (&lineReader{r: r}).line()
	if err != nil {
		return nil, nil, fmt.Errorf("bench: no address of the floor: %w", err)
	}
	addr, bareAt, _ := strings.Cut(line, " ")
	host, err := floorHost(node)
	switch {
	case err != nil:
		return nil, nil, err
	case onGPU(node):
		floor, err = dialDeviceFloor(node.Backend(), addr, x.push, x.pull)
	case host.IsValid():
		floor, err = dialVerbsFloor(host, addr, x.push, x.pull)
	default:
		floor, err = dialFloor(addr, x.push, x.pull, x.touch)
	}
	if err != nil || !x.bare {
		return floor, nil, err
	}
	if bare, err = dialZMQ(bareAt, x.push, x.pull, x.touch); err != nil {
		floor.close()
		return nil, nil, err
	}
	return floor, bare, nil
}

// floorHost is the node's address if the floor is one of RDMA.
func floorHost(node *postoffice.Node) (netip.Addr, error) {
	if node.Config().VanType != ibverbs {
		return netip.Addr{}, nil
	}
	return netip.ParseAddr(node.Config().NodeHost)
}
