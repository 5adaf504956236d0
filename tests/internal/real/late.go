package real

import (
	"context"
	"sync"
	"time"
)

// Machine notes how much later than asked for this process wakes up. On a machine that hangs for
// a while, or is overloaded, the nodes are late as well.
type Machine struct {
	mu    sync.Mutex
	begun time.Time  // the current nap
	late  []lateness // long enough to count
}

type lateness struct {
	at time.Time
	by time.Duration
}

// nap is how long each sleep is to last.
const nap = 5 * time.Millisecond

// WatchMachine notes it until ctx ends.
func WatchMachine(ctx context.Context) *Machine {
	m := &Machine{begun: time.Now()}
	go func() {
		for ctx.Err() == nil {
			time.Sleep(nap)
			m.mu.Lock()
			now := time.Now()
			if by := now.Sub(m.begun) - nap; by > nap {
				m.late = append(m.late, lateness{now, by})
			}
			m.begun = now
			m.mu.Unlock()
		}
	}()
	return m
}

// hops is how many processes an event passes through: a heartbeat that is missed, the notice of it, and the call that
// ends with it.
const hops = 4

// Late is how much later than it should something may be that has taken from since until now.
func (m *Machine) Late(since time.Time) time.Duration {
	m.mu.Lock()
	defer m.mu.Unlock()
	longest := max(time.Since(m.begun)-nap, 0)
	for _, l := range m.late {
		if l.at.After(since) {
			longest = max(longest, l.by)
		}
	}
	return hops * longest
}

// between is how much later than it should something may be that took from one time until another.
func (m *Machine) between(from, to time.Time) time.Duration {
	m.mu.Lock()
	defer m.mu.Unlock()
	var longest time.Duration
	for _, l := range m.late {
		if l.at.After(from) && l.at.Add(-l.by).Before(to) {
			longest = max(longest, l.by)
		}
	}
	return hops * longest
}

// lateFor is how much longer than the plan says a call may take.
func (r *planRun) lateFor(c *Call) time.Duration {
	begun := time.UnixMilli(c.Begin)
	return r.margin + r.machine.between(begun, begun.Add(time.Duration(c.MS)*time.Millisecond))
}

// late is how much later than the plan says something may be.
func (r *planRun) late() time.Duration { return r.margin + r.machine.Late(time.Time{}) }
