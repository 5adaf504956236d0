package engine

import "context"

// Turn stands for a goroutine that delivers. Each delivery is told whose turn it is: what
// it calls that waits for the end of deliveries, as Stop does, must not wait for itself,
// and is given a context made by Within.
type Turn struct {
	stopping bool    // it waits in Stop; Loop.mu guards it
	engine   *Engine // of whose Polls it is; nil: a loop's
}

type turnKey struct{}

// Within returns ctx for what a delivery calls in turn t; nil is no turn. It is of no use
// when the delivery has ended, and must not be used then.
func Within(ctx context.Context, t *Turn) context.Context {
	if t == nil {
		return ctx
	}
	return context.WithValue(ctx, turnKey{}, t)
}

// turnOf returns whose turn ctx was made for, or nil.
func turnOf(ctx context.Context) *Turn {
	t, _ := ctx.Value(turnKey{}).(*Turn)
	return t
}

// EndPoll is Engine.EndPoll of the Engine whose Poll makes the delivery that ctx is of, if one
// does.
func EndPoll(ctx context.Context) {
	if t := turnOf(ctx); t != nil && t.engine != nil {
		t.engine.EndPoll(ctx)
	}
}
