package rdma

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"testing"
	"time"
	"weak"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/rdma/conn"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// A process that was stopped, replaced, and continues is fenced: its queue pairs are destroyed, its slots are released, its connect requests are rejected, and it
// is notified of the reason.
func TestReplacedProcessIsFenced(t *testing.T) {
	r := newRig(t)
	s, old := r.node(8), r.node(9)
	r.link(old, s)
	dst := make([]byte, 100<<10)
	old.must(pull(s, 1, 1, dst))
	q := s.next()
	old.must(push(s, 1, 2, value(3000, 2)))
	s.wantValue(2, value(3000, 2))
	before := len(s.incoming())

	next := r.node(9)
	next.connect(s)
	s.connect(next)
	s.wantUp(next)
	next.wantUp(s)
	c := old.wantChange("why", func(c change) bool { return !c.up && errors.Is(c.cause, van.ErrReplaced) })
	if c.id != s.who.ID {
		t.Errorf("notified of %s", van.NodeName(c.id))
	}
	s.says("rdma: rejected a process that has been replaced", van.NodeName(9))
	if err := old.Send(push(s, 1, 3, value(3000, 3))); !lost(err) {
		t.Errorf("Send of a process that was replaced: %v, want %v", err, van.ErrPeerLost)
	}
	_ = old.Send(control(s, 4)) // it waits for a connection that is not made
	// Answers to its requests are not sent to the new process.
	_ = s.Send(answer(q, value(len(dst), 7)))
	q.Release()
	next.must(push(s, 1, 5, value(3000, 5)))
	s.wantValue(5, value(3000, 5))
	r.until("one connection is left", func() bool { return len(s.incoming()) == before })
	if n := s.incomingOf(9).handshake.incarnation; n != next.local.incarnation {
		t.Errorf("the connection left is of incarnation %d, want %d", n, next.local.incarnation)
	}
	if len(s.in) > 0 {
		m := <-s.in
		t.Errorf("a message with timestamp %d came", m.Timestamp)
		m.Release()
	}
}

// A process that is replaced while its connect request is handled is rejected, too.
func TestReplacedWhileItConnects(t *testing.T) {
	r := newRig(t)
	s, old, next := r.node(8), r.node(9), r.node(9)
	r.link(old, s)
	before := s.incomingOf(9)
	h := before.handshake
	h.epoch++
	id := &requestedID{dev: s.device0().dev, meanwhile: func() { s.connect(next) }}
	acceptor{s.rvan}.accept(verbs.Event{Type: verbs.ConnectRequest, New: id, Private: h.encode(), Peer: before.from})
	if why := rejection(id.rejected); !errors.Is(why, van.ErrReplaced) {
		t.Errorf("rejected with %v, want %v", why, van.ErrReplaced)
	}
	for _, c := range *s.tables.conns.Load() {
		if in := c.in; in != nil && in != before && in.handshake.incarnation == old.local.incarnation {
			t.Error("the process that was replaced has a new connection")
		}
	}
}

// requestedID is a connect request with a side effect when its device is read.
type requestedID struct {
	verbs.ID
	dev       verbs.Device
	meanwhile func()
	rejected  []byte
}

func (id *requestedID) Device() (verbs.Device, error) {
	if f := id.meanwhile; f != nil {
		id.meanwhile = nil
		f()
	}
	return id.dev, nil
}

func (id *requestedID) SetCookie(uint64) {}

func (id *requestedID) CreateQP(verbs.QPOptions) (verbs.QP, error) {
	return nil, errors.New("too late: it has been let in")
}

func (id *requestedID) Reject(private []byte) error {
	id.rejected = private
	return nil
}

func (id *requestedID) Destroy() error { return nil }

