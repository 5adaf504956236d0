package bench

// bench afd: attention processes and FFN processes exchange activations, first without computations, then in decode steps.

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/stepaf/stepaf-go/tools/internal/exit"
	"github.com/stepaf/stepaf-go/van/backend"
)

const (
	afdProcesses = 64      // the largest number of processes of a role
	afdTensors   = 8 << 30 // the most bytes of all tensors
)

func afdCommand(common []cli.Flag) *cli.Command {
	return &cli.Command{
		Name:      "afd",
		Usage:     "attention processes (workers) and FFN processes (servers) that exchange activations at every layer",
		UsageText: "stepaf bench afd -n 2 -s 2 --van local [--form push_pull,prepared] [--compute 97us]\nstepaf bench afd -n 1,2 -s 1,2 --compute 50us,100us,200us --plot FILE.svg\nstepaf bench afd -n 2 -s 2 --van local --device gpu",
		Description: "    stepaf bench afd -n 2 -s 2 --van local\n\n" +
			"First it measures round trips: all workers at the same time push a tensor to every server and pull one from each. The\n" +
			"floor moves the same bytes between the same processes, all pairs at once, with a thread for each end of a pair: with\n" +
			"--van zmq over TCP, with --van local by one copy into shared memory each way. Blocks alternate.\n\n" +
			"Then it measures decode steps. In each layer a worker computes and sends the micro-batches one after the other, and\n" +
			"computes the next one while the others are away. A server waits for a micro-batch of all workers, computes it once,\n" +
			"and answers all of them. A computation is a loop that ends after --compute; it includes the check of the tensors\n" +
			"that it uses and the stamps of those that it makes. Blocks alternate with the computation alone: all processes run\n" +
			"the same loops without communication. Each time of a step, with and without it, is that of the slowest process.\n\n" +
			"push_pull checks its tensors in each call, prepared once. If the interpreter --python has PyTorch and the\n" +
			"module fserver_lib, the same is measured from Python, and the same exchanges by torch.distributed: with gloo on CPUs,\n" +
			"with NCCL on GPUs. The values of every round trip are checked in up to 32 places of each tensor, and after each block\n" +
			"in every byte. -n, -s and --compute take several values, separated by commas; each number of workers is measured with\n" +
			"each number of servers. Figures of more processes than processors say more about the scheduler of the system than\n" +
			"about the library.\n\n" +
			"With --device gpu the tensors are on GPUs: workers, then servers, use the GPUs in turn. The floor is a copy between the\n" +
			"GPUs each way. There are more forms: hosts and streams (prepared GPU exchanges, made by CPUs or by streams), side (the\n" +
			"same; each end receives in a stream of its own) and graphs (captured streams). The timed round trips do not touch the\n" +
			"contents; every byte is checked in round trips before each block and in its last one. Decode steps are measured from\n" +
			"Python; their computations are matrix products that take about --compute.",
		Flags: append([]cli.Flag{
			&cli.StringFlag{Name: "n", Value: "1", Usage: "numbers of workers (attention processes)"},
			&cli.StringFlag{Name: "s", Value: "1", Usage: "numbers of servers (FFN processes)"},
			&cli.IntFlag{Name: "push", Value: attention.push, Usage: "bytes from a worker to each server"},
			&cli.IntFlag{Name: "pull", Value: attention.pull, Usage: "bytes from each server to a worker"},
			&cli.StringFlag{Name: "form", Value: formAll, Usage: "forms of the exchange: " + strings.Join(afdAllForms, ", ") + "; or all"},
			&cli.StringFlag{Name: "device", Value: cpu, Usage: "device of the tensors: cpu or gpu"},
			&cli.StringFlag{Name: "gpus", Usage: "with --device gpu: the GPUs that the processes use in turn, such as 0,1 (default: all)"},
			&cli.StringFlag{Name: "python", Value: "python3", Usage: "interpreter with PyTorch and fserver_lib; none measures from Go only"},
			&cli.IntFlag{Name: "iters", Usage: "measured round trips of each worker; 0 chooses by size"},
			&cli.IntFlag{Name: "layers", Value: 61, Usage: "layers of a decode step; 0 measures round trips only"},
			&cli.IntFlag{Name: "micro-batches", Value: 3, Usage: "micro-batches of a decode step"},
			&cli.StringFlag{Name: "compute", Value: "97us", Usage: "times of computation for each layer and micro-batch, on either side"},
			&cli.IntFlag{Name: "steps", Usage: "measured decode steps; 0 chooses by their time"},
			&cli.BoolFlag{Name: "csv", Usage: "print comma-separated values instead of a table"},
			&cli.StringFlag{Name: "plot", Usage: "write a picture to this `FILE`.svg: the time of round trips by processes, if -n or -s has several values, and of steps by --compute, if that has"},
		}, common...),
		Action: runAFD,
	}
}

