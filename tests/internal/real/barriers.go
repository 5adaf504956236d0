package real

import (
	"math"
	"slices"
	"time"

	"github.com/stepaf/stepaf-go/tests/internal/sim/plan"
	"github.com/stepaf/stepaf-go/van"
)

// Vote is one call of an instance barrier. The times are nanoseconds since 1970: all processes
// have one clock.
type Vote struct {
	Number int // counted by the process
	Group  int
	Begin  int64 // before the call
	End    int64 `json:",omitempty"` // after it; 0 while it waits, and always if the process was killed
	Passed bool  `json:",omitempty"`
}

// voted takes a report of a process on a barrier: that it calls it, then how the call has ended.
func (p *Process) voted(v Vote) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if i := slices.IndexFunc(p.votes, func(x Vote) bool { return x.Number == v.Number }); i >= 0 {
		p.votes[i] = v
		return
	}
	p.votes = append(p.votes, v)
}

// barrierJudge finds barriers that were over before all members had called them.
type barrierJudge struct {
	all     []*Process
	foreign func(n plan.Node) bool
	late    time.Duration // how long a canceled request may still count
}

// givenUp is how long it may take until the scheduler knows that a request was canceled.
const givenUp = 2 * time.Second

// judge calls wrong with each place that had not called a barrier which was over. It is for
// when all processes have ended, so that nothing that they have said is still to come.
func (j *barrierJudge) judge(wrong func(p *Process, v Vote, missing plan.Node)) {
	for _, p := range j.all {
		for _, v := range p.votes {
			if !v.Passed {
				continue
			}
			for _, n := range j.members(v.Group) {
				if !j.called(n, v) {
					wrong(p, v, n)
				}
			}
		}
	}
}

// members are the places of a group. A place that alone is the group waits for no other.
func (j *barrierJudge) members(group int) (l []plan.Node) {
	for _, p := range j.all {
		n := plan.NodeOf(p.Role, p.Rank)
		in := p.Role == "worker" && group&van.WorkerGroup != 0 || p.Role == "server" && group&van.ServerGroup != 0
		if in && !slices.Contains(l, n) {
			l = append(l, n)
		}
	}
	if len(l) == 1 {
		return nil
	}
	return l
}

// called tells whether a process that may have had the place while v waited has called the
// barrier. That is the latest that had started before v, and all that have come since.
func (j *barrierJudge) called(n plan.Node, v Vote) bool {
	for _, p := range slices.Backward(j.all) {
		if plan.NodeOf(p.Role, p.Rank) != n {
			continue
		}
		for i, x := range p.votes {
			if x.Group == v.Group && x.Begin <= v.End && (x.End == 0 || max(x.End, j.counts(p, i)) >= v.Begin) {
				return true
			}
		}
		if at := p.startedAt; at != 0 && at < v.Begin {
			return false
		}
	}
	return false
}

// counts is until when an ended request may count: a canceled request until the scheduler
// knows of it, and a request of the original, which cannot cancel, until the next barrier
// has used it up.
func (j *barrierJudge) counts(p *Process, i int) int64 {
	v := p.votes[i]
	if v.Passed {
		return v.End
	}
	until := v.End + j.late.Nanoseconds()
	if j.foreign(plan.NodeOf(p.Role, p.Rank)) {
		until = math.MaxInt64
	}
	for _, x := range p.votes {
		if x.Group == v.Group && x.Passed && x.End > v.End {
			until = min(until, x.End)
		}
	}
	return until
}

// judgeBarriers checks all barriers of a plan.
func (r *planRun) judgeBarriers() {
	j := &barrierJudge{all: r.c.All(), foreign: r.p.Cluster.IsForeign, late: givenUp + r.late()}
	for _, ph := range r.p.Phases {
		for _, e := range ph.Events {
			if e.Do == plan.Cut || e.Do == plan.Stop { // the scheduler may learn of it late
				j.late = max(j.late, r.p.Length())
			}
		}
	}
	j.judge(func(p *Process, v Vote, missing plan.Node) {
		r.c.wrong("%s: the barrier of group %d that it called %s after the beginning is over, and %s has not called it", p, v.Group,
			time.Unix(0, v.Begin).Sub(r.c.began).Round(time.Millisecond), missing)
	})
}
