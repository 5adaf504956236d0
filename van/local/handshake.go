package local

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/auth"
)

// The handshake of a link takes one message in each direction, over an abstract Unix socket of the
// receiver. If the cluster has a secret, proofs precede them: see prove.go.
//
//	sender: hello, with the segment and its bell
//	 0  char[4]  "SAFH"           16  u64  address of a number in the sender
//	 4  u32      version          24  u64  the number
//	 8  i32      sender's id      32  u32  length of the segment
//	12  u32      1: has a device  36  u32  slots
//	             2: names several allocations, see export.go
//	                              40  u8[16]  the name in the sender's token
//	                              56  the export of that name on its device
//
//	receiver: reply, with its bell unless it refuses
//	 0  char[4]  "SAFR"            5  u8   1: copies from the sender's device, 2: also from several allocations
//	 4  u8       verdict                4: understands pads, 8: understands marks, 16: maps memory
//	                               6  u16  length of the first text
//	                               8  texts: reason of the verdict, reason for no device
const (
	helloMagic = "SAFH"
	replyMagic = "SAFR"
	helloLen   = 56 + van.ExportLen
	replyHead  = 8
	maxWhy     = 512 // the maximum length of a text

	hasDevice   = 1
	hasSegments = 2
	knowsPads   = 4
	knowsMarks  = 8
	mapsMemory  = 16 // of a receiver that reads the sender's memory

	verdictNo     = 0 // refused
	verdictStream = 1 // the sender streams large parts
	verdictRead   = 2 // the receiver reads large parts from the sender's memory
	verdictFenced = 3 // refused: another process has the sender's node id now
)

// linkTime is how long a handshake may take. A running peer answers within
// a millisecond.
const linkTime = 2 * time.Second

var (
	// errRefused is wrapped if a peer listens and refuses the link.
	errRefused = errors.New("the peer refuses the link")

	// errDead is wrapped if the process of the peer has ended.
	errDead = errors.New("the peer is gone")
)

// hungUp reports whether err means that the peer has ended a handshake without an answer.
func hungUp(err error) bool {
	return !errors.Is(err, errDead) && (errors.Is(err, io.EOF) || errors.Is(err, unix.ECONNRESET) || errors.Is(err, unix.EPIPE))
}

// hello sends the hello of this node. If p is nil, it has no proof.
func (e *endpoint) hello(conn *net.UnixConn, segment int, nonce *[8]byte, p *proofs) error {
	if _, err := rand.Read(nonce[:]); err != nil {
		return err
	}
	b := make([]byte, 0, helloLen+auth.ProofLen)
	le := binary.LittleEndian
	b = append(b, helloMagic...)
	b = le.AppendUint32(b, tokenVersion)
	b = le.AppendUint32(b, uint32(e.id.Load()))
	has, export := uint32(0), [van.ExportLen]byte{}
	if e.device != nil {
		has = hasDevice
		if e.device.sharer != nil {
			has |= hasSegments
		}
		van.PutExport(export[:], &e.device.exports)
	}
	b = le.AppendUint32(b, has)
	b = le.AppendUint64(b, uint64(uintptr(unsafe.Pointer(nonce))))
	b = append(b, nonce[:]...)
	b = le.AppendUint32(b, segmentLen)
	b = le.AppendUint32(b, slotCount)
	b = append(b, e.token.name[:]...)
	b = append(b, export[:]...)
	if p != nil {
		purpose, parts := p.ofSender(b)
		proof := p.keys.Proof(purpose, parts...)
		b = append(b, proof[:]...)
	}
	_, _, err := conn.WriteMsgUnix(b, unix.UnixRights(segment, e.bell.fd), nil)
	return err
}

// reply is the answer to a hello.
type reply struct {
	link     *inLink
	verdict  byte
	why      string // why the peer's memory cannot be read
	noDevice string // why its device's memory cannot be copied
}

func (r *reply) encode() []byte {
	why, noDevice := r.why[:min(len(r.why), maxWhy)], r.noDevice[:min(len(r.noDevice), maxWhy)]
	device := byte(0)
	if r.link != nil {
		device = knowsPads | knowsMarks
		if r.link.c.mapsMemory {
			device |= mapsMemory
		}
		if r.link.dev != nil {
			device |= hasDevice
			if r.link.dev.imports != nil {
				device |= hasSegments
			}
		}
	}
	b := append([]byte(replyMagic), r.verdict, device)
	b = binary.LittleEndian.AppendUint16(b, uint16(len(why)))
	return append(append(b, why...), noDevice...)
}
