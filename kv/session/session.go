package session

// Session: opening a session, sending calls, receiving answers, and failure.

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/internal/random"
	"github.com/stepaf/stepaf-go/kv"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van"
)

// Options are the options of a Session and of its ranks.
type Options struct {
	// ID distinguishes the sessions of one cluster, 0 to 255. It must be the same on the controller and the ranks.
	ID int
}

func (o *Options) check() error {
	if o.ID < 0 || o.ID > maxID {
		return fmt.Errorf("%w: ID %d, want 0 to %d", van.ErrInvalid, o.ID, maxID)
	}
	return nil
}

// Session is the controller's end of a session. All methods are safe for concurrent use. Calls run in the order in
// which they are made.
type Session struct {
	node  cluster.App
	app   *kv.SimpleApp
	ranks *ranks
	id    uint64
	watch func() // ends the subscription to peer events

	longest        int            // maximum size of a body
	closing        sync.Once      // for Close
	noticesStarted chan struct{}  // closed when fail has started the notices
	notices        sync.WaitGroup // the notices of that error, until they are answered; waited for after noticesStarted is closed
	noticesCtx     context.Context
	cancelNotices  context.CancelFunc

	order   sync.Mutex // held while a call is numbered and sent; locked before the other locks
	calls   calls
	handles handles
}

// headRoom is an upper bound of the size of a message's head, which is sent with its body.
const headRoom = 4096

// Open opens a session with all servers of the cluster, and returns when each has called Serve. It is called on a
// worker. The session lasts until Shutdown or Close. If Open fails, the ranks that have called Serve wait for the
// next session. While another session is open, the error wraps ErrRefused. It is returned at once if that session has had a
// call, and within 2 s otherwise.
func Open(ctx context.Context, node *postoffice.Node, o Options) (*Session, error) {
	s := &Session{node: (*cluster.Node)(node).App(), longest: math.MaxInt32 - headRoom, noticesStarted: make(chan struct{}), handles: handles{live: map[uint64]bool{}}}
	s.calls = calls{ranks: ranks{s.node, s.node.Members(van.ServerGroup)}, all: map[uint64]*call{}, tell: wantForget, freed: make(chan struct{}), broken: make(chan struct{})}
	s.ranks = &s.calls.ranks
	slices.Sort(s.ranks.ids)
	s.noticesCtx, s.cancelNotices = context.WithCancel(context.Background())
	if err := s.begin(o); err != nil {
		return nil, wrong(s.node, "open", err)
	}
	s.watch = s.node.OnPeer(s.peer)
	go func() {
		select {
		case <-s.node.Ended():
			s.fail(s.node.Alive())
		case <-s.Failed():
		}
	}()
	err := s.invite(ctx)
	if err == nil {
		err = s.calls.tellAtEnd(wantAbort) // all ranks have joined
	}
	if err != nil {
		s.fail(fmt.Errorf("not begun: %w", err))
		s.Close()
		return nil, wrong(s.node, "open", err)
	}
	return s, nil
}

// Times until a wantOpen is repeated, initially and at most.
const (
	firstOpen = 250 * time.Millisecond
	lastOpen  = 4 * time.Second
)

