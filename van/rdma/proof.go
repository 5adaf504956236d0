package rdma

import (
	"net/netip"

	"github.com/stepaf/stepaf-go/van/auth"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// This file owns the proofs of the cluster's secret: their layout and their checks. If both ends have the secret, a connection is made as
// follows:
//
//	opener: connect request    handshake, proof over the handshake and the acceptor's address
//	acceptor: answer           handshake, random number, proof over the request's private data, the handshake and the number
//	opener: immUp              state, proof over the number, the private data of the first request and the state
//
// The opener sends nothing before it has checked the answers for all queue pairs. The acceptor gives no slot and delivers
// nothing before it has checked immUp. That is the first message on the connection, because all SENDs go over the first queue pair.
//
// A request may be replayed. Until immUp is checked, the connection is therefore not assigned to its peer and does not replace an
// older one. The time and the number of such connections are bounded. Epoch, incarnation and queue pair make each request unique, so
// an answer is valid for one request only.
//
// Rejections have a proof, too. The opener checks it if the rejection ends its node, see codeReplaced.

// The purposes of the proofs.
const (
	requestProof   = "rdma request"
	answerProof    = "rdma answer"
	openerProof    = "rdma opener"
	rejectionProof = "rdma rejection"
)

// Layout of private data with proofs.
const (
	provedRequestLen = nativeContextLen + auth.ProofLen
	nonceLen         = 16
	offAnswerProof   = nativeContextLen + nonceLen
	offRejectProof   = verbs.MaxRejectData - auth.ProofLen
)

var _ = [1]struct{}{}[provedRequestLen/(verbs.MaxConnectData+1)] // fails to compile if a request does not fit

// nonce is an acceptor's random number. It makes the proofs of one connection invalid in any other.
type nonce [nonceLen]byte

// addressBytes returns the encoding of an address in proofs. It leaves out the zone, whose name only one host knows.
func addressBytes(a netip.AddrPort) []byte {
	ip := a.Addr().Unmap().WithZone("").As16()
	return le.AppendUint16(ip[:], a.Port())
}

// requestData returns the private data of a connect request to the address to: the handshake, and a proof if there are keys.
func requestData(k *auth.Keys, h *handshake, to netip.AddrPort) []byte {
	b := h.encode()
	if k == nil {
		return b
	}
	proof := k.Proof(requestProof, b, addressBytes(to))
	return append(b, proof[:]...)
}

// proofIn returns the proof at an offset of private data, or nil if there is none.
func proofIn(private []byte, off int) []byte {
	if len(private) < off+auth.ProofLen {
		return nil
	}
	p := private[off:][:auth.ProofLen]
	if [auth.ProofLen]byte(p) == [auth.ProofLen]byte{} { // private data arrives padded with zeros
		return nil
	}
	return p
}

// checkRequest checks the proof in a connect request to the address to. An error is the cause for which the opener is unproved.
func checkRequest(k *auth.Keys, h *handshake, private []byte, to netip.AddrPort) error {
	switch proof := proofIn(private, nativeContextLen); {
	case !h.native || proof == nil:
		return auth.ErrNoSecret
	case !k.Check(proof, requestProof, private[:nativeContextLen], addressBytes(to)):
		return auth.ErrOtherSecret
	}
	return nil
}

// answerData returns the private data of the answer to a request. If req is nil, the request had no proof and the answer has none.
func answerData(k *auth.Keys, h *handshake, req []byte, n nonce) []byte {
	b := h.encode()
	if k == nil || req == nil {
		return b
	}
	proof := k.Proof(answerProof, req, b, n[:])
	return append(append(b, n[:]...), proof[:]...)
}

// checkAnswer checks the proof in the answer to a request, and returns the acceptor's number. An error is the cause for which the
// acceptor is unproved.
func checkAnswer(k *auth.Keys, h *handshake, private, req []byte) (n nonce, err error) {
	proof := proofIn(private, offAnswerProof)
	if !h.native || proof == nil {
		return n, auth.ErrNoSecret
	}
	n = nonce(private[nativeContextLen:])
	if !k.Check(proof, answerProof, req, private[:nativeContextLen], n[:]) {
		return n, auth.ErrOtherSecret
	}
	return n, nil
}

// upProof holds the inputs of an opener's proof in immUp. The zero value is that of an opener that proves nothing.
type upProof struct {
	keys  *auth.Keys
	nonce nonce
	first []byte // the private data of the first request
}

// encodeUp returns the data of immUp with that state, up or upAfterLoss.
func (o *upProof) encodeUp(state byte) []byte {
	b := []byte{state}
	if o.keys == nil {
		return b
	}
	proof := o.keys.Proof(openerProof, o.nonce[:], o.first, b)
	return append(b, proof[:]...)
}

// checkUp checks the proof in the data of immUp. An error is the cause for which the opener is unproved.
func (o *upProof) checkUp(data []byte) error {
	if len(data) != 1+auth.ProofLen {
		return auth.ErrNoSecret
	}
	if !o.keys.Check(data[1:], openerProof, o.nonce[:], o.first, data[:1]) {
		return auth.ErrOtherSecret
	}
	return nil
}
