package bench

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"io"
	"maps"
	"math"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/postoffice/clustertest"
	"github.com/stepaf/stepaf-go/tests/fakeverbs"
	"github.com/stepaf/stepaf-go/tests/inproc"
	"github.com/stepaf/stepaf-go/tools/internal/exit"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/rdma"
)

// The cost of the software alone: a cluster in this process, on one core, over transports without a network.

// softwareVans are the transports of bench software, the values of --van.
var softwareVans = []string{"null", "rdma"}

func softwareCommand() *cli.Command {
	return &cli.Command{
		Name:      "software",
		Usage:     "cost of a push_pull without a network: time, allocations and lock operations",
		UsageText: "stepaf bench software [--van null|rdma] [--push BYTES --pull BYTES] [--iters N]",
		Description: "    stepaf bench software --van null --push 1024 --pull 1024\n\n" +
			"Runs a scheduler, a server and a worker in this process on one core (GOMAXPROCS=1), and times push_pulls of one\n" +
			"tensor each way, one at a time. The result is the work of both nodes, to which the network adds its latency.\n\n" +
			"null passes each message by reference and does not move the bytes of answers: it measures the layers above a\n" +
			"transport. rdma is van/rdma on simulated devices in memory, which check and copy the data: it also measures the\n" +
			"transport, and the simulated NICs. Its answers are checked.\n\n" +
			"Without sizes it measures 1 KiB each way and one layer of a large model. Times are those of the calling goroutine,\n" +
			"CPU is that of the process. Lock operations are those of sync.Mutex and sync.RWMutex; only a build of\n" +
			"tools/count_locks.sh counts them.",
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "van", Usage: "null or rdma (default: both)"},
			&cli.IntFlag{Name: "push", Usage: "bytes from worker to server"},
			&cli.IntFlag{Name: "pull", Usage: "bytes from server to worker"},
			&cli.IntFlag{Name: "iters", Usage: "measured round trips; 0 chooses by size"},
			&cli.IntFlag{Name: "warmup", Usage: "untimed round trips before; 0 chooses by size"},
			&cli.DurationFlag{Name: "timeout", Value: 2 * time.Minute, Usage: "time limit"},
			&cli.BoolFlag{Name: "json", Usage: "print one line of JSON for each measurement instead of a table"},
		},
		Action: runSoftware,
	}
}

// softwareReport is the JSON line of bench software.
type softwareReport struct {
	Van       string `json:"van"` // "null" or "rdma"
	PushBytes int    `json:"push_bytes"`
	PullBytes int    `json:"pull_bytes"`
	Iters     int    `json:"iters"`

	P50  int64 `json:"p50_ns"`
	P90  int64 `json:"p90_ns"`
	P99  int64 `json:"p99_ns"`
	Max  int64 `json:"max_ns"`
	Mean int64 `json:"mean_ns"`
	CPU  int64 `json:"cpu_ns"` // of the process

	// Per push_pull.
	Allocs     float64 `json:"allocs"`
	AllocBytes float64 `json:"alloc_bytes"`
	// Locks is the number of lock operations by package. It is nil in a build that does not count. Simulated hardware
	// is not included.
	Locks map[string]float64 `json:"locks,omitempty"`

	Checked bool `json:"checked"` // the bytes of answers were checked
}

