package bench

import (
	"cmp"
	"fmt"
	"io"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/urfave/cli/v2"

	"github.com/stepaf/stepaf-go/internal/affinity"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tools/internal/exit"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// defaults chooses how often to measure so that a run takes seconds, over RDMA also
// where that is emulated. From GPU to GPU it takes less.
func defaults(way course, bytes, iters, warmup int) (int, int) {
	switch {
	case iters != 0:
	case way.van == ibverbs:
		iters = min(max(1<<28/(bytes+1<<17), 100), 2000)
	case way.van == local && way.device != cpu:
		iters = min(max(1<<36/(bytes+1<<21), 200), 20000)
	default:
		iters = min(max(1<<31/(bytes+1<<17), 100), 20000)
	}
	return iters, cmp.Or(warmup, min(max(iters/10, 20), 1000))
}

// busy keeps every core that this process may use busy until stop is called.
func busy() (stop func()) {
	var all sync.WaitGroup
	var stopped atomic.Bool
	for core := range maxCores {
		if affinity.Check(core) != nil {
			continue
		}
		all.Go(func() {
			runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
			_ = affinity.Bind(core)
			for !stopped.Load() {
			}
		})
	}
	return func() {
		stopped.Store(true)
		all.Wait()
	}
}

const maxCores = 1024

// latencyRun is one call of bench latency.
type latencyRun struct {
	run
	way course
	at  place
}

func runLatency(c *cli.Context) error {
	at, err := newPlace(c, backend.GPUs)
	if err != nil {
		return err
	}
	if c.Bool("touch") && (at.gpus != nil || c.String("van") == ibverbs) {
		return exit.Usage("bench: --touch wants --van zmq or local and --device cpu: other floors do not touch their bytes")
	}
	if c.Bool("shared") && (at.gpus != nil || c.String("van") != local || c.Bool("touch")) {
		return exit.Usage("bench: --shared wants --van local and --device cpu, without --touch")
	}
	m := &latencyRun{at: at, way: at.course(c.String("van"))}
	all := courses[m.way]
	if all == nil || c.IsSet("push") || c.IsSet("pull") {
		all = []payload{{c.Int("push"), c.Int("pull")}}
	}
	if c.Bool("check") {
		if err := m.checkable(all); err != nil {
			return err
		}
	}
	if m.run, err = newRun(c); err != nil {
		return err
	}
	for i, p := range all {
		if i > 0 && !c.Bool("json") {
			fmt.Fprintln(c.App.Writer)
		}
		if err := m.payload(p); err != nil {
			return err
		}
	}
	return m.v.check(c)
}

// checkable refuses --check if there is no goal.
func (m *latencyRun) checkable(all []payload) error {
	if slices.ContainsFunc(all, func(p payload) bool { return m.way.goal(p).limit != 0 }) {
		return nil
	}
	if goals[m.way] != nil {
		return exit.Usage("bench: --check: there is no goal for --push %d --pull %d", all[0].push, all[0].pull)
	}
	return exit.Usage("bench: --check wants --van ibverbs, or --van local --device gpu: there are no goals for others")
}

// payload measures one pair of sizes and prints the result.
func (m *latencyRun) payload(p payload) error {
	c := m.c
	const most = 1<<31 - 1
	if p.push < 0 || p.pull < 0 || p.push > most || p.pull > most || p.push+p.pull == 0 {
		return exit.Usage("bench: --push %d --pull %d: want 0 to %d bytes each, not both 0", p.push, p.pull, most)
	}
	if m.at.gpus != nil && min(p.push, p.pull) < 8 {
		return exit.Usage("bench: --device gpu --push %d --pull %d: want at least 8 bytes each", p.push, p.pull)
	}
	iters, warmup := defaults(m.way, p.push+p.pull, c.Int("iters"), c.Int("warmup"))
	rounds := c.Int("rounds")
	if iters < 1 || warmup < 0 || rounds < 1 {
		return exit.Usage("bench: --iters %d, --warmup %d, --rounds %d: want 0 iters and 0 warmup, which are chosen by size, or more, and rounds above 0", c.Int("iters"), c.Int("warmup"), rounds)
	}
	lat := p.push
	if p.pull != lat {
		lat = 0
	}
	perf, err := m.rdma.perftest(c, lat, p.push+p.pull >= bulk)
	if err != nil {
		return err
	}
	floor := "TCP"
	switch {
	case perf != nil:
		floor = "verbs"
	case m.at.gpus != nil:
		floor = "GPU"
	}
	if c.Bool("load") {
		defer busy()()
	}
	rep, err := m.measure(p, iters, append([]int{warmup}, blocks(iters, rounds)[1:]...))
	if err != nil {
		return err
	}
	rep.Floor, rep.Load, rep.Touch, rep.Shared = floor, c.Bool("load"), c.Bool("touch"), c.Bool("shared")
	if perf != nil {
		perf.compare(rep, &m.v)
	} else {
		rep.judge(p, m.way.goal(p), &m.v)
	}
	return show(c, rep)
}

// measure measures one pair of sizes in blocks, of which the first is the warm-up. Tensors on GPUs are those of bench afd.
func (m *latencyRun) measure(p payload, iters int, blocks []int) (rep *latencyReport, err error) {
	spec, form := []any{"latency", p.push, p.pull, m.c.Bool("touch"), m.c.Bool("shared")}, formPushPull
	onGPUs := m.at.gpus != nil
	if onGPUs {
		spec = []any{"afd", p.push, p.pull, 1, 0}
	}
	if m.at.both {
		form = formHosts
	}
	cpu, err := runCluster(m.c, m.host, m.at, 1, 1, true, func(_ *group, servers, workers processes) error {
		ends := workers
		if onGPUs { // servers take part in exchanges
			ends = slices.Concat(workers, servers)
		}
		floor, bare, ours := workers.row(askFloor, "-", 0), workers.row(askBare, "-", 0), ends.row(askCalls, form, 0)
		rows := []*row{floor, ours}
		if m.way == (course{zmq, cpu}) {
			rows = []*row{floor, bare, ours}
		}
		if err := inTurns(blocks, nil, rows...); err != nil {
			return err
		}
		rep = newLatencyReport(m.way.van, m.at, p, iters, ours.ns[0], floor.ns[0], slices.Concat(bare.ns...))
		rep.WorkerPart = ours.cpu[0].Seconds()
		return nil
	}, spec...)
	if err == nil {
		rep.CPU = cpu
	}
	return rep, err
}

// childLatency is a node of bench latency with tensors in host memory.
func childLatency(c *cli.Context, node *postoffice.Node) error {
	var l latency
	if err := arguments(c, &l.push, &l.pull, &l.touch, &l.shared); err != nil {
		return err
	}
	x := floors{push: l.push, pull: l.pull, touch: l.touch, bare: libzmqAlone(node), clients: 1, pairs: 1}
	return childWithFloor(c, node, x, func(node *postoffice.Node) (end, error) {
		if node.Role() == van.Server {
			return newLatencyServer(l, node)
		}
		return newLatencyWorker(l, node)
	})
}

// latencyReport is the JSON line of bench latency.
type latencyReport struct {
	Van string `json:"van"`
	where
	PushBytes int `json:"push_bytes"`
	PullBytes int `json:"pull_bytes"`
	Iters     int `json:"iters"`
	quantiles
	comparison                    // with the floor
	Floor      string             `json:"floor"` // "TCP", "verbs" or "GPU"
	FloorP50   float64            `json:"floor_p50_us"`
	FloorP90   float64            `json:"floor_p90_us"`
	FloorP99   float64            `json:"floor_p99_us"`
	FloorMax   float64            `json:"floor_max_us"`
	Bare       *bareReport        `json:"zmq,omitempty"`
	Load       bool               `json:"load,omitempty"`   // whether every core was kept busy
	Touch      bool               `json:"touch,omitempty"`  // whether every byte was read and written between rounds
	Shared     bool               `json:"shared,omitempty"` // whether the server maps the worker's tensors
	CPU        map[string]float64 `json:"cpu_s"`
	WorkerPart float64            `json:"worker_measured_cpu_s"`
	Checked    bool               `json:"checked"`
	RDMA       *rdmaReport        `json:"rdma,omitempty"`
}

// where describes the place of the tensors.
type where struct {
	Device   string `json:"device"`             // "cpu" or "gpu"
	GPUs     []int  `json:"gpus,omitempty"`     // the worker's and the server's
	Prepared bool   `json:"prepared,omitempty"` // by both ends
	Note     string `json:"note,omitempty"`     // a reservation about the figures
}

// bareReport is a round trip of libzmq alone, and the ratio of a push_pull to it.
type bareReport struct {
	tail
	comparison
}

// where describes the place for a report.
func (p place) where() where { return where{deviceOf(p.gpus), p.gpus, p.both, p.note()} }

// newLatencyReport returns the report of the times of round trips, the floor, and, unless bareNS is nil, libzmq alone.
func newLatencyReport(van string, at place, p payload, iters int, ns, floorNS, bareNS []int64) *latencyReport {
	ours, floor := summarize(ns), summarize(floorNS)
	rep := &latencyReport{Van: van, where: at.where(), PushBytes: p.push, PullBytes: p.pull, Iters: iters,
		quantiles: ours, comparison: ours.to(floor), FloorP50: floor.P50, FloorP90: floor.P90, FloorP99: floor.P99, FloorMax: floor.Max, Checked: true}
	if bareNS != nil {
		q := summarize(bareNS)
		rep.Bare = &bareReport{q.tail, ours.to(q)}
	}
	return rep
}

func (r *latencyReport) print(w io.Writer) error {
	on, checked := "", "all answers checked"
	switch {
	case r.GPUs != nil:
		how := ""
		if r.Prepared {
			how = ", prepared by both ends"
		}
		on, checked = fmt.Sprintf(" (gpu:%d and gpu:%d%s)", r.GPUs[0], r.GPUs[1], how), "values checked around each block"
	case r.RDMA != nil:
		on = fmt.Sprintf(" (%s port %d, %s)", r.RDMA.Device, r.RDMA.Port, r.RDMA.Host)
	}
	fmt.Fprintf(w, "push_pull over %s%s, push %d bytes, pull %d bytes, %d round trips, %s: %t\n",
		r.Van, on, r.PushBytes, r.PullBytes, r.Iters, checked, r.Checked)
	if r.Load {
		fmt.Fprintln(w, "every core was kept busy by a loop")
	}
	if r.Touch {
		fmt.Fprintln(w, "every byte was read and written between rounds")
	}
	if r.Shared {
		fmt.Fprintln(w, "the server maps the worker's tensors: no bytes are copied, each end writes one word of each 4 KiB")
	}
	if r.Note != "" {
		fmt.Fprintf(w, "note: %s\n", r.Note)
	}
	fmt.Fprintf(w, "%-16s %10s %10s %10s %10s\n", "microseconds", "p50", "p90", "p99", "max")
	fmt.Fprintf(w, "%-16s %10.1f %10.1f %10.1f %10.1f\n", "push_pull", r.P50, r.P90, r.P99, r.Max)
	fmt.Fprintf(w, "%-16s %10.1f %10.1f %10.1f %10.1f\n", "floor ("+r.Floor+")", r.FloorP50, r.FloorP90, r.FloorP99, r.FloorMax)
	fmt.Fprintf(w, "%-16s %10.2f %10.2f %10.2f %10.2f\n", "ratio", r.RatioP50, r.P90/r.FloorP90, r.RatioP99, r.Max/r.FloorMax)
	if b := r.Bare; b != nil {
		fmt.Fprintf(w, "%-16s %10.1f %10.1f %10.1f %10.1f\n", "libzmq by itself", b.P50, b.P90, b.P99, b.Max)
		fmt.Fprintf(w, "%-16s %10.2f %10.2f %10.2f %10.2f\n", "ratio to that", b.RatioP50, r.P90/b.P90, b.RatioP99, r.Max/b.Max)
	}
	if r.Goal > 0 {
		fmt.Fprintf(w, "push_pull takes %.2f times the floor at p50%s\n", r.RatioP50, goal{limit: r.Goal}.text())
	}
	if r.RDMA != nil {
		r.RDMA.print(w, "push_pull")
	}
	fmt.Fprintf(w, "CPU seconds: scheduler %.2f, server %.2f, worker %.2f (start-up and floor included)\n",
		r.CPU["scheduler"], r.CPU["server"], r.CPU["worker"])
	return nil
}
