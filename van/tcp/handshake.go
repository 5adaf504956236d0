package tcp

// Both ends of a connection introduce themselves before a message is sent. All numbers are little endian.
//
//	dialer: hello                            listener: reply
//	 0  char[4]  "SAFT"                       0  char[4]  "SAFU"
//	 4  u32      version                      4  u32      verdict
//	 8  i32      its node id                  8  u8[16]   its random number
//	12  u32      its incarnation             24  u8[16]   proof, zeros without keys
//	16  u32      the listener's incarnation
//	20  u32      flags. 1: it proves that it knows the secret. 2: its earlier connection broke, so messages may be lost. 4: data went over
//	             the van inside before; marks there have the first 8 bytes of the random number (van/links)
//	24  u8[16]   its random number
//
//	dialer: proof, if its hello says so      listener: admission, after everything
//	 0  u8[16]   proof                        0  u32      verdict
//
// A proof covers both random numbers, the hello, and the purpose: that of the dialer is not valid as one of the listener.
// The hello has both incarnations, so a proof for one process opens no connection to another one.

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/auth"
)

const (
	helloMagic = "SAFT"
	replyMagic = "SAFU"
	version    = 2
	numberLen  = 16
	helloLen   = 24 + numberLen
	replyLen   = 8 + numberLen + auth.ProofLen

	// Flags of a hello.
	proves     = 1
	again      = 2
	afterMarks = 4

	dialerProof   = "tcp dialer"
	listenerProof = "tcp listener"
)

// verdict is the listener's decision.
type verdict uint32

const (
	verdictYes         verdict = iota
	verdictVersion             // another version of this protocol
	verdictOther               // another process has the address
	verdictReplaced            // another process has the dialer's place
	verdictNoSecret            // the listener has no keys, and the dialer wants a proof
	verdictUnproved            // the listener requires a proof of the secret
	verdictOtherSecret         // the proof is wrong
	verdictClosed              // the listener is closing
	verdictTLS                 // the listener requires TLS
	verdictNoTLS               // the listener has no TLS, and the dialer uses it
)

var errRefused = errors.New("the peer refuses the connection")

// err is the error of a dialer that gets this verdict.
func (v verdict) err() error {
	switch v {
	case verdictYes:
		return nil
	case verdictVersion:
		return fmt.Errorf("%w: it has another version of this library", errRefused)
	case verdictOther:
		return fmt.Errorf("%w: another process is at its address", van.ErrPeerLost)
	case verdictReplaced:
		return fmt.Errorf("%w: %w", errRefused, van.ErrReplaced)
	case verdictNoSecret:
		return auth.ErrNoSecret
	case verdictUnproved:
		return fmt.Errorf("%w: it requires a proof of the cluster's secret: %w", errRefused, auth.ErrSecretThere)
	case verdictOtherSecret:
		return fmt.Errorf("%w: %w", errRefused, auth.ErrOtherSecret)
	case verdictClosed:
		return fmt.Errorf("%w: it is closing", van.ErrPeerLost)
	case verdictTLS:
		return fmt.Errorf("%w: %w", errRefused, errTLSThere)
	case verdictNoTLS:
		return fmt.Errorf("%w: %w", errRefused, errTLSHere)
	}
	return fmt.Errorf("%w: %w: verdict %d", errRefused, van.ErrMalformed, uint32(v))
}

// hello is the dialer's introduction.
type hello struct {
	id         int
	own, peer  uint32 // incarnations
	proves     bool
	again      bool // an earlier connection of the dialer broke: messages sent over it may be lost
	afterMarks bool // earlier messages went over the van inside: marks are sent there, too
	number     [numberLen]byte
}

func (h *hello) append(b []byte) []byte {
	b = append(b, helloMagic...)
	b = binary.LittleEndian.AppendUint32(b, version)
	b = binary.LittleEndian.AppendUint32(b, uint32(int32(h.id)))
	b = binary.LittleEndian.AppendUint32(b, h.own)
	b = binary.LittleEndian.AppendUint32(b, h.peer)
	flags := uint32(0)
	if h.proves {
		flags |= proves
	}
	if h.again {
		flags |= again
	}
	if h.afterMarks {
		flags |= afterMarks
	}
	b = binary.LittleEndian.AppendUint32(b, flags)
	return append(b, h.number[:]...)
}

// parseHello reads a hello of helloLen bytes. A dialer of another version gets a refusal that says so.
func parseHello(b []byte) (h hello, v verdict, err error) {
	switch {
	case string(b[:2]) == tlsRecord:
		return h, verdictNoTLS, errTLSThere
	case string(b[:4]) != helloMagic:
		return h, verdictYes, fmt.Errorf("%w: a hello that begins with %q", van.ErrMalformed, b[:4])
	}
	if n := binary.LittleEndian.Uint32(b[4:]); n != version {
		return h, verdictVersion, fmt.Errorf("%w: version %d of the handshake, want %d", van.ErrMalformed, n, version)
	}
	h.id, h.own, h.peer = int(int32(binary.LittleEndian.Uint32(b[8:]))), binary.LittleEndian.Uint32(b[12:]), binary.LittleEndian.Uint32(b[16:])
	flags := binary.LittleEndian.Uint32(b[20:])
	h.proves, h.again, h.afterMarks = flags&proves != 0, flags&again != 0, flags&afterMarks != 0
	h.number = [numberLen]byte(b[24:])
	if h.id <= van.AllNodes || h.id >= van.Empty || h.own == 0 {
		return h, verdictOther, fmt.Errorf("%w: a hello of node %d, incarnation %#x", van.ErrMalformed, h.id, h.own)
	}
	return h, verdictYes, nil
}

