// Package sim runs simulated clusters (tests/internal/sim): the plans of tests/plans, plans
// made from seeds, and clusters with faults planted in them. As a program, which "make
// sim" runs, it takes a range of seeds and spreads them over processes.
package sim

import (
	"bufio"
	"cmp"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/tests/internal/sim"
	"github.com/stepaf/stepaf-go/tests/internal/sim/plan"
	"github.com/stepaf/stepaf-go/tests/testlimit"
)

var (
	seeds    = flag.Uint64("sim.seeds", 0, "run so many seeds, spread over processes, and nothing else")
	first    = flag.Uint64("sim.first", 1, "the first seed")
	procs    = flag.Int("sim.procs", runtime.NumCPU(), "processes to run seeds in")
	planName = flag.String("sim.plan", "", "run this plan (a file, or the name of one in tests/plans) instead of what each seed chooses")
	planted  = flag.String("sim.fault", "", "plant this fault; needs the build tag failpoints")
	story    = flag.Int("sim.lines", 400, "lines of the timeline of a seed that fails, if it is the only one")
	child    = flag.Bool("sim.child", false, "take seeds from standard input, for the process that spreads them")
)

// faultNames are the faults that can be planted, none without the build tag failpoints.
var faultNames []string

func TestMain(m *testing.M) {
	flag.Parse()
	if *planted != "" {
		if !failpoint.Enabled {
			fmt.Fprintln(os.Stderr, "sim: -sim.fault: this build has no faults: build with -tags failpoints")
			os.Exit(2)
		}
		names := strings.Split(*planted, ",")
		for _, n := range names {
			if !slices.Contains(faultNames, n) {
				fmt.Fprintf(os.Stderr, "sim: -sim.fault: no fault %q: want of %s\n", n, strings.Join(faultNames, ", "))
				os.Exit(2)
			}
		}
		failpoint.Plant(names...)
	}
	if *seeds > 0 && !*child {
		os.Exit(spread(*first, *seeds))
	}
	os.Exit(m.Run())
}

// outcome is the report of a child about a seed.
type outcome struct {
	Seed       uint64
	Plan       string
	Violations []string `json:",omitempty"`
	Calls      int
	Failed     int
	Virtual    time.Duration
	Hash       uint64
	Story      string `json:",omitempty"`
}

var plans = sync.OnceValues(func() ([]*plan.Plan, error) { return plan.ReadDir(plansDir()) })

// plansDir is tests/plans, wherever the program runs.
func plansDir() string {
	for _, d := range []string{"../plans", "tests/plans"} {
		if st, err := os.Stat(d); err == nil && st.IsDir() {
			return d
		}
	}
	return "../plans"
}

// overRDMA is the plans that can be carried out over RDMA as well.
func overRDMA(all []*plan.Plan) (fit []*plan.Plan) {
	for _, p := range all {
		if q, err := sim.OverRDMA(p); err == nil && p.Only != "processes" {
			fit = append(fit, q)
		}
	}
	return fit
}

// choose is the plan of a seed: every second is one of the files, the others are made from
// the seed. Of every twenty one is over RDMA.
func choose(seed uint64) (*plan.Plan, error) {
	if strings.HasSuffix(*planName, ".json") {
		return plan.ReadFile(*planName)
	}
	all, err := plans()
	if err != nil {
		return nil, err
	}
	if *planName != "" {
		for _, p := range append(overRDMA(all), all...) {
			if p.Name == *planName {
				return p, nil
			}
		}
		return nil, fmt.Errorf("no plan %q in %s", *planName, plansDir())
	}
	if seed%20 == 19 {
		n := seed / 20
		if n%2 == 1 {
			return plan.RandomOverRDMA(seed), nil
		}
		// The plans written for RDMA come first: TestFaults must reach each of them
		// within its 500 seeds, and the list grows with every other plan.
		var fit []*plan.Plan
		for _, p := range all {
			if p.Transport.Kind == "rdma" && p.Only != "processes" {
				fit = append(fit, p)
			}
		}
		fit = append(fit, overRDMA(all)...)
		if len(fit) > 0 {
			return fit[n/2%uint64(len(fit))], nil
		}
	}
	if seed%2 == 0 {
		var fit []*plan.Plan
		for _, p := range all {
			if p.Only != "processes" && !known[p.Name] && p.Transport.Kind != "rdma" {
				fit = append(fit, p)
			}
		}
		if len(fit) > 0 {
			return fit[seed/2%uint64(len(fit))], nil
		}
	}
	return plan.Random(seed), nil
}

// one runs a seed.
func one(t *testing.T, seed uint64, lines int) outcome {
	p, err := choose(seed)
	if err != nil {
		return outcome{Seed: seed, Violations: []string{err.Error()}}
	}
	r := sim.Run(t, p, seed)
	o := outcome{Seed: seed, Plan: p.Name, Calls: r.Calls, Failed: r.Failed, Virtual: r.Virtual, Hash: r.Hash}
	for _, v := range r.Violations {
		o.Violations = append(o.Violations, v.String())
	}
	if len(o.Violations) > 0 && lines > 0 {
		var b strings.Builder
		r.WriteTimeline(&b, lines)
		o.Story = b.String()
	}
	return o
}

