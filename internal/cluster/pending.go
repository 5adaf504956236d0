package cluster

// Pending messages: data messages of processes whose record has not arrived. Their limits in time and number, and
// their delivery.

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

// pendingTime is the time for which data of an unknown process is queued: its first messages may arrive before the
// scheduler's record of it.
const pendingTime = 10 * time.Second

// pendingMessages has the data messages of processes that this node does not know yet, in order of arrival.
type pendingMessages struct {
	self      *nodeInfo
	processes *processes
	apps      *apps

	mu            sync.Mutex
	changed       sync.Cond // a message was delivered, or closed was set
	queues        map[int]*pendingQueue
	bytes         int
	expiry        *time.Timer
	closed        bool
	dropped       logx.Sparse
	cancellations []pendingCancel // oldest first
}

// pendingCancel is a cancellation of a process that this node does not know yet. The canceled requests may be queued
// here, or by the transport.
type pendingCancel struct {
	incarnation uint32
	app         int
	w           Canceled
	at          uint64
}

// pendingQueue has the messages that arrived under one node id.
type pendingQueue struct {
	queue      []queuedRequest
	bytes      int
	delivering bool // deliverAll is running
}

func (s *pendingMessages) init(self *nodeInfo, processes *processes, apps *apps) {
	s.self, s.processes, s.apps = self, processes, apps
	s.changed.L = &s.mu
	s.queues = map[int]*pendingQueue{}
}

// handleCancel handles msg if it is a notice of canceled requests, and reports whether it is.
func (s *pendingMessages) handleCancel(msg *van.Message) bool {
	if msg.Control.Cmd != van.Heartbeat || len(msg.Control.Nodes) > 0 || !bytes.HasPrefix(msg.Body, []byte(cancelPrefix)) {
		return false
	}
	p := s.processes.of(msg.Sender)
	from, to := msg.Incarnations()
	w, app := Canceled{Sender: msg.Sender}, 0
	k, err := fmt.Sscanf(string(msg.Body[len(cancelPrefix):min(len(msg.Body), 128)]), "%d %d %d %d", &app, &w.Customer, &w.First, &w.Count)
	valid := err == nil && k == 4 && w.First >= 0 && w.Count >= 1
	switch {
	case from == 0 || to != s.self.incarnation:
		s.processes.logDropped(msg, p)
	case !valid:
		s.self.droppedControl(msg.Sender, &van.FieldError{Field: "body", Value: fmt.Sprintf("%.60q", msg.Body), Want: "application, customer, first timestamp and count"})
	case from == p.incarnation && !p.hasPending:
		s.apps.cancel(app, w, p.epoch)
	case !s.addCancel(from, app, w):
		s.processes.logDropped(msg, p)
	}
	return true
}

// addCancel stores the cancellation of a process that this node does not know yet, or whose messages are being
// delivered. It returns false if the process cannot be a member.
func (s *pendingMessages) addCancel(incarnation uint32, app int, w Canceled) bool {
	s.processes.mu.Lock()
	defer s.processes.mu.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || !s.self.mayJoin(w.Sender) {
		return false
	}
	now := clock.Now()
	for len(s.cancellations) > 0 && (len(s.cancellations) >= maxCancellations || time.Duration(now-s.cancellations[0].at) > 2*pendingTime) {
		s.cancellations = s.cancellations[1:]
	}
	s.cancellations = append(s.cancellations, pendingCancel{incarnation, app, w, now})
	if p := s.processes.of(w.Sender); p.incarnation == incarnation { // it has become known meanwhile
		s.processes.change(w.Sender, func(p *process) { p.hasPending = true })
		if p.lost == nil {
			s.startDelivery(w.Sender)
		}
	}
	return true
}

// takeCancels removes and returns the cancellations of a process. mu is held.
func (s *pendingMessages) takeCancels(id int, incarnation uint32) (taken []pendingCancel) {
	s.cancellations = slices.DeleteFunc(s.cancellations, func(x pendingCancel) bool {
		mine := x.w.Sender == id && x.incarnation == incarnation
		if mine {
			taken = append(taken, x)
		}
		return mine
	})
	return taken
}

// has reports whether messages or cancellations of that process are queued. mu is held.
func (s *pendingMessages) has(id int, incarnation uint32) bool {
	if slices.ContainsFunc(s.cancellations, func(x pendingCancel) bool { return x.w.Sender == id && x.incarnation == incarnation }) {
		return true
	}
	v := s.queues[id]
	return v != nil && incarnation != 0 && slices.ContainsFunc(v.queue, func(e queuedRequest) bool {
		from, _ := e.msg.Incarnations()
		return from == incarnation
	})
}

