package cluster

// Pending messages: data messages of processes whose record has not arrived, or to which this node has no connection yet.
// Their limits in time and number, and their delivery.

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

// pendingMessages has the data messages of processes that are not known or not connected yet, in a queue for each process. They are
// delivered when their process is known and connected, so that an application can answer and refuse them.
type pendingMessages struct {
	self      *nodeInfo
	processes *processes
	apps      *apps

	mu            sync.Mutex
	changed       sync.Cond // a message was delivered, or closed was set
	senders       map[int]*pendingSender
	bytes         int // of processes that are not members: not in the table, or replaced
	refused       int // number of queued refusals
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

// pendingMessage is a queued message. If refused is not nil, the message was beyond a limit: it has only its ids, and
// its sender gets the reason in place of an answer.
type pendingMessage struct {
	queuedRequest
	refused error
}

// pendingSender has the messages that arrived under one node id, by the incarnation of their process.
type pendingSender struct {
	queues     map[uint32]*pendingQueue // none is empty
	messages   int                      // in all queues
	delivering bool                     // deliverAll is running
}

// pendingQueue has the messages of one process.
type pendingQueue struct {
	messages []pendingMessage
	bytes    int
	over     bool // counted in apps.overfull
	member   bool // its process is in the table, so the bytes do not count in pendingMessages.bytes
}

func (s *pendingMessages) init(self *nodeInfo, processes *processes, apps *apps) {
	s.self, s.processes, s.apps = self, processes, apps
	s.changed.L = &s.mu
	s.senders = map[int]*pendingSender{}
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
	case from == p.incarnation: // the application also drops the canceled requests that are still queued here
		s.apps.cancel(app, w, p.epoch)
	case !s.addCancel(from, app, w):
		s.processes.logDropped(msg, p)
	}
	return true
}

// addCancel stores the cancellation of a process that this node does not know yet. It returns false if the process cannot be a
// member.
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
	s.deliverLate(w.Sender, incarnation)
	return true
}

// deliverLate starts another delivery of the queued messages of process id, if all its earlier messages have been delivered
// meanwhile. processes.mu and mu are held.
func (s *pendingMessages) deliverLate(id int, incarnation uint32) {
	if p := s.processes.of(id); p.incarnation == incarnation && !p.hasPending {
		s.processes.change(id, func(p *process) { p.hasPending = true })
		if p.lost == nil {
			s.startDelivery(id)
		}
	}
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
	v := s.senders[id]
	return v != nil && v.queues[incarnation] != nil
}

// enqueue queues or drops msg and returns nil. If msg can be delivered, enqueue returns the process that has sent it: the process
// has become known, and no message of it is queued. While the queue of a member exceeds STEPAF_RECV_BUDGET_PEER, enqueue blocks, but in
// a Poll the queue counts as overfull instead.
func (s *pendingMessages) enqueue(msg *van.Message) *process {
	size := weight(msg)
	s.mu.Lock()
	defer s.mu.Unlock()
	for paused := false; ; {
		p := s.processes.of(msg.Sender)
		switch s.processes.check(msg, p) {
		case deliver:
			return p
		case drop:
			s.processes.logDropped(msg, p)
			return nil
		}
		from, _ := msg.Incarnations()
		queued, bytes := 0, 0 // messages of the id, and bytes of the process
		if v := s.senders[msg.Sender]; v != nil {
			queued = v.messages
			if q := v.queues[from]; q != nil {
				bytes = q.bytes
			}
		}
		ofMember := p.hasPending && from == p.incarnation
		full := bytes+size > s.self.cfg.RecvBudgetPeer && bytes > 0
		switch {
		case s.closed:
			return nil
		case ofMember && full && msg.InPoll: // see apps.tryEnqueue
			s.apps.overfull.set(&s.senders[msg.Sender].queues[from].over, true)
		case ofMember && full:
			if !paused {
				paused = true
				s.self.pausedRead(msg.Sender, bytes, "a peer is not read for now: its messages from before it was known are still queued")
			}
			s.changed.Wait()
			continue
		case ofMember:
		case !s.self.mayJoin(msg.Sender):
			s.logDropped(msg, "the cluster has no member with that id")
			return nil
		case queued >= maxQueuedRequests:
			why := fmt.Sprintf("%d messages of it are queued already", queued)
			s.logDropped(msg, why)
			s.refuse(msg, why)
			return nil
		case s.bytes+size > s.self.cfg.StrangerBudget:
			why := fmt.Sprintf("this message has %d bytes, and %d are queued already (STEPAF_STRANGER_BUDGET=%d)", size, s.bytes, s.self.cfg.StrangerBudget)
			s.logDropped(msg, why)
			s.refuse(msg, why)
			return nil
		}
		msg.InPoll = false // deliverAll may block
		s.add(msg.Sender, pendingMessage{queuedRequest: queuedRequest{msg.Retain(), clock.Now()}})
		return nil
	}
}

