package postoffice

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

// Withdrawn says that a worker does not wait any more for the answers to consecutive
// timestamps: it has given the request up, or could not send all of it.
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

// A worker tells it in a HEARTBEAT without node records, as the scheduler its notices,
// and only to servers of this library: a node of the original never sees one. It may
// overtake the request, or come when that was answered long ago.
const withdrawPrefix = "stepaf/1 given-up "

// withdraw tells node id that nobody waits for these answers any more.
func (n *Node) withdraw(id, app int, w Withdrawn) {
	p := n.processes.of(id)
	if p.incarnation == 0 || failpoint.On("abandon") {
		return
	}
	n.said.add(id, saying{app: app, w: w, to: p.incarnation, at: clock.Now()})
	if n.processes.of(id).lost == nil { // else sayAgain follows when it is back
		n.say(id, app, w)
	}
}

func (n *Node) say(id, app int, w Withdrawn) {
	msg := &van.Message{}
	msg.Reset()
	msg.Sender, msg.Receiver = int(n.id.Load()), id
	msg.Control.Cmd, msg.Timestamp = van.Heartbeat, w.First
	msg.Body = fmt.Appendf(nil, "%s%d %d %d %d", withdrawPrefix, app, w.Customer, w.First, w.Count)
	n.stamp(&msg.Meta, n.processes.of(id))
	n.logMessage("send", id, &msg.Meta)
	if err := n.van.Send(msg); err != nil {
		n.log.Info("a server does not learn that a request was given up", "server", n.PeerName(id), "handler", w.First, "err", err)
	}
}

// sayAgain tells node id, which was lost and is back, what was given up lately: it could
// not be told meanwhile, and what was on its way when the connection broke did not come.
// The node may have noticed nothing, and still hold the requests. Told twice is told once.
func (n *Node) sayAgain(id int) {
	incarnation := n.processes.of(id).incarnation
	for _, s := range n.said.lately(id) {
		if s.to == incarnation {
			n.say(id, s.app, s.w)
		}
	}
}

// maxSaid is how many requests that were given up a node remembers for each peer.
const maxSaid = 256

// saying is one of them.
type saying struct {
	app int
	w   Withdrawn
	to  uint32 // incarnation
	at  uint64
}

// sayings are what this node has given up, by peer, oldest first.
type sayings struct {
	mu sync.Mutex
	by map[int][]saying
}

func (s *sayings) add(id int, x saying) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.by == nil {
		s.by = map[int][]saying{}
	}
	list := s.by[id]
	if len(list) >= maxSaid {
		list = list[:copy(list, list[1:])]
	}
	s.by[id] = append(list, x)
}

// lately returns what is not older than anybody remembers, and forgets the rest.
func (s *sayings) lately(id int) []saying {
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
	return append([]saying(nil), list...)
}

// withdrawn takes such a message, and tells whether it is one.
func (n *Node) withdrawn(msg *van.Message) bool {
	if msg.Control.Cmd != van.Heartbeat || len(msg.Control.Nodes) > 0 || !bytes.HasPrefix(msg.Body, []byte(withdrawPrefix)) {
		return false
	}
	p := n.processes.of(msg.Sender)
	from, to := msg.Incarnations()
	w, app := Withdrawn{Sender: msg.Sender}, 0
	k, err := fmt.Sscanf(string(msg.Body[len(withdrawPrefix):min(len(msg.Body), 128)]), "%d %d %d %d", &app, &w.Customer, &w.First, &w.Count)
	switch {
	case from != p.incarnation || to != n.incarnation || p.incarnation == 0:
		n.dropStale(msg, p)
	case err != nil || k != 4 || w.First < 0 || w.Count < 1:
		n.log.Warn("dropped a control message", "err", &van.FieldError{Field: "body", Value: fmt.Sprintf("%.60q", msg.Body), Want: "application, customer, first timestamp and count"},
			"from", n.PeerName(msg.Sender))
	default:
		n.apps.withdraw(n, app, w, p.epoch)
	}
	return true
}

// rememberWithdrawn is how long what was given up is remembered, since its messages may
// still be on their way, or wait behind a slow handler, and how much of each sender.
const (
	rememberWithdrawn = 5 * time.Minute
	maxWithdrawn      = 1024
)

// withdrawals are what senders have given up lately. Each sender has a list and a lock of
// its own: every request is looked up here.
type withdrawals struct {
	mu sync.Mutex // of changes of by
	by atomic.Pointer[map[int]*givenUp]
}

// givenUp is what one sender has given up, oldest first.
type givenUp struct {
	count atomic.Int32 // of list: most of the time there are none
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

// expire forgets what is too old, and keeps at most so many. g.mu is held.
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
// given it up, is not lost, and was not replaced by another process. epoch is that of
// the request's message.
func (c *Customer) Wanted(sender int, epoch uint32, customer, ts int32) bool {
	p := c.node.processes.of(sender)
	return p.epoch == epoch && p.lost == nil && !c.withdrawals.has(sender, epoch, customer, ts)
}

// OnWithdrawn makes f the function that learns what senders have given up; Wanted knows
// of it by then. f must not block.
func (c *Customer) OnWithdrawn(f func(Withdrawn)) { c.onWithdrawn.Store(&f) }

// withdraw finds the customer, and forgets what is kept for one that does not exist yet.
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
