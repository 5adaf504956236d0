package local

import (
	"log/slog"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/internal/logx"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/engine"
	"github.com/stepaf/stepaf-go/van/env"
)

// receiver is the engine's source of what peers write to their links. It sleeps on the
// doorbell; peers wake it only when the doorbell is armed.
type receiver struct {
	self    *endpoint
	in      *inCommon
	peers   *peers
	log     *slog.Logger
	deliver van.Receiver

	blamed logx.Sparse

	// The holder of the feed uses these.
	next   int    // of peers.ins, where the last message was
	tidied uint64 // when tidy last did something

	maxSleep time.Duration // maxSleep, other than in tests
	polled   func()        // for tests: called after the last poll before a sleep
}

// limit bounds what waits for handlers of this node. A peer that has used up its
// share is not read: what it sends stays in its ring, and in its own memory.
func (r *receiver) limit(c *env.Config) {
	loop := r.in.feed.Loop
	if !failpoint.On("recv-budget") {
		loop.Budget = engine.NewBudget(int64(c.RecvBudgetPeer), int64(c.RecvBudget))
	}
	loop.Weight = (*inbound).weight
	loop.Paused = func(lane *engine.PeerQueue[*inbound], bytes int64) {
		from := r.peers.sender(lane.ID)
		// While a value is being read from the peer, its messages wait for the end of that.
		from.blame.Watch(lane.Paused, func() bool { return lane.Slow() && !from.fetching.Load() }, func() {
			if n, speak := r.blamed.Next(); speak {
				r.log.Warn("a peer is not read for now: its handler is slow", "peer", van.NodeName(lane.ID), "bytes that wait for it", bytes,
					"STEPAF_RECV_BUDGET_PEER", c.RecvBudgetPeer, "of all peers", loop.Budget.Used(), "STEPAF_RECV_BUDGET", c.RecvBudget, "so far", n)
			}
		})
	}
	loop.Resumed = func(*engine.PeerQueue[*inbound]) { r.self.bell.wakeAll() }
}

// maxSleep bounds a sleep; see bell.wait.
const maxSleep = 500 * time.Millisecond

// Take implements engine.Source.
func (r *receiver) Take(_ time.Duration, poll bool) (*inbound, *engine.PeerQueue[*inbound], engine.PollResult) {
	chunks := r.in.chunks.Load()
	if p := r.scan(poll); p != nil {
		return p, &p.from.lane, engine.Message
	}
	if r.self.device != nil && !poll {
		r.tidy(clock.Now()) // here: a loop that polls for ever never sleeps
	}
	switch {
	case r.in.chunks.Load() != chunks:
		return nil, nil, engine.Progress
	case r.in.copies.any() && r.in.copies.soon(clock.Now()):
		return nil, nil, engine.InFlight
	}
	return nil, nil, engine.Nothing
}

// Arm implements engine.Source.
func (r *receiver) Arm(s engine.Sleeper) bool {
	r.self.bell.bell.arm(waiterOf(s))
	found := r.pending()
	if s == engine.ForLoop {
		if r.self.device != nil {
			r.tidy(clock.Now())
		}
		found = found || r.in.copies.running.Load() > 0 // it may sleep for longer than copies take
	}
	return found
}

// Disarm implements engine.Source.
func (r *receiver) Disarm() { r.self.bell.bell.disarm() }

// waiterOf is the waiter of the bell that s is.
func waiterOf(s engine.Sleeper) waiter {
	if s == engine.ByPoll {
		return pollWaiter
	}
	return loopWaiter
}

// Sleep implements engine.Source.
func (r *receiver) Sleep(s engine.Sleeper, arm func() bool, limit time.Duration) {
	bell, who := r.self.bell.bell, waiterOf(s)
	if limit <= 0 {
		limit = r.maxSleep
	}
	count := bell.count(who)
	if arm() {
		return
	}
	if r.in.copies.running.Load() > 0 { // the end of a device's copy wakes nobody
		limit = min(limit, copyPause)
	}
	if err := bell.wait(who, count, limit); err != nil {
		r.log.Error("cannot sleep", "err", err)
	}
}

