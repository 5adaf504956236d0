package fakeverbs

// This file owns channels: their pending events, their IDs, and their devices with completion queues.

import (
	"fmt"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"github.com/stepaf/stepaf-go/internal/fifo"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// channel implements verbs.Channel. net.mu guards everything.
type channel struct {
	net     *Net
	stack   *Stack
	cond    sync.Cond
	queue   fifo.Queue[queued]
	reading bool
	closed  bool
	ids     map[*connID]bool
	devices map[*host]*device
}

// queued is an event that has not been read.
type queued struct {
	verbs.Event
	id   *connID
	read func() // side effect of reading the event; may be nil
}

func (c *channel) ended() bool { return c.closed || c.stack.ended() }

// push adds an event of id, now or after the configured delay. If the event will never be read, it calls lost, which may be nil.
func (c *channel) push(id *connID, ev verbs.Event, read, lost func()) {
	n := c.net
	enter := func() {
		if id.removed || c.ended() {
			if lost != nil {
				lost()
			}
			return
		}
		c.queue.Put(queued{ev, id, read})
		c.cond.Broadcast()
	}
	now := time.Now()
	if n.cfg.EventDelay <= 0 && !n.lastEvent.After(now) {
		enter()
		return
	}
	due := now.Add(n.cfg.EventDelay)
	if due.Before(n.lastEvent) { // the delay was shortened
		due = n.lastEvent
	}
	n.lastEvent = due
	n.schedule.at(due, enter)
}

// wakeAll wakes all waiting calls, which then check their conditions again.
func (c *channel) wakeAll() {
	c.cond.Broadcast()
	for _, d := range c.devices {
		d.cond.Broadcast()
	}
}

func (c *channel) newID(cookie uint64) *connID {
	c.stack.counters.IDs++
	id := &connID{net: c.net, ch: c, stack: c.stack, cookie: cookie, seq: c.stack.counters.IDs}
	c.ids[id] = true
	return id
}

// device returns the channel's device at h.
func (c *channel) device(h *host) (*device, error) {
	if h.name == "" || h.absent {
		return nil, fmt.Errorf("no device at %v: %w", h.addr, syscall.ENODEV)
	}
	d := c.devices[h]
	if d == nil {
		d = &device{net: c.net, stack: c.stack, ch: c, host: h, size: c.net.cfg.CQE,
			lkeys: map[uint32]*region{}, rkeys: map[uint32]*region{}}
		d.cond.L = &c.net.mu
		c.devices[h] = d
	}
	return d, nil
}

// device implements verbs.Device: the protection domain and completion queue of one channel at one host. net.mu guards everything.
type device struct {
	net     *Net
	stack   *Stack
	ch      *channel
	host    *host
	cond    sync.Cond
	cq      fifo.Queue[entryCQ]
	size    int
	overrun error
	wake    bool
	polling bool
	timer   *time.Timer // ends the wait of Poll; reused
	until   time.Time   // when timer expires
	expired bool
	lkeys   map[uint32]*region
	rkeys   map[uint32]*region
}

// entryCQ is an entry of a completion queue.
type entryCQ struct {
	verbs.Completion
	qp  *qp
	pos uint64 // SendDone: of the work request in its queue
}

func (d *device) addr() netip.AddrPort { return netip.AddrPortFrom(d.host.addr, 0) }
func (d *device) ended() bool          { return d.ch.ended() }
func (d *device) Name() string         { return d.host.name }

// enter adds a completion. If the queue is full, it is lost, as on hardware; full reports that this call found it full.
func (d *device) enter(e entryCQ) (full bool) {
	if d.ended() || d.overrun != nil {
		return false
	}
	if full = d.cq.Len() >= d.size; full {
		d.overrun = fault("completion queue", syscall.EOVERFLOW, "%s: %s: more than %d completions, want them polled or reserved",
			d.stack.name, d.host.name, d.size)
		d.net.misuse.report(d.overrun)
	} else {
		d.cq.Put(e)
	}
	d.cond.Broadcast()
	return full
}

// wait implements the waiting of Poll.
func (d *device) wait(spin, block time.Duration) {
	limit := spin + max(block, 0)
	if d.cq.Len() > 0 || d.ended() || d.overrun != nil || spin >= 0 && limit <= 0 {
		return
	}
	d.expired = false
	if spin >= 0 {
		d.alarm(limit)
		defer d.timer.Stop()
	}
	for d.cq.Len() == 0 && !d.wake && !d.expired && !d.ended() && d.overrun == nil {
		d.cond.Wait()
	}
	if d.cq.Len() == 0 {
		d.wake = false
	}
}

// alarm sets the timer that ends the present wait after limit.
func (d *device) alarm(limit time.Duration) {
	d.until = time.Now().Add(limit)
	if d.timer != nil {
		d.timer.Reset(limit)
		return
	}
	d.timer = time.AfterFunc(limit, func() {
		d.net.mu.Lock()
		defer d.net.mu.Unlock()
		if time.Now().Before(d.until) {
			return // alarm has set it again meanwhile
		}
		d.expired = true
		d.cond.Broadcast()
	})
}
