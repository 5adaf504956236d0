package core

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/kv/session"
	"github.com/stepaf/stepaf-go/tests/testcluster"
)

// TestSessionDrop: the result of a call whose caller was interrupted is undone, whether or not the call has ended. A
// session can be opened after one that has failed.
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
	p.session.Store(newSession(c.Workers[0]))
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
		for range 2 { // the second replaces a session that was undone
			open := &SessionCall{Op: SessionOpen}
			if !ended {
				p.SessionDrop(open)
			}
			if do(open); ended {
				p.SessionDrop(open)
			}
		}
		do(&SessionCall{Op: SessionOpen})
		run := &SessionCall{Op: SessionRun, Name: "f"}
		if !ended {
			p.SessionDrop(run)
		}
		if do(run); ended {
			p.SessionDrop(run)
		}
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

// TestSessionServes: another language runs the functions of a rank. It gets tasks one after the other, with their
// arguments. Its results are values, references that are later dropped, or errors. When it leaves, waiting calls end.
func TestSessionServes(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	names, err := session.Encode("f", "g")
	if err != nil {
		t.Fatal(err)
	}
	rank, control := newSession(c.Servers[0]), newSession(c.Workers[0])
	p := &Process{}
	p.session.Store(control)
	call := func(ctx context.Context, s *Session, c *SessionCall) error {
		switch c.Op {
		case SessionKill, SessionServe, SessionDone, SessionFail, SessionLeave:
			return s.sessions.callNow(c)
		}
		return s.sessions.callAndWait(ctx, c)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	do := func(s *Session, c SessionCall) SessionCall {
		t.Helper()
		if err := call(ctx, s, &c); err != nil {
			t.Fatalf("call %d: %v", c.Op, err)
		}
		return c
	}
	refused := func(s *Session, c SessionCall, text string) {
		t.Helper()
		if err := call(ctx, s, &c); err == nil || !strings.Contains(err.Error(), text) {
			t.Errorf("call %d: %v, want an error with %q", c.Op, err, text)
		}
	}
	encode := func(values ...any) []byte {
		t.Helper()
		b, err := session.Encode(values...)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	refused(control, SessionCall{Op: SessionRun, Name: "f"}, "no session is open")
	refused(rank, SessionCall{Op: SessionNext}, "does not serve")
	refused(rank, SessionCall{Op: SessionDone}, "no task to answer")
	refused(rank, SessionCall{Op: SessionServe, Data: encode("f", 3)}, "want a string")
	do(rank, SessionCall{Op: SessionLeave}) // does nothing, since the rank does not serve
	do(rank, SessionCall{Op: SessionServe, Data: names})
	refused(rank, SessionCall{Op: SessionServe, Data: names}, "serves already")
	refused(rank, SessionCall{Op: SessionDone}, "no task to answer")
	if n := do(control, SessionCall{Op: SessionOpen}).Rank; n != 1 {
		t.Errorf("%d ranks, want 1", n)
	}
	refused(control, SessionCall{Op: SessionOpen}, "a session is open already")
	refused(control, SessionCall{Op: SessionClose + 100}, "call")
	refused(control, SessionCall{Op: SessionCopyTo, Data: encode(1, 2)}, "2 values, want 1")
	refused(control, SessionCall{Op: SessionWait, Handle: 999}, "was killed")

	task := func(what SessionTask) SessionCall {
		t.Helper()
		e := do(rank, SessionCall{Op: SessionNext})
		if SessionTask(e.Rank) != what {
			t.Fatalf("task %d, want %d", e.Rank, what)
		}
		return e
	}
	f := do(control, SessionCall{Op: SessionRun, Name: "f", Data: encode(int64(5), "x")})
	e := task(SessionTaskRun)
	if args, err := session.Decode(e.Data); e.Name != "f" || err != nil || len(args) != 2 || args[0] != int64(5) || args[1] != "x" {
		t.Errorf("%s is to be run with %v, %v", e.Name, args, err)
	}
	do(rank, SessionCall{Op: SessionDone, Handle: 71})
	refused(rank, SessionCall{Op: SessionDone, Handle: 71}, "no task to answer")
	do(control, SessionCall{Op: SessionWait, Handle: f.Handle})

	for _, answer := range [][]byte{encode("value"), encode(), encode(1, 2)} { // want exactly one value
		got := SessionCall{Op: SessionGet, Handle: f.Handle}
		ended := make(chan error, 1)
		go func() { ended <- call(ctx, control, &got) }()
		if e := task(SessionTaskValue); e.Handle != 71 {
			t.Errorf("the value of %d is wanted, want that of 71", e.Handle)
		}
		do(rank, SessionCall{Op: SessionDone, Data: answer})
		err := <-ended
		values, _ := session.Decode(answer)
		if (err == nil) != (len(values) == 1) {
			t.Errorf("%d values: %v", len(values), err)
		} else if l, err2 := session.Decode(got.Data); err == nil && (err2 != nil || len(l) != 1 || l[0] != "value") {
			t.Errorf("got %v, %v", l, err2)
		}
	}

	g := do(control, SessionCall{Op: SessionRun, Name: "g"})
	task(SessionTaskRun)
	do(rank, SessionCall{Op: SessionFail, Name: "as it must"})
	refused(control, SessionCall{Op: SessionWait, Handle: g.Handle}, "as it must")

	do(control, SessionCall{Op: SessionKill, Handle: f.Handle})
	refused(control, SessionCall{Op: SessionWait, Handle: f.Handle}, "was killed")
	ended := make(chan error, 1)
	go func() { ended <- call(ctx, control, &SessionCall{Op: SessionSync}) }() // flushes the drop to the rank
	if e := task(SessionTaskDrop); e.Handle != 71 {
		t.Errorf("%d is dropped, want 71", e.Handle)
	}
	do(rank, SessionCall{Op: SessionDone})
	if err := <-ended; err != nil {
		t.Error(err)
	}

	over, end := context.WithCancel(ctx)
	end()
	if err := call(over, rank, &SessionCall{Op: SessionNext}); !errors.Is(err, context.Canceled) {
		t.Errorf("no task: %v", err)
	}
	last := do(control, SessionCall{Op: SessionRun, Name: "f"})
	task(SessionTaskRun) // without an answer
	do(rank, SessionCall{Op: SessionLeave, Name: "has to go"})
	refused(control, SessionCall{Op: SessionWait, Handle: last.Handle}, "has to go")
	refused(rank, SessionCall{Op: SessionNext}, "does not serve")
	do(control, SessionCall{Op: SessionClose})
}