// TestReplacementWaitsForTheEnd: data of a new process waits until the queue pairs of the connection of the process before it are destroyed, since values
// could be written to receive buffers there until then.
func TestReplacementWaitsForTheEnd(t *testing.T) {
	r := newRig(t)
	s, old, next := r.node(8), r.node(9), r.node(9)
	r.link(old, s)
	in := s.incomingOf(9)
	in.once.Do(func() { in.failed.Store(true) }) // and it is not destroyed yet
	r.link(next, s)
	next.must(push(s, 1, 1, value(3000, 1)))
	latest := (*s.tables.peers.Load())[9].inbound.Load()
	r.until("its slot request waits", func() bool {
		latest.mu.Lock()
		defer latest.mu.Unlock()
		return len(latest.slots.waiting[1]) > 0
	})
	next.must(control(s, 2))
	m := s.next()
	if !m.IsControl() {
		t.Error("data arrived while the earlier connection was open")
	}
	m.Release()
	s.destroyInbound(in, nil, nil)
	s.wantValue(1, value(3000, 1))
}

// TestReplacementWaitsForALateConnection: data of a new process also waits for a connection that the process before it has opened later.
func TestReplacementWaitsForALateConnection(t *testing.T) {
	r := newRig(t)
	s, old, next := r.node(8), r.node(9), r.node(9)
	r.link(old, s)
	first := s.incomingOf(9)
	next.connect(s)
	next.wantUp(s)
	(*old.tables.peers.Load())[8].currentLink().fail(errors.New("the test ends it")) // old connects again
	var late *inbound
	r.until("the other process has connected again", func() bool {
		for _, c := range *s.tables.conns.Load() {
			if x := c.in; x != nil && x != first && x.handshake.incarnation == old.local.incarnation && x.confirmed.Load() != 0 {
				late = x
			}
		}
		return late != nil && s.incomingOf(9) == late
	})
	r.until("its first connection is destroyed", func() bool { return (*s.tables.conns.Load())[first.serial] == nil })
	late.once.Do(func() { late.failed.Store(true) }) // and it is not destroyed yet
	s.connect(next)
	s.wantUp(next)
	next.must(push(s, 1, 1, value(3000, 1)))
	latest := (*s.tables.peers.Load())[9].inbound.Load()
	r.until("its slot request waits, or is granted", func() bool {
		latest.mu.Lock()
		defer latest.mu.Unlock()
		return len(latest.slots.waiting[1]) > 0 || len(latest.slots.granted) > 0
	})
	next.must(control(s, 2))
	m := s.next()
	if !m.IsControl() {
		t.Error("data arrived while a connection of the other process was open")
	}
	m.Release()
	s.destroyInbound(late, nil, nil)
	s.wantValue(1, value(3000, 1))
}

// TestEndedConnectionsAreFreed: a connection does not keep the memory of earlier ones under the same node id.
func TestEndedConnectionsAreFreed(t *testing.T) {
	r := newRig(t)
	s := r.make(8)
	s.times.probe = 10 * time.Millisecond // the queue of probes has the ended ones until they are due
	s.listenOn(0)
	s.Start(func(m *van.Message) { s.in <- m.Retain() })
	var ended []weak.Pointer[inbound]
	for range 3 {
		r.link(r.node(9), s)
		ended = append(ended, weak.Make(s.incomingOf(9)))
	}
	r.link(r.node(9), s) // it replaces the last of them
	r.until("the memory of ended connections is freed", func() bool {
		runtime.GC()
		return !slices.ContainsFunc(ended, func(p weak.Pointer[inbound]) bool { return p.Value() != nil })
	})
}

// Data of a process that is not in the node table yet waits until it is. Control messages arrive at once.
func TestReplacementWaitsForTheTable(t *testing.T) {
	r := newRig(t)
	s, old := r.node(8), r.node(9)
	r.link(old, s)
	next := r.node(9)
	next.connect(s)
	next.wantUp(s)
	next.must(push(s, 1, 1, value(3000, 1)))
	next.must(control(s, 2))
	m := s.next()
	if !m.IsControl() || m.Timestamp != 2 {
		t.Errorf("timestamp %d came first, want the control message", m.Timestamp)
	}
	m.Release()
	old.must(push(s, 1, 3, value(3000, 3))) // the table still names its process
	s.wantValue(3, value(3000, 3))
	if len(s.in) > 0 {
		t.Error("data of a process came that the table does not name")
	}
	s.connect(next)
	s.wantValue(1, value(3000, 1))
}

