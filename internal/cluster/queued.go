package cluster

// The queue of requests that arrive before their application exists, and its limits.

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/van"
)

// maxQueuedRequests bounds the number of queued requests of one sender, in addition to the budgets in bytes.
const maxQueuedRequests = 4096

// queueTime is the time for which they are queued when STEPAF_START_TIMEOUT is no limit.
const queueTime = 300 * time.Second

// maxDelay is the time for which requests that wait for their application may delay requests for another one.
const maxDelay = 10 * time.Second

// queuedRequest is a request for an application that does not exist yet.
type queuedRequest struct {
	msg      *van.Message
	queuedAt uint64 // clock.Now
}

// earlyRefusal has the arguments of notices.refuse for a request that has expired.
type earlyRefusal struct {
	sender            int
	epoch             uint32
	app, customer, ts int32
	why               error
}

// earlyCancel is the cancellation of requests for an application that does not exist yet. Some of them may not have
// arrived: control messages overtake data.
type earlyCancel struct {
	k appKey
	cancellation
}

// usage is the number of queued messages and bytes of one sender.
type usage struct {
	messages, bytes int
	since           uint64 // when messages was last 0: the beginning of its backlog
	over            bool   // counted in apps.overfull
}

// enqueue queues a request for an application that does not exist yet, or refuses it. It returns the customer if that
// has been made meanwhile. At a limit, enqueue blocks, and with it the receiving of that sender's messages, until
//   - the application has been made,
//   - queued requests were canceled or have expired (see expireIn, which bounds the wait),
//   - the request cannot be answered any more: its sender is lost or has canceled it, or this node ends, or
//   - the wait may delay requests for another application, and that sender has had queued requests for maxDelay. The request
//     is then refused.
func (a *apps) enqueue(k appKey, msg *van.Message) *Customer {
	c, why := a.tryEnqueue(k, msg, msg.InPoll)
	if why != "" {
		a.notices.refuse(msg.Sender, msg.ProcessEpoch, msg.AppID, msg.CustomerID, msg.Timestamp, fmt.Errorf("%w: %w: %s", van.ErrQueueFull, errNoApp, why))
	}
	return c
}

// tryEnqueue is enqueue, but returns the reason why the request is dropped. With inPoll it does not block.
func (a *apps) tryEnqueue(k appKey, msg *van.Message, inPoll bool) (c *Customer, why string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	arrived, limit := clock.Now(), a.queueLimit()
	var timer *time.Timer // ends a wait after maxDelay
	for paused := false; ; paused = true {
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
		if a.wasCanceled(k, msg) {
			return nil, ""
		}
		never, full, over := a.whyNever(msg), a.whyFull(msg), false
		if full != "" && inPoll {
			// The caller of the Poll waits for something else, and must not be blocked: the request is queued. There are no more
			// Polls until its sender's queue is below the limits.
			if !a.overTotal(weight(msg)) {
				full, over = "", true
			} else if never == "" {
				never = full
			}
		}
		wait := limit
		if full != "" && never == "" && a.delaysOthers(msg) {
			since := arrived
			if u := a.usage[msg.Sender]; u.messages > 0 {
				since = min(since, u.since)
			}
			if wait = maxDelay - time.Duration(clock.Now()-since); wait <= 0 {
				never = fmt.Sprintf("%s has not made application %d, and requests of this sender have waited for %s: %s", a.self.Name(), k.app, maxDelay, full)
			}
		}
		if never != "" {
			a.self.counts.early.add(msg)
			if count, show := a.tooMany.Next(); show {
				a.self.log.Warn("dropped a request for an application that this node does not have: "+never, "err", errNoApp,
					"from", van.NodeName(msg.Sender), "message", msg.Meta.String(), "queued", a.messages, "bytes", a.bytes, "dropped so far", count)
			}
			return nil, never
		}
		if full == "" {
			if a.messages == 0 {
				a.self.log.Info("queueing requests until their application is made", "app", k.app, "customer", k.customer)
				a.expireIn(max(limit-time.Duration(clock.Now()-arrived), time.Millisecond))
			}
			a.queued[k] = append(a.queued[k], queuedRequest{msg.Retain(), arrived})
			a.count(msg, 1)
			if over {
				of := a.usage[msg.Sender]
				a.overfull.set(&of.over, true)
				a.usage[msg.Sender] = of
			}
			return nil, ""
		}
		if a.ended {
			return nil, ""
		}
		if wait < limit {
			if timer == nil {
				timer = time.AfterFunc(wait, func() {
					a.mu.Lock()
					defer a.mu.Unlock()
					a.changed.Broadcast()
				})
				defer timer.Stop()
			}
			timer.Reset(wait)
		}
		if !paused {
			a.self.counts.paused.Add(1)
			a.self.rarely("early").Warn("a peer is not read for now: its application does not exist yet", "peer", a.self.peerName(msg.Sender),
				"app", k.app, "customer", k.customer, "why", full, "limit", wait)
		}
		a.changed.Wait()
	}
}

