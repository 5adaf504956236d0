package membership

// Nodes that the scheduler refuses. To send a node the reason, the scheduler must connect to an address that the node
// has named.
//  1. The rate of these connections is bounded.
//  2. Only numeric addresses are used, since looking a name up may block.
//  3. A connection has a name for the refused process, which is of no use at another process. Toward a C++ StepMesh
//     process, or one of another release, it has the scheduler's only name. No such connection is made to an address at
//     which another process is connected: it would take the place of that process's connection.
//  4. The text of a refusal names no address of another node.

import (
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/stepaf/stepaf-go/van"
)

const (
	refusalTime       = time.Second
	maxRefusalsSent   = 32  // in refusalTime, with answers to other processes
	maxAnswers        = 16  // of them to processes that ask
	maxRefusalsQueued = 256 // waiting to be sent
	maxRefusalTexts   = 16  // in each list of the scheduler's reports
)

// refusals sends the scheduler's refusals, within limits.
type refusals struct {
	core
	registrations *registrations
	recent        []refusal // in the last refusalTime; answers to other processes have no reason
	queued        []refusal
	texts         []string // the latest, for reports
}

// refusal is the reason why one process cannot be part of the cluster.
type refusal struct {
	node   van.Node
	reason string
	sentAt time.Duration
}

// refuse tells a node without an id that it cannot be part of the cluster. A process is notified once in refusalTime;
// C++ StepMesh processes, which have no incarnation, once for an address. The scheduler's log has the details as
// well.
func (r *refusals) refuse(now time.Duration, rec *van.Node, why, details string) {
	r.expire(now)
	n := refusal{node: rec.Clone(), reason: why}
	appendRecent(&r.texts, describe(rec)+": "+why)
	switch {
	case !numeric(rec.Hostname) || slices.ContainsFunc(r.recent, n.sameProcess):
	case len(r.recent) < maxRefusalsSent && !r.answeredRecently(&n):
		r.send(now, n)
	default:
		if i := slices.IndexFunc(r.queued, n.sameAddr); i >= 0 {
			r.queued[i] = n // the process that asked before has ended, or asks again
		} else if len(r.queued) < maxRefusalsQueued {
			r.queued = append(r.queued, n)
		}
	}
	r.out.emit(Warning{Text: fmt.Sprintf("refused %s: %s%s", describe(rec), why, details)})
}

func (r *refusal) sameAddr(o refusal) bool { return sameAddr(&o.node, &r.node) }

// sameProcess reports whether o is a refusal that is known to be about the same process.
func (r *refusal) sameProcess(o refusal) bool {
	mine, ok := r.node.Extension()
	other, _ := o.node.Extension()
	return ok && r.sameAddr(o) && mine.Incarnation == other.Incarnation
}

// answeredRecently reports whether n may be about a process that has just been answered at its address.
func (r *refusals) answeredRecently(n *refusal) bool {
	_, named := n.node.Extension()
	return !named && slices.ContainsFunc(r.recent, n.sameAddr)
}

func (r *refusals) send(now time.Duration, n refusal) {
	if incarnationOf(&n.node) == 0 && r.addressOwner(&n.node) != "" {
		return
	}
	n.sentAt = now
	r.recent = append(r.recent, n)
	temp := r.out.connectTemp(n.node)
	r.out.notify(temp, notice{verb: verbError, text: describe(&n.node) + ": " + n.reason})
	r.out.disconnect(temp)
}

// addressOwner names another live process at the address of rec that the scheduler has a connection to.
func (r *refusals) addressOwner(rec *van.Node) string {
	for i := range r.table.nodes {
		if n := &r.table.nodes[i]; sameAddr(n, rec) && differentProcess(n, rec) && !r.alive.isDead(n.ID) {
			return r.table.peer(n.ID)
		}
	}
	for _, j := range r.registrations.list {
		if j.lost == nil && sameAddr(&j.node, rec) && differentProcess(&j.node, rec) {
			return describe(&j.node)
		}
	}
	return ""
}

// mayAnswer reports whether a process that is not a node, and asks, can be answered on a connection of its own. If
// so, the answer counts as a refusal.
func (r *refusals) mayAnswer(now time.Duration) bool {
	r.tick(now) // refusals first
	answers := 0
	for i := range r.recent {
		if r.recent[i].reason == "" {
			answers++
		}
	}
	if answers >= maxAnswers || len(r.recent) >= maxRefusalsSent {
		return false
	}
	r.recent = append(r.recent, refusal{sentAt: now})
	return true
}

// dequeue drops refusals of a process that have not been sent: it registers again.
func (r *refusals) dequeue(rec *van.Node) {
	n := refusal{node: *rec}
	r.queued = slices.DeleteFunc(r.queued, n.sameProcess)
}

func (r *refusals) expire(now time.Duration) {
	r.recent = slices.DeleteFunc(r.recent, func(o refusal) bool { return now >= o.sentAt+refusalTime })
}

func (r *refusals) tick(now time.Duration) {
	r.expire(now)
	for i := 0; i < len(r.queued) && len(r.recent) < maxRefusalsSent; {
		if n := r.queued[i]; r.answeredRecently(&n) {
			i++
		} else {
			r.queued = slices.Delete(r.queued, i, i+1)
			r.send(now, n)
		}
	}
}

func (r *refusals) next() time.Duration {
	if len(r.queued) > 0 && len(r.recent) > 0 {
		return r.recent[0].sentAt + refusalTime
	}
	return math.MaxInt64
}

func appendRecent(list *[]string, what string) {
	if !slices.Contains(*list, what) {
		*list = appendBounded(*list, what, maxRefusalTexts)
	}
}
