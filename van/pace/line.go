package pace

// What waits for one peer, and when it may leave.

import (
	"errors"
	"slices"
	"sync"
	"time"
	"unsafe"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/internal/fifo"
	"github.com/stepaf/stepaf-go/internal/wake"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

const (
	// burst is how much unused time counts: after a pause so much of a second's bytes leaves at once.
	burst = 50 * time.Millisecond
	// metaCost is what a message counts for besides its values and its body: about its packed meta.
	metaCost = 288
	// itemCost is what it counts for against the budget beside that.
	itemCost = int64(unsafe.Sizeof(item{}))
	// again is when a message is tried again for which the van inside had no room.
	again = 5 * time.Millisecond
)

// bucket keeps a rate by the time at which the next byte may leave. A message leaves when its
// last byte may, so that one of any length takes the time that its bytes take.
type bucket struct {
	rate int64 // bytes in a second; 0: any
	next time.Duration
}

// due is when a message of n bytes that could have begun at since may leave.
func (b *bucket) due(since time.Duration, n int64) time.Duration {
	if b.rate == 0 {
		return 0
	}
	return max(b.next, since-b.burst()) + b.time(n)
}

// time is how long n bytes take.
func (b *bucket) time(n int64) time.Duration {
	return time.Duration(float64(n) / float64(b.rate) * float64(time.Second))
}

// burst is how much unused time counts, for a short message at the least.
func (b *bucket) burst() time.Duration { return max(burst, b.time(2*metaCost)) }

// take counts a message that leaves now and was due.
func (b *bucket) take(now, due time.Duration) {
	if b.rate > 0 {
		b.next = max(due, now-b.burst())
	}
}

// item is a message that waits. Its frames are the caller's, except short ones.
type item struct {
	msg     van.Message
	bytes   int64
	lane    *lane
	paid    bool // its rates have counted it
	dropped bool // it is not in its lane any more
	short   [van.MaxFrames][van.CopyBelow]byte
}

// lane is what waits of one application, or of all that have no rate.
type lane struct {
	bucket
	since time.Duration // when its first message could begin
	queue fifo.Queue[*item]
}

// line is what waits for one peer.
type line struct {
	v    *Van
	peer int
	idle func() // told when nothing waits any more, without locks

	mu      sync.Mutex
	whole   bucket // of the peer
	rest    *lane  // of applications without a rate
	apps    map[int32]*lane
	bytes   int64
	running bool
	current *item // that is being handed on
	changed chan struct{}

	sending sync.Mutex // held while a message is handed on; taken after mu
}

func newLine(v *Van, peer int, idle func()) *line {
	return &line{v: v, peer: peer, idle: idle, rest: &lane{}, apps: map[int32]*lane{}, changed: make(chan struct{}, 1)}
}

func now() time.Duration { return time.Duration(clock.Now()) }

func (l *line) empty() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return !l.running
}

// set changes the rates. Messages of an application that has a rate from now on get a lane of
// their own, in their order; that of one without any stays until it is empty.
func (l *line) set(whole int64, apps map[int32]int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	t := now()
	l.whole.rate = whole
	for app, a := range l.apps {
		a.rate = apps[app]
		if a.rate == 0 && a.queue.Len() == 0 {
			delete(l.apps, app)
		}
	}
	for app, rate := range apps {
		if l.apps[app] != nil {
			continue
		}
		a := &lane{bucket: bucket{rate: rate}, since: t}
		l.apps[app] = a
		for _, i := range l.rest.remove(func(m *van.Meta) bool { return m.AppID == app }) {
			i.lane = a
			a.queue.Put(i)
		}
	}
	l.poke()
}

// remove takes out what is chosen, and returns it.
func (a *lane) remove(chosen func(*van.Meta) bool) (removed []*item) {
	all := a.queue.All()
	if !slices.ContainsFunc(all, func(i *item) bool { return chosen(&i.msg.Meta) }) {
		return nil
	}
	a.queue = fifo.Queue[*item]{}
	for _, i := range all {
		if chosen(&i.msg.Meta) {
			removed = append(removed, i)
		} else {
			a.queue.Put(i)
		}
	}
	return removed
}

// poke makes the goroutine look again.
func (l *line) poke() {
	wake.Put(l.changed)
}