const formAll = "all"

// afdRun is one run of bench afd.
type afdRun struct {
	c                *cli.Context
	shape            afdShape
	workers, servers []int
	forms            []string // chosen
	gpus             []int    // nil: the tensors are in host memory
	noPython         string   // why nodes in Python are not measured
	noTorch          string   // why torch.distributed is not measured
	compute          []time.Duration
	phase            string    // of the latest line of progress
	reported         time.Time // of that line
}

// afdReport is the JSON line of bench afd: the figures of one number of workers and servers.
type afdReport struct {
	Van          string    `json:"van"`
	Workers      int       `json:"workers"`
	Servers      int       `json:"servers"`
	PushBytes    int       `json:"push_bytes"` // to each server
	PullBytes    int       `json:"pull_bytes"` // from each
	Layers       int       `json:"layers"`
	MicroBatches int       `json:"micro_batches"`
	GPUs         []int     `json:"gpus,omitempty"` // of the workers and then the servers
	NoPython     string    `json:"no_python,omitempty"`
	NoTorch      string    `json:"no_torch,omitempty"`
	Floor        string    `json:"floor"`       // "TCP" or "copies"
	Trips        []afdTrip `json:"round_trips"` // the floor's first
	Steps        []afdStep `json:"steps,omitempty"`
	Checked      bool      `json:"checked"`
	Processors   int       `json:"processors"`

	CPU map[string]float64 `json:"cpu_s"`
}

// afdTrip is a worker's round trips in one form.
type afdTrip struct {
	From   string `json:"from,omitempty"` // "Go", "Python" or "PyTorch"
	Form   string `json:"form"`           // "floor" is the floor
	Worker int    `json:"worker"`
	Count  int    `json:"count"`
	quantiles
	comparison // with the worker's floor
}

// afdStep is the decode steps in one form.
type afdStep struct {
	From    string  `json:"from"`
	Form    string  `json:"form"`
	Compute float64 `json:"compute_us"`
	Count   int     `json:"count"`
	quantiles
	Alone      quantiles `json:"computation"` // without communication
	comparison           // with it
}

// values reads the values of an option, separated by commas.
func values[T any](c *cli.Context, name, want string, parse func(string) (T, bool)) ([]T, error) {
	var all []T
	for text := range strings.SplitSeq(c.String(name), ",") {
		v, ok := parse(text)
		if !ok {
			return nil, exit.Usage("bench afd: %s %s: want %s, or several separated by commas", exit.Option(name), c.String(name), want)
		}
		all = append(all, v)
	}
	return all, nil
}