func runSoftware(c *cli.Context) error {
	vans := softwareVans
	if v := c.String("van"); v != "" {
		if !slices.Contains(softwareVans, v) {
			return exit.Usage("bench software: --van %s: want null or rdma", v)
		}
		vans = []string{v}
	}
	sizes := []payload{both(1024), attention}
	if c.IsSet("push") || c.IsSet("pull") {
		sizes = []payload{{c.Int("push"), c.Int("pull")}}
	}
	for _, p := range sizes {
		if p.push < 1 || p.pull < 1 || p.push > math.MaxInt32 || p.pull > math.MaxInt32 {
			return exit.Usage("bench software: --push %d --pull %d: want 1 to %d bytes each", p.push, p.pull, math.MaxInt32)
		}
	}
	if c.Int("iters") < 0 || c.Int("warmup") < 0 {
		return exit.Usage("bench software: --iters and --warmup want positive numbers")
	}
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	ctx, cancel := context.WithTimeout(c.Context, c.Duration("timeout"))
	defer cancel()
	if !c.Bool("json") {
		fmt.Fprintln(c.App.Writer, "a push_pull without a wire, worker and server together on one core")
		fmt.Fprintf(c.App.Writer, "%-5s %19s %7s %9s %9s %9s %9s %9s %7s %7s\n", "van", "push / pull bytes", "iters",
			"p50 ns", "p90 ns", "p99 ns", "max ns", "CPU ns", "allocs", "locks")
	}
	for _, name := range vans {
		for _, p := range sizes {
			r, err := measureSoftware(ctx, name, p, c.Int("iters"), c.Int("warmup"))
			if err != nil {
				return fmt.Errorf("bench software: %s: %w", name, err)
			}
			if err := show(c, r); err != nil {
				return err
			}
		}
	}
	return nil
}

func (r *softwareReport) print(w io.Writer) error {
	locks := "-"
	if r.Locks != nil {
		sum := 0.0
		for _, n := range r.Locks {
			sum += n
		}
		locks = fmt.Sprintf("%.1f", sum)
	}
	fmt.Fprintf(w, "%-5s %19s %7d %9d %9d %9d %9d %9d %7.2f %7s\n", r.Van, fmt.Sprintf("%d / %d", r.PushBytes, r.PullBytes), r.Iters,
		r.P50, r.P90, r.P99, r.Max, r.CPU, r.Allocs, locks)
	for _, name := range slices.SortedFunc(maps.Keys(r.Locks), func(a, b string) int { return cmp.Compare(r.Locks[b], r.Locks[a]) }) {
		if r.Locks[name] >= 0.05 {
			fmt.Fprintf(w, "%12.1f locks in %s\n", r.Locks[name], name)
		}
	}
	return nil
}

// measureSoftware measures one pair of sizes over one transport.
func measureSoftware(ctx context.Context, name string, p payload, iters, warmup int) (*softwareReport, error) {
	factory, end := softwareNet(name)
	defer end()
	c, err := clustertest.New(ctx, clustertest.Options{Node: func(o *postoffice.Options) {
		o.Van, o.Config.Backend = factory(o.Config.Role), "CPU"
		if name == "rdma" {
			// Simulated devices have addresses that this host does not have.
			o.Config.RootURI, o.Config.NodeHost, o.Config.Kubernetes = deviceAddr(roles[0]).String(), "", true
		}
	}})
	if err != nil {
		return nil, err
	}
	defer c.Close()
	s, err := newSoftware(c.Server(0), c.Worker(0), p)
	if err != nil {
		return nil, err
	}
	defer s.worker.Close()
	n, warm := defaults(course{zmq, cpu}, p.push+p.pull, iters, warmup)
	r, err := s.measure(ctx, n, warm, name == "rdma")
	if err != nil {
		return nil, err
	}
	r.Van, r.PushBytes, r.PullBytes = name, p.push, p.pull
	return r, c.Run(ctx, func(context.Context, *postoffice.Node) error { return nil })
}

// softwareNet creates the simulated network.
func softwareNet(name string) (factory func(role string) van.Factory, end func()) {
	if name == "null" {
		n := inproc.NewNull()
		return func(string) van.Factory { return n.Factory }, n.Close
	}
	n := fakeverbs.NewNet()
	return func(role string) van.Factory {
		at := deviceAddr(role)
		stack := n.Stack(at)
		return func(o van.Options) (van.Van, error) { return placedVan{rdma.NewOn(stack, o), at.String()}, nil }
	}, n.Close
}

// deviceAddr returns the address of a role's simulated device.
func deviceAddr(role string) netip.Addr {
	return netip.AddrFrom4([4]byte{10, 77, 0, byte(slices.Index(roles, role) + 1)})
}

