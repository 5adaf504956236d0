package session

// Session: the controller's side. Which calls are under way, and how a session fails.

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/stepaf/stepaf-go/internal/random"
	"github.com/stepaf/stepaf-go/kv"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van"
)

// Options of a Session and of its ranks.
type Options struct {
	// ID tells sessions of one cluster apart, 0 to 255. It is the same on the controller
	// and the ranks.
	ID int
}

func (o *Options) check() error {
	if o.ID < 0 || o.ID > maxID {
		return fmt.Errorf("%w: ID %d, want 0 to %d", van.ErrInvalid, o.ID, maxID)
	}
	return nil
}

// Session is what the controller calls functions by. All methods are safe for concurrent
// use; calls run in the order in which they are made.
type Session struct {
	node  postoffice.App
	app   *kv.SimpleApp
	ids   []int // of the ranks' nodes
	id    uint64
	watch func() // ends it

	longest int           // body of a message
	closing sync.Once     // Close
	told    chan struct{} // closed when the ranks have been sent word of err
	aborts  []kv.Call     // which they answer; read when told is closed

	order sync.Mutex // a call is numbered and sent under it

	mu      sync.Mutex
	next    uint64           // number of the next call
	calls   map[uint64]*call // under way, by number
	bytes   int              // of the calls under way
	freed   chan struct{}    // closed when one of them has ended
	live    map[uint64]bool  // handles
	kills   []uint64         // handles that ranks have not been told of yet
	errs    []error          // of calls that nobody has waited for
	more    int              // of them that are not in errs
	syncs   uint64           // how often all were told
	begun   bool             // all ranks have taken part
	err     error            // why the session cannot be used any more
	broken  chan struct{}    // closed when it cannot
	stopped bool             // all ranks have ended their Serve
}

// What may be under way at once. One longer call may be alone.
const (
	maxCalls = 1000
	maxBytes = 64 << 20
	maxErrs  = 16
	maxKills = 4096
)

// Open begins a session with all servers of the cluster, and returns when each has called
// Serve. It is called on a worker, whose session lasts until Shutdown or Close. Where it fails,
// the ranks that have called Serve wait for the next session.
func Open(ctx context.Context, node *postoffice.Node, o Options) (*Session, error) {
	s := &Session{node: node.App(), ids: node.App().Members(van.ServerGroup), calls: map[uint64]*call{}, live: map[uint64]bool{}, next: 1, longest: math.MaxInt32,
		freed: make(chan struct{}), broken: make(chan struct{}), told: make(chan struct{})}
	slices.Sort(s.ids)
	if err := s.begin(o); err != nil {
		return nil, s.error("open", err)
	}
	s.watch = node.OnPeer(s.peer)
	err := s.invite(ctx)
	s.mu.Lock()
	if err == nil {
		err = s.err // since all have answered
	}
	s.begun = err == nil
	s.mu.Unlock()
	if err != nil {
		s.fail(fmt.Errorf("not begun: %w", err))
		s.Close()
		return nil, s.error("open", err)
	}
	return s, nil
}

// How long an answer to wantOpen is waited for before it is asked again, at first and at most.
const (
	firstOpen = 250 * time.Millisecond
	lastOpen  = 4 * time.Second
)

// invite has all ranks take part: call 0, which is asked again of those that do not answer. Requests to
// who does not serve are not kept for ever, and one that comes while a Serve ends is for the next.
func (s *Session) invite(ctx context.Context) error {
	c := s.newCall(wantOpen, everyRank, 0)
	c.left.Store(int32(len(s.ids)))
	q := request{session: s.id, ranks: uint32(len(s.ids))}
	body, err := q.append(nil, wantOpen)
	if err != nil {
		return err
	}
	s.mu.Lock()
	if err = s.err; err == nil {
		s.calls[0] = c
	}
	s.mu.Unlock()
	if err != nil {
		return err
	}
	asking, stop := context.WithCancel(ctx)
	var all sync.WaitGroup
	for _, id := range s.ids {
		all.Go(func() {
			for limit := firstOpen; asking.Err() == nil; limit = min(2*limit, lastOpen) {
				once, cancel := context.WithTimeout(asking, limit)
				r, err := s.app.Request(wantOpen, body, id)
				if err == nil {
					err = r.Wait(once)
				}
				again := err != nil && once.Err() != nil
				cancel()
				if !again {
					c.requested(err)
					return
				}
			}
		})
	}
	err = c.wait(ctx)
	stop()
	all.Wait()
	return err
}

