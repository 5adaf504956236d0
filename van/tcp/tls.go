package tcp

// This file owns the encryption of connections with STEPAF_TLS=1. Every connection begins with a TLS 1.3 handshake, before the hello. Both
// ends have the same key pair, which is derived from the cluster's secret. A certificate is accepted if it has exactly this public key:
// there is no certificate authority, and names and dates have no meaning.
//
// The loop and the callers of Send use descriptors that do not block. crypto/tls works on such a descriptor through a
// socket (below): reads may end with EAGAIN, which crypto/tls treats like a deadline, and can be repeated; writes go to
// memory, from where flush writes what the descriptor takes. There is no goroutine and no second descriptor.

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/auth"
	"github.com/stepaf/stepaf-go/van/env"
)

// tlsPurpose is the purpose for which the seed of the key pair is derived from the secret.
const tlsPurpose = "tcp tls"

const (
	// sealMost bounds the bytes that are encrypted before they are written.
	sealMost = 64 << 10
	// openMost bounds the encrypted bytes that are read with one system call.
	openMost = 64 << 10
	// openOnce bounds the bytes that one call of read decrypts, if they have been received.
	openOnce = 256 << 10
	// tlsRecord begins every record of a TLS handshake: its type and the major version. Its length follows after the minor version.
	tlsRecord  = "\x16\x03"
	recordHead = 5
)

// tlsTime is how long either end may take to make a connection with TLS. The handshake takes a processor 0.4 ms at each end, and a
// cluster makes all of its connections at once.
const tlsTime = 10 * time.Second

// within returns limit, the time for a handshake without TLS, or tlsTime.
func (n *common) within(limit time.Duration) time.Duration {
	if n.tls != nil {
		return tlsTime
	}
	return limit
}

// The causes for which two nodes of different STEPAF_TLS refuse each other.
var (
	errTLS      = errors.New("STEPAF_TLS must be the same on all nodes")
	errTLSHere  = fmt.Errorf("%w: it is 1 here and not at the peer", errTLS)
	errTLSThere = fmt.Errorf("%w: it is 1 at the peer and not here", errTLS)
)

// newTLS makes the configuration of both ends of all connections.
func newTLS(keys *auth.Keys) (*tls.Config, error) {
	if !keys.Required() {
		return nil, &env.Error{Name: "STEPAF_TLS", Value: "1", Why: "no proof of a secret is required", Want: "STEPAF_SECRET_FILE, and STEPAF_AUTH=require"}
	}
	seed := keys.Key(tlsPurpose)
	key := ed25519.NewKeyFromSeed(seed[:])
	own := key.Public().(ed25519.PublicKey)
	template := &x509.Certificate{SerialNumber: big.NewInt(1)}
	cert, err := x509.CreateCertificate(rand.Reader, template, template, own, key)
	if err != nil {
		return nil, fmt.Errorf("a certificate for the key of the cluster's secret: %w", err)
	}
	return &tls.Config{
		MinVersion:   tls.VersionTLS13,
		Certificates: []tls.Certificate{{Certificate: [][]byte{cert}, PrivateKey: key}},
		ClientAuth:   tls.RequireAnyClientCert,
		// VerifyConnection decides instead: it is called at both ends, after the peer has signed with its key.
		InsecureSkipVerify: true,
		VerifyConnection: func(s tls.ConnectionState) error {
			if len(s.PeerCertificates) != 1 || !own.Equal(s.PeerCertificates[0].PublicKey) {
				return auth.ErrOtherSecret
			}
			return nil
		},
		SessionTicketsDisabled:      true, // a listener sends nothing after its admission
		DynamicRecordSizingDisabled: true,
	}, nil
}

// encrypted is a connection with TLS.
type encrypted struct {
	*tls.Conn
	under *socket
}

// encryptedOf returns c if it is encrypted, else nil.
func encryptedOf(c net.Conn) *encrypted {
	e, _ := c.(*encrypted)
	return e
}

// detach makes an encrypted connection use fd, a non-blocking descriptor, after its handshake: for reads, and if writes is set also for
// writes. If c is not encrypted, the result is nil.
func detach(c net.Conn, fd int, writes bool) *encrypted {
	e := encryptedOf(c)
	if e != nil {
		e.under.fd, e.under.buffers = fd, writes
	}
	return e
}

// Close closes the connection of the handshake, not the descriptor. It sends no close_notify alert: every end means that the connection broke.
func (e *encrypted) Close() error { return e.under.Close() }

// socket is what a tls.Conn reads from and writes to: the connection of the handshake, then a descriptor.
type socket struct {
	net.Conn
	fd      int    // descriptor for reads, or for writes of out, after the handshake; -1: Conn is used
	in      []byte // received bytes that crypto/tls has not taken
	buf     []byte // memory of in
	buffers bool   // Write appends to out
	out     []byte // encrypted bytes
	written int    // number of bytes of out that are written
}

