package membership

// Trials: tests whether the scheduler can reach the address of a registered process. If it cannot, it
// notifies the process. Since the scheduler cannot connect to the process, the notice is sent on
// the connection that the process has made.

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"syscall"
	"time"

	"github.com/stepaf/stepaf-go/van"
)

const (
	trialDelay    = time.Second     // from a registration, or a node's start, to the first trial: most clusters have formed by then
	trialPause    = 5 * time.Second // from the first trial to the next; each pause is twice the one before
	maxTrialPause = time.Minute
	trialTime     = time.Second
	maxTrials     = 64   // in trialTime
	maxTried      = 4096 // processes
)

// trials holds the trials of the scheduler. Only a process that has registered and counts is tried. Each trial is one
// attempt at a numeric address.
type trials struct {
	base
	joins   *joins
	list    []*trial
	since   time.Duration // beginning of the present trialTime
	started int           // trials in it
}

type trial struct {
	node  van.Node
	at    time.Duration // of the next one
	pause time.Duration
	why   string // why the address cannot be reached; "" if that is not known
}

func (t *trial) is(n *van.Node) bool { return sameAddr(&t.node, n) && !another(&t.node, n) }

// registered schedules the trials of a process that has registered.
func (t *trials) registered(now time.Duration, n *van.Node) {
	t.list = slices.DeleteFunc(t.list, func(o *trial) bool { return sameAddr(&o.node, n) })
	if t.cfg.Tries && numeric(n.Hostname) && len(t.list) < maxTried {
		t.list = append(t.list, &trial{node: n.Clone(), at: now + trialDelay, pause: trialPause})
	}
}

// reached reports whether the scheduler has received a message over its connection to the process of n, or n does not matter any more.
func (t *trials) reached(n *van.Node) bool {
	for i := range t.table.nodes {
		if m := &t.table.nodes[i]; sameAddr(m, n) && !another(m, n) {
			return t.alive.peers[m.ID].heard > 0
		}
	}
	is := func(j *join) bool { return sameAddr(&j.node, n) && !another(&j.node, n) }
	return !slices.ContainsFunc(t.joins.list, is) && !slices.ContainsFunc(t.joins.held, is)
}

func (t *trials) tick(now time.Duration) {
	if now >= t.since+trialTime {
		t.since, t.started = now, 0
	}
	t.list = slices.DeleteFunc(t.list, func(o *trial) bool { return now >= o.at && t.reached(&o.node) })
	for _, o := range t.list {
		if now >= o.at && t.started < maxTrials {
			o.at, o.pause = now+o.pause, min(2*o.pause, maxTrialPause)
			t.started++
			t.out.emit(Try{o.node})
		}
	}
}

func (t *trials) next() time.Duration {
	next := time.Duration(math.MaxInt64)
	for _, o := range t.list {
		next = min(next, o.at)
	}
	if t.started >= maxTrials {
		next = max(next, t.since+trialTime)
	}
	return next
}

// tried takes the result of a trial from an address of this host.
func (t *trials) tried(n *van.Node, from string, err error) {
	i := slices.IndexFunc(t.list, func(o *trial) bool { return o.is(n) })
	switch {
	case i < 0, errors.Is(err, van.ErrTimeout): // it listens, and is busy or stopped
	case err == nil && t.list[i].why == "":
		t.list = slices.Delete(t.list, i, i+1)
	case err == nil:
		t.out.emit(Warning{Text: fmt.Sprintf("%s can be reached now", describe(n))})
		t.list = slices.Delete(t.list, i, i+1)
	case !t.reached(n):
		o, key := t.list[i], uint64(0)
		if why := fmt.Sprintf("%s has registered, but %s cannot be reached from %s (%s): %s; set DMLC_NODE_HOST or DMLC_INTERFACE on its host",
			describe(n), n.Addr(), from, err, cause(err)); o.why != why {
			o.why, key = why, urgent
			t.out.emit(Warning{Text: why})
		}
		t.answer(n, o.why, key)
	}
}

// cause returns the probable fault of the address of a running process, by the error of a trial.
func cause(err error) string {
	switch {
	case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, syscall.ENOENT):
		return "on the way from here it is another host's address, or the process has ended"
	case errors.Is(err, van.ErrMalformed):
		return "on the way from here it is another program's address"
	}
	return "a firewall or a missing route"
}

// unreached lists the reasons why registered processes cannot be reached.
func (t *trials) unreached() (all []string) {
	for _, o := range t.list {
		if o.why != "" && !t.reached(&o.node) {
			all = append(all, o.why)
		}
	}
	return all
}

// urgent is the key of a waiting notice whose receiver reports it at once.
const urgent = 1

// answer sends a registered process the text of a waiting notice, on the connection that the process has made.
func (t *trials) answer(n *van.Node, text string, key uint64) {
	inc := incarnationOf(n)
	if !t.cfg.Tries || inc == 0 {
		return
	}
	meta := t.out.control(van.Heartbeat)
	meta.Key = key
	meta.Body = notice{verb: verbWaiting, text: text}.body()
	meta.SetIncarnations(t.table.own.Incarnation, inc)
	t.out.emit(Reply{inc, meta})
}
