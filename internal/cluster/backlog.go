package cluster

// A customer's messages that arrived before it was made, and requests whose handlers may block a Poll.

import (
	"sync"
	"sync/atomic"

	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/van"
)

// weight is the number of bytes of a message that count against budgets.
func weight(m *van.Message) int {
	return m.PayloadLen() + len(m.Body) + len(m.Parts)*van.PartBytes + 512
}

// overfull counts the queues that Polls have filled beyond their limits. No Poll begins while there is one.
type overfull struct{ queues atomic.Int32 }

func (o *overfull) any() bool { return o.queues.Load() > 0 }

// set counts a queue, or no longer. counted tells whether it is counted; the queue's lock guards it.
func (o *overfull) set(counted *bool, over bool) {
	switch {
	case over && !*counted:
		o.queues.Add(1)
	case *counted && !over:
		o.queues.Add(-1)
	}
	*counted = over
}

// backlogs has, by sender, the messages that arrived before their customer was made, the requests of deliverOnBacklog, and later
// messages, which must not overtake them.
type backlogs struct {
	self     *nodeInfo
	overfull *overfull
	refuse   func(*van.Message) // called with the messages that the end drops, without mu
	active   atomic.Bool        // queues is not empty
	mu       sync.Mutex
	queues   map[int]*backlog
	changed  sync.Cond // a backlog has shrunk, or ended is set
	ended    bool      // the customer is closed, or the node leaves
}

// backlog is the queue of one sender.
type backlog struct {
	queue []*van.Message
	bytes int
	over  bool // counted in overfull
}

func (s *backlogs) init(self *nodeInfo, over *overfull, refuse func(*van.Message)) {
	s.self, s.overfull, s.refuse = self, over, refuse
	s.changed.L = &s.mu
}

// fill stores the messages that were queued for the customer, and returns the senders. It is called before enqueue.
func (s *backlogs) fill(kept []queuedRequest) (senders []int) {
	if len(kept) == 0 {
		return nil
	}
	s.queues = map[int]*backlog{}
	for _, e := range kept {
		b := s.queues[e.msg.Sender]
		if b == nil {
			b = &backlog{}
			s.queues[e.msg.Sender] = b
			senders = append(senders, e.msg.Sender)
		}
		b.queue = append(b.queue, e.msg)
		b.bytes += weight(e.msg)
	}
	s.active.Store(true)
	return senders
}

// enqueue queues msg after its sender's backlog, if there is one, or refuses it after end. It reports whether it did either. While the
// backlog has STEPAF_RECV_BUDGET_PEER bytes or more it blocks, and with it the receiving of that sender's messages. In a Poll it does
// not block, but the backlog counts as overfull, see apps.tryEnqueue.
func (s *backlogs) enqueue(msg *van.Message) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for limit, paused := s.self.cfg.RecvBudgetPeer, false; ; paused = true {
		b := s.queues[msg.Sender]
		switch {
		case s.ended:
			s.mu.Unlock()
			s.refuse(msg)
			s.mu.Lock()
			return true
		case b == nil:
			return false
		case limit <= 0 || b.bytes < limit || msg.InPoll || failpoint.On("recv-budget"):
			if limit > 0 && b.bytes >= limit {
				s.overfull.set(&b.over, true)
			}
			b.queue = append(b.queue, msg.Retain())
			b.bytes += weight(msg)
			return true
		}
		if !paused {
			s.self.pausedRead(msg.Sender, b.bytes, "a peer is not read for now: its earlier messages wait for a handler")
		}
		s.changed.Wait()
	}
}

// enqueueOrStart queues msg without a limit. If its sender had no backlog, it makes one and calls start, which must run deliverFrom on
// another goroutine. After end it refuses msg.
func (s *backlogs) enqueueOrStart(msg *van.Message, start func()) {
	s.mu.Lock()
	if s.ended {
		s.mu.Unlock()
		s.refuse(msg)
		return
	}
	defer s.mu.Unlock()
	b := s.queues[msg.Sender]
	if b == nil {
		if s.queues == nil {
			s.queues = map[int]*backlog{}
		}
		b = &backlog{}
		s.queues[msg.Sender] = b
		s.active.Store(true)
		start()
	}
	b.queue = append(b.queue, msg.Retain())
	b.bytes += weight(msg)
}

// next takes the oldest message of a sender's backlog. When none is left, it removes the backlog and returns nil.
func (s *backlogs) next(sender int) *van.Message {
	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.changed.Broadcast()
	b := s.queues[sender]
	if len(b.queue) == 0 {
		delete(s.queues, sender)
		s.active.Store(len(s.queues) > 0)
		return nil
	}
	msg := b.queue[0]
	b.queue[0] = nil
	b.queue = b.queue[1:]
	b.bytes -= weight(msg)
	s.overfull.set(&b.over, b.over && b.bytes >= s.self.cfg.RecvBudgetPeer)
	return msg
}

// end ends waits in enqueue, and refuses the messages of all backlogs.
func (s *backlogs) end() {
	var rest []*van.Message
	s.mu.Lock()
	s.ended = true
	s.changed.Broadcast()
	for _, b := range s.queues {
		rest = append(rest, b.queue...)
		b.queue, b.bytes = nil, 0
		s.overfull.set(&b.over, false)
	}
	s.mu.Unlock()
	for _, msg := range rest {
		s.refuse(msg)
		msg.Release()
	}
}
