package session

// One call under way, its handle, and the calls that there are.

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/stepaf/stepaf-go/van"
)

// call is one call under way.
type call struct {
	s      *Session
	seq    uint64
	want   int32
	rank   int // whose it is, or everyRank
	name   string
	handle uint64
	bytes  int
	left   atomic.Int32 // requests that are not answered
	once   sync.Once
	ended  chan struct{} // closed when err and got are there
	err    error
	got    answer // of rank
	more   uint64 // Session.syncs+1 when err became one of Session.more; guarded by s.mu

	mu   sync.Mutex
	from []bool // who has answered
	errs []error
}

func (s *Session) newCall(want int32, rank int, seq uint64) *call {
	return &call{s: s, seq: seq, want: want, rank: rank, ended: make(chan struct{}), from: make([]bool, len(s.ids)), errs: make([]error, len(s.ids))}
}

// answered notes the answer of a rank.
func (c *call) answered(rank int, a answer) {
	c.mu.Lock()
	c.from[rank] = true
	if a.outcome == failed {
		c.errs[rank] = &RankError{Rank: rank, Node: van.NodeName(c.s.ids[rank]), Call: c.String(), Text: a.text}
	}
	c.mu.Unlock()
	if rank == c.rank {
		c.got = a
		c.end(c.errs[rank])
	}
}

// requested is called when one of the call's requests is over.
func (c *call) requested(err error) {
	s := c.s
	if err != nil {
		s.fail(err)
		return
	}
	if c.left.Add(-1) > 0 {
		return
	}
	c.end(errors.Join(c.errs...)) // first: Sync sees the call, or its error
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.calls[c.seq] == c { // else the session has failed
		delete(s.calls, c.seq)
		s.bytes -= c.bytes
		close(s.freed)
		s.freed = make(chan struct{})
	}
}

// end ends the call, once. Errors of calls that nobody need wait for are kept for Sync.
func (c *call) end(err error) {
	c.once.Do(func() {
		s := c.s
		s.mu.Lock()
		c.err = err
		switch keep := c.want == wantCall || c.want == wantSet; {
		case err == nil || s.err != nil || !keep:
		case len(s.errs) < maxErrs:
			s.errs = append(s.errs, err)
		default:
			s.more++
			c.more = s.syncs + 1
		}
		s.mu.Unlock()
		close(c.ended)
	})
}

func (c *call) over() bool {
	select {
	case <-c.ended:
		return true
	default:
		return false
	}
}

// wait waits for the end of the call, whose error is the caller's. When ctx ends first, the
// call goes on.
func (c *call) wait(ctx context.Context) error {
	if err := c.await(ctx); err != nil {
		return err
	}
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	c.s.errs = slices.DeleteFunc(c.s.errs, func(err error) bool { return err == c.err })
	if c.more == c.s.syncs+1 {
		c.more = 0
		c.s.more--
	}
	return c.err
}

// await waits for the end of the call.
func (c *call) await(ctx context.Context) error {
	if !c.over() {
		c.s.node.Poll(c.over)
	}
	select {
	case <-c.ended:
	case <-ctx.Done():
		if !c.over() {
			return c.s.error("wait", fmt.Errorf("%s: no answer from %s: %w", c, c.owing(), cause(ctx)))
		}
	}
	return nil
}

// owing names the ranks that have not answered.
func (c *call) owing() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	var l []string
	for r, id := range c.s.ids {
		if !c.from[r] && (c.rank == everyRank || c.rank == r) {
			l = append(l, fmt.Sprintf("rank %d (%s)", r, c.s.node.PeerName(id)))
		}
	}
	return strings.Join(l, ", ")
}

func (c *call) String() string {
	switch c.want {
	case wantCall:
		return fmt.Sprintf("call %d, %q", c.seq, c.name)
	case wantSet, wantGet:
		return fmt.Sprintf("call %d, copy of handle %d", c.seq, c.handle)
	case wantOpen:
		return "open"
	case wantStop:
		return "shutdown"
	}
	return fmt.Sprintf("call %d", c.seq)
}

// RankError is the error of one rank in a call. The error of a call joins those of all ranks
// that have one; errors.As finds the first.
type RankError struct {
	Rank int
	Node string // of the rank
	Call string // which call
	Text string // what the rank says
}

// Error returns everything on one line.
func (e *RankError) Error() string {
	return fmt.Sprintf("session: %s: rank %d (%s): %s", e.Call, e.Rank, e.Node, e.Text)
}

// Handle names a result that is on the ranks.
type Handle struct {
	s    *Session
	id   uint64
	made *call
}

