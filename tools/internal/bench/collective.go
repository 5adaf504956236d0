package bench

import (
	"cmp"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/af/collective"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tools/internal/exit"
	"github.com/stepaf/stepaf-go/van"
)

// glooProgram is one rank of gloo, with which collectives are compared.
//
//go:embed gloo.py
var glooProgram string

// exchange is one collective call of all ranks.
type exchange struct {
	op   string
	size int // in bytes: of the part for one other rank, or of the whole tensor
}

func (e exchange) String() string { return fmt.Sprintf("%s of %d bytes", e.op, e.size) }

// The calls that --op accepts.
const (
	allGather     = "AllGather"
	allToAll      = "AllToAll"
	broadcast     = "Broadcast"
	reduceScatter = "ReduceScatter"
	allReduce     = "AllReduce"
	barrier       = "Barrier"
)

var exchangeOps = []string{allGather, allToAll, broadcast, reduceScatter, allReduce, barrier}

// exchanges are the calls measured over a van by default.
var exchanges = map[string][]exchange{
	local: {{allGather, 1 << 10}, {allGather, 1 << 20}, {allGather, 16 << 20}, {allReduce, 4 << 20},
		{allToAll, 1 << 20}, {broadcast, 1 << 20}, {reduceScatter, 1 << 20}, {barrier, 0}},
	zmq: {{allGather, 1 << 10}, {allGather, 1 << 20}, {allReduce, 4 << 20},
		{allToAll, 1 << 20}, {broadcast, 1 << 20}, {reduceScatter, 1 << 20}, {barrier, 0}},
	ibverbs: {{allGather, 1 << 10}, {allGather, 64 << 10}, {barrier, 0}},
}

// exchangeGoals are the goals of some calls: ratios to gloo; over RDMA of 2 ranks to ib_write_lat.
var exchangeGoals = map[string]map[exchange]float64{
	local:   {{allGather, 1 << 10}: 0.3, {allGather, 1 << 20}: 0.5, {allGather, 16 << 20}: 0.7, {allReduce, 4 << 20}: 1},
	zmq:     {{allGather, 1 << 10}: 2, {allGather, 1 << 20}: 1.2},
	ibverbs: {{allGather, 64 << 10}: 5},
}

func collectiveCommand(common []cli.Flag) *cli.Command {
	return &cli.Command{
		Name:      "collective",
		Usage:     "AllGather, AllReduce and other collectives between processes, compared with PyTorch's gloo",
		UsageText: "stepaf bench collective --van local [--op AllGather --size 1024] [--check]",
		Description: "    stepaf bench collective --van local --op AllReduce --size 1048576 --ranks 2\n\n" +
			"Starts the ranks of one communicator as workers, and if PyTorch is installed, the same number of ranks of\n" +
			"torch.distributed with gloo. Their blocks alternate, with blocks of the floor: a copy, by one thread, of the bytes\n" +
			"that one rank receives. The time of a call is that of the slowest rank; calls follow each other without a pause.\n" +
			"Outside the timed part, every byte of the last result of a block is checked, and the first element of each part\n" +
			"of every result. Over RDMA, perftest's ib_write_lat for the same size on the same port, measured just before,\n" +
			"takes the place of gloo.\n\n" +
			"--size is the size that a rank sends to each other rank (AllGather, AllToAll, ReduceScatter), or the size of the\n" +
			"tensor (Broadcast from rank 0, AllReduce). Elements are float32; reductions are sums.",
		Flags: append([]cli.Flag{
			&cli.StringSliceFlag{Name: "op", Usage: "calls to measure: " + strings.Join(exchangeOps, ", ") + " (default: the calls with goals, and each other call at 1 MiB)"},
			&cli.IntSliceFlag{Name: "size", Value: cli.NewIntSlice(1<<10, 1<<20), Usage: "bytes, with --op"},
			&cli.IntSliceFlag{Name: "ranks", Value: cli.NewIntSlice(2, 4), Usage: "numbers of ranks to measure"},
			&cli.IntFlag{Name: "iters", Usage: "measured calls; 0 chooses by size"},
			&cli.StringFlag{Name: "python", Value: "python3", Usage: "interpreter with PyTorch"},
			&cli.BoolFlag{Name: "check", Usage: "exit status 1 if a goal is missed or could not be measured"},
		}, common...),
		Action: runCollective,
	}
}

