package zmq

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/internal/logx"
	"github.com/stepaf/stepaf-go/van"
)

// early queues messages of replacement processes that this node does not know yet: the scheduler
// admits a replacement process before it informs this node.
type early struct {
	n    *shared
	flow *flow

	mu     sync.Mutex
	kept   []earlyMessage
	ready  []*van.Message // their processes are known by now
	count  atomic.Int32   // the length of ready
	timer  *time.Timer
	closed bool
	most   time.Duration // the limit for a message in kept
	lines  logx.Sparse

	admitTime time.Duration // the constant, except in tests
}

type earlyMessage struct {
	msg  *van.Message
	name peerName
	at   uint64
}

// keepTime is how long messages wait for the scheduler to announce their process. Postoffice uses the same
// limit for messages that a transport has handed up.
const keepTime = 10 * time.Second

// admitTime is how long messages of a process that is connected wait for Admit.
const admitTime = time.Second

// keep queues a message of a process that this node does not know as the peer yet. It
// reports false if the node knows the process by now.
func (e *early) keep(msg *van.Message, name peerName) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if c := (*e.n.peers.Load())[name.id]; c != nil && c.isOf(name) {
		if !slices.ContainsFunc(e.ready, func(m *van.Message) bool { return m.Sender == msg.Sender }) {
			return false
		}
		e.ready = append(e.ready, msg)
		e.count.Store(int32(len(e.ready)))
		return true
	}
	if e.closed {
		e.flow.left(msg)
		msg.Release()
		return true
	}
	e.kept = append(e.kept, earlyMessage{msg, name, clock.Now()})
	if e.timer == nil {
		e.timer = time.AfterFunc(e.most, e.expire)
	}
	return true
}

// admit makes c the peer, and its messages ready. It reports whether any message is ready.
func (e *early) admit(c *conn) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	id := c.who.Load().id
	e.kept = slices.DeleteFunc(e.kept, func(k earlyMessage) bool {
		if k.name != (peerName{id, c.incarnation}) {
			return false
		}
		if k.msg.Request {
			c.answers.CompareAndSwap(undecided, overRouter)
		}
		e.ready = append(e.ready, k.msg)
		return true
	})
	e.count.Store(int32(len(e.ready))) // before admitted is set, so that later messages queue after these
	c.admitted.Store(true)
	return len(e.ready) > 0
}

// next removes and returns the first ready message, or nil.
func (e *early) next() *van.Message {
	if e.count.Load() == 0 {
		return nil
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if len(e.ready) == 0 {
		return nil
	}
	msg := e.ready[0]
	e.ready = slices.Delete(e.ready, 0, 1)
	e.count.Store(int32(len(e.ready)))
	return msg
}

// expire drops messages of processes that have not become peers.
func (e *early) expire() {
	e.mu.Lock()
	defer e.mu.Unlock()
	now := clock.Now()
	e.kept = slices.DeleteFunc(e.kept, func(k earlyMessage) bool {
		c := (*e.n.peers.Load())[k.name.id]
		soon := c != nil && c.incarnation == k.name.incarnation && !c.admitted.Load() // it is about to be admitted
		if !e.closed && (soon || now-k.at < uint64(e.most)) {
			return false
		}
		if n, speak := e.lines.Next(); speak {
			e.n.log.Warn("dropped a message of a process that the scheduler did not name", "from", van.NodeName(k.name.id),
				"incarnation", fmt.Sprintf("%08x", k.name.incarnation), "message", k.msg.Meta.String(), "limit", e.most, "dropped so far", n)
		}
		e.n.stats.stale.Add(1)
		e.flow.left(k.msg)
		k.msg.Release()
		return true
	})
	e.timer = nil
	if len(e.kept) > 0 {
		e.timer = time.AfterFunc(e.most/8, e.expire)
	}
}

// close drops everything.
func (e *early) close() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.closed = true
	if e.timer != nil {
		e.timer.Stop()
	}
	for _, k := range e.kept {
		k.msg.Release()
	}
	for _, m := range e.ready {
		m.Release()
	}
	e.kept, e.ready = nil, nil
	e.count.Store(0)
}