// placedVan is a van with an address that no interface of this host has.
type placedVan struct {
	van.Van
	host string
}

// Unwrap returns the wrapped van, for van.As.
func (v placedVan) Unwrap() van.Van { return v.Van }

// ChooseHost implements van.HostChooser.
func (v placedVan) ChooseHost() (host, why string, err error) { return v.host, "device in memory", nil }

// software is a worker, a server, and the tensors of a push_pull.
type software struct {
	worker             *af.Worker
	server             cluster.App
	push, pull, answer []af.KeyTensor
	answered           atomic.Bool
	isAnswered         func() bool
}

// once makes a push_pull. Its goroutine runs both sides, so that no time is spent on waking another one.
func (s *software) once(ctx context.Context) error {
	s.answered.Store(false)
	call, err := s.worker.PushPull(s.push, [][]af.KeyTensor{s.pull})
	if err != nil {
		return err
	}
	s.server.Poll(s.isAnswered)
	return call.Wait(ctx)
}

// newSoftware creates the worker, and a server that answers with the tensor answer.
func newSoftware(server, worker *postoffice.Node, p payload) (*software, error) {
	s := &software{server: (*cluster.Node)(server).App()}
	s.isAnswered = s.answered.Load
	for _, x := range []struct {
		to   *[]af.KeyTensor
		key  uint64
		size int
	}{{&s.push, timedKey, p.push}, {&s.pull, timedKey + 1, p.pull}, {&s.answer, timedKey + 1, p.pull}} {
		t, err := newTensor(worker.Backend(), x.key, x.size)
		if err != nil {
			return nil, err
		}
		fill(t.Val.Bytes())
		*x.to = []af.KeyTensor{t}
	}
	srv, err := af.NewServer(server, af.ServerOptions{})
	if err != nil {
		return nil, err
	}
	if err := srv.Handle(func(b af.Batch) {
		if err := b.Respond(s.answer); err != nil {
			server.Log().Error("respond", "err", err)
		}
		s.answered.Store(true)
	}); err != nil {
		return nil, err
	}
	s.worker, err = af.NewWorker(worker, af.WorkerOptions{})
	return s, err
}

// measure times push_pulls. With check, the last answer is compared with the server's tensor.
func (s *software) measure(ctx context.Context, iters, warmup int, check bool) (*softwareReport, error) {
	for range warmup {
		if err := s.once(ctx); err != nil {
			return nil, err
		}
	}
	got := s.pull[0].Val.Bytes()
	if check {
		clear(got)
	}
	ns := make([]int64, iters)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	locks, used := countLocks(), cpuTime()
	for k := range ns {
		start := clock.Now()
		if err := s.once(ctx); err != nil {
			return nil, err
		}
		ns[k] = int64(clock.Now() - start)
	}
	used, taken := cpuTime()-used, countLocks()
	runtime.ReadMemStats(&after)
	if check && !bytes.Equal(got, s.answer[0].Val.Bytes()) {
		return nil, fmt.Errorf("the answer of %d bytes differs from the server's tensor", len(got))
	}
	q, n := summarize(ns), float64(iters)
	r := &softwareReport{Iters: iters, P50: int64(q.P50 * 1e3), P90: int64(q.P90 * 1e3), P99: int64(q.P99 * 1e3), Max: int64(q.Max * 1e3),
		Mean: int64(q.Mean * 1e3), CPU: int64(used) / int64(iters), Allocs: float64(after.Mallocs-before.Mallocs) / n,
		AllocBytes: float64(after.TotalAlloc-before.TotalAlloc) / n, Checked: check}
	for name, count := range taken {
		if strings.Contains(name, "/tests/") { // the simulated hardware
			continue
		}
		if r.Locks == nil {
			r.Locks = map[string]float64{}
		}
		if d := count - locks[name]; d > 0 {
			r.Locks[strings.TrimPrefix(name, "github.com/stepaf/stepaf-go/")] = float64(d) / n
		}
	}
	return r, nil
}
