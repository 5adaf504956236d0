package rdma

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
	"github.com/stepaf/stepaf-go/van/rendezvous"
)

// This file owns the formats on the wire: private data, slot requests and replies, trailers.

var le = binary.LittleEndian

// Immediate values of SENDs. StepMesh has the first two.
const (
	immSlotRequest = 0
	immSlotReply   = 1
	immCredits     = 2
	immUp          = 3 // first message of a connection: the opener considers it established; data is up or upAfterLoss
	immReclaim     = 4 // the receiver asks for slots back
	immReturn      = 5 // the sender returns slots
	immBuffer      = 6 // the receiver announces a receive buffer
)

// Data of immUp. upAfterLoss: the opener had declared the receiver lost, and has dropped what it owed it. No data means up.
const (
	up          = 1
	upAfterLoss = 2
)

// immSlave marks the notifications of a split message's other parts.
const immSlave = 0x8000

// maxIndex is the number of slots that an immediate value can address.
const maxIndex = immSlave

// magic identifies native nodes, in private data and trailers: "SAF1".
const magic = 0x31464153

// Layout of the private data of a connection: StepMesh's RequestContext of 24 bytes, and the additions of native nodes.
const (
	hostField        = 16
	contextLen       = 24
	offMagic         = 24
	offEpoch         = 28
	offQPIndex       = 32
	offQPCount       = 33
	offReason        = 34 // of a rejection: a text
	offCode          = 28 // of a rejection: a code
	offVersion       = 34 // of the protocol between native nodes; not in a rejection
	offIncarn        = 36
	nativeContextLen = 40
	offNodePort      = 4
	offNodeHost      = 6
)

// handshake is what one end says of itself when a queue pair connects.
type handshake struct {
	node int // van.Empty without an id
	port int
	host string // truncated to 15 bytes

	native  bool   // a native node; the following fields are set only then
	epoch   uint32 // of the connection; the same for all its queue pairs
	qp      int    // number of the queue pair, from 0
	qpCount int
	// incarnation is that of the process; 0: not known.
	incarnation uint32
	// otherVersion: the node speaks another version of the protocol between native nodes.
	otherVersion bool
}

// key returns the name that the queue pairs of one connection have in common.
func (h *handshake) key() string {
	if h.native {
		return fmt.Sprintf("%s,%d,%d,%d", h.host, h.node, h.port, h.epoch)
	}
	return fmt.Sprintf("%s,%d,%d", h.host, h.node, h.port)
}

// sameProcess reports whether h and x are of the same process of this library.
func (h *handshake) sameProcess(x *handshake) bool {
	return h.native && x.native && x.node == h.node && x.incarnation == h.incarnation && x.port == h.port && x.host == h.host
}

// misread returns the reason why v and the peer, whose handshake is h, would misread each other's data, or "". A scheduler sends no data,
// and tells a node of another version why it may not join.
func (v *node) misread(h *handshake, peer int) string {
	if !h.otherVersion || v.local.self.Role == van.Scheduler || peer == van.SchedulerID {
		return ""
	}
	return fmt.Sprintf("its version of the protocol between nodes is not %d, as here; run one release on all nodes", van.ExtensionVersion)
}

// name returns the node's name and address.
func (h *handshake) name() string {
	return fmt.Sprintf("%s at %s:%d", van.NodeName(h.node), h.host, h.port)
}

func (h *handshake) encode() []byte {
	b := make([]byte, nativeContextLen)
	le.PutUint32(b, uint32(h.node))
	le.PutUint16(b[offNodePort:], uint16(h.port))
	copy(b[offNodeHost:offNodeHost+hostField-1], h.host)
	le.PutUint32(b[offMagic:], magic)
	le.PutUint32(b[offEpoch:], h.epoch)
	b[offQPIndex], b[offQPCount], b[offVersion] = byte(h.qp), byte(h.qpCount), van.ExtensionVersion
	le.PutUint32(b[offIncarn:], h.incarnation)
	return b
}

