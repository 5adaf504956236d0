package cluster

// The queue of requests that arrive before their application exists, and its limits.

import (
	"cmp"
	"fmt"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/van"
)

// maxQueuedRequests bounds the number of queued requests of one sender, in addition to the budgets in bytes.
const maxQueuedRequests = 4096

// queueTime is the time for which they are queued when STEPAF_START_TIMEOUT is no limit.
const queueTime = 300 * time.Second

// queuedRequest is a request for an application that does not exist yet.
type queuedRequest struct {
	msg      *van.Message
	queuedAt uint64 // clock.Now
}

// usage is the number of queued messages and bytes of one sender.
type usage struct{ messages, bytes int }

// enqueue queues a request for an application that does not exist yet, or refuses it. It returns the customer if that
// has been made meanwhile.
func (a *apps) enqueue(k appKey, msg *van.Message) *Customer {
	c, why := a.tryEnqueue(k, msg)
	if why != "" {
		a.notices.refuse(msg.Sender, msg.ProcessEpoch, msg.AppID, msg.CustomerID, msg.Timestamp, fmt.Errorf("%w: %w: %s", van.ErrQueueFull, errNoApp, why))
	}
	return c
}

// tryEnqueue is enqueue, but returns the reason why the request is dropped.
func (a *apps) tryEnqueue(k appKey, msg *van.Message) (c *Customer, why string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if c := (*a.table.Load())[k]; c != nil {
		return c, ""
	}
	if a.closed {
		return nil, ""
	}
	if !msg.Request {
		if count, show := a.noApp.Next(); show {
			a.self.log.Info("dropped an answer", "err", errNoApp, "from", van.NodeName(msg.Sender), "message", msg.Meta.String(), "dropped so far", count)
		}
		return nil, ""
	}
	if a.endingCall != "" {
		a.refuseFinished(msg)
		return nil, ""
	}
	if why := a.whyFull(msg); why != "" {
		a.self.counts.early.add(msg)
		if count, show := a.tooMany.Next(); show {
			a.self.log.Warn("dropped a request for an application that this node does not have: "+why, "err", errNoApp,
				"from", van.NodeName(msg.Sender), "message", msg.Meta.String(), "queued", a.messages, "bytes", a.bytes, "dropped so far", count)
		}
		return nil, why
	}
	if a.messages == 0 {
		a.self.log.Info("queueing requests until their application is made", "app", k.app, "customer", k.customer)
		a.expireIn(a.queueLimit())
	}
	a.queued[k] = append(a.queued[k], queuedRequest{msg.Retain(), clock.Now()})
	a.count(msg, 1)
	return nil, ""
}

// whyFull returns the reason why msg cannot be queued, or "". The first message of a member may be longer than
// STEPAF_RECV_BUDGET_PEER: it could never be received otherwise. a.mu is held. The loss of a sender is recorded
// before peerLost takes a.mu: a message that is queued in spite of this check is dropped there.
func (a *apps) whyFull(msg *van.Message) string {
	if a.processes.lost(msg.Sender) != nil {
		return "its sender has been lost"
	}
	size, of := weight(msg), a.usage[msg.Sender]
	what, limit, used := "STEPAF_RECV_BUDGET_PEER", a.self.cfg.RecvBudgetPeer, of.bytes
	member := a.processes.of(msg.Sender).known
	if !member {
		if !a.self.mayJoin(msg.Sender) {
			return "its sender is no member of the cluster"
		}
		what, limit, used = "STEPAF_STRANGER_BUDGET", a.self.cfg.StrangerBudget, a.bytes
	}
	switch {
	case of.messages >= maxQueuedRequests:
		return fmt.Sprintf("%d of its sender are queued already", of.messages)
	case limit > 0 && used+size > limit && !(member && of.messages == 0):
		return fmt.Sprintf("this one has %d bytes, and %d are queued already (%s=%d)", size, used, what, limit)
	case a.self.cfg.RecvBudget > 0 && a.bytes+size > a.self.cfg.RecvBudget:
		return fmt.Sprintf("this one has %d bytes, and %d are queued already (STEPAF_RECV_BUDGET=%d)", size, a.bytes, a.self.cfg.RecvBudget)
	}
	return ""
}

// count adds msg to the usage (sign 1) or subtracts it (sign -1). a.mu is held.
func (a *apps) count(msg *van.Message, sign int) {
	of := a.usage[msg.Sender]
	of.messages += sign
	of.bytes += sign * weight(msg)
	if a.usage[msg.Sender] = of; of.messages == 0 {
		delete(a.usage, msg.Sender)
	}
	a.messages += sign
	a.bytes += sign * weight(msg)
}

// dropQueued drops the queued requests that match and returns their number. a.mu is held.
func (a *apps) dropQueued(match func(appKey, *queuedRequest) bool) (forgotten int) {
	for k, list := range a.queued {
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
		if a.queued[k] = rest; len(rest) == 0 {
			delete(a.queued, k)
		}
	}
	return forgotten
}

// queueLimit is the time for which requests are queued.
func (a *apps) queueLimit() time.Duration { return cmp.Or(max(a.self.cfg.StartTimeout, 0), queueTime) }

// expireIn drops, after d, the requests that have waited too long. a.mu is held.
func (a *apps) expireIn(d time.Duration) {
	if a.expiry != nil {
		a.expiry.Stop()
	}
	a.expiry = time.AfterFunc(d, func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		limit, oldest := a.queueLimit(), uint64(0)
		var of appKey
		gone := a.dropQueued(func(k appKey, e *queuedRequest) bool {
			if time.Duration(clock.Now()-e.queuedAt) >= limit {
				of = k
				a.self.counts.early.add(e.msg)
				return true
			}
			if oldest == 0 || e.queuedAt < oldest {
				oldest = e.queuedAt
			}
			return false
		})
		if gone > 0 {
			a.self.log.Warn("dropped requests for an application that was not made", "app", of.app, "customer", of.customer,
				"requests", gone, "limit", limit, "err", errNoApp)
		}
		if a.messages > 0 && !a.closed {
			a.expireIn(max(limit-time.Duration(clock.Now()-oldest), time.Millisecond))
		}
	})
}

// close drops all queued requests. No more are queued.
func (a *apps) close() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.closed = true
	if a.expiry != nil {
		a.expiry.Stop()
	}
	a.dropQueued(func(appKey, *queuedRequest) bool { return true })
}

// refuseNew refuses the requests for applications that this node does not have, both the queued ones and later ones.
// The program ends; text names the call in which it waits. If text is "", such requests are queued again.
func (a *apps) refuseNew(text string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.endingCall = text; text == "" {
		return
	}
	a.dropQueued(func(_ appKey, e *queuedRequest) bool {
		a.refuseFinished(e.msg)
		return true
	})
}

// refuseFinished sends a refusal with the reason to the sender of a request. The caller holds a.mu.
func (a *apps) refuseFinished(msg *van.Message) {
	a.notices.refuse(msg.Sender, msg.ProcessEpoch, msg.AppID, msg.CustomerID, msg.Timestamp,
		fmt.Errorf("%w: %s waits in %s and has no application %d", van.ErrFinished, a.self.Name(), a.endingCall, msg.AppID))
}

// takeQueued removes and returns the requests that are queued for k. a.mu is held.
func (a *apps) takeQueued(k appKey) []queuedRequest {
	kept := a.queued[k]
	delete(a.queued, k)
	for _, e := range kept {
		a.count(e.msg, -1)
	}
	return kept
}
