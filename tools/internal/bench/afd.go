package bench

// bench afd: attention processes and FFN processes exchange activations, first without computations, then in decode steps.

import (
	"cmp"
	"context"
	"encoding/csv"
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
)

const (
	afdProcesses = 64      // the largest number of processes of a role
	afdTensors   = 8 << 30 // the most bytes of all tensors
)

func afdCommand(common []cli.Flag) *cli.Command {
	return &cli.Command{
		Name:      "afd",
		Usage:     "attention processes (workers) and FFN processes (servers) that exchange activations at every layer",
		UsageText: "stepaf bench afd -n 2 -s 2 --van local [--form push_pull|prepared] [--compute 97us]\nstepaf bench afd -n 1,2 -s 1,2 --compute 50us,100us,200us --plot FILE.svg",
		Description: "    stepaf bench afd -n 2 -s 2 --van local\n\n" +
			"First it measures round trips: all workers at the same time push a tensor to every server and pull one from each. The\n" +
			"floor moves the same bytes between the same processes, all pairs at once, with a thread for each end of a pair: with\n" +
			"--van zmq over TCP, with --van local by one copy into shared memory each way. Blocks alternate.\n\n" +
			"Then it measures decode steps. In each layer a worker computes and sends the micro-batches one after the other, and\n" +
			"computes the next one while the others are away. A server waits for a micro-batch of all workers, computes it once,\n" +
			"and answers all of them. A computation is a loop that ends after --compute; it includes the check of the tensors\n" +
			"that it uses and the stamps of those that it makes. Blocks alternate with the computation alone: all processes run\n" +
			"the same loops without communication. Each time of a step, with and without it, is that of the slowest process.\n\n" +
			"push_pull checks its tensors in each call, prepared once. The values of every round trip are checked in up to 32 places\n" +
			"of each tensor, and after each block in every byte. -n, -s and --compute take several values, separated by commas;\n" +
			"each number of workers is measured with each number of servers. Figures of more processes than processors say more\n" +
			"about the scheduler of the system than about the library.",
		Flags: append([]cli.Flag{
			&cli.StringFlag{Name: "n", Value: "1", Usage: "numbers of workers (attention processes)"},
			&cli.StringFlag{Name: "s", Value: "1", Usage: "numbers of servers (FFN processes)"},
			&cli.IntFlag{Name: "push", Value: attention.push, Usage: "bytes from a worker to each server"},
			&cli.IntFlag{Name: "pull", Value: attention.pull, Usage: "bytes from each server to a worker"},
			&cli.StringFlag{Name: "form", Value: formBoth, Usage: "form of the round trip: push_pull, prepared or both"},
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

const formBoth = "both"

// afdRun is one run of bench afd.
type afdRun struct {
	c                *cli.Context
	shape            afdShape
	workers, servers []int
	forms            []string
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
	Floor        string    `json:"floor"`       // "TCP" or "copies"
	Trips        []afdTrip `json:"round_trips"` // the floor's first
	Steps        []afdStep `json:"steps,omitempty"`
	Checked      bool      `json:"checked"`
	Processors   int       `json:"processors"`

	CPU map[string]float64 `json:"cpu_s"`
}

// afdTrip is a worker's round trips in one form.
type afdTrip struct {
	Form   string `json:"form"` // "floor" is the floor
	Worker int    `json:"worker"`
	Count  int    `json:"count"`
	quantiles
	RatioP50 float64 `json:"ratio_p50,omitempty"` // to the worker's floor
	RatioP99 float64 `json:"ratio_p99,omitempty"`
}

// afdStep is the decode steps in one form.
type afdStep struct {
	Form    string  `json:"form"`
	Compute float64 `json:"compute_us"`
	Count   int     `json:"count"`
	quantiles
	Alone    quantiles `json:"computation"` // without communication
	RatioP50 float64   `json:"ratio_p50"`   // to it
	RatioP99 float64   `json:"ratio_p99"`
}

// values reads the values of an option, separated by commas.
func values[T any](c *cli.Context, name, want string, parse func(string) (T, bool)) ([]T, error) {
	var all []T
	for text := range strings.SplitSeq(c.String(name), ",") {
		v, ok := parse(text)
		if !ok {
			dashes := "--"
			if len(name) == 1 {
				dashes = "-"
			}
			return nil, exit.Usage("bench afd: %s%s %s: want %s, or several separated by commas", dashes, name, c.String(name), want)
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
	switch form := c.String("form"); {
	case form == formBoth:
		r.forms = afdForms
	case slices.Contains(afdForms, form):
		r.forms = []string{form}
	default:
		return nil, exit.Usage("bench afd: --form %s: want %s, %s or %s", form, formPushPull, formPrepared, formBoth)
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
	limit := c.Duration("timeout")
	ctx, cancel := context.WithTimeoutCause(c.Context, limit, fmt.Errorf("%w (--timeout %s)", context.DeadlineExceeded, limit))
	defer cancel()
	if c.Bool("csv") {
		if err := writeCSV(c.App.Writer, afdColumns); err != nil {
			return err
		}
	}
	var all []*afdReport
	for _, n := range r.workers {
		for _, s := range r.servers {
			rep, err := r.measure(ctx, n, s)
			if err != nil {
				return fmt.Errorf("bench afd: workers: %d, servers: %d: %w", n, s, cmp.Or(context.Cause(ctx), err))
			}
			all = append(all, rep)
			if c.Bool("csv") {
				err = rep.csv(c.App.Writer)
			} else {
				err = show(c, rep)
			}
			if err != nil {
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
		Layers: r.shape.layers, MicroBatches: r.shape.microBatches, Floor: "TCP", Checked: true, Processors: runtime.NumCPU()}
	if rep.Van == local {
		rep.Floor = "copies"
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	r.progress(rep, "start", 0, 1)
	cl, err := startCluster(ctx, r.c, r.c.String("host"), place{}, s, n, "afd", r.shape.push, r.shape.pull, r.shape.microBatches, r.shape.layers)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			cancel() // ends processes that still wait
		}
		cpu, failed := cl.wait()
		if err == nil {
			err = failed
		}
		rep.CPU = cpu
	}()
	servers, workers := ranks(cl.children[1:1+s]), cl.last(n)
	if err := passFloors(servers, workers); err != nil {
		return nil, err
	}
	if _, err := workers.askEach(""); err != nil { // they are connected to the floor
		return nil, err
	}
	if err := r.trips(rep, workers); err != nil {
		return nil, err
	}
	for i := 0; i < len(r.compute) && rep.Layers > 0; i++ {
		if err := r.steps(rep, servers, workers, cl.last(s+n), r.compute[i]); err != nil {
			return nil, err
		}
	}
	return rep, nil
}

// trips measures round trips and the floor.
func (r *afdRun) trips(rep *afdReport, workers ranks) error {
	lines := []string{askFloor + " -"}
	for _, form := range r.forms {
		lines = append(lines, askCalls+" "+form)
	}
	times := make([][][]int64, len(lines)) // by line and worker
	for i := range times {
		times[i] = make([][]int64, len(workers))
	}
	iters, _ := defaults(course{rep.Van, cpu}, rep.Workers*rep.Servers*(rep.PushBytes+rep.PullBytes), r.c.Int("iters"), 0)
	all := blocks(iters, r.c.Int("rounds"))
	for block, k := range all {
		r.progress(rep, "round trips", block, len(all))
		for i, line := range lines {
			got, err := workers.askEach(fmt.Sprint(line, " 0 ", k))
			if err != nil {
				return err
			}
			for w := 0; w < len(got) && block > 0; w++ {
				times[i][w] = append(times[i][w], got[w].NS...)
			}
		}
	}
	for i, of := range times {
		for w, ns := range of {
			x := afdTrip{Form: askFloor, Worker: w, Count: len(ns), quantiles: summarize(ns)}
			if i > 0 {
				floor := rep.Trips[w]
				x.Form, x.RatioP50, x.RatioP99 = r.forms[i-1], x.P50/floor.P50, x.P99/floor.P99
			}
			rep.Trips = append(rep.Trips, x)
		}
	}
	return nil
}

// steps measures decode steps whose computations take d, and the computations alone.
func (r *afdRun) steps(rep *afdReport, servers, workers, both ranks, d time.Duration) error {
	if _, err := servers.askEach(fmt.Sprintf("%s - %d 0", askServe, d)); err != nil {
		return err
	}
	steps := make([][]int64, len(r.forms))
	var alone []int64
	block := func(k int, keep bool) error {
		ns, err := both.ask(fmt.Sprintf("%s - %d %d", askAlone, d, k))
		if err != nil {
			return err
		}
		if keep {
			alone = append(alone, ns...)
		}
		for i, form := range r.forms {
			if ns, err = workers.ask(fmt.Sprintf("%s %s %d %d", askSteps, form, d, k)); err != nil {
				return err
			}
			if keep {
				steps[i] = append(steps[i], ns...)
			}
		}
		return nil
	}
	r.progress(rep, fmt.Sprintf("decode steps of %s, warm-up", d), 0, 1)
	start := time.Now()
	if err := block(1, false); err != nil {
		return err
	}
	n := r.c.Int("steps")
	if n == 0 {
		n = min(max(int(afdStepTime/(time.Since(start)+1)), 10), 200)
	}
	all := blocks(n, r.c.Int("rounds"))[1:]
	for i, k := range all {
		r.progress(rep, fmt.Sprintf("decode steps of %s", d), i, len(all))
		if err := block(k, true); err != nil {
			return err
		}
	}
	q := summarize(alone)
	for i, form := range r.forms {
		x := afdStep{Form: form, Compute: float64(d) / 1e3, Count: n, quantiles: summarize(steps[i]), Alone: q}
		x.RatioP50, x.RatioP99 = x.P50/q.P50, x.P99/q.P99
		rep.Steps = append(rep.Steps, x)
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
	fmt.Fprintf(w, "%-26s %10s %10s %10s %10s %12s %8s\n", "microseconds", "p50", "p90", "p99", "max", "over floor", "p99")
	for _, x := range r.Trips {
		name, over := x.Form, ""
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
		fmt.Fprintf(w, "%-26s %10.2f %10.2f %10.2f %10.2f %12.2f %8d\n", fmt.Sprintf("%s, %s", time.Duration(x.Compute*1e3), x.Form),
			x.P50/1e3, x.P99/1e3, x.Alone.P50/1e3, x.Alone.P99/1e3, x.RatioP50, x.Count)
	}
	seconds := map[string]float64{}
	for name, s := range r.CPU {
		role, _, _ := strings.Cut(name, " ")
		seconds[role] += s
	}
	_, err := fmt.Fprintf(w, "CPU seconds: scheduler %.2f, servers %.2f, workers %.2f (start-up and floor included)\n",
		seconds["scheduler"], seconds["server"], seconds["worker"])
	return err
}

// afdColumns are the columns of --csv. base is the floor of a round trip, or the computation of a step alone.
var afdColumns = []string{"van", "workers", "servers", "push_bytes", "pull_bytes", "layers", "micro_batches", "measured", "form", "worker", "compute_us", "count",
	"p50_us", "p90_us", "p99_us", "max_us", "mean_us", "base_p50_us", "base_p99_us", "ratio_p50", "ratio_p99"}

// csv prints the report as rows with the columns afdColumns.
func (r *afdReport) csv(w io.Writer) error {
	micros := func(f float64) string { return strconv.FormatFloat(f, 'f', 3, 64) }
	row := func(shape []string, count int, q quantiles, base ...string) error {
		cells := []string{r.Van}
		for _, n := range []int{r.Workers, r.Servers, r.PushBytes, r.PullBytes} {
			cells = append(cells, strconv.Itoa(n))
		}
		cells = append(append(cells, shape...), strconv.Itoa(count), micros(q.P50), micros(q.P90), micros(q.P99), micros(q.Max), micros(q.Mean))
		return writeCSV(w, append(cells, base...))
	}
	for _, x := range r.Trips {
		base := make([]string, 4)
		if x.Form != askFloor {
			floor := r.Trips[x.Worker]
			base = []string{micros(floor.P50), micros(floor.P99), micros(x.RatioP50), micros(x.RatioP99)}
		}
		if err := row([]string{"", "", "round trip", x.Form, strconv.Itoa(x.Worker), ""}, x.Count, x.quantiles, base...); err != nil {
			return err
		}
	}
	for _, x := range r.Steps {
		shape := []string{strconv.Itoa(r.Layers), strconv.Itoa(r.MicroBatches), "step", x.Form, "", micros(x.Compute)}
		if err := row(shape, x.Count, x.quantiles, micros(x.Alone.P50), micros(x.Alone.P99), micros(x.RatioP50), micros(x.RatioP99)); err != nil {
			return err
		}
	}
	return nil
}

func writeCSV(w io.Writer, cells []string) error {
	c := csv.NewWriter(w)
	if err := c.Write(cells); err != nil {
		return err
	}
	c.Flush()
	return c.Error()
}
