package local

import (
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/engine"
)

// memory is the engine's source of what peers write to their links. Who receives sleeps on
// the doorbell; peers wake it only when the doorbell is armed.
type memory struct{ v *Van }

// maxSleep bounds a sleep; see bell.wait.
const maxSleep = 500 * time.Millisecond

// Take implements engine.Source.
func (m memory) Take(_ time.Duration, poll bool) (*parcel, *engine.Lane[*parcel], engine.Found) {
	v := m.v
	chunks := v.chunks.Load()
	if p := v.scan(poll); p != nil {
		return p, &p.from.lane, engine.Message
	}
	if v.device != nil && !poll {
		v.tidy(clock.Now()) // here: who spins for ever never sleeps
	}
	switch {
	case v.chunks.Load() != chunks:
		return nil, nil, engine.Progress
	case (v.copying.Load() > 0 || v.lent.Load() > 0) && v.copies(clock.Now()):
		return nil, nil, engine.Soon
	}
	return nil, nil, engine.Nothing
}

// Arm implements engine.Source.
func (m memory) Arm(s engine.Sleeper) bool {
	v := m.v
	if s == engine.ByPoll {
		v.bell.arm(aPoll)
		return v.pending()
	}
	v.bell.arm(theLoop)
	found := v.pending()
	if s == engine.ForLoop {
		if v.device != nil {
			v.tidy(clock.Now())
		}
		found = found || v.copying.Load() > 0 // it may sleep for longer than copies take
	}
	return found
}

// Disarm implements engine.Source.
func (m memory) Disarm() { m.v.bell.disarm() }

// Sleep implements engine.Source.
func (m memory) Sleep(s engine.Sleeper, arm func() bool, limit time.Duration) {
	v, who := m.v, theLoop
	if s == engine.ByPoll {
		who = aPoll
	}
	if limit <= 0 {
		limit = v.maxSleep
	}
	count := v.bell.count(who)
	if arm() {
		return
	}
	if v.copying.Load() > 0 { // the end of a device's copy wakes nobody
		limit = min(limit, copyNap)
	}
	if err := v.bell.wait(who, count, limit); err != nil {
		v.log.Error("cannot sleep", "err", err)
	}
}

// copyNap is between two looks for a copy that takes long.
const copyNap = 50 * time.Microsecond

// Wake implements engine.Source.
func (m memory) Wake(s engine.Sleeper) {
	m.v.mu.Lock()
	defer m.v.mu.Unlock()
	switch {
	case m.v.bell == nil: // the van has been closed meanwhile
	case s == engine.ByPoll:
		m.v.bell.wake(aPoll)
	default:
		m.v.bell.wake(theLoop)
	}
}

// Deliver implements engine.Source: it hands up one message, after the parts that are
// still with the sender have been read.
func (m memory) Deliver(p *parcel, turn *engine.Turn) {
	v := m.v
	if p.in.fenced.Load() {
		v.stats.fenced.Add(1)
		v.release(p)
		return
	}
	if err := v.fetch(p); err != nil {
		v.log.Debug("a message was lost", "from", van.NodeName(p.from.id), "err", err)
		v.release(p)
		return
	}
	v.adopt(p)
	p.msg.Turn = turn
	v.stats.received(p.msg.PayloadLen())
	v.recv(&p.msg)
	p.msg.Release()
}

// Discard implements engine.Source.
func (m memory) Discard(p *parcel) { m.v.release(p) }

// scan takes the next message of any link and looks after what has been sent. With
// poll set it leaves alone the peers whose earlier messages the loop is still
// delivering. The feed is held.
func (v *Van) scan(poll bool) *parcel {
	for _, l := range *v.outs.Load() {
		l.service()
	}
	ins := *v.ins.Load()
	for range ins {
		if v.turn++; v.turn >= len(ins) {
			v.turn = 0
		}
		l := ins[v.turn]
		lost := l.lost.Load() // before the look: what was sent is in the ring by then
		if l.fenced.Load() {
			v.removeIn(l)
			return nil // the list has changed
		}
		if poll && l.from.inHand.Load() != 0 || l.held.Load() {
			continue
		}
		if !l.failed() {
			if !v.feed.Loop.MayRead(&l.from.lane) {
				continue // enough waits for its handler; the rest stays with the peer
			}
			if p := l.next(); p != nil {
				return p
			}
			if lost && !l.failed() && (l.seg.tail().Load() != l.head || l.dev.waiting()) {
				continue // of a stream there is more, or a copy is under way
			}
		}
		if lost {
			v.removeIn(l)
			return nil // the list has changed
		}
	}
	return nil
}

// pending tells whether there is something to receive, and tells peers of
// acknowledgements. It is for who is about to stop looking. Copies are none of it: who
// sleeps while there are some looks again soon. The feed is held.
func (v *Van) pending() bool {
	found := false
	for _, l := range *v.ins.Load() {
		l.tell()
		failed, may := l.failed(), v.feed.Loop.MayRead(&l.from.lane)
		more := may && !failed && !l.held.Load() && l.seg.tail().Load() != l.head && !l.dev.full()
		found = found || more || l.fenced.Load() || l.lost.Load() && !l.held.Load() && (failed || may && !l.dev.waiting())
	}
	for _, l := range *v.outs.Load() {
		found = found || l.pending()
	}
	if v.looked != nil {
		v.looked()
	}
	return found
}

// tidy unmaps device memory of peers that was not used for a while. The feed is held.
func (v *Van) tidy(now uint64) {
	if v.device != nil && now-v.tidied > uint64(tidyTime) {
		v.tidied = now
		if sh := v.device.sharer; sh != nil {
			if err := sh.TidySegments(); err != nil {
				v.log.Warn("the device does not say what of its memory is mapped", "err", err)
			}
			for _, l := range *v.outs.Load() {
				l.tidy(now)
			}
		}
		for _, l := range *v.ins.Load() {
			if l.dev != nil {
				l.dev.tidy(now)
			}
		}
	}
}

const tidyTime = 5 * time.Second
