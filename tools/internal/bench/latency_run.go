package bench

import (
	"cmp"
	"fmt"
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
	c    *cli.Context
	way  course
	at   place
	rdma *rdmaRun // nil unless over RDMA
	host string   // of the processes
	v    verdict
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
	m := &latencyRun{c: c, at: at, way: at.course(c.String("van"))}
	all := courses[m.way]
	if all == nil || c.IsSet("push") || c.IsSet("pull") {
		all = []payload{{c.Int("push"), c.Int("pull")}}
	}
	if c.Bool("check") {
		if err := m.checkable(all); err != nil {
			return err
		}
	}
	if m.rdma, m.host, err = rdmaOf(c); err != nil {
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
