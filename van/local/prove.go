package local

// This file owns the proofs in the handshake of a link. Both ends prove that they know the
// cluster's secret before a descriptor is handed over. If the sender has keys, the handshake
// begins with two more messages, and a proof follows the hello:
//
//	sender: greeting                 receiver: challenge
//	 0  char[4]  "SAFG"               0  char[4]  "SAFC"
//	 4  u32      version              4  u32      version
//	 8  u8[16]   its random number    8  u8[16]   its random number
//	                                 24  u8[16]   proof: both numbers, the name of its socket, the version
//
//	sender: hello, with the segment and its bell, as without keys, and
//	     u8[16]   proof: both numbers, the name of the socket, the hello
//
// If the sender refuses the receiver's proof, it sends "SAFD" in place of the hello, so that
// the receiver can log the refusal. A receiver without keys, or of a version without proofs,
// answers a greeting with a refusal. If the sender does not require a proof
// (STEPAF_AUTH=warn), it then dials again and begins with the hello. A sender without keys
// begins with the hello, as described in handshake.go.

import (
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"net"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/auth"
)

const (
	greetingMagic  = "SAFG"
	challengeMagic = "SAFC"
	denialMagic    = "SAFD"
	numberLen      = 16
	greetingLen    = 8 + numberLen
	challengeLen   = greetingLen + auth.ProofLen

	// The purposes of the proofs.
	senderProof   = "local sender"
	receiverProof = "local receiver"
)

// number is a random number of one end. It makes the proofs of one handshake invalid in
// any other.
type number [numberLen]byte

func newNumber() (n number, err error) {
	_, err = rand.Read(n[:])
	return n, err
}

// numbered returns the first part of a greeting or challenge: magic, version and n.
func numbered(magic string, n number) []byte {
	b := append(make([]byte, 0, challengeLen), magic...)
	b = binary.LittleEndian.AppendUint32(b, tokenVersion)
	return append(b, n[:]...)
}

// parseNumbered parses a message of length bytes whose first part is that of numbered.
// rest is the remainder.
func parseNumbered(b []byte, magic string, length int) (n number, rest []byte, ok bool) {
	if len(b) != length || string(b[:4]) != magic || binary.LittleEndian.Uint32(b[4:]) != tokenVersion {
		return n, nil, false
	}
	return number(b[8:]), b[greetingLen:], true
}

// proofs holds the inputs of the two proofs of one handshake. name is the name of the
// receiver's socket.
type proofs struct {
	keys             *auth.Keys
	sender, receiver number
	name             [16]byte
}

func (p *proofs) ofReceiver() (purpose string, parts [][]byte) {
	return receiverProof, [][]byte{p.sender[:], p.receiver[:], p.name[:], binary.LittleEndian.AppendUint32(nil, tokenVersion)}
}

func (p *proofs) ofSender(hello []byte) (purpose string, parts [][]byte) {
	return senderProof, [][]byte{p.receiver[:], p.sender[:], p.name[:], hello}
}

// greet requests and checks the proof of the receiver, whose socket has that name. If the
// receiver is neither proved nor admitted, auth.IsUnproved reports true for the error.
func (e *endpoint) greet(conn *net.UnixConn, id int, name [16]byte) (*proofs, error) {
	p := &proofs{keys: e.guard.Keys, name: name}
	var err error
	if p.sender, err = newNumber(); err != nil {
		return nil, err
	}
	if _, err := conn.Write(numbered(greetingMagic, p.sender)); err != nil {
		return nil, err
	}
	text, fds, err := receive(conn, replyHead+2*maxWhy)
	closeAll(fds)
	if err != nil {
		return nil, err
	}
	n, proof, ok := parseNumbered(text, challengeMagic, challengeLen)
	if p.receiver = n; !ok {
		if len(text) < replyHead || string(text[:4]) != replyMagic {
			return nil, fmt.Errorf("%w: challenge of %d bytes", errProtocol, len(text))
		}
		return nil, auth.ErrNoSecret
	}
	if purpose, parts := p.ofReceiver(); !p.keys.Check(proof, purpose, parts...) {
		if err := e.guard.Unauthenticated(auth.ErrOtherSecret, "peer", van.NodeName(id)); err != nil {
			_, _ = conn.Write([]byte(denialMagic))
			return nil, err
		}
	}
	return p, nil
}

// provedHello reads a peer's hello, and checks the peer's proof. If the peer is neither
// proved nor admitted, auth.IsUnproved reports true for the error. The caller closes fds in
// any case.
func (a *acceptor) provedHello(c *net.UnixConn, pid int) (hello []byte, fds []int, err error) {
	hello, fds, err = receive(c, helloLen)
	if err != nil {
		return nil, fds, err
	}
	guard := &a.self.guard
	p := &proofs{keys: guard.Keys, name: a.self.token.name}
	n, _, greeted := parseNumbered(hello, greetingMagic, greetingLen)
	p.sender = n
	switch {
	case greeted && p.keys == nil:
		return nil, fds, auth.ErrSecretThere
	case p.keys == nil:
		return hello, fds, nil
	case !greeted:
		if err := guard.Unauthenticated(auth.ErrNoSecret, "process", pid); err != nil {
			return hello, fds, fmt.Errorf("process %d: %w", pid, err)
		}
		return hello, fds, nil
	}
	closeAll(fds)
	if p.receiver, err = newNumber(); err != nil {
		return nil, nil, err
	}
	purpose, parts := p.ofReceiver()
	proof := p.keys.Proof(purpose, parts...)
	if _, err := c.Write(append(numbered(challengeMagic, p.receiver), proof[:]...)); err != nil {
		return nil, nil, err
	}
	b, fds, err := receive(c, helloLen+auth.ProofLen)
	switch {
	case err != nil:
		return nil, fds, err
	case string(b) == denialMagic:
		guard.Refuse() // the sender closes the connection
		return nil, fds, auth.ErrOtherSecret
	case len(b) < auth.ProofLen:
		return nil, fds, fmt.Errorf("%w: hello of %d bytes with a proof", errProtocol, len(b))
	}
	hello = b[:len(b)-auth.ProofLen]
	if purpose, parts := p.ofSender(hello); !p.keys.Check(b[len(hello):], purpose, parts...) {
		return hello, fds, guard.Unauthenticated(auth.ErrOtherSecret, "process", pid)
	}
	return hello, fds, nil
}
