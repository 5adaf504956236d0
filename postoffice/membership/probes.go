package membership

// Probes: tests whether the scheduler can reach the address of a registered process. If it cannot, it notifies the
// process. Since the scheduler cannot connect to the process, the notice is sent on the connection that the process
// has made.

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
	probeDelay    = time.Second     // from a registration, or a node's start, to the first probe: most clusters have formed by then
	probePause    = 5 * time.Second // from the first probe to the next; each pause is twice the one before
	maxProbePause = time.Minute
	probePeriod   = time.Second
	maxProbes     = 64   // in probePeriod
	maxProbed     = 4096 // processes
)

// probes are the probes of the scheduler. Only a process that has registered and counts is probed. Each probe is one
// attempt at a numeric address.
type probes struct {
	core
	registrations *registrations
	list          []*probe
	since         time.Duration // beginning of the present probePeriod
	started       int           // probes in it
}

// probe is the state of one process's probes.
type probe struct {
	node    van.Node
	at      time.Duration // time of the next one
	pause   time.Duration
	failure string // why the address cannot be reached; "" if that is not known
}

func (t *probe) matches(n *van.Node) bool {
	return sameAddr(&t.node, n) && !differentProcess(&t.node, n)
}

// registered schedules the probes of a process that has registered.
func (t *probes) registered(now time.Duration, n *van.Node) {
	t.list = slices.DeleteFunc(t.list, func(o *probe) bool { return sameAddr(&o.node, n) })
	if t.cfg.CanProbe && numeric(n.Hostname) && len(t.list) < maxProbed {
		t.list = append(t.list, &probe{node: n.Clone(), at: now + probeDelay, pause: probePause})
	}
}

// reached reports whether the scheduler has received a message over its connection to the process of n, or n is no
// longer of interest.
func (t *probes) reached(n *van.Node) bool {
	for i := range t.table.nodes {
		if m := &t.table.nodes[i]; sameAddr(m, n) && !differentProcess(m, n) {
			return t.alive.peers[m.ID].heard > 0
		}
	}
	is := func(j *registration) bool { return sameAddr(&j.node, n) && !differentProcess(&j.node, n) }
	return !slices.ContainsFunc(t.registrations.list, is) && !slices.ContainsFunc(t.registrations.queued, is)
}

func (t *probes) tick(now time.Duration) {
	if now >= t.since+probePeriod {
		t.since, t.started = now, 0
	}
	t.list = slices.DeleteFunc(t.list, func(o *probe) bool { return now >= o.at && t.reached(&o.node) })
	for _, o := range t.list {
		if now >= o.at && t.started < maxProbes {
			o.at, o.pause = now+o.pause, min(2*o.pause, maxProbePause)
			t.started++
			t.out.emit(Probe{o.node})
		}
	}
}

func (t *probes) next() time.Duration {
	next := time.Duration(math.MaxInt64)
	for _, o := range t.list {
		next = min(next, o.at)
	}
	if t.started >= maxProbes {
		next = max(next, t.since+probePeriod)
	}
	return next
}

// probed takes the result of a probe from an address of this host.
func (t *probes) probed(n *van.Node, from string, err error) {
	i := slices.IndexFunc(t.list, func(o *probe) bool { return o.matches(n) })
	switch {
	case i < 0, errors.Is(err, van.ErrTimeout): // the process listens, and is busy or stopped
	case err == nil && t.list[i].failure == "":
		t.list = slices.Delete(t.list, i, i+1)
	case err == nil:
		t.out.emit(Warning{Text: fmt.Sprintf("%s can be reached now", describe(n))})
		t.list = slices.Delete(t.list, i, i+1)
	case !t.reached(n):
		o, key := t.list[i], uint64(0)
		if why := fmt.Sprintf("%s has registered, but %s cannot be reached from %s (%s): %s; set DMLC_NODE_HOST or DMLC_INTERFACE on its host",
			describe(n), n.Addr(), from, err, failureHint(err)); o.failure != why {
			o.failure, key = why, urgent
			t.out.emit(Warning{Text: why})
		}
		t.notify(n, o.failure, key)
	}
}

// failureHint returns the probable fault of the address of a running process, by the error of a probe.
func failureHint(err error) string {
	switch {
	case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, syscall.ENOENT):
		return "on the way from here it is another host's address, or the process has ended"
	case errors.Is(err, van.ErrMalformed):
		return "on the way from here it is another program's address"
	}
	return "a firewall or a missing route"
}

// unreached lists the reasons why registered processes cannot be reached.
func (t *probes) unreached() (all []string) {
	for _, o := range t.list {
		if o.failure != "" && !t.reached(&o.node) {
			all = append(all, o.failure)
		}
	}
	return all
}

// urgent is the key of a waiting notice whose receiver reports it at once.
const urgent = 1

// notify sends a registered process a waiting notice, on the connection that the process has made.
func (t *probes) notify(n *van.Node, text string, key uint64) {
	inc := incarnationOf(n)
	if !t.cfg.CanProbe || inc == 0 {
		return
	}
	meta := t.out.control(van.Heartbeat)
	meta.Key = key
	meta.Body = notice{verb: verbWaiting, text: text}.body()
	meta.SetIncarnations(t.table.own.Incarnation, inc)
	t.out.emit(Reply{inc, meta})
}