// keep puts m in its queue, unless it may leave at once. It reports false then, and the caller
// sends it. It does not pass what waits only for the peer's rate: that would wait for ever.
func (l *line) keep(m *van.Message) (kept bool, err error) {
	n := int64(m.PayloadLen()+len(m.Body)) + metaCost
	l.mu.Lock()
	defer l.mu.Unlock()
	a := l.apps[m.AppID]
	if a == nil {
		a = l.rest
	}
	if a.queue.Len() == 0 {
		a.since = now()
		whole, own := l.whole.due(a.since, n), a.due(a.since, n)
		if ready, _, _ := l.ready(a.since); ready == nil && max(whole, own) <= a.since {
			l.whole.take(a.since, whole)
			a.take(a.since, own)
			return false, nil
		}
	}
	if l.v.ended.Load() {
		return true, &van.Error{Op: "send", Peer: van.NodeName(l.peer), Err: van.ErrClosed}
	}
	if b := l.v.opts.Budget; b > 0 && l.bytes >= b && !m.Continues {
		return true, &van.Error{Op: "send", Peer: van.NodeName(l.peer), Detail: "a rate limit holds data back (stepaf policy)", Err: van.ErrQueueFull}
	}
	i := &item{bytes: n, lane: a}
	i.msg.Reset()
	i.msg.Meta.CopyFrom(&m.Meta)
	i.msg.Sender, i.msg.Receiver, i.msg.ProcessEpoch, i.msg.Frames = m.Sender, m.Receiver, m.ProcessEpoch, m.Frames
	i.msg.Into, i.msg.Placed, i.msg.Continues, i.msg.Done = m.Into, m.Placed, m.Continues, m.Done
	for k := range m.Frames {
		f := m.Frame(k)
		if f.OnHost() && f.Len() < van.CopyBelow { // the caller may use it again when Send returns
			f = backend.Bytes(i.short[k][:copy(i.short[k][:], f.Host())])
		}
		f.Retain()
		i.msg.SetFrame(k, f)
	}
	a.queue.Put(i)
	l.bytes += n + itemCost
	if !l.running {
		l.running = true
		l.v.wg.Go(l.run)
	} else if a.queue.Len() == 1 {
		l.poke() // it may be due before the one that is waited for
	}
	return true, nil
}

// ready is the lane whose first message has waited longest of those that only the peer's rate holds back at
// t, or nil. Otherwise some message waits for a rate of its own, until at the earliest. l.mu is held.
func (l *line) ready(t time.Duration) (ready *lane, until time.Duration, waits bool) {
	look := func(a *lane) {
		if a.queue.Len() == 0 {
			return
		}
		switch due := a.ownDue(); {
		case due > t:
			if !waits || due < until {
				until, waits = due, true
			}
		case ready == nil || a.since < ready.since:
			ready = a
		}
	}
	look(l.rest)
	for _, a := range l.apps {
		look(a)
	}
	return ready, until, waits
}

// ownDue is when the rate of the lane lets its first message leave.
func (a *lane) ownDue() time.Duration {
	if next := a.queue.Front(); !next.paid {
		return a.due(a.since, next.bytes)
	}
	return 0
}

// run hands on what waits, until nothing does.
func (l *line) run() {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		l.mu.Lock()
		t := now()
		a, until, waits := l.ready(t)
		if a == nil && !waits {
			l.running = false
			l.mu.Unlock()
			l.idle()
			return
		}
		var i *item
		var whole time.Duration
		if a != nil {
			if i = a.queue.Front(); !i.paid {
				whole = l.whole.due(a.since, i.bytes)
			}
			until = whole
		}
		wait := until - t
		if wait <= 0 {
			if !i.paid {
				own := a.ownDue()
				i.paid = true
				l.whole.take(t, whole)
				a.take(t, own)
			}
			if l.handOn(i) {
				continue
			}
			wait = again
		} else {
			l.mu.Unlock()
		}
		timer.Reset(wait)
		select {
		case <-timer.C:
		case <-l.changed:
		}
	}
}

// handOn sends i, the first of its lane, and reports false if the van inside had no room. l.mu
// is held, and released.
func (l *line) handOn(i *item) bool {
	l.sending.Lock()
	l.current = i
	l.mu.Unlock()
	err := l.v.Van.Send(&i.msg)
	l.sending.Unlock() // before mu is taken: drop waits for it without mu
	l.mu.Lock()
	l.current = nil
	full := errors.Is(err, van.ErrQueueFull) && !i.dropped
	if a := i.lane; !full && !i.dropped {
		a.queue.Take()
		a.since = now()
		l.bytes -= i.bytes + itemCost
		if a.rate == 0 && a.queue.Len() == 0 && a != l.rest {
			delete(l.apps, i.msg.AppID)
		}
	}
	l.mu.Unlock()
	if full {
		return false
	}
	i.end(err != nil)
	if err != nil && !i.dropped && l.v.opts.OnFail != nil {
		l.v.opts.OnFail(l.peer, &i.msg.Meta, err)
	}
	return true
}

// end lets go of what i keeps. The van inside calls Done for what it has taken.
func (i *item) end(done bool) {
	for k := range i.msg.Frames {
		i.msg.Frame(k).Release()
	}
	if done && i.msg.Done != nil {
		i.msg.Done.Sent()
	}
}

// drop forgets what waits and is chosen. When it returns nothing of it is being handed on.
func (l *line) drop(chosen func(*van.Meta) bool) {
	var dropped []*item
	l.mu.Lock()
	busy := l.current != nil && chosen(&l.current.msg.Meta)
	remove := func(a *lane) {
		for _, i := range a.remove(chosen) {
			i.dropped = true
			l.bytes -= i.bytes + itemCost
			if i != l.current { // handOn ends that one
				dropped = append(dropped, i)
			}
		}
	}
	remove(l.rest)
	for _, a := range l.apps {
		remove(a)
	}
	l.poke()
	l.mu.Unlock()
	for _, i := range dropped {
		i.end(true)
	}
	if busy { // until it is with the van inside
		l.sending.Lock()
		defer l.sending.Unlock()
	}
}
