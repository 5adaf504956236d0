package membership

import (
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/van"
)

// The requesting side of barriers.

// ticket is one call of Barrier that has not ended.
type ticket struct {
	n        int
	customer int
	group    int
	instance bool
	final    bool // the barrier of Finalize
	ending   bool // that of Finalize, or StopBarrier
	starting bool // the barrier of start-up
	sent     bool
	stamp    int32  // of the request, once it is sent
	missing  string // the scheduler's latest text about missing nodes
	since    time.Duration
	deadline time.Duration // 0: none
}

func (t *ticket) name() string { return kindName(t.instance) + " barrier over " + groupName(t.group) }

// Barrier starts a barrier of customer (usually 0) over a group (1 to 7, or this node's
// id) that this node belongs to, and returns a ticket that BarrierDone or BarrierFailed
// will name. With instance true it waits for every instance; otherwise for one request
// per group of instances, as C++ StepMesh counts. A barrier that needs no other node is
// done at once.
//
// A release of a C++ StepMesh scheduler does not say which barrier it ends. With one, a
// barrier is requested only when no earlier one of the same kind over the same group or
// of the same customer waits, and a release ends the oldest one of its customer and kind.
// A scheduler of this library names the request; only barriers over the same group wait
// for each other.
//
// It ends after Config.BarrierTimeout at the latest. When the scheduler is lost it waits
// for Config.ReplaceTimeout: the request is repeated when the same scheduler is back, and
// fails when a new process has replaced it, which does not know of the request.
//
// The error wraps van.ErrInvalid, van.ErrPeerLost when the scheduler is lost, or
// van.ErrClosed.
func (m *Machine) Barrier(now time.Duration, customer, group int, instance bool) (int, error) {
	t := ticket{customer: customer, group: group, instance: instance}
	if d := m.cfg.BarrierTimeout; d > 0 {
		t.deadline = now + d
	}
	return m.barrier(now, t)
}

// StartBarrier is the barrier over all nodes at the end of start-up. It fails at deadline,
// unless that is 0; on the scheduler this fails start-up on all nodes.
func (m *Machine) StartBarrier(now, deadline time.Duration) (int, error) {
	return m.barrier(now, ticket{group: van.AllNodes, instance: true, starting: true, deadline: deadline})
}

// Finalize starts the last barrier, over all instances of all nodes. When it is done the
// machine is leaving: peers may leave without being reported. Losses while it waits are
// reported only if it fails. After a failure call Leaving before the van is closed.
func (m *Machine) Finalize(now time.Duration, customer int) (int, error) {
	t := ticket{customer: customer, group: van.AllNodes, instance: true, final: true, ending: true}
	if m.table.self.Role == van.Worker && m.cfg.StopTimeout > 0 {
		t.deadline = now + m.cfg.StopTimeout
	}
	return m.barrier(now, t)
}

// StopBarrier is a barrier over all instances of all nodes that a program calls before
// Finalize. As with Finalize, some nodes may call it as soon as they run: it has no limit,
// and is requested again from a new scheduler process.
func (m *Machine) StopBarrier(now time.Duration, customer int) (int, error) {
	return m.barrier(now, ticket{customer: customer, group: van.AllNodes, instance: true, ending: true})
}

func (m *Machine) barrier(now time.Duration, t ticket) (int, error) {
	refuse := func(detail string, err error) (int, error) {
		return 0, &van.Error{Op: t.name(), Node: m.table.name(), Detail: detail, Err: err}
	}
	switch {
	case m.life.phase == failed && !m.life.leaving:
		return refuse("", m.life.failure)
	case m.life.leaving:
		return refuse("", van.ErrClosed)
	case m.life.phase != ready:
		return refuse("start-up is not complete", van.ErrInvalid)
	case t.customer < 0 || t.customer > math.MaxInt32:
		return refuse(fmt.Sprintf("customer %d: want 0 or more", t.customer), van.ErrInvalid)
	case m.cfg.members(t.group) == nil:
		return refuse(fmt.Sprintf("group %d: want 1 to 7 or the id of a node", t.group), van.ErrInvalid)
	case t.group > van.AllNodes && t.group != m.table.self.ID,
		t.group <= van.AllNodes && t.group&groupBit(m.table.self.Role) == 0:
		return refuse("this node is not in it", van.ErrInvalid)
	}
	if m.alive.isDown(van.SchedulerID) && now >= m.alive.peers[van.SchedulerID].since+m.cfg.ReplaceTimeout {
		return 0, &van.Error{Op: t.name(), Node: m.table.name(), Peer: m.table.peer(van.SchedulerID),
			Err: m.alive.peers[van.SchedulerID].cause}
	}
	m.lastTicket++
	t.n, t.since = m.lastTicket, now
	if m.cfg.trivial(t.group, t.instance) {
		m.out.emit(BarrierDone{t.n})
		return t.n, nil
	}
	m.tickets = append(m.tickets, &t)
	m.ask()
	return t.n, nil
}

