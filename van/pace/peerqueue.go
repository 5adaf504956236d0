package pace

// The queued messages of one peer, and the times when they may leave.

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
)

const (
	// burst is the unused time that counts: after a pause, the bytes of this time leave at once.
	burst = 50 * time.Millisecond
	// metaCost is the cost of a message in bytes besides its values and its body: about its packed meta.
	metaCost = 288
	// itemCost is its additional cost in the budget.
	itemCost = int64(unsafe.Sizeof(item{}))
	// retryTime is the time until the next try if the inner van's queue was full.
	retryTime = 5 * time.Millisecond
)

// bucket enforces a rate by the time at which the next byte may leave. A message leaves when its
// last byte may, so that a message of any length takes the time of its bytes.
type bucket struct {
	rate int64 // bytes per second; 0: no limit
	next time.Duration
}

// due returns when a message of n bytes may leave that could have begun at since.
func (b *bucket) due(since time.Duration, n int64) time.Duration {
	if b.rate == 0 {
		return 0
	}
	return max(b.next, since-b.burst()) + b.time(n)
}

// time returns the time of n bytes.
func (b *bucket) time(n int64) time.Duration {
	return time.Duration(float64(n) / float64(b.rate) * float64(time.Second))
}

// burst returns the unused time that counts: at least that of a short message.
func (b *bucket) burst() time.Duration { return max(burst, b.time(2*metaCost)) }

// take counts a message that leaves now and was due at the given time.
func (b *bucket) take(now, due time.Duration) {
	if b.rate > 0 {
		b.next = max(due, now-b.burst())
	}
}

// item is a queued message. Its frames are the caller's, except short ones, which are copied.
type item struct {
	msg     van.Message
	bytes   int64
	queue   *rateQueue
	paid    bool // its rates have counted it
	dropped bool // it has been removed from its queue
	short   [van.MaxFrames][van.CopyBelow]byte
}

// rateQueue holds the queued messages of one application, or of all applications without a rate.
type rateQueue struct {
	bucket
	since time.Duration // time from which its first message could leave
	queue fifo.Queue[*item]
}

// peerQueue holds the queued messages of one peer.
type peerQueue struct {
	v    *Van
	peer int
	idle func() // called without locks when the queue is empty

	mu      sync.Mutex
	whole   bucket     // the peer's rate
	rest    *rateQueue // of applications without a rate
	apps    map[int32]*rateQueue
	bytes   int64
	running bool
	current *item // the message that is being forwarded
	changed chan struct{}

	sending sync.Mutex // held while a message is forwarded; locked after mu
}

func newPeerQueue(v *Van, peer int, idle func()) *peerQueue {
	return &peerQueue{v: v, peer: peer, idle: idle, rest: &rateQueue{}, apps: map[int32]*rateQueue{}, changed: make(chan struct{}, 1)}
}

func now() time.Duration { return time.Duration(clock.Now()) }

func (l *peerQueue) empty() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return !l.running
}

// set changes the rates. Queued messages of an application with a new rate move to a rate queue of
// their own, in order. The queue of an application without a rate stays until it is empty.
func (l *peerQueue) set(whole int64, apps map[int32]int64) {
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
		a := &rateQueue{bucket: bucket{rate: rate}, since: t}
		l.apps[app] = a
		for _, i := range l.rest.remove(func(m *van.Meta) bool { return m.AppID == app }) {
			i.queue = a
			a.queue.Put(i)
		}
	}
	l.poke()
}

// remove removes and returns the chosen messages.
func (a *rateQueue) remove(chosen func(*van.Meta) bool) (removed []*item) {
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

// poke makes the goroutine compute the due times again.
func (l *peerQueue) poke() {
	wake.Put(l.changed)
}

// enqueue queues m. If m may leave at once, enqueue returns false and the caller sends m. m does not
// overtake messages that wait only for the peer's rate: they would wait forever.
func (l *peerQueue) enqueue(m *van.Message) (kept bool, err error) {
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
	if b := l.v.opts.Budget; b > 0 && l.bytes >= b {
		l.v.refused.Add(1)
		return true, &van.Error{Op: "send", Peer: van.NodeName(l.peer), Detail: "a rate limit holds data back (stepaf policy)", Err: van.ErrQueueFull}
	}
	i := &item{bytes: n, queue: a}
	i.msg.CloneFrom(m, &i.short)
	a.queue.Put(i)
	l.bytes += n + itemCost
	if !l.running {
		l.running = true
		l.v.wg.Go(l.run)
	} else if a.queue.Len() == 1 {
		l.poke() // it may be due before the message that the goroutine waits for
	}
	return true, nil
}

// ready returns the rate queue whose first message may leave at t by its own rate and has waited longest, or
// nil. waits says that messages wait for rates of their own, until at the earliest. The caller holds l.mu.
func (l *peerQueue) ready(t time.Duration) (ready *rateQueue, until time.Duration, waits bool) {
	check := func(a *rateQueue) {
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
	check(l.rest)
	for _, a := range l.apps {
		check(a)
	}
	return ready, until, waits
}

// ownDue returns when the first message may leave by the queue's own rate.
func (a *rateQueue) ownDue() time.Duration {
	if next := a.queue.Front(); !next.paid {
		return a.due(a.since, next.bytes)
	}
	return 0
}

// run forwards the queued messages until there are none.
func (l *peerQueue) run() {
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
			if l.forward(i) {
				continue
			}
			wait = retryTime
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

// forward sends i, the first of its queue. It returns false if the inner van's queue was full. The caller
// holds l.mu, and forward unlocks it.
func (l *peerQueue) forward(i *item) bool {
	l.sending.Lock()
	l.current = i
	l.mu.Unlock()
	err := l.v.Van.Send(&i.msg)
	l.sending.Unlock() // before mu is taken: drop waits for it without mu
	l.mu.Lock()
	l.current = nil
	full := errors.Is(err, van.ErrQueueFull) && !i.dropped
	if a := i.queue; !full && !i.dropped {
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
	closed := l.v.ended.Load() && errors.Is(err, van.ErrClosed) // Close has canceled the remaining messages
	if err != nil && !i.dropped && !closed && l.v.opts.OnFail != nil {
		l.v.opts.OnFail(l.peer, &i.msg.Meta, err)
	}
	return true
}

// end releases the frames of i. With done it also calls Done, if the inner van has not accepted i.
func (i *item) end(done bool) {
	i.msg.ReleaseClone()
	if done && i.msg.Done != nil {
		i.msg.Done.Sent()
	}
}

// drop removes the chosen messages. When it returns, none of them is being forwarded.
func (l *peerQueue) drop(chosen func(*van.Meta) bool) {
	var dropped []*item
	l.mu.Lock()
	busy := l.current != nil && chosen(&l.current.msg.Meta)
	remove := func(a *rateQueue) {
		for _, i := range a.remove(chosen) {
			i.dropped = true
			l.bytes -= i.bytes + itemCost
			if i != l.current { // forward ends the message that it sends
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
	if busy { // wait until the inner van has it
		l.sending.Lock()
		defer l.sending.Unlock()
	}
}
