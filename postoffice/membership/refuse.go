package membership

// Nodes that the scheduler refuses. To tell a node the reason, the scheduler must connect
// to an address that the node has named. The rate of these connections is bounded, and
// only numeric addresses are used, since looking a name up may block.

import (
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/stepaf/stepaf-go/van"
)

const (
	refusalTime   = time.Second
	maxRefusing   = 32  // in refusalTime
	maxRefusalsIn = 256 // waiting to be sent
	maxRefusals   = 16  // in each list of the scheduler's reports
)

type refusals struct {
	base
	recent  []refusal // in the last refusalTime
	waiting []refusal
	texts   []string // of the latest, for reports
}

type refusal struct {
	node van.Node
	why  string
	at   time.Duration
}

// refuse tells a node without an id that it cannot be part of the cluster. A process is told
// once in refusalTime; of the original's, which do not say which process they are, one at an
// address.
func (r *refusals) refuse(now time.Duration, rec *van.Node, why string) {
	r.expire(now)
	n := refusal{node: rec.Clone(), why: why}
	remember(&r.texts, describe(rec)+": "+why)
	switch {
	case !numeric(rec.Hostname) || slices.ContainsFunc(r.recent, n.sameProcess):
	case len(r.recent) < maxRefusing && !r.tooSoon(&n):
		r.tell(now, n)
	default:
		if i := slices.IndexFunc(r.waiting, n.sameAddr); i >= 0 {
			r.waiting[i] = n // who asked before has gone, or asks again
		} else if len(r.waiting) < maxRefusalsIn {
			r.waiting = append(r.waiting, n)
		}
	}
	r.out.emit(Warning{Text: fmt.Sprintf("refused %s: %s", describe(rec), why)})
}

func (r *refusal) sameAddr(o refusal) bool { return sameAddr(&o.node, &r.node) }

// sameProcess tells whether o is known to be about the same process.
func (r *refusal) sameProcess(o refusal) bool {
	mine, ok := r.node.Identity()
	other, _ := o.node.Identity()
	return ok && r.sameAddr(o) && mine.Incarnation == other.Incarnation
}

// tooSoon tells whether n may be what has been answered at its address a moment ago.
func (r *refusals) tooSoon(n *refusal) bool {
	_, named := n.node.Identity()
	return !named && slices.ContainsFunc(r.recent, n.sameAddr)
}

func (r *refusals) tell(now time.Duration, n refusal) {
	n.at = now
	r.recent = append(r.recent, n)
	temp := r.out.reach(n.node)
	r.out.tell(temp, notice{verb: verbError, text: describe(&n.node) + ": " + n.why})
	r.out.disconnect(temp)
}

// spend counts an answer to rec, which is no node, as a refusal. It returns false if there
// have been as many as there may be.
func (r *refusals) spend(now time.Duration, rec van.Node) bool {
	if len(r.recent) >= maxRefusing {
		return false
	}
	r.recent = append(r.recent, refusal{node: rec, at: now})
	return true
}

func (r *refusals) expire(now time.Duration) {
	r.recent = slices.DeleteFunc(r.recent, func(o refusal) bool { return now >= o.at+refusalTime })
}

func (r *refusals) tick(now time.Duration) {
	if len(r.waiting) == 0 {
		return
	}
	r.expire(now)
	for i := 0; i < len(r.waiting) && len(r.recent) < maxRefusing; {
		if n := r.waiting[i]; r.tooSoon(&n) {
			i++
		} else {
			r.waiting = slices.Delete(r.waiting, i, i+1)
			r.tell(now, n)
		}
	}
}

func (r *refusals) next() time.Duration {
	if len(r.waiting) > 0 && len(r.recent) > 0 {
		return r.recent[0].at + refusalTime
	}
	return math.MaxInt64
}

func remember(list *[]string, what string) {
	if !slices.Contains(*list, what) {
		*list = keep(*list, what, maxRefusals)
	}
}
