package bench

import (
	"cmp"
	"fmt"
	"io"
	"slices"

	"github.com/urfave/cli/v2"

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
	Van        string    `json:"van"`
	Bytes      int       `json:"bytes"`
	Iters      int       `json:"iters"`
	Trip       quantiles `json:"round_trip"`
	OneWay     quantiles `json:"one_way"`
	comparison           // with the floor
	Checked    bool      `json:"checked"`
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
	common, err := newRun(c)
	if err != nil {
		return err
	}
	m := windowRun{common, at}
	if !c.Bool("json") && at.gpus != nil {
		fmt.Fprint(c.App.Writer, windowGPUHead)
	} else if !c.Bool("json") {
		fmt.Fprintf(c.App.Writer, "two ranks over %s, microseconds, data checked\n%9s %6s   %9s %9s %9s %9s   %9s %9s   %9s %9s %6s goal\n", over,
			"bytes", "iters", "trip p50", "p90", "p99", "max", "one way", "p99", "floor p50", "p99", "ratio")
	}
	for _, size := range sizes {
		if err := m.measure(size); err != nil {
			return err
		}
	}
	return m.v.check(c)
}

// compareGoal compares with the goal, and adds a missed goal to v.
func (r *windowReport) compareGoal(v *verdict) {
	limit := windowGoals[r.Van][r.Bytes]
	if r.RDMA != nil {
		r.RDMA.judge(r, goal{of: ibWriteLat, limit: limit}, v)
		return
	}
	r.judge(r, goal{of: ourFloor, limit: limit}, v)
}

// windowRun is one run of bench window.
type windowRun struct {
	run
	at place
}

// measure measures one size, in blocks, and prints the report.
func (m *windowRun) measure(size int) error {
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
	var floor, trips, streams, ahead *row
	if _, err := runCluster(m.c, m.host, m.at, 1, 2, true, func(_ *group, _, workers processes) error {
		base := askFloor
		if over == zmq && !onGPUs {
			base = askBare
		}
		floor, trips = workers[:1].row(base, "-", 0), workers.row(askTrips, "-", 0)
		streams, ahead = workers.row(askStreams, "-", 0), workers.row(askAhead, "-", 0)
		rows := []*row{floor, trips}
		if onGPUs {
			rows = append(rows, streams, ahead)
		}
		if err := inTurns(blocks(iters, m.c.Int("rounds")), nil, rows...); err != nil {
			return err
		}
		_, err := workers.askEach(askEnd + " - 0 0")
		return err
	}, "window", size); err != nil {
		return err
	}
	f := windowFigures{Van: over, Bytes: size, Iters: iters, Trip: summarize(trips.ns[0]), OneWay: summarize(trips.ways()), Checked: true}
	if onGPUs {
		r := newWindowGPUReport(f, m.at, floor.ns[0], streams.ways(), ahead.ns[0])
		r.judge(r, goal{of: ourFloor, limit: windowGPUGoals[size]}, &m.v)
		return show(m.c, r)
	}
	r := &windowReport{windowFigures: f, Floor: summarize(floor.ns[0]), Of: map[string]string{local: "copy and flag", ibverbs: "verbs", zmq: "libzmq"}[over], RDMA: perf}
	r.comparison = r.Trip.to(r.Floor)
	r.RDMA.compareTime(r.OneWay.P50)
	r.compareGoal(&m.v)
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
		r.RatioP50, r.text("-"), r.Of)
	if r.RDMA != nil {
		r.RDMA.print(w, "one way")
	}
	return err
}

// Windows on GPUs. One way is the time from before the PutSignal until the CPU of the other rank sees the data, by the
// clock of the host: its WaitSignal returns, or, in streams, it sees the end of the waiting stream. The floor is that
// of bench latency: a copy into the other process's memory and then a flag for its CPU; one way is half a round trip.
// Ahead is the average of one way in streams when both ranks have queued all round trips of a block, so that no CPU
// takes part.

// windowGPUGoals are ratios of one way to the floor's, at p50, for the attention payload in both directions.
var windowGPUGoals = map[int]float64{917504: 1.2, 1835008: 1.2}

var windowGPUSizes = []int{1 << 10, 917504, 1835008, 16 << 20}

// windowGPUReport is the JSON line of bench window --device gpu. The ratios are those of one way.
type windowGPUReport struct {
	windowFigures
	where
	Streams quantiles `json:"one_way_streams"`
	Ahead   quantiles `json:"one_way_ahead"` // of blocks
	Floor   quantiles `json:"floor_one_way"`
}

func (r *windowGPUReport) String() string {
	return fmt.Sprintf("PutSignal of %d bytes of a GPU", r.Bytes)
}

// newWindowGPUReport adds to f the floor's round trips, the ways in streams, and the averages of blocks ahead.
func newWindowGPUReport(f windowFigures, at place, floor, streams, ahead []int64) *windowGPUReport {
	r := &windowGPUReport{windowFigures: f, where: at.where(), Streams: summarize(streams), Ahead: summarize(ahead)}
	for i := range floor {
		floor[i] /= 2
	}
	r.Floor = summarize(floor)
	r.comparison = r.OneWay.to(r.Floor)
	return r
}

const windowGPUHead = "two ranks, one GPU each, microseconds, data checked\n   bytes   iters     one way      p99       trip      p99   streams      p99   ahead    floor p50      p99  ratio goal\n"

func (r *windowGPUReport) print(w io.Writer) error {
	_, err := fmt.Fprintf(w, "%9d %6d   %9.1f %9.1f  %9.1f %9.1f %9.1f %9.1f %7.1f   %9.1f %9.1f %6.2f %s\n", r.Bytes, r.Iters,
		r.OneWay.P50, r.OneWay.P99, r.Trip.P50, r.Trip.P99, r.Streams.P50, r.Streams.P99, r.Ahead.P50, r.Floor.P50, r.Floor.P99,
		r.RatioP50, r.text("-"))
	if r.Note != "" {
		fmt.Fprintln(w, "note:", r.Note)
	}
	return err
}

// childWindow is a node of bench window. The workers have the windows; the server has the end of the floor.
func childWindow(c *cli.Context, node *postoffice.Node) error {
	var size int
	if err := arguments(c, &size); err != nil {
		return err
	}
	x := floors{push: size, pull: size, shared: node.Config().EnableIPC == 1, bare: libzmqAlone(node), clients: 1, pairs: 1}
	return childWithFloor(c, node, x, func(node *postoffice.Node) (end, error) {
		if node.Role() == van.Server {
			return nil, nil
		}
		comm, err := joinWorkers(c, node)
		if err != nil {
			return nil, err
		}
		return newTripper(c.Context, node, comm, size)
	})
}
