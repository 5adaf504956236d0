package window

// The state that the parts of a window share: its name in messages and errors, its memory, its error, and for each
// rank its state and the calls that wait for it.

import (
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/internal/commlayer"
	"github.com/stepaf/stepaf-go/internal/wake"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// base is the state that the parts of a window share. Once Open has created the parts, base notifies them of changes
// only through over.
type base struct {
	layer   commlayer.Layer
	app     cluster.App
	child   *commlayer.Child
	id      int          // of the application, and of the customer
	first   atomic.Int32 // timestamp of the first message, even
	mem     backend.Mem
	signals int
	self    int

	over    atomic.Pointer[error] // why the window cannot be used
	isOver  func(err error)       // called once, when over is set
	refused atomic.Uint64
	closed  atomic.Bool // Close was called

	aliveEvery time.Duration // aliveEvery, except in tests
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

// String describes the window in errors.
func (b *base) String() string {
	return fmt.Sprintf("window %d of communicator %d", b.child.Number, b.layer.ID())
}

// bad returns the error of invalid arguments.
func (b *base) bad(op string, err error) error {
	return &van.Error{Op: op, Node: b.app.Name(), Detail: b.String(), Err: err}
}

// wrong returns the error of a call that concerns a rank.
func (b *base) wrong(op string, rank int, err error) error {
	return &van.Error{Op: op, Node: b.app.Name(), Peer: b.layer.Name(rank), Detail: b.String(), Err: err}
}

// timestamp returns the timestamp of message seq: an even number. Other messages, and verbClose, have odd ones.
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

// peer is the state of a rank.
type peer struct {
	w        *base
	rank, id int
	gone     atomic.Pointer[error] // the rank has closed the window
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

// end returns why nothing can be sent to the rank, or nil.
func (p *peer) end() error {
	if err := p.w.over.Load(); err != nil {
		return *err
	}
	if err := p.gone.Load(); err != nil {
		return *err
	}
	return nil
}

// failure returns the result of end as the error of a call.
func (p *peer) failure(op string) error {
	if err := p.end(); err != nil {
		return p.w.wrong(op, p.rank, err)
	}
	return nil
}

// message initializes m with n as its body.
func (p *peer) message(m *van.Message, n *note, push bool, ts int32) *van.Message {
	n.window, n.epoch = p.w.child.Number, p.w.child.Epoch
	m.Reset()
	m.Receiver, m.Request, m.Push, m.Head, m.Timestamp = p.id, true, push, van.Single, ts
	m.AppID, m.CustomerID = int32(p.w.id), int32(p.w.id)
	m.Body = n.append(m.Body)
	return m
}

// oddTimestamp returns the next odd timestamp. The inbox's mu is held.
func (p *peer) oddTimestamp() int32 {
	p.in.oddTimestamps++
	return p.w.timestamp(p.in.oddTimestamps-1) | 1
}

// sleepers are the calls that wait for an event of a rank.
type sleepers struct {
	n       atomic.Int32 // len(waiting)
	mu      sync.Mutex   // guards the lists
	waiting []*waiter
	idle    []*waiter
}

// wakeAll wakes all waiting calls, which check their conditions.
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

// enter registers x for wakeAll.
func (l *sleepers) enter(x *waiter) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.waiting = append(l.waiting, x)
	l.n.Add(1)
}

// exit returns x to the free list; entered reports whether enter was called.
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
