package rdma

import (
	"fmt"
	"math/bits"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/rdma/conn"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
	"github.com/stepaf/stepaf-go/van/rendezvous"
)

// This file owns the dialect between two nodes of this library: slots shared by all keys of a size class, credits, refusals, and a
// trailer behind each meta.

// nativeOut is the dialect of a link to a native node.
type nativeOut struct {
	keySlots map[uint64]bool // whether a key has slots of its own; no entry: unknown
}

// maxKeys limits the entries of keys without slots of their own.
const maxKeys = 1 << 16

func (d *nativeOut) setKeySlot(key uint64, own bool) {
	if len(d.keySlots) >= maxKeys {
		for k, own := range d.keySlots {
			if !own {
				delete(d.keySlots, k)
			}
		}
	}
	d.keySlots[key] = own
}

func (d *nativeOut) check(*outgoing) error { return nil }

func (d *nativeOut) need(o *outgoing) rendezvous.Need {
	n := rendezvous.Need{OneShot: o.oneShot, Meta: len(o.meta) + trailerLen}
	if n.Meta > conn.CellSize {
		n.Meta = 1 << bits.Len(uint(n.Meta-1)) // a power of two, so that the slot can be used again for other metas
	}
	n.Meta = max(n.Meta, conn.CellSize)
	if !o.direct && !o.inMeta && !(o.request && !o.push && o.singleKey) {
		n.Exact = o.packedLen()
	}
	n.Route.Class, n.Data = rendezvous.Class(n.Exact)
	n.Route.Host = n.Exact > 0 && !o.singleKey // the payload includes keys
	if o.oneShot {
		n.Data = n.Exact
		return n
	}
	if o.request && o.push && o.singleKey && n.Exact > 0 {
		if own, known := d.keySlots[o.key]; own || !known {
			n.Route = rendezvous.Route{Key: o.key, Push: true, Request: true}
			if own {
				n.Data = n.Exact
			}
		}
	}
	return n
}

func (d *nativeOut) completeRequest(s *slotRequest, o *outgoing, need rendezvous.Need) {
	s.dataNum = nativeSlotRequest
	s.data[0], s.data[2] = uint64(need.Data), uint64(need.Exact)
	if o.push {
		s.data[1] |= kindPush
	}
	if o.request {
		s.data[1] |= kindRequest
	}
	if need.Route.Host {
		s.data[1] |= kindHost
	}
	if o.oneShot {
		s.data[1] |= kindOneShot
	} else if need.Route.Class == 0 {
		s.data[1] |= kindKeyed
		s.key = need.Route.Key
	}
}

func (d *nativeOut) handleReply(snd *rendezvous.Sender[*outgoing], r *slotReply) (refused *outgoing, why error, ok bool) {
	need, known := snd.Requested(r.origin)
	keyed := known && !need.OneShot && need.Route.Class == 0
	switch {
	case r.flags&replyRefused != 0:
		if known && snd.Shared(need) {
			d.setKeySlot(need.Route.Key, false)
		}
		o, need, dropped := snd.Refused(r.origin)
		switch {
		case !dropped:
			return nil, nil, true
		case r.flags&replyBudget != 0:
			return o, fmt.Errorf("%w: %d bytes, with what it has registered for this node, are more than STEPAF_RDMA_PEER_BUDGET of the peer allows", van.ErrQueueFull, need.Data), true
		}
		return o, fmt.Errorf("the peer has no memory for %d bytes", need.Data), true
	case r.index >= maxIndex || !known || r.flags&replyNone != 0 && !keyed:
		return nil, nil, false
	case r.flags&replyNone != 0:
		d.setKeySlot(need.Route.Key, false)
		snd.UseShared(r.origin)
		return nil, nil, true
	}
	var shared *rendezvous.Route
	if keyed {
		d.setKeySlot(need.Route.Key, r.flags&replyShared == 0)
		if r.flags&replyShared != 0 {
			class, _ := rendezvous.Class(need.Data)
			shared = &rendezvous.Route{Class: class}
		}
	}
	snd.Reply(r.origin, r.slot(), shared)
	return nil, nil, true
}

func (d *nativeOut) requestAnswered(*rendezvous.Sender[*outgoing], uint64, bool) bool { return false }

