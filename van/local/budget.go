package local

import (
	"fmt"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/engine"
	"github.com/stepaf/stepaf-go/van/env"
)

// limitReceived bounds what waits for handlers of this node. A peer that has used up its
// share is not read: what it sends stays in its ring, and in its own memory.
func (v *Van) limitReceived(c *env.Config) {
	if !failpoint.On("recv-budget") {
		v.feed.Loop.Budget = engine.NewBudget(int64(c.RecvBudgetPeer), int64(c.RecvBudget))
	}
	v.feed.Loop.Weight = (*parcel).weight
	v.feed.Loop.Paused = func(lane *engine.Lane[*parcel], bytes int64) {
		if n := v.feed.Loop.Pauses(); n&(n-1) == 0 {
			v.log.Warn("a peer is not read for now: its handler is slow", "peer", van.NodeName(lane.ID), "bytes that wait for it", bytes,
				"STEPAF_RECV_BUDGET_PEER", c.RecvBudgetPeer, "of all peers", v.feed.Loop.Budget.Used(), "STEPAF_RECV_BUDGET", c.RecvBudget, "so far", n)
		}
	}
	v.feed.Loop.Resumed = func(*engine.Lane[*parcel]) {
		v.mu.Lock()
		defer v.mu.Unlock()
		if v.bell != nil {
			v.bell.wakeAll()
		}
	}
}

// parcelBytes is about what a parcel itself takes.
const parcelBytes = 1 << 10

// weight is the memory of this node that p takes while it waits. Values that go to a place
// of their own, and those still with the sender, take none.
func (p *parcel) weight() int {
	n := parcelBytes + cap(p.buf)
	for _, b := range p.blocks {
		n += cap(b)
	}
	if p.onDevice != nil {
		n += p.onDevice.Mem().Len()
	}
	return n
}

// taken is how far a peer has come.
type taken struct {
	head  uint64
	acked uint32
}

func (l *outLink) taken() taken { return taken{l.seg.head().Load(), l.seg.acked().Load()} }

// allowance is how much may be unsent for msg to be taken. Short messages may be a little
// beyond the budget: one value that uses it up is not to keep the request behind it.
func (l *outLink) allowance(msg *van.Message) int64 {
	if msg.PayloadLen() < streamFrom {
		return l.v.afford + l.v.afford/16
	}
	return l.v.afford
}

// relieved waits while too much is unsent and the peer goes on taking it, and tells
// whether there is room now. A peer that has taken nothing since the last time is not
// waited for. l.mu is held.
func (l *outLink) relieved() bool {
	if failpoint.On("send-budget") {
		return true
	}
	last := l.taken()
	if last == l.seen {
		return false
	}
	pause := l.v.engine.Spinner()
	begun := clock.Now()
	for since := begun; ; pause.Pause() {
		if l.collect() != nil {
			return true // as the next look says
		}
		l.seg.wants().Store(0)
		l.drain()
		if l.unsent < l.v.afford {
			return true
		}
		now := clock.Now()
		switch t := l.taken(); {
		case t != last:
			last, since = t, now
		case now-since > uint64(l.v.relief):
			l.seen = t
			return false
		}
		if now-begun > uint64(maxRelief) {
			return false
		}
	}
}

// Bounds of waiting for a peer that owes room: since it has last taken something, and in
// all.
const (
	relief    = 10 * time.Millisecond
	maxRelief = 500 * time.Millisecond
)

// tooMuch says that nothing more is taken for the peer for now. l.mu is held.
func (l *outLink) tooMuch() error {
	if n := l.v.stats.unsent.Add(1); n&(n-1) == 0 {
		l.v.log.Warn("a message was refused: its peer takes nothing", "peer", van.NodeName(int(l.id.Load())), "bytes unsent", l.unsent,
			"STEPAF_SEND_BUDGET", l.v.afford, "messages queued", len(l.queue), "at most", queueLen, "so far", n)
	}
	return fmt.Errorf("%w: %d bytes are unsent, %d messages queued, STEPAF_SEND_BUDGET is %d bytes, at most %d messages",
		van.ErrQueueFull, l.unsent, len(l.queue), l.v.afford, queueLen)
}
