package session

// Calls in flight of a session, with their answers and their ends, and the handles of their results. Nothing is sent
// from here.

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/van"
)

// ranks are the ranks of a session, as known to the controller.
type ranks struct {
	node cluster.App // the controller
	ids  []int       // node ids, by rank
}

// name describes the rank with a node id.
func (r *ranks) name(id int) string {
	return fmt.Sprintf("rank %d (%s)", slices.Index(r.ids, id), r.node.PeerName(id))
}

// wrong returns the error of a call on node n.
func wrong(n cluster.App, op string, err error) error {
	return &van.Error{Op: op, Node: n.Name(), Err: err}
}

// Limits of calls in flight. One larger call may be in flight alone.
const (
	maxCalls = 1000
	maxBytes = 64 << 20
	maxErrs  = 16
)

// calls are the calls in flight of a session, while the session is usable. mu guards the fields below it.
type calls struct {
	ranks  ranks
	broken chan struct{} // closed when err is set

	mu    sync.Mutex
	next  uint64           // number of the next call; changed with the order of calls held, too
	all   map[uint64]*call // in flight, by number
	bytes int              // size of the calls in flight
	freed chan struct{}    // closed when a call has ended
	errs  []error          // of calls that were not waited for
	more  int              // number of such errors that are not in errs
	syncs uint64           // how often Sync has returned all errors
	tell  int32            // the verb for the ranks when the session fails; 0: nothing is sent
	err   error            // why the session is no longer usable
}

// call is a call in flight.
type call struct {
	of     *calls
	seq    uint64
	want   int32
	rank   int // the rank that runs it, or everyRank
	name   string
	handle uint64
	bytes  int
	left   atomic.Int32 // unanswered requests
	once   sync.Once
	ended  chan struct{} // closed when err and got are set
	err    error
	got    answer // of rank
	more   uint64 // calls.syncs+1 when err became one of calls.more; guarded by of.mu

	mu   sync.Mutex // guards the fields below
	from []bool     // ranks that have answered
	errs []error
}

// everyRank is the rank of a call that all ranks run.
const everyRank = -1

// newCall creates the next call, which is not in flight yet. The caller holds the order of calls until add.
func (l *calls) newCall(want int32, rank int) *call {
	n := len(l.ranks.ids)
	return &call{of: l, seq: l.next, want: want, rank: rank, ended: make(chan struct{}), from: make([]bool, n), errs: make([]error, n)}
}

// failed returns why the session is no longer usable, or nil.
func (l *calls) failed() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.err
}

// add makes c a call in flight.
func (l *calls) add(c *call) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err != nil {
		return l.err
	}
	l.next++
	l.all[c.seq] = c
	l.bytes += c.bytes
	return nil
}

// find returns the call with that number, nil if it is not in flight.
func (l *calls) find(seq uint64) *call {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.all[seq]
}

// full reports whether the limits are reached, and a channel that is closed when that may have changed.
func (l *calls) full() (freed chan struct{}, full bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := len(l.all)
	return l.freed, n > 0 && (n >= maxCalls || l.bytes >= maxBytes)
}

// room waits until one more call may be in flight.
func (l *calls) room(ctx context.Context) error {
	for {
		freed, full := l.full()
		if err := l.failed(); err != nil || !full {
			return err
		}
		select {
		case <-freed:
		case <-l.broken:
		case <-ctx.Done():
			l.mu.Lock()
			n := len(l.all)
			l.mu.Unlock()
			return wrong(l.ranks.node, "call", fmt.Errorf("%d calls are under way: %w", n, van.TimedOut(context.Cause(ctx))))
		}
	}
}

// tellAtEnd sets what the ranks are sent when the session fails, unless the session has failed.
func (l *calls) tellAtEnd(tell int32) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.tell = tell
	return l.err
}

// fail ends all calls. The first call of fail returns what to send to the ranks.
func (l *calls) fail(err error) (tell int32, first bool) {
	l.mu.Lock()
	if l.err != nil {
		l.mu.Unlock()
		return 0, false
	}
	l.err = wrong(l.ranks.node, "session", err)
	all := l.all
	l.all, tell = nil, l.tell
	l.mu.Unlock()
	close(l.broken)
	for _, c := range all {
		c.end(l.err)
	}
	return tell, true
}