// newAFDRun reads the options.
func newAFDRun(c *cli.Context) (*afdRun, error) {
	r := &afdRun{c: c, shape: afdShape{push: c.Int("push"), pull: c.Int("pull"), microBatches: c.Int("micro-batches"), layers: c.Int("layers")}}
	count := func(text string) (int, bool) {
		n, err := strconv.Atoi(text)
		return n, err == nil && n >= 1 && n <= afdProcesses
	}
	var err error
	if r.workers, err = values(c, "n", fmt.Sprintf("a number of workers, 1 to %d", afdProcesses), count); err != nil {
		return nil, err
	}
	if r.servers, err = values(c, "s", fmt.Sprintf("a number of servers, 1 to %d", afdProcesses), count); err != nil {
		return nil, err
	}
	if r.compute, err = values(c, "compute", "a duration of 1us to 1s with its unit, such as 97us", func(text string) (time.Duration, bool) {
		d, err := time.ParseDuration(text)
		return d, err == nil && d >= time.Microsecond && d <= time.Second
	}); err != nil {
		return nil, err
	}
	if err := r.readForms(); err != nil {
		return nil, err
	}
	if v := c.String("van"); v != local && v != zmq {
		return nil, exit.Usage("bench afd: --van %s: want %s or %s", v, local, zmq)
	}
	for _, x := range []struct {
		name        string
		least, most int
		note        string
	}{
		{"push", 8, 1 << 30, " bytes"}, {"pull", 8, 1 << 30, " bytes"}, {"layers", 0, 1000, ""}, {"micro-batches", 1, 64, ""},
		{"iters", 0, 1e7, ", where 0 chooses by size"}, {"steps", 0, 1e6, ", where 0 chooses by time"}, {"rounds", 1, 1000, ""},
	} {
		if v := c.Int(x.name); v < x.least || v > x.most {
			return nil, exit.Usage("bench afd: --%s %d: want %d to %d%s", x.name, v, x.least, x.most, x.note)
		}
	}
	if err := r.plottable(); err != nil {
		return nil, err
	}
	if c.Bool("json") && c.Bool("csv") {
		return nil, exit.Usage("bench afd: --json and --csv: want one of them")
	}
	pairs := slices.Max(r.workers) * slices.Max(r.servers)
	if bytes := pairs * (r.shape.microBatches + 1) * (r.shape.push + 2*r.shape.pull); bytes > afdTensors {
		return nil, exit.Usage("bench afd: -n %s -s %s --push %d --pull %d --micro-batches %d: the tensors have %.1f GiB, want at most %d GiB: fewer processes, fewer micro-batches or fewer bytes",
			c.String("n"), c.String("s"), r.shape.push, r.shape.pull, r.shape.microBatches, float64(bytes)/(1<<30), afdTensors>>30)
	}
	return r, nil
}

// readForms reads the options of forms and devices.
func (r *afdRun) readForms() (err error) {
	onGPUs := r.c.String("device") == gpu
	if d := r.c.String("device"); d != gpu && d != cpu {
		return exit.Usage("bench afd: --device %s: want cpu or gpu", d)
	}
	if r.c.String("gpus") != "" {
		if !onGPUs {
			return exit.Usage("bench afd: --gpus wants --device gpu")
		}
		if r.gpus, err = values(r.c, "gpus", "a number of a GPU, from 0", func(text string) (int, bool) {
			id, err := strconv.ParseUint(text, 10, 31)
			return int(id), err == nil
		}); err != nil {
			return err
		}
	}
	if r.c.String("form") == formAll {
		r.forms = slices.Clone(afdAllForms)
	} else if r.forms, err = values(r.c, "form", strings.Join(afdAllForms, ", ")+", "+formAll, func(text string) (string, bool) {
		return text, slices.Contains(afdAllForms, text)
	}); err != nil {
		return err
	}
	if onGPUs {
		return nil
	}
	if r.c.String("form") != formAll && slices.ContainsFunc(r.forms, func(form string) bool { return slices.Contains(afdGPUForms, form) }) {
		return exit.Usage("bench afd: --form %s: %s want --device gpu", r.c.String("form"), strings.Join(afdGPUForms, ", "))
	}
	r.forms = slices.DeleteFunc(r.forms, func(form string) bool { return slices.Contains(afdGPUForms, form) })
	return nil
}

// findGPUs checks the GPUs of the options; the default is all. list returns the GPUs of the machine.
func (r *afdRun) findGPUs(list func() ([]backend.Info, error)) error {
	if r.c.String("device") == cpu {
		return nil
	}
	have, err := list()
	if err != nil {
		return fmt.Errorf("bench afd: --device gpu: %w", err)
	}
	for i := 0; r.c.String("gpus") == "" && i < len(have); i++ {
		r.gpus = append(r.gpus, i)
	}
	if len(have) == 0 || slices.Max(r.gpus) >= len(have) {
		return exit.Usage("bench afd: --gpus %s: this machine has %d (CUDA_VISIBLE_DEVICES)", r.c.String("gpus"), len(have))
	}
	return nil
}

