package bench

import (
	"cmp"
	"fmt"
	"io"
	"slices"

	"github.com/urfave/cli/v2"

	"github.com/stepaf/stepaf-go/af/window"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tools/internal/exit"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// windowGoals are the goals by van and size: ratios of a round trip to the floor's at p50; over RDMA of one way to
// ib_write_lat.
var windowGoals = map[string]map[int]float64{
	zmq:     {1 << 10: 3, 1 << 20: 3},
	local:   {1 << 20: 4},
	ibverbs: {1 << 10: 3},
}

func windowCommand(common []cli.Flag) *cli.Command {
	return &cli.Command{
		Name:      "window",
		Usage:     "PutSignal and WaitSignal between two processes",
		UsageText: "stepaf bench window --van local [--size 1024] [--check]",
		Description: "    stepaf bench window --van local --size 1024\n\n" +
			"Two workers put the same bytes to each other in turn: each waits for the other's signal before it puts. The first\n" +
			"worker times the round trip. One way is the time from before its PutSignal to the end of the other's WaitSignal, by\n" +
			"the clock of the host. The floor is a round trip of the same bytes in the same run, in alternating blocks: over zmq\n" +
			"by libzmq alone, one message each way; in shared memory by a copy and a flag each way;\n" +
			"over RDMA by a write with immediate each way. Over RDMA, perftest's ib_write_lat on the same port, measured just\n" +
			"before, is compared with one way. Outside the timed part, the first and last bytes of all data are checked, and\n" +
			"every byte of a block's last data.\n\n" +
			"With --device gpu the windows are device memory, each on a GPU of its own. Measured are calls without a stream, and\n" +
			"calls in streams: one way then ends when the CPU sees the end of the waiting stream. \"ahead\" is one way measured in\n" +
			"blocks whose round trips are all queued at once. The floor is half a round trip of a copy into the other process's\n" +
			"memory and a flag for its CPU.",
		Flags: append([]cli.Flag{
			&cli.IntSliceFlag{Name: "size", Value: cli.NewIntSlice(1<<10, 64<<10, 1<<20), Usage: "bytes each way, at least 16 (default with --device gpu: 1024, 917504, 1835008, 16777216)"},
			&cli.StringFlag{Name: "device", Value: cpu, Usage: "device of the windows: cpu or gpu"},
			&cli.StringFlag{Name: "gpus", Usage: "with --device gpu: the GPUs of the ranks (default: 0,1, or 0,0 if there is only one)"},
			&cli.IntFlag{Name: "iters", Usage: "measured round trips; 0 chooses by size"},
			&cli.BoolFlag{Name: "check", Usage: "exit status 1 if a goal is missed"},
		}, common...),
		Action: runWindow,
	}
}

// windowFigures are the figures of a window in any memory. Quantiles are in microseconds.
type windowFigures struct {
	Van      string    `json:"van"`
	Bytes    int       `json:"bytes"`
	Iters    int       `json:"iters"`
	Trip     quantiles `json:"round_trip"`
	OneWay   quantiles `json:"one_way"`
	RatioP50 float64   `json:"ratio_p50"` // to the floor
	RatioP99 float64   `json:"ratio_p99"`
	Goal     float64   `json:"goal_ratio_p50,omitempty"`
	Missed   bool      `json:"missed,omitempty"`
	Checked  bool      `json:"checked"`
}

// windowReport is the JSON line of bench window. The ratios are those of round trips.
type windowReport struct {
	windowFigures
	Floor quantiles `json:"floor_round_trip"`
	Of    string    `json:"floor"`

	RDMA *rdmaReport `json:"rdma,omitempty"` // compared with one way
}

func (r *windowReport) String() string { return fmt.Sprintf("PutSignal of %d bytes", r.Bytes) }

func runWindow(c *cli.Context) error {
	over, sizes := c.String("van"), c.IntSlice("size")
	if windowGoals[over] == nil {
		return exit.Usage("bench window: --van %s: want %s, %s or %s", over, local, zmq, ibverbs)
	}
	if slices.Min(sizes) < 16 || slices.Max(sizes) > 1<<30 || c.Int("iters") < 0 || c.Int("rounds") < 1 {
		return exit.Usage("bench window: --size %v, --iters %d, --rounds %d: want sizes of 16 bytes to 1 GiB, iters of 0, which are chosen by size, or more, and rounds above 0",
			sizes, c.Int("iters"), c.Int("rounds"))
	}
	at, err := newPlace(c, backend.GPUs)
	if err != nil {
		return err
	}
	if at.gpus != nil && !c.IsSet("size") {
		sizes = windowGPUSizes
	}
	rdma, host, err := rdmaOf(c)
	if err != nil {
		return err
	}
	m := windowRun{c, at, rdma, verdict{}}
	if !c.Bool("json") && at.gpus != nil {
		fmt.Fprint(c.App.Writer, windowGPUHead)
	} else if !c.Bool("json") {
		fmt.Fprintf(c.App.Writer, "two ranks over %s, microseconds, data checked\n%9s %6s   %9s %9s %9s %9s   %9s %9s   %9s %9s %6s goal\n", over,
			"bytes", "iters", "trip p50", "p90", "p99", "max", "one way", "p99", "floor p50", "p99", "ratio")
	}
	if _, err = runCluster(c, host, at, 1, 2, false, func(_, workers processes) error {
		for _, size := range sizes {
			if err := m.measure(workers, size); err != nil {
				return err
			}
		}
		return nil
	}, "window", slices.Max(sizes)); err != nil {
		return err
	}
	return m.v.check(c)
}

// judge compares with the goal, and adds a missed goal to v.
func (r *windowReport) judge(v *verdict) {
	limit := windowGoals[r.Van][r.Bytes]
	if r.RDMA != nil {
		r.RDMA.judge(r, goal{of: ibWriteLat, limit: limit}, v)
		return
	}
	r.Goal = limit
	r.Missed = v.judge(r, goal{of: ourFloor, limit: limit}, r.RatioP50)
}

// windowRun is one run of bench window.
type windowRun struct {
	c    *cli.Context
	at   place
	rdma *rdmaRun // nil unless over RDMA
	v    verdict
}

// measure measures one size, in blocks, and prints the report.
func (m *windowRun) measure(workers processes, size int) error {
	over, onGPUs := m.c.String("van"), m.at.gpus != nil
	iters := min(max(1<<30/(size+1<<18), 100), 4000)
	switch {
	case onGPUs:
		iters = min(max(8<<30/(size+1<<20), 100), 4000)
	case over == ibverbs: // the device may be emulated
		iters = min(max(1<<28/(size+1<<18), 100), 4000)
	}
	iters = cmp.Or(m.c.Int("iters"), iters)
	perf, err := m.rdma.perftest(m.c, size, false)
	if err != nil {
		return err
	}
	of := func(what string) *row { return workers.row(what, "-", size) }
	floor, trips, streams, ahead := of(askFloor), of(askTrips), of(askStreams), of(askAhead)
	rows := []*row{floor, trips}
	if onGPUs {
		rows = append(rows, streams, ahead)
	}
	if err := inTurns(blocks(iters, m.c.Int("rounds")), nil, rows...); err != nil {
		return err
	}
	f := windowFigures{Van: over, Bytes: size, Iters: iters, Trip: summarize(trips.ns[0]), OneWay: summarize(trips.ways()), Checked: true}
	if onGPUs {
		r := newWindowGPUReport(f, m.at, floor.ns[0], streams.ways(), ahead.ns[0])
		r.judge(&m.v)
		return show(m.c, r)
	}
	r := &windowReport{windowFigures: f, Floor: summarize(floor.ns[0]), Of: map[string]string{local: "copy and flag", ibverbs: "verbs", zmq: "libzmq"}[over], RDMA: perf}
	r.RatioP50, r.RatioP99 = r.Trip.P50/r.Floor.P50, r.Trip.P99/r.Floor.P99
	r.RDMA.compareTime(r.OneWay.P50)
	r.judge(&m.v)
	return show(m.c, r)
}

// ways returns the nanoseconds of each way from the first rank to the second.
func (r *row) ways() []int64 {
	ns := slices.Clone(r.at[1])
	for i := range ns {
		ns[i] -= r.at[0][i]
	}
	return ns
}

func (r *windowReport) print(w io.Writer) error {
	_, err := fmt.Fprintf(w, "%9d %6d   %9.1f %9.1f %9.1f %9.1f   %9.1f %9.1f   %9.1f %9.1f %6.2f %s (%s)\n", r.Bytes, r.Iters,
		r.Trip.P50, r.Trip.P90, r.Trip.P99, r.Trip.Max, r.OneWay.P50, r.OneWay.P99, r.Floor.P50, r.Floor.P99,
		r.RatioP50, goalText("-", r.Goal, r.Missed), r.Of)
	if r.RDMA != nil {
		r.RDMA.print(w, "one way")
	}
	return err
}

// childWindow is a node of bench window. A worker makes the requested round trips.
func childWindow(c *cli.Context, node *postoffice.Node) error {
	var most int
	if err := arguments(c, &most); err != nil || node.Role() != van.Worker {
		return err
	}
	comm, err := joinWorkers(c, node)
	if err != nil {
		return err
	}
	w, err := window.Open(c.Context, comm, window.Options{Size: most, Signals: 1, Device: onGPU(node)})
	if err != nil {
		return err
	}
	t, err := newTripper(node, w, comm, most)
	if err != nil {
		return err
	}
	if err := answerLines(c, func(what, _ string, size, n int) (*answer, error) { return t.do(c.Context, what, size, n) }); err != nil {
		return err
	}
	if err := t.endFloor(c.Context); err != nil {
		return err
	}
	if err := comm.Barrier(c.Context); err != nil {
		return err
	}
	if err := w.Close(); err != nil {
		return err
	}
	return comm.Shutdown(c.Context)
}