// collectiveReport is the JSON line of bench collective. Quantiles are in microseconds.
type collectiveReport struct {
	Van        string     `json:"van"`
	Op         string     `json:"op"`
	Bytes      int        `json:"bytes"`
	Ranks      int        `json:"ranks"`
	Iters      int        `json:"iters"`
	Ours       quantiles  `json:"ours"`
	Gloo       *quantiles `json:"gloo,omitempty"`
	NoGloo     string     `json:"no_gloo,omitempty"` // the reason why gloo was not measured
	Copy       *quantiles `json:"copy,omitempty"`
	comparison            // with gloo
	Checked    bool       `json:"checked"`

	RDMA *rdmaReport `json:"rdma,omitempty"`
}

func (r *collectiveReport) String() string {
	return fmt.Sprintf("%s, %d ranks", exchange{r.Op, r.Bytes}, r.Ranks)
}

// collectiveRun is one run of bench collective.
type collectiveRun struct{ run }

func runCollective(c *cli.Context) error {
	over := c.String("van")
	all, ok := exchanges[over]
	if !ok {
		return exit.Usage("bench collective: --van %s: want %s, %s or %s", over, local, zmq, ibverbs)
	}
	if c.IsSet("op") {
		all = nil
		for _, op := range c.StringSlice("op") {
			if !slices.Contains(exchangeOps, op) {
				return exit.Usage("bench collective: --op %s: want %s", op, strings.Join(exchangeOps, ", "))
			}
			of := c.IntSlice("size")
			if op == barrier {
				of = []int{0}
			}
			for _, size := range of {
				all = append(all, exchange{op, size})
			}
		}
	} else if c.IsSet("size") {
		return exit.Usage("bench collective: --size wants --op")
	}
	for _, e := range all {
		if e.op != barrier && (e.size < 4 || e.size%4 != 0 || e.size > math.MaxInt32/4) {
			return exit.Usage("bench collective: --size %d: want whole float32, 4 to %d bytes", e.size, math.MaxInt32/4)
		}
	}
	for _, n := range c.IntSlice("ranks") {
		if n < 2 || n > 64 {
			return exit.Usage("bench collective: --ranks %d: want 2 to 64", n)
		}
	}
	if c.Int("iters") < 0 || c.Int("rounds") < 1 {
		return exit.Usage("bench collective: --iters %d, --rounds %d: want 0 iters, which are chosen by size, or more, and rounds above 0", c.Int("iters"), c.Int("rounds"))
	}
	common, err := newRun(c)
	if err != nil {
		return err
	}
	m := &collectiveRun{common}
	for _, n := range c.IntSlice("ranks") {
		if err := m.group(n, all); err != nil {
			return err
		}
	}
	return m.v.check(c)
}

// group measures with n ranks.
func (m *collectiveRun) group(n int, all []exchange) error {
	_, err := runCluster(m.c, m.host, place{}, 1, n, false, func(g *group, _, ours processes) error {
		var peers processes
		var noGloo string
		if m.rdma == nil {
			peers, noGloo = startGloo(g, m.c.String("python"), n)
		}
		if !m.c.Bool("json") {
			collectiveHead(m.c.App.Writer, m.c.String("van"), n)
		}
		for _, e := range all {
			r, err := m.measure(ours, peers, n, e)
			if err != nil {
				return fmt.Errorf("%d ranks: %s: %w", n, e, err)
			}
			r.NoGloo = cmp.Or(r.NoGloo, noGloo)
			m.judge(r, exchangeGoals[m.c.String("van")][e])
			if err := show(m.c, r); err != nil {
				return err
			}
		}
		return nil
	}, "collective")
	return err
}

// judge compares a report with the goal of its call.
func (m *collectiveRun) judge(r *collectiveReport, limit float64) {
	switch {
	case m.rdma != nil && r.Ranks == 2:
		r.RDMA.judge(r, goal{of: ibWriteLat, limit: limit}, &m.v)
	case m.rdma != nil:
	case r.Gloo != nil:
		r.judge(r, goal{of: gloo, limit: limit}, &m.v)
	case limit > 0:
		r.Goal = limit
		m.v.miss(r, "gloo was not measured: "+r.NoGloo)
	}
}