// delaysOthers reports whether a wait with msg may delay requests of its sender for an application that this node has. Nodes of
// one role send each other messages of collectives and windows, which have no answer: a refusal would not end their wait.
func (a *apps) delaysOthers(msg *van.Message) bool {
	return van.RoleOf(msg.Sender) != a.role && slices.ContainsFunc(a.customers(), func(c *Customer) bool { return c.serves })
}

// whyNever returns the reason why msg is refused, or "": it is too long, its sender is lost, or it is at a limit and its
// sender is this node, whose messages are in memory already, or not a member yet. a.mu is held. The loss of a sender is recorded
// before peerLost takes a.mu: a message that is queued in spite of this check is dropped there.
func (a *apps) whyNever(msg *van.Message) string {
	size, p := weight(msg), a.processes.of(msg.Sender)
	switch {
	case p.lost != nil, p.epoch != msg.ProcessEpoch && msg.ProcessEpoch != 0:
		return "its sender has been lost"
	case a.self.cfg.RecvBudget > 0 && size > a.self.cfg.RecvBudget:
		return fmt.Sprintf("this one has %d bytes (STEPAF_RECV_BUDGET=%d)", size, a.self.cfg.RecvBudget)
	case a.processes.isMember(msg.Sender):
		return ""
	case !a.self.mayJoin(msg.Sender):
		return "its sender is no member of the cluster"
	}
	strangers := 0
	for id, of := range a.usage {
		if !a.processes.isMember(id) {
			strangers += of.bytes
		}
	}
	if limit := a.self.cfg.StrangerBudget; limit > 0 && strangers+size > limit {
		return fmt.Sprintf("this one has %d bytes, and %d of processes that are not members are queued already (STEPAF_STRANGER_BUDGET=%d)", size, strangers, limit)
	}
	return a.whyFull(msg)
}

// whyFull returns the reason why msg cannot be queued now, or "". The first message of a sender may be longer than
// STEPAF_RECV_BUDGET_PEER: it could never be received otherwise. a.mu is held.
func (a *apps) whyFull(msg *van.Message) string {
	size, of := weight(msg), a.usage[msg.Sender]
	switch limit := a.self.cfg.RecvBudgetPeer; {
	case of.messages >= maxQueuedRequests:
		return fmt.Sprintf("%d of its sender are queued already", of.messages)
	case limit > 0 && of.bytes+size > limit && of.messages > 0:
		return fmt.Sprintf("this one has %d bytes, and %d are queued already (STEPAF_RECV_BUDGET_PEER=%d)", size, of.bytes, limit)
	case a.overTotal(size):
		return fmt.Sprintf("this one has %d bytes, and %d are queued already (STEPAF_RECV_BUDGET=%d)", size, a.bytes, a.self.cfg.RecvBudget)
	}
	return ""
}

