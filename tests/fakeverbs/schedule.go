package fakeverbs

// This file owns the timer of later actions.

import (
	"slices"
	"sync"
	"time"
)

// schedule holds later actions, ordered by time and then by their entry.
type schedule struct {
	mu    *sync.Mutex // of the Net
	queue []entry     // in order
	timer *time.Timer
	over  bool
}

type entry struct {
	due time.Time
	do  func()
}

// at calls do when it is due, with mu held. The caller holds mu.
func (a *schedule) at(due time.Time, do func()) {
	if a.over {
		return
	}
	i := len(a.queue) // from the end, since most actions are the latest
	for i > 0 && a.queue[i-1].due.After(due) {
		i--
	}
	if a.queue = slices.Insert(a.queue, i, entry{due, do}); i == 0 {
		a.arm()
	}
}

func (a *schedule) after(d time.Duration, do func()) { a.at(time.Now().Add(d), do) }

func (a *schedule) arm() {
	d := time.Until(a.queue[0].due)
	if a.timer == nil {
		a.timer = time.AfterFunc(d, a.fire)
	} else {
		a.timer.Reset(d)
	}
}

func (a *schedule) fire() {
	a.mu.Lock()
	defer a.mu.Unlock()
	for len(a.queue) > 0 {
		if a.queue[0].due.After(time.Now()) {
			a.arm()
			return
		}
		do := a.queue[0].do
		a.queue = slices.Delete(a.queue, 0, 1)
		do()
	}
}

// end drops all actions. The caller holds mu.
func (a *schedule) end() {
	a.over, a.queue = true, nil
	if a.timer != nil {
		a.timer.Stop()
	}
}
