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

// receiver is the engine's source for all inbound links. It sleeps on the doorbell; peers wake it only
// when the doorbell is armed.
type receiver struct {
	self    *endpoint
	in      *inCommon
	peers   *peers
	log     *slog.Logger
	deliver van.Receiver

	blamed logx.Sparse

	// The holder of the feed uses these.
	next   int    // index in peers.Ins of the link of the last message
	tidied uint64 // the time of the last tidy

	maxSleep time.Duration // the constant, except in tests
	polled   func()        // for tests: called after the last poll before a sleep
}

// limit sets the budgets of messages that wait for this node's handlers. If a peer has used up its
// share, its links are not read: its messages stay in its ring and in its own memory.
func (r *receiver) limit(c *env.Config) {
	loop := r.in.feed.Loop
	if !failpoint.On("recv-budget") {
		loop.Budget = engine.NewBudget(int64(c.RecvBudgetPeer), int64(c.RecvBudget))
	}
	loop.Weight = (*inbound).weight
	loop.Paused = func(lane *engine.PeerQueue[*inbound], bytes int64) {
		from := r.peers.sender(lane.ID)
		// A message whose value is being read from the peer is no sign of a slow handler.
		from.blame.Watch(lane.Paused, func() bool { return lane.Slow() && !from.fetching.Load() }, func() {
			if n, speak := r.blamed.Next(); speak {
				r.log.Warn("a peer is not read for now: its handler is slow", "peer", van.NodeName(lane.ID), "bytes that wait for it", bytes,
					"STEPAF_RECV_BUDGET_PEER", c.RecvBudgetPeer, "of all peers", loop.Budget.Used(), "STEPAF_RECV_BUDGET", c.RecvBudget, "so far", n)
			}
		})
	}
	loop.Resumed = func(*engine.PeerQueue[*inbound]) { r.self.bell.wakeAll() }
}

// maxSleep is the longest sleep; see bell.wait.
const maxSleep = 500 * time.Millisecond

// Take implements engine.Source.
func (r *receiver) Take(_ time.Duration, poll bool) (*inbound, *engine.PeerQueue[*inbound], engine.PollResult) {
	chunks := r.in.chunks.Load()
	if p := r.scan(poll); p != nil {
		return p, &p.from.lane, engine.Message
	}
	if r.self.device != nil && !poll {
		r.tidy(clock.Now()) // not in Sleep: a loop may poll forever
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
		found = found || r.in.copies.running.Load() > 0 // Sleep could otherwise last longer than the copies
	}
	return found
}

// Disarm implements engine.Source.
func (r *receiver) Disarm() { r.self.bell.bell.disarm() }

// waiterOf returns the waiter of the bell for s.
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
	if r.in.copies.running.Load() > 0 { // the end of a device's copy does not ring the bell
		limit = min(limit, copyPause)
	}
	if err := bell.wait(who, count, limit); err != nil {
		r.log.Error("cannot sleep", "err", err)
	}
}

// Wake implements engine.Source. It does nothing if the van has been closed.
func (r *receiver) Wake(s engine.Sleeper) { r.self.bell.wake(waiterOf(s)) }

// Deliver implements engine.Source: it reads the parts that are still in the sender's memory, and hands up the
// message.
func (r *receiver) Deliver(p *inbound, inPoll bool) {
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
	p.msg.InPoll = inPoll
	c.stats.received(p.msg.PayloadLen())
	r.deliver(&p.msg)
	p.msg.Release()
}

// Discard implements engine.Source.
func (r *receiver) Discard(p *inbound) { r.in.release(p) }

// scan receives the next message of any link, and services the outbound links. With
// poll, it skips peers whose earlier messages the loop is still delivering. The caller holds the
// feed.
func (r *receiver) scan(poll bool) *inbound {
	for _, l := range r.peers.Outs() {
		l.service()
	}
	ins := r.peers.Ins()
	for range ins {
		if r.next++; r.next >= len(ins) {
			r.next = 0
		}
		l := ins[r.next]
		lost := l.lost.Load() // read before the ring: if set, the ring is complete
		if l.fenced.Load() {
			r.peers.removeIn(l)
			return nil // the list has changed
		}
		if lost && l.Marks.Missing() && l.seg.tail().Load() == l.head { // the marks of l were never sent, or do not matter
			r.peers.removeIn(l)
			return nil // the list has changed
		}
		if poll && l.from.inHand.Load() != 0 || l.waits() {
			continue
		}
		if !l.failed() {
			if !r.in.feed.Loop.MayRead(&l.from.lane) {
				continue // the peer's budget is used up; further messages stay in its memory
			}
			if p := l.next(); p != nil {
				return p
			}
			if lost && !l.failed() && (l.seg.tail().Load() != l.head || l.dev.waiting()) {
				continue // a stream has more chunks, or a copy is running
			}
		}
		if lost {
			r.peers.removeIn(l)
			return nil // the list has changed
		}
	}
	return nil
}

// pending reports whether there may be a message to receive, and rings peers for acknowledgements. It is
// called before the receiver stops polling. Running copies do not count: the receiver then sleeps only
// briefly. The caller holds the feed.
func (r *receiver) pending() bool {
	found := false
	for _, l := range r.peers.Ins() {
		l.tell()
		failed, may := l.failed(), r.in.feed.Loop.MayRead(&l.from.lane)
		more := may && !failed && !l.waits() && l.seg.tail().Load() != l.head && !l.dev.full()
		unused := l.lost.Load() && l.Marks.Missing() && l.seg.tail().Load() == l.head
		found = found || more || unused || l.fenced.Load() || l.lost.Load() && !l.waits() && (failed || may && !l.dev.waiting())
	}
	for _, l := range r.peers.Outs() {
		found = found || l.pending()
	}
	if r.polled != nil {
		r.polled()
	}
	return found
}

// tidy unmaps device memory of peers that was not used for mapTime. The caller holds the feed.
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
		for _, l := range r.peers.Outs() {
			l.tidy(now)
		}
	}
	for _, l := range r.peers.Ins() {
		if l.dev != nil {
			l.dev.tidy(now)
		}
	}
}

const tidyTime = 5 * time.Second
