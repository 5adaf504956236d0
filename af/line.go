package af

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
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/env"
)

// line sends in order what has to wait for a device. Its goroutine begins with the
// first turn.
type line struct {
	back  backend.Backend
	idler backend.StreamIdler // nil if the backend cannot tell
	spin  time.Duration       // how long it looks for the next turn before it sleeps

	waiting atomic.Int64 // turns that are not over
	closing atomic.Bool

	mu      sync.Mutex
	turns   fifo.Queue[turn]
	events  []backend.Event // not in use
	current job             // whose event is awaited
	ctx     context.Context // of that wait
	cancel  context.CancelFunc
	wake    chan struct{}
	ended   chan struct{} // nil before the first turn
}

// turn is a job and the event that it waits for, nil for none.
type turn struct {
	job   job
	event backend.Event
}

// job is what is sent in its turn.
type job interface {
	// dead tells that nobody wants it sent any more.
	dead() bool
	// send sends it. With an error, which says why the device's work is not waited for,
	// it sends nothing.
	send(err error)
}

func newLine(b backend.Backend, p env.BusyPoll) *line {
	l := &line{back: b, spin: p.Spin(), wake: make(chan struct{}, 1)}
	l.idler, _ = b.(backend.StreamIdler)
	return l
}

// busy tells whether something is to be sent before what comes now.
func (l *line) busy() bool { return l.waiting.Load() > 0 }

// mark returns an event at the present end of stream, nil for Complete and for a
// stream that has come to its end.
func (l *line) mark(s Stream) (backend.Event, error) {
	if s == Complete {
		return nil, nil
	}
	if l.idler != nil {
		if idle, err := l.idler.Idle(uintptr(s)); idle || err != nil {
			return nil, err
		}
	}
	var e backend.Event
	l.mu.Lock()
	if n := len(l.events); n > 0 {
		e, l.events = l.events[n-1], l.events[:n-1]
	}
	l.mu.Unlock()
	if e == nil {
		var err error
		if e, err = l.back.NewEvent(); err != nil {
			return nil, err
		}
	}
	if err := e.Record(uintptr(s)); err != nil {
		return nil, errors.Join(err, e.Close())
	}
	return e, nil
}

// keepEvents bounds the events that are kept for use again.
const keepEvents = 256

// unmark gives back an event of mark, which may be nil.
func (l *line) unmark(e backend.Event) {
	if e == nil {
		return
	}
	l.mu.Lock()
	keep := !l.closing.Load() && len(l.events) < keepEvents
	if keep {
		l.events = append(l.events, e)
	}
	l.mu.Unlock()
	if !keep {
		_ = e.Close() // one that its backend cannot free is freed with it
	}
}

// add sends j when all before it is sent and e, which may be nil, is done. It takes e
// over. It tells whether the line is open.
func (l *line) add(j job, e backend.Event) bool {
	l.mu.Lock()
	if l.closing.Load() {
		l.mu.Unlock()
		l.unmark(e)
		return false
	}
	if l.ended == nil {
		l.ended = make(chan struct{})
		l.ctx, l.cancel = context.WithCancel(context.Background())
		go l.run()
	}
	l.turns.Put(turn{j, e})
	l.waiting.Add(1)
	l.mu.Unlock()
	l.ring()
	return true
}

func (l *line) ring() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

func (l *line) run() {
	defer close(l.ended)
	for {
		t, ok := l.next()
		if !ok {
			return
		}
		t.job.send(l.wait(t))
		l.waiting.Add(-1)
	}
}

// next waits for the next turn, at first without sleeping.
func (l *line) next() (turn, bool) {
	for begun := uint64(0); ; {
		l.mu.Lock()
		if l.turns.Len() > 0 {
			t := l.turns.Take()
			l.mu.Unlock()
			return t, true
		}
		l.mu.Unlock()
		if l.closing.Load() {
			return turn{}, false
		}
		if begun == 0 {
			begun = clock.Now()
		}
		for !l.busy() && !l.closing.Load() && (l.spin < 0 || clock.Now()-begun < uint64(l.spin)) {
			runtime.Gosched()
		}
		if !l.busy() && !l.closing.Load() {
			<-l.wake
			begun = 0
		}
	}
}

// wait waits for the event of t, unless its job is dead.
func (l *line) wait(t turn) error {
	if l.closing.Load() {
		l.unmark(t.event)
		return van.ErrClosed
	}
	if t.event == nil {
		return nil
	}
	l.mu.Lock()
	if l.ctx.Err() != nil && !l.closing.Load() { // of a job that was given up
		l.ctx, l.cancel = context.WithCancel(context.Background())
	}
	l.current = t.job
	ctx := l.ctx
	l.mu.Unlock()
	var err error
	if !t.job.dead() { // later, giveUp finds it
		err = t.event.Sync(ctx)
	}
	l.mu.Lock()
	l.current = nil
	l.mu.Unlock()
	switch {
	case err == nil:
	case l.closing.Load():
		err = van.ErrClosed
	case ctx.Err() == nil:
		_ = t.event.Close() // it is of no use, and the error says why
		return fmt.Errorf("wait for the work that makes the tensors: %w", err)
	}
	l.unmark(t.event)
	return err
}

// giveUp ends the wait for the event of j, which is dead.
func (l *line) giveUp(j job) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.current == j {
		l.cancel()
	}
}

// close ends the line: what has not been sent is told van.ErrClosed. When it returns
// nothing is sent any more.
func (l *line) close() {
	l.mu.Lock()
	l.closing.Store(true)
	ended := l.ended
	if l.cancel != nil {
		l.cancel()
	}
	l.mu.Unlock()
	l.ring()
	if ended != nil {
		<-ended
	}
	l.mu.Lock()
	events := l.events
	l.events = nil
	l.mu.Unlock()
	for _, e := range events {
		_ = e.Close()
	}
}

// onDevice tells whether one of the tensors lies on a device, and refuses those that
// lie on one that the node does not own. what names the list.
func onDevice(b backend.Backend, l []KeyTensor, what string) (device bool, err error) {
	for i := range l {
		m := &l[i].Val.mem
		if m.OnHost() {
			continue
		}
		device = true
		if err := backend.CheckDevice(b, *m); err != nil {
			return true, fmt.Errorf("%w: %s tensor %d (key %d): %w", van.ErrInvalid, what, i, l[i].Key, err)
		}
	}
	return device, nil
}
