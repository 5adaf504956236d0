package prog

import (
	"context"
	"time"
)

// Measure does BENCHMARK_ITER rounds of each calls of round, and logs how long
// these took: every window of samples under "<name> batch latency: ", at the end
// also one that is not full. round returns its time to be measured. The
// samples of BENCHMARK_WARMUP rounds before that are thrown away. All samples are
// returned, unless the rounds are endless.
//
// The lines are written at level error, so that they appear at PS_VERBOSE=0.
func (n *Node) Measure(ctx context.Context, name string, window, each int, round func(i int) (time.Duration, error)) (Latencies, error) {
	b := n.Config().Bench
	n.Log().Info("warmup starts", "rounds", b.Warmup)
	for i := range b.Warmup * each {
		if _, err := round(i); err != nil {
			return nil, err
		}
	}
	var all, recent Latencies
	report := func() {
		n.Log().Error(recent.Line(name + " batch latency: "))
		recent.Reset()
	}
	for i := range Rounds(b.Iterations * each) {
		d, err := round(b.Warmup*each + i)
		if err != nil {
			return all, err
		}
		recent.Add(d)
		if b.Iterations > 0 {
			all.Add(d)
		}
		if len(recent) == window {
			report()
		}
	}
	if len(recent) > 0 {
		report()
	}
	return all, ctx.Err()
}