// TestChild is the program of a process that spread has started.
func TestChild(t *testing.T) {
	if !*child {
		t.Skip("only for -sim.seeds")
	}
	lines := 0
	if *seeds == 1 {
		lines = *story
	}
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() {
		seed, err := strconv.ParseUint(in.Text(), 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		b, err := json.Marshal(one(t, seed, lines))
		if err != nil {
			t.Fatal(err)
		}
		fmt.Printf("\n%s%s\n", mark, b)
	}
}

const (
	mark    = "outcome "
	oneLife = 1000 // seeds of one process
	most    = 20   // failures that are reported in full; the summary names all
)

// Limits of a seed. They are limits of processor time, since the wall time of a seed depends on other programs of the machine.
const (
	stillTime = time.Minute            // a seed hangs if its process uses less than stillUse in this time
	stillUse  = 100 * time.Millisecond // with a load of 100 for each processor it would be 600 ms
)

// oneTime limits the processor time of a seed. A test shortens it.
var oneTime = 20 * time.Second

// meter measures how long a seed has run.
type meter struct {
	begun time.Duration // processor time at the beginning
	since time.Time     // since then the process has used less than stillUse
	at    time.Duration // processor time at since
}

// over returns the reason why the seed has exceeded a limit, or "". used is the processor time of its process.
func (m *meter) over(now time.Time, used time.Duration) string {
	if m.since.IsZero() {
		m.begun = used
	}
	if m.since.IsZero() || used-m.at >= stillUse {
		m.since, m.at = now, used
	}
	switch {
	case used-m.begun >= oneTime:
		return fmt.Sprintf("it has not ended after %s of processor time", oneTime)
	case now.Sub(m.since) >= stillTime:
		return fmt.Sprintf("it hangs: %s of processor time in the last %s", used-m.at, stillTime)
	}
	return ""
}

// measure ends the child with a report of its goroutines when its seed has exceeded a limit, and
// returns the reason. It ends when over is closed.
func (p *process) measure(over <-chan struct{}) (why string) {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for m := (meter{}); ; {
		used, err := testlimit.ProcessorTime(p.cmd.Process.Pid)
		if err != nil { // it has crashed
			return ""
		}
		if why = m.over(time.Now(), used); why != "" {
			_ = p.cmd.Process.Signal(syscall.SIGQUIT)
			return why
		}
		select {
		case <-tick.C:
		case <-over:
			return ""
		}
	}
}

// showEvery is the time between two lines of progress: less often in a file than on a terminal.
var showEvery = sync.OnceValue(func() time.Duration {
	if st, err := os.Stdout.Stat(); err == nil && st.Mode()&os.ModeCharDevice != 0 {
		return 2 * time.Second
	}
	return 20 * time.Second
})

// process is a child.
type process struct {
	cmd  *exec.Cmd
	in   io.WriteCloser
	out  *bufio.Reader
	err  *tail
	done int
}

// tail is a writer that keeps the last bytes.
type tail struct {
	mu sync.Mutex
	b  []byte
}

func (t *tail) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.b = append(t.b, b...); len(t.b) > 1<<16 {
		t.b = append([]byte(nil), t.b[:1<<15]...) // the beginning of a crash says most
	}
	return len(b), nil
}

func begin(fault string) (*process, error) {
	args := []string{"-test.run=^TestChild$", "-test.timeout=0", "-sim.child", "-sim.plan=" + *planName, "-sim.fault=" + fault,
		"-sim.seeds=" + strconv.FormatUint(*seeds, 10), "-sim.lines=" + strconv.Itoa(*story)}
	cmd := exec.Command(os.Args[0], args...)
	cmd.Env = append(os.Environ(), "GOMAXPROCS=1", "GOGC=400")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL} // the terminal's SIGINT is ours
	return start(cmd)
}

// start starts a process that takes seeds.
func start(cmd *exec.Cmd) (*process, error) {
	p := &process{cmd: cmd, err: &tail{}}
	cmd.Stderr = p.err
	var err error
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	p.out = bufio.NewReaderSize(out, 1<<20)
	return p, p.cmd.Start()
}

// run gives a seed to the child and waits for its outcome. If run returns false, the child has ended.
func (p *process) run(seed uint64) (outcome, bool) {
	over, ended := make(chan struct{}), make(chan string, 1)
	go func() { ended <- p.measure(over) }()
	stop := sync.OnceValue(func() string { close(over); return <-ended })
	defer stop()
	fmt.Fprintln(p.in, seed)
	var said strings.Builder
	for {
		line, err := p.out.ReadString('\n')
		if text, ok := strings.CutPrefix(line, mark); ok {
			var o outcome
			if json.Unmarshal([]byte(text), &o) == nil {
				return o, true
			}
		}
		if said.Len() < 1<<16 {
			said.WriteString(line)
		}
		if err != nil {
			_ = p.cmd.Wait()
			why := cmp.Or(stop(), "the process that ran it has crashed")
			return outcome{Seed: seed, Violations: []string{why + ":\n" + running(said.String()+string(p.err.b))}}, false
		}
	}
}

