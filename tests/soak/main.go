// Command soak carries out random plans on real processes, some at once, until its time
// is over: nodes are killed, stopped, woken, replaced and cut off, and every byte that
// workers get is checked. "make soak MINUTES=60" runs it.
//
// It prints a line now and then, and one for each plan in which something was wrong, with
// the command that repeats it. The logs of such plans stay in build/soak. The status is 0
// when nothing was wrong, 1 when something was, 2 when it could not run, 130 after SIGINT.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/tests/internal/real"
	"github.com/stepaf/stepaf-go/tests/internal/sim/plan"
)

func main() {
	real.Main() // in the processes of the plans
	os.Exit(run())
}

// soak is the options and the results so far.
type soak struct {
	dir    string
	host   string
	slow   int
	faults []string
	began  time.Time
	until  time.Time

	mu            sync.Mutex
	plans, wrong  int
	calls, failed int64
	seeds         []string // that were wrong
}

func run() int {
	minutes := flag.Float64("minutes", 60, "how long to go on")
	seed := flag.Uint64("seed", 0, "carry out this one plan only, on the leg of -leg")
	first := flag.Uint64("first", 0, "the first seed (0: by the clock)")
	leg := flag.String("leg", "", "tcp, shm or rdma only; without, tcp and shm")
	host := flag.String("host", "", "rdma: the address of a device")
	slow := flag.Int("slow", 1, "how many times as slow this machine is as the plans take for granted: all their times are so much longer")
	file := flag.String("plan", "", "carry out the plan of this file, on the leg of -leg")
	faults := flag.String("faults", "", "fail points to plant in all processes, with commas; for a build with the tag failpoints")
	jobs := flag.Int("jobs", 2, "plans at once")
	dir := flag.String("dir", "build/soak", "where logs of plans in which something was wrong are kept")
	flag.Parse()
	legs := []real.Leg{real.TCP, real.SHM}
	if *leg != "" {
		legs = []real.Leg{real.Leg(*leg)}
	}
	if *faults != "" && !failpoint.Enabled {
		fmt.Fprintln(os.Stderr, "soak: -faults needs a build with the tag failpoints")
		return 2
	}
	known := *leg == "" || slices.Contains([]real.Leg{real.TCP, real.SHM, real.RDMA}, real.Leg(*leg))
	if !known || (*host != "") != (*leg == string(real.RDMA)) || flag.NArg() > 0 || *jobs < 1 || *slow < 1 || *minutes <= 0 {
		fmt.Fprintln(os.Stderr, "soak: want -leg tcp or shm, or -leg rdma and -host, -jobs and -slow of 1 or more, -minutes above 0, and no arguments")
		return 2
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	s := &soak{dir: *dir, host: *host, slow: *slow, began: time.Now()}
	if *faults != "" {
		s.faults = strings.Split(*faults, ",")
	}
	s.until = s.began.Add(time.Duration(*minutes * float64(time.Minute)))
	if *seed != 0 || *file != "" {
		p := random(*seed, legs[0])
		if *file != "" {
			var err error
			if p, err = plan.ReadFile(*file); err != nil {
				fmt.Fprintln(os.Stderr, "soak:", err)
				return 2
			}
		}
		s.one(ctx, p, *seed, legs[0], func(line string) { fmt.Println(line) })
		return s.status(ctx)
	}
	next := *first
	if next == 0 {
		next = uint64(s.began.Unix())
	}
	fmt.Printf("soak: random plans for %s, %d at once, from seed %d\n", s.until.Sub(s.began).Round(time.Second), *jobs, next)
	var wg sync.WaitGroup
	var mu sync.Mutex
	for range *jobs {
		wg.Go(func() {
			for time.Now().Before(s.until) && ctx.Err() == nil {
				mu.Lock()
				seed := next
				next++
				mu.Unlock()
				leg := legs[seed%uint64(len(legs))]
				s.one(ctx, random(seed, leg), seed, leg, nil)
			}
		})
	}
	ended := make(chan struct{})
	go func() {
		wg.Wait()
		close(ended)
	}()
	tick := time.NewTicker(10 * time.Second)
	defer tick.Stop()
	for going := true; going; {
		select {
		case <-tick.C:
			s.progress()
		case <-ended:
			going = false
		}
	}
	return s.status(ctx)
}

// one carries out a plan.
func (s *soak) one(ctx context.Context, p *plan.Plan, seed uint64, leg real.Leg, log func(string)) {
	dir := filepath.Join(s.dir, fmt.Sprintf("%s-%s", p.Name, leg))
	_ = os.RemoveAll(dir)
	o := real.PlanOptions{Leg: leg, Host: s.host, Dir: dir, Log: log, Slow: s.slow, Faults: s.faults}
	if s.slow > 1 {
		o.Margin = 10 * time.Second
	}
	res, err := real.RunPlan(ctx, p, o)
	if ctx.Err() != nil {
		_ = os.RemoveAll(dir)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.plans++
	if err == nil {
		s.calls, s.failed = s.calls+res.Calls, s.failed+res.Failed
		if len(res.Wrong) == 0 {
			_ = os.RemoveAll(dir)
			return
		}
	} else {
		res = &real.Result{Wrong: []string{err.Error()}}
	}
	s.wrong++
	again := fmt.Sprintf("make soak SEED=%d LEG=%s", seed, leg)
	if s.slow > 1 {
		again += fmt.Sprintf(" SLOW=%d", s.slow)
	}
	if seed == 0 {
		again = fmt.Sprintf("the same command, for plan %s", p.Name)
	}
	s.seeds = append(s.seeds, again)
	_ = os.MkdirAll(dir, 0o755)
	text, _ := json.MarshalIndent(p, "", "  ")
	err = errors.Join(
		os.WriteFile(filepath.Join(dir, "plan.json"), append(text, '\n'), 0o644),
		os.WriteFile(filepath.Join(dir, "timeline"), []byte(strings.Join(res.Wrong, "\n")+"\n\n"+res.Timeline+"\n"), 0o644),
	)
	if err != nil {
		fmt.Fprintln(os.Stderr, "soak:", err)
	}
	fmt.Printf("soak: WRONG in plan %s on %s: %s\n      again: %s\n      logs: %s\n", p.Name, leg, strings.Join(res.Wrong, "\n      "), again, dir)
}

func (s *soak) progress() {
	s.mu.Lock()
	defer s.mu.Unlock()
	fmt.Println("soak: " + s.text() + ", " + max(time.Until(s.until), 0).Round(time.Second).String() + " left")
}

// text is the results so far. s.mu is held.
func (s *soak) text() string {
	took := time.Since(s.began)
	return fmt.Sprintf("%s: %d plans (%.1f a minute), %d calls with the right bytes, %d with an error, wrong in %d plans",
		took.Round(time.Second), s.plans, float64(s.plans)/took.Minutes(), s.calls, s.failed, s.wrong)
}

func (s *soak) status(ctx context.Context) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	fmt.Println("soak: the end: " + s.text())
	for _, x := range s.seeds {
		fmt.Println("      again: " + x)
	}
	switch {
	case s.wrong > 0:
		return 1
	case ctx.Err() != nil:
		return 130
	case s.plans == 0:
		return 2
	}
	return 0
}

// random is the plan of a seed.
func random(seed uint64, leg real.Leg) *plan.Plan {
	r := rand.New(rand.NewPCG(seed, 1))
	g := &generator{r: r, leg: leg, p: &plan.Plan{Name: fmt.Sprintf("seed-%d", seed), About: "What chance has brought."}}
	g.plan(seed)
	return g.p
}
