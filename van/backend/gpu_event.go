package backend

// Events of a GPU, by words that streams write or by the driver.

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
)

// events makes events of both kinds.
type events struct {
	c       *gpuContext
	streams *streamPool
	flags   *flagPool
	waiter  *waiter

	driverEvents atomic.Bool

	mu    sync.Mutex
	made  map[uintptr]struct{} // of the driver
	spare []uintptr            // of these, events that Follow can use
}

// Configure sets the kind of new events, and how long waits spin.
func (s *events) Configure(o Options) {
	s.driverEvents.Store(o.DriverEvents)
	s.waiter.spin.Store(int64(o.Spin))
}

// NewEvent makes an event of the kind that Configure chose.
func (s *events) NewEvent() (Event, error) {
	if s.c.info.StreamFlags && !s.driverEvents.Load() {
		s.c.life.RLock()
		defer s.c.life.RUnlock()
		if s.c.life.closed {
			return nil, s.c.invalid("NewEvent: %w", ErrClosed)
		}
		return &flagEvent{gpuEvent: gpuEvent{of: s}}, nil
	}
	e := &driverEvent{gpuEvent: gpuEvent{of: s}}
	err := s.c.with("NewEvent", func() (err error) {
		e.ev, err = s.create()
		return err
	})
	if err != nil {
		return nil, err
	}
	return e, nil
}

// create makes an event of the driver. The context is current.
func (s *events) create() (uintptr, error) {
	ev, err := s.streams.d.eventCreate()
	if err == nil {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.made[ev] = struct{}{}
	}
	return ev, err
}

// Follow makes stream wait for the work that is queued on other.
func (s *events) Follow(stream, other uintptr) error {
	return s.c.with("Follow", func() error {
		ev, err := s.take()
		if err != nil {
			return err
		}
		if err = s.streams.d.eventRecord(ev, other); err == nil {
			err = s.streams.d.streamWait(stream, ev)
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		s.spare = append(s.spare, ev) // later records do not change this wait
		return err
	})
}

// take returns an event for Follow. The context is current.
func (s *events) take() (uintptr, error) {
	s.mu.Lock()
	if n := len(s.spare) - 1; n >= 0 {
		defer s.mu.Unlock()
		ev := s.spare[n]
		s.spare = s.spare[:n]
		return ev, nil
	}
	s.mu.Unlock()
	return s.create()
}

// gpuEvent is what events of both kinds have.
type gpuEvent struct {
	of     *events
	mu     sync.Mutex // guards closed, and the further fields of each kind
	closed bool
}

var errEventClosed = fmt.Errorf("event closed: %w", ErrClosed)

// use runs f, which calls the driver, unless the event is closed. f has mu.
func (e *gpuEvent) use(op string, f func() error) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.of.c.with(op, func() error {
		if e.closed {
			return e.of.c.invalid("%w", errEventClosed)
		}
		return f()
	})
}

// recordable refuses a stream that is being captured: a record there would happen when the graph runs, perhaps never.
func (e *gpuEvent) recordable(d streamDriver, stream uintptr) error {
	capturing, err := d.streamCapturing(stream)
	if capturing {
		return e.of.c.invalid("Record on stream %#x: %w: it is being captured into a graph; record on it before or after", stream, ErrUnsupported)
	}
	return err
}

// flagEvent is an event whose completion is a word in host memory. Query is one load.
type flagEvent struct {
	gpuEvent
	f       *flag // nil before the first Record
	pending bool
}

func (e *flagEvent) Record(stream uintptr) error {
	return e.use("Record", func() error {
		if err := e.recordable(e.of.streams.d, stream); err != nil {
			return err
		}
		if e.f != nil && e.pending && !e.f.arrived() {
			e.of.flags.put(e.f)
			e.f = nil
		}
		e.pending = false
		if e.f == nil {
			f, err := e.of.flags.take()
			if err != nil {
				return err
			}
			e.f = f
		}
		e.f.seq++
		if err := e.of.streams.d.writeValue32(stream, e.f.addr, e.f.seq); err != nil {
			e.f.seq--
			return err
		}
		e.pending = true
		return nil
	})
}

// copied queues a copy on stream and is recorded after it, in one call of C. It reports whether it did so: it does
// not on a stream that is being captured, nor without a free word.
func (e *flagEvent) copied(dst, src uintptr, n int, stream uintptr) (done bool, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return false, nil
	}
	err = e.of.c.live(func() error { // Close frees the word
		if e.f == nil || e.pending && !e.f.arrived() {
			return nil
		}
		e.pending = false
		w := wordWrites{n: 1}
		w.addrs[0], w.values[0] = e.f.addr, e.f.seq+1
		captured, err := e.of.streams.once.copyIn(e.of.c.ctx, dst, src, n, stream, w)
		done = !captured && err == nil
		if done || queuedAll(err) {
			e.f.seq++
			e.pending = true
		}
		return err
	})
	return done, err
}

// queuedAll reports whether err means only that the context could not be left.
func queuedAll(err error) bool {
	e, is := err.(*driverError)
	return is && e.call == callLeave
}

func (e *flagEvent) Query() (bool, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return false, e.of.c.invalid("Query: %w", errEventClosed)
	}
	if !e.pending {
		return true, nil
	}
	e.of.c.life.RLock() // Close frees the word
	defer e.of.c.life.RUnlock()
	if e.of.c.life.closed {
		return false, e.of.c.invalid("Query: %w", ErrClosed)
	}
	e.pending = !e.f.arrived()
	return !e.pending, nil
}

func (e *flagEvent) Sync(ctx context.Context) error { return e.of.waiter.wait(ctx, e) }

func (e *flagEvent) check() error { return e.of.streams.Health() }

func (e *flagEvent) Close() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return nil
	}
	e.closed = true
	e.of.c.life.RLock()
	defer e.of.c.life.RUnlock()
	if e.f != nil && !e.of.c.life.closed {
		e.of.flags.put(e.f)
		e.f = nil
	}
	return nil
}

// driverEvent is an event of the driver.
type driverEvent struct {
	gpuEvent
	ev uintptr
}

func (e *driverEvent) Record(stream uintptr) error {
	return e.use("Record", func() error {
		if err := e.recordable(e.of.streams.d, stream); err != nil {
			return err
		}
		return e.of.streams.d.eventRecord(e.ev, stream)
	})
}

func (e *driverEvent) Query() (done bool, err error) {
	err = e.use("Query", func() error {
		err := e.of.streams.d.eventQuery(e.ev)
		if notReady(err) {
			return nil
		}
		done = err == nil
		return err
	})
	return done, err
}

func (e *driverEvent) Sync(ctx context.Context) error { return e.of.waiter.wait(ctx, e) }

func (e *driverEvent) check() error { return nil } // Query asks the driver

func (e *driverEvent) Close() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return nil
	}
	e.closed = true
	err := e.of.c.with("Close of an event", func() error {
		e.of.mu.Lock()
		delete(e.of.made, e.ev)
		e.of.mu.Unlock()
		return e.of.streams.d.eventDestroy(e.ev)
	})
	if errors.Is(err, ErrClosed) {
		return nil // the backend's Close has freed it
	}
	return err
}

// close frees the driver's. The context is current.
func (s *events) close(note func(op string, err error)) {
	for e := range s.made {
		note("Close: free an event", s.streams.d.eventDestroy(e))
	}
	s.made, s.spare = nil, nil
}
