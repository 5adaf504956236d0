package rdma

import (
	"errors"
	"fmt"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
	"github.com/stepaf/stepaf-go/van/rendezvous"
)

// This file owns the dialect between a node of this library and a StepMesh node: one slot for each key, as large as the key's first message,
// and nothing but the meta to describe a message. Messages that it cannot express are refused before they are sent.

// stepmeshOut is the dialect of a link to a StepMesh node.
type stepmeshOut struct {
	keySizes map[uint64]int // bytes of the peer's buffer for requests of a key
}

func (d *stepmeshOut) check(o *outgoing) error {
	switch {
	case o.isBatch():
		return fmt.Errorf("%w: a batch: the node table names a node of this library, and a node of the C++ library answers", van.ErrInvalid)
	case o.invalidated, o.size == 0 && (o.oneShot || !o.request), o.form == formKey && o.parts[0].placed && o.parts[0].len > 0:
		return nil
	case o.form == formKey && o.request && max(o.parts[0].len, o.parts[0].into.Len()) > 0:
		// The peer has one buffer for all requests of a key, whose size the first request sets. It writes only pushes there. It
		// answers pulls to the address in the request.
		n := max(o.parts[0].len, o.parts[0].want)
		have, known := d.keySizes[o.key]
		if !known {
			d.keySizes[o.key], o.setsSize = n, true
		} else if o.push && n > have {
			return fmt.Errorf("%w: %w: key %d has %d bytes, the peer, a node of the C++ library, has room for the %d of the first time",
				van.ErrInvalid, rendezvous.ErrGrown, o.key, n, have)
		}
		return nil
	}
	return fmt.Errorf("%w: the peer is a node of the C++ library: over RDMA a message to it has one key of 8 bytes and a value of val_len bytes, at least 1; a pull names the destination of its answer, and the answer is written there",
		van.ErrInvalid)
}

func (d *stepmeshOut) uncheck(o *outgoing) {
	if o.setsSize {
		delete(d.keySizes, o.key)
	}
}

func (d *stepmeshOut) need(o *outgoing) rendezvous.Need {
	n := rendezvous.Need{OneShot: o.oneShot, Meta: len(o.meta)}
	n.Route = rendezvous.Route{Key: o.key, Push: o.push, Request: o.request}
	if o.form == formKey && o.parts[0].push { // other values are not written to the slot
		n.Data = o.parts[0].len
	}
	return n
}

func (d *stepmeshOut) completeRequest(s *slotRequest, o *outgoing, _ rendezvous.Need) {
	if o.oneShot {
		return
	}
	s.key, s.dataNum = o.key, uint64(o.frames)
	if o.form != formKey {
		return
	}
	x := &o.parts[0]
	if s.data[0], s.data[1] = 8, uint64(x.len); o.frames == van.MaxFrames {
		s.data[2] = 4
	}
	if x.want > 0 {
		s.data[1] = uint64(min(x.want, d.keySizes[o.key]))
	}
}

func (d *stepmeshOut) handleReply(snd *rendezvous.Sender[*outgoing], r *slotReply) (refused *outgoing, why error, ok bool) {
	return nil, nil, r.index < maxIndex && snd.Reply(r.origin, r.slot())
}

// A node of the C++ library announces no buffers.
func (d *stepmeshOut) noteBuffer(remoteBuffer) {}
func (d *stepmeshOut) noteDecoded(uint32)      {}
func (d *stepmeshOut) noteSent(*outgoing)      {}

func (d *stepmeshOut) layout(o *outgoing) int { return len(o.meta) }

// stepmeshIn is the dialect of a connection that a StepMesh node has opened.
type stepmeshIn struct{ slotSet }

func (d stepmeshIn) need(s *slotRequest) (rendezvous.Need, error) {
	n, err := s.need(false)
	if d.v.local.self.Role != van.Server {
		n.Data = 0
	}
	return n, err
}

// refuse ends the connection, since the peer would wait forever: its protocol has no refusal. An invalid slot request is dropped, as other
// invalid data is.
func (d stepmeshIn) refuse(_ uint64, _ uint32, why error) {
	if bad := (*van.FieldError)(nil); !errors.As(why, &bad) {
		d.fail(asLost(why))
	}
}

func (d stepmeshIn) dataCost(s *slotRequest, need rendezvous.Need) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	if a := d.slots.areas[s.key]; a != nil && a.Mem.Len() >= need.Data {
		return 0
	}
	return need.Data
}

func (d stepmeshIn) valueArea(s *slotRequest, need rendezvous.Need) (*area, error) {
	return d.keyArea(s.key, need.Data)
}

func (d stepmeshIn) handleSend(*verbs.Completion, *trailer) (known bool) { return false }

func (d stepmeshIn) splitMeta(b []byte, _ *trailer) (meta, behind []byte, err error) {
	return b, nil, nil
}

func (d stepmeshIn) handleOverwrite(l *receiveSlot, key uint64) error {
	d.noteOverwrite(l, key)
	return nil
}

// endsSlot reports true for messages for which the peer requests a slot each time.
func (d stepmeshIn) endsSlot(m *van.Message) bool { return m.IsControl() || m.SimpleApp }

// frames makes the frames of a message: they follow from the meta.
func (d stepmeshIn) frames(rx *received, l *receiveSlot, _ *trailer, _ []byte) error {
	m := &rx.msg
	if m.IsControl() || m.SimpleApp {
		return nil
	}
	if !m.Request {
		into := d.v.endRequest(d.handshake.node, &m.Meta)
		if m.Push {
			return nil
		}
		rx.oneKey()
		m.Vals, m.Placed = into, true
		return nil
	}
	rx.oneKey()
	if !m.Push || m.ValLen == 0 {
		return nil
	}
	if int(m.ValLen) < 0 || int(m.ValLen) > l.Data || int(m.ValLen) > l.Memory.data.Len() {
		return &van.FieldError{Field: "val_len", Value: m.ValLen, Want: fmt.Sprintf("0 to %d, what it has asked for", l.Data)}
	}
	m.Vals = l.Memory.data.Sub(0, int(m.ValLen))
	m.Placed = l.Memory.region != nil
	rx.slot = l
	return nil
}