// ask sends the requests that need not wait for an earlier barrier.
func (m *Machine) ask() {
	if m.alive.isDown(van.SchedulerID) || m.life.rejoining {
		return
	}
	named := m.table.native(van.SchedulerID)
	for i, t := range m.tickets {
		held := slices.ContainsFunc(m.tickets[:i], func(e *ticket) bool {
			return e.instance == t.instance && (e.group == t.group || e.customer == t.customer && !named)
		})
		if t.sent || held {
			continue
		}
		t.sent, t.stamp = true, m.out.next()
		m.request(t)
		m.withdrawn = slices.DeleteFunc(m.withdrawn, func(e *ticket) bool {
			return e.instance == t.instance && e.group == t.group && e.customer == t.customer
		})
	}
}

// request sends the request of t.
func (m *Machine) request(t *ticket) {
	cmd := van.Barrier
	if t.instance {
		cmd = van.InstanceBarrier
	}
	meta := controlAt(t.stamp, cmd)
	meta.Request, meta.AppID, meta.CustomerID = true, 0, int32(t.customer)
	meta.Control.BarrierGroup = t.group
	if t.ending && m.table.native(van.SchedulerID) {
		meta.Key = finalRequest
	}
	m.out.send(van.SchedulerID, meta)
}

// askAgain repeats the requests whose answers may have been lost with the connection to
// the scheduler, with their old timestamps, so that they are counted once. A C++ StepMesh
// scheduler would count them twice.
func (m *Machine) askAgain() {
	if m.table.native(van.SchedulerID) && !m.life.rejoining {
		for _, t := range m.withdrawn {
			m.sendWithdrawal(t)
		}
		for _, t := range m.tickets {
			if t.sent {
				m.request(t)
			}
		}
	}
	m.ask()
}

// CancelBarrier gives up waiting: a BarrierFailed with van.ErrTimeout follows. A scheduler
// of this library is told, and no longer counts this node's request; a C++ StepMesh one
// cannot be told. An unknown ticket, or one that has ended, is ignored.
func (m *Machine) CancelBarrier(n int) {
	if i := slices.IndexFunc(m.tickets, func(t *ticket) bool { return t.n == n }); i >= 0 {
		t := m.tickets[i]
		m.withdraw(t)
		m.failTickets(func(e *ticket) bool { return e == t }, m.tooLate(t, 0))
	}
}

// withdraw tells a scheduler of this library that t's request is given up. This is repeated
// after a lost connection, until there is a new request for the barrier. The request of
// Finalize stays: a node that gives up there leaves.
func (m *Machine) withdraw(t *ticket) {
	if !t.sent || t.final || m.sched == nil && !m.table.native(van.SchedulerID) || failpoint.On("abandon") {
		return
	}
	m.withdrawn = append(m.withdrawn, t)
	if m.sched != nil || !m.alive.isDown(van.SchedulerID) && !m.life.rejoining {
		m.sendWithdrawal(t)
	}
}

func (m *Machine) sendWithdrawal(t *ticket) {
	m.out.tellAbout(van.SchedulerID, notice{verb: verbWithdraw, group: t.group, instance: t.instance}, named(t.stamp))
}

// Missing lists the missing nodes of a barrier that waits, as far as this node knows, or
// "".
func (m *Machine) Missing(n int) string {
	for _, t := range m.tickets {
		switch {
		case t.n != n:
		case m.sched != nil:
			return m.barriersText()
		case t.missing != "":
			return "the scheduler says: " + t.missing
		}
	}
	return ""
}

// tooLate is the error of a barrier that this node no longer waits for.
func (m *Machine) tooLate(t *ticket, limit time.Duration) van.Error {
	err := van.Error{Limit: limit, Err: van.ErrTimeout}
	if err.Detail = m.Missing(t.n); err.Detail == "" {
		err.Detail = "only the scheduler knows who has not come"
		err.Hint = "see its log"
	}
	return err
}

// stepRelease ends a barrier of this node.
func (m *Machine) stepRelease(now time.Duration, from int, msg *van.Meta) error {
	if from != van.SchedulerID {
		return m.table.bad(from, msg, "sender", from, "the scheduler")
	}
	instance := msg.Control.Cmd == van.InstanceBarrier
	at := func(fits func(*ticket) bool) int {
		return slices.IndexFunc(m.tickets, func(t *ticket) bool { return t.sent && t.instance == instance && fits(t) })
	}
	var i int
	if m.table.native(van.SchedulerID) {
		i = at(func(t *ticket) bool { return named(t.stamp) == msg.Key })
	} else {
		// The release has the customer of the last request, which may be another node's.
		i = at(func(t *ticket) bool { return t.customer == int(msg.CustomerID) })
		if i < 0 {
			i = at(func(*ticket) bool { return true })
		}
	}
	if i < 0 {
		return nil // of a cancelled barrier, or a duplicate
	}
	t := m.tickets[i]
	m.tickets = slices.Delete(m.tickets, i, i+1)
	if t.final {
		m.Leaving(now)
	}
	m.out.emit(BarrierDone{t.n})
	m.ask()
	return nil
}