// Wake implements engine.Source. It does nothing when the van has been closed meanwhile.
func (r *receiver) Wake(s engine.Sleeper) { r.self.bell.wake(waiterOf(s)) }

// Deliver implements engine.Source: it hands up one message, after the parts that are
// still with the sender have been read.
func (r *receiver) Deliver(p *inbound, turn *engine.Deliverer) {
	c := r.in
	if p.in.fenced.Load() {
		c.stats.fenced.Add(1)
		c.release(p)
		return
	}
	if err := p.in.fetch(p); err != nil {
		r.log.Debug("a message was lost", "from", van.NodeName(p.from.id), "err", err)
		c.release(p)
		return
	}
	c.adopt(p)
	p.msg.Deliverer = turn
	c.stats.received(p.msg.PayloadLen())
	r.deliver(&p.msg)
	p.msg.Release()
}

// Discard implements engine.Source.
func (r *receiver) Discard(p *inbound) { r.in.release(p) }

// scan takes the next message of any link, and services the outbound links. With
// poll set it leaves alone the peers whose earlier messages the loop is still
// delivering. The feed is held.
func (r *receiver) scan(poll bool) *inbound {
	for _, l := range *r.peers.outs.Load() {
		l.service()
	}
	ins := *r.peers.ins.Load()
	for range ins {
		if r.next++; r.next >= len(ins) {
			r.next = 0
		}
		l := ins[r.next]
		lost := l.lost.Load() // before the ring is read: what was sent is there by then
		if l.fenced.Load() {
			r.peers.removeIn(l)
			return nil // the list has changed
		}
		if lost && l.behind.Load() != 0 && l.seg.tail().Load() == l.head { // the marks of l were never sent, or do not matter
			r.peers.removeIn(l)
			return nil // the list has changed
		}
		if poll && l.from.inHand.Load() != 0 || l.waits() {
			continue
		}
		if !l.failed() {
			if !r.in.feed.Loop.MayRead(&l.from.lane) {
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
			r.peers.removeIn(l)
			return nil // the list has changed
		}
	}
	return nil
}

// pending tells whether there is something to receive, and tells peers of
// acknowledgements. It is called before the receiver stops polling. Copies are none of it: a
// receiver that sleeps while there are some polls again soon. The feed is held.
func (r *receiver) pending() bool {
	found := false
	for _, l := range *r.peers.ins.Load() {
		l.tell()
		failed, may := l.failed(), r.in.feed.Loop.MayRead(&l.from.lane)
		more := may && !failed && !l.waits() && l.seg.tail().Load() != l.head && !l.dev.full()
		unused := l.lost.Load() && l.behind.Load() != 0 && l.seg.tail().Load() == l.head
		found = found || more || unused || l.fenced.Load() || l.lost.Load() && !l.waits() && (failed || may && !l.dev.waiting())
	}
	for _, l := range *r.peers.outs.Load() {
		found = found || l.pending()
	}
	if r.polled != nil {
		r.polled()
	}
	return found
}

// tidy unmaps device memory of peers that was not used for a while. The feed is held.
func (r *receiver) tidy(now uint64) {
	d := r.self.device
	if d == nil || now-r.tidied <= uint64(tidyTime) {
		return
	}
	r.tidied = now
	r.in.unstrand()
	if d.sharer != nil {
		if err := d.sharer.TidySegments(); err != nil {
			r.log.Warn("the device does not say what of its memory is mapped", "err", err)
		}
		for _, l := range *r.peers.outs.Load() {
			l.tidy(now)
		}
	}
	for _, l := range *r.peers.ins.Load() {
		if l.dev != nil {
			l.dev.tidy(now)
		}
	}
}

const tidyTime = 5 * time.Second