// sender returns the entry of node id, which it makes if there is none. mu is held.
func (s *pendingMessages) sender(id int) *pendingSender {
	v := s.senders[id]
	if v == nil {
		v = &pendingSender{queues: map[uint32]*pendingQueue{}}
		s.senders[id] = v
	}
	return v
}

// add appends e to the queue of its process, which has sent it as node id. mu is held.
func (s *pendingMessages) add(id int, e pendingMessage) {
	v := s.sender(id)
	from, _ := e.msg.Incarnations()
	q := v.queues[from]
	if q == nil {
		q = &pendingQueue{member: s.processes.of(id).incarnation == from}
		v.queues[from] = q
	}
	q.messages = append(q.messages, e)
	s.count(v, q, e, 1)
	if s.expiry == nil {
		s.expireIn(pendingTime)
	}
}

// count adds e, a message in q, to all counts (sign 1), or subtracts it (sign -1). mu is held.
func (s *pendingMessages) count(v *pendingSender, q *pendingQueue, e pendingMessage, sign int) {
	v.messages += sign
	if e.refused != nil {
		s.refused += sign
		return
	}
	q.bytes += sign * weight(e.msg)
	if !q.member {
		s.bytes += sign * weight(e.msg)
	}
}

// droppedByVan queues the refusal of a message of a process that this node does not know: the transport has dropped it.
func (s *pendingMessages) droppedByVan(msg *van.Message, why string) {
	s.processes.mu.Lock()
	defer s.processes.mu.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed && s.self.mayJoin(msg.Sender) {
		s.refuse(msg, why)
		from, _ := msg.Incarnations()
		s.deliverLate(msg.Sender, from)
	}
}

// refuse queues a refusal in place of msg, which the caller drops, if msg is a request of a native process to this one, and fewer than
// maxQueuedRequests refusals are queued. mu is held.
func (s *pendingMessages) refuse(msg *van.Message, why string) {
	if from, to := msg.Incarnations(); !msg.Request || s.refused >= maxQueuedRequests || from == 0 || to != s.self.incarnation {
		return
	}
	ids := &van.Message{Sender: msg.Sender}
	ids.Request, ids.AppID, ids.CustomerID, ids.Timestamp = true, msg.AppID, msg.CustomerID, msg.Timestamp
	ids.SetIncarnations(msg.Incarnations())
	s.add(msg.Sender, pendingMessage{queuedRequest{ids.Retain(), clock.Now()},
		fmt.Errorf("%w: %s did not know %s yet: %s", van.ErrQueueFull, s.self.Name(), van.NodeName(msg.Sender), why)})
}

// logDropped counts a dropped message of a process that this node does not know.
func (s *pendingMessages) logDropped(msg *van.Message, why string) {
	s.self.counts.strangers.add(msg)
	if count, show := s.dropped.Next(); show {
		from, _ := msg.Incarnations()
		s.self.log.Warn("dropped a message of a process that this node does not know", "from", van.NodeName(msg.Sender), "process", fmt.Sprintf("%08x", from),
			"message", msg.Meta.String(), "why", why, "dropped so far", count)
	}
}

// shift takes the oldest message of a process of node id, which has one. mu is held.
func (s *pendingMessages) shift(id int, incarnation uint32) pendingMessage {
	v := s.senders[id]
	q := v.queues[incarnation]
	e := q.messages[0]
	q.messages[0] = pendingMessage{}
	q.messages = q.messages[1:]
	s.count(v, q, e, -1)
	s.apps.overfull.set(&q.over, q.over && len(q.messages) > 0 && q.bytes >= s.self.cfg.RecvBudgetPeer)
	if len(q.messages) == 0 {
		delete(v.queues, incarnation)
	}
	if v.messages == 0 && !v.delivering {
		delete(s.senders, id)
	}
	return e
}

// expireIn drops, after d, the messages that have been queued too long, except those of a known process to which the connection
// is being made. mu is held.
func (s *pendingMessages) expireIn(d time.Duration) {
	s.expiry = time.AfterFunc(d, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.expiry = nil
		now, wait, gone := clock.Now(), time.Duration(-1), 0
		for id, v := range s.senders {
			if p := s.processes.of(id); v.delivering || p.hasPending && s.processes.waits(id, p.epoch) { // they are, or will be, delivered
				if wait < 0 {
					wait = pendingTime
				}
				continue
			}
			for incarnation, q := range v.queues {
				for len(q.messages) > 0 && time.Duration(now-q.messages[0].queuedAt) >= pendingTime {
					e := s.shift(id, incarnation)
					if e.refused == nil {
						s.self.counts.strangers.add(e.msg)
						gone++
					}
					e.msg.Release()
				}
				if len(q.messages) == 0 {
					continue
				}
				if left := pendingTime - time.Duration(now-q.messages[0].queuedAt); wait < 0 || left < wait {
					wait = left
				}
			}
		}
		if gone > 0 {
			s.self.log.Warn("dropped messages of processes that did not become members", "messages", gone, "limit", pendingTime)
			s.changed.Broadcast()
		}
		if wait >= 0 && !s.closed {
			s.expireIn(max(wait, time.Millisecond))
		}
	})
}

