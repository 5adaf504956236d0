package engine

import (
	"context"
	"sync/atomic"
)

// Deliverer identifies the goroutine of a delivery. A call within the delivery that waits for
// the end of deliveries, as Stop does, must not wait for its own. It gets a context made by
// Within.
type Deliverer struct {
	stopping bool          // it waits in Stop; Loop.mu guards it
	engine   *Engine       // of a Poll; nil for the goroutine of a loop
	ended    atomic.Uint64 // number of ended deliveries of Polls
}

// InPoll reports whether d delivers on the goroutine of a Poll. That delivery must not block. nil is no delivery.
func (d *Deliverer) InPoll() bool { return d != nil && d.engine != nil }

type delivererKey struct{}

// delivery is one delivery. An engine's Polls share a Deliverer, although different goroutines poll.
type delivery struct {
	by    *Deliverer
	ended uint64 // the deliveries of by before this one
}

// Within returns ctx for calls within a delivery by d; nil is no delivery. The context must not be
// used after the delivery has ended.
func Within(ctx context.Context, d *Deliverer) context.Context {
	if d == nil {
		return ctx
	}
	return context.WithValue(ctx, delivererKey{}, delivery{d, d.ended.Load()})
}

// delivererOf returns the Deliverer for which Within made ctx, or nil.
func delivererOf(ctx context.Context) *Deliverer {
	if d, ok := ctx.Value(delivererKey{}).(delivery); ok && d.by.ended.Load() == d.ended {
		return d.by
	}
	return nil
}
