// Package bench is the command "stepaf bench": round trips between processes,
// beside the floor that plain TCP sets on the same machine in the same run.
package bench

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
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
		&cli.IntFlag{Name: "rounds", Value: 10, Usage: "blocks of measurements, each beside one of the floor"},
		&cli.DurationFlag{Name: "timeout", Value: 5 * time.Minute, Usage: "give up after this long"},
		&cli.BoolFlag{Name: "json", Usage: "print one line of JSON instead of a table"},
	}
	return &cli.Command{
		Name:  "bench",
		Usage: "measure latency and bandwidth between processes on this machine",
		Description: "Starts a scheduler, one server and one worker as processes, measures, and checks every answer.\n" +
			"The floor is the same bytes to and fro between the same processes over plain TCP on loopback,\n" +
			"blocking sockets, one thread each. Compare ratios, not times: they depend on the machine.",
		Subcommands: []*cli.Command{
			{
				Name:      "latency",
				Usage:     "push_pull round trips of one tensor each way",
				UsageText: "stepaf bench latency --push BYTES --pull BYTES [--iters N]",
				Flags: append([]cli.Flag{
					&cli.IntFlag{Name: "push", Value: 917504, Usage: "bytes from worker to server"},
					&cli.IntFlag{Name: "pull", Value: 1835008, Usage: "bytes from server to worker"},
					&cli.IntFlag{Name: "iters", Usage: "measured round trips; 0 chooses by size"},
					&cli.IntFlag{Name: "warmup", Usage: "round trips before; 0 chooses by size"},
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

// defaults chooses how often to measure so that a run takes seconds.
func defaults(bytes, iters, warmup int) (int, int) {
	if iters == 0 {
		iters = min(max(1<<31/(bytes+1<<17), 100), 20000)
	}
	if warmup == 0 {
		warmup = min(max(iters/10, 20), 1000)
	}
	return iters, warmup
}

func runLatency(c *cli.Context) error {
	push, pull := c.Int("push"), c.Int("pull")
	const most = 1<<31 - 1
	if push < 0 || pull < 0 || push > most || pull > most || push+pull == 0 {
		return cli.Exit(fmt.Sprintf("bench: --push %d --pull %d: want 0 to %d bytes each, not both 0", push, pull, most), 2)
	}
	iters, warmup := defaults(push+pull, c.Int("iters"), c.Int("warmup"))
	rounds := c.Int("rounds")
	if iters < 1 || warmup < 0 || rounds < 1 {
		return cli.Exit("bench: --iters, --warmup and --rounds want positive numbers", 2)
	}
	rounds = min(rounds, iters)
	r, cpu, err := runCluster(c, []string{"latency", strconv.Itoa(push), strconv.Itoa(pull), strconv.Itoa(iters), strconv.Itoa(warmup), strconv.Itoa(rounds)})
	if err != nil {
		return err
	}
	return printLatency(c.App.Writer, c.Bool("json"), c.String("van"), push, pull, iters, r, cpu)
}

// runCluster runs the three children and returns the worker's result and the CPU
// seconds of each.
func runCluster(c *cli.Context, spec []string) (*result, map[string]float64, error) {
	ctx, cancel := context.WithTimeout(c.Context, c.Duration("timeout"))
	defer cancel()
	cl, err := startCluster(ctx, c.String("van"), spec, os.Stderr)
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

// latencyReport is the JSON line of bench latency.
type latencyReport struct {
	Van        string             `json:"van"`
	PushBytes  int                `json:"push_bytes"`
	PullBytes  int                `json:"pull_bytes"`
	Iters      int                `json:"iters"`
	P50        float64            `json:"p50_us"`
	P90        float64            `json:"p90_us"`
	P99        float64            `json:"p99_us"`
	Max        float64            `json:"max_us"`
	Mean       float64            `json:"mean_us"`
	FloorP50   float64            `json:"floor_p50_us"`
	FloorP90   float64            `json:"floor_p90_us"`
	FloorP99   float64            `json:"floor_p99_us"`
	FloorMax   float64            `json:"floor_max_us"`
	RatioP50   float64            `json:"ratio_p50"`
	RatioP99   float64            `json:"ratio_p99"`
	CPU        map[string]float64 `json:"cpu_s"`
	WorkerPart float64            `json:"worker_measured_cpu_s"`
	Checked    bool               `json:"checked"`
}

func printLatency(w io.Writer, asJSON bool, van string, push, pull, iters int, r *result, cpu map[string]float64) error {
	ours, floor := summarize(r.Ours), summarize(r.Floor)
	rep := latencyReport{Van: van, PushBytes: push, PullBytes: pull, Iters: iters,
		P50: ours.P50, P90: ours.P90, P99: ours.P99, Max: ours.Max, Mean: ours.Mean,
		FloorP50: floor.P50, FloorP90: floor.P90, FloorP99: floor.P99, FloorMax: floor.Max,
		RatioP50: ours.P50 / floor.P50, RatioP99: ours.P99 / floor.P99, CPU: cpu, WorkerPart: r.CPU, Checked: r.Checked}
	if asJSON {
		return json.NewEncoder(w).Encode(rep)
	}
	fmt.Fprintf(w, "push_pull over %s, push %d bytes, pull %d bytes, %d round trips, all answers checked: %t\n", van, push, pull, iters, r.Checked)
	fmt.Fprintf(w, "%-16s %10s %10s %10s %10s\n", "microseconds", "p50", "p90", "p99", "max")
	fmt.Fprintf(w, "%-16s %10.1f %10.1f %10.1f %10.1f\n", "push_pull", ours.P50, ours.P90, ours.P99, ours.Max)
	fmt.Fprintf(w, "%-16s %10.1f %10.1f %10.1f %10.1f\n", "floor (TCP)", floor.P50, floor.P90, floor.P99, floor.Max)
	fmt.Fprintf(w, "%-16s %10.2f %10.2f %10.2f %10.2f\n", "ratio", rep.RatioP50, ours.P90/floor.P90, rep.RatioP99, ours.Max/floor.Max)
	fmt.Fprintf(w, "CPU seconds: scheduler %.2f, server %.2f, worker %.2f (start-up and floor included)\n", cpu["scheduler"], cpu["server"], cpu["worker"])
	return nil
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
		floor, err := dialAnnounced(c.App.Reader, l.push, l.pull)
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
	f, err := newFloorServer(push, pull)
	if err != nil {
		return err
	}
	node.OnExit(f.close)
	_, err = fmt.Fprintln(w, f.addr())
	return err
}

// dialAnnounced reads the floor's address from the parent and connects.
func dialAnnounced(r io.Reader, push, pull int) (*floorClient, error) {
	addr, err := (&lineReader{r: r}).line()
	if err != nil {
		return nil, fmt.Errorf("bench: no address of the floor: %w", err)
	}
	return dialFloor(addr, push, pull)
}

func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port, nil
}