func decodeHandshake(b []byte) (handshake, error) {
	var h handshake
	if len(b) < contextLen {
		return h, &van.FieldError{Field: "private data", Value: fmt.Sprintf("%d bytes", len(b)), Want: fmt.Sprintf("at least %d", contextLen)}
	}
	node := le.Uint32(b)
	if node == 0 || node > van.Empty {
		return h, &van.FieldError{Field: "private data: node id", Value: node, Want: fmt.Sprintf("1 to %d", van.Empty)}
	}
	host, _, _ := bytes.Cut(b[offNodeHost:offNodeHost+hostField], []byte{0})
	h.node, h.port, h.host = int(node), int(le.Uint16(b[offNodePort:])), string(host)
	if len(b) >= nativeContextLen && le.Uint32(b[offMagic:]) == magic {
		h.native, h.epoch = true, le.Uint32(b[offEpoch:])
		h.qp, h.qpCount = int(b[offQPIndex]), int(b[offQPCount])
		h.incarnation, h.otherVersion = le.Uint32(b[offIncarn:]), b[offVersion] != van.ExtensionVersion
		if h.qp >= h.qpCount {
			return h, &van.FieldError{Field: "private data: queue pair", Value: h.qp, Want: fmt.Sprintf("below their number, %d", h.qpCount)}
		}
	}
	return h, nil
}

// slotRequest is a slot request, StepMesh's RendezvousStart. A native node sets dataNum to nativeSlotRequest. Then data[0] is the number of
// bytes wanted, and data[1] the kind of message. For a push, key is the tensor's key and data[2] the length of its
// value, so that the receiver can announce a receive buffer.
type slotRequest struct {
	metaLen, dataNum uint64
	data             [4]uint64
	origin, key      uint64
}

const nativeSlotRequest = 4

// Kinds in a native slot request.
const (
	kindOneShot = 1 << iota
	kindHost    // the slot must be in host memory
	kindPush    // the message pushes a value under the request's key
)

const slotRequestLen = 64

func (s *slotRequest) put(b []byte) {
	le.PutUint64(b, s.metaLen)
	le.PutUint64(b[8:], s.dataNum)
	for i, n := range s.data {
		le.PutUint64(b[16+8*i:], n)
	}
	le.PutUint64(b[48:], s.origin)
	le.PutUint64(b[56:], s.key)
}

func (s *slotRequest) get(b []byte) error {
	if len(b) < slotRequestLen {
		return &van.FieldError{Field: "rendezvous start", Value: fmt.Sprintf("%d bytes", len(b)), Want: fmt.Sprint(slotRequestLen)}
	}
	s.metaLen, s.dataNum = le.Uint64(b), le.Uint64(b[8:])
	for i := range s.data {
		s.data[i] = le.Uint64(b[16+8*i:])
	}
	s.origin, s.key = le.Uint64(b[48:]), le.Uint64(b[56:])
	return nil
}

// maxMeta is the longest meta for which a slot is granted. It is enough for a table of the largest cluster, and for a batch of van.MaxParts
// inline values.
const maxMeta = 32 << 20

// maxData is the longest payload: lengths are signed 32-bit numbers.
const maxData = math.MaxInt32