// mustSend: an answer to an invalidated request is sent, since the receiver drops it.
func (d *nativeOut) mustSend(*outgoing) bool { return true }

func (d *nativeOut) layout(o *outgoing) (n int, inMeta bool) {
	if o.inMeta {
		return aligned(len(o.meta)) + o.packedLen() + trailerLen, true
	}
	return len(o.meta) + trailerLen, false
}

func (d *nativeOut) trailer(o *outgoing, inMeta bool) (trailer, bool) {
	t := trailer{packed: !o.singleKey, placed: o.direct && !inMeta, frames: o.frames, lens: o.lens, inMeta: inMeta}
	if inMeta {
		t.metaLen = len(o.meta)
	}
	return t, true
}

// nativeIn is the dialect of a connection that a native node has opened.
type nativeIn struct{ slotSet }

func (d nativeIn) need(s *slotRequest) (n rendezvous.Need, kind uint64, err error) {
	return s.need(true)
}

func (d nativeIn) refuse(origin uint64, flags uint32, _ error) {
	d.sendReply(&slotReply{origin: origin, flags: replyRefused | flags}, nil)
}

// sharedSlotsSuffice reports whether the key needs no slot of its own: it has no registered buffer, and its size class has many slots.
// Otherwise the number of slots would grow with the number of keys.
func (d nativeIn) sharedSlotsSuffice(s *slotRequest, need rendezvous.Need, kind uint64) bool {
	if kind&kindKeyed == 0 || need.Data == 0 {
		return false
	}
	if _, ok := d.registeredBuffer(s, need, kind); ok {
		return false
	}
	class, size := rendezvous.Class(need.Data)
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.slots.granted[rendezvous.Route{Class: class}]) >= rendezvous.Eager(size)
}

func (d nativeIn) route(need rendezvous.Need, kind uint64) rendezvous.Route {
	if kind&kindKeyed != 0 {
		return need.Route
	}
	class, _ := rendezvous.Class(need.Data)
	return rendezvous.Route{Host: need.Route.Host, Class: class}
}

func (d nativeIn) usesBuffer(kind uint64) bool { return kind&kindKeyed != 0 }

func (d nativeIn) needsData(need rendezvous.Need) bool { return need.Data > 0 }

func (d nativeIn) dataCost(_ *slotRequest, need rendezvous.Need, kind uint64) int {
	if kind&kindKeyed != 0 {
		_, size := rendezvous.Class(need.Data)
		return size
	}
	return need.Data
}

func (d nativeIn) valueArea(l *receiveSlot, _ *slotRequest, need rendezvous.Need, kind uint64, r *slotReply) (*area, error) {
	if kind&kindKeyed != 0 {
		r.flags |= replyShared
		l.Route = rendezvous.Route{}
		l.Route.Class, l.Data = rendezvous.Class(need.Data)
	}
	return d.newArea(l.Data, need.Route.Host)
}

// record adds l to the slots of its route. Slots of one key end when its sender has outgrown them, see endOutgrown. in.mu is held.
func (d nativeIn) record(l *receiveSlot) {
	if !l.OneShot {
		d.slots.granted[l.Route] = append(d.slots.granted[l.Route], l)
	}
}

// endOutgrown ends the slots of q's key that are smaller than q asks for and older than q. By sending q, the peer has released them,
// even if q is refused.
func (d nativeIn) endOutgrown(q *slotRequest) {
	need, kind, err := d.need(q)
	if err != nil || kind&kindKeyed == 0 || need.OneShot {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return
	}
	all := d.slots.granted[need.Route]
	remaining := all[:0]
	for _, x := range all {
		if x.Memory.origin >= q.origin || x.Data >= need.Exact && len(x.Memory.meta.Mem) >= need.Meta {
			remaining = append(remaining, x)
			continue
		}
		d.endSlot(x)
	}
	clear(all[len(remaining):])
	if d.slots.granted[need.Route] = remaining; len(remaining) == 0 {
		delete(d.slots.granted, need.Route)
	}
}

