package fakeverbs

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/stepaf/stepaf-go/internal/fifo"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// OpKind is a call of package verbs.
type OpKind int

// The calls that can be made to fail.
const (
	OpDevices OpKind = iota + 1
	OpNewChannel
	OpNext
	OpNewID
	OpBind
	OpListen
	OpResolveAddr
	OpResolveRoute
	OpSetAckTimeout
	OpSetTOS
	OpCreateQP
	OpConnect
	OpAccept
	OpReject
	OpDisconnect
	OpInfo
	OpRegister
	OpPost
	OpPoll
	OpReserve
	OpDeregister
	OpDestroy
	opCount
)

var opNames = [...]string{OpDevices: "devices", OpNewChannel: "new channel", OpNext: "next", OpNewID: "new id", OpBind: "bind",
	OpListen: "listen", OpResolveAddr: "resolve address", OpResolveRoute: "resolve route", OpSetAckTimeout: "set ack timeout", OpSetTOS: "set type of service",
	OpCreateQP: "create queue pair", OpConnect: "connect", OpAccept: "accept", OpReject: "reject", OpDisconnect: "disconnect",
	OpInfo: "info", OpRegister: "register", OpPost: "post", OpPoll: "poll", OpReserve: "reserve",
	OpDeregister: "deregister", OpDestroy: "destroy"}

// String names the call.
func (k OpKind) String() string {
	if k > 0 && int(k) < len(opNames) {
		return opNames[k]
	}
	return fmt.Sprintf("call %d", int(k))
}

// Op is one call that is about to be made.
type Op struct {
	Kind  OpKind
	Stack *Stack
	N     int            // this is the Nth of its kind in its Stack, from 1
	Local netip.AddrPort // of the ID; only the address, of a device; else invalid
	Peer  netip.AddrPort // of the ID, once known
	Size  int            // OpRegister, OpDeregister: bytes; OpReserve: entries
	WR    *verbs.SendWR  // OpPost: called for each of the work requests
}

// EventError makes an OpResolveAddr, OpResolveRoute or OpConnect begin and then end with
// the event of its failure and this status. A connect ends with Rejected when it is
// positive, else with Unreachable.
type EventError int

func (e EventError) Error() string { return fmt.Sprintf("event with status %d", int(e)) }

// Fail asks f before each call. An error that f returns is what the call returns; Post
// posts what comes before. f may use the Net. nil ends it.
func (n *Net) Fail(f func(Op) error) {
	if f == nil {
		n.fail.Store(nil)
		return
	}
	n.fail.Store(&f)
}

// FailNth is a function for Fail: the kth call of that kind in a Stack fails with err.
func FailNth(kind OpKind, k int, err error) func(Op) error {
	return func(op Op) error {
		if op.Kind == kind && op.N == k {
			return err
		}
		return nil
	}
}

// hook counts the call and asks the function of Fail. The caller does not hold mu.
func (s *Stack) hook(op Op) error {
	op.N = int(s.calls[op.Kind].Add(1))
	f := s.net.fail.Load()
	if f == nil {
		return nil
	}
	op.Stack = s
	return (*f)(op)
}

// WR is a work request that is about to be executed.
type WR struct {
	verbs.SendWR
	Stack *Stack // the poster
	Local netip.AddrPort
	Peer  netip.AddrPort
	Num   uint32 // of the queue pair
	N     int    // this is the Nth of its queue pair, from 1
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
	for _, q := range n.byAge() {
		n.run(q)
	}
}

// Heal ends a Cut.
func (n *Net) Heal(a, b netip.Addr) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.cuts, linkOf(a, b))
	for _, q := range n.byAge() {
		n.run(q)
	}
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
	all := n.byAge()
	for _, num := range first {
		if i := slices.IndexFunc(all, func(q *qp) bool { return q.num == num }); i >= 0 {
			n.run(all[i])
		}
	}
	for _, q := range all {
		n.run(q)
	}
}

// Step delivers the next work request of the queue pair with this number, held or not.
// It reports whether there was one that could be.
func (n *Net) Step(num uint32) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, q := range n.byAge() {
		if q.num == num && q.sq.Len() > 0 {
			return n.step(q)
		}
	}
	return false
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
	s.stopped, s.kept = false, nil
	for _, id := range s.ids() {
		n.destroy(id, tell)
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
	kept := s.kept
	s.kept = nil
	for _, do := range kept {
		do()
	}
	for _, q := range n.byAge() {
		n.run(q)
	}
	s.wakeAll()
}

// toPeers does what peers will notice: now, or when the process goes on.
func (s *Stack) toPeers(do func()) {
	if s.stopped {
		s.kept = append(s.kept, do)
		return
	}
	do()
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
			n.push(id, verbs.Event{Type: verbs.DeviceRemoval}, nil)
			if id.qp != nil {
				n.breakQP(id.qp)
			}
		}
	}
}
