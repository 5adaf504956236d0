package rdma

import (
	"fmt"
	"math/bits"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/rdma/conn"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
	"github.com/stepaf/stepaf-go/van/rendezvous"
)

// This file owns the dialect between two nodes of this library: slots shared by all keys of a size class, credits, refusals, and a
// trailer behind each meta.

// nativeOut is the dialect of a link to a native node.
type nativeOut struct {
	buffers map[uint64]*peerBuffer // receive buffers that the peer has announced, by key
	sent    uint32                 // number of messages so far
	decoded uint32                 // number of those that the peer has decoded
	split   bool                   // values of minSplit bytes are split over several queue pairs
}

// peerBuffer is a receive buffer of the peer. The peer copies values of its key that arrive elsewhere to the buffer when it decodes
// them. A value may therefore be written there only when the peer has decoded all earlier messages with such values: otherwise an older
// value could replace it.
type peerBuffer struct {
	remoteBuffer
	after uint32 // the last message that may have a value of the key elsewhere
	last  placed // the value that was last written to the buffer
}

// placed is a value that was written to a receive buffer: the length and the number of its message.
type placed struct {
	len    int
	number uint32
}

// maxBuffers limits the receive buffers that a peer may announce.
const maxBuffers = 1 << 16

func (d *nativeOut) check(*outgoing) error { return nil }
func (d *nativeOut) uncheck(*outgoing)     {}

func (d *nativeOut) need(o *outgoing) rendezvous.Need {
	n := rendezvous.Need{OneShot: o.oneShot, Meta: d.layout(o)}
	if n.Meta > conn.CellSize {
		n.Meta = 1 << bits.Len(uint(n.Meta-1)) // a power of two, so that the slot can be used again for other metas
	}
	n.Meta = max(n.Meta, conn.CellSize)
	slot := d.place(o)
	if n.Data = slot; !o.oneShot {
		n.Route.Class, n.Data = rendezvous.Class(slot)
		n.Route.Host = slot > 0 && o.form == formFrames // the values include keys
	}
	return n
}

func (d *nativeOut) completeRequest(s *slotRequest, o *outgoing, need rendezvous.Need) {
	s.dataNum, s.data[0] = nativeSlotRequest, uint64(need.Data)
	if need.Route.Host {
		s.data[1] |= kindHost
	}
	if o.oneShot {
		s.data[1] |= kindOneShot
	} else if len(o.parts) == 1 && o.parts[0].push && o.parts[0].mem.Len() > 0 {
		s.data[1] |= kindPush
		s.data[2], s.key = uint64(o.parts[0].len), o.parts[0].key
	}
}

func (d *nativeOut) handleReply(snd *rendezvous.Sender[*outgoing], r *slotReply) (refused *outgoing, why error, ok bool) {
	switch {
	case r.flags&replyBuffer != 0:
		d.noteDecoded(r.index)
		return nil, nil, snd.NotNeeded(r.origin)
	case r.flags&replyRefused == 0:
		return nil, nil, r.index < maxIndex && snd.Reply(r.origin, r.slot())
	}
	o, need, dropped := snd.Refused(r.origin)
	switch {
	case !dropped:
		return nil, nil, true
	case r.flags&replyBudget != 0:
		return o, fmt.Errorf("%w: %d bytes, with what it has registered, are more than STEPAF_RDMA_PEER_BUDGET or STEPAF_RDMA_BUDGET of the peer allows", van.ErrQueueFull, need.Data), true
	}
	return o, fmt.Errorf("the peer has no memory for %d bytes", need.Data), true
}

func (d *nativeOut) noteBuffer(b remoteBuffer) {
	if _, known := d.buffers[b.key]; known || len(d.buffers) < maxBuffers {
		d.buffers[b.key] = &peerBuffer{remoteBuffer: b, after: d.sent}
	}
}

// bufferFor returns the buffer to which a value of n bytes may be written under key now, or nil.
func (d *nativeOut) bufferFor(key uint64, n int) *peerBuffer {
	b := d.buffers[key]
	if b == nil || b.len < n || int32(d.decoded-b.after) < 0 {
		return nil
	}
	if d.split && b.last.len != n && max(b.last.len, n) >= minSplit && int32(d.decoded-b.last.number) < 0 {
		// The parts of the two values have different bounds, and queue pairs are not ordered.
		return nil
	}
	return b
}

func (d *nativeOut) noteDecoded(n uint32) { d.decoded = n }

func (d *nativeOut) noteSent(o *outgoing) {
	d.sent++
	if len(d.buffers) == 0 || !o.request {
		return
	}
	for i := range o.parts {
		x := &o.parts[i]
		switch b := d.buffers[x.key]; {
		case b == nil || !x.push || x.len == 0:
		case x.placed:
			b.last = placed{x.len, d.sent}
		default:
			b.after = d.sent
		}
	}
}

// place decides where the values of o are written, and stores that in o. It returns how many bytes are written to the slot's value memory.
func (d *nativeOut) place(o *outgoing) (slot int) {
	for i := range o.parts {
		x := &o.parts[i]
		if x.mem.Len() == 0 {
			continue
		}
		if x.push && o.form != formFrames {
			b := d.bufferFor(x.key, x.len)
			if x.placed = b != nil; x.placed {
				x.addr, x.rkey = b.addr, b.rkey
			}
		}
		if !x.placed {
			slot = aligned(slot) + x.len
		}
	}
	return slot
}

func (d *nativeOut) layout(o *outgoing) int {
	if o.form == formPlain {
		return len(o.meta) + trailerLen
	}
	return aligned(len(o.meta)) + aligned(placementLen*len(o.parts)) + o.inline + trailerLen
}

// nativeIn is the dialect of a connection that a native node has opened.
type nativeIn struct{ slotSet }

func (d nativeIn) need(s *slotRequest) (rendezvous.Need, error) { return s.need(true) }

func (d nativeIn) refuse(origin uint64, flags uint32, _ error) {
	d.sendReply(&slotReply{origin: origin, flags: replyRefused | flags}, nil)
}

func (d nativeIn) dataCost(_ *slotRequest, need rendezvous.Need) int { return need.Data }

func (d nativeIn) valueArea(_ *slotRequest, need rendezvous.Need) (*area, error) {
	return d.newArea(need.Data, need.Route.Host)
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

func (d nativeIn) splitMeta(b []byte, t *trailer) (meta, behind []byte, err error) {
	if len(b) < rawMeta+trailerLen {
		return nil, nil, &van.FieldError{Field: "meta", Value: fmt.Sprintf("%d bytes", len(b)), Want: fmt.Sprintf("at least %d", rawMeta+trailerLen)}
	}
	if err := t.get(b[len(b)-trailerLen:]); err != nil {
		return nil, nil, err
	}
	b = b[:len(b)-trailerLen]
	if t.metaLen > 0 {
		if t.metaLen < rawMeta || aligned(t.metaLen) > len(b) {
			return nil, nil, &van.FieldError{Field: "trailer meta length", Value: t.metaLen, Want: fmt.Sprintf("%d to %d", rawMeta, len(b))}
		}
		behind, b = b[aligned(t.metaLen):], b[:t.metaLen]
	}
	if t.n > 0 || t.decoded > 0 {
		d.v.handleCredits(d.inbound, t)
	}
	return b, behind, nil
}

func (d nativeIn) handleOverwrite(l *receiveSlot, _ uint64) error {
	return &van.FieldError{Field: "slot", Value: l.Index(), Want: "one that has been returned"}
}

func (d nativeIn) endsSlot(*van.Message) bool { return false }
