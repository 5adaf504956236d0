package session

// What the controller does in a session: calls of functions, copies of values, and the end.

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/stepaf/stepaf-go/van"
)

// Call has all ranks run the function that is registered under name. It returns when the
// call is sent, and waits before that only if more than 1000 calls or 64 MiB are under way. The
// handle's Wait, or Sync, has the call's error.
func (s *Session) Call(ctx context.Context, name string, args ...any) (*Handle, error) {
	values := args
	for i, v := range args {
		h, is := v.(*Handle)
		if id, number := v.(HandleID); number {
			h, is = &Handle{s: s, id: uint64(id)}, true
		}
		if !is {
			continue
		}
		if err := s.owns(h); err != nil {
			return nil, wrong(s.node, "call", fmt.Errorf("%q: argument %d: %w", name, i, err))
		}
		if &values[0] == &args[0] {
			values = slices.Clone(args)
		}
		values[i] = HandleID(h.id)
	}
	return s.result(ctx, wantCall, everyRank, name, values)
}

// result makes a call that has one, under a new handle.
func (s *Session) result(ctx context.Context, want int32, rank int, name string, values []any) (*Handle, error) {
	c, err := s.send(ctx, want, rank, func(seq uint64) request {
		return request{handle: seq + 1, text: name, values: values} // call numbers are used once, and so are handles
	})
	if err != nil {
		return nil, err
	}
	s.handles.add(c.handle)
	return &Handle{s: s, id: c.handle, made: c}, nil
}

// ask makes a call and waits for its end.
func (s *Session) ask(ctx context.Context, want int32, rank int, q request) (got answer, err error) {
	c, err := s.send(ctx, want, rank, func(uint64) request { return q })
	if err != nil {
		return answer{}, err
	}
	if err = c.wait(ctx); err != nil {
		return answer{}, err
	}
	return c.got, nil
}

// CopyTo keeps a value on rank 0. On others the handle has none until Set gives them one.
func (s *Session) CopyTo(ctx context.Context, value any) (*Handle, error) {
	return s.result(ctx, wantSet, 0, "", []any{value})
}

// CopyFrom returns what rank 0 has under h, after all calls before. Bytes and arrays are the
// caller's own.
func (s *Session) CopyFrom(ctx context.Context, h *Handle) (any, error) { return s.Get(ctx, h, 0) }

// Broadcast keeps on all ranks, under a new handle, what rank 0 has under h. The value goes
// through the controller, which waits for it.
func (s *Session) Broadcast(ctx context.Context, h *Handle) (*Handle, error) {
	v, err := s.CopyFrom(ctx, h)
	if err != nil {
		return nil, err
	}
	return s.result(ctx, wantSet, everyRank, "", []any{v})
}

// Get returns what one rank has under h, after all calls before.
func (s *Session) Get(ctx context.Context, h *Handle, rank int) (any, error) {
	if err := s.names(h, rank); err != nil {
		return nil, wrong(s.node, "get", err)
	}
	got, err := s.ask(ctx, wantGet, rank, request{handle: h.id})
	return got.value, err
}

// Set replaces what one rank has under h.
func (s *Session) Set(ctx context.Context, h *Handle, rank int, value any) error {
	if err := s.names(h, rank); err != nil {
		return wrong(s.node, "set", err)
	}
	_, err := s.ask(ctx, wantSet, rank, request{handle: h.id, values: []any{value}})
	return err
}

func (s *Session) names(h *Handle, rank int) error {
	if rank < 0 || rank >= s.Ranks() {
		return fmt.Errorf("%w: rank %d, want 0 to %d", van.ErrInvalid, rank, s.Ranks()-1)
	}
	return s.owns(h)
}

// Handles lists the handles under which a rank has a value, after all calls before.
func (s *Session) Handles(ctx context.Context, rank int) ([]uint64, error) {
	if rank < 0 || rank >= s.Ranks() {
		return nil, wrong(s.node, "handles", fmt.Errorf("%w: rank %d, want 0 to %d", van.ErrInvalid, rank, s.Ranks()-1))
	}
	got, err := s.ask(ctx, wantList, rank, request{})
	return got.handles, err
}

// Kill gives handles up: the ranks drop what they have under them before the next call. One
// that was killed before does nothing.
func (s *Session) Kill(handles ...*Handle) {
	l := &s.handles
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, h := range handles {
		if h != nil && h.s == s && l.live[h.id] {
			delete(l.live, h.id)
			l.kills = append(l.kills, h.id)
		}
	}
}

// Sync waits until all calls made before have ended, and handles that were killed are
// dropped. Its error joins those of calls that nobody has waited for.
func (s *Session) Sync(ctx context.Context) error {
	for len(s.handles.killed()) > 0 {
		if _, err := s.send(ctx, wantNothing, everyRank, func(uint64) request { return request{} }); err != nil {
			return err
		}
	}
	return s.calls.sync(ctx)
}

// Shutdown has all calls ended, and then Serve on all ranks, and closes the session. Errors
// of calls that nobody has waited for are among its own.
func (s *Session) Shutdown(ctx context.Context) error {
	err := s.Sync(ctx)
	if s.Err() == nil {
		_, e := s.ask(ctx, wantStop, everyRank, request{})
		if e == nil {
			_ = s.calls.tellAtEnd(0) // their Serve has ended
		}
		err = errors.Join(err, e)
	}
	s.Close()
	return err
}