// sync waits until all earlier calls have ended. Its error joins those of calls that were not waited for.
func (l *calls) sync(ctx context.Context) error {
	l.mu.Lock()
	all := slices.Collect(maps.Values(l.all))
	l.mu.Unlock()
	for _, c := range all {
		if err := c.await(ctx); err != nil {
			return err
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err != nil {
		return l.err
	}
	errs := l.errs
	if l.more > 0 {
		errs = append(errs, fmt.Errorf("session: %d more errors", l.more))
	}
	l.errs, l.more = nil, 0
	l.syncs++
	return errors.Join(errs...)
}

// answered records the answer of a rank.
func (c *call) answered(rank int, a answer) {
	c.mu.Lock()
	c.from[rank] = true
	if a.outcome == failed {
		c.errs[rank] = &RankError{Rank: rank, Node: van.NodeName(c.of.ranks.ids[rank]), Call: c.String(), Text: a.text}
	}
	c.mu.Unlock()
	if rank == c.rank {
		c.got = a
		c.end(c.errs[rank])
	}
}

// requested is called when one of the call's requests has ended.
func (c *call) requested() {
	if c.left.Add(-1) > 0 {
		return
	}
	c.end(errors.Join(c.errs...)) // first, so that Sync sees either the call or its error
	l := c.of
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.all[c.seq] == c { // otherwise the session has failed
		delete(l.all, c.seq)
		l.bytes -= c.bytes
		close(l.freed)
		l.freed = make(chan struct{})
	}
}

// named converts the error of a request to an error of the call and its rank: callers do not know the request, and
// its failure may be reported before the loss of the rank.
func (c *call) named(err error) error {
	e, is := err.(*van.Error)
	if !is || e.PeerID == 0 {
		return err
	}
	as := *e
	as.Op, as.Node, as.Peer, as.Detail = c.String(), "", fmt.Sprintf("rank %d (%s)", slices.Index(c.of.ranks.ids, e.PeerID), e.Peer), ""
	return &as
}

// end ends the call, once. Sync returns errors of calls that need not be waited for.
func (c *call) end(err error) {
	c.once.Do(func() {
		l := c.of
		l.mu.Lock()
		c.err = err
		switch keep := c.want == wantCall || c.want == wantSet; {
		case err == nil || l.err != nil || !keep:
		case len(l.errs) < maxErrs:
			l.errs = append(l.errs, err)
		default:
			l.more++
			c.more = l.syncs + 1
		}
		l.mu.Unlock()
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

// wait waits for the end of the call, and returns its error. If ctx ends first, the call continues.
func (c *call) wait(ctx context.Context) error {
	if err := c.await(ctx); err != nil {
		return err
	}
	c.of.mu.Lock()
	defer c.of.mu.Unlock()
	c.of.errs = slices.DeleteFunc(c.of.errs, func(err error) bool { return err == c.err })
	if c.more == c.of.syncs+1 {
		c.more = 0
		c.of.more--
	}
	return c.err
}

// await waits for the end of the call.
func (c *call) await(ctx context.Context) error {
	if !c.over() {
		c.of.ranks.node.Poll(c.over)
	}
	select {
	case <-c.ended:
	case <-ctx.Done():
		if !c.over() {
			return wrong(c.of.ranks.node, "wait", fmt.Errorf("%s: no answer from %s: %w", c, c.owing(), van.TimedOut(context.Cause(ctx))))
		}
	}
	return nil
}

// owing lists the ranks that have not answered.
func (c *call) owing() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	var l []string
	for r := range c.from {
		if !c.from[r] && (c.rank == everyRank || c.rank == r) {
			l = append(l, c.of.ranks.name(c.of.ranks.ids[r]))
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

// RankError is the error of one rank in a call. The error of a call joins those of all failed ranks; errors.As finds
// the first.
type RankError struct {
	Rank int
	Node string // of the rank
	Call string // description of the call
	Text string // error text of the rank
}

// Error returns everything on one line.
func (e *RankError) Error() string {
	return fmt.Sprintf("session: %s: rank %d (%s): %s", e.Call, e.Rank, e.Node, e.Text)
}

// Handle is a reference to a result that is stored on the ranks.
type Handle struct {
	s    *Session
	id   uint64
	made *call
}

// ID returns the number of the handle, from 1. Numbers are not reused in a session.
func (h *Handle) ID() uint64 { return h.id }

// Done returns a channel that is closed when the call that h is the result of has ended on all ranks: Wait then
// returns at once.
func (h *Handle) Done() <-chan struct{} { return h.made.ended }

// Wait waits until the call that h is the result of has ended on all ranks, and returns its error: a RankError,
// several joined, or why the session has failed. If ctx ends first, the call continues; the error names the ranks
// that have not answered.
func (h *Handle) Wait(ctx context.Context) error { return h.made.wait(ctx) }

// maxKills is the maximum number of handles that one message releases.
const maxKills = 4096

// handles are the handles of a session.
type handles struct {
	mu    sync.Mutex
	live  map[uint64]bool
	kills []uint64 // released, but not yet on the ranks
}

// owns returns an error for a handle that is not valid in s.
func (s *Session) owns(h *Handle) error {
	s.handles.mu.Lock()
	defer s.handles.mu.Unlock()
	switch {
	case h == nil || h.s == nil:
		return fmt.Errorf("%w: not a handle of a call", van.ErrInvalid)
	case h.s != s:
		return fmt.Errorf("%w: handle %d of another session", van.ErrInvalid, h.id)
	case !s.handles.live[h.id]:
		return fmt.Errorf("%w: handle %d was killed", van.ErrInvalid, h.id)
	}
	return nil
}

// add registers a handle.
func (l *handles) add(id uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.live[id] = true
}

// killed returns the handles that the next message releases; told removes the first n of them.
func (l *handles) killed() []uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.kills[:min(len(l.kills), maxKills)]
}

func (l *handles) told(n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.kills = l.kills[n:]
}