// setProcess records the process that has id; incarnation 0 is a C++ StepMesh node. The messages of a new process are
// queued until deliverPending, which is called when this node has a connection to it.
func (s *pendingMessages) setProcess(id int, incarnation uint32, replaced bool) {
	s.processes.mu.Lock()
	defer s.processes.mu.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.processes.change(id, func(p *process) {
		if p.known && p.incarnation != incarnation || replaced && incarnation == 0 {
			p.epoch++
		}
		if p.incarnation != incarnation {
			p.dialed, p.connected, p.hasPending = false, false, incarnation != 0
		}
		p.known, p.incarnation = true, incarnation
	})
	if v := s.senders[id]; v != nil {
		for of, q := range v.queues {
			if q.member {
				s.bytes += q.bytes
			}
			q.member = of == incarnation
			if q.member {
				s.bytes -= q.bytes
			} else { // messages of a replaced process are not delivered, and must not stop Polls
				s.apps.overfull.set(&q.over, false)
			}
		}
	}
}

// connected records that this node has connected to node id, and delivers the messages that were queued until then. record is
// that of the connected process, or nil for the process in the table. If another process has replaced it, connected does nothing.
// If the id's former process is lost, PeerReplaced or PeerAlive follows, and delivers the messages.
func (s *pendingMessages) connected(id int, record *van.Node) {
	s.processes.mu.Lock()
	defer s.processes.mu.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case record != nil && !s.processes.has(id, record):
	case s.processes.lost(id) == nil:
		s.deliverPendingLocked(id)
	default:
		s.processes.change(id, func(p *process) { p.dialed = true })
	}
}

// alive delivers the messages that were queued while node id was lost. If another process has replaced it meanwhile, to which
// this node has not connected, PeerReplaced follows.
func (s *pendingMessages) alive(id int) {
	s.processes.mu.Lock()
	defer s.processes.mu.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.processes.of(id).dialed {
		s.deliverPendingLocked(id)
	}
}

// deliverPending delivers the messages that were queued until node id could be answered.
func (s *pendingMessages) deliverPending(id int) {
	s.processes.mu.Lock()
	defer s.processes.mu.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.deliverPendingLocked(id)
}

// deliverPendingLocked is deliverPending. processes.mu and mu are held.
func (s *pendingMessages) deliverPendingLocked(id int) {
	s.processes.change(id, func(p *process) { p.dialed, p.connected = true, true })
	s.startDelivery(id)
}

// startDelivery starts deliverAll if messages or cancellations are queued. processes.mu and mu are held.
func (s *pendingMessages) startDelivery(id int) {
	p := s.processes.of(id)
	switch v := s.senders[id]; {
	case !p.hasPending || v != nil && v.delivering:
		return
	case s.closed || !s.has(id, p.incarnation):
		s.processes.change(id, func(p *process) { p.hasPending = false })
		s.changed.Broadcast()
		return
	}
	s.sender(id).delivering = true
	s.apps.deliveries.Go(func() { s.deliverAll(id) })
}

// deliverAll applies the cancellations of node id's process and delivers its queued messages, including those that are queued
// meanwhile. If another process has replaced it and is connected, deliverAll continues with that one.
func (s *pendingMessages) deliverAll(id int) {
	for {
		s.processes.mu.Lock()
		s.mu.Lock()
		v, p := s.senders[id], *s.processes.of(id)
		given := s.takeCancels(id, p.incarnation)
		var e pendingMessage
		switch {
		case len(given) > 0:
		case !s.closed && p.connected && v.queues[p.incarnation] != nil:
			e = s.shift(id, p.incarnation)
		default:
			if v.delivering = false; v.messages == 0 {
				delete(s.senders, id)
			}
			s.processes.change(id, func(p *process) { p.hasPending = !p.connected && p.incarnation != 0 })
			s.changed.Broadcast()
			s.mu.Unlock()
			s.processes.mu.Unlock()
			return
		}
		s.changed.Broadcast()
		s.mu.Unlock()
		s.processes.mu.Unlock()
		for _, x := range given {
			s.apps.cancel(x.app, x.w, p.epoch)
		}
		switch msg := e.msg; {
		case msg == nil:
			continue
		case e.refused != nil:
			s.apps.notices.refuse(id, p.epoch, msg.AppID, msg.CustomerID, msg.Timestamp, e.refused)
		default:
			s.apps.receive(msg, &p)
		}
		e.msg.Release()
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
	for id, v := range s.senders {
		for incarnation, q := range v.queues {
			for len(q.messages) > 0 {
				s.shift(id, incarnation).msg.Release()
			}
		}
	}
	s.changed.Broadcast()
}