func (d nativeIn) handleSend(c *verbs.Completion, t *trailer) (known bool) {
	switch c.Imm {
	case immUp:
		state := int32(up)
		if data := recvData(c); len(data) > 0 && data[0] == upAfterLoss {
			state = upAfterLoss
		}
		if !d.confirmed.CompareAndSwap(0, state) {
			return false
		}
		// This also holds if a later connection of the process has been linked meanwhile. A process that had the id before belongs to
		// no peer.
		if p := (*d.v.tables.peers.Load())[d.handshake.node]; p != nil && p.node.Port == d.handshake.port {
			go d.v.notifyInbound(p, d.inbound)
		}
	case immReturn:
		if err := t.get(recvData(c)); err != nil {
			d.malformed(err)
			return true
		}
		d.handleReturnedSlots(t)
	default:
		return false
	}
	return true
}

func (d nativeIn) previousEnd(b []byte) (end int, err error) {
	const least = rawMeta + trailerLen
	if !d.handshake.bundles || len(b) < least {
		return 0, nil // splitMeta refuses what is too short
	}
	if end = int(le.Uint16(b[len(b)-trailerLen+offBefore:])); end > 0 && (end < least || aligned(end) > len(b)-least) {
		return 0, &van.FieldError{Field: "trailer end of the previous message", Value: end, Want: fmt.Sprintf("0, or %d to %d", least, len(b)-least)}
	}
	return end, nil
}

func (d nativeIn) splitMeta(b []byte, t *trailer) (meta, behind []byte, err error) {
	if len(b) < rawMeta+trailerLen {
		return nil, nil, &van.FieldError{Field: "meta", Value: fmt.Sprintf("%d bytes", len(b)), Want: fmt.Sprintf("at least %d", rawMeta+trailerLen)}
	}
	if err := t.get(b[len(b)-trailerLen:]); err != nil {
		return nil, nil, err
	}
	b = b[:len(b)-trailerLen]
	if t.inMeta {
		if t.metaLen < rawMeta || aligned(t.metaLen) > len(b) {
			return nil, nil, &van.FieldError{Field: "trailer meta length", Value: t.metaLen, Want: fmt.Sprintf("%d to %d", rawMeta, len(b))}
		}
		behind, b = b[aligned(t.metaLen):], b[:t.metaLen]
	}
	if t.n > 0 {
		d.v.handleCredits(d.inbound, t)
	}
	return b, behind, nil
}

func (d nativeIn) handleOverwrite(l *receiveSlot, _ uint64) error {
	return &van.FieldError{Field: "slot", Value: l.Index(), Want: "one that has been returned"}
}

func (d nativeIn) endsSlot(*van.Message) bool { return false }

func (d nativeIn) returnsCredits() bool { return true }

// frames locates the frames of a message. behind holds the inline frames.
func (d nativeIn) frames(rx *received, l *receiveSlot, t *trailer, behind []byte) error {
	m := &rx.msg
	m.Frames = t.frames
	data, room := l.Memory.data, min(l.Data, l.Memory.data.Len())
	if t.inMeta {
		data, room = backend.Bytes(behind), len(behind)
	}
	switch {
	case t.packed:
		return rx.packedFrames(l, t, data, room)
	case t.frames == 0:
		return nil
	}
	rx.oneKey()
	n := int(t.lens[1])
	if m.Request && !m.Push {
		return nil
	}
	if !t.placed && n > room {
		return &van.FieldError{Field: "trailer value length", Value: n, Want: fmt.Sprintf("up to %d", room)}
	}
	var into backend.Mem
	var copied bool
	if !m.Request && !m.Push {
		var small []byte
		if t.inMeta && !t.placed {
			small = behind[:n]
		}
		into, copied = d.v.endPull(d.handshake.node, &m.Meta, small)
	}
	if t.placed {
		if m.Push { // true of all requests that reach this point
			return &van.FieldError{Field: "trailer flags", Value: "placed", Want: "that only in answers to pull requests"}
		}
		if into.Len() == n { // otherwise the answer is late: no caller waits for it
			m.Vals, m.Placed = into, true
		}
		return nil
	}
	if n == 0 {
		return nil
	}
	if copied {
		m.Vals, m.Placed = into, true
		return nil
	}
	m.Vals = data.Sub(0, n)
	m.Placed = !t.inMeta && l.Memory.region != nil
	rx.slot = l
	return nil
}
