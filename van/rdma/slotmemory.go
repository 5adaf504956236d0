package rdma

import (
	"slices"
	"sync/atomic"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/rdma/conn"
	"github.com/stepaf/stepaf-go/van/rendezvous"
)

// This file owns the memory of receive slots: what it costs, and when it is freed.

// slotSet is a connection that a peer has opened, as the owner of its receive slots.
type slotSet struct{ *inbound }

// slotState is the receive slots of one connection. Its inbound's mu guards what is no atomic.
type slotState struct {
	granted map[rendezvous.Route][]*receiveSlot
	areas   map[uint64]*area    // of a StepMesh node, by key
	cells   conn.Cells          // for metas: what one peer may write to, no other may
	waiting [2][]pendingRequest // for a slot: of control messages, and others
	reclaim struct {            // slots that the peer is asked to give back
		at, since uint64 // when it was last asked; and first without an answer, or since then when a slot came free
	}
	suspect struct { // a slot to which a StepMesh node has written while a message lay there
		slot  *receiveSlot
		key   uint64
		since uint64
	}
	overwritten     atomic.Bool  // suspect.slot is not nil
	warned          bool         // that it has overwritten a value in use
	registeredBytes atomic.Int64 // for the peer
	oneShots        atomic.Int32 // slots for control messages
}

type receiveSlot = rendezvous.ReceiveSlot[slotMemory]

// slotMemory is a slot's.
type slotMemory struct {
	meta   conn.Cell
	data   backend.Mem
	area   *area        // that data lies in
	region *conn.Region // of a registered receive buffer
	bytes  int          // registered for meta
	origin uint64       // of the slot request; the peer counts them
}

// area is memory for values that several slots may share: those of one key of a
// StepMesh node.
type area struct {
	*conn.Block
	device *device
	refs   atomic.Int32
	of     *inbound // for whom it was registered; nil in tests
}

// Retain implements backend.Holder: an application that answers with what was pushed
// registers the memory once more, and must not find other memory at its address later.
func (a *area) Retain() { a.refs.Add(1) }

// Release implements backend.Holder.
func (a *area) Release() { a.put() }

func (a *area) put() {
	if a.refs.Add(-1) == 0 {
		a.device.removeArea(a)
		_ = a.Close()
		if a.of != nil {
			slotSet{a.of}.charge(-a.Mem.Len())
		}
	}
}

// charge counts bytes that are registered for the peer.
func (in slotSet) charge(n int) {
	in.slots.registeredBytes.Add(int64(n))
	in.v.budget.registered.Add(int64(n))
}

// metaBytes is what a meta of n bytes costs. The usual ones, of which there cannot be more
// than slots, are not counted.
func metaBytes(n int) int {
	if n <= conn.CellSize {
		return 0
	}
	return (n + conn.PageSize - 1) &^ (conn.PageSize - 1)
}

// newArea makes registered memory for values of the peer.
func (in slotSet) newArea(n int, host bool) (*area, error) {
	a, err := in.device.newArea(n, host)
	if err == nil {
		a.of = in.inbound
		in.charge(a.Mem.Len())
	}
	return a, err
}

// keyArea returns the memory for values of n bytes under key, with one more user.
func (in slotSet) keyArea(key uint64, n int) (*area, error) {
	in.mu.Lock()
	defer in.mu.Unlock()
	a := in.slots.areas[key]
	if a == nil || a.Mem.Len() < n {
		if in.closed {
			return nil, van.ErrClosed
		}
		grown, err := in.newArea(n, false)
		if err != nil {
			return nil, err
		}
		in.slots.areas[key] = grown
		if a != nil {
			a.put()
		}
		a = grown
	}
	a.refs.Add(1)
	return a, nil
}

// endSlot ends a slot, and what is owed for it: its index may soon be another slot's.
// in.mu is held.
func (in slotSet) endSlot(l *receiveSlot) {
	in.owed.credits = slices.DeleteFunc(in.owed.credits, func(i uint16) bool { return uint32(i) == l.Index() })
	in.owed.count.Store(int32(len(in.owed.credits)))
	if in.v.budget.slots.End(l) {
		in.freeSlot(l)
	}
}

// dropSlot ends a slot that the peer has given up. in.mu is held.
func (in slotSet) dropSlot(l *receiveSlot) {
	in.slots.granted[l.Route] = slices.DeleteFunc(in.slots.granted[l.Route], func(x *receiveSlot) bool { return x == l })
	in.endSlot(l)
}

// freeSlot gives back the memory of a slot that has ended and that nobody holds.
func (in slotSet) freeSlot(l *receiveSlot) {
	m := &l.Memory
	_ = in.slots.cells.Put(m.meta)
	in.charge(-m.bytes)
	if l.OneShot {
		in.slots.oneShots.Add(-1)
	}
	if m.area != nil {
		m.area.put()
	}
	if m.region != nil {
		m.region.Release()
	}
	l.Memory = slotMemory{}
}

// noteOverwrite notes that a message has come to a slot where another one lies. That one may
// have been answered, and be about to be let go.
func (in slotSet) noteOverwrite(l *receiveSlot, key uint64) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if !in.slots.warned && in.slots.suspect.slot == nil {
		in.slots.suspect.slot, in.slots.suspect.key, in.slots.suspect.since = l, key, clock.Now()
		in.slots.overwritten.Store(true)
		in.device.active.Add(&in.activeDue)
	}
}

// checkOverwrite warns if the slot has had two messages for a while.
func (in slotSet) checkOverwrite(now uint64) {
	in.mu.Lock()
	defer in.mu.Unlock()
	x := &in.slots.suspect
	switch {
	case x.slot == nil:
		return
	case x.slot.Holders() < 2:
	case now-x.since < uint64(in.v.times.overwriteGrace):
		return
	default:
		in.slots.warned = true
		in.v.log.Warn("rdma: a peer has overwritten a value that is still in use: over RDMA a node of the C++ library may use a key again once it has its answer",
			"peer", in.handshake.name(), "key", x.key)
	}
	x.slot = nil
	in.slots.overwritten.Store(false)
}
