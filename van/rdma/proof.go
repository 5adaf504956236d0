package rdma

import (
	"net/netip"

	"github.com/stepaf/stepaf-go/van/auth"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// This file owns the proofs of the cluster's secret: what they are, and whether one is right. If both ends have it, a connection is made as follows:
//
//	opener: connect request    hello, proof over the hello and the address that it connects to
//	acceptor: answer           hello, random number, proof over the request's private data, the hello and the number
//	opener: immUp              what it says, proof over the number, the private data of the first request and what it says
//
// The opener sends nothing before it has checked the answers for all queue pairs. The acceptor gives no slot and delivers
// nothing before it has checked immUp, which is the first on the connection: all SENDs go over the first queue pair. A request may
// be a replayed one, so until then the connection is neither its peer's nor in place of an older one, and its time and the number
// of such are bounded. Epoch, incarnation and queue pair make each request unique, so that no answer serves another one.
//
// A rejection that ends a node, see codeReplaced, has a proof, too.

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
	provedAnswerLen  = offAnswerProof + auth.ProofLen
	offRejectProof   = verbs.MaxRejectData - auth.ProofLen
)

var _ = [1]struct{}{}[provedRequestLen/(verbs.MaxConnectData+1)] // it fits

// nonce is the random number of an acceptor.
type nonce [nonceLen]byte

// addressBytes is an address as proofs have it: without what only one host knows of it.
func addressBytes(a netip.AddrPort) []byte {
	ip := a.Addr().Unmap().WithZone("").As16()
	return le.AppendUint16(ip[:], a.Port())
}

// requestData is the private data of a connect request to that address. Without keys it is the hello.
func requestData(k *auth.Keys, h *hello, to netip.AddrPort) []byte {
	b := h.encode()
	if k == nil {
		return b
	}
	proof := k.Proof(requestProof, b, addressBytes(to))
	return append(b, proof[:]...)
}

// proofIn returns the proof at an offset of private data, nil if there is none.
func proofIn(private []byte, off int) []byte {
	if len(private) < off+auth.ProofLen {
		return nil
	}
	p := private[off:][:auth.ProofLen]
	if [auth.ProofLen]byte(p) == [auth.ProofLen]byte{} { // private data arrives padded
		return nil
	}
	return p
}

// checkRequest says why a connect request to that address proves nothing, or returns nil.
func checkRequest(k *auth.Keys, h *hello, private []byte, to netip.AddrPort) error {
	switch proof := proofIn(private, nativeContextLen); {
	case !h.native || proof == nil:
		return auth.ErrNoSecret
	case !k.Check(proof, requestProof, private[:nativeContextLen], addressBytes(to)):
		return auth.ErrOtherSecret
	}
	return nil
}

// answerData is the private data that answers a request. A nil request is one without a proof.
func answerData(k *auth.Keys, h *hello, req []byte, n nonce) []byte {
	b := h.encode()
	if k == nil || req == nil {
		return b
	}
	proof := k.Proof(answerProof, req, b, n[:])
	return append(append(b, n[:]...), proof[:]...)
}

// checkAnswer says why the answer to a request proves nothing, or returns the acceptor's number.
func checkAnswer(k *auth.Keys, h *hello, private, req []byte) (n nonce, err error) {
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

// opening is what an opener proves that it has. The zero value is that of one that proves nothing.
type opening struct {
	keys  *auth.Keys
	nonce nonce
	first []byte // the private data of the first request
}

// up is the data of immUp, one of up and upAfterLoss.
func (o *opening) up(says byte) []byte {
	b := []byte{says}
	if o.keys == nil {
		return b
	}
	proof := o.keys.Proof(openerProof, o.nonce[:], o.first, b)
	return append(b, proof[:]...)
}

// checkUp says why the data of immUp proves nothing, or returns nil.
func (o *opening) checkUp(said []byte) error {
	if len(said) != 1+auth.ProofLen {
		return auth.ErrNoSecret
	}
	if !o.keys.Check(said[1:], openerProof, o.nonce[:], o.first, said[:1]) {
		return auth.ErrOtherSecret
	}
	return nil
}