// need checks s. native says in which dialect it is.
func (s *slotRequest) need(native bool) (n rendezvous.Need, err error) {
	if s.metaLen < rawMeta || s.metaLen > maxMeta {
		return n, &van.FieldError{Field: "rendezvous meta_len", Value: s.metaLen, Want: fmt.Sprintf("%d to %d", rawMeta, maxMeta)}
	}
	n.Meta = int(s.metaLen)
	if native {
		if s.dataNum != nativeSlotRequest {
			return n, &van.FieldError{Field: "rendezvous data_num", Value: s.dataNum, Want: fmt.Sprint(nativeSlotRequest)}
		}
		if s.data[0] > roundedData {
			return n, &van.FieldError{Field: "rendezvous data_len", Value: s.data[0], Want: fmt.Sprintf("0 to %d", uint64(roundedData))}
		}
		n.OneShot, n.Route.Host = s.data[1]&kindOneShot != 0, s.data[1]&kindHost != 0
		n.Data = int(s.data[0])
		n.Route.Class, _ = rendezvous.Class(n.Data)
		return n, nil
	}
	n.Route.Key = s.key
	if s.dataNum > van.MaxFrames {
		return n, &van.FieldError{Field: "rendezvous data_num", Value: s.dataNum, Want: fmt.Sprintf("0 to %d", van.MaxFrames)}
	}
	if s.dataNum >= 2 {
		if s.data[1] > maxData {
			return n, &van.FieldError{Field: "rendezvous data_len", Value: s.data[1], Want: fmt.Sprintf("0 to %d", maxData)}
		}
		n.Data = int(s.data[1])
	}
	return n, nil
}

// roundedData is maxData rounded up to its size class.
const roundedData = 1 << 31

// slotReply is StepMesh's RendezvousReply in the GDR build. The flags are native: they are in four bytes of padding.
type slotReply struct {
	meta, data       uint64
	metaKey, dataKey uint32
	origin           uint64
	index, flags     uint32
}

const slotReplyLen = 48

// Flags of a reply to a native node.
const (
	replyRefused = 1 << iota // there is no slot
	replyBudget              // with replyRefused: it exceeds the budget of one peer
	replyBuffer              // there is no slot: the key's receive buffer has been announced. index is as trailer.decoded
)

func (r *slotReply) put(b []byte) {
	clear(b[:slotReplyLen])
	le.PutUint64(b, r.meta)
	le.PutUint32(b[8:], r.metaKey)
	le.PutUint64(b[16:], r.data)
	le.PutUint32(b[24:], r.dataKey)
	le.PutUint64(b[32:], r.origin)
	le.PutUint32(b[40:], r.index)
	le.PutUint32(b[44:], r.flags)
}

func (r *slotReply) get(b []byte) error {
	if len(b) < slotReplyLen {
		return &van.FieldError{Field: "rendezvous reply", Value: fmt.Sprintf("%d bytes", len(b)), Want: fmt.Sprintf("%d (the GDR form)", slotReplyLen)}
	}
	r.meta, r.metaKey = le.Uint64(b), le.Uint32(b[8:])
	r.data, r.dataKey = le.Uint64(b[16:]), le.Uint32(b[24:])
	r.origin, r.index, r.flags = le.Uint64(b[32:]), le.Uint32(b[40:]), le.Uint32(b[44:])
	return nil
}

// rawMeta is the length of the fixed part of an encoded meta.
const rawMeta = 288

// Offsets in an encoded meta that this transport sets itself.
const (
	metaKey     = 80
	metaOption  = 100
	metaCounter = 264
	metaSlaves  = 280
)

// trailer follows the meta in messages between native nodes.
type trailer struct {
	frames   int                   // of a message in formFrames; otherwise 0
	lens     [van.MaxFrames]uint32 // of these frames in bytes
	epoch    uint32                // of the connection whose slots are returned, and whose messages were decoded
	credits  [maxCredits]uint16
	n        int    // number of credits
	numbered bool   // of a control message: lens[0] is its number, lens[1] the tag of its sender's peer object
	metaLen  int    // of the meta, if placements and inline values follow it; otherwise 0
	decoded  uint32 // number of messages of that connection that the sender of the trailer has decoded; 0: it announces no buffers there
	canceled bool   // the request was canceled before it was sent: its value may have changed
}

// maxCredits is the number of slots that a trailer, or a message of credits, can return.
const maxCredits = 16

const trailerLen = 64

