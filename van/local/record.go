package local

import (
	"encoding/binary"
	"fmt"
	"math"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// A record in the ring is a message, a further value of a batch, a chunk of the last record's streamed parts, the pinned rest
// of these parts, or a pad. All numbers are little endian.
//
//	message, rest, value                  chunk
//	 0  u32  length of the record          0  u32  length of the record
//	 4  u8   1, 3, 5                       4  u8   2
//	 5  u8   data frames                   8  u32  bytes
//	 8  u32  slot of pinned parts         64  the bytes
//	12  u32  generation of the slot
//	16  4 parts: meta, keys, values, lengths
//	128 the inline parts and exports, each in its own cache line
//
// A pad has the length and the kind of a chunk, 4, and nothing else: the record after it is at the start of the ring.
//
// A batch is one record with all values in one part, if they are short and on the host. Otherwise each value has a record: the record of
// the first one is the message, the others have the kind 5, no meta and no keys. In the place of the meta's address, these records have
// the number of the batch, from 1 on, and the number of the value, in 16 bits each. Values of length 0 have no record.
//
// The parts of a rest are the bytes that the chunks before it have not carried. A part without such
// bytes is inline with length 0.
//
//	part
//	0  u64  address in the sender, of a pinned part
//	8  u32  bytes
//	12 u32  form
const (
	recordAlign = 64
	recordHead  = 128
	chunkHead   = 64
	padHead     = 64
	partHead    = 16

	kindMessage    = 1
	kindChunk      = 2
	kindRest       = 3
	kindPad        = 4
	kindValue      = 5
	kindAllocation = 6 // see exported.go
	kindPullMemory = 7

	partInline     = 1
	partPinned     = 2 // the receiver reads it from the sender's memory
	partStream     = 3 // follows in chunks, and possibly a rest
	partDevice     = 4 // the receiver's device copies it; the record has its export
	partMapped     = 5 // as partPinned, in memory that the receiver may have mapped; see exported.go
	partInReceiver = 6 // as partPinned; the value may also be in its destination in the receiver

	partCount = 1 + van.MaxFrames // meta, keys, values, lengths

	// streamFrom is the length from which a part is not inline. The receiver copies such a part
	// straight to its destination, while the sender writes the next chunk.
	streamFrom = 32 << 10

	// maxChunk is the maximum number of bytes of a stream in one record.
	maxChunk = 64 << 10

	maxRecord = recordHead + partCount*(streamFrom+recordAlign)

	noSlot = math.MaxUint32
)

func align(n int) int { return (n + recordAlign - 1) &^ (recordAlign - 1) }

// part is one part of a record.
type part struct {
	form uint32
	n    int
	off  int    // in the record, of an inline part
	addr uint64 // of a pinned part
}

// record is the decoded record of a message.
type record struct {
	kind      byte   // kindMessage, kindRest or kindValue
	batch     uint64 // number of the batch and of the value; 0: the record has all values of its message
	frames    int
	forms     uint8 // a bit for each form that parts have
	segments  int   // of a value on the device that lies in several allocations
	slot, gen uint32
	parts     [partCount]part

	receiverAddr, receiverInode uint64 // of partInReceiver
}

// present returns how many parts a message with that many frames has.
func present(frames int) int { return 1 + frames }

// pins reports whether the receiver uses the sender's memory. streams reports whether parts
// follow in chunks.
func (r *record) pins() bool    { return r.has(partDevice) || r.hasAddress() }
func (r *record) streams() bool { return r.has(partStream) }

// hasAddress reports whether parts have an address in the sender.
func (r *record) hasAddress() bool {
	return r.forms&(1<<partPinned|1<<partMapped|1<<partInReceiver) != 0
}

func (p *part) hasAddress() bool {
	return p.form == partPinned || p.form == partMapped || p.form == partInReceiver
}

func (r *record) has(form uint32) bool { return r.forms>>form&1 != 0 }

// inline reports whether all parts are in the record.
func (r *record) inline() bool { return r.forms == 1<<partInline }

// plan chooses the form of each part of msg and returns the length of its record. A long value gets the form
// large; other long parts are streamed, or pinned if large is partPinned. r.segments, and r.kind and r.batch of a value, must be set.
func (r *record) plan(msg *van.Message, large uint32) int {
	r.frames, r.forms, r.slot, r.gen = msg.Frames, 0, noSlot, 0
	if len(msg.Parts) > 0 && msg.PayloadLen() > 0 {
		r.frames = 2
	}
	if r.kind == 0 {
		r.kind = kindMessage
	}
	size := recordHead
	for i := range present(r.frames) {
		p := &r.parts[i]
		*p = part{form: partInline, off: size}
		switch {
		case i == 0 && r.kind == kindMessage:
			p.n = msg.EncodedLen()
		case i == partVals && len(msg.Parts) > 0:
			p.n = msg.PayloadLen()
		case i > 0:
			p.n = msg.Frame(i - 1).Len()
		}
		switch {
		case i > 0 && !msg.Frame(i-1).OnHost():
			p.form = partDevice
			size += align(exportSize(r.segments))
		case p.n < streamFrom:
			size += align(p.n)
		case large == partPinned:
			p.form = large
		case i != partVals || r.streams(): // a record does not mix streamed and other long parts
			p.form = partStream
		default:
			if p.form = large; large == partInReceiver {
				size += align(receiverRefLen)
			}
		}
		r.forms |= 1 << p.form
	}
	return size
}

// put writes the record of msg, as planned, to b. meta is the encoded meta if it is not
// inline. export describes the values if they are on the device. setSlot writes the slot
// later.
func (r *record) put(b []byte, size int, msg *van.Message, meta []byte, export *backend.Shared) error {
	if r.parts[0].form == partInline && r.kind == kindMessage {
		if err := msg.EncodeTo(b[recordHead : recordHead+r.parts[0].n]); err != nil {
			return err
		}
	}
	for i := range present(r.frames) {
		p := &r.parts[i]
		mem := backend.Bytes(meta)
		if i > 0 {
			mem = msg.Frame(i - 1)
		}
		switch {
		case p.form == partInReceiver:
			binary.LittleEndian.PutUint64(b[p.off:], r.receiverAddr)
			binary.LittleEndian.PutUint64(b[p.off+8:], r.receiverInode)
			p.addr = mem.Addr()
		case p.hasAddress():
			p.addr = mem.Addr()
		case p.form == partDevice:
			putShared(b[p.off:], export)
		case i == partVals && len(msg.Parts) > 0:
			at := p.off
			for k := range msg.Parts {
				at += copy(b[at:], msg.Parts[k].Vals.Host())
			}
		case p.form == partInline && i > 0:
			copy(b[p.off:p.off+p.n], mem.Host())
		}
		if i == 0 && r.batch != 0 && p.form != partPinned {
			p.addr = r.batch
		}
	}
	r.putHead(b, size)
	return nil
}

// putHead writes the head of r, a record of size bytes.
func (r *record) putHead(b []byte, size int) {
	le := binary.LittleEndian
	clear(b[:recordHead])
	le.PutUint32(b, uint32(size))
	b[4], b[5] = r.kind, byte(r.frames)
	for i := range present(r.frames) {
		p, h := &r.parts[i], b[16+partHead*i:]
		le.PutUint64(h, p.addr)
		le.PutUint32(h[8:], uint32(p.n))
		le.PutUint32(h[12:], p.form)
	}
	setSlot(b, r.slot, r.gen)
}

// setSlot writes the slot of a record's pinned parts.
func setSlot(b []byte, slot, gen uint32) {
	binary.LittleEndian.PutUint32(b[8:], slot)
	binary.LittleEndian.PutUint32(b[12:], gen)
}

// parse reads the record of a message from b, which must be private memory: the
// sender may change its own at any time. The error wraps van.ErrMalformed.
func (r *record) parse(b []byte) error {
	le := binary.LittleEndian
	bad := func(field string, value any, want string) error {
		return &van.FieldError{Field: "record." + field, Value: value, Want: want}
	}
	if len(b) < recordHead {
		return bad("length", len(b), fmt.Sprintf("at least %d", recordHead))
	}
	r.kind, r.frames, r.segments, r.batch = b[4], int(b[5]), 0, 0
	if r.kind != kindMessage && r.kind != kindRest && r.kind != kindValue || r.frames == 1 || r.frames > van.MaxFrames || r.kind == kindValue && r.frames != 2 {
		return bad("kind and frames", fmt.Sprint(b[4], b[5]), "a message with 0, 2 or 3 frames, its rest, or a value with 2")
	}
	r.forms, r.slot, r.gen = 0, le.Uint32(b[8:]), le.Uint32(b[12:])
	off := recordHead
	for i := range present(r.frames) {
		p, h := &r.parts[i], b[16+partHead*i:]
		*p = part{addr: le.Uint64(h), n: int(le.Uint32(h[8:])), form: le.Uint32(h[12:])}
		if p.n > math.MaxInt32 {
			return bad(fmt.Sprintf("part[%d].length", i), p.n, "less than 2 GiB")
		}
		switch p.form {
		case partInline:
			if p.n > len(b)-off {
				return bad(fmt.Sprintf("part[%d].length", i), p.n, fmt.Sprintf("at most %d, what the record has", len(b)-off))
			}
			p.off = off
			off = min(off+align(p.n), len(b))
		case partPinned, partMapped, partInReceiver:
			if p.form != partPinned && i != partVals {
				return bad(fmt.Sprintf("part[%d].form", i), p.form, "another one: only values lie in mapped memory")
			}
			if p.form == partInReceiver {
				if len(b)-off < receiverRefLen {
					return bad("length", len(b), "16 more bytes: the value's address and file in the receiver")
				}
				r.receiverAddr, r.receiverInode = le.Uint64(b[off:]), le.Uint64(b[off+8:])
				off = min(off+align(receiverRefLen), len(b))
			}
			if r.slot >= slotCount {
				return bad("slot", r.slot, fmt.Sprintf("less than %d", slotCount))
			}
		case partStream:
		case partDevice:
			if i != partVals || r.slot >= slotCount || len(b)-off < van.ExportLen {
				return bad(fmt.Sprintf("part[%d]", i), fmt.Sprintf("on the device, slot %d, %d bytes left", r.slot, len(b)-off),
					fmt.Sprintf("only values on the device, slot less than %d, %d bytes", slotCount, van.ExportLen))
			}
			var err error
			if r.segments, err = segmentsIn(b[off:]); err != nil {
				return err
			}
			p.off = off
			off = min(off+align(exportSize(r.segments)), len(b))
		default:
			return bad(fmt.Sprintf("part[%d].form", i), p.form, "inline, pinned, streamed, on the device, mapped or in the receiver")
		}
		r.forms |= 1 << p.form
		if i == 0 && r.kind == kindMessage && p.n == 0 || i < partVals && r.kind == kindValue && (p.n > 0 || p.form != partInline) {
			return bad(fmt.Sprintf("part[%d].length", i), p.n, "at least 1 of a message's meta, 0 of a value's meta and keys")
		}
		if i == 0 && p.form != partPinned && r.kind != kindRest {
			r.batch = p.addr
		}
	}
	if r.has(partDevice) && (r.hasAddress() || r.streams() || r.kind == kindRest) {
		return bad("part.form", r.forms, "inline, beside values on the device")
	}
	return nil
}

// putChunk writes a chunk of a stream and returns the length of its record.
func putChunk(b, data []byte) int {
	size := chunkHead + align(len(data))
	clear(b[:chunkHead])
	binary.LittleEndian.PutUint32(b, uint32(size))
	b[4] = kindChunk
	binary.LittleEndian.PutUint32(b[8:], uint32(len(data)))
	copy(b[chunkHead:], data)
	return size
}

// putPad writes a pad of size bytes and returns size.
func putPad(b []byte, size int) int {
	clear(b[:padHead])
	binary.LittleEndian.PutUint32(b, uint32(size))
	b[4] = kindPad
	return size
}

// peek reads the length and the kind of the record at the front of b, of which
// avail bytes have been written. It reads each byte once.
func peek(b []byte, avail int) (size int, kind byte, err error) {
	head := [8]byte(b)
	size, kind = int(binary.LittleEndian.Uint32(head[:])), head[4]
	least, most := recordHead, maxRecord
	switch kind {
	case kindChunk:
		least, most = chunkHead, chunkHead+maxChunk
	case kindRest:
		most = recordHead
	case kindPad:
		least, most = padHead, ringLen
	}
	if size < least || size > min(most, avail) || size%recordAlign != 0 {
		return 0, 0, &van.FieldError{Field: "record.length", Value: size,
			Want: fmt.Sprintf("%d to %d in steps of %d", least, min(most, avail), recordAlign)}
	}
	return size, kind, nil
}