// plottable refuses a picture that has no curves or cannot be written.
func (r *afdRun) plottable() error {
	file := r.c.String("plot")
	if file == "" {
		return nil
	}
	if filepath.Ext(file) != ".svg" {
		return exit.Usage("bench afd: --plot %s: want the name of a file that ends with .svg", file)
	}
	if d, err := os.Stat(filepath.Dir(file)); err != nil || !d.IsDir() {
		return exit.Usage("bench afd: --plot %s: want a file in a directory that exists", file)
	}
	if len(r.workers)*len(r.servers) == 1 && (len(r.compute) == 1 || r.shape.layers == 0) {
		return exit.Usage("bench afd: --plot %s: want several values of -n or -s, or of --compute and --layers above 0", file)
	}
	return nil
}

func runAFD(c *cli.Context) error {
	r, err := newAFDRun(c)
	if err != nil {
		return err
	}
	if err := r.findGPUs(backend.GPUs); err != nil {
		return err
	}
	ctx, cancel := limited(c)
	defer cancel()
	if r.noTorch = r.lacks(ctx, "torch", "torch.distributed"); r.noTorch != "" {
		r.noPython = r.noTorch
	} else {
		r.noPython = r.lacks(ctx, "torch", "fserver_lib")
	}
	if c.Bool("csv") {
		if _, err := fmt.Fprintln(c.App.Writer, afdColumns); err != nil {
			return err
		}
	}
	var all []*afdReport
	for _, n := range r.workers {
		for _, s := range r.servers {
			rep, err := r.measure(ctx, n, s)
			if err != nil {
				return fmt.Errorf("bench afd: workers: %d, servers: %d: %w", n, s, err)
			}
			all = append(all, rep)
			if c.Bool("csv") {
				if err := rep.csv(c.App.Writer); err != nil {
					return err
				}
			} else if err := show(c, rep); err != nil {
				return err
			}
		}
	}
	if file := c.String("plot"); file != "" {
		if err := plotAFD(file, all, r.compute); err != nil {
			return fmt.Errorf("bench afd: --plot %s: %w", file, err)
		}
	}
	return nil
}

// progress prints a line to the standard error when a phase begins, and then at most one in a second.
func (r *afdRun) progress(rep *afdReport, phase string, block, of int) {
	line := fmt.Sprintf("bench afd: workers: %d, servers: %d: %s", rep.Workers, rep.Servers, phase)
	if line == r.phase && time.Since(r.reported) < time.Second {
		return
	}
	r.phase, r.reported = line, time.Now()
	if of > 1 {
		line += fmt.Sprintf(", block %d of %d", block+1, of)
	}
	fmt.Fprintln(r.c.App.ErrWriter, line)
}

// measure measures n workers and s servers.
func (r *afdRun) measure(ctx context.Context, n, s int) (_ *afdReport, err error) {
	rep := &afdReport{Van: r.c.String("van"), Workers: n, Servers: s, PushBytes: r.shape.push, PullBytes: r.shape.pull,
		Layers: r.shape.layers, MicroBatches: r.shape.microBatches, NoPython: r.noPython, Floor: "TCP", Checked: true, Processors: runtime.NumCPU()}
	switch {
	case r.gpus != nil:
		rep.Floor = "GPU"
	case rep.Van == local:
		rep.Floor = "copies"
	}
	r.progress(rep, "start", 0, 1)
	rep.CPU, err = withProcesses(ctx, func(g *group) error {
		sides, err := r.sides(g, rep, n, s)
		if err != nil {
			return err
		}
		if err := passFloors(sides[0].servers, sides[0].workers); err != nil {
			return err
		}
		for _, side := range sides[1:] {
			if _, err := side.both().askEach(""); err != nil {
				return err
			}
		}
		if err := r.trips(rep, sides); err != nil {
			return err
		}
		for i := 0; i < len(r.compute) && rep.Layers > 0; i++ {
			if err := r.steps(rep, sides, r.compute[i]); err != nil {
				return err
			}
		}
		return nil
	})
	return rep, err
}