// enqueue queues or drops msg and returns true. It returns false if msg can be delivered: its sender has become
// known, and no message of it is queued.
func (s *pendingMessages) enqueue(msg *van.Message) bool {
	size := weight(msg)
	s.mu.Lock()
	defer s.mu.Unlock()
	for paused := false; ; {
		p := s.processes.of(msg.Sender)
		switch s.processes.check(msg, p) {
		case deliver:
			return false
		case drop:
			s.processes.logDropped(msg, p)
			return true
		}
		v := s.queues[msg.Sender]
		if v == nil {
			v = &pendingQueue{} // entered below, with its first message
		}
		switch {
		case s.closed:
			return true
		case p.hasPending && v.bytes+size > s.self.cfg.RecvBudgetPeer && len(v.queue) > 0:
			if !paused {
				paused = true
				s.self.pausedRead(msg.Sender, v.bytes, "a peer is not read for now: its messages from before it was known are still queued")
			}
			s.changed.Wait()
			continue
		case !p.hasPending && (!s.self.mayJoin(msg.Sender) || len(v.queue) >= maxQueuedRequests || s.bytes+size > s.self.cfg.StrangerBudget):
			s.self.counts.strangers.add(msg)
			if count, show := s.dropped.Next(); show {
				s.self.log.Warn("dropped a message of a process that this node does not know", "from", s.self.peerName(msg.Sender), "message", msg.Meta.String(),
					"queued", len(v.queue), "bytes", s.bytes, "limit (STEPAF_STRANGER_BUDGET)", s.self.cfg.StrangerBudget, "dropped so far", count)
			}
			return true
		}
		s.queues[msg.Sender] = v
		v.queue = append(v.queue, queuedRequest{msg.Retain(), clock.Now()})
		v.bytes += size
		s.bytes += size
		if s.expiry == nil {
			s.expireIn(pendingTime)
		}
		return true
	}
}

// shift takes the oldest message of v. mu is held.
func (s *pendingMessages) shift(v *pendingQueue) *van.Message {
	msg := v.queue[0].msg
	v.queue[0] = queuedRequest{}
	v.queue = v.queue[1:]
	v.bytes -= weight(msg)
	s.bytes -= weight(msg)
	return msg
}

// expireIn drops, after d, the messages that have been queued too long. mu is held.
func (s *pendingMessages) expireIn(d time.Duration) {
	s.expiry = time.AfterFunc(d, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.expiry = nil
		now, wait, gone := clock.Now(), time.Duration(-1), 0
		for id, v := range s.queues {
			if v.delivering {
				continue
			}
			for len(v.queue) > 0 && time.Duration(now-v.queue[0].queuedAt) >= pendingTime {
				msg := s.shift(v)
				s.self.counts.strangers.add(msg)
				msg.Release()
				gone++
			}
			if len(v.queue) == 0 {
				delete(s.queues, id)
			} else if left := pendingTime - time.Duration(now-v.queue[0].queuedAt); wait < 0 || left < wait {
				wait = left
			}
		}
		if gone > 0 {
			s.self.log.Warn("dropped messages of processes that did not become members", "messages", gone, "limit", pendingTime)
		}
		if wait >= 0 && !s.closed {
			s.expireIn(max(wait, time.Millisecond))
		}
	})
}

// setProcess records the process that has id; incarnation 0 is a C++ StepMesh node.
func (s *pendingMessages) setProcess(id int, incarnation uint32, replaced bool) {
	s.processes.mu.Lock()
	defer s.processes.mu.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.processes.change(id, func(p *process) {
		if p.known && p.incarnation != incarnation || replaced && incarnation == 0 {
			p.epoch++
		}
		p.known, p.incarnation = true, incarnation
		p.hasPending = s.has(id, incarnation)
	})
	if s.processes.of(id).lost == nil { // otherwise deliverPending does it, when answers can be sent
		s.startDelivery(id)
	}
}

// deliverPending delivers the messages that were queued until node id could be answered.
func (s *pendingMessages) deliverPending(id int) {
	s.processes.mu.Lock()
	defer s.processes.mu.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.startDelivery(id)
}

// startDelivery starts deliverAll if messages are queued. processes.mu and mu are held.
func (s *pendingMessages) startDelivery(id int) {
	v := s.queues[id]
	if !s.processes.of(id).hasPending || v != nil && v.delivering {
		return
	}
	if v == nil {
		v = &pendingQueue{}
		s.queues[id] = v
	}
	v.delivering = true
	go s.deliverAll(id)
}

// deliverAll applies the cancellations of node id and delivers its queued messages, including those that are queued
// meanwhile.
func (s *pendingMessages) deliverAll(id int) {
	for {
		s.processes.mu.Lock()
		s.mu.Lock()
		v := s.queues[id]
		if given := s.takeCancels(id, s.processes.of(id).incarnation); len(given) > 0 {
			epoch := s.processes.of(id).epoch
			s.mu.Unlock()
			s.processes.mu.Unlock()
			for _, x := range given {
				s.apps.cancel(x.app, x.w, epoch)
			}
			continue
		}
		if v == nil || len(v.queue) == 0 || s.closed {
			if v != nil {
				v.delivering = false
				if len(v.queue) == 0 {
					delete(s.queues, id)
				}
			}
			s.processes.change(id, func(p *process) { p.hasPending = false })
			s.changed.Broadcast()
			s.mu.Unlock()
			s.processes.mu.Unlock()
			return
		}
		msg := s.shift(v)
		s.changed.Broadcast()
		s.mu.Unlock()
		s.processes.mu.Unlock()
		p := *s.processes.of(id)
		p.hasPending = false
		switch s.processes.check(msg, &p) {
		case deliver:
			s.apps.receive(msg, &p)
		default: // of an earlier process
			s.processes.logDropped(msg, &p)
		}
		msg.Release()
	}
}

// close drops the queued messages and ends waits in enqueue.
func (s *pendingMessages) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	if s.expiry != nil {
		s.expiry.Stop()
	}
	for _, v := range s.queues {
		for len(v.queue) > 0 {
			s.shift(v).Release()
		}
	}
	s.changed.Broadcast()
}
