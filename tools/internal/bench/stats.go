package bench

import (
	"encoding/json"
	"io"
	"slices"
	"syscall"
	"time"

	"github.com/urfave/cli/v2"
)

// tail is the median and larger quantiles of a set of durations, in microseconds.
type tail struct {
	P50 float64 `json:"p50_us"`
	P90 float64 `json:"p90_us"`
	P99 float64 `json:"p99_us"`
	Max float64 `json:"max_us"`
}

// quantiles are the tail and the mean of a set of durations, in microseconds.
type quantiles struct {
	tail
	Mean float64 `json:"mean_us"`
}

// summarize sorts ns.
func summarize(ns []int64) quantiles {
	if len(ns) == 0 {
		return quantiles{}
	}
	slices.Sort(ns)
	sum := 0.0
	for _, v := range ns {
		sum += float64(v)
	}
	at := func(p float64) float64 { return float64(ns[min(int(p*float64(len(ns))), len(ns)-1)]) / 1e3 }
	return quantiles{tail{at(0.50), at(0.90), at(0.99), at(1)}, sum / float64(len(ns)) / 1e3}
}

// comparison is the ratio of times to those of a baseline of the same run, and the goal of the ratio at p50.
type comparison struct {
	RatioP50 float64 `json:"ratio_p50,omitempty"`
	RatioP99 float64 `json:"ratio_p99,omitempty"`
	Goal     float64 `json:"goal_ratio_p50,omitempty"` // maximum of RatioP50
	Missed   bool    `json:"missed,omitempty"`
}

// to compares q with a baseline.
func (q quantiles) to(base quantiles) comparison {
	return comparison{RatioP50: q.P50 / base.P50, RatioP99: q.P99 / base.P99}
}

// timed makes n calls, one after the other, and returns the nanoseconds of each.
func timed(n int, call func(i int) error) ([]int64, error) {
	ns := make([]int64, n)
	for i := range ns {
		start := time.Now()
		if err := call(i); err != nil {
			return nil, err
		}
		ns[i] = int64(time.Since(start))
	}
	return ns, nil
}

// blocks returns the number of calls of each block. The first block is the warm-up; the others have iters calls
// together.
func blocks(iters, rounds int) []int {
	all := []int{max(iters/10, 2)}
	for k := range rounds {
		if n := iters*(k+1)/rounds - iters*k/rounds; n > 0 {
			all = append(all, n)
		}
	}
	return all
}

// shown is a report. Its fields are its JSON.
type shown interface {
	print(w io.Writer) error // as text
}

// show prints a report in the form that --json chooses.
func show(c *cli.Context, r shown) error {
	if c.Bool("json") {
		return json.NewEncoder(c.App.Writer).Encode(r)
	}
	return r.print(c.App.Writer)
}

// cpuTime returns the CPU time of this process.
func cpuTime() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
