// Package doctor examines a machine for what StepAF needs: versions and
// configuration, a message over ZeroMQ, and RDMA from its libraries up to a round
// trip on each port. It changes nothing.
//
// An examination is a list of checks that run one after the other, see checks. To
// add one, write a method of exam and put it there.
package doctor

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/stepaf/stepaf-go/internal/env"
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
		{"zmq loopback", false, (*exam).zmqLoopback},
		{"rdma build", true, (*exam).rdmaBuild},
		{"rdma libraries", true, (*exam).rdmaLibraries},
		{"rdma devices", true, (*exam).rdmaDevices},
		{"rdma port", true, (*exam).rdmaPorts},
		{"locked memory", true, (*exam).lockedMemory},
		{"rdma address", true, (*exam).rdmaAddress},
		{"rdma loopback", true, (*exam).rdmaLoopback},
	}
}

// exam is an examination under way.
type exam struct {
	m      *Machine
	cfg    *env.Config
	cfgErr error

	needRDMA bool // the configuration chooses ibverbs

	stack      verbs.Stack // nil until loaded
	interfaces []choose.Interface
	devices    []verbs.DeviceInfo // what the verbs show
	chosen     *choose.Result     // nil when a node could not choose
}

// grace is how long a check may take to notice that its context has ended.
const grace = time.Second

// Run examines m and calls each for every finding as it comes. It ends early with the
// cause of ctx when that ends; what has not been looked at then is in the report,
// too. A check that hangs is left behind.
func Run(ctx context.Context, m *Machine, each func(Finding)) (Report, error) {
	x := &exam{m: m}
	x.cfg, x.cfgErr = env.LoadFrom(m.Env)
	x.needRDMA = x.cfg.VanType == ibverbs
	r := Report{Van: x.cfg.VanType}
	add := func(f Finding) {
		r.Findings = append(r.Findings, f)
		each(f)
	}
	for _, c := range checks() {
		unknown := Fail // what is not known to be well counts as ill
		if c.rdma {
			unknown = x.bad()
		}
		if ctx.Err() != nil {
			add(Finding{Name: c.name, Status: unknown, Text: "not looked at: " + reason(ctx), Remedy: "run it again, with a longer --timeout"})
			continue
		}
		done := make(chan []Finding, 1)
		go func() { done <- c.run(x, ctx) }()
		found, ended := await(ctx, done)
		for _, f := range found {
			add(f)
		}
		if !ended {
			add(Finding{Name: c.name, Status: unknown, Text: "does not end: " + reason(ctx), Remedy: "see dmesg; a driver or device may hang"})
		}
	}
	r.count()
	if err := context.Cause(ctx); err != nil && !errors.Is(err, context.DeadlineExceeded) {
		return r, err
	}
	return r, nil
}

// await waits for a check, and a little longer than ctx.
func await(ctx context.Context, done <-chan []Finding) (found []Finding, ended bool) {
	select {
	case found = <-done:
		return found, true
	case <-ctx.Done():
	}
	t := time.NewTimer(grace)
	defer t.Stop()
	select {
	case found = <-done:
		return found, true
	case <-t.C:
		return nil, false
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

func count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}