// Data that a process outside of the node table writes to a slot it was granted before is dropped, counted and logged.
func TestDataOfAProcessNotInTheTable(t *testing.T) {
	r := newRig(t)
	w, s := r.pair()
	p := newRaw(r, rawAddr, van.Node{ID: 11})
	c := p.dial(s, 2, func(q int) []byte {
		h := handshake{node: 11, port: p.port, host: p.addr.String(), epoch: 77, qp: q, qpCount: 2, incarnation: 5}
		return h.encode()
	})
	slot := c.ask(slotRequest{metaLen: conn.CellSize, dataNum: nativeSlotRequest, data: [4]uint64{4096, kindHost, 4096}, origin: 1})
	s.connect(&testNode{who: van.Node{ID: 11, Hostname: "10.77.9.9", Port: 1, Endpoint: (&van.NodeExtension{Incarnation: 6}).Encode()}})
	c.notify(0, slot.index, slot.meta, slot.metaKey, encodeParts(r, push(s, 1, 1, value(100, 1)), []placement{{}}, value(100, 1), trailer{}))
	s.says("rdma: dropped a message of a process that the cluster's table does not name", van.NodeName(11))
	if n := s.Stats().FencedMessages; n != 1 {
		t.Errorf("%d messages are counted, want 1", n)
	}
	w.must(push(s, 1, 2, value(3000, 2)))
	s.wantValue(2, value(3000, 2)) // the first message that arrives
	p.end()
}

// A node does not accept another process than the one that Connect names.
func TestAnotherProcessAnswers(t *testing.T) {
	r := newRig(t)
	w, s := r.node(9), r.node(8)
	who := s.who
	who.Endpoint = (&van.NodeExtension{Incarnation: 77}).Encode()
	w.connect(&testNode{who: who})
	w.wantChange("another one answers", func(c change) bool { return !c.up && c.id == 8 })
	if (*w.tables.peers.Load())[8].currentLink() != nil {
		t.Error("it has connected")
	}
	w.connect(s)
	w.wantUp(s)
}

// A host that loses its power leaves nothing at its peers: no connection, no slots, no registered bytes.
func TestPowerLossLeavesNothing(t *testing.T) {
	r := newRig(t)
	s := r.node(8)
	type level struct{ connections, places, bytes int }
	look := func() level { return level{len(s.incoming()), s.budget.slots.Len(), int(s.budget.registered.Load())} }
	var first level
	for i := range 5 {
		n := r.node(9)
		r.link(n, s)
		hoard(n, s, 16, 60<<10)
		if i == 0 {
			first = look()
		}
		r.until(fmt.Sprintf("all of predecessor %d is released: %+v", i, first), func() bool {
			now := look()
			return now.connections == 1 && now.places <= first.places+2 && now.bytes <= first.bytes+first.bytes/4
		})
		if i == 4 {
			break
		}
		n.kill(false)
	}
}

// A peer that vanishes silently, and is not replaced, leaves nothing either.
func TestSilentLossLeavesNothing(t *testing.T) {
	r := newRig(t)
	r.probes = true
	s, n := r.node(8), r.node(9)
	n.connect(s)
	n.wantUp(s)
	hoard(n, s, 8, 60<<10)
	in := s.incomingOf(9)
	r.until("nothing is under way to it", func() bool {
		in.mu.Lock()
		defer in.mu.Unlock()
		return in.owed.count.Load() == 0 && in.sends.Idle()
	})
	n.kill(false)
	r.until("all of it is released", func() bool {
		return len(s.incoming()) == 0 && s.budget.slots.Len() == 0 && s.budget.registered.Load() == 0
	})
}
