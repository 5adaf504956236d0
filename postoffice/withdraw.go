package postoffice

// Requests that were given up: telling the servers, so that they drop them, and
// remembering what workers have given up.

import (
	"bytes"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/van"
)

// Withdrawn says that a worker no longer waits for the answers to consecutive timestamps:
// it has given the request up, or could not send all of it.
type Withdrawn struct {
	Sender   int   // node id of the worker's instance
	Customer int32 // its customer id
	First    int32 // timestamp
	Count    int32
}

// Has tells whether timestamp ts of that customer is among those given up.
func (w *Withdrawn) Has(customer, ts int32) bool {
	return customer == w.Customer && ts >= w.First && ts-w.First < w.Count
}

// A worker sends it in the body of a HEARTBEAT without node records, as the scheduler
// sends its notices, and only to servers of this library. It may overtake the request, or
// arrive when that was answered long ago.
const withdrawPrefix = "stepaf/1 given-up "

// withdraw tells node id that these answers are no longer awaited.
func (n *Node) withdraw(id, app int, w Withdrawn) {
	p := n.processes.of(id)
	if p.incarnation == 0 || failpoint.On("abandon") {
		return
	}
	n.notices.add(id, notice{app: app, w: w, to: p.incarnation, at: clock.Now()})
	if n.processes.of(id).lost == nil { // otherwise resendNotices sends it when the peer is back
		n.sendNotice(id, app, w)
	}
}

func (n *Node) sendNotice(id, app int, w Withdrawn) {
	msg := &van.Message{}
	msg.Reset()
	msg.Sender, msg.Receiver = int(n.id.Load()), id
	msg.Control.Cmd, msg.Timestamp = van.Heartbeat, w.First
	msg.Body = fmt.Appendf(nil, "%s%d %d %d %d", withdrawPrefix, app, w.Customer, w.First, w.Count)
	n.stamp(&msg.Meta, n.processes.of(id))
	n.logMessage("send", id, &msg.Meta)
	if err := n.van.Send(msg); err != nil {
		n.log.Info("could not tell a server that a request was given up", "server", n.PeerName(id), "handler", w.First, "err", err)
	}
}

// resendNotices sends recent notices to node id, which was lost and is back: those of the
// meantime were not sent, and some may have been lost with the connection. The peer may
// not have noticed the break, and still hold the requests. Duplicates do no harm.
func (n *Node) resendNotices(id int) {
	incarnation := n.processes.of(id).incarnation
	for _, s := range n.notices.recent(id) {
		if s.to == incarnation {
			n.sendNotice(id, s.app, s.w)
		}
	}
}

// maxNotices is how many notices a node remembers for each peer.
const maxNotices = 256

// notice is a Withdrawn that was sent, or was to be sent, to a peer.
type notice struct {
	app int
	w   Withdrawn
	to  uint32 // incarnation
	at  uint64
}

// notices has the notices by peer, oldest first.
type notices struct {
	mu sync.Mutex
	by map[int][]notice
}

func (s *notices) add(id int, x notice) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.by == nil {
		s.by = map[int][]notice{}
	}
	list := s.by[id]
	if len(list) >= maxNotices {
		list = list[:copy(list, list[1:])]
	}
	s.by[id] = append(list, x)
}

// recent returns the notices that are not older than rememberWithdrawn, and forgets the
// others.
func (s *notices) recent(id int) []notice {
	s.mu.Lock()
	defer s.mu.Unlock()
	list, now := s.by[id], clock.Now()
	for len(list) > 0 && time.Duration(now-list[0].at) > rememberWithdrawn {
		list = list[1:]
	}
	if len(list) == 0 {
		delete(s.by, id)
		return nil
	}
	s.by[id] = list
	return append([]notice(nil), list...)
}

// withdrawn handles msg if it is such a notice, and tells whether it is.
func (n *Node) withdrawn(msg *van.Message) bool {
	if msg.Control.Cmd != van.Heartbeat || len(msg.Control.Nodes) > 0 || !bytes.HasPrefix(msg.Body, []byte(withdrawPrefix)) {
		return false
	}
	p := n.processes.of(msg.Sender)
	from, to := msg.Incarnations()
	w, app := Withdrawn{Sender: msg.Sender}, 0
	k, err := fmt.Sscanf(string(msg.Body[len(withdrawPrefix):min(len(msg.Body), 128)]), "%d %d %d %d", &app, &w.Customer, &w.First, &w.Count)
	valid := err == nil && k == 4 && w.First >= 0 && w.Count >= 1
	switch {
	case from == 0 || to != n.incarnation || p.known && p.incarnation == 0:
		n.dropStale(msg, p)
	case !valid:
		n.log.Warn("dropped a control message", "err", &van.FieldError{Field: "body", Value: fmt.Sprintf("%.60q", msg.Body), Want: "application, customer, first timestamp and count"},
			"from", n.PeerName(msg.Sender))
	case from == p.incarnation && !p.behind:
		n.apps.withdraw(n, app, w, p.epoch)
	case !n.strangers.giveUp(n, from, app, w):
		n.dropStale(msg, p)
	}
	return true
}

