package sim

import (
	"cmp"
	"errors"
	"fmt"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/tests/internal/pairs"
	"github.com/stepaf/stepaf-go/tests/internal/ranks"
	"github.com/stepaf/stepaf-go/tests/internal/sim/plan"
	"github.com/stepaf/stepaf-go/tests/internal/value"
	"github.com/stepaf/stepaf-go/van"
)

// round is one call or barrier, for the expectations of a phase.
type round struct {
	p          *proc
	phase      int
	barrier    bool
	start, end time.Duration
	err        error
}

func (c *cluster) note(r *round) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.rounds = append(c.rounds, r)
}

// at is the number of the phase.
func (c *cluster) at() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.phase
}

// Defaults of a load.
const (
	defaultSize  = 1024
	defaultLimit = 5 * time.Second
)

// flight is a call in flight.
type flight struct {
	call    *call
	round   *round
	wait    func() error
	tensors *tensors
}

// tensors are those of one call, over kv values of keys. They are used again by the next call of the place; push
// tensors where there are nodes of the original only after a call that has succeeded.
type tensors struct {
	push, pull   []af.KeyTensor // nil over kv
	pushB, pullB [][]byte
	pushes       int  // tensors that a server gets
	clean        bool // the pull tensors have been the program's since a call failed

	pairs *pairs.Call // over kv only
}

// untouched is the byte that fills a pull tensor before a call, and after a failed one.
const untouched = 0xee

func (p *proc) newTensors(l *plan.Load) *tensors {
	size, pushes, pulls := cmp.Or(l.Size, defaultSize), max(l.Pushes, 1), max(l.Pulls, 1)
	if p.keyValue != nil {
		return p.newPairs(size, pushes, pulls)
	}
	t := &tensors{pushes: pushes}
	for i := range pushes {
		b := make([]byte, size)
		x, _ := af.FromBytes(b, af.Uint8, int64(size))
		t.push, t.pushB = append(t.push, af.KeyTensor{Key: uint64(1000 + i), Val: x}), append(t.pushB, b)
	}
	for range p.c.servers() {
		for i := range pulls {
			b := make([]byte, size)
			x, _ := af.FromBytes(b, af.Uint8, int64(size))
			t.pull, t.pullB = append(t.pull, af.KeyTensor{Key: uint64(2000 + i), Val: x}), append(t.pullB, b)
		}
	}
	return t
}

// fill makes the tensors those of a call.
func (t *tensors) fill(id callID) {
	for i, b := range t.pushB {
		label{kind: value.Pushed, id: id, index: i % t.pushes, server: i / t.pushes}.write(b)
	}
	for _, b := range t.pullB {
		for i := range b {
			b[i] = untouched
		}
	}
	t.clean = false
}

// servers is how many server instances a worker talks to.
func (c *cluster) servers() int { return c.plan.Cluster.Servers }

// run makes the calls of one load by one process until stop is closed.
func (p *proc) run(l *plan.Load, number int, stop <-chan struct{}) {
	if !p.begins() {
		return
	}
	c := p.c
	s := c.seed.of("load").of(p.name).at(uint64(number))
	window := max(l.Window, 1)
	limit := l.Limit.Or(defaultLimit)
	free := make([]*tensors, window)
	for i := range free {
		free[i] = p.newTensors(l)
	}
	var flying []*flight
	finish := func() {
		f := flying[0]
		flying = flying[1:]
		done := c.check.within(p, limit-(c.net.now()-f.call.start), "wait for call "+fmt.Sprint(f.call.id.call))
		err := f.wait()
		done()
		free = append(free, p.over(f, err, l))
	}
	defer func() {
		for len(flying) > 0 && p.runs() {
			finish()
		}
	}()
	for n := 0; l.Rounds == 0 || n < l.Rounds; n++ {
		if isClosed(stop) {
			return
		}
		// Never at once and never at the same time as another process.
		wait := l.Every.D() + s.at(uint64(n)).upTo(l.Every.D()/4+50*time.Microsecond)
		if !p.pause(wait) {
			return
		}
		if isClosed(stop) {
			return
		}
		if l.Barrier > 0 && n%l.Barrier == l.Barrier-1 {
			for len(flying) > 0 {
				if finish(); !p.runs() {
					return
				}
			}
			_ = c.barrier(p, van.WorkerGroup) // noted
			continue
		}
		t := free[0]
		free = free[1:]
		id := callID{p.who.Rank(), p.gen, int(p.calls.Add(1))}
		if t.clean {
			p.checkClean(t, id)
		}
		t.fill(id)
		f := &flight{call: c.check.begin(id), tensors: t, round: &round{p: p, phase: c.at(), start: c.net.now()}}
		done := c.check.within(p, 0, "push_pull "+fmt.Sprint(id.call))
		end, err := p.begin(t, id, limit)
		done()
		if err != nil {
			free = append(free, p.over(f, err, l))
			if !p.pause(10*time.Millisecond + s.at(uint64(n)).of("again").upTo(time.Millisecond)) {
				return
			}
			continue
		}
		f.wait = end
		flying = append(flying, f)
		for len(flying) >= window {
			if finish(); !p.runs() {
				return
			}
		}
	}
}

