// Package bench is the command "stepaf bench": round trips between processes,
// beside the floor that plain TCP sets on the same machine in the same run.
package bench

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strconv"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van"
)

// Command returns the command, to be added to the application's.
func Command() *cli.Command {
	common := []cli.Flag{
		&cli.StringFlag{Name: "van", Value: "zmq", Usage: "transport, as DMLC_ENABLE_RDMA names it, or local: shared memory"},
		&cli.StringFlag{Name: "host", Usage: "address of the processes (default: 127.0.0.1; with ibverbs an RDMA port's, chosen as a node would)"},
		&cli.IntFlag{Name: "rounds", Value: 10, Usage: "blocks of measurements, each beside one of the floor"},
		&cli.DurationFlag{Name: "timeout", Value: 5 * time.Minute, Usage: "give up after this long"},
		&cli.BoolFlag{Name: "json", Usage: "print one line of JSON instead of a table"},
	}
	return &cli.Command{
		Name:  "bench",
		Usage: "measure latency and bandwidth between processes on this machine",
		Description: "Starts a scheduler, one server and one worker as processes, measures, and checks every answer.\n" +
			"The floor is the same bytes to and fro between the same processes over plain TCP on loopback,\n" +
			"blocking sockets, one thread each; with --van ibverbs, one RDMA write with immediate each way.\n" +
			"Compare ratios, not times: they depend on the machine.",
		Subcommands: []*cli.Command{
			{
				Name:      "latency",
				Usage:     "push_pull round trips of one tensor each way",
				UsageText: "stepaf bench latency --push BYTES --pull BYTES [--iters N]\nstepaf bench latency --van ibverbs [--check]",
				Description: "With --van ibverbs and neither --push nor --pull it measures 1 KiB and 64 KiB each way and the default.\n" +
					"If the package perftest is installed, it runs ib_write_lat and ib_write_bw on the same port, too.",
				Flags: append([]cli.Flag{
					&cli.IntFlag{Name: "push", Value: 917504, Usage: "bytes from worker to server"},
					&cli.IntFlag{Name: "pull", Value: 1835008, Usage: "bytes from server to worker"},
					&cli.IntFlag{Name: "iters", Usage: "measured round trips; 0 chooses by size"},
					&cli.IntFlag{Name: "warmup", Usage: "round trips before; 0 chooses by size"},
					&cli.BoolFlag{Name: "check", Usage: "with --van ibverbs: status 1 when a goal is missed or could not be looked at"},
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
			{Name: "child", Hidden: true, Action: runChild, SkipFlagParsing: true},
		},
	}
}

// defaults chooses how often to measure so that a run takes seconds, over RDMA also
// where that is emulated.
func defaults(bytes, iters, warmup int, rdma bool) (int, int) {
	if iters == 0 && rdma {
		iters = min(max(1<<28/(bytes+1<<17), 100), 2000)
	}
	if iters == 0 {
		iters = min(max(1<<31/(bytes+1<<17), 100), 20000)
	}
	if warmup == 0 {
		warmup = min(max(iters/10, 20), 1000)
	}
	return iters, warmup
}

func runLatency(c *cli.Context) error {
	m := &latencyRun{c: c}
	all := [][2]int{{c.Int("push"), c.Int("pull")}}
	if c.String("van") == ibverbs {
		var err error
		if m.rdma, err = newRDMARun(c.Context, c.String("host")); err != nil {
			return err
		}
		if !c.IsSet("push") && !c.IsSet("pull") {
			all = append([][2]int{{1 << 10, 1 << 10}, {64 << 10, 64 << 10}}, all...)
		}
		if lat, bw := goals(all[0][0], all[0][1]); c.Bool("check") && lat == 0 && bw == 0 {
			return cli.Exit(fmt.Sprintf("bench: --check: there is no goal for --push %d --pull %d", all[0][0], all[0][1]), 2)
		}
	} else if c.Bool("check") {
		return cli.Exit("bench: --check wants --van ibverbs: there are no goals for others", 2)
	}
	for i, p := range all {
		if i > 0 && !c.Bool("json") {
			fmt.Fprintln(c.App.Writer)
		}
		if err := m.payload(p[0], p[1]); err != nil {
			return err
		}
	}
	if c.Bool("check") {
		return m.rdma.verdict()
	}
	return nil
}

// latencyRun is one call of bench latency.
type latencyRun struct {
	c    *cli.Context
	rdma *rdmaRun // nil unless over RDMA
}

// payload measures one pair of sizes and prints the result.
func (m *latencyRun) payload(push, pull int) error {
	c := m.c
	const most = 1<<31 - 1
	if push < 0 || pull < 0 || push > most || pull > most || push+pull == 0 {
		return cli.Exit(fmt.Sprintf("bench: --push %d --pull %d: want 0 to %d bytes each, not both 0", push, pull, most), 2)
	}
	iters, warmup := defaults(push+pull, c.Int("iters"), c.Int("warmup"), m.rdma != nil)
	rounds := c.Int("rounds")
	if iters < 1 || warmup < 0 || rounds < 1 {
		return cli.Exit("bench: --iters, --warmup and --rounds want positive numbers", 2)
	}
	rounds = min(rounds, iters)
	host, floor := c.String("host"), "TCP"
	var figures perfFigures
	if m.rdma != nil {
		host, floor = m.rdma.at.Host.String(), "verbs"
		var err error
		if figures, err = m.rdma.perftest(c, push, pull); err != nil {
			return err
		}
	}
	r, cpu, err := runCluster(c, host, []string{"latency", strconv.Itoa(push), strconv.Itoa(pull), strconv.Itoa(iters), strconv.Itoa(warmup), strconv.Itoa(rounds)})
	if err != nil {
		return err
	}
	rep := newLatencyReport(c.String("van"), push, pull, iters, r, cpu)
	rep.Floor = floor
	if m.rdma != nil {
		m.rdma.compare(rep, figures)
	}
	return rep.print(c.App.Writer, c.Bool("json"))
}

// runCluster runs the three children and returns the worker's result and the CPU
// seconds of each.
func runCluster(c *cli.Context, host string, spec []string) (*result, map[string]float64, error) {
	ctx, cancel := context.WithTimeout(c.Context, c.Duration("timeout"))
	defer cancel()
	cl, err := startCluster(ctx, c.String("van"), host, spec, os.Stderr)
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
		if err := checkTransport(node, node.ServerInstances()); err != nil {
			node.Close()
			return err
		}
	}
	switch {
	case a[0] == "latency" && len(n) == 5:
		err = childLatency(c, node, &latency{push: n[0], pull: n[1], iters: n[2], warmup: n[3], rounds: n[4]})
	case a[0] == "kv" && len(n) == 5:
		err = childKV(c, node, &kvSpec{keys: n[0], values: n[1], batch: n[2], flight: n[3], rounds: n[4]})
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
	switch node.Role().String() {
	case "server":
		if err := serveLatency(node, l.push, l.pull); err != nil {
			return err
		}
		return announceFloor(c.App.Writer, node, l.push, l.pull)
	case "worker":
		floor, err := dialAnnounced(c.App.Reader, node, l.push, l.pull)
		if err != nil {
			return err
		}
		defer floor.close()
		ours, base, cpu, checked, err := l.measure(c.Context, node, floor)
		if err != nil {
			return err
		}
		return report(c.App.Writer, &result{Ours: ours, Floor: base, CPU: cpu.Seconds(), Checked: checked})
	}
	return nil
}

// announceFloor starts the floor's server and says where it listens.
func announceFloor(w io.Writer, node *postoffice.Node, push, pull int) error {
	var f interface {
		addr() string
		close()
	}
	host, err := floorHost(node)
	switch {
	case err != nil:
	case host.IsValid():
		f, err = newVerbsServer(host, push, pull)
	default:
		f, err = newFloorServer(push, pull)
	}
	if err != nil {
		return err
	}
	node.OnExit(f.close)
	_, err = fmt.Fprintln(w, f.addr())
	return err
}

// dialAnnounced reads the floor's address from the parent and connects.
func dialAnnounced(r io.Reader, node *postoffice.Node, push, pull int) (baseline, error) {
	addr, err := (&lineReader{r: r}).line()
	if err != nil {
		return nil, fmt.Errorf("bench: no address of the floor: %w", err)
	}
	host, err := floorHost(node)
	if err != nil {
		return nil, err
	}
	if host.IsValid() {
		return dialVerbsFloor(host, addr, push, pull)
	}
	return dialFloor(addr, push, pull)
}

// floorHost is the node's address if the floor is one of RDMA.
func floorHost(node *postoffice.Node) (netip.Addr, error) {
	if node.Config().VanType != ibverbs {
		return netip.Addr{}, nil
	}
	return netip.ParseAddr(node.Config().NodeHost)
}

func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port, nil
}