// trips measures round trips and the floor.
func (r *afdRun) trips(rep *afdReport, sides []*afdSide) error {
	rows := []*row{sides[0].workers.row(askFloor, "-", 0)}
	names := []afdTrip{{Form: askFloor}}
	for _, side := range sides {
		for _, form := range side.trips {
			rows = append(rows, side.measuring.row(askCalls, form, 0))
			names = append(names, afdTrip{From: side.from, Form: form})
		}
	}
	iters, _ := defaults(course{rep.Van, deviceOf(r.gpus)}, rep.Workers*rep.Servers*(rep.PushBytes+rep.PullBytes), r.c.Int("iters"), 0)
	all := blocks(iters, r.c.Int("rounds"))
	if err := inTurns(all, func(block int) { r.progress(rep, "round trips", block, len(all)) }, rows...); err != nil {
		return err
	}
	for i, row := range rows {
		for w, ns := range row.ns[len(row.ns)-rep.Workers:] { // after those of servers
			x := names[i]
			x.Worker, x.Count, x.quantiles = w, len(ns), summarize(ns)
			if i > 0 {
				x.comparison = x.to(rep.Trips[w].quantiles)
			}
			rep.Trips = append(rep.Trips, x)
		}
	}
	return nil
}

// steps measures decode steps whose computations take d, and the computations of each side alone.
func (r *afdRun) steps(rep *afdReport, sides []*afdSide, d time.Duration) error {
	amount := int(d)
	var rows []*row
	for _, side := range sides {
		if len(side.steps) == 0 {
			continue
		}
		if side.rows && amount == int(d) { // all sides make the same products
			got, err := side.workers[:1].askEach(fmt.Sprintf("%s - %d 0", askRows, d))
			if err != nil {
				return err
			}
			amount = int(got[0].NS[0])
		}
		if side.from == fromGo {
			if _, err := side.servers.askEach(fmt.Sprintf("%s - %d 0", askServe, d)); err != nil {
				return err
			}
		}
		rows = append(rows, side.both().row(askAlone, "-", amount))
		for _, form := range side.steps {
			rows = append(rows, side.measuring.row(askSteps, form, amount))
		}
	}
	r.progress(rep, fmt.Sprintf("decode steps of %s, warm-up", d), 0, 1)
	start := time.Now()
	if err := inTurns([]int{1}, nil, rows...); err != nil {
		return err
	}
	n := cmp.Or(r.c.Int("steps"), min(max(int(afdStepTime/(time.Since(start)+1)), 10), 200))
	all := blocks(n, r.c.Int("rounds"))[1:]
	if err := inTurns(all, func(block int) { r.progress(rep, fmt.Sprintf("decode steps of %s", d), block, len(all)) }, rows...); err != nil {
		return err
	}
	for _, side := range sides {
		if len(side.steps) == 0 {
			continue
		}
		alone := summarize(rows[0].slowest())
		for i, form := range side.steps {
			q := summarize(rows[i+1].slowest())
			rep.Steps = append(rep.Steps, afdStep{From: side.from, Form: form, Compute: float64(d) / 1e3, Count: n, quantiles: q, Alone: alone, comparison: q.to(alone)})
		}
		rows = rows[1+len(side.steps):]
	}
	return nil
}

// afdStepTime is the approximate duration of the measurement of decode steps for one value of --compute.
const afdStepTime = 10 * time.Second

