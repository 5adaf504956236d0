package backend

// Events of the GPU backend, by words that streams write or by the driver, and the
// wait that they share with copies.

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
)

// The back-off of a wait that has stopped spinning, and how often it checks that the
// device works: a failed device never writes the flag.
const (
	minPause    = 20 * time.Microsecond
	maxPause    = 200 * time.Microsecond
	healthCheck = 10 * time.Millisecond
)

// NewEvent makes an event of the kind that Configure chose.
func (g *gpu) NewEvent() (Event, error) {
	if g.info.StreamFlags && !g.driverEvents.Load() {
		g.life.RLock()
		defer g.life.RUnlock()
		if g.closed {
			return nil, g.invalid("NewEvent: %w", ErrClosed)
		}
		return &flagEvent{g: g}, nil
	}
	e := &driverEvent{g: g}
	err := g.with("NewEvent", func() (err error) {
		if e.ev, err = g.d.eventCreate(); err != nil {
			return err
		}
		g.mu.Lock()
		defer g.mu.Unlock()
		g.events[e.ev] = struct{}{}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return e, nil
}

// flagEvent is an event whose completion is a word in host memory. Query is one load.
type flagEvent struct {
	g       *gpu
	mu      sync.Mutex
	f       *flag // nil before the first Record
	pending bool
	closed  bool
}

func (e *flagEvent) Record(stream uintptr) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.g.with("Record", func() error {
		if e.closed {
			return e.g.invalid("%w", errEventClosed)
		}
		// A captured write happens when the graph runs, perhaps never.
		if capturing, err := e.g.d.streamCapturing(stream); err != nil {
			return err
		} else if capturing {
			return e.g.invalid("Record on stream %#x: %w: it is being captured into a graph; record on it before or after", stream, ErrUnsupported)
		}
		if e.f != nil && e.pending && !e.f.arrived() {
			e.g.putFlag(e.f)
			e.f = nil
		}
		e.pending = false
		if e.f == nil {
			f, err := e.g.takeFlag()
			if err != nil {
				return err
			}
			e.f = f
		}
		e.f.seq++
		if err := e.g.d.writeValue32(stream, e.f.addr, e.f.seq); err != nil {
			e.f.seq--
			return err
		}
		e.pending = true
		return nil
	})
}

func (e *flagEvent) Query() (bool, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return false, e.g.invalid("Query: %w", errEventClosed)
	}
	if !e.pending {
		return true, nil
	}
	e.g.life.RLock() // Close frees the word
	defer e.g.life.RUnlock()
	if e.g.closed {
		return false, e.g.invalid("Query: %w", ErrClosed)
	}
	e.pending = !e.f.arrived()
	return !e.pending, nil
}

func (e *flagEvent) Sync(ctx context.Context) error { return e.g.wait(ctx, e) }

func (e *flagEvent) check() error { return e.g.Health() }

func (e *flagEvent) Close() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return nil
	}
	e.closed = true
	e.g.life.RLock()
	defer e.g.life.RUnlock()
	if e.f != nil && !e.g.closed {
		e.g.putFlag(e.f)
		e.f = nil
	}
	return nil
}

// driverEvent is an event of the driver.
type driverEvent struct {
	g      *gpu
	mu     sync.Mutex
	ev     uintptr
	closed bool
}

var errEventClosed = fmt.Errorf("event closed: %w", ErrClosed)

func (e *driverEvent) Record(stream uintptr) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.g.with("Record", func() error {
		if e.closed {
			return e.g.invalid("%w", errEventClosed)
		}
		return e.g.d.eventRecord(e.ev, stream)
	})
}

func (e *driverEvent) Query() (done bool, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	err = e.g.with("Query", func() error {
		if e.closed {
			return e.g.invalid("%w", errEventClosed)
		}
		err := e.g.d.eventQuery(e.ev)
		if notReady(err) {
			return nil
		}
		done = err == nil
		return err
	})
	return done, err
}

func (e *driverEvent) Sync(ctx context.Context) error { return e.g.wait(ctx, e) }

func (e *driverEvent) check() error { return nil } // Query asks the driver

func (e *driverEvent) Close() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return nil
	}
	e.closed = true
	err := e.g.with("Close of an event", func() error {
		e.g.mu.Lock()
		delete(e.g.events, e.ev)
		e.g.mu.Unlock()
		return e.g.d.eventDestroy(e.ev)
	})
	if errors.Is(err, ErrClosed) {
		return nil // the backend's Close has freed it
	}
	return err
}

// WaitEvent makes stream wait for e.
func (g *gpu) WaitEvent(stream uintptr, e Event) error {
	switch e := e.(type) {
	case *flagEvent:
		if e.g != g {
			break
		}
		e.mu.Lock()
		defer e.mu.Unlock()
		return g.with("WaitEvent", func() error {
			if e.closed {
				return e.g.invalid("%w", errEventClosed)
			}
			if !e.pending || e.f.arrived() {
				return nil
			}
			return g.d.waitValue32(stream, e.f.addr, e.f.seq)
		})
	case *driverEvent:
		if e.g != g {
			break
		}
		e.mu.Lock()
		defer e.mu.Unlock()
		return g.with("WaitEvent", func() error {
			if e.closed {
				return e.g.invalid("%w", errEventClosed)
			}
			return g.d.streamWaitEvent(stream, e.ev)
		})
	}
	return g.invalid("WaitEvent: %T is not an event of this backend: %w", e, ErrWrongDevice)
}

// waitable is what wait waits for.
type waitable interface {
	Query() (bool, error)
	check() error // an error means that Query will never be true
}

// wait spins on w for as long as the options say, then backs off.
func (g *gpu) wait(ctx context.Context, w waitable) error {
	spin := time.Duration(g.spin.Load())
	start := time.Now()
	for i := 1; ; i++ {
		if done, err := w.Query(); done || err != nil {
			return err
		}
		if i%8 != 0 && spin != 0 {
			continue
		}
		if err := ctx.Err(); err != nil {
			return g.invalid("wait for an event: not done after %s: %w", time.Since(start).Round(time.Microsecond), err)
		}
		if spin >= 0 && time.Since(start) >= spin {
			break
		}
		if i%4096 == 0 {
			if err := w.check(); err != nil {
				return err
			}
		}
		if g.oversubscribed {
			runtime.Gosched() // not always: it is slow for a goroutine that is locked to its thread
		}
	}
	checked := time.Now()
	for pause := minPause; ; pause = min(2*pause, maxPause) {
		clock.Sleep(pause)
		if done, err := w.Query(); done || err != nil {
			return err
		}
		now := time.Now()
		if err := ctx.Err(); err != nil {
			return g.invalid("wait for an event: not done after %s: %w", now.Sub(start).Round(time.Microsecond), err)
		}
		if now.Sub(checked) >= healthCheck {
			if err := w.check(); err != nil {
				return err
			}
			checked = now
		}
	}
}

// Health implements HealthChecker. Once a context has failed, every call returns its error.
func (g *gpu) Health() error {
	return g.with("check the device", func() error {
		s, err := g.takeStream()
		if err != nil {
			return err
		}
		err = g.d.streamQuery(s)
		g.putStream(s)
		if notReady(err) {
			return nil
		}
		return err
	})
}
