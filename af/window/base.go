package window

// What all parts of a window know of it: its name in messages and errors, its memory, and why it is over; and of each
// rank: who it is, whether it has closed its end, and who waits for it.

import (
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/internal/commlayer"
	"github.com/stepaf/stepaf-go/internal/wake"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// base is the window as its parts know it. Once Open has made them they are told no changes but by over.
type base struct {
	layer   commlayer.Layer
	app     cluster.App
	child   *commlayer.Child
	id      int          // of the application, and of the customer
	first   atomic.Int32 // timestamp of the first message, even
	mem     backend.Mem
	signals int
	self    int

	over    atomic.Pointer[error] // why it cannot be used
	isOver  func(err error)       // called once, when over is there
	refused atomic.Uint64
	closed  atomic.Bool // Close was called

	aliveEvery time.Duration // aliveEvery, other than in tests
}

var (
	errClosed     = fmt.Errorf("%w: this window", van.ErrClosed)
	errRankClosed = fmt.Errorf("%w: that rank's window", van.ErrClosed)
)

// fail makes the window unusable. Only the first error counts.
func (b *base) fail(err error) {
	if b.over.CompareAndSwap(nil, &err) {
		b.isOver(err)
	}
}

// String names the window, for errors.
func (b *base) String() string {
	return fmt.Sprintf("window %d of communicator %d", b.child.Number, b.layer.ID())
}

// bad is the error of arguments that make no sense.
func (b *base) bad(op string, err error) error {
	return &van.Error{Op: op, Node: b.app.Name(), Detail: b.String(), Err: err}
}

// wrong is the error of a call that is about a rank.
func (b *base) wrong(op string, rank int, err error) error {
	return &van.Error{Op: op, Node: b.app.Name(), Peer: b.layer.Name(rank), Detail: b.String(), Err: err}
}

// timestamp is that of the message with a number: even, since those of other messages are odd.
func (b *base) timestamp(seq uint64) int32 {
	return int32((uint64(b.first.Load()) + seq<<1) & math.MaxInt32)
}

// copyIn writes to this rank's memory.
func (b *base) copyIn(offset int, data backend.Mem) error {
	if data.Len() == 0 {
		return nil
	}
	return b.app.Backend().Copy(b.mem.Sub(offset, data.Len()), data)
}

// elapsed is for errors.
func elapsed(begun uint64) time.Duration { return time.Duration(clock.Now() - begun) }

// peer is a rank.
type peer struct {
	w        *base
	rank, id int
	gone     atomic.Pointer[error] // it has closed its end
	out      outbox
	in       inbox
	sleepers sleepers
}

func newPeer(b *base, rank, id int) *peer {
	p := &peer{w: b, rank: rank, id: id}
	p.out.p, p.in.p, p.in.signals = p, p, make([]atomic.Int64, b.signals)
	for i := range p.out.lendings {
		p.out.lendings[i].p = p
	}
	return p
}

// end is why nothing can be sent to the rank, or nil.
func (p *peer) end() error {
	if err := p.w.over.Load(); err != nil {
		return *err
	}
	if err := p.gone.Load(); err != nil {
		return *err
	}
	return nil
}

// failure is end as the error of a call.
func (p *peer) failure(op string) error {
	if err := p.end(); err != nil {
		return p.w.wrong(op, p.rank, err)
	}
	return nil
}

// message makes m one that says n.
func (p *peer) message(m *van.Message, n *note, push bool, ts int32) *van.Message {
	n.window, n.epoch = p.w.child.Number, p.w.child.Epoch
	m.Reset()
	m.Receiver, m.Request, m.Push, m.Head, m.Timestamp = p.id, true, push, van.Single, ts
	m.AppID, m.CustomerID = int32(p.w.id), int32(p.w.id)
	m.Body = n.append(m.Body)
	return m
}

// sleepers are the calls that wait for something of a rank.
type sleepers struct {
	n       atomic.Int32 // len(waiting)
	mu      sync.Mutex   // guards the lists
	waiting []*waiter
	idle    []*waiter
}

// wakeAll makes those who wait look again.
func (l *sleepers) wakeAll() {
	if l.n.Load() == 0 {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, x := range l.waiting {
		wake.Put(x.wake)
	}
}

// enter makes wakeAll reach x.
func (l *sleepers) enter(x *waiter) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.waiting = append(l.waiting, x)
	l.n.Add(1)
}

// exit puts x away, which has entered.
func (l *sleepers) exit(x *waiter, entered bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if entered {
		x.timer.Stop()
		l.waiting = slices.DeleteFunc(l.waiting, func(y *waiter) bool { return y == x })
		l.n.Add(-1)
	}
	l.idle = append(l.idle, x)
}