// startGloo starts n ranks of gloo, or returns the reason why it cannot.
func startGloo(g *group, python string, n int) (all processes, unable string) {
	all, err := g.startTorch(n, func(address string, rank int) (command, variables []string) {
		return []string{python, "-c", glooProgram, strconv.Itoa(rank), strconv.Itoa(n), address}, nil
	})
	if err == nil {
		_, err = all.askEach("")
	}
	if err == nil {
		return all, ""
	}
	for _, p := range all {
		p.unused = true
		_ = p.cmd.Process.Kill() // it may have ended
	}
	return nil, err.Error()
}

// measure measures one call, in blocks.
func (m *collectiveRun) measure(ours, peers processes, n int, e exchange) (*collectiveReport, error) {
	iters := cmp.Or(m.c.Int("iters"), min(max(1<<31/(e.size*n*(n-1)+1<<21), 40), 500))
	r := &collectiveReport{Van: m.c.String("van"), Op: e.op, Bytes: e.size, Ranks: n, Iters: iters, Checked: true}
	arrive := e.arrive(n)
	from, to := make([]byte, arrive), make([]byte, arrive)
	fill(from) // memory that was never written has no pages
	var err error
	if r.RDMA, err = m.rdma.perftest(m.c, e.size, false); err != nil {
		return nil, err
	}
	all := blocks(iters, m.c.Int("rounds"))
	mine, theirs := ours.row(e.op, "-", e.size), peers.row(e.op, "-", e.size)
	var floor []int64
	copies := func(block int) {
		for i := 0; i < all[block] && block > 0; i++ {
			start := time.Now()
			copy(to, from)
			floor = append(floor, int64(time.Since(start)))
		}
	}
	rows := []*row{theirs, mine}
	if peers == nil {
		rows = []*row{mine}
	}
	err = inTurns(all, copies, rows...)
	if why := unable(""); errors.As(err, &why) { // in the first block
		r.NoGloo = why.Error()
		err = inTurns(all, copies, mine)
	}
	if err != nil {
		return nil, err
	}
	r.Ours = summarize(mine.slowest())
	r.RDMA.compareTime(r.Ours.P50)
	if theirs.ns != nil {
		q := summarize(theirs.slowest())
		r.Gloo, r.comparison = &q, r.Ours.to(q)
	}
	if arrive > 0 {
		q := summarize(floor)
		r.Copy = &q
	}
	return r, nil
}

// arrive returns the least number of bytes that a rank receives.
func (e exchange) arrive(n int) int {
	switch e.op {
	case broadcast, barrier:
		return e.size
	case allReduce:
		return 2 * e.size / n * (n - 1)
	}
	return e.size * (n - 1)
}

func collectiveHead(w io.Writer, over string, n int) {
	fmt.Fprintf(w, "%d ranks over %s, microseconds, results checked\n", n, over)
	fmt.Fprintf(w, "%-14s %9s %6s %9s %9s %9s %9s   %9s %9s %9s   %6s %s\n", "", "bytes", "iters", "p50", "p90", "p99", "max",
		"gloo p50", "p99", "copy p50", "ratio", "goal")
}

func (r *collectiveReport) print(w io.Writer) error {
	gloo50, gloo99, copy50, ratio := "-", "-", "-", "-"
	if q := r.Gloo; q != nil {
		gloo50, gloo99, ratio = fmt.Sprintf("%.1f", q.P50), fmt.Sprintf("%.1f", q.P99), fmt.Sprintf("%.2f", r.RatioP50)
	}
	if q := r.Copy; q != nil {
		copy50 = fmt.Sprintf("%.1f", q.P50)
	}
	goal := r.text("")
	if r.NoGloo != "" {
		goal += " (no gloo: " + r.NoGloo + ")"
	}
	_, err := fmt.Fprintf(w, "%-14s %9d %6d %9.1f %9.1f %9.1f %9.1f   %9s %9s %9s   %6s %s\n", r.Op, r.Bytes, r.Iters,
		r.Ours.P50, r.Ours.P90, r.Ours.P99, r.Ours.Max, gloo50, gloo99, copy50, ratio, goal)
	if r.RDMA != nil {
		r.RDMA.print(w, r.Op)
	}
	return err
}