// overTotal reports whether the queued requests and another one of size bytes would exceed STEPAF_RECV_BUDGET. a.mu is held.
func (a *apps) overTotal(size int) bool {
	return a.self.cfg.RecvBudget > 0 && a.bytes+size > a.self.cfg.RecvBudget
}

// count adds msg to the usage (sign 1) or subtracts it (sign -1). a.mu is held.
func (a *apps) count(msg *van.Message, sign int) {
	of := a.usage[msg.Sender]
	if of.messages == 0 {
		of.since = clock.Now()
	}
	of.messages += sign
	of.bytes += sign * weight(msg)
	if sign < 0 {
		a.overfull.set(&of.over, of.over && of.messages > 0 && (a.self.cfg.RecvBudgetPeer > 0 && of.bytes >= a.self.cfg.RecvBudgetPeer || of.messages >= maxQueuedRequests))
		a.changed.Broadcast()
	}
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

// expireIn drops, after d, the requests that have waited too long, and notifies their senders. a.mu is held.
func (a *apps) expireIn(d time.Duration) {
	if a.expiry != nil {
		a.expiry.Stop()
	}
	a.expiry = time.AfterFunc(d, func() {
		var refused []earlyRefusal
		a.mu.Lock()
		defer func() {
			a.mu.Unlock()
			for _, r := range refused {
				a.notices.refuse(r.sender, r.epoch, r.app, r.customer, r.ts, r.why)
			}
		}()
		limit, oldest := a.queueLimit(), uint64(0)
		var of appKey
		gone := a.dropQueued(func(k appKey, e *queuedRequest) bool {
			if time.Duration(clock.Now()-e.queuedAt) >= limit {
				of = k
				a.self.counts.early.add(e.msg)
				refused = append(refused, earlyRefusal{e.msg.Sender, e.msg.ProcessEpoch, e.msg.AppID, e.msg.CustomerID, e.msg.Timestamp,
					fmt.Errorf("%w: %w: %s has not made application %d within %s (STEPAF_START_TIMEOUT)", van.ErrRequestRefused, errNoApp, a.self.Name(), e.msg.AppID, limit)})
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
	a.changed.Broadcast()
	if a.expiry != nil {
		a.expiry.Stop()
	}
	a.dropQueued(func(appKey, *queuedRequest) bool { return true })
}

// refuseNew refuses the requests for applications that this node does not have, both the queued ones and later ones.
// The program ends; call returns the call in which it waits. If that is "", such requests are queued again.
func (a *apps) refuseNew(call func() string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.changed.Broadcast()
	if a.endingCall = call(); a.endingCall == "" {
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

// keepCanceled stores a cancellation of requests for k, which does not exist yet. a.mu is held.
func (a *apps) keepCanceled(k appKey, w Canceled, epoch uint32) {
	now := clock.Now()
	for len(a.canceled) > 0 && (len(a.canceled) >= maxCancellations || time.Duration(now-a.canceled[0].at) > cancelMemory) {
		a.canceled = a.canceled[1:]
	}
	a.canceled = append(a.canceled, earlyCancel{k, cancellation{w, epoch, now}})
}

// wasCanceled reports whether msg, a request for k, was canceled. a.mu is held.
func (a *apps) wasCanceled(k appKey, msg *van.Message) bool {
	return slices.ContainsFunc(a.canceled, func(x earlyCancel) bool {
		return x.k == k && x.Sender == msg.Sender && x.epoch == msg.ProcessEpoch && x.Has(msg.CustomerID, msg.Timestamp)
	})
}

// takeCanceled moves the cancellations of requests for k to in. a.mu is held.
func (a *apps) takeCanceled(k appKey, in *Inbound) {
	a.canceled = slices.DeleteFunc(a.canceled, func(x earlyCancel) bool {
		if x.k == k {
			in.addCancellation(x.Canceled, x.epoch)
		}
		return x.k == k
	})
}
