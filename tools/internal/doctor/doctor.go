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
	name    string // name of findings without a name; prefix of the names of others
	unknown Status // of a check without a result: it counts as a defect
	run     func(context.Context) []Finding
}

// checks lists all checks in order. A check may use the results of earlier ones.
func (x *exam) checks() []check {
	rdma, gpu := x.orFail(Warn), Warn
	if x.needGPU() {
		gpu = Fail
	}
	return []check{
		{"versions", Fail, x.versions},
		{"system", Fail, x.system},
		{"environment", Fail, x.environment},
		{"secret", Fail, x.secret},
		{"limits", Fail, x.limits},
		{"zmq loopback", Fail, x.zmqLoopback},
		{"rdma build", rdma, x.rdma.build},
		{"rdma libraries", rdma, x.rdma.libraries},
		{"rdma devices", rdma, x.rdma.devices},
		{"rdma port", rdma, x.rdma.ports},
		{"locked memory", rdma, x.rdma.lockedMemory},
		{"rdma address", rdma, x.rdma.address},
		{"rdma loopback", rdma, x.rdma.loopback},
		{"gpu", gpu, x.gpu.list},
		{gpuPairs, Warn, x.gpu.pairs},
		{"same host", Warn, x.gpu.sameHost},
		{"exposed", Warn, x.exposed},
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
	r := Report{Van: x.cfg.VanType, Healthy: true}
	add := func(f Finding) {
		f.Status = cmp.Or(f.Status, OK)
		f.Text = strings.ReplaceAll(strings.TrimSpace(f.Text), "\n", "; ") // from joined errors
		r.add(f)
		each(f)
	}
	all := x.checks()
	for i, c := range all {
		if ctx.Err() != nil {
			add(unseen(ctx, all[i:]))
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
			of(Finding{Status: c.unknown, Text: "does not end: " + reason(ctx), Remedy: "see dmesg; a driver or device may hang"})
		}
	}
	if err := context.Cause(ctx); err != nil && !errors.Is(err, context.DeadlineExceeded) {
		return r, err
	}
	return r, nil
}

// unseen returns the finding for all checks that were not made.
func unseen(ctx context.Context, rest []check) Finding {
	f := Finding{Name: rest[0].name, Status: Warn, Remedy: "run it again, with a longer --timeout"}
	var names []string
	for _, c := range rest {
		names = append(names, c.name)
		if c.unknown == Fail {
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
