package local

import (
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/engine"
	"github.com/stepaf/stepaf-go/van/env"
)

// Who receives holds rx: the loop, or a Poll in its place, which holds it while it
// delivers, too. The loop's thread sleeps on the doorbell; peers wake it only when
// the doorbell is armed, which it is when the loop sleeps and nobody polls.

const (
	// maxQuiet and maxPoll bound a Poll, the first one after the last progress: its
	// caller has a deadline.
	maxQuiet = time.Millisecond
	maxPoll  = 20 * time.Millisecond

	// maxSleep bounds a sleep; see bell.wait.
	maxSleep = 500 * time.Millisecond
)

// spinFor is how long to look for a message before sleeping: waking a sleeper costs
// more than a small message. Who spins for ever does so in look.
func spinFor(b env.BusyPoll) time.Duration {
	if b == env.SpinForever {
		b = env.SpinThenBlock
	}
	return b.Spin()
}

// spinner passes the time between two looks. It yields often, since on a busy
// machine the peer may be waiting for this very core: two that spin and yield share
// one well. To other goroutines it yields less often, and only where they may have no
// other thread to run on: for a goroutine that is bound to its thread, as Python's
// callers are, that takes as long as a sleep.
type spinner struct {
	n       uint
	crowded bool
}

// few is a number of threads for goroutines that those who spin may take up.
const few = 3

func (v *Van) spinner() spinner { return spinner{crowded: v.crowded} }

func (s *spinner) pause() {
	switch s.n++; {
	case s.n%256 == 0 && s.crowded:
		runtime.Gosched()
	case s.n%16 == 0:
		_, _, _ = unix.Syscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
	}
}

// patience says for how long to look before sleeping: long while what is awaited
// has mostly come within the longest look, else hardly at all, since then the core is wanted
// by others, perhaps by the very peer. Who holds rx uses it.
type patience struct {
	waiting bool
	since   uint64 // when the wait began
	trust   int    // from -maxTrust to maxTrust
}

const (
	maxTrust  = 8
	shortSpin = 5 * time.Microsecond
)

// empty says that there is nothing at time now.
func (p *patience) empty(now uint64) {
	if !p.waiting {
		p.waiting, p.since = true, now
	}
}

// begin begins a wait anew.
func (p *patience) begin(now uint64) { p.waiting, p.since = true, now }

// came says that a message has come, where the longest look is most.
func (p *patience) came(now uint64, most time.Duration) {
	if !p.waiting {
		return
	}
	p.waiting = false
	if now-p.since <= uint64(most) {
		p.trust = min(p.trust+1, maxTrust)
	} else {
		p.trust = max(p.trust-1, -maxTrust)
	}
}

// spin is how long to look, of the longest time that the configuration allows.
func (p *patience) spin(most time.Duration) time.Duration {
	if p.trust < 0 {
		return min(most, shortSpin)
	}
	return most
}

// receive blocks until a message has come. It is the loop's.
func (v *Van) receive() (*parcel, *engine.Lane[*parcel], bool) {
	for !v.stopping.Load() {
		if p := v.take(); p != nil {
			v.hot = true
			return p, &p.from.lane, true
		}
		if v.spin > 0 && (v.hot || v.copies(clock.Now())) {
			if p := v.look(); p != nil {
				return p, &p.from.lane, true
			}
		}
		v.hot = v.cfg.BusyPoll == env.SpinForever
		v.park()
	}
	return nil, nil, false
}

// take takes a message if there is one and nobody polls.
func (v *Van) take() *parcel {
	if v.pollers.Load() > 0 || !v.rx.TryLock() {
		return nil
	}
	defer v.rx.Unlock()
	p := v.scan(false)
	if p == nil {
		now := clock.Now()
		v.patience.empty(now)
		v.tidy(now) // here: who spins for ever never parks
		return nil
	}
	v.patience.came(clock.Now(), v.spin)
	p.from.inHand.Add(1)
	return p
}

// look takes a message that comes soon, without sleeping.
func (v *Van) look() *parcel {
	s := v.spinner()
	limit := v.spinLimit()
	chunks := v.chunks.Load()
	for start := clock.Now(); !v.stopping.Load() && v.pollers.Load() == 0; s.pause() {
		if p := v.take(); p != nil {
			return p
		}
		switch now := clock.Now(); {
		case v.chunks.Load() != chunks:
			start, chunks = now, v.chunks.Load()
		case v.copies(now):
		case v.cfg.BusyPoll != env.SpinForever && now-start > uint64(limit):
			return nil
		}
	}
	return nil
}

// spinLimit is how long to look now: not at all while somebody polls, who may be closing
// the van, and waiting for the loop.
func (v *Van) spinLimit() time.Duration {
	if !v.rx.TryLock() {
		return 0
	}
	defer v.rx.Unlock()
	return v.patience.spin(v.spin)
}