// Flags of a trailer.
const (
	trailerNumbered = 1 << iota
	trailerCanceled // set in place, after the trailer was encoded
)

// Offsets in a trailer.
const (
	offCredits = 24
	offDecoded = 56
	offMetaLen = 60
)

// offFlags is the offset of the flags. Those in use fit into one byte.
const offFlags = 4

// frameAlign is the alignment of values.
const frameAlign = 64

func aligned(n int) int { return (n + frameAlign - 1) &^ (frameAlign - 1) }

func (t *trailer) put(b []byte) {
	flags := uint16(0)
	if t.numbered {
		flags |= trailerNumbered
	}
	le.PutUint32(b, magic)
	le.PutUint16(b[offFlags:], flags)
	le.PutUint32(b[offMetaLen:], uint32(t.metaLen))
	b[6], b[7] = byte(t.n), byte(t.frames)
	for i, n := range t.lens {
		le.PutUint32(b[8+4*i:], n)
	}
	le.PutUint32(b[20:], t.epoch)
	for i := range t.credits {
		le.PutUint16(b[offCredits+2*i:], t.credits[i])
	}
	le.PutUint32(b[offDecoded:], t.decoded)
}

func (t *trailer) get(b []byte) error {
	if len(b) != trailerLen || le.Uint32(b) != magic {
		return &van.FieldError{Field: "trailer", Value: fmt.Sprintf("%d bytes", len(b)), Want: fmt.Sprintf("%d that begin with %#x", trailerLen, magic)}
	}
	flags := le.Uint16(b[offFlags:])
	t.numbered, t.canceled = flags&trailerNumbered != 0, flags&trailerCanceled != 0
	t.metaLen = int(le.Uint32(b[offMetaLen:]))
	t.n, t.frames = int(b[6]), int(b[7])
	if t.n > maxCredits {
		return &van.FieldError{Field: "trailer credits", Value: t.n, Want: fmt.Sprintf("0 to %d", maxCredits)}
	}
	if t.frames > van.MaxFrames || t.frames == 1 {
		return &van.FieldError{Field: "trailer frames", Value: t.frames, Want: "0, 2 or 3"}
	}
	for i := range t.lens {
		t.lens[i] = le.Uint32(b[8+4*i:])
		if t.lens[i] > maxData {
			return &van.FieldError{Field: "trailer frame length", Value: t.lens[i], Want: fmt.Sprintf("0 to %d", maxData)}
		}
	}
	t.epoch, t.decoded = le.Uint32(b[20:]), le.Uint32(b[offDecoded:])
	for i := range t.credits {
		t.credits[i] = le.Uint16(b[offCredits+2*i:])
	}
	return nil
}

// placement tells the receiver where a value of a message is. In a pull request it names the destination of the answer.
type placement struct {
	addr  uint64 // of a pull and of its answer: the destination; of a push: the receive buffer
	rkey  uint32 // of addr; 0: the peer may not write there
	where uint32
}

// Places of a value.
const (
	valueInMeta  = iota // between the placements and the trailer
	valueInSlot         // in the slot's memory for values
	valueInPlace        // at addr
)

const placementLen = 16

func (p *placement) put(b []byte) {
	le.PutUint64(b, p.addr)
	le.PutUint32(b[8:], p.rkey)
	le.PutUint32(b[12:], p.where)
}

func (p *placement) get(b []byte) {
	p.addr, p.rkey, p.where = le.Uint64(b), le.Uint32(b[8:]), le.Uint32(b[12:])
}

// remoteBuffer announces a receive buffer: values of its key may be written there.
type remoteBuffer struct {
	key, addr uint64
	rkey      uint32
	len       int
}

const remoteBufferLen = 24

func (r *remoteBuffer) put(b []byte) {
	le.PutUint64(b, r.key)
	le.PutUint64(b[8:], r.addr)
	le.PutUint32(b[16:], r.rkey)
	le.PutUint32(b[20:], uint32(min(r.len, maxData)))
}

