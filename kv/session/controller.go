package session

// Methods of the controller: calls of functions, copies of values, and the end of the session.

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/stepaf/stepaf-go/van"
)

// Call makes all ranks run the function that is registered under name. It returns when the call is sent. It waits
// before sending only if more than 1000 calls or 64 MiB are in flight. The error of the call is returned by the
// handle's Wait, or by Sync.
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

// result makes a call with a result, under a new handle.
func (s *Session) result(ctx context.Context, want int32, rank int, name string, values []any) (*Handle, error) {
	c, err := s.send(ctx, want, rank, func(seq uint64) request {
		return request{handle: seq + 1, text: name, values: values} // call numbers are used once, therefore handles, too
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

// CopyTo stores a value on rank 0, under a new handle. On other ranks the handle has no value until Set.
func (s *Session) CopyTo(ctx context.Context, value any) (*Handle, error) {
	return s.result(ctx, wantSet, 0, "", []any{value})
}

// CopyFrom returns the value of h on rank 0, after all earlier calls. Bytes and arrays belong to the caller.
func (s *Session) CopyFrom(ctx context.Context, h *Handle) (any, error) { return s.Get(ctx, h, 0) }

// Broadcast copies the value of h on rank 0 to all ranks, under a new handle. The value passes through the
// controller, which waits for it.
func (s *Session) Broadcast(ctx context.Context, h *Handle) (*Handle, error) {
	v, err := s.CopyFrom(ctx, h)
	if err != nil {
		return nil, err
	}
	return s.result(ctx, wantSet, everyRank, "", []any{v})
}

// Get returns the value of h on one rank, after all earlier calls.
func (s *Session) Get(ctx context.Context, h *Handle, rank int) (any, error) {
	if err := s.names(h, rank); err != nil {
		return nil, wrong(s.node, "get", err)
	}
	got, err := s.ask(ctx, wantGet, rank, request{handle: h.id})
	return got.value, err
}

// Set replaces the value of h on one rank.
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

// Handles lists the handles with a value on a rank, after all earlier calls.
func (s *Session) Handles(ctx context.Context, rank int) ([]uint64, error) {
	if rank < 0 || rank >= s.Ranks() {
		return nil, wrong(s.node, "handles", fmt.Errorf("%w: rank %d, want 0 to %d", van.ErrInvalid, rank, s.Ranks()-1))
	}
	got, err := s.ask(ctx, wantList, rank, request{})
	return got.handles, err
}

// Kill releases handles: the ranks drop their values before the next call. Killing a handle again has no effect.
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

// Sync waits until all earlier calls have ended and killed handles are dropped. Its error joins those of calls that
// were not waited for.
func (s *Session) Sync(ctx context.Context) error {
	for len(s.handles.killed()) > 0 {
		if _, err := s.send(ctx, wantNothing, everyRank, func(uint64) request { return request{} }); err != nil {
			return err
		}
	}
	return s.calls.sync(ctx)
}

// Shutdown waits until all calls have ended, ends Serve on all ranks, and closes the session. Its error joins those
// of calls that were not waited for.
func (s *Session) Shutdown(ctx context.Context) error {
	err := s.Sync(ctx)
	if s.Err() == nil {
		_, e := s.ask(ctx, wantStop, everyRank, request{})
		if e == nil {
			_ = s.calls.tellAtEnd(0) // Serve has ended on the ranks
		}
		err = errors.Join(err, e)
	}
	s.Close()
	return err
}
