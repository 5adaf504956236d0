package prog

import (
	"fmt"
	"slices"
	"strconv"
	"time"
)

// Latencies are samples of how long something took.
type Latencies []time.Duration

// Add adds a sample.
func (l *Latencies) Add(d time.Duration) { *l = append(*l, d) }

// Reset drops all samples.
func (l *Latencies) Reset() { *l = (*l)[:0] }

// Line describes the samples as the original's programs do:
//
//	<head>: mean=0.000us, min=..us, p50=..us, p90=..us, p99=..us, max=..us
//
// It sorts them. There must be at least one.
func (l Latencies) Line(head string) string {
	slices.Sort(l)
	var sum time.Duration
	for _, d := range l {
		sum += d
	}
	return fmt.Sprintf("%s: mean=%sus, min=%sus, p50=%sus, p90=%sus, p99=%sus, max=%sus", head,
		us(sum/time.Duration(len(l))), us(l[0]), us(l.percentile(50)), us(l.percentile(90)), us(l.percentile(99)), us(l[len(l)-1]))
}

// percentile p of sorted samples is at index int(n*p/100)-1, or the first.
func (l Latencies) percentile(p int) time.Duration { return l[max(len(l)*p/100-1, 0)] }

// us writes microseconds with six digits, as C++ streams do.
func us(d time.Duration) string { return strconv.FormatFloat(float64(d)/1e3, 'g', 6, 64) }
