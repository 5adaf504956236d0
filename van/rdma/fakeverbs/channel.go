package fakeverbs

// Channels: events that wait, IDs, and devices.

import (
	"fmt"
	"sync"
	"syscall"
	"time"

	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// channel implements verbs.Channel. Everything is guarded by net.mu.
type channel struct {
	net     *Net
	stack   *Stack
	cond    sync.Cond
	queue   []queued
	reading bool
	closed  bool
	ids     map[*connID]bool
	devices map[*host]*device
}

// queued is an event that has not been read.
type queued struct {
	verbs.Event
	id   *connID
	read func() // what reading it does, nil for nothing
}

func (c *channel) ended() bool { return c.closed || c.stack.ended() }

// push makes ev happen to id, now or after the configured delay. It calls lost, which may be
// nil, when nobody will read it.
func (c *channel) push(id *connID, ev verbs.Event, read, lost func()) {
	n := c.net
	enter := func() {
		if id.gone || c.ended() {
			if lost != nil {
				lost()
			}
			return
		}
		c.queue = append(c.queue, queued{ev, id, read})
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
	n.agenda.at(due, enter)
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