// running removes from a crash report the goroutines that synctest counts as durably blocked.
func running(report string) string {
	var kept []string
	for _, g := range strings.Split(report, "\n\n") {
		if line, _, _ := strings.Cut(g, "\n"); !strings.HasPrefix(line, "goroutine ") || strings.Contains(line, "bubble") && !strings.Contains(line, "(durable)") {
			kept = append(kept, g)
		}
	}
	text := strings.Join(kept, "\n\n")
	return text[:min(len(text), 8000)]
}

func (p *process) end() {
	_ = p.in.Close()
	_, _ = io.Copy(io.Discard, p.out)
	_ = p.cmd.Wait()
}

// totals is the results so far.
type totals struct {
	mu              sync.Mutex
	done            uint64
	calls, failed   int
	virtual         time.Duration
	bad             []uint64 // seeds
	begun, lastTold time.Time
}

// spread runs seeds in processes, shows how far it is, and returns the status to exit with.
func spread(first, count uint64) int {
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, os.Interrupt, syscall.SIGTERM)
	todo := make(chan uint64)
	quit := make(chan struct{})
	interrupted := false
	var once sync.Once
	go func() {
		<-stop
		interrupted = true
		once.Do(func() { close(quit) })
	}()
	go func() {
		defer close(todo)
		for s := first; s-first < count; s++ {
			select {
			case todo <- s:
			case <-quit:
				return
			}
		}
	}()
	t := &totals{begun: time.Now(), lastTold: time.Now()}
	var wg sync.WaitGroup
	for range max(1, min(uint64(*procs), count)) {
		wg.Go(func() {
			var p *process
			for seed := range todo {
				if p == nil {
					var err error
					if p, err = begin(*planted); err != nil {
						fmt.Fprintln(os.Stderr, "sim:", err)
						once.Do(func() { close(quit) })
						return
					}
				}
				o, ok := p.run(seed)
				t.add(o)
				if p.done++; !ok {
					p = nil
				} else if p.done >= oneLife {
					p.end()
					p = nil
				}
				t.show(count)
			}
			if p != nil {
				p.end()
			}
		})
	}
	wg.Wait()
	return t.summary(first, count, interrupted)
}

func (t *totals) add(o outcome) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.done++
	t.calls += o.Calls
	t.failed += o.Failed
	t.virtual += o.Virtual
	if len(o.Violations) == 0 {
		return
	}
	if t.bad = append(t.bad, o.Seed); len(t.bad) <= most {
		fmt.Printf("FAIL seed %d (%s): %s\n     make sim SEEDS=1 FIRST=%d%s\n%s", o.Seed, o.Plan, o.Violations[0], o.Seed, o.replay(), o.Story)
	}
}

// replay is the arguments of the command besides the seed.
func (o *outcome) replay() (s string) {
	if *planName != "" {
		s += " PLAN=" + *planName
	}
	if *planted != "" {
		s += " FAULT=" + *planted
	}
	return s
}

// show tells how far it is, now and then.
func (t *totals) show(count uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := time.Now()
	if t.done == count || now.Sub(t.lastTold) < showEvery() {
		return
	}
	t.lastTold = now
	spent := now.Sub(t.begun)
	rate := float64(t.done) / spent.Seconds()
	left := time.Duration(float64(count-t.done)/rate) * time.Second
	fmt.Printf("%d of %d seeds, %.1f seeds/s, %s left, %d failed\n", t.done, count, rate, left.Round(time.Second), len(t.bad))
}

func (t *totals) summary(first, count uint64, interrupted bool) int {
	spent := time.Since(t.begun)
	fmt.Printf("%d seeds from %d on, %d failed; %d calls, %d of them ended with an error as they should; %s in the clusters, %s here, %.1f seeds/s\n",
		t.done, first, len(t.bad), t.calls, t.failed, t.virtual.Round(time.Second), spent.Round(100*time.Millisecond), float64(t.done)/spent.Seconds())
	fmt.Printf("%d passed, %d failed: seeds %d to %d\n", t.done-uint64(len(t.bad)), len(t.bad), first, first+count-1)
	if len(t.bad) > 0 {
		slices.Sort(t.bad)
		fmt.Printf("failed: %s\n", strings.Trim(fmt.Sprint(t.bad), "[]"))
	}
	switch {
	case len(t.bad) > 0:
		return 1
	case interrupted:
		fmt.Printf("interrupted: %d seeds have not run\n", count-t.done)
		return 130
	case t.done < count:
		return 1
	}
	return 0
}
