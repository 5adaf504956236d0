// Package doctor examines a machine for what StepAF needs: versions and
// configuration, a message over ZeroMQ, GPUs, and RDMA from its libraries up to a round
// trip on each port. It changes nothing.
//
// An examination is a list of checks that run one after the other, see checks. To
// add one, write a method of exam and put it there.
package doctor

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/env"
	"github.com/stepaf/stepaf-go/van/rdma/choose"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// check is one thing to look at.
type check struct {
	name string // of its findings, or what they begin with
	rdma bool   // only ibverbs needs it
	run  func(*exam, context.Context) []Finding
}

// checks lists everything in order; a check may use what those before it have found.
func checks() []check {
	return []check{
		{"versions", false, (*exam).versions},
		{"system", false, (*exam).system},
		{"environment", false, (*exam).environment},
		{limitsName, false, (*exam).limits},
		{"zmq loopback", false, (*exam).zmqLoopback},
		{"rdma build", true, (*exam).rdmaBuild},
		{"rdma libraries", true, (*exam).rdmaLibraries},
		{"rdma devices", true, (*exam).rdmaDevices},
		{"rdma port", true, (*exam).rdmaPorts},
		{"locked memory", true, (*exam).lockedMemory},
		{"rdma address", true, (*exam).rdmaAddress},
		{"rdma loopback", true, (*exam).rdmaLoopback},
		{"gpu", false, (*exam).gpus},
		{gpuPairs, false, (*exam).pairs},
		{"same host", false, (*exam).sameHost},
	}
}

// exam is an examination under way.
type exam struct {
	m      *Machine
	cfg    *env.Config
	cfgErr error

	needRDMA bool // the configuration chooses ibverbs

	early chan Finding // of a check under way, see say

	gpuInfo     []backend.Info
	pairResults []pairResult
	stack       verbs.Stack // nil until loaded
	interfaces  []choose.Interface
	devices     []verbs.DeviceInfo // what the verbs show
	chosen      *choose.Result     // nil when a node could not choose
}

// grace is how long a check may take to notice that its context has ended.
const grace = time.Second

// Run examines m and calls each for every finding as it comes. It ends early with the
// cause of ctx when that ends; what has not been looked at then is in the report,
// too. A check that hangs is left behind.
func Run(ctx context.Context, m *Machine, each func(Finding)) (Report, error) {
	x := &exam{m: m, early: make(chan Finding)}
	x.cfg, x.cfgErr = env.LoadFrom(m.Env)
	x.needRDMA = x.cfg.VanType == ibverbs
	r := Report{Van: x.cfg.VanType}
	add := func(f Finding) {
		f.Text = strings.ReplaceAll(strings.TrimSpace(f.Text), "\n", "; ") // of joined errors
		r.Findings = append(r.Findings, f)
		each(f)
	}
	all := checks()
	for i, c := range all {
		if ctx.Err() != nil {
			add(x.unseen(ctx, all[i:]))
			break
		}
		done := make(chan []Finding, 1)
		go func() { done <- c.run(x, ctx) }()
		found, ended := x.await(ctx, done, add)
		for _, f := range found {
			add(f)
		}
		if !ended {
			add(Finding{Name: c.name, Status: x.unknown(c), Text: "does not end: " + reason(ctx), Remedy: "see dmesg; a driver or device may hang"})
		}
	}
	r.count()
	if err := context.Cause(ctx); err != nil && !errors.Is(err, context.DeadlineExceeded) {
		return r, err
	}
	return r, nil
}

// unknown is the status of what could not be looked at: it counts as ill.
func (x *exam) unknown(c check) Status {
	switch {
	case c.rdma:
		return x.bad()
	case c.name == "same host", c.name == gpuPairs, c.name == "gpu" && !x.needGPU():
		return Warn
	}
	return Fail
}

// unseen is the finding for all checks that are not made any more.
func (x *exam) unseen(ctx context.Context, rest []check) Finding {
	f := Finding{Name: rest[0].name, Status: Warn, Remedy: "run it again, with a longer --timeout"}
	var names []string
	for _, c := range rest {
		names = append(names, c.name)
		if x.unknown(c) == Fail {
			f.Status = Fail
		}
	}
	f.Text = "not looked at: " + reason(ctx)
	if len(names) > 1 {
		f.Text += "; nor at " + strings.Join(names[1:], ", ")
	}
	return f
}

// say tells of a finding before the check ends. It is false when ctx has ended: the
// check returns the finding then.
func (x *exam) say(ctx context.Context, f Finding) bool {
	select {
	case x.early <- f:
		return true
	case <-ctx.Done():
		return false
	}
}

// await waits for a check, and a little longer than ctx; each is for what it says early.
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

// reason says why ctx has ended.
func reason(ctx context.Context) string {
	err := context.Cause(ctx)
	if errors.Is(err, context.DeadlineExceeded) {
		return "the time is up"
	}
	return err.Error()
}

const ibverbs = "ibverbs"

// bad is the status of a defect of RDMA.
func (x *exam) bad() Status {
	if x.needRDMA {
		return Fail
	}
	return Warn
}

// absent is the status of RDMA that is not there.
func (x *exam) absent() Status {
	if x.needRDMA {
		return Fail
	}
	return Skip
}

// useZMQ ends a remedy when RDMA was asked for.
func (x *exam) useZMQ() string {
	if x.needRDMA {
		return "; or use DMLC_ENABLE_RDMA=zmq on all nodes"
	}
	return ""
}

// Count is a number of things, as it is written.
func Count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}