func newNumber() (n [numberLen]byte) {
	_, _ = rand.Read(n[:]) // never fails
	return n
}

// introduce is the dialer's part of the handshake on c, whose deadline is set.
func (n *common) introduce(c net.Conn, to *callee, proves bool) error {
	h := hello{id: int(n.id.Load()), own: n.incarnation, peer: to.incarnation, proves: proves, again: to.again, afterMarks: to.afterMarks, number: newNumber()}
	to.number = h.number
	text := h.append(nil)
	if _, err := c.Write(text); err != nil {
		return err
	}
	var reply [replyLen]byte
	if _, err := io.ReadFull(c, reply[:]); err != nil {
		return err
	}
	if string(reply[:4]) != replyMagic {
		return fmt.Errorf("%w: a reply that begins with %q", van.ErrMalformed, reply[:4])
	}
	if err := verdict(binary.LittleEndian.Uint32(reply[4:])).err(); err != nil {
		return err
	}
	if proves {
		number, keys := reply[8:8+numberLen], n.guard.Keys
		if !keys.Check(reply[8+numberLen:], listenerProof, h.number[:], number, text) {
			if err := n.guard.Unauthenticated(auth.ErrOtherSecret, "peer", to.name); err != nil {
				return err
			}
		}
		proof := keys.Proof(dialerProof, number, h.number[:], text)
		if _, err := c.Write(proof[:]); err != nil {
			return err
		}
	}
	var admission [4]byte
	if _, err := io.ReadFull(c, admission[:]); err != nil {
		return err
	}
	return verdict(binary.LittleEndian.Uint32(admission[:])).err()
}

// serveHandshake is the listener's part of the TLS handshake and of the handshake on c, whose deadline is set. It counts a dialer that
// does not prove itself.
func (n *common) serveHandshake(c net.Conn) (conn net.Conn, h hello, err error) {
	if conn, err = n.decrypt(c); err == nil {
		h, err = n.admit(conn)
	}
	if err != nil {
		n.guard.Ended(err)
	}
	return conn, h, err
}

// admit is the listener's part of the handshake on c, whose deadline is set. On success the caller decides about the
// connection, and sends the admission.
func (n *common) admit(c net.Conn) (h hello, err error) {
	var text [helloLen]byte
	if _, err := io.ReadFull(c, text[:]); err != nil {
		return h, err
	}
	h, verdict, err := parseHello(text[:])
	if err != nil && verdict == verdictYes {
		return h, err // not a node of this library: it gets no answer
	}
	keys, secured := n.guard.Keys, encryptedOf(c) != nil
	switch {
	case verdict == verdictNoTLS && !secured:
		skipRecord(c, text[:])
	case err != nil:
	case n.tls != nil && !secured:
		verdict, err = verdictTLS, errTLSHere
	case h.peer != n.incarnation:
		verdict, err = verdictOther, fmt.Errorf("%s looks for another process", van.NodeName(h.id))
	case h.proves && keys == nil:
		verdict, err = verdictNoSecret, auth.ErrSecretThere
	case !h.proves && keys != nil:
		if err = n.guard.Unauthenticated(auth.ErrNoSecret, "peer", van.NodeName(h.id), "addr", c.RemoteAddr()); err != nil {
			verdict = verdictUnproved
		}
	}
	number := newNumber()
	var reply []byte
	reply = append(reply, replyMagic...)
	reply = binary.LittleEndian.AppendUint32(reply, uint32(verdict))
	reply = append(reply, number[:]...)
	var proof [auth.ProofLen]byte
	if keys != nil && h.proves && err == nil {
		proof = keys.Proof(listenerProof, h.number[:], number[:], text[:])
	}
	if _, e := c.Write(append(reply, proof[:]...)); e != nil || err != nil {
		return h, errors.Join(err, e)
	}
	if !h.proves {
		return h, nil
	}
	if _, err := io.ReadFull(c, proof[:]); err != nil {
		return h, err
	}
	if !keys.Check(proof[:], dialerProof, number[:], h.number[:], text[:]) {
		if err := n.guard.Unauthenticated(auth.ErrOtherSecret, "peer", van.NodeName(h.id), "addr", c.RemoteAddr()); err != nil {
			n.say(c, verdictOtherSecret)
			return h, err
		}
	}
	return h, nil
}

// say sends the admission.
func (n *common) say(c net.Conn, w verdict) {
	_, _ = c.Write(binary.LittleEndian.AppendUint32(nil, uint32(w)))
}

// callee is the process that a connection is made to.
type callee struct {
	addr        string
	incarnation uint32
	name        string
	again       bool            // an earlier connection broke
	afterMarks  bool            // earlier messages went over the van inside
	number      [numberLen]byte // of the last hello; introduce sets it
}

// meet dials a process and introduces this node.
func (n *common) meet(ctx context.Context, to *callee) (net.Conn, error) {
	c, err := n.try(ctx, to, n.guard.Keys != nil)
	if n.guard.Keys == nil || !errors.Is(err, auth.ErrNoSecret) {
		return c, err
	}
	if err := n.guard.Unauthenticated(err, "peer", to.name); err != nil {
		return nil, err
	}
	return n.try(ctx, to, false)
}

func (n *common) try(ctx context.Context, to *callee, proves bool) (net.Conn, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, "tcp", to.addr)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = c.Close() })
	defer stop()
	if deadline, ok := ctx.Deadline(); ok {
		_ = c.SetDeadline(deadline)
	}
	conn, err := n.encrypt(c, to)
	if err == nil {
		err = n.introduce(conn, to, proves)
	}
	if err != nil {
		_ = c.Close()
		return nil, err
	}
	return conn, nil
}
