package postoffice

// Requests that arrive before their application exists: how many are kept, how long, and
// how they are delivered.

import (
	"fmt"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/van"
)

// maxEarly bounds the number of messages of one sender that are kept, besides the budgets
// in bytes.
const maxEarly = 4096

// earlyTime is how long they are kept when STEPAF_START_TIMEOUT is no limit.
const earlyTime = 300 * time.Second

// early is a request for an application that does not exist yet.
type early struct {
	msg *van.Message
	at  uint64 // clock.Now
}

// account is how much is kept of one sender.
type account struct{ messages, bytes int }

// weight estimates the memory that a message takes, in bytes.
func weight(m *van.Message) int { return m.PayloadLen() + len(m.Body) + 512 }

// keep stores a request for an application that does not exist yet. It returns the
// customer if it has been made meanwhile.
func (a *apps) keep(n *Node, k appKey, msg *van.Message) *Customer {
	a.mu.Lock()
	defer a.mu.Unlock()
	if c := (*a.table.Load())[k]; c != nil {
		return c
	}
	if a.closed {
		return nil
	}
	if !msg.Request {
		if count, show := a.noApp.Next(); show {
			n.log.Info("dropped an answer", "err", errNoApp, "from", van.NodeName(msg.Sender), "message", msg.Meta.String(), "dropped so far", count)
		}
		return nil
	}
	if why := a.full(n, msg); why != "" {
		if count, show := a.tooMany.Next(); show {
			n.log.Warn("dropped a request for an application that this node does not have: "+why, "err", errNoApp,
				"from", van.NodeName(msg.Sender), "message", msg.Meta.String(), "kept", a.messages, "bytes", a.bytes, "dropped so far", count)
		}
		return nil
	}
	if a.messages == 0 {
		n.log.Info("keeping requests until their application is made", "app", k.app, "customer", k.customer)
		a.expireIn(n, n.earlyTime())
	}
	a.early[k] = append(a.early[k], early{msg.Retain(), clock.Now()})
	a.count(msg, 1)
	return nil
}

// full returns why msg cannot be kept, or "". a.mu is held. The loss of a sender is noted
// before peerLost takes a.mu: what is kept in spite of this check is dropped there.
func (a *apps) full(n *Node, msg *van.Message) string {
	if n.lost(msg.Sender) != nil {
		return "its sender has been lost"
	}
	size, of := weight(msg), a.by[msg.Sender]
	what, limit, used := "STEPAF_RECV_BUDGET_PEER", n.cfg.RecvBudgetPeer, of.bytes
	if !n.processes.of(msg.Sender).known {
		if !n.mayJoin(msg.Sender) {
			return "its sender is no member of the cluster"
		}
		what, limit, used = "STEPAF_STRANGER_BUDGET", n.cfg.StrangerBudget, a.bytes
		if failpoint.On("stranger-budget") {
			limit = 0
		}
	}
	switch {
	case of.messages >= maxEarly:
		return fmt.Sprintf("%d of its sender are kept already", of.messages)
	case limit > 0 && used+size > limit:
		return fmt.Sprintf("%d bytes are kept already (%s=%d)", used, what, limit)
	case n.cfg.RecvBudget > 0 && a.bytes+size > n.cfg.RecvBudget:
		return fmt.Sprintf("%d bytes are kept already (STEPAF_RECV_BUDGET=%d)", a.bytes, n.cfg.RecvBudget)
	}
	return ""
}

// mayJoin tells whether a cluster of this size has a node with that id.
func (n *Node) mayJoin(id int) bool {
	switch {
	case id == van.SchedulerID:
		return true
	case id <= van.AllNodes || id >= van.Empty:
		return false
	case van.RoleOf(id) == van.Worker:
		return van.RankOf(id) < n.NumWorkerInstances()
	default:
		return van.RankOf(id) < n.NumServers()*n.GroupSize()
	}
}

// count adds msg to the accounts (sign 1) or subtracts it (sign -1). a.mu is held.
func (a *apps) count(msg *van.Message, sign int) {
	of := a.by[msg.Sender]
	of.messages += sign
	of.bytes += sign * weight(msg)
	if a.by[msg.Sender] = of; of.messages == 0 {
		delete(a.by, msg.Sender)
	}
	a.messages += sign
	a.bytes += sign * weight(msg)
}

