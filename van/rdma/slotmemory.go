package rdma

import (
	"slices"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/rdma/conn"
	"github.com/stepaf/stepaf-go/van/rendezvous"
)

// This file owns the memory of receive slots: its cost, and its release.

// slotSet is an inbound connection in its role as the owner of receive slots.
type slotSet struct{ *inbound }

// slotState holds the receive slots of one connection. Its inbound's mu guards all fields but atomics.
type slotState struct {
	granted map[rendezvous.Route][]*receiveSlot
	areas   map[uint64]*area             // of a StepMesh node, by key
	buffers map[bufferAt]announcedBuffer // of a native node; only the holder of the feed uses it
	cells   conn.Cells                   // for metas; each peer has its own, so that no other can write there
	waiting [2][]pendingRequest          // slot requests by priority: of control messages, and of data
	reclaim struct {                     // the last request to return slots
		at, since uint64 // at: when it was sent; since: when it was first sent without a response, or when a slot last came free after that
	}
	suspect struct { // a slot to which a StepMesh node wrote while it held a message
		slot  *receiveSlot
		key   uint64
		since uint64
	}
	warned          bool         // the log says that the peer has overwritten a value in use
	registeredBytes atomic.Int64 // all memory registered for the peer
	oneShots        atomic.Int32 // number of slots for control messages
}

type receiveSlot = rendezvous.ReceiveSlot[slotMemory]

// slotMemory is the memory of a slot.
type slotMemory struct {
	meta   conn.Cell
	data   backend.Mem
	area   *area        // contains data
	region *conn.Region // of a receive buffer to which a StepMesh node writes; otherwise nil
	bytes  int          // registered for meta
}

// area is registered memory for values. Several slots may share it: those of one key of a StepMesh node.
type area struct {
	*conn.Block
	device *device
	refs   atomic.Int32
	of     *inbound // the connection it was registered for; nil in tests
}

// Retain implements backend.Holder. An application that answers with pushed memory registers that memory again, and must not find other
// memory at its address later.
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

// charge adds n to the bytes registered for the peer.
func (in slotSet) charge(n int) {
	in.slots.registeredBytes.Add(int64(n))
	in.v.budget.registered.Add(int64(n))
}

// metaBytes returns the cost of a meta of n bytes. Metas that fit a cell cost nothing: their number is limited by that of slots.
func metaBytes(n int) int {
	if n <= conn.CellSize {
		return 0
	}
	return (n + conn.PageSize - 1) &^ (conn.PageSize - 1)
}

// newArea registers new memory for values of the peer.
func (in slotSet) newArea(n int, host bool) (*area, error) {
	a, err := in.device.newArea(n, host)
	if err == nil {
		a.of = in.inbound
		in.charge(a.Mem.Len())
	}
	return a, err
}

// keyArea returns the memory for values of n bytes under key, with one more reference.
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

// endSlot ends a slot, and removes its credits: its index may soon belong to another slot. in.mu is held.
func (in slotSet) endSlot(l *receiveSlot) {
	in.owed.credits = slices.DeleteFunc(in.owed.credits, func(i uint16) bool { return uint32(i) == l.Index() })
	in.owed.count.Store(int32(len(in.owed.credits)))
	if in.v.budget.slots.End(l) {
		in.freeSlot(l)
	}
}

// dropSlot ends a slot that the peer has returned. in.mu is held.
func (in slotSet) dropSlot(l *receiveSlot) {
	in.slots.granted[l.Route] = slices.DeleteFunc(in.slots.granted[l.Route], func(x *receiveSlot) bool { return x == l })
	in.endSlot(l)
}

// freeSlot frees the memory of a slot that has ended and has no references.
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

// noteOverwrite records that a message was written to a slot that holds another one. That one may have been answered already, and be about
// to be released.
func (in slotSet) noteOverwrite(l *receiveSlot, key uint64) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if !in.slots.warned && in.slots.suspect.slot == nil {
		in.slots.suspect.slot, in.slots.suspect.key, in.slots.suspect.since = l, key, clock.Now()
		in.device.active.Add(&in.activeDue)
	}
}

// checkOverwrite warns if the suspect slot has held two messages for overwriteGrace. in.mu is held.
func (in slotSet) checkOverwrite(now uint64) {
	x := &in.slots.suspect
	switch {
	case x.slot == nil:
		return
	case x.slot.Holders() < 2:
	case time.Duration(now-x.since) < in.v.times.overwriteGrace:
		in.device.active.Add(&in.activeDue)
		return
	default:
		in.slots.warned = true
		in.v.log.Warn("rdma: a peer has overwritten a value that is still in use: over RDMA a node of the C++ library may use a key again once it has its answer",
			"peer", in.handshake.name(), "key", x.key)
	}
	x.slot = nil
}