// joinWorkers creates a communicator of all workers, and checks that their data uses --van.
func joinWorkers(c *cli.Context, node *postoffice.Node) (*collective.Comm, error) {
	ranks := make([]int, node.Topology().NumWorkers)
	var others []postoffice.NodeID
	for i := range ranks {
		ranks[i] = i
		if i != node.Rank() {
			others = append(others, postoffice.WorkerID(i))
		}
	}
	comm, err := collective.New(c.Context, node, collective.Options{Ranks: ranks})
	if err != nil {
		return nil, err
	}
	return comm, checkTransport(node, others)
}

// childCollective is a node of bench collective. A worker makes the requested calls.
func childCollective(c *cli.Context, node *postoffice.Node) error {
	if node.Role() != van.Worker {
		return nil
	}
	comm, err := joinWorkers(c, node)
	if err != nil {
		return err
	}
	if err := answerLines(c, func(op, _ string, size, iters int) (*answer, error) {
		return times(exchange{op, size}.run(c.Context, comm, iters))
	}); err != nil {
		return err
	}
	if err := comm.Barrier(c.Context); err != nil {
		return err
	}
	return comm.Shutdown(c.Context)
}

// given returns element k of part p of a rank's input in call i. Sums of it are exact.
func given(rank, p, k, i int) float32 {
	if k == 0 {
		return float32(i%1024 + rank + p)
	}
	return float32((k*7 + rank*13 + p*17) % 1000)
}

// run makes a call iters times, checks the results, and returns the nanoseconds of each.
func (e exchange) run(ctx context.Context, c *collective.Comm, iters int) ([]int64, error) {
	n, self, count := c.Size(), c.Rank(), e.size/4
	gives, gets := 1, 1 // number of parts in in and out
	want := func(part, k, i int) float32 { return given(part, 0, k, i) }
	sum := func(p, k, i int) (s float32) {
		for r := range n {
			s += given(r, p, k, i)
		}
		return s
	}
	var to, from af.Tensor
	var tos, froms []af.Tensor
	wait := func(op collective.Op, err error) error {
		if err != nil {
			return err
		}
		return op.Wait(ctx)
	}
	var call func() error
	switch e.op {
	case allGather:
		gets = n
		call = func() error { return wait(c.AllGather(to, from)) }
	case allToAll:
		gives, gets = n, n
		want = func(part, k, i int) float32 { return given(part, self, k, i) }
		call = func() error { return wait(c.AllToAll(tos, froms)) }
	case broadcast:
		call = func() error { return wait(c.Broadcast(to, 0)) }
	case reduceScatter:
		gives = n
		want = func(_, k, i int) float32 { return sum(self, k, i) }
		call = func() error { return wait(c.ReduceScatter(to, from, collective.Sum)) }
	case allReduce:
		want = func(_, k, i int) float32 { return sum(0, k, i) }
		call = func() error { return wait(c.AllReduce(to, from, collective.Sum)) }
	case barrier:
		gives, gets = 0, 0
		call = func() error { return c.Barrier(ctx) }
	}
	in, out := make([]float32, gives*count), make([]float32, gets*count)
	if e.op == broadcast && self == 0 {
		out = in
	}
	var err error
	tensor := func(l []float32) af.Tensor {
		t, e := af.FromSlice(l)
		err = errors.Join(err, e)
		return t
	}
	from, to = tensor(in), tensor(out)
	if e.op == allToAll {
		for p := range n {
			froms, tos = append(froms, tensor(in[p*count:(p+1)*count])), append(tos, tensor(out[p*count:(p+1)*count]))
		}
	}
	if err != nil {
		return nil, err
	}
	for j := range in {
		in[j] = given(self, j/count, j%count, 0)
	}
	ns := make([]int64, iters)
	for i := range iters {
		for p := range gives {
			in[p*count] = given(self, p, 0, i)
		}
		start := time.Now()
		err = call()
		ns[i] = int64(time.Since(start))
		if err != nil {
			return nil, err
		}
		step := count // checks the first element of each part; in the last call every element
		if i == iters-1 {
			step = 1
		}
		for j := 0; j < len(out); j += step {
			if w := want(j/count, j%count, i); out[j] != w {
				return nil, fmt.Errorf("%s at rank %d, call %d: element %d is %g, want %g", e, self, i, j, out[j], w)
			}
		}
		if e.op != broadcast || self != 0 {
			for j := 0; j < len(out); j += count {
				out[j] = -1
			}
			if i == iters-2 {
				clear(out)
			}
		}
	}
	return ns, nil
}
