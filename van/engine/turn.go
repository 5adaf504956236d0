package engine

import (
	"context"
	"sync/atomic"
)

// Deliverer stands for a goroutine that delivers. Each delivery is told whose turn it is: what
// it calls that waits for the end of deliveries, as Stop does, must not wait for itself,
// and is given a context made by Within.
type Deliverer struct {
	stopping bool          // it waits in Stop; Loop.mu guards it
	engine   *Engine       // of whose Polls it is; nil: a loop's
	ended    atomic.Uint64 // deliveries of Polls
}

type turnKey struct{}

// delivery is one in a turn: the turn of Polls is that of one goroutine after the other.
type delivery struct {
	turn  *Deliverer
	ended uint64 // in its turn, before it
}

// Within returns ctx for what a delivery calls in turn t; nil is no turn. It is of no use
// when the delivery has ended, and must not be used then.
func Within(ctx context.Context, t *Deliverer) context.Context {
	if t == nil {
		return ctx
	}
	return context.WithValue(ctx, turnKey{}, delivery{t, t.ended.Load()})
}

// turnOf returns whose turn ctx was made for, or nil.
func turnOf(ctx context.Context) *Deliverer {
	if d, ok := ctx.Value(turnKey{}).(delivery); ok && d.turn.ended.Load() == d.ended {
		return d.turn
	}
	return nil
}
