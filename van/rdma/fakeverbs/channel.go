package fakeverbs

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

func newChannel(s *Stack) *channel {
	c := &channel{net: s.net, stack: s, ids: map[*connID]bool{}, devices: map[*host]*device{}}
	c.cond.L = &s.net.mu
	return c
}

func (c *channel) ended() bool { return c.closed || c.stack.ended() }

// push makes ev happen to id, now or after the configured delay.
func (n *Net) push(id *connID, ev verbs.Event, read func()) {
	enter := func() {
		c := id.ch
		if id.gone || c.ended() {
			if ev.New != nil {
				n.destroy(ev.New.(*connID), !id.stack.dead)
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
	n.at(due, enter)
}

func (c *channel) Next() (verbs.Event, error) {
	if err := c.stack.hook(Op{Kind: OpNext}); err != nil {
		return verbs.Event{}, err
	}
	n := c.net
	n.mu.Lock()
	defer n.mu.Unlock()
	if c.reading {
		err := fault("next", syscall.EBUSY, "%s: a second caller at the same time", c.stack.name)
		n.report(err)
		return verbs.Event{}, err
	}
	c.reading = true
	defer func() { c.reading = false }()
	for {
		if c.ended() {
			return verbs.Event{}, fault("next", verbs.ErrClosed, "%s", c.stack.name)
		}
		for len(c.queue) > 0 && !c.stack.stopped {
			q := c.queue[0]
			c.queue[0] = queued{}
			c.queue = c.queue[1:]
			if q.id.gone {
				continue
			}
			q.Cookie = q.id.cookie
			n.recordEvent(q)
			if q.read != nil {
				q.read()
			}
			return q.Event, nil
		}
		c.cond.Wait()
	}
}

func (c *channel) NewID(cookie uint64) (verbs.ID, error) {
	if err := c.stack.hook(Op{Kind: OpNewID}); err != nil {
		return nil, err
	}
	n := c.net
	n.mu.Lock()
	defer n.mu.Unlock()
	if c.ended() {
		return nil, fault("new id", verbs.ErrClosed, "%s", c.stack.name)
	}
	return c.newID(cookie), nil
}

func (c *channel) newID(cookie uint64) *connID {
	c.stack.counters.IDs++
	id := &connID{net: c.net, ch: c, stack: c.stack, cookie: cookie, seq: c.stack.counters.IDs}
	c.ids[id] = true
	return id
}

func (c *channel) Close() error {
	n := c.net
	n.mu.Lock()
	defer n.mu.Unlock()
	if c.stack.ended() {
		c.closed = true
		return nil
	}
	if c.closed {
		return fault("close channel", verbs.ErrClosed, "%s", c.stack.name)
	}
	left := 0
	for id := range c.ids {
		if id.unread {
			n.destroy(id, true)
		} else {
			left++
		}
	}
	c.closed = true
	c.cond.Broadcast()
	for _, d := range c.devices {
		d.cond.Broadcast()
	}
	if left > 0 {
		err := fault("close channel", syscall.EBUSY, "%s: %d IDs have not been destroyed", c.stack.name, left)
		n.report(err)
		return err
	}
	return nil
}

// device returns the channel's device at h.
func (c *channel) device(h *host) (*device, error) {
	if h.name == "" || h.absent {
		return nil, fmt.Errorf("no device at %v: %w", h.addr, syscall.ENODEV)
	}
	d := c.devices[h]
	if d == nil {
		d = newDevice(c, h)
		c.devices[h] = d
	}
	return d, nil
}