// invite makes all ranks join: it sends call 0, and repeats it for ranks that do not answer. Requests to a rank that
// does not serve are not queued without end, and a request that arrives while a Serve ends is for the next Serve.
func (s *Session) invite(ctx context.Context) error {
	c := s.calls.newCall(wantOpen, everyRank)
	c.left.Store(int32(len(s.ranks.ids)))
	q := request{session: s.id, ranks: uint32(len(s.ranks.ids))}
	body, err := q.append(nil, wantOpen)
	if err != nil {
		return err
	}
	if err := s.calls.add(c); err != nil {
		return err
	}
	asking, stop := context.WithCancel(ctx)
	var all sync.WaitGroup
	for _, id := range s.ranks.ids {
		all.Go(func() {
			for limit := firstOpen; asking.Err() == nil; limit = min(2*limit, lastOpen) {
				once, cancel := context.WithTimeout(asking, limit)
				r, err := s.app.Request(wantOpen, body, postoffice.NodeID(id))
				if err == nil {
					err = r.Wait(once)
				}
				again := err != nil && once.Err() != nil
				cancel()
				if !again {
					s.requested(c, err)
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
	for _, id := range s.ranks.ids {
		if !s.node.Native(id) {
			return fmt.Errorf("%w: %s is not a node of this library", van.ErrInvalid, s.node.PeerName(id))
		}
	}
	s.id = random.Uint64()
	app := appIDs + o.ID
	var err error
	if s.app, err = kv.NewSimpleApp((*postoffice.Node)(s.node.Node), kv.SimpleOptions{AppID: app, CustomerID: app, Timeout: -1, Handler: s.asked}); err != nil {
		return err
	}
	s.app.OnAnswer(s.answered)
	return nil
}

// Ranks returns the number of ranks.
func (s *Session) Ranks() int { return len(s.ranks.ids) }

// Err returns why the session is no longer usable, or nil.
func (s *Session) Err() error { return s.calls.failed() }

// Failed returns a channel that is closed when the session is no longer usable; Err returns the reason.
func (s *Session) Failed() <-chan struct{} { return s.calls.broken }

// Close ends the session at once. Serve of the ranks returns an error, unless Shutdown has ended it. Close waits up to
// 500 ms, and with PS_RESEND two resend timeouts longer, until the ranks have received the notice. It returns nil; Err
// has the reason of an earlier failure.
func (s *Session) Close() error {
	s.closing.Do(func() {
		s.watch()
		s.fail(van.ErrClosed)
		<-s.noticesStarted // closed by the goroutine that called fail
		timer := time.AfterFunc(endTimeout(s.node), s.cancelNotices)
		defer timer.Stop()
		s.notices.Wait() // a rank that does not answer is lost, or does not serve
		_ = s.app.Close()
	})
	return nil
}

// endTimeout returns the time in which the other side receives the notice of a session's end: two retransmissions more if PS_RESEND
// is set.
func endTimeout(n cluster.App) time.Duration {
	limit := 500 * time.Millisecond
	if c := n.Config(); c.Resend {
		limit += 2 * c.ResendTimeout
	}
	return limit
}

// notifyPause returns the time until the next attempt to notify a node whose send queue is full, or that is considered lost. elapsed is
// the time since the first attempt. The node may be lost for as long as the session is not closed.
func notifyPause(elapsed time.Duration) time.Duration {
	return min(max(elapsed/8, 10*time.Millisecond), time.Second)
}

// notify sends a node a request about the end of a session. finish waits for the answer. Until ctx ends, it repeats the request if
// the node's send queue was full, or the node is considered lost: it may be back without having noticed the loss. A request that was
// sent is not canceled: the node may receive it later, behind a slow handler.
func notify(a *kv.SimpleApp, want int32, body []byte, id int) (finish func(ctx context.Context)) {
	send := func() (kv.Call, error) {
		c, err := a.Request(want, body, postoffice.NodeID(id))
		cluster.Call(c).KeepSent()
		return c, err
	}
	begun := time.Now()
	c, err := send()
	return func(ctx context.Context) {
		for {
			if err == nil {
				err = c.Wait(ctx)
			}
			if !errors.Is(err, van.ErrQueueFull) && !errors.Is(err, van.ErrPeerLost) {
				return
			}
			select {
			case <-time.After(notifyPause(time.Since(begun))):
			case <-ctx.Done():
				_, _ = send() // the node may be back since the last attempt
				return
			}
			c, err = send()
		}
	}
}

// fail makes the session unusable, ends all calls, and notifies the ranks. Only the first call has an effect.
func (s *Session) fail(err error) {
	tell, first := s.calls.fail(err)
	if !first {
		return
	}
	defer close(s.noticesStarted)
	if tell == 0 {
		return
	}
	q := request{session: s.id, text: s.Err().Error()}
	body, err := q.append(nil, tell)
	for _, id := range s.ranks.ids {
		if err == nil {
			finish := notify(s.app, tell, body, id)
			s.notices.Go(func() { finish(s.noticesCtx) })
		}
	}
}

// peer is called when a node is lost or connected again.
func (s *Session) peer(id int, up bool, cause error) {
	for rank, of := range s.ranks.ids {
		switch {
		case id != of:
		case up: // another process, or one whose messages may have been lost
			s.fail(fmt.Errorf("%w: rank %d: %s has returned, and is not part of the session", van.ErrPeerLost, rank, s.node.PeerName(id)))
		default:
			s.fail(fmt.Errorf("%w: rank %d: %s: %w", van.ErrPeerLost, rank, s.node.PeerName(id), cause))
		}
	}
}

// asked handles a request of a rank: the rank leaves.
func (s *Session) asked(m kv.SimpleMessage) {
	_ = m.Respond(nil) // the rank waits only briefly
	q, err := parseRequest(m.Head, m.Body)
	if err != nil || q.session != s.id || m.Head != wantLeave {
		return
	}
	s.fail(fmt.Errorf("%w: %s: its Serve has ended: %s", van.ErrPeerLost, s.ranks.name(int(m.Sender)), q.text))
}

// answered handles the answer of a rank.
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
		s.fail(fmt.Errorf("%s: %w", s.ranks.name(int(m.Sender)), err))
		return
	}
	if c := s.calls.find(a.seq); c != nil {
		c.answered(slices.Index(s.ranks.ids, int(m.Sender)), a)
	}
}

// ErrRefused: a rank does not take part in the session.
var ErrRefused = errors.New("refused")

// requested is called when one of c's requests has ended.
func (s *Session) requested(c *call, err error) {
	if err != nil {
		s.fail(c.named(err))
		return
	}
	c.requested()
}

// turn locks order when one more call may be in flight. It does not hold order while it waits, since other callers
// have contexts of their own.
func (s *Session) turn(ctx context.Context) error {
	for {
		if err := s.calls.room(ctx); err != nil {
			return err
		}
		s.order.Lock()
		if _, full := s.calls.full(); !full {
			return nil
		}
		s.order.Unlock()
	}
}

// send makes the next call; of returns its request, given its number. In a call for one rank, the other ranks receive
// an empty request with the number.
func (s *Session) send(ctx context.Context, want int32, rank int, of func(seq uint64) request) (*call, error) {
	if err := s.turn(ctx); err != nil {
		return nil, err
	}
	defer s.order.Unlock()
	c := s.calls.newCall(want, rank)
	q, kills := of(c.seq), s.handles.killed()
	c.name, c.handle = q.text, q.handle
	q.session, q.seq, q.kills = s.id, c.seq, kills
	body, err := q.append(make([]byte, 0, 128), want)
	if err == nil && len(body) > s.longest { // a van would refuse it, and the session would fail
		err = fmt.Errorf("%w: %d bytes in all, want at most %d", van.ErrInvalid, len(body), s.longest)
	}
	targets, others := []int{van.ServerGroup}, []byte(nil)
	if err == nil && rank != everyRank {
		targets = s.ranks.ids
		q = request{session: s.id, seq: c.seq, kills: kills}
		others, err = q.append(nil, wantNothing)
	}
	if err != nil {
		return nil, wrong(s.node, "call", err)
	}
	c.bytes = len(body) + (len(targets)-1)*len(others)
	c.left.Store(int32(len(targets)))
	if err := s.calls.add(c); err != nil {
		return nil, err
	}
	if len(kills) > 0 {
		s.handles.told(len(kills))
	}
	over := kv.Done(func(err error) { s.requested(c, err) })
	for i, to := range targets {
		as, says := want, body
		if rank != everyRank && i != rank {
			as, says = wantNothing, others
		}
		if _, err := s.app.Request(as, says, postoffice.NodeID(to), over); err != nil {
			s.fail(err) // some ranks may have received it, and others not
			return nil, s.Err()
		}
	}
	return c, nil
}
