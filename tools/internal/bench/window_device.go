package bench

import (
	"fmt"
	"io"
)

// Windows on GPUs. One way is the time from before the PutSignal until the CPU of the other rank sees the data, by the
// clock of the host: its WaitSignal returns, or, in streams, it sees the end of the waiting stream. The floor is that
// of bench latency: a copy into the other process's memory and then a flag for its CPU; one way is half a round trip.
// Ahead is the average of one way in streams when both ranks have queued all round trips of a block, so that no CPU
// takes part.

// windowGPUGoals are ratios of one way to the floor's, at p50, for the attention payload in both directions.
var windowGPUGoals = map[int]float64{917504: 1.2, 1835008: 1.2}

var windowGPUSizes = []int{1 << 10, 917504, 1835008, 16 << 20}

// windowGPUReport is the JSON line of bench window --device gpu. The ratios are those of one way.
type windowGPUReport struct {
	windowFigures
	where
	Streams quantiles `json:"one_way_streams"`
	Ahead   quantiles `json:"one_way_ahead"` // of blocks
	Floor   quantiles `json:"floor_one_way"`
}

func (r *windowGPUReport) String() string {
	return fmt.Sprintf("PutSignal of %d bytes of a GPU", r.Bytes)
}

// newWindowGPUReport adds to f the floor's round trips, the ways in streams, and the averages of blocks ahead.
func newWindowGPUReport(f windowFigures, at place, floor, streams, ahead []int64) *windowGPUReport {
	r := &windowGPUReport{windowFigures: f, where: at.where(), Streams: summarize(streams), Ahead: summarize(ahead)}
	for i := range floor {
		floor[i] /= 2
	}
	r.Floor = summarize(floor)
	r.RatioP50, r.RatioP99 = r.OneWay.P50/r.Floor.P50, r.OneWay.P99/r.Floor.P99
	return r
}

func (r *windowGPUReport) judge(v *verdict) {
	r.Goal = windowGPUGoals[r.Bytes]
	r.Missed = v.judge(r, goal{of: ourFloor, limit: r.Goal}, r.RatioP50)
}

const windowGPUHead = "two ranks, one GPU each, microseconds, data checked\n   bytes   iters     one way      p99       trip      p99   streams      p99   ahead    floor p50      p99  ratio goal\n"

func (r *windowGPUReport) print(w io.Writer) error {
	_, err := fmt.Fprintf(w, "%9d %6d   %9.1f %9.1f  %9.1f %9.1f %9.1f %9.1f %7.1f   %9.1f %9.1f %6.2f %s\n", r.Bytes, r.Iters,
		r.OneWay.P50, r.OneWay.P99, r.Trip.P50, r.Trip.P99, r.Streams.P50, r.Streams.P99, r.Ahead.P50, r.Floor.P50, r.Floor.P99,
		r.RatioP50, goalText("-", r.Goal, r.Missed))
	if r.Note != "" {
		fmt.Fprintln(w, "note:", r.Note)
	}
	return err
}