// Read implements net.Conn. The error of a descriptor that has nothing is EAGAIN.
func (s *socket) Read(b []byte) (int, error) {
	if len(s.in) == 0 && s.fd < 0 {
		return s.Conn.Read(b)
	}
	for len(s.in) == 0 {
		if s.buf == nil {
			s.buf = make([]byte, openMost)
		}
		n, err := unix.Read(s.fd, s.buf)
		switch {
		case err == unix.EINTR:
			continue
		case err != nil:
			return 0, err
		case n == 0:
			return 0, io.EOF
		}
		s.in = s.buf[:n]
	}
	n := copy(b, s.in)
	s.in = s.in[n:]
	return n, nil
}

// Write implements net.Conn.
func (s *socket) Write(b []byte) (int, error) {
	if !s.buffers {
		return s.Conn.Write(b)
	}
	s.out = append(s.out, b...)
	return len(b), nil
}

// read decrypts what fits into b. Its error is EAGAIN if the descriptor has nothing; at the end of the connection, n is 0.
func (e *encrypted) read(b []byte) (n int, err error) {
	b = b[:min(len(b), openOnce)]
	for n < len(b) && (n == 0 || len(e.under.in) > 0) {
		k, err := e.Conn.Read(b[n:])
		n += k
		switch {
		case err == nil:
		case n > 0, err == io.EOF:
			return n, nil // the next call returns the error
		default:
			return 0, err
		}
	}
	return n, nil
}

// write encrypts some of parts and writes what the descriptor takes. It returns how many bytes of the parts it has
// encrypted. Its error is EAGAIN if the descriptor does not take what was encrypted before.
func (e *encrypted) write(parts []unix.Iovec) (n int, err error) {
	if err := e.under.flush(); err != nil {
		return 0, err
	}
	for i := range parts {
		b := unsafe.Slice(parts[i].Base, parts[i].Len)
		b = b[:min(len(b), sealMost-n)]
		if len(b) == 0 {
			break
		}
		if _, err := e.Conn.Write(b); err != nil {
			return n, err
		}
		n += len(b)
	}
	if err := e.under.flush(); err != nil && err != unix.EAGAIN {
		return n, err
	}
	return n, nil
}

// flush writes encrypted bytes until none is left or the descriptor takes no more.
func (s *socket) flush() error {
	for s.written < len(s.out) {
		n, err := unix.SendmsgN(s.fd, s.out[s.written:], nil, nil, unix.MSG_NOSIGNAL)
		switch {
		case err == unix.EINTR:
		case err != nil:
			return err
		default:
			s.written += n
		}
	}
	s.out, s.written = s.out[:0], 0
	return nil
}

// pending is the number of encrypted bytes that are not written. e may be nil.
func (e *encrypted) pending() int {
	if e == nil {
		return 0
	}
	return len(e.under.out) - e.under.written
}

// encrypt makes the dialer's end of a TLS connection on c, whose deadline is set.
func (n *common) encrypt(c net.Conn, to *callee) (net.Conn, error) {
	if n.tls == nil {
		return c, nil
	}
	s := &socket{Conn: c, fd: -1}
	e := &encrypted{tls.Client(s, n.tls), s}
	err := e.Handshake()
	plain := tls.RecordHeaderError{}
	switch {
	case errors.As(err, &plain) && string(plain.RecordHeader[:4]) == replyMagic:
		n.guard.Refuse()
		err = fmt.Errorf("%w: %w", errRefused, errTLSHere) // a listener without TLS replies in plain, with verdictNoTLS
	case errors.Is(err, auth.ErrOtherSecret):
		err = n.guard.Unauthenticated(err, "peer", to.name)
	}
	if err != nil {
		return nil, err
	}
	return e, nil
}

// decrypt makes the listener's end of a TLS connection on c, whose deadline is set. If the dialer begins with a plain hello, the
// returned connection is not encrypted, and admit refuses it.
func (n *common) decrypt(c net.Conn) (net.Conn, error) {
	if n.tls == nil {
		return c, nil
	}
	var first [len(helloMagic)]byte
	if _, err := io.ReadFull(c, first[:]); err != nil {
		return nil, err
	}
	s := &socket{Conn: c, fd: -1, in: first[:]}
	if string(first[:]) == helloMagic {
		return s, nil
	}
	e := &encrypted{tls.Server(s, n.tls), s}
	err := e.Handshake()
	remote := (*net.OpError)(nil)
	switch {
	case err == nil:
		return e, nil
	case errors.Is(err, auth.ErrOtherSecret), errors.As(err, &remote) && remote.Op == "remote error": // one end does not accept the other's key
		err = n.guard.Unauthenticated(auth.ErrOtherSecret, "addr", c.RemoteAddr())
	case string(first[:2]) != tlsRecord:
		err = fmt.Errorf("%w: a connection that begins with %q", van.ErrMalformed, first)
	}
	return nil, err
}

// skipRecord reads the rest of a TLS record that begins with b. A connection that is closed with unread bytes is reset,
// and the dialer may not get the reply.
func skipRecord(c net.Conn, b []byte) {
	length := recordHead + int64(binary.BigEndian.Uint16(b[3:]))
	_, _ = io.Copy(io.Discard, io.LimitReader(c, length-int64(len(b))))
}