func (s *Session) begin(o Options) error {
	if err := o.check(); err != nil {
		return err
	}
	if s.node.Role() != van.Worker {
		return fmt.Errorf("%w: the controller is a worker", van.ErrInvalid)
	}
	for _, id := range s.ids {
		if !s.node.Native(id) {
			return fmt.Errorf("%w: %s is not a node of this library", van.ErrInvalid, s.node.PeerName(id))
		}
	}
	s.id = random.Uint64()
	app := appIDs + o.ID
	var err error
	if s.app, err = kv.NewSimpleApp(s.node.Node, kv.SimpleOptions{AppID: app, CustomerID: app, Timeout: -1, Handler: s.asked}); err != nil {
		return err
	}
	s.app.OnAnswer(s.answered)
	return nil
}

// Ranks is the number of ranks.
func (s *Session) Ranks() int { return len(s.ids) }

// Err is why the session cannot be used any more, nil as long as it can.
func (s *Session) Err() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// Failed is closed when the session cannot be used any more; Err says why.
func (s *Session) Failed() <-chan struct{} { return s.broken }

// Shutdown has all calls ended, and then Serve on all ranks, and closes the session. Errors
// of calls that nobody has waited for are among its own.
func (s *Session) Shutdown(ctx context.Context) error {
	err := s.Sync(ctx)
	if s.Err() == nil {
		c, e := s.send(ctx, wantStop, everyRank, plain)
		if e == nil {
			e = c.wait(ctx)
		}
		s.mu.Lock()
		s.stopped = e == nil
		s.mu.Unlock()
		err = errors.Join(err, e)
	}
	s.Close()
	return err
}

// Close ends the session at once. The ranks' Serve ends with an error, unless Shutdown has
// ended it.
func (s *Session) Close() {
	s.closing.Do(func() {
		s.watch()
		s.fail(van.ErrClosed)
		<-s.told // by whoever has made it fail
		ctx, cancel := farewell(s.node)
		defer cancel()
		for _, c := range s.aborts {
			_ = c.Wait(ctx) // who does not answer is lost, or does not serve
		}
		s.app.Close()
	})
}

// farewell is for how long the end of a session waits until the other side has heard of it, where
// messages get lost when it was told again.
func farewell(n postoffice.App) (context.Context, context.CancelFunc) {
	limit := 500 * time.Millisecond
	if c := n.Config(); c.Resend {
		limit += 2 * c.ResendTimeout
	}
	return context.WithTimeout(context.Background(), limit)
}

// fail makes the session unusable, once, ends all calls and tells the ranks.
func (s *Session) fail(err error) {
	s.mu.Lock()
	if s.err != nil {
		s.mu.Unlock()
		return
	}
	s.err = s.error("session", err)
	calls, stopped, tell := s.calls, s.stopped, wantAbort
	if !s.begun {
		tell = wantForget
	}
	s.calls = nil
	s.mu.Unlock()
	defer close(s.told)
	close(s.broken)
	for _, c := range calls {
		c.end(s.err)
	}
	if stopped {
		return
	}
	q := request{session: s.id, text: s.err.Error()}
	body, err := q.append(nil, tell)
	for _, id := range s.ids {
		if err == nil {
			if c, err := s.app.Request(tell, body, id); err == nil {
				s.aborts = append(s.aborts, c)
			}
		}
	}
}

// peer hears of a node that is lost or back.
func (s *Session) peer(id int, up bool, cause error) {
	for rank, of := range s.ids {
		switch {
		case id != of:
		case up: // another process, or one whose messages may have been lost
			s.fail(fmt.Errorf("%w: rank %d: %s has come back, and has no part in the session", van.ErrPeerLost, rank, s.node.PeerName(id)))
		default:
			s.fail(fmt.Errorf("%w: rank %d: %s: %w", van.ErrPeerLost, rank, s.node.PeerName(id), cause))
		}
	}
}

// asked takes a request of a rank: it leaves.
func (s *Session) asked(m kv.SimpleMessage) {
	_ = m.Respond(nil) // it does not wait for long
	q, err := parseRequest(m.Head, m.Body)
	if err != nil || q.session != s.id || m.Head != wantLeave {
		return
	}
	s.fail(fmt.Errorf("%w: %s: its Serve has ended: %s", van.ErrPeerLost, s.rankName(m.Sender), q.text))
}

