package postoffice

// Data messages of processes whose record has not arrived: how long and how many are
// held, and their delivery.

import (
	"slices"
	"sync"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/internal/logx"
	"github.com/stepaf/stepaf-go/van"
)

// strangerTime is how long data of an unknown process is held: its first messages may
// arrive before the scheduler's news that it has joined.
const strangerTime = 10 * time.Second

// strangers holds data messages of processes that this node does not know yet, in order
// of arrival.
type strangers struct {
	mu      sync.Mutex
	room    sync.Cond // a message was delivered, or closed was set
	held    map[int]*heldQueue
	bytes   int
	expiry  *time.Timer
	closed  bool
	refused logx.Sparse
	givenUp []strangerWithdrawal // oldest first
}

// strangerWithdrawal is what a process that this node does not know yet has given up. Its
// requests may be held here, or by the transport.
type strangerWithdrawal struct {
	incarnation uint32
	app         int
	w           Withdrawn
	at          uint64
}

// heldQueue has the messages that came under one node id.
type heldQueue struct {
	queue   []early
	bytes   int
	running bool // catchUp is delivering it
}

func (s *strangers) init() {
	s.room.L = &s.mu
	s.held = map[int]*heldQueue{}
}

// giveUp notes what a process has given up that this node does not know yet, or whose
// messages are being delivered. It returns false if the process cannot be a member.
func (s *strangers) giveUp(n *Node, incarnation uint32, app int, w Withdrawn) bool {
	n.lostMu.Lock()
	defer n.lostMu.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || !n.mayJoin(w.Sender) {
		return false
	}
	now := clock.Now()
	for len(s.givenUp) > 0 && (len(s.givenUp) >= maxWithdrawn || time.Duration(now-s.givenUp[0].at) > 2*strangerTime) {
		s.givenUp = s.givenUp[1:]
	}
	s.givenUp = append(s.givenUp, strangerWithdrawal{incarnation, app, w, now})
	if p := n.processes.of(w.Sender); p.incarnation == incarnation { // it has become known meanwhile
		n.processes.change(w.Sender, func(p *process) { p.behind = true })
		if p.lost == nil {
			n.catchUpLocked(w.Sender)
		}
	}
	return true
}

// takeGivenUp returns and forgets what a process has given up. mu is held.
func (s *strangers) takeGivenUp(id int, incarnation uint32) (taken []strangerWithdrawal) {
	s.givenUp = slices.DeleteFunc(s.givenUp, func(x strangerWithdrawal) bool {
		mine := x.w.Sender == id && x.incarnation == incarnation
		if mine {
			taken = append(taken, x)
		}
		return mine
	})
	return taken
}

// waits tells whether something of that process is held. mu is held.
func (s *strangers) waits(id int, incarnation uint32) bool {
	for _, x := range s.givenUp {
		if x.w.Sender == id && x.incarnation == incarnation {
			return true
		}
	}
	if v := s.held[id]; v != nil && incarnation != 0 {
		for _, e := range v.queue {
			if from, _ := e.msg.Incarnations(); from == incarnation {
				return true
			}
		}
	}
	return false
}

// hold keeps or drops msg and returns true. It returns false if msg can be delivered: its
// sender has become known, and no message of it is held.
func (n *Node) hold(msg *van.Message) bool {
	s := &n.strangers
	size := weight(msg)
	s.mu.Lock()
	defer s.mu.Unlock()
	for {
		p := n.processes.of(msg.Sender)
		switch n.judge(msg, p) {
		case accept:
			return false
		case discard:
			n.dropStale(msg, p)
			return true
		}
		v := s.held[msg.Sender]
		if v == nil {
			v = &heldQueue{} // entered below, with its first message
		}
		switch {
		case s.closed:
			return true
		case p.behind && v.bytes+size > n.cfg.RecvBudgetPeer && len(v.queue) > 0:
			s.room.Wait()
			continue
		case !p.behind && (!n.mayJoin(msg.Sender) || len(v.queue) >= maxEarly || s.bytes+size > n.cfg.StrangerBudget && !failpoint.On("stranger-budget")):
			if count, show := s.refused.Next(); show {
				n.log.Warn("dropped a message of a process that this node does not know", "from", n.PeerName(msg.Sender), "message", msg.Meta.String(),
					"kept", len(v.queue), "bytes", s.bytes, "limit (STEPAF_STRANGER_BUDGET)", n.cfg.StrangerBudget, "dropped so far", count)
			}
			return true
		}
		s.held[msg.Sender] = v
		v.queue = append(v.queue, early{msg.Retain(), clock.Now()})
		v.bytes += size
		s.bytes += size
		if s.expiry == nil {
			s.expireIn(n, strangerTime)
		}
		return true
	}
}

// shift takes the oldest message of v. mu is held.
func (s *strangers) shift(v *heldQueue) *van.Message {
	msg := v.queue[0].msg
	v.queue[0] = early{}
	v.queue = v.queue[1:]
	v.bytes -= weight(msg)
	s.bytes -= weight(msg)
	return msg
}

// expireIn drops, after d, the messages that have been held too long. mu is held.
func (s *strangers) expireIn(n *Node, d time.Duration) {
	s.expiry = time.AfterFunc(d, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.expiry = nil
		now, wait, gone := clock.Now(), time.Duration(-1), 0
		for id, v := range s.held {
			if v.running {
				continue
			}
			for len(v.queue) > 0 && time.Duration(now-v.queue[0].at) >= strangerTime {
				s.shift(v).Release()
				gone++
			}
			if len(v.queue) == 0 {
				delete(s.held, id)
			} else if left := strangerTime - time.Duration(now-v.queue[0].at); wait < 0 || left < wait {
				wait = left
			}
		}
		if gone > 0 {
			n.log.Warn("dropped messages of processes that did not become members", "messages", gone, "limit", strangerTime)
		}
		if wait >= 0 && !s.closed {
			s.expireIn(n, max(wait, time.Millisecond))
		}
	})
}

// catchUp forgets what node id has given up, and delivers its held messages, including
// those that are queued meanwhile.
func (n *Node) catchUp(id int) {
	s := &n.strangers
	for {
		n.lostMu.Lock()
		s.mu.Lock()
		v := s.held[id]
		if given := s.takeGivenUp(id, n.processes.of(id).incarnation); len(given) > 0 {
			epoch := n.processes.of(id).epoch
			s.mu.Unlock()
			n.lostMu.Unlock()
			for _, x := range given {
				n.apps.withdraw(n, x.app, x.w, epoch)
			}
			continue
		}
		if v == nil || len(v.queue) == 0 || s.closed {
			if v != nil {
				v.running = false
				if len(v.queue) == 0 {
					delete(s.held, id)
				}
			}
			n.processes.change(id, func(p *process) { p.behind = false })
			s.room.Broadcast()
			s.mu.Unlock()
			n.lostMu.Unlock()
			return
		}
		msg := s.shift(v)
		s.room.Broadcast()
		s.mu.Unlock()
		n.lostMu.Unlock()
		p := *n.processes.of(id)
		p.behind = false
		switch n.judge(msg, &p) {
		case accept:
			n.deliver(msg, &p)
		default: // of an earlier process
			n.dropStale(msg, &p)
		}
		msg.Release()
	}
}

// close drops the held messages and ends waits in hold.
func (s *strangers) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	if s.expiry != nil {
		s.expiry.Stop()
	}
	for _, v := range s.held {
		for len(v.queue) > 0 {
			s.shift(v).Release()
		}
	}
	s.room.Broadcast()
}