// How long a withdrawal is remembered, since messages of the request may still be under
// way or wait behind a slow handler, and how many of each sender.
const (
	rememberWithdrawn = 5 * time.Minute
	maxWithdrawn      = 1024
)

// withdrawals has what senders have given up recently. Every received request is looked up
// here, so each sender has a list and a lock of its own.
type withdrawals struct {
	mu sync.Mutex // of changes of by
	by atomic.Pointer[map[int]*givenUp]
}

// givenUp is what one sender has given up, oldest first.
type givenUp struct {
	count atomic.Int32 // of list; usually 0, which saves the lock
	mu    sync.Mutex
	list  []withdrawal
}

type withdrawal struct {
	Withdrawn
	epoch uint32
	at    uint64
}

// of returns the list of sender, nil if it has never given anything up.
func (ws *withdrawals) of(sender int) *givenUp {
	by := ws.by.Load()
	if by == nil {
		return nil
	}
	return (*by)[sender]
}

func (ws *withdrawals) add(w Withdrawn, epoch uint32) {
	ws.mu.Lock()
	g := ws.of(w.Sender)
	if g == nil {
		by := map[int]*givenUp{}
		if old := ws.by.Load(); old != nil {
			by = maps.Clone(*old)
		}
		g = &givenUp{}
		by[w.Sender] = g
		ws.by.Store(&by)
	}
	ws.mu.Unlock()

	g.mu.Lock()
	defer g.mu.Unlock()
	now := clock.Now()
	g.expire(now, maxWithdrawn-1)
	g.list = append(g.list, withdrawal{w, epoch, now})
	g.count.Store(int32(len(g.list)))
}

func (ws *withdrawals) has(sender int, epoch uint32, customer, ts int32) bool {
	g := ws.of(sender)
	if g == nil || g.count.Load() == 0 {
		return false
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.expire(clock.Now(), maxWithdrawn)
	for i := range g.list {
		if w := &g.list[i]; w.epoch == epoch && w.Has(customer, ts) {
			return true
		}
	}
	return false
}

// expire removes old entries, and the oldest beyond most. g.mu is held.
func (g *givenUp) expire(now uint64, most int) {
	old := max(len(g.list)-most, 0)
	for old < len(g.list) && time.Duration(now-g.list[old].at) > rememberWithdrawn {
		old++
	}
	if old == 0 {
		return
	}
	if g.list = slices.Delete(g.list, 0, old); len(g.list) == 0 {
		g.list = nil
	}
	g.count.Store(int32(len(g.list)))
}

// Wanted tells whether the sender of a request still waits for its answer: it has not
// given the request up, is not lost, and has not been replaced. epoch is that of the
// request's message.
func (c *Customer) Wanted(sender int, epoch uint32, customer, ts int32) bool {
	p := c.node.processes.of(sender)
	return p.epoch == epoch && (p.lost == nil || p.lostEpoch != epoch) && !c.withdrawals.has(sender, epoch, customer, ts)
}

// OnWithdrawn makes the customer call f with what senders give up, after Wanted has begun
// to return false for it. f must not block.
func (c *Customer) OnWithdrawn(f func(Withdrawn)) { c.onWithdrawn.Store(&f) }

// withdraw passes w to its customer. If there is none yet, it drops the kept requests that
// w names.
func (a *apps) withdraw(n *Node, app int, w Withdrawn, epoch uint32) {
	k := appKey{int32(app), int32(app)}
	if n.role == van.Worker {
		k.customer = w.Customer
	}
	a.mu.Lock()
	c := (*a.table.Load())[k]
	if c == nil {
		a.forget(func(of appKey, e *early) bool {
			return of == k && e.msg.Sender == w.Sender && e.msg.Epoch == epoch && w.Has(e.msg.CustomerID, e.msg.Timestamp)
		})
	}
	a.mu.Unlock()
	if c == nil {
		return
	}
	c.withdrawals.add(w, epoch)
	if f := c.onWithdrawn.Load(); f != nil {
		(*f)(w)
	}
}
