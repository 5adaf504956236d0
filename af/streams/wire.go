package streams

// Wire format: the bodies of the messages between the ends of an exchange. Other fields are those of ps-lite.

import (
	"encoding/binary"
	"fmt"

	"github.com/stepaf/stepaf-go/internal/gpusync"
	"github.com/stepaf/stepaf-go/internal/memfd"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// app is the application id, and the customer id, of all messages.
const app = 0x5C00000

// version is the first byte of every body.
const version = 1

// verb is the second byte of a body.
type verb byte

const (
	verbOffer  verb = iota + 1 // a worker offers an exchange
	verbAccept                 // a server has prepared the same exchange
	verbOver                   // the sender's end is over
	lastVerb   = verbOver
)

const (
	// maxTensors is the maximum number of tensors of an end for one peer, in each direction.
	maxTensors = 256
	// maxText is the longest text of a verbOver.
	maxText = 512
)

// byHost is a bit of the second byte of an offer or an answer of an exchange by hosts.
const byHost = 0x10

// note is the contents of a message.
type note struct {
	verb  verb
	id    uint64    // of the exchange, the worker's number
	host  bool      // an exchange by hosts
	flags flagsName // of the sender
	out   []part    // tensors that the sender sends
	in    []part    // tensors that it receives, without exports; in an offer
	text  string    // why the exchange is over
}

// flagsName is the location of the flags of an end, for a peer.
type flagsName struct {
	export backend.Export      // in streams: of the slot
	file   [memfd.NameLen]byte // by hosts: a file of flags
	at     uint32              // in streams: offset of the peer's flag in the slot; by hosts: of the block in the file
	token  gpusync.Token       // of the slot or the block
}

// part is a tensor.
type part struct {
	key    uint64
	len    int
	export backend.Export // of its memory, unless its length is 0
}

const (
	placeLen = 4 + gpusync.TokenLen // of at and token
	partLen  = 8 + 8
)

func (n *note) append(b []byte) []byte {
	le := binary.LittleEndian
	second := byte(n.verb)
	if n.host {
		second |= byHost
	}
	b = le.AppendUint64(append(b, version, second), n.id)
	switch {
	case n.verb == verbOver:
		return append(b, n.text[:min(len(n.text), maxText)]...)
	case n.host:
		b = append(b, n.flags.file[:]...)
	default:
		b = appendExport(b, &n.flags.export)
	}
	b = append(le.AppendUint32(b, n.flags.at), n.flags.token[:]...)
	b = le.AppendUint16(b, uint16(len(n.out)))
	b = le.AppendUint16(b, uint16(len(n.in)))
	for i := range n.out {
		b = appendExport(n.out[i].append(b), &n.out[i].export)
	}
	for i := range n.in {
		b = n.in[i].append(b)
	}
	return b
}

func (p *part) append(b []byte) []byte {
	b = binary.LittleEndian.AppendUint64(b, p.key)
	return binary.LittleEndian.AppendUint64(b, uint64(p.len))
}

func appendExport(b []byte, e *backend.Export) []byte {
	n := len(b)
	b = append(b, make([]byte, van.ExportLen)...)
	van.PutExport(b[n:], e)
	return b
}

const headLen = 2 + 8

// parse parses the output of append. The memory that it returns is inside the allocations that it names.
func parse(b []byte) (n note, err error) {
	le := binary.LittleEndian
	switch {
	case len(b) < headLen:
		return n, &van.FieldError{Field: "body_size", Value: len(b), Want: fmt.Sprintf("%d at least", headLen)}
	case b[0] != version:
		return n, &van.FieldError{Field: "body version", Value: b[0], Want: fmt.Sprint(version)}
	}
	n.verb, n.host, n.id = verb(b[1]&^byHost), b[1]&byHost != 0, le.Uint64(b[2:])
	if n.verb == 0 || n.verb > lastVerb || n.host && n.verb == verbOver {
		return n, &van.FieldError{Field: "body verb", Value: b[1], Want: fmt.Sprintf("1 to %d, of an offer or an answer also with %#x", lastVerb, byHost)}
	}
	b = b[headLen:]
	if n.verb == verbOver {
		if len(b) > maxText {
			return n, &van.FieldError{Field: "body_size", Value: headLen + len(b), Want: fmt.Sprintf("%d at most", headLen+maxText)}
		}
		n.text = string(b)
		return n, nil
	}
	if b, err = n.parseFlags(b); err != nil {
		return n, err
	}
	out, in := int(le.Uint16(b)), int(le.Uint16(b[2:]))
	b = b[4:]
	if want := out*(partLen+van.ExportLen) + in*partLen; out > maxTensors || in > maxTensors || len(b) != want || n.verb == verbAccept && in > 0 {
		return n, &van.FieldError{Field: "body tensors", Value: fmt.Sprintf("%d and %d in %d bytes", out, in, len(b)),
			Want: fmt.Sprintf("%d at most of each, in %d bytes", maxTensors, want)}
	}
	n.out, n.in = make([]part, out), make([]part, in)
	for i := range n.out {
		if b, err = n.out[i].parse(b); err != nil {
			return n, err
		}
		if n.out[i].len > 0 {
			if n.out[i].export, err = van.ParseExport(b, n.out[i].len); err != nil {
				return n, err
			}
		}
		b = b[van.ExportLen:]
	}
	for i := range n.in {
		if b, err = n.in[i].parse(b); err != nil {
			return n, err
		}
	}
	return n, nil
}

// parseFlags parses the location of the sender's flags, and returns the remaining bytes, at least 4.
func (n *note) parseFlags(b []byte) (rest []byte, err error) {
	le := binary.LittleEndian
	at, head, stride, end := van.ExportLen, slotHead, slotStride, gpusync.PageLen
	if n.host {
		at, head, stride, end = memfd.NameLen, 0, flagStride, flagPageLen
	}
	size := at + placeLen
	if len(b) < size+4 {
		return nil, &van.FieldError{Field: "body_size", Value: headLen + len(b), Want: fmt.Sprintf("%d at least", headLen+size+4)}
	}
	word := le.Uint32(b[at:])
	if int64(word) < int64(head) || word%uint32(stride) != 0 || int64(word) > int64(end-stride) {
		return nil, &van.FieldError{Field: "body word", Value: word, Want: fmt.Sprintf("a multiple of %d, %d to %d", stride, head, end-stride)}
	}
	n.flags.at, n.flags.token = word, gpusync.Token(b[at+4:])
	if n.host {
		n.flags.file = [memfd.NameLen]byte(b)
	} else {
		n.flags.export, err = van.ParseExport(b, int(word)+slotStride)
	}
	return b[size:], err
}

// parse parses key and length, and returns the remaining bytes.
func (p *part) parse(b []byte) ([]byte, error) {
	n := binary.LittleEndian.Uint64(b[8:])
	if n > maxBytes {
		return nil, &van.FieldError{Field: "body tensor length", Value: n, Want: fmt.Sprintf("%d at most", maxBytes)}
	}
	p.key, p.len = binary.LittleEndian.Uint64(b), int(n)
	return b[partLen:], nil
}
