package zmq

import (
	"encoding/binary"
	"fmt"
	"unsafe"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// A bundle is one libzmq message that carries several data messages sent together, for example a
// worker's push and pull, or a server's acknowledgement and its answer. Two nodes of this library
// use bundles if both announce them in their records (van.NodeExtension). Each side then wakes
// the other once, and small values need no frames of their own. Metas and short frames are copied into
// the first frame. Longer frames follow it as libzmq frames; in a request, a cancel byte follows
// them, see recall.go.
//
//	0  u32      messages
//	4  char[4]  "SAF\xff": in a meta, the length of the body, which cannot be negative
//	8           one record for each message:
//	   0  u32     bytes of the meta     8  u32[3]  bytes of each data frame; bit 31: it is a
//	   4  u32     data frames                      libzmq frame, else it is in the record
//	  20  u32     1: a cancel byte follows its libzmq frames
//	  24          meta and copied data frames, each padded to a multiple of 8 bytes
const (
	bundleHead   = 8
	bundleMagic  = "SAF\xff"
	recordHead   = 24
	recordFrames = 8
	recordMark   = 20
	outside      = 1 << 31

	maxBundle = 16 // messages

	// bundleRoom is the maximum length of the first frame of a bundle of several messages. A message
	// that the application keeps also keeps the whole frame in memory.
	bundleRoom = 16 << 10
)

// bundleBelow is the length below which a value is copied into a bundle. Longer values are lent
// to libzmq. For shorter ones, a copy is faster than a loan.
const bundleBelow = 4096

// record is one message of a bundle.
type record struct {
	meta   []byte
	frames int
	frame  [van.MaxFrames]struct {
		data    []byte // the copy in the record, unless outside is set
		outside bool   // it is a libzmq frame after the bundle's first
	}
	values  int  // data frames that are libzmq frames
	mark    bool // a cancel byte follows them
	outside int  // values, plus 1 for the cancel byte
}

// isBundle reports whether f is a bundle. The caller checks that the sender is a node of this library.
func isBundle(f *frames) bool {
	if f.len() < 2 {
		return false
	}
	b := f.bytes(1)
	return len(b) >= bundleHead && string(b[4:bundleHead]) == bundleMagic
}

// openBundle returns the records of bundle b and the number of its messages. behind has the lengths of the
// libzmq frames after b. openBundle checks all counts and lengths, so read cannot fail afterwards.
func openBundle(b []byte, behind []int) (records []byte, messages int, err error) {
	n := binary.LittleEndian.Uint32(b)
	if n < 1 || n > maxBundle {
		return nil, 0, &van.FieldError{Field: "messages of a bundle", Value: n, Want: fmt.Sprintf("1 to %d", maxBundle)}
	}
	if n > 1 && len(b) > bundleRoom {
		return nil, 0, &van.FieldError{Field: "bytes of a bundle", Value: len(b), Want: fmt.Sprintf("at most %d for %d messages", bundleRoom, n)}
	}
	records = b[bundleHead:]
	rest := records
	for range n {
		var r record
		if rest, err = r.read(rest, behind); err != nil {
			return nil, 0, err
		}
		behind = behind[r.outside:]
	}
	if len(rest) > 0 || len(behind) > 0 {
		return nil, 0, &van.FieldError{Field: "rest of a bundle", Value: fmt.Sprintf("%d bytes, %d frames", len(rest), len(behind)), Want: "none"}
	}
	return records, int(n), nil
}

// read parses the first record of b and returns the rest of b. behind has the lengths of the libzmq frames
// that no earlier record uses.
func (r *record) read(b []byte, behind []int) (rest []byte, err error) {
	if len(b) < recordHead {
		return nil, &van.FieldError{Field: "record of a bundle", Value: len(b), Want: fmt.Sprintf("at least %d bytes", recordHead)}
	}
	head, b := b[:recordHead], b[recordHead:]
	frames := binary.LittleEndian.Uint32(head[4:])
	if frames == 1 || frames > van.MaxFrames {
		return nil, &van.FieldError{Field: "data frames", Value: frames, Want: "0, 2 or 3"}
	}
	*r = record{frames: int(frames)}
	if r.meta, b, err = cut(b, binary.LittleEndian.Uint32(head), "meta length"); err != nil {
		return nil, err
	}
	for i := range r.frames {
		n, f := binary.LittleEndian.Uint32(head[recordFrames+4*i:]), &r.frame[i]
		if f.outside = n&outside != 0; !f.outside {
			if f.data, b, err = cut(b, n, "length of a frame"); err != nil {
				return nil, err
			}
			continue
		}
		if n &^= outside; r.outside >= len(behind) || behind[r.outside] != int(n) {
			return nil, &van.FieldError{Field: "frame behind a bundle", Value: fmt.Sprint(behind[min(r.outside, len(behind)):]), Want: fmt.Sprintf("one of %d bytes first", n)}
		}
		r.values++
		r.outside++
	}
	switch mark := binary.LittleEndian.Uint32(head[recordMark:]); {
	case mark > 1:
		return nil, &van.FieldError{Field: "marks", Value: mark, Want: "0 or 1"}
	case mark == 1 && (r.outside >= len(behind) || behind[r.outside] != 1):
		return nil, &van.FieldError{Field: "mark", Value: fmt.Sprint(behind[min(r.outside, len(behind)):]), Want: "a frame of 1 byte first"}
	case mark == 1:
		r.mark = true
		r.outside++
	}
	return b, nil
}

// cut splits b after its first n bytes. The padding up to the next record or frame is skipped.
func cut(b []byte, n uint32, what string) (part, rest []byte, err error) {
	padded := (uint64(n) + 7) &^ 7
	if padded > uint64(len(b)) {
		return nil, nil, &van.FieldError{Field: what, Value: n, Want: fmt.Sprintf("at most the %d bytes that the bundle has", len(b))}
	}
	return b[:n:n], b[padded:], nil
}

// inbound is the bundle that a receiver is unpacking.
type inbound struct {
	msg    *van.Message  // has the frames; nil: there is no bundle
	name   peerName      // the sender
	now    uint64        // the time of arrival
	size   int           // bytes of its first frame, which each message keeps
	rest   []byte        // records that are left
	left   int           // their number
	behind []int         // lengths of their libzmq frames
	room   [maxParts]int // the array of behind
}

// open starts to unpack msg, a bundle that arrived from name at time now.
func (in *inbound) open(msg *van.Message, name peerName, now uint64) error {
	f := (*frames)(msg.Native())
	if f.excess() > 0 {
		return &van.FieldError{Field: "frames", Value: f.len() + f.excess(), Want: fmt.Sprintf("a sender, a bundle, and up to %d frames", maxParts-2)}
	}
	behind := in.room[:0]
	for i := 2; i < f.len(); i++ {
		behind = append(behind, f.sizeOf(i))
	}
	b := f.bytes(1)
	rest, left, err := openBundle(b, behind)
	if err != nil {
		return err
	}
	in.msg, in.name, in.now, in.size, in.rest, in.left, in.behind = msg, name, now, len(b), rest, left, behind
	return nil
}

// take decodes the next record into a message. The last record uses the message that has the frames of the
// bundle; the other records use next, which must be empty.
func (in *inbound) take(next *van.Message) (msg *van.Message, mark byte, size int, err error) {
	var r record
	if in.rest, err = r.read(in.rest, in.behind); err != nil {
		return nil, 0, 0, err
	}
	f := (*frames)(in.msg.Native())
	first := f.len() - len(in.behind)
	in.behind = in.behind[r.outside:]
	if in.left--; in.left == 0 {
		msg, in.msg = in.msg, nil
	} else {
		msg = next
		f = f.share((*frames)(msg.Native()), first, r.outside)
		first = 1
	}
	if err = van.DecodeMeta(r.meta, &msg.Meta); err != nil {
		return msg, 0, 0, err
	}
	switch {
	case msg.IsControl():
		return msg, 0, 0, &van.FieldError{Field: "control.cmd", Value: msg.Control.Cmd, Want: "data, in a bundle"}
	case r.mark != (msg.Request && r.values > 0):
		return msg, 0, 0, &van.FieldError{Field: "mark", Value: r.mark, Want: "one behind the values of a request, and no other"}
	}
	msg.Frames, size = r.frames, len(r.meta)
	for i := range r.frames {
		if r.frame[i].outside {
			msg.SetFrame(i, f.mem(first))
			first++
		} else {
			msg.SetFrame(i, backend.At(unsafe.Pointer(unsafe.SliceData(r.frame[i].data)), len(r.frame[i].data), backend.Host, nil))
		}
		size += msg.Frame(i).Len()
	}
	if r.mark {
		if mark = f.bytes(first)[0]; mark > markRecalled {
			return msg, 0, 0, &van.FieldError{Field: "mark", Value: mark, Want: "0 or 1"}
		}
	}
	return msg, mark, size, nil
}

// drop discards the records that are left and returns the message with the frames to p.
func (in *inbound) drop(p *pool) {
	if in.msg != nil {
		p.Free(in.msg)
		in.msg = nil
	}
	in.left = 0
}
