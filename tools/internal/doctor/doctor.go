// Package doctor checks a machine for everything that StepAF needs: versions and configuration, a message over ZeroMQ,
// GPUs, and RDMA from its libraries to a round trip on each port. It changes nothing.
//
// The checks run one after the other, see exam.checks. To add one, write a method of exam, or of its part for RDMA or
// GPUs, and add it to the list.
package doctor

import (
	"cmp"
	"context"
	"errors"
	"strings"
	"time"

	"github.com/stepaf/stepaf-go/van/env"
)

// check is one check.
type check struct {
	name string // name of findings without a name; prefix of the names of others
	rdma bool   // needed only for ibverbs
	run  func(context.Context) []Finding
}

// checks lists all checks in order. A check may use the results of earlier ones.
func (x *exam) checks() []check {
	return []check{
		{"versions", false, x.versions},
		{"system", false, x.system},
		{"environment", false, x.environment},
		{"secret", false, x.secret},
		{"limits", false, x.limits},
		{"zmq loopback", false, x.zmqLoopback},
		{"rdma build", true, x.rdma.build},
		{"rdma libraries", true, x.rdma.libraries},
		{"rdma devices", true, x.rdma.devices},
		{"rdma port", true, x.rdma.ports},
		{"locked memory", true, x.rdma.lockedMemory},
		{"rdma address", true, x.rdma.address},
		{"rdma loopback", true, x.rdma.loopback},
		{"gpu", false, x.gpu.list},
		{gpuPairs, false, x.gpu.pairs},
		{"same host", false, x.gpu.sameHost},
		{"exposed", false, x.exposed},
	}
}

// exam is the state of a run of all checks.
type exam struct {
	*subject
	rdma rdmaExam
	gpu  gpuExam
}

// grace is the time for which a check may continue after its context has ended.
const grace = time.Second

// Run checks m and calls each for every finding. It ends early if ctx ends; the report then lists the checks that were
// not made. A check that does not end is left running.
func Run(ctx context.Context, m *Machine, each func(Finding)) (Report, error) {
	s := &subject{m: m, early: make(chan Finding)}
	x := &exam{subject: s, rdma: rdmaExam{subject: s}, gpu: gpuExam{subject: s}}
	x.cfg, x.cfgErr = env.LoadFrom(m.Env)
	x.needRDMA = x.cfg.VanType == ibverbs
	r := Report{Van: x.cfg.VanType}
	add := func(f Finding) {
		f.Status = cmp.Or(f.Status, OK)
		f.Text = strings.ReplaceAll(strings.TrimSpace(f.Text), "\n", "; ") // from joined errors
		r.Findings = append(r.Findings, f)
		each(f)
	}
	all := x.checks()
	for i, c := range all {
		if ctx.Err() != nil {
			add(x.unseen(ctx, all[i:]))
			break
		}
		of := func(f Finding) {
			f.Name = cmp.Or(f.Name, c.name)
			add(f)
		}
		done := make(chan []Finding, 1)
		go func() { done <- c.run(ctx) }()
		found, ended := x.await(ctx, done, of)
		for _, f := range found {
			of(f)
		}
		if !ended {
			of(Finding{Status: x.unknown(c), Text: "does not end: " + reason(ctx), Remedy: "see dmesg; a driver or device may hang"})
		}
	}
	r.count()
	if err := context.Cause(ctx); err != nil && !errors.Is(err, context.DeadlineExceeded) {
		return r, err
	}
	return r, nil
}

// unknown returns the status of a check without a result: it counts as a defect.
func (x *exam) unknown(c check) Status {
	switch {
	case c.rdma:
		return x.orFail(Warn)
	case c.name == "same host", c.name == "exposed", c.name == gpuPairs, c.name == "gpu" && !x.needGPU():
		return Warn
	}
	return Fail
}

// unseen returns the finding for all checks that were not made.
func (x *exam) unseen(ctx context.Context, rest []check) Finding {
	f := Finding{Name: rest[0].name, Status: Warn, Remedy: "run it again, with a longer --timeout"}
	var names []string
	for _, c := range rest {
		names = append(names, c.name)
		if x.unknown(c) == Fail {
			f.Status = Fail
		}
	}
	f.Text = "not checked: " + reason(ctx)
	if len(names) > 1 {
		f.Text += "; nor " + strings.Join(names[1:], ", ")
	}
	return f
}

// await waits for a check, until shortly after the end of ctx. It calls each for early findings.
func (x *exam) await(ctx context.Context, done <-chan []Finding, each func(Finding)) (found []Finding, ended bool) {
	over, late := ctx.Done(), (<-chan time.Time)(nil)
	for {
		select {
		case found = <-done:
			return found, true
		case f := <-x.early:
			each(f)
		case <-over:
			over, late = nil, time.After(grace)
		case <-late:
			return nil, false
		}
	}
}
