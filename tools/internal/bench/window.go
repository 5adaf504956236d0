package bench

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"slices"

	"github.com/urfave/cli/v2"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/af/window"
	"github.com/stepaf/stepaf-go/internal/clock"
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
			"by libzmq alone, one message each way; in shared memory by a copy and a flag each way, between two threads;\n" +
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

// windowReport is the JSON line of bench window. Quantiles are in microseconds.
type windowReport struct {
	Van      string    `json:"van"`
	Bytes    int       `json:"bytes"`
	Iters    int       `json:"iters"`
	Trip     quantiles `json:"round_trip"`
	OneWay   quantiles `json:"one_way"`
	Floor    quantiles `json:"floor_round_trip"`
	Of       string    `json:"floor"`
	RatioP50 float64   `json:"ratio_p50"` // of round trips
	RatioP99 float64   `json:"ratio_p99"`
	Goal     float64   `json:"goal_ratio_p50,omitempty"`
	Missed   bool      `json:"missed,omitempty"`
	Checked  bool      `json:"checked"`

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
	var v verdict
	if !c.Bool("json") && at.gpus != nil {
		fmt.Fprint(c.App.Writer, windowGPUHead)
	} else if !c.Bool("json") {
		fmt.Fprintf(c.App.Writer, "two ranks over %s, microseconds, data checked\n%9s %6s   %9s %9s %9s %9s   %9s %9s   %9s %9s %6s goal\n", over,
			"bytes", "iters", "trip p50", "p90", "p99", "max", "one way", "p99", "floor p50", "p99", "ratio")
	}
	if _, err = runCluster(c, host, at, 1, 2, false, func(_, workers processes) error {
		for _, size := range sizes {
			var r interface {
				judge(v *verdict)
				shown
			}
			var err error
			if at.gpus != nil {
				r, err = measureWindowGPU(c, workers, at, size)
			} else {
				r, err = measureWindow(c, workers, over, rdma, size)
			}
			if err != nil {
				return err
			}
			r.judge(&v)
			if err = show(c, r); err != nil {
				return err
			}
		}
		return nil
	}, "window", slices.Max(sizes)); err != nil {
		return err
	}
	return v.check(c)
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

// measureWindow measures one size, in blocks. rdma is nil unless the van is ibverbs.
func measureWindow(c *cli.Context, workers processes, over string, rdma *rdmaRun, size int) (*windowReport, error) {
	moved := 1 << 30
	if over == ibverbs { // the device may be emulated
		moved = 1 << 28
	}
	iters := cmp.Or(c.Int("iters"), min(max(moved/(size+1<<18), 100), 4000))
	r := &windowReport{Van: over, Bytes: size, Iters: iters, Of: "copy and flag", Checked: true}
	var figures perfFigures
	var server *floorServer
	var floor baseline
	var err error
	switch over {
	case local:
		if server, err = newSharedServer(1, 1, size, size); err == nil {
			defer server.close()
			floor, err = dialShared([]string{server.addr}, 0, 1, size, size)
		}
	case ibverbs:
		r.Of = "verbs"
		if figures, err = rdma.perftest(c, size, false); err != nil {
			return nil, err
		}
		if server, err = newVerbsServer(rdma.at.Host, size, size); err == nil {
			defer server.close()
			floor, err = dialVerbsFloor(rdma.at.Host, server.addr, size, size)
		}
	case zmq:
		r.Of = "libzmq"
		if server, err = newZMQServer(size, false); err == nil {
			defer server.close()
			floor, err = dialZMQ(server.addr, size, size, false)
		}
	}
	if err != nil {
		return nil, err
	}
	defer floor.close()
	var trips, ways, floors []int64
	for block, n := range blocks(iters, c.Int("rounds")) {
		fl, err := floor.measure(n)
		if err != nil {
			return nil, err
		}
		got, err := workers.askEach(fmt.Sprint(size, n))
		if err != nil {
			return nil, err
		}
		if block > 0 {
			trips, ways, floors = append(trips, got[0].NS...), append(ways, got[1].NS...), append(floors, fl...)
		}
	}
	r.Trip, r.OneWay, r.Floor = summarize(trips), summarize(ways), summarize(floors)
	r.RatioP50, r.RatioP99 = r.Trip.P50/r.Floor.P50, r.Trip.P99/r.Floor.P99
	if rdma != nil {
		r.RDMA = rdma.beside(figures, r.OneWay.P50)
	}
	return r, nil
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
	if onGPU(node) {
		err = answerOnGPU(c, w, comm, node.Backend(), most)
	} else {
		var size, n int
		err = answerLines(c, func() (*answer, error) { return times(putAndWait(c.Context, w, size, n)) }, &size, &n)
	}
	if err != nil {
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

// putAndWait makes n round trips. Rank 0 returns the nanoseconds of each, rank 1 those of the way to it.
func putAndWait(ctx context.Context, w *window.Window, size, n int) ([]int64, error) {
	self, le := w.Rank(), binary.LittleEndian
	b := make([]byte, size)
	fill(b)
	t, err := af.FromBytes(b, af.Uint8, int64(size))
	if err != nil {
		return nil, err
	}
	want, got := bytes.Clone(b), w.Bytes()[:size]
	ns := make([]int64, n)
	put := func(i int) error { // the data begins with the time and the number
		le.PutUint64(b[size-8:], uint64(i))
		le.PutUint64(b, clock.Now())
		return w.PutSignal(ctx, 1-self, 0, t, 0)
	}
	for i := range ns {
		start := clock.Now()
		if self == 0 {
			err = put(i)
		}
		if err == nil {
			err = w.WaitSignal(ctx, 1-self, 0)
		}
		now := clock.Now()
		if err != nil {
			return nil, err
		}
		if self == 1 {
			start = le.Uint64(got)
		}
		ns[i] = int64(now - start)
		last := i == n-1
		if k := le.Uint64(got[size-8:]); k != uint64(i) || last && !bytes.Equal(got[8:size-8], want[8:size-8]) {
			return nil, fmt.Errorf("PutSignal %d of %d bytes: wrong data, of number %d", i, size, k)
		}
		if self == 1 {
			if err := put(i); err != nil {
				return nil, err
			}
		}
		if last {
			clear(got)
		}
		if err := w.Flush(ctx, 1-self); err != nil { // before the source is overwritten
			return nil, err
		}
	}
	return ns, nil
}
