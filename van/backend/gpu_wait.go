package backend

// How the CPU waits for a GPU: for events, and for copies.

import (
	"context"
	"runtime"
	"sync/atomic"
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

// waiter has what a wait depends on.
type waiter struct {
	c              *gpuContext
	spin           atomic.Int64 // nanoseconds
	oversubscribed bool         // GOMAXPROCS is so small that a spinning wait must yield
}

// waitable is what wait waits for.
type waitable interface {
	Query() (bool, error)
	check() error // an error means that Query will never be true
}

// wait spins on e for as long as the options say, then backs off.
func (w *waiter) wait(ctx context.Context, e waitable) error {
	spin := time.Duration(w.spin.Load())
	start := time.Now()
	for i := 1; ; i++ {
		if done, err := e.Query(); done || err != nil {
			return err
		}
		if i%8 != 0 && spin != 0 {
			continue
		}
		if err := ctx.Err(); err != nil {
			return w.c.invalid("wait for an event: not done after %s: %w", time.Since(start).Round(time.Microsecond), err)
		}
		if spin >= 0 && time.Since(start) >= spin {
			break
		}
		if i%4096 == 0 {
			if err := e.check(); err != nil {
				return err
			}
		}
		if w.oversubscribed {
			runtime.Gosched() // not always: it is slow for a goroutine that is locked to its thread
		}
	}
	checked := time.Now()
	for pause := minPause; ; pause = min(2*pause, maxPause) {
		clock.Sleep(pause)
		if done, err := e.Query(); done || err != nil {
			return err
		}
		now := time.Now()
		if err := ctx.Err(); err != nil {
			return w.c.invalid("wait for an event: not done after %s: %w", now.Sub(start).Round(time.Microsecond), err)
		}
		if now.Sub(checked) >= healthCheck {
			if err := e.check(); err != nil {
				return err
			}
			checked = now
		}
	}
}