func (r *afdReport) print(w io.Writer) error {
	fmt.Fprintf(w, "workers: %d, servers: %d, over %s, push %d bytes to and pull %d bytes from each server, all answers checked: %t\n",
		r.Workers, r.Servers, r.Van, r.PushBytes, r.PullBytes, r.Checked)
	if n := r.Workers + r.Servers; n > r.Processors {
		fmt.Fprintf(w, "note: %d processes share %d processors\n", n, r.Processors)
	}
	if r.GPUs != nil {
		fmt.Fprintf(w, "GPUs: of workers %v, of servers %v\n", r.GPUs[:r.Workers], r.GPUs[r.Workers:])
	}
	if r.shared() {
		fmt.Fprintln(w, "note: processes share a GPU, in time slices unless CUDA MPS runs; these figures say little about a GPU for each")
	}
	for _, x := range [][2]string{{fromPython, r.NoPython}, {fromTorch, r.NoTorch}} {
		if x[1] != "" {
			fmt.Fprintf(w, "%s: not measured: %s\n", x[0], x[1])
		}
	}
	fmt.Fprintf(w, "%-26s %10s %10s %10s %10s %12s %8s\n", "microseconds", "p50", "p90", "p99", "max", "over floor", "p99")
	for _, x := range r.Trips {
		name, over := afdName(x.From, x.Form), ""
		if x.Form == askFloor {
			name += " (" + r.Floor + ")"
		} else {
			over = fmt.Sprintf(" %12.2f %8.2f", x.RatioP50, x.RatioP99)
		}
		fmt.Fprintf(w, "%-26s %10.1f %10.1f %10.1f %10.1f%s\n", fmt.Sprintf("%s, worker %d", name, x.Worker), x.P50, x.P90, x.P99, x.Max, over)
	}
	if len(r.Steps) > 0 {
		fmt.Fprintf(w, "decode steps of %d layers with %d micro-batches, milliseconds\n", r.Layers, r.MicroBatches)
		fmt.Fprintf(w, "%-26s %10s %10s %10s %10s %12s %8s\n", "", "p50", "p99", "alone p50", "p99", "over alone", "steps")
	}
	for _, x := range r.Steps {
		fmt.Fprintf(w, "%-26s %10.2f %10.2f %10.2f %10.2f %12.2f %8d\n", fmt.Sprintf("%s, %s", time.Duration(x.Compute*1e3), afdName(x.From, x.Form)),
			x.P50/1e3, x.P99/1e3, x.Alone.P50/1e3, x.Alone.P99/1e3, x.RatioP50, x.Count)
	}
	seconds := map[string]float64{}
	for name, s := range r.CPU {
		seconds[strings.Fields(name)[1]] += s
	}
	_, err := fmt.Fprintf(w, "CPU seconds: scheduler %.2f, servers %.2f, workers %.2f, PyTorch %.2f (start-up and floor included)\n",
		seconds["scheduler"], seconds["server"], seconds["worker"], seconds["rank"])
	return err
}

// afdColumns are the columns of --csv. base is the floor of a round trip, or the computation of a step alone.
const afdColumns = "van,workers,servers,push_bytes,pull_bytes,layers,micro_batches,measured,from,form,worker,compute_us,count," +
	"p50_us,p90_us,p99_us,max_us,mean_us,base_p50_us,base_p99_us,ratio_p50,ratio_p99"

// csv prints the report as rows with the columns afdColumns. No cell needs quotes.
func (r *afdReport) csv(w io.Writer) error {
	var b strings.Builder
	shape := fmt.Sprintf("%s,%d,%d,%d,%d", r.Van, r.Workers, r.Servers, r.PushBytes, r.PullBytes)
	times := func(q quantiles) string {
		return fmt.Sprintf("%.3f,%.3f,%.3f,%.3f,%.3f", q.P50, q.P90, q.P99, q.Max, q.Mean)
	}
	for _, x := range r.Trips {
		base := ",,,"
		if x.Form != askFloor {
			floor := r.Trips[x.Worker]
			base = fmt.Sprintf("%.3f,%.3f,%.3f,%.3f", floor.P50, floor.P99, x.RatioP50, x.RatioP99)
		}
		fmt.Fprintf(&b, "%s,,,round trip,%s,%s,%d,,%d,%s,%s\n", shape, x.From, x.Form, x.Worker, x.Count, times(x.quantiles), base)
	}
	for _, x := range r.Steps {
		fmt.Fprintf(&b, "%s,%d,%d,step,%s,%s,,%.3f,%d,%s,%.3f,%.3f,%.3f,%.3f\n", shape, r.Layers, r.MicroBatches, x.From, x.Form, x.Compute, x.Count,
			times(x.quantiles), x.Alone.P50, x.Alone.P99, x.RatioP50, x.RatioP99)
	}
	_, err := io.WriteString(w, b.String())
	return err
}
