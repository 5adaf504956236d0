package engine

import "time"

// watch looks every Limit whether the same delivery is still running, less often while
// all are short: where processors are few, each look takes one from those who work. It
// parks when nothing has come for a while.
func (l *Loop[T]) watch() {
	defer func() {
		l.mu.Lock()
		l.watching = false
		l.changedLocked()
		l.mu.Unlock()
	}()
	ticker := time.NewTicker(l.Limit)
	defer ticker.Stop()
	last, idle := l.state.Load(), idleTicks
	p := pace{limit: l.Limit}
	p.begin()
	for {
		if idle >= idleTicks {
			ticker.Stop()
			// First the mark, then the look: who begins to deliver after the look
			// sees the mark.
			l.parked.Store(true)
			if l.state.Load() == last {
				select {
				case <-l.wake:
				case <-l.quit:
					return
				}
			}
			l.parked.Store(false)
			idle = 0
			last = l.state.Load()
			p.begin()
			ticker.Reset(p.every)
		}
		select {
		case <-l.quit:
			return
		case <-ticker.C:
		}
		l.ticks.Add(1)
		switch now := l.state.Load(); {
		case now != last:
			last, idle = now, 0
			if p.calm() {
				ticker.Reset(p.every)
			}
		case now&1 == 1:
			l.takeOver(now)
			last, idle = l.state.Load(), 0
			p.begin()
			ticker.Reset(p.every)
		default:
			idle++
		}
	}
}

// pace is how often the watchdog looks.
type pace struct {
	limit, every time.Duration
	looks        int // since begin
}

// begin makes it look every Limit.
func (p *pace) begin() { p.every, p.looks = p.limit, 0 }

// calm says that a look has found nothing slow. It tells whether every has changed.
func (p *pace) calm() bool {
	if p.looks++; p.looks%calmTicks != 0 || p.every >= maxPace*p.limit {
		return false
	}
	p.every *= 2
	return true
}

func (l *Loop[T]) unpark() {
	if l.parked.CompareAndSwap(true, false) {
		select {
		case l.wake <- struct{}{}:
		default:
		}
	}
}

// takeOver gives the receiving role to a new goroutine if the delivery that busy
// stands for still runs.
func (l *Loop[T]) takeOver(busy uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.quitting {
		return
	}
	lane := l.cur.Load()
	// The goroutine that loses the role goes to the lane's lock next, so it finds
	// the lane slow.
	lane.mu.Lock()
	taken := l.state.CompareAndSwap(busy, busy+1)
	if taken && l.taken != nil {
		l.taken()
	}
	if taken {
		lane.slow.Store(true)
	}
	lane.mu.Unlock()
	if taken {
		l.spawn((busy + 1) >> 1)
	}
}
