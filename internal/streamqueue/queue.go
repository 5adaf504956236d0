// Package streamqueue sends what has to wait for work on a device, in order.
package streamqueue

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/internal/fifo"
	"github.com/stepaf/stepaf-go/internal/wake"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/env"
)

// Queue sends in order what has to wait for a device. Its goroutine begins with the
// first entry.
type Queue struct {
	back  backend.Backend
	idler backend.StreamIdler // nil if the backend cannot tell
	spin  time.Duration       // how long it looks for the next entry before it sleeps

	waiting atomic.Int64 // entries that are not sent yet
	closing atomic.Bool

	mu      sync.Mutex
	entries fifo.Queue[entry]
	events  []backend.Event // not in use
	current Entry           // whose event is awaited
	ctx     context.Context // of that wait
	cancel  context.CancelFunc
	wake    chan struct{}
	ended   chan struct{} // nil before the first entry
}

// entry is what is to be sent, and the event that it waits for, nil for none.
type entry struct {
	what  Entry
	event backend.Event
}

// Entry is what a Queue sends.
type Entry interface {
	// Dead tells that nobody wants it sent any more.
	Dead() bool
	// SendNow sends it. With an error, which says why the device's work is not waited for,
	// it sends nothing.
	SendNow(err error)
}

// New makes a queue for work on b, which looks for the next entry before it sleeps as p says.
func New(b backend.Backend, p env.BusyPoll) *Queue {
	q := &Queue{back: b, spin: p.Spin(), wake: make(chan struct{}, 1)}
	q.idler, _ = b.(backend.StreamIdler)
	return q
}

// Busy tells whether something is to be sent before what comes now.
func (q *Queue) Busy() bool { return q.waiting.Load() > 0 }

// Complete is no stream: there is nothing to wait for.
const Complete = ^uintptr(0)

// Mark returns an event at the present end of stream, nil for Complete and for a
// stream that has come to its end.
func (q *Queue) Mark(stream uintptr) (backend.Event, error) {
	if stream == Complete {
		return nil, nil
	}
	if q.idler != nil {
		if idle, err := q.idler.Idle(stream); idle || err != nil {
			return nil, err
		}
	}
	e, err := q.Event()
	if err != nil {
		return nil, err
	}
	if err := e.Record(stream); err != nil {
		return nil, errors.Join(err, e.Close())
	}
	return e, nil
}

// Event returns an event that is not in use, to be given back with Unmark.
func (q *Queue) Event() (e backend.Event, err error) {
	q.mu.Lock()
	if n := len(q.events); n > 0 {
		e, q.events = q.events[n-1], q.events[:n-1]
	}
	q.mu.Unlock()
	if e == nil {
		e, err = q.back.NewEvent()
	}
	return e, err
}

// keepEvents bounds the events that are kept for use again.
const keepEvents = 256

// Unmark gives back an event of Mark, which may be nil.
func (q *Queue) Unmark(e backend.Event) {
	if e == nil {
		return
	}
	q.mu.Lock()
	keep := !q.closing.Load() && len(q.events) < keepEvents
	if keep {
		q.events = append(q.events, e)
	}
	q.mu.Unlock()
	if !keep {
		_ = e.Close() // one that its backend cannot free is freed with it
	}
}

// Add sends x when all before it is sent and e, which may be nil, is done. It takes e
// over. It tells whether the queue is open.
func (q *Queue) Add(x Entry, e backend.Event) bool {
	q.mu.Lock()
	if q.closing.Load() {
		q.mu.Unlock()
		q.Unmark(e)
		return false
	}
	if q.ended == nil {
		q.ended = make(chan struct{})
		q.ctx, q.cancel = context.WithCancel(context.Background())
		go q.run()
	}
	q.entries.Put(entry{x, e})
	q.waiting.Add(1)
	q.mu.Unlock()
	wake.Put(q.wake)
	return true
}

func (q *Queue) run() {
	defer close(q.ended)
	for {
		e, ok := q.next()
		if !ok {
			return
		}
		e.what.SendNow(q.wait(e))
		q.waiting.Add(-1)
	}
}

// next waits for the next entry, at first without sleeping.
func (q *Queue) next() (entry, bool) {
	for begun := uint64(0); ; {
		q.mu.Lock()
		if q.entries.Len() > 0 {
			e := q.entries.Take()
			q.mu.Unlock()
			return e, true
		}
		q.mu.Unlock()
		if q.closing.Load() {
			return entry{}, false
		}
		if begun == 0 {
			begun = clock.Now()
		}
		for !q.Busy() && !q.closing.Load() && (q.spin < 0 || clock.Now()-begun < uint64(q.spin)) {
			runtime.Gosched()
		}
		if !q.Busy() && !q.closing.Load() {
			<-q.wake
			begun = 0
		}
	}
}

// wait waits for the event of e, unless what it is for is dead.
func (q *Queue) wait(e entry) error {
	if q.closing.Load() {
		q.Unmark(e.event)
		return van.ErrClosed
	}
	if e.event == nil {
		return nil
	}
	q.mu.Lock()
	if q.ctx.Err() != nil && !q.closing.Load() { // of one that was given up
		q.ctx, q.cancel = context.WithCancel(context.Background())
	}
	q.current = e.what
	ctx := q.ctx
	q.mu.Unlock()
	var err error
	if !e.what.Dead() { // later, giveUp finds it
		err = e.event.Sync(ctx)
	}
	q.mu.Lock()
	q.current = nil
	q.mu.Unlock()
	switch {
	case err == nil:
	case q.closing.Load():
		err = van.ErrClosed
	case ctx.Err() == nil:
		_ = e.event.Close() // it is of no use, and the error says why
		return fmt.Errorf("wait for the work that makes the tensors: %w", err)
	}
	q.Unmark(e.event)
	return err
}

// GiveUp ends the wait for the event of x, which is dead.
func (q *Queue) GiveUp(x Entry) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.current == x {
		q.cancel()
	}
}

// Close ends the queue: what has not been sent is told van.ErrClosed. When it returns
// nothing is sent any more.
func (q *Queue) Close() {
	q.mu.Lock()
	q.closing.Store(true)
	ended := q.ended
	if q.cancel != nil {
		q.cancel()
	}
	q.mu.Unlock()
	wake.Put(q.wake)
	if ended != nil {
		<-ended
	}
	q.mu.Lock()
	events := q.events
	q.events = nil
	q.mu.Unlock()
	for _, e := range events {
		_ = e.Close()
	}
}
