package main

import (
	"fmt"
	"io"
	"math"
	"slices"
	"strings"

	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van"
)

// shown are the handlers of a batch that the report takes apart.
var shown = []string{"push 1", "push 2", "pull 1"}

// legs are the parts of a message's way. net_cost is the time of both networks
// together: the offset between the two hosts' clocks cancels there, and all
// others are differences of one clock. s and e are the clock around the whole call.
var legs = []struct {
	name string
	ns   func(s, e uint64, req, res *van.Trace) int64
}{
	{"python_req", func(s, _ uint64, req, _ *van.Trace) int64 { return int64(req.Start - s) }},
	{"req_send", func(_, _ uint64, req, _ *van.Trace) int64 { return int64(req.PostSend - req.Start) }},
	{"req_recv", func(_, _ uint64, req, _ *van.Trace) int64 { return int64(req.Process - req.PostRecv) }},
	{"process  ", func(_, _ uint64, req, res *van.Trace) int64 { return int64(res.Start - req.Process) }},
	{"rsp_send", func(_, _ uint64, _, res *van.Trace) int64 { return int64(res.PostSend - res.Start) }},
	{"rsp_recv", func(_, _ uint64, _, res *van.Trace) int64 { return int64(res.Process - res.PostRecv) }},
	{"python_rsp", func(_, e uint64, _, res *van.Trace) int64 { return int64(e - res.Process) }},
	{"net_cost", func(_, _ uint64, req, res *van.Trace) int64 {
		return int64(res.PostRecv - req.PostSend - (res.PostSend - req.PostRecv))
	}},
}

// report collects milliseconds.
type report struct {
	gpu     int
	overall []float64
	parts   [][][]float64 // by shown handler and leg
}

func newReport(gpu int) *report {
	r := &report{gpu: gpu, parts: make([][][]float64, len(shown))}
	for i := range r.parts {
		r.parts[i] = make([][]float64, len(legs))
	}
	return r
}

func (r *report) len() int { return len(r.overall) }

// add adds one round.
func (r *report) add(traces []postoffice.Trace, start, end uint64) {
	r.overall = append(r.overall, ms(int64(end-start)))
	for i := range r.parts {
		t := &traces[i]
		for k, leg := range legs {
			r.parts[i][k] = append(r.parts[i][k], ms(leg.ns(start, end, &t.Request, &t.Response)))
		}
	}
}

func ms(ns int64) float64 { return float64(ns) / 1e6 }

// print writes the report and begins the next one. Without rounds it does nothing.
func (r *report) print(w io.Writer) {
	if r.len() == 0 {
		return
	}
	var b strings.Builder
	slices.Sort(r.overall)
	fmt.Fprintf(&b, "comm bmk gpu=%d: mean=%.3fms, p50=%.3fms, p99=%.3fms, max=%.3fms\n", r.gpu,
		mean(r.overall), percentile(r.overall, 50), percentile(r.overall, 99), r.overall[r.len()-1])
	for i, name := range shown {
		fmt.Fprintf(&b, "\t gpu=%d %s:\n", r.gpu, name)
		for k, leg := range legs {
			x := r.parts[i][k]
			slices.Sort(x)
			fmt.Fprintf(&b, "\t\t%s\t%.3f\t%.3f\t%.3f", leg.name, mean(x), percentile(x, 50), percentile(x, 99))
			sep := "\t"
			for j := len(x) - 1; j >= max(len(x)-3, 0); j-- {
				fmt.Fprintf(&b, "%s%.3f", sep, x[j])
				sep = " "
			}
			b.WriteByte('\n')
		}
	}
	b.WriteByte('\n')
	io.WriteString(w, b.String())
	*r = *newReport(r.gpu)
}

func mean(x []float64) float64 {
	sum := 0.0
	for _, v := range x {
		sum += v
	}
	return sum / float64(len(x))
}

// percentile is numpy's: between two samples it interpolates. x is sorted.
func percentile(x []float64, p float64) float64 {
	at := p / 100 * float64(len(x)-1)
	i, f := math.Modf(at)
	lo := x[int(i)]
	return lo + f*(x[min(int(i)+1, len(x)-1)]-lo)
}
