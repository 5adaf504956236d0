package fakeverbs

// What tests do to the network: failures, lost links, processes that stop, and its end.

import (
	"maps"
	"net/netip"
	"slices"

	"github.com/stepaf/stepaf-go/internal/fifo"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// Fail asks f before each call. An error that f returns is what the call returns; Post
// posts what comes before. f may use the Net. nil ends it.
func (n *Net) Fail(f func(Op) error) {
	if f == nil {
		n.fail.Store(nil)
		return
	}
	n.fail.Store(&f)
}

// FailWR asks f before each work request is executed. With another status than
// StatusOK it completes with that one, and its queue pair breaks; that of the peer, too,
// when the status is one that the peer finds. f must not use the Net. nil ends it.
func (n *Net) FailWR(f func(WR) verbs.Status) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.failWR = f
}

// RejectNext rejects the next count connect requests with this status, whether
// somebody listens or not.
func (n *Net) RejectNext(count, status int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.rejects, n.reason = count, status
}

// Cut loses the link between two addresses: nobody is told, and messages fail after
// Config.Retry, unless Heal comes before.
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

// Hold holds back everything that is posted until Release.
func (n *Net) Hold() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.held = true
}

// HoldQP holds back what is posted to the queue pair with this number.
func (n *Net) HoldQP(num uint32) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.heldPairs[num] = true
}

// Release ends Hold and every HoldQP. What was held is delivered, that of the queue
// pairs in first first, in their order, then that of the others by age.
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

// Step delivers the next work request of the queue pair with this number, held or not.
// It reports whether there was one that could be.
func (n *Net) Step(num uint32) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	q := n.pair(num)
	return q != nil && q.sq.Len() > 0 && q.step()
}

// Pending lists the queue pairs with work requests that have not been executed, by
// age.
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

// Kill ends the process as a crash of its host would: no peer is told, and what peers
// have posted or post fails after Config.Retry. All calls of the Stack return
// verbs.ErrClosed from now on, those that give something back succeed.
func (n *Net) Kill(s *Stack) { n.kill(s, false) }

// KillTelling ends the process as SIGKILL does: the kernel of its host tells the peers
// that they are disconnected, then all is as after Kill.
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

// Stop lets the process stand still as SIGSTOP does: Next and Poll do not return, and what
// it does all the same is noticed by nobody before Wake. Its device goes on: what was
// posted before is executed, and peers write to its memory while it has receive requests.
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

// ids returns the Stack's IDs in the order in which they were made.
func (s *Stack) ids() []*connID {
	var all []*connID
	for c := range s.channels {
		all = slices.AppendSeq(all, maps.Keys(c.ids))
	}
	slices.SortFunc(all, func(a, b *connID) int { return a.seq - b.seq })
	return all
}

// RemoveDevice takes the device at addr away: its IDs get a DeviceRemoval event, its
// queue pairs break, and it is no longer listed or connected to.
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

// Close ends the Net: all calls that wait or are made later return verbs.ErrClosed,
// those that give back succeed.
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
