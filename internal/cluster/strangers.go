package cluster

// Data messages of processes whose record has not arrived: how long and how many are
// held, and their delivery.

import (
	"bytes"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/internal/logx"
	"github.com/stepaf/stepaf-go/van"
)

// strangerTime is how long data of an unknown process is held: its first messages may
// arrive before the scheduler's news that it has joined.
const strangerTime = 10 * time.Second

// strangers holds data messages of processes that this node does not know yet, in order
// of arrival.
type strangers struct {
	self      *identity
	processes *processes
	apps      *apps

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

func (s *strangers) init(self *identity, processes *processes, apps *apps) {
	s.self, s.processes, s.apps = self, processes, apps
	s.room.L = &s.mu
	s.held = map[int]*heldQueue{}
}

// withdrawn handles msg if it is such a notice, and tells whether it is.
func (s *strangers) withdrawn(msg *van.Message) bool {
	if msg.Control.Cmd != van.Heartbeat || len(msg.Control.Nodes) > 0 || !bytes.HasPrefix(msg.Body, []byte(withdrawPrefix)) {
		return false
	}
	p := s.processes.of(msg.Sender)
	from, to := msg.Incarnations()
	w, app := Withdrawn{Sender: msg.Sender}, 0
	k, err := fmt.Sscanf(string(msg.Body[len(withdrawPrefix):min(len(msg.Body), 128)]), "%d %d %d %d", &app, &w.Customer, &w.First, &w.Count)
	valid := err == nil && k == 4 && w.First >= 0 && w.Count >= 1
	switch {
	case from == 0 || to != s.self.incarnation:
		s.processes.dropStale(msg, p)
	case !valid:
		s.self.droppedControl(msg.Sender, &van.FieldError{Field: "body", Value: fmt.Sprintf("%.60q", msg.Body), Want: "application, customer, first timestamp and count"})
	case from == p.incarnation && !p.behind:
		s.apps.withdraw(app, w, p.epoch)
	case !s.giveUp(from, app, w):
		s.processes.dropStale(msg, p)
	}
	return true
}

// giveUp notes what a process has given up that this node does not know yet, or whose
// messages are being delivered. It returns false if the process cannot be a member.
func (s *strangers) giveUp(incarnation uint32, app int, w Withdrawn) bool {
	s.processes.mu.Lock()
	defer s.processes.mu.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || !s.self.mayJoin(w.Sender) {
		return false
	}
	now := clock.Now()
	for len(s.givenUp) > 0 && (len(s.givenUp) >= maxWithdrawn || time.Duration(now-s.givenUp[0].at) > 2*strangerTime) {
		s.givenUp = s.givenUp[1:]
	}
	s.givenUp = append(s.givenUp, strangerWithdrawal{incarnation, app, w, now})
	if p := s.processes.of(w.Sender); p.incarnation == incarnation { // it has become known meanwhile
		s.processes.change(w.Sender, func(p *process) { p.behind = true })
		if p.lost == nil {
			s.catchUpLocked(w.Sender)
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
	if slices.ContainsFunc(s.givenUp, func(x strangerWithdrawal) bool { return x.w.Sender == id && x.incarnation == incarnation }) {
		return true
	}
	v := s.held[id]
	return v != nil && incarnation != 0 && slices.ContainsFunc(v.queue, func(e early) bool {
		from, _ := e.msg.Incarnations()
		return from == incarnation
	})
}

// hold keeps or drops msg and returns true. It returns false if msg can be delivered: its
// sender has become known, and no message of it is held.
func (s *strangers) hold(msg *van.Message) bool {
	size := weight(msg)
	s.mu.Lock()
	defer s.mu.Unlock()
	for paused := false; ; {
		p := s.processes.of(msg.Sender)
		switch s.processes.judge(msg, p) {
		case accept:
			return false
		case discard:
			s.processes.dropStale(msg, p)
			return true
		}
		v := s.held[msg.Sender]
		if v == nil {
			v = &heldQueue{} // entered below, with its first message
		}
		switch {
		case s.closed:
			return true
		case p.behind && v.bytes+size > s.self.cfg.RecvBudgetPeer && len(v.queue) > 0:
			if !paused {
				paused = true
				s.self.pausedRead(msg.Sender, v.bytes, "a peer is not read for now: what it sent before it was known is not taken")
			}
			s.room.Wait()
			continue
		case !p.behind && (!s.self.mayJoin(msg.Sender) || len(v.queue) >= maxEarly || s.bytes+size > s.self.cfg.StrangerBudget):
			s.self.counts.strangers.add(msg)
			if count, show := s.refused.Next(); show {
				s.self.log.Warn("dropped a message of a process that this node does not know", "from", s.self.peerName(msg.Sender), "message", msg.Meta.String(),
					"kept", len(v.queue), "bytes", s.bytes, "limit (STEPAF_STRANGER_BUDGET)", s.self.cfg.StrangerBudget, "dropped so far", count)
			}
			return true
		}
		s.held[msg.Sender] = v
		v.queue = append(v.queue, early{msg.Retain(), clock.Now()})
		v.bytes += size
		s.bytes += size
		if s.expiry == nil {
			s.expireIn(strangerTime)
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
func (s *strangers) expireIn(d time.Duration) {
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
				msg := s.shift(v)
				s.self.counts.strangers.add(msg)
				msg.Release()
				gone++
			}
			if len(v.queue) == 0 {
				delete(s.held, id)
			} else if left := strangerTime - time.Duration(now-v.queue[0].at); wait < 0 || left < wait {
				wait = left
			}
		}
		if gone > 0 {
			s.self.log.Warn("dropped messages of processes that did not become members", "messages", gone, "limit", strangerTime)
		}
		if wait >= 0 && !s.closed {
			s.expireIn(max(wait, time.Millisecond))
		}
	})
}

// note records which process has id; incarnation 0 is a C++ StepMesh node.
func (s *strangers) note(id int, incarnation uint32, replaced bool) {
	s.processes.mu.Lock()
	defer s.processes.mu.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.processes.change(id, func(p *process) {
		if p.known && p.incarnation != incarnation || replaced && incarnation == 0 {
			p.epoch++
		}
		p.known, p.incarnation = true, incarnation
		p.behind = s.waits(id, incarnation)
	})
	if s.processes.of(id).lost == nil { // otherwise admit does it, when answers can be sent
		s.catchUpLocked(id)
	}
}

// admit delivers the messages that were held until node id could be answered.
func (s *strangers) admit(id int) {
	s.processes.mu.Lock()
	defer s.processes.mu.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.catchUpLocked(id)
}

// catchUpLocked starts catchUp if messages are held. processes.mu and mu are held.
func (s *strangers) catchUpLocked(id int) {
	v := s.held[id]
	if !s.processes.of(id).behind || v != nil && v.running {
		return
	}
	if v == nil {
		v = &heldQueue{}
		s.held[id] = v
	}
	v.running = true
	go s.catchUp(id)
}

// catchUp forgets what node id has given up, and delivers its held messages, including
// those that are queued meanwhile.
func (s *strangers) catchUp(id int) {
	for {
		s.processes.mu.Lock()
		s.mu.Lock()
		v := s.held[id]
		if given := s.takeGivenUp(id, s.processes.of(id).incarnation); len(given) > 0 {
			epoch := s.processes.of(id).epoch
			s.mu.Unlock()
			s.processes.mu.Unlock()
			for _, x := range given {
				s.apps.withdraw(x.app, x.w, epoch)
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
			s.processes.change(id, func(p *process) { p.behind = false })
			s.room.Broadcast()
			s.mu.Unlock()
			s.processes.mu.Unlock()
			return
		}
		msg := s.shift(v)
		s.room.Broadcast()
		s.mu.Unlock()
		s.processes.mu.Unlock()
		p := *s.processes.of(id)
		p.behind = false
		switch s.processes.judge(msg, &p) {
		case accept:
			s.apps.receive(msg, &p)
		default: // of an earlier process
			s.processes.dropStale(msg, &p)
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
