package fakeverbs

// This file owns the faults that tests inject: failures, lost links, stopped processes, and the end of the Net.

import (
	"maps"
	"net/netip"
	"slices"

	"github.com/stepaf/stepaf-go/internal/fifo"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// Fail calls f before each call. If f returns an error, the call returns it; Post first posts the preceding requests. f may use the Net. nil
// ends it.
func (n *Net) Fail(f func(Op) error) {
	if f == nil {
		n.fail.Store(nil)
		return
	}
	n.fail.Store(&f)
}

// FailWR calls f before each work request is executed. If f returns a status other than StatusOK, the request completes with that status and its
// queue pair breaks. The peer's queue pair breaks, too, if the status is an error that the peer detects. f must not use the Net. nil ends it.
func (n *Net) FailWR(f func(WR) verbs.Status) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.failWR = f
}

// RejectNext rejects the next count connect requests with this status, with or without a listener.
func (n *Net) RejectNext(count, status int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.rejects, n.reason = count, status
}

// Cut loses the link between two addresses. Neither side is notified. Messages fail after Config.Retry, unless Heal is called before.
func (n *Net) Cut(a, b netip.Addr) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.cuts[linkOf(a, b)] = true
	n.runAll()
}

// Heal ends a Cut.
func (n *Net) Heal(a, b netip.Addr) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.cuts, linkOf(a, b))
	n.runAll()
}

// Hold postpones the delivery of all posted requests until Release.
func (n *Net) Hold() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.held = true
}

// HoldQP postpones the delivery of requests posted to the queue pair with this number.
func (n *Net) HoldQP(num uint32) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.heldPairs[num] = true
}

// Release ends Hold and every HoldQP. It delivers the held requests: first those of the queue pairs in first, in their order, then the others by
// age.
func (n *Net) Release(first ...uint32) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.held = false
	clear(n.heldPairs)
	for _, num := range first {
		if q := n.pair(num); q != nil {
			q.run()
		}
	}
	n.runAll()
}

// Step delivers the next work request of the queue pair with this number, held or not. It reports whether it delivered one.
func (n *Net) Step(num uint32) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	q := n.pair(num)
	return q != nil && q.sq.Len() > 0 && q.step()
}

// Pending returns the numbers of the queue pairs with work requests that have not been executed, by age.
func (n *Net) Pending() []uint32 {
	n.mu.Lock()
	defer n.mu.Unlock()
	var nums []uint32
	for _, q := range n.byAge() {
		if q.sq.Len() > 0 {
			nums = append(nums, q.num)
		}
	}
	return nums
}

// Kill ends the process like a crash of its host: peers are not notified, and their present and later requests to it fail after Config.Retry. From
// now on, all calls of the Stack return verbs.ErrClosed, except for those that release something, which succeed.
func (n *Net) Kill(s *Stack) { n.kill(s, false) }

// KillTelling ends the process as SIGKILL does: the kernel of its host notifies the peers that they are disconnected. The rest is as with Kill.
func (n *Net) KillTelling(s *Stack) { n.kill(s, true) }

func (n *Net) kill(s *Stack, tell bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if s.dead {
		return
	}
	s.stopped, s.deferred = false, nil
	for _, id := range s.ids() {
		id.destroy(tell)
	}
	s.dead = true
	s.registered = 0
	s.wakeAll()
	for c := range s.channels {
		for _, d := range c.devices {
			clear(d.lkeys)
			clear(d.rkeys)
			d.cq = fifo.Queue[entryCQ]{}
		}
	}
	clear(s.channels)
}

// Stop stops the process as SIGSTOP does: Next and Poll do not return, and peers notice its other calls only after Wake. Its device continues:
// requests posted before are executed, and peers can write to its memory while it has receive requests.
func (n *Net) Stop(s *Stack) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if !s.dead {
		s.stopped = true
	}
}

// Wake ends Stop.
func (n *Net) Wake(s *Stack) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if !s.stopped {
		return
	}
	s.stopped = false
	kept := s.deferred
	s.deferred = nil
	for _, do := range kept {
		do()
	}
	n.runAll()
	s.wakeAll()
}

// ids returns the Stack's IDs in the order of their creation.
func (s *Stack) ids() []*connID {
	var all []*connID
	for c := range s.channels {
		all = slices.AppendSeq(all, maps.Keys(c.ids))
	}
	slices.SortFunc(all, func(a, b *connID) int { return a.seq - b.seq })
	return all
}

// RemoveDevice removes the device at addr: its IDs get a DeviceRemoval event, its queue pairs break, and it is no longer listed or connected to.
func (n *Net) RemoveDevice(addr netip.Addr) {
	n.mu.Lock()
	defer n.mu.Unlock()
	h := n.host(addr, true)
	h.absent = true
	for _, s := range n.stacks {
		for _, id := range s.ids() {
			if id.dev == nil || id.dev.host != h || id.unread {
				continue
			}
			id.ch.push(id, verbs.Event{Type: verbs.DeviceRemoval}, nil, nil)
			if id.qp != nil {
				id.qp.breakDown()
			}
		}
	}
}

// Close ends the Net. Waiting and later calls return verbs.ErrClosed, except for those that release something, which succeed.
func (n *Net) Close() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.closed = true
	n.schedule.end()
	for _, s := range n.stacks {
		s.wakeAll()
	}
}

func (s *Stack) wakeAll() {
	for c := range s.channels {
		c.wakeAll()
	}
}
