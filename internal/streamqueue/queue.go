// Package streamqueue sends entries, in order, after the work of a device that they wait for.
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

// Queue sends entries in order. Each may wait for work of a device. The queue's goroutine starts with the first entry.
type Queue struct {
	back  backend.Backend
	idler backend.StreamIdler // nil if the backend cannot tell
	spin  time.Duration       // how long the queue polls for the next entry before it sleeps

	waiting atomic.Int64 // number of entries that are not sent yet
	closing atomic.Bool

	mu      sync.Mutex
	entries fifo.Queue[entry]
	events  []backend.Event // not in use
	current Entry           // the queue waits for its event
	ctx     context.Context // of that wait
	cancel  context.CancelFunc
	wake    chan struct{}
	ended   chan struct{} // nil before the first entry
}

// entry is an Entry, and the event that it waits for, or nil.
type entry struct {
	what  Entry
	event backend.Event
}

// Entry is what a Queue sends.
type Entry interface {
	// Canceled reports whether the entry was canceled.
	Canceled() bool
	// SendNow sends the entry. If err is not nil, the queue could not wait for the device's work, and SendNow sends
	// nothing.
	SendNow(err error)
}

// New creates a queue for work on b. p sets how long it polls for the next entry before it sleeps.
func New(b backend.Backend, p env.BusyPoll) *Queue {
	q := &Queue{back: b, spin: p.Spin(), wake: make(chan struct{}, 1)}
	q.idler, _ = b.(backend.StreamIdler)
	return q
}

// Busy reports whether there are entries that are not sent yet.
func (q *Queue) Busy() bool { return q.waiting.Load() > 0 }

// Complete is the absence of a stream: there is no work to wait for.
const Complete = ^uintptr(0)

// RecordEvent returns an event at the present end of stream. It returns nil for Complete and for an idle stream.
func (q *Queue) RecordEvent(stream uintptr) (backend.Event, error) {
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

// Event returns an unused event, which the caller returns with ReturnEvent.
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

// keepEvents bounds the number of unused events.
const keepEvents = 256

// ReturnEvent returns an event of RecordEvent, which may be nil, for reuse.
func (q *Queue) ReturnEvent(e backend.Event) {
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
		_ = e.Close() // an event that cannot be freed now is freed with the backend
	}
}

// Add sends x after all earlier entries, when e, which may be nil, is done. It takes ownership of e. It reports whether
// the queue is open.
func (q *Queue) Add(x Entry, e backend.Event) bool {
	q.mu.Lock()
	if q.closing.Load() {
		q.mu.Unlock()
		q.ReturnEvent(e)
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

// next waits for the next entry. It polls before it sleeps.
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
		for !q.Busy() && !q.closing.Load() && (q.spin < 0 || clock.Since(begun) < q.spin) {
			runtime.Gosched()
		}
		if !q.Busy() && !q.closing.Load() {
			<-q.wake
			begun = 0
		}
	}
}

// wait waits for the event of e, unless the entry is canceled.
func (q *Queue) wait(e entry) error {
	if q.closing.Load() {
		q.ReturnEvent(e.event)
		return van.ErrClosed
	}
	if e.event == nil {
		return nil
	}
	q.mu.Lock()
	if q.ctx.Err() != nil && !q.closing.Load() { // a canceled entry ended the wait
		q.ctx, q.cancel = context.WithCancel(context.Background())
	}
	q.current = e.what
	ctx := q.ctx
	q.mu.Unlock()
	var err error
	if !e.what.Canceled() { // after this check, Cancel ends the wait
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
		_ = e.event.Close() // the event cannot be reused; err is the cause
		return fmt.Errorf("wait for the work that makes the tensors: %w", err)
	}
	q.ReturnEvent(e.event)
	return err
}

// Cancel ends the wait for the event of x, which is canceled.
func (q *Queue) Cancel(x Entry) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.current == x {
		q.cancel()
	}
}

// Close ends the queue. Entries that are not sent get van.ErrClosed. After Close nothing is sent.
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