// answered takes the answer of a rank.
func (s *Session) answered(m kv.SimpleMessage) {
	if m.Head == wantAbort || m.Head == wantForget {
		return
	}
	a, err := parseAnswer(m.Head, m.Body)
	if err == nil && a.session != s.id {
		err = &van.FieldError{Field: "session", Value: a.session, Want: fmt.Sprint(s.id)}
	}
	if err == nil && a.outcome == refused {
		err = fmt.Errorf("%w: %s", ErrRefused, a.text)
	}
	if err != nil {
		s.fail(fmt.Errorf("%s: %w", s.rankName(m.Sender), err))
		return
	}
	s.mu.Lock()
	c := s.calls[a.seq]
	s.mu.Unlock()
	if c != nil {
		c.answered(slices.Index(s.ids, m.Sender), a)
	}
}

// ErrRefused: a rank takes no part in the session.
var ErrRefused = errors.New("refused")

func (s *Session) rankName(id int) string {
	return fmt.Sprintf("rank %d (%s)", slices.Index(s.ids, id), s.node.PeerName(id))
}

func (s *Session) error(op string, err error) error {
	return &van.Error{Op: op, Node: s.node.Name(), Err: err}
}

// everyRank is the rank of a call that all ranks run.
const everyRank = -1

func plain(int) *request { return &request{} }

// send makes the next call. Of one rank's call, the others hear that it was there; what
// is theirs to do is what of says, which is asked once where all ranks do the same.
func (s *Session) send(ctx context.Context, want int32, rank int, of func(rank int) *request) (*call, error) {
	s.order.Lock()
	defer s.order.Unlock()
	if err := s.room(ctx); err != nil {
		return nil, err
	}
	s.mu.Lock()
	c := s.newCall(want, rank, s.next)
	kills := s.kills[:min(len(s.kills), maxKills)]
	s.mu.Unlock()
	targets := s.ids
	if rank == everyRank {
		targets = []int{van.ServerGroup}
	}
	bodies := make([][]byte, len(targets))
	for i := range targets {
		q, as := &request{}, wantNothing
		if rank == everyRank || i == rank {
			q, as = of(i), want
		}
		c.name, c.handle = q.text, q.handle
		q.session, q.seq, q.kills = s.id, c.seq, kills
		var err error
		if bodies[i], err = q.append(make([]byte, 0, 128), as); err != nil {
			return nil, s.error("call", err)
		}
		if len(bodies[i]) > s.longest { // a van would refuse it, and the session end
			return nil, s.error("call", fmt.Errorf("%w: %d bytes in all, want at most %d", van.ErrInvalid, len(bodies[i]), s.longest))
		}
		c.bytes += len(bodies[i])
	}
	s.mu.Lock()
	if s.err != nil {
		s.mu.Unlock()
		return nil, s.err
	}
	s.kills = s.kills[len(kills):]
	s.next++
	s.calls[c.seq] = c
	s.bytes += c.bytes
	s.mu.Unlock()
	c.left.Store(int32(len(targets)))
	for i, to := range targets {
		as := wantNothing
		if rank == everyRank || i == rank {
			as = want
		}
		if _, err := s.app.Request(as, bodies[i], to, kv.Done(c.requested)); err != nil {
			s.fail(err) // some ranks may have it, and others not
			return nil, s.Err()
		}
	}
	return c, nil
}

// room waits until one more call may be under way. order is held.
func (s *Session) room(ctx context.Context) error {
	for {
		s.mu.Lock()
		err, freed, n := s.err, s.freed, len(s.calls)
		full := n > 0 && (n >= maxCalls || s.bytes >= maxBytes)
		s.mu.Unlock()
		if err != nil || !full {
			return err
		}
		select {
		case <-freed:
		case <-s.broken:
		case <-ctx.Done():
			return s.error("call", fmt.Errorf("%d calls are under way: %w", n, cause(ctx)))
		}
	}
}

// cause is why ctx has ended. Its deadline is a time-out.
func cause(ctx context.Context) error {
	err := context.Cause(ctx)
	if errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("%w (%w)", van.ErrTimeout, err)
	}
	return err
}
