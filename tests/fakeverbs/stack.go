package fakeverbs

// This file owns the calls of a Stack and of its channels.

import (
	"fmt"
	"slices"
	"syscall"

	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// Leaks describes the channels, IDs, queue pairs and regions that were not released. A killed Stack has none.
func (s *Stack) Leaks() []string {
	s.net.mu.Lock()
	defer s.net.mu.Unlock()
	return s.leaks()
}

// Leaks describes the leaks of all Stacks.
func (n *Net) Leaks() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	var all []string
	for _, s := range n.stacks {
		for _, l := range s.leaks() {
			all = append(all, s.name+": "+l)
		}
	}
	return all
}

func (s *Stack) leaks() []string {
	var all []string
	for c := range s.channels {
		if !c.closed {
			all = append(all, "a channel")
		}
		for id := range c.ids {
			if id.unread {
				continue
			}
			all = append(all, "ID "+id.describe())
			if id.qp != nil {
				all = append(all, fmt.Sprintf("queue pair %d", id.qp.num))
			}
		}
		for _, d := range c.devices {
			for _, m := range d.lkeys {
				all = append(all, fmt.Sprintf("region of %d bytes at %#x on %s", m.size, m.start, d.host.name))
			}
		}
	}
	slices.Sort(all)
	return all
}

// Devices lists one device for each address.
func (s *Stack) Devices() ([]verbs.DeviceInfo, error) {
	err := s.begin(Op{Kind: OpDevices}, s.ended)
	n := s.net
	defer n.mu.Unlock()
	if err != nil {
		return nil, err
	}
	var all []verbs.DeviceInfo
	for _, h := range s.hosts {
		if !h.absent {
			all = append(all, h.info(&n.cfg))
		}
	}
	return all, nil
}

// NewChannel opens an event channel.
func (s *Stack) NewChannel() (verbs.Channel, error) {
	err := s.begin(Op{Kind: OpNewChannel}, s.ended)
	n := s.net
	defer n.mu.Unlock()
	if err != nil {
		return nil, err
	}
	c := &channel{net: n, stack: s, ids: map[*connID]bool{}, devices: map[*host]*device{}}
	c.cond.L = &n.mu
	s.channels[c] = true
	s.counters.Channels++
	return c, nil
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
		n.misuse.report(err)
		return verbs.Event{}, err
	}
	c.reading = true
	defer func() { c.reading = false }()
	for {
		if c.ended() {
			return verbs.Event{}, fault("next", verbs.ErrClosed, "%s", c.stack.name)
		}
		for c.queue.Len() > 0 && !c.stack.stopped {
			q := c.queue.Take()
			if q.id.removed {
				continue
			}
			q.Cookie = q.id.cookie
			n.trace.event(q)
			if q.read != nil {
				q.read()
			}
			return q.Event, nil
		}
		c.cond.Wait()
	}
}

func (c *channel) NewID(cookie uint64) (verbs.ID, error) {
	err := c.stack.begin(Op{Kind: OpNewID}, c.ended)
	defer c.net.mu.Unlock()
	if err != nil {
		return nil, err
	}
	return c.newID(cookie), nil
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
			id.destroy(true)
		} else {
			left++
		}
	}
	c.closed = true
	c.wakeAll()
	if left > 0 {
		err := fault("close channel", syscall.EBUSY, "%s: %d IDs have not been destroyed", c.stack.name, left)
		n.misuse.report(err)
		return err
	}
	return nil
}
