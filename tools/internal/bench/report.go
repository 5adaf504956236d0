package bench

import (
	"fmt"
	"io"
)

// latencyReport is the JSON line of bench latency.
type latencyReport struct {
	Van string `json:"van"`
	where
	PushBytes int `json:"push_bytes"`
	PullBytes int `json:"pull_bytes"`
	Iters     int `json:"iters"`
	quantiles
	comparison                    // with the floor
	Floor      string             `json:"floor"` // "TCP", "verbs" or "GPU"
	FloorP50   float64            `json:"floor_p50_us"`
	FloorP90   float64            `json:"floor_p90_us"`
	FloorP99   float64            `json:"floor_p99_us"`
	FloorMax   float64            `json:"floor_max_us"`
	Bare       *bareReport        `json:"zmq,omitempty"`
	Load       bool               `json:"load,omitempty"`   // whether every core was kept busy
	Touch      bool               `json:"touch,omitempty"`  // whether every byte was read and written between rounds
	Shared     bool               `json:"shared,omitempty"` // whether the server maps the worker's tensors
	CPU        map[string]float64 `json:"cpu_s"`
	WorkerPart float64            `json:"worker_measured_cpu_s"`
	Checked    bool               `json:"checked"`
	RDMA       *rdmaReport        `json:"rdma,omitempty"`
}

// where describes the place of the tensors.
type where struct {
	Device   string `json:"device"`             // "cpu" or "gpu"
	GPUs     []int  `json:"gpus,omitempty"`     // the worker's and the server's
	Prepared bool   `json:"prepared,omitempty"` // by both ends
	Note     string `json:"note,omitempty"`     // a reservation about the figures
}

// bareReport is a round trip of libzmq alone, and the ratio of a push_pull to it.
type bareReport struct {
	tail
	comparison
}

// where describes the place for a report.
func (p place) where() where { return where{deviceOf(p.gpus), p.gpus, p.both, p.note()} }

// newLatencyReport returns the report of the times of round trips, the floor, and, unless bareNS is nil, libzmq alone.
func newLatencyReport(van string, at place, p payload, iters int, ns, floorNS, bareNS []int64) *latencyReport {
	ours, floor := summarize(ns), summarize(floorNS)
	rep := &latencyReport{Van: van, where: at.where(), PushBytes: p.push, PullBytes: p.pull, Iters: iters,
		quantiles: ours, comparison: ours.to(floor), FloorP50: floor.P50, FloorP90: floor.P90, FloorP99: floor.P99, FloorMax: floor.Max, Checked: true}
	if bareNS != nil {
		q := summarize(bareNS)
		rep.Bare = &bareReport{q.tail, ours.to(q)}
	}
	return rep
}

func (r *latencyReport) print(w io.Writer) error {
	on, checked := "", "all answers checked"
	switch {
	case r.GPUs != nil:
		how := ""
		if r.Prepared {
			how = ", prepared by both ends"
		}
		on, checked = fmt.Sprintf(" (gpu:%d and gpu:%d%s)", r.GPUs[0], r.GPUs[1], how), "values checked around each block"
	case r.RDMA != nil:
		on = fmt.Sprintf(" (%s port %d, %s)", r.RDMA.Device, r.RDMA.Port, r.RDMA.Host)
	}
	fmt.Fprintf(w, "push_pull over %s%s, push %d bytes, pull %d bytes, %d round trips, %s: %t\n",
		r.Van, on, r.PushBytes, r.PullBytes, r.Iters, checked, r.Checked)
	if r.Load {
		fmt.Fprintln(w, "every core was kept busy by a loop")
	}
	if r.Touch {
		fmt.Fprintln(w, "every byte was read and written between rounds")
	}
	if r.Shared {
		fmt.Fprintln(w, "the server maps the worker's tensors: no bytes are copied, each end writes one word of each 4 KiB")
	}
	if r.Note != "" {
		fmt.Fprintf(w, "note: %s\n", r.Note)
	}
	fmt.Fprintf(w, "%-16s %10s %10s %10s %10s\n", "microseconds", "p50", "p90", "p99", "max")
	fmt.Fprintf(w, "%-16s %10.1f %10.1f %10.1f %10.1f\n", "push_pull", r.P50, r.P90, r.P99, r.Max)
	fmt.Fprintf(w, "%-16s %10.1f %10.1f %10.1f %10.1f\n", "floor ("+r.Floor+")", r.FloorP50, r.FloorP90, r.FloorP99, r.FloorMax)
	fmt.Fprintf(w, "%-16s %10.2f %10.2f %10.2f %10.2f\n", "ratio", r.RatioP50, r.P90/r.FloorP90, r.RatioP99, r.Max/r.FloorMax)
	if b := r.Bare; b != nil {
		fmt.Fprintf(w, "%-16s %10.1f %10.1f %10.1f %10.1f\n", "libzmq by itself", b.P50, b.P90, b.P99, b.Max)
		fmt.Fprintf(w, "%-16s %10.2f %10.2f %10.2f %10.2f\n", "ratio to that", b.RatioP50, r.P90/b.P90, b.RatioP99, r.Max/b.Max)
	}
	if r.Goal > 0 {
		fmt.Fprintf(w, "push_pull takes %.2f times the floor at p50%s\n", r.RatioP50, goal{limit: r.Goal}.text())
	}
	if r.RDMA != nil {
		r.RDMA.print(w, "push_pull")
	}
	fmt.Fprintf(w, "CPU seconds: scheduler %.2f, server %.2f, worker %.2f (start-up and floor included)\n",
		r.CPU["scheduler"], r.CPU["server"], r.CPU["worker"])
	return nil
}