func (r *remoteBuffer) get(b []byte) error {
	if len(b) != remoteBufferLen {
		return &van.FieldError{Field: "receive buffer", Value: fmt.Sprintf("%d bytes", len(b)), Want: fmt.Sprint(remoteBufferLen)}
	}
	r.key, r.addr, r.rkey, r.len = le.Uint64(b), le.Uint64(b[8:]), le.Uint32(b[16:]), int(min(le.Uint32(b[20:]), maxData))
	return nil
}

// reclaimRequest asks the peer to return slots with a total number of bytes.
type reclaimRequest struct {
	slots uint32
	bytes uint64
}

const reclaimRequestLen = 16

// maxReclaim is more than a peer can have.
const maxReclaim = maxIndex * roundedData

func (r *reclaimRequest) put(b []byte) {
	le.PutUint32(b, magic)
	le.PutUint32(b[4:], r.slots)
	le.PutUint64(b[8:], r.bytes)
}

func (r *reclaimRequest) get(b []byte) error {
	if len(b) != reclaimRequestLen || le.Uint32(b) != magic {
		return &van.FieldError{Field: "reclaim request", Value: fmt.Sprintf("%d bytes", len(b)), Want: fmt.Sprintf("%d that begin with %#x", reclaimRequestLen, magic)}
	}
	r.slots, r.bytes = le.Uint32(b[4:]), le.Uint64(b[8:])
	return nil
}

// recvData returns the data of a SEND.
func recvData(c *verbs.Completion) []byte { return c.Data[:min(int(c.Len), len(c.Data))] }

// rejection decodes the private data of a rejection. It returns nil if the peer is not a native node.
func rejection(private []byte) error {
	if len(private) < offReason || le.Uint32(private[offMagic:]) != magic {
		return nil
	}
	return &rejected{private}
}

// rejected is the error of a connect request that a native peer has rejected.
type rejected struct{ private []byte }

func (r *rejected) code() uint32 {
	if len(r.private) <= offReason {
		return 0
	}
	return le.Uint32(r.private[offCode:])
}

func (r *rejected) replaced() bool { return r.code() == codeReplaced }

func (r *rejected) Error() string {
	why := text(r.private[offReason:])
	if r.replaced() {
		why = fmt.Sprintf("%v: %s", van.ErrReplaced, why)
	}
	return "rejected by the peer: " + why
}

// Is reports van.ErrReplaced if the rejection has that code.
func (r *rejected) Is(target error) bool { return target == van.ErrReplaced && r.replaced() }

func text(b []byte) string {
	for i, c := range b {
		if c < ' ' || c > '~' {
			return string(b[:i])
		}
	}
	return string(b)
}

// Codes of a rejection.
const (
	codeReplaced = 1 // the process has been replaced
	codeUnproved = 2 // the node does not prove the cluster's secret
)

// refusal returns the private data of a rejection; code 0 is none.
func refusal(code uint32, why string) []byte {
	b := make([]byte, verbs.MaxRejectData)
	le.PutUint32(b[offMagic:], magic)
	le.PutUint32(b[offCode:], code)
	copy(b[offReason:len(b)-1], why)
	return b
}

// Priorities of pending slot requests: those of control messages do not wait for those of data.
const (
	controlPriority = iota
	dataPriority
)

func (s *slotRequest) priority() int {
	if s.dataNum == nativeSlotRequest && s.data[1]&kindOneShot != 0 || s.dataNum == 0 {
		return controlPriority // a StepMesh control message has no data
	}
	return dataPriority
}

// slot returns the remote slot that a reply describes.
func (r *slotReply) slot() rendezvous.RemoteSlot {
	return rendezvous.RemoteSlot{Meta: r.meta, MetaKey: r.metaKey, Data: r.data, DataKey: r.dataKey, Index: r.index}
}