// forget drops the kept requests that match and returns their number. a.mu is held.
func (a *apps) forget(match func(appKey, *early) bool) (forgotten int) {
	for k, list := range a.early {
		rest := list[:0]
		for i := range list {
			if e := list[i]; match(k, &e) {
				a.count(e.msg, -1)
				e.msg.Release()
				forgotten++
			} else {
				rest = append(rest, e)
			}
		}
		clear(list[len(rest):])
		if a.early[k] = rest; len(rest) == 0 {
			delete(a.early, k)
		}
	}
	return forgotten
}

func (n *Node) earlyTime() time.Duration {
	if n.cfg.StartTimeout > 0 {
		return n.cfg.StartTimeout
	}
	return earlyTime
}

// expireIn drops, after d, the requests that have waited too long. a.mu is held.
func (a *apps) expireIn(n *Node, d time.Duration) {
	if a.expiry != nil {
		a.expiry.Stop()
	}
	a.expiry = time.AfterFunc(d, func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		limit, oldest := n.earlyTime(), uint64(0)
		var of appKey
		gone := a.forget(func(k appKey, e *early) bool {
			if time.Duration(clock.Now()-e.at) >= limit {
				of = k
				return true
			}
			if oldest == 0 || e.at < oldest {
				oldest = e.at
			}
			return false
		})
		if gone > 0 {
			n.log.Warn("gave up requests for an application that was not made", "app", of.app, "customer", of.customer,
				"requests", gone, "limit", limit, "err", errNoApp)
		}
		if a.messages > 0 && !a.closed {
			a.expireIn(n, max(limit-time.Duration(clock.Now()-oldest), time.Millisecond))
		}
	})
}

// discard drops all kept requests and keeps no more.
func (a *apps) discard() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.closed = true
	if a.expiry != nil {
		a.expiry.Stop()
	}
	a.forget(func(appKey, *early) bool { return true })
}

// backlog is the queue of one sender's messages that came before their customer was made,
// and of later ones, which must not overtake them.
type backlog struct {
	queue []*van.Message
	bytes int
}

// takeEarly gives c the requests that were kept for it. a.mu is held.
func (a *apps) takeEarly(k appKey, c *Customer) {
	kept := a.early[k]
	if len(kept) == 0 {
		return
	}
	delete(a.early, k)
	c.early = map[int]*backlog{}
	for _, e := range kept {
		a.count(e.msg, -1)
		b := c.early[e.msg.Sender]
		if b == nil {
			b = &backlog{}
			c.early[e.msg.Sender] = b
		}
		b.queue = append(b.queue, e.msg)
		b.bytes += weight(e.msg)
	}
	c.behind.Store(true)
	senders := make([]int, 0, len(c.early))
	for sender := range c.early {
		senders = append(senders, sender)
	}
	for _, sender := range senders {
		go c.catchUp(sender)
	}
}

// keepEarly queues msg behind its sender's backlog, if there is one, and reports whether
// it did. While the backlog has too many bytes it blocks, and with it the receiving of
// that sender's messages.
func (c *Customer) keepEarly(msg *van.Message) bool {
	limit := c.node.cfg.RecvBudgetPeer
	c.mu.Lock()
	defer c.mu.Unlock()
	for {
		b := c.early[msg.Sender]
		switch {
		case c.ended:
			return true
		case b == nil:
			return false
		case limit <= 0 || b.bytes < limit || failpoint.On("recv-budget"):
			b.queue = append(b.queue, msg.Retain())
			b.bytes += weight(msg)
			return true
		}
		c.room.Wait()
	}
}

// catchUp delivers the backlog of one sender. Each sender has a goroutine, so that a
// handler that blocks delays that sender only.
func (c *Customer) catchUp(sender int) {
	for {
		c.mu.Lock()
		b := c.early[sender]
		if len(b.queue) == 0 || c.ended {
			for _, msg := range b.queue {
				msg.Release()
			}
			delete(c.early, sender)
			c.behind.Store(len(c.early) > 0)
			c.room.Broadcast()
			c.mu.Unlock()
			return
		}
		msg := b.queue[0]
		b.queue[0] = nil
		b.queue = b.queue[1:]
		b.bytes -= weight(msg)
		c.room.Broadcast()
		c.mu.Unlock()
		c.deliver(msg)
		msg.Release()
	}
}

// endEarly ends waits in keepEarly and drops the backlogs.
func (c *Customer) endEarly() {
	c.mu.Lock()
	c.ended = true
	c.room.Broadcast()
	c.mu.Unlock()
}