// ID is the number of the handle, from 1; none is used twice in a session.
func (h *Handle) ID() uint64 { return h.id }

// Wait waits until the call that h is the result of has ended on all ranks, and returns its
// error: a RankError, or several joined, or why the session has failed. If ctx ends first,
// the call goes on; the error names the ranks that have not answered.
func (h *Handle) Wait(ctx context.Context) error { return h.made.wait(ctx) }

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
			return nil, s.error("call", fmt.Errorf("%q: argument %d: %w", name, i, err))
		}
		if &values[0] == &args[0] {
			values = slices.Clone(args)
		}
		values[i] = HandleID(h.id)
	}
	return s.result(ctx, wantCall, everyRank, name, values)
}

// owns refuses handles that do not name anything in s.
func (s *Session) owns(h *Handle) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case h == nil || h.s == nil:
		return fmt.Errorf("%w: not a handle of a call", van.ErrInvalid)
	case h.s != s:
		return fmt.Errorf("%w: handle %d of another session", van.ErrInvalid, h.id)
	case !s.live[h.id]:
		return fmt.Errorf("%w: handle %d was killed", van.ErrInvalid, h.id)
	}
	return nil
}

// result makes a call that has one, under a new handle.
func (s *Session) result(ctx context.Context, want int32, rank int, name string, values []any) (*Handle, error) {
	h := &Handle{s: s}
	c, err := s.send(ctx, want, rank, func(int) *request {
		s.mu.Lock()
		h.id = s.next + 1 // call numbers are used once, and so are handles
		s.live[h.id] = true
		s.mu.Unlock()
		return &request{handle: h.id, text: name, values: values}
	})
	if err != nil {
		s.mu.Lock()
		delete(s.live, h.id)
		s.mu.Unlock()
		return nil, err
	}
	h.made = c
	return h, nil
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
		return nil, s.error("get", err)
	}
	c, err := s.send(ctx, wantGet, rank, func(int) *request { return &request{handle: h.id} })
	if err == nil {
		err = c.wait(ctx)
	}
	if err != nil {
		return nil, err
	}
	return c.got.value, nil
}

// Set replaces what one rank has under h.
func (s *Session) Set(ctx context.Context, h *Handle, rank int, value any) error {
	if err := s.names(h, rank); err != nil {
		return s.error("set", err)
	}
	c, err := s.send(ctx, wantSet, rank, func(int) *request { return &request{handle: h.id, values: []any{value}} })
	if err != nil {
		return err
	}
	return c.wait(ctx)
}

func (s *Session) names(h *Handle, rank int) error {
	if rank < 0 || rank >= len(s.ids) {
		return fmt.Errorf("%w: rank %d, want 0 to %d", van.ErrInvalid, rank, len(s.ids)-1)
	}
	return s.owns(h)
}

// Handles lists the handles under which a rank has a value, after all calls before.
func (s *Session) Handles(ctx context.Context, rank int) ([]uint64, error) {
	if rank < 0 || rank >= len(s.ids) {
		return nil, s.error("handles", fmt.Errorf("%w: rank %d, want 0 to %d", van.ErrInvalid, rank, len(s.ids)-1))
	}
	c, err := s.send(ctx, wantList, rank, plain)
	if err == nil {
		err = c.wait(ctx)
	}
	if err != nil {
		return nil, err
	}
	return c.got.handles, nil
}

// Kill gives handles up: the ranks drop what they have under them before the next call. One
// that was killed before does nothing.
func (s *Session) Kill(handles ...*Handle) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, h := range handles {
		if h != nil && h.s == s && s.live[h.id] {
			delete(s.live, h.id)
			s.kills = append(s.kills, h.id)
		}
	}
}

// Sync waits until all calls made before have ended, and handles that were killed are
// dropped. Its error joins those of calls that nobody has waited for.
func (s *Session) Sync(ctx context.Context) error {
	for {
		s.mu.Lock()
		kills := len(s.kills) > 0
		s.mu.Unlock()
		if !kills {
			break
		}
		if _, err := s.send(ctx, wantNothing, everyRank, plain); err != nil {
			return err
		}
	}
	s.mu.Lock()
	calls := slices.Collect(maps.Values(s.calls))
	s.mu.Unlock()
	for _, c := range calls {
		if err := c.await(ctx); err != nil {
			return err
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return s.err
	}
	errs := s.errs
	if s.more > 0 {
		errs = append(errs, fmt.Errorf("session: %d more errors", s.more))
	}
	s.errs, s.more = nil, 0
	s.syncs++
	return errors.Join(errs...)
}