// scan takes the next message of any link and looks after what has been sent. With
// polling set it leaves alone the peers whose earlier messages the loop is still
// delivering. rx is held.
func (v *Van) scan(polling bool) *parcel {
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
		if polling && l.from.inHand.Load() != 0 || l.held.Load() {
			continue
		}
		if !l.failed() {
			if !v.loop.MayRead(&l.from.lane) {
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
// sleeps while there are some looks again soon. rx is held.
func (v *Van) pending() bool {
	found := false
	for _, l := range *v.ins.Load() {
		l.tell()
		failed, may := l.failed(), v.loop.MayRead(&l.from.lane)
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

// park sleeps until there may be something to receive.
func (v *Van) park() {
	count := v.bell.count(theLoop)
	v.parked.Store(true)
	found := false
	// While somebody polls, the bell stays as it is: the end of the Poll arms it and
	// looks. One that has counted itself out is about to give up rx.
	if v.lockUnlessPolled() {
		v.bell.arm(theLoop)
		found = v.pending()
		v.rx.Unlock()
	}
	if !found && !v.stopping.Load() {
		if err := v.bell.wait(theLoop, count, v.sleepLimit(v.maxSleep)); err != nil {
			v.log.Error("cannot sleep", "err", err)
		}
	}
	v.parked.Store(false)
	if v.pollers.Load() == 0 {
		v.bell.disarm()
	}
}

// lockUnlessPolled takes rx unless somebody polls, whose deliveries may wait for the loop.
func (v *Van) lockUnlessPolled() bool {
	for s := v.spinner(); v.pollers.Load() == 0; s.pause() {
		if v.rx.TryLock() {
			return true
		}
	}
	return false
}

// sleepLimit is how long to sleep at most: the end of a device's copy wakes nobody.
func (v *Van) sleepLimit(most time.Duration) time.Duration {
	if v.copying.Load() > 0 {
		return min(most, copyNap)
	}
	return most
}

// copyNap is between two looks for a copy that takes long.
const copyNap = 50 * time.Microsecond

// tidy unmaps device memory of peers that was not used for a while. rx is held.
func (v *Van) tidy(now uint64) {
	if v.device != nil && now-v.tidied > uint64(tidyTime) {
		v.tidied = now
		for _, l := range *v.ins.Load() {
			if l.dev != nil {
				l.dev.tidy(now)
			}
		}
	}
}

const tidyTime = 5 * time.Second

// Poll implements van.Poller. It receives on the caller's goroutine what comes
// through memory and, where peers are elsewhere too, what comes over the van
// inside.
func (v *Van) Poll(done func() bool) {
	if v.linked.Load() > 0 && (v.spin <= 0 || v.closing.Load()) {
		return
	}
	if v.linked.Load() == 0 || !v.beginPoll() {
		// Another Poll serves this caller, too.
		if v.innerPoller != nil && v.elsewhere.Load() > 0 {
			v.innerPoller.Poll(done)
		}
		return
	}
	defer v.rx.Unlock()
	if v.closing.Load() {
		v.countOut(false)
		return
	}
	v.polling.Store(true)
	v.bell.disarm()
	if v.elsewhere.Load() > 0 && v.innerPoller != nil {
		v.innerPoller.Poll(func() bool {
			for p := v.scan(true); p != nil; p = v.scan(true) {
				v.deliver(p, &v.pollTurn)
			}
			return done()
		})
	} else {
		v.poll(done)
	}
	if v.leftToPoll.Load() { // a delivery has closed the van
		v.polling.Store(false)
		v.pollers.Add(-1)
		v.freeLinks()
		return
	}
	// From now on the loop is to be woken, also for what has come since the last look.
	v.tidy(clock.Now())
	v.polling.Store(false)
	v.pollers.Add(-1)
	v.bell.arm(theLoop)
	if v.pending() || v.copying.Load() > 0 { // it may sleep for longer than copies take
		v.bell.wake(theLoop)
	}
}

// beginPoll counts a Poll and takes rx, unless another Poll has it. The loop, which may
// have it too, gives it up soon: it leaves it alone while a Poll is counted.
func (v *Van) beginPoll() bool {
	v.pollers.Add(1)
	s := v.spinner()
	for begun := clock.Now(); !v.rx.TryLock(); s.pause() {
		late := clock.Now()-begun > uint64(rxTime)
		if late || v.polling.Load() {
			v.countOut(late)
			return false
		}
	}
	return true
}

// countOut ends a Poll that has not received. If it was the last one, or late, the loop
// may have gone to sleep because of it, with nobody to arm the bell.
func (v *Van) countOut(late bool) {
	if v.pollers.Add(-1) > 0 && !late {
		return
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.bell != nil { // else the van has been closed meanwhile
		v.bell.wake(theLoop)
	}
}

// rxTime is longer than the loop has rx but for what is rare.
const rxTime = 50 * time.Microsecond

// poll receives and delivers until done, or until nothing has come for a while. It
// sleeps after a short look: the caller is woken so by the peer itself.
func (v *Van) poll(done func() bool) {
	s := v.spinner()
	begun := clock.Now()
	v.patience.begin(begun)
	for start, chunks := begun, v.chunks.Load(); !done() && !v.closing.Load(); s.pause() {
		p := v.scan(true)
		if p != nil {
			v.deliver(p, &v.pollTurn)
		}
		now := clock.Now()
		if p != nil || v.chunks.Load() != chunks {
			v.patience.came(now, v.spin)
			v.patience.begin(now)
			start, chunks = now, v.chunks.Load()
			continue
		}
		if v.copies(now) && now-begun < uint64(maxPoll) {
			start = now
			continue
		}
		quiet := time.Duration(now - start)
		if quiet > maxQuiet || now-begun > uint64(maxPoll) {
			return
		}
		if quiet > v.patience.spin(v.spin) {
			v.nap(v.sleepLimit(maxQuiet - quiet))
		}
	}
}

// nap sleeps until there may be something to receive, or until limit passes.
func (v *Van) nap(limit time.Duration) {
	count := v.bell.count(aPoll)
	v.bell.arm(aPoll)
	if !v.pending() {
		if err := v.bell.wait(aPoll, count, limit); err != nil {
			v.log.Error("cannot sleep", "err", err)
		}
	}
	v.bell.disarm()
}

// deliver hands up one message, after the parts that are still with the sender
// have been read.
func (v *Van) deliver(p *parcel, turn *engine.Turn) {
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

// deliverOne is deliver for what the loop has taken.
func (v *Van) deliverOne(p *parcel, turn *engine.Turn) {
	from := p.from
	v.deliver(p, turn)
	from.inHand.Add(-1)
}
