package core

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/internal/testcluster"
	"github.com/stepaf/stepaf-go/kv/session"
)

// TestSessionDrop: what a call has made whose caller was interrupted is taken back, whether the call has
// ended by then or not; and a session can be opened after one that has failed.
func TestSessionDrop(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	r, err := session.NewRank(c.Servers[0], session.Options{})
	if err == nil {
		err = r.Register("f", func(context.Context, []any) (any, error) { return nil, nil })
	}
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	serving, leave := context.WithCancelCause(ctx)
	served := make(chan struct{})
	go func() {
		defer close(served)
		for serving.Err() == nil {
			_ = r.Serve(serving)
		}
		for ctx.Err() == nil {
			_ = r.Serve(ctx)
		}
	}()
	p := &Process{}
	p.session.Store(&Session{node: c.Workers[0]})
	do := func(call *SessionCall) []any {
		t.Helper()
		_, err := p.SessionCall(20*time.Second, call)
		if err = p.waited(err); err != nil {
			t.Fatal(err)
		}
		values, err := session.Decode(call.Data)
		if err != nil && call.Data != nil {
			t.Fatal(err)
		}
		return values
	}
	for _, ended := range []bool{true, false} {
		for range 2 { // the second opens in the place of one that was taken back
			open := &SessionCall{Op: SessionOpen}
			if !ended {
				p.SessionDrop(open)
			}
			do(open)
			p.SessionDrop(open)
		}
		do(&SessionCall{Op: SessionOpen})
		run := &SessionCall{Op: SessionRun, Name: "f"}
		if !ended {
			p.SessionDrop(run)
		}
		do(run)
		p.SessionDrop(run)
		if l := do(&SessionCall{Op: SessionHandles}); len(l) != 0 {
			t.Errorf("the rank has %v, want nothing", l)
		}
		own := &p.session.Load().sessions
		own.mu.Lock()
		if n := len(own.handles); n != 0 {
			t.Errorf("the controller remembers %d handles that were given up", n)
		}
		own.mu.Unlock()
		do(&SessionCall{Op: SessionShutdown})
	}
	do(&SessionCall{Op: SessionOpen})
	leave(errors.New("as it must"))
	<-p.session.Load().sessions.s.Failed()
	do(&SessionCall{Op: SessionOpen})
	do(&SessionCall{Op: SessionClose})
	stop()
	<-served
}