// collect makes collectives with the other nodes of its role until stop is closed.
func (p *proc) collect(l *plan.Load, number int, stop <-chan struct{}) {
	if !p.begins() {
		return
	}
	c := p.c
	s := c.seed.of("collectives").of(p.name).at(uint64(number))
	ranks.Run(&ranks.Env{Node: p.node.Load(), Serial: p.gen, Limit: l.Limit.Or(defaultLimit), Size: cmp.Or(l.Size, defaultSize), Window: l.Window,
		Pause: func(n int) bool {
			ok := p.pause(l.Every.D() + s.at(uint64(n)).upTo(l.Every.D()/4+50*time.Microsecond))
			return ok && !isClosed(stop)
		},
		Watch: func(what string, limit time.Duration) func() { return c.check.within(p, limit, what) },
		Gone:  func() bool { return p.ctx.Err() != nil },
		Wrong: func(kind, format string, args ...any) {
			if p.ctx.Err() == nil {
				c.check.fail(kind, "%s: %s", p.name, fmt.Sprintf(format, args...))
			}
		},
		Note: func(what string, begin time.Time, err error) {
			if p.ctx.Err() == nil {
				now := c.net.now()
				c.note(&round{p: p, phase: c.at(), start: now - time.Since(begin), end: now, err: err})
				c.net.note(p.name, what+": "+brief(err))
			}
		}})
}

// checkClean tells whether something has written into tensors that were the program's.
func (p *proc) checkClean(t *tensors, next callID) {
	for i, b := range t.pullB {
		for j := range b {
			if b[j] != 0xcc {
				p.c.check.fail("late write", "%s: byte %d of pull tensor %d changed after the call that it was for had failed, before %s", p.name, j, i, next)
				return
			}
		}
	}
}

// over judges a call that has ended, and returns tensors for the next one.
func (p *proc) over(f *flight, err error, l *plan.Load) *tensors {
	c := p.c
	if p.ctx.Err() != nil { // the process has been killed: results of its calls do not count
		return f.tensors
	}
	c.check.end(f.call, err, errors.Is(err, van.ErrTimeout))
	f.round.end, f.round.err = c.net.now(), err
	c.note(f.round)
	id := f.call.id
	if err != nil {
		c.net.note(p.name, fmt.Sprintf("call %d failed: %s", id.call, brief(err)))
		c.net.tl.log(entry{at: c.net.now(), who: p.name, what: err.Error()})
		t := f.tensors
		if len(c.plan.Cluster.Foreign) > 0 { // the pushed tensors may still be in flight
			t = p.newTensors(l)
			t.pull, t.pullB = f.tensors.pull, f.tensors.pullB
		}
		for _, b := range t.pullB {
			for i := range b {
				b[i] = 0xcc
			}
		}
		t.clean = true
		return t
	}
	c.net.note(p.name, fmt.Sprintf("call %d succeeded", id.call))
	pulls := len(f.tensors.pullB) / c.servers()
	for s := range c.servers() {
		rank := s*c.group() + p.who.Rank()%c.group()
		for q := range pulls {
			c.check.answer(id, rank, q, f.tensors.pullB[s*pulls+q])
		}
	}
	return f.tensors
}