// barrierWaits handles the scheduler's notice of missing nodes.
func (m *Machine) barrierWaits(text string, request uint64) {
	for _, t := range m.tickets {
		if t.sent && named(t.stamp) == request {
			t.missing = text
		}
	}
}

// barrierRefused handles the scheduler's notice that a barrier cannot be complete. request
// is the key of the request, see named.
func (m *Machine) barrierRefused(n notice, request uint64) {
	i := slices.IndexFunc(m.tickets, func(t *ticket) bool {
		return t.sent && t.instance == n.instance && t.group == n.group && named(t.stamp) == request
	})
	if i < 0 {
		return
	}
	t := m.tickets[i]
	m.failTickets(func(e *ticket) bool { return e == t }, van.Error{Peer: m.table.peer(van.SchedulerID),
		Err: &lossError{text: n.text}})
}

// failTickets fails the barriers that which selects. If Finalize is among them, the losses
// that it has held are reported.
func (m *Machine) failTickets(which func(*ticket) bool, why van.Error) {
	out := slices.DeleteFunc(slices.Clone(m.tickets), func(t *ticket) bool { return !which(t) })
	m.tickets = slices.DeleteFunc(m.tickets, which)
	for _, t := range out {
		e := why
		e.Op, e.Node = t.name(), m.table.name()
		m.out.emit(BarrierFailed{t.n, &e})
	}
	if len(out) == 0 {
		return
	}
	if m.finalizing() == nil {
		m.reportHeld(math.MaxInt64)
	}
	m.ask()
}

// finalizing returns the ticket of a Finalize that waits.
func (m *Machine) finalizing() *ticket {
	for _, t := range m.tickets {
		if t.final {
			return t
		}
	}
	return nil
}

// reportHeld reports the losses that were noticed at least leaveGrace before now: if
// the peers had left in order, the release of the last barrier would have come.
func (m *Machine) reportHeld(now time.Duration) {
	if len(m.held) == 0 {
		return
	}
	for _, id := range m.table.members(van.AllNodes) {
		if l, ok := m.held[id]; ok && now >= l.at+leaveGrace {
			delete(m.held, id)
			m.markDown(l.at, id, connLost, l.cause)
		}
	}
}

func (m *Machine) tickTickets(now time.Duration) {
	for _, t := range slices.Clone(m.tickets) {
		if t.deadline > 0 && now >= t.deadline {
			m.expire(t)
		}
	}
	m.reportHeld(now)
	m.failWithoutScheduler(now)
}

// expire ends a barrier at its deadline.
func (m *Machine) expire(t *ticket) {
	limit := t.deadline - t.since
	if t.starting && m.sched != nil {
		text := fmt.Sprintf("the scheduler gave up the start barrier after %s: %s", limit, m.barriersText())
		m.tellAll(van.SchedulerID, notice{verb: verbError, text: text})
	}
	m.withdraw(t)
	m.failTickets(func(e *ticket) bool { return e == t }, m.tooLate(t, limit))
}

// failWithoutScheduler fails the barriers that wait for a scheduler that has been lost for
// Config.ReplaceTimeout. A server's Finalize waits as long as a worker is alive: workers
// do not need the scheduler for their requests.
func (m *Machine) failWithoutScheduler(now time.Duration) {
	at, waits := m.schedulerDeadline()
	if !waits || now < at {
		return
	}
	for _, t := range m.tickets {
		if m.needsScheduler(t) {
			m.withdraw(t)
		}
	}
	m.failTickets(m.needsScheduler, van.Error{Peer: m.table.peer(van.SchedulerID), Err: m.alive.peers[van.SchedulerID].cause})
}

// schedulerDeadline returns when barriers that wait for a lost scheduler fail, if there are
// any.
func (m *Machine) schedulerDeadline() (time.Duration, bool) {
	if m.sched != nil || !m.alive.isDown(van.SchedulerID) && !m.life.rejoining || !slices.ContainsFunc(m.tickets, m.needsScheduler) {
		return 0, false
	}
	return m.alive.peers[van.SchedulerID].since + m.cfg.ReplaceTimeout, true
}

func (m *Machine) needsScheduler(t *ticket) bool {
	return !t.ending || m.table.self.Role != van.Server ||
		!slices.ContainsFunc(m.table.members(van.WorkerGroup), func(id int) bool { return !m.alive.isDown(id) })
}

func (m *Machine) nextTicketTick() time.Duration {
	next := time.Duration(math.MaxInt64)
	for _, t := range m.tickets {
		if t.deadline > 0 {
			next = min(next, t.deadline)
		}
	}
	if at, waits := m.schedulerDeadline(); waits {
		next = min(next, at)
	}
	for _, l := range m.held {
		next = min(next, l.at+leaveGrace)
	}
	return next
}
