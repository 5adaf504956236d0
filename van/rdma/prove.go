package rdma

import (
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/auth"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
	"github.com/stepaf/stepaf-go/van/rendezvous"
)

// This file owns the consequences of the proofs of the cluster's secret (proof.go): which peers are refused, and the rights of an
// opener that has not proved itself.

// admit decides about a connect request. req is the request's private data, over which the answer has its proof. It is nil if the
// request has no proof. opener reports whether the opener must prove itself. An error refuses the request.
func (v acceptor) admit(ev *verbs.Event, h *handshake) (req []byte, opener bool, err error) {
	k := v.secret.guard.Keys
	has := h.native && proofIn(ev.Private, nativeContextLen) != nil
	if k == nil {
		if has {
			if n, show := v.secret.secretMismatchLog.Next(); show {
				v.log.Warn("rdma: a peer may refuse this node", "from", ev.Peer, "node", h.node, "why", auth.ErrSecretThere, "so far", n)
			}
		}
		return nil, false, nil
	}
	why := checkRequest(k, h, ev.Private, ev.New.LocalAddr())
	if has {
		req = ev.Private[:provedRequestLen]
	}
	if why == nil {
		return req, true, nil
	}
	return req, false, v.secret.guard.Unauthenticated(why, "from", ev.Peer, "node", van.NodeName(h.node))
}

// verifyAcceptor checks the acceptor's answer for queue pair q of l, and decides about an acceptor without proof.
func (p connector) verifyAcceptor(l *link, q int, h *handshake, private, req []byte) error {
	k := p.v.secret.guard.Keys
	if k == nil || q > 0 && l.upProof.keys == nil {
		return nil // no proof is needed, or the acceptor was admitted without one
	}
	n, why := checkAnswer(k, h, private, req)
	if q == 0 {
		l.upProof = upProof{keys: k, nonce: n, first: req}
	} else if why == nil && n != l.upProof.nonce {
		why = auth.ErrOtherSecret // the answer is that of another connection
	}
	if why == nil {
		return nil
	}
	l.upProof.keys = nil
	return p.v.secret.guard.Unauthenticated(why, "peer", p.name())
}

// isSecretMismatch reports whether err has the cause that one of the two nodes does not prove the cluster's secret.
func isSecretMismatch(err error) bool {
	var r *rejected
	return auth.IsUnproved(err) || errors.As(err, &r) && r.code() == codeUnproved
}

// verifyRejection returns err. If err is the rejection of a replaced process and lacks a valid proof, it returns another error, which
// does not end this node.
func (v *node) verifyRejection(err error, req []byte) error {
	var r *rejected
	if !v.secret.guard.Keys.Required() || !errors.As(err, &r) || !errors.Is(err, van.ErrReplaced) {
		return err
	}
	if proof := proofIn(r.private, offRejectProof); proof == nil || !v.secret.guard.Keys.Check(proof, rejectionProof, req, r.private[:offRejectProof]) {
		v.secret.guard.Refuse()
		return fmt.Errorf("%w: it rejects this node as replaced, without proof", auth.ErrOtherSecret)
	}
	return err
}

// refuse refuses a connect request, with a proof if this node has keys.
func (v acceptor) refuse(ev *verbs.Event, code uint32, why string) {
	b := refusal(code, why)
	if k := v.secret.guard.Keys; k != nil && len(ev.Private) >= provedRequestLen {
		b[offRejectProof-1] = 0 // terminates the text
		proof := k.Proof(rejectionProof, ev.Private[:provedRequestLen], b[:offRejectProof])
		copy(b[offRejectProof:], proof[:])
	}
	_ = ev.New.Reject(b)
	_ = ev.New.Destroy()
}

// Bounds of connections whose opener has not proved itself. An opener that is alive proves itself at once.
const (
	maxUnproved = 1024
	proofTime   = 10 * time.Second
)

// awaitProofLocked marks the new connection in as unproved, and bounds the time until its opener's proof. The caller holds v.mu.
func (v acceptor) awaitProofLocked(in *inbound, req []byte) {
	in.process.upProof = upProof{keys: v.secret.guard.Keys, first: req}
	_, _ = rand.Read(in.process.upProof.nonce[:]) // crypto/rand.Read never fails
	in.process.unproved.Store(true)
	in.dialect = unprovedIn{nativeIn{slotSet{in}}}
	v.accepted.unproved = append(v.accepted.unproved, in)
	if len(v.accepted.unproved) > v.accepted.maxUnproved {
		v.accepted.unproved[0].failUnproved(fmt.Errorf("%w: more than %d connections have no proof, and this is the oldest", auth.ErrNoSecret, v.accepted.maxUnproved))
		v.accepted.unproved = slices.Delete(v.accepted.unproved, 0, 1)
	}
	in.accept.timer = time.AfterFunc(v.times.proof, func() {
		if in.process.unproved.Load() {
			in.failUnproved(fmt.Errorf("%w: no proof has arrived within %s", auth.ErrNoSecret, v.times.proof))
		}
	})
}

// failUnproved ends a connection whose opener does not prove itself. It does so in every mode, because the opener's request has a proof.
func (in *inbound) failUnproved(why error) {
	if in.process.refused.Swap(true) {
		return
	}
	in.v.secret.guard.Refuse()
	if n, show := in.v.secret.unprovedLog.Next(); show {
		in.v.log.Warn("rdma: a connection ends, its opener does not prove the cluster's secret", "peer", in.name(), "from", in.from, "why", why, "so far", n)
	}
	in.fail(fmt.Errorf("%w: %w", van.ErrPeerLost, why))
}

// openedLocked assigns in to its process, and ends older connections of that process later. The opener has proved itself or need
// not. The caller holds v.mu.
func (v acceptor) openedLocked(in *inbound) {
	v.accepted.unproved = slices.DeleteFunc(v.accepted.unproved, func(x *inbound) bool { return x == in })
	in.process.unproved.Store(false)
	for _, x := range v.accepted.inbounds {
		if older := int32(in.serial-x.serial) > 0; older && in.handshake.sameProcess(&x.handshake) && !x.process.superseded.Swap(true) {
			time.AfterFunc(supersededTime, func() { // until then x may carry the last data that was sent
				x.fail(fmt.Errorf("%w: it has connected again", van.ErrPeerLost))
			})
		}
	}
}

// unprovedIn is the dialect of an unproved connection. Its opener may send only the proof.
type unprovedIn struct{ nativeIn }

func (d unprovedIn) need(*slotRequest) (n rendezvous.Need, err error) {
	err = &van.FieldError{Field: "SEND immediate", Value: immSlotRequest, Want: "3 first, with a proof"}
	d.failUnproved(auth.ErrNoSecret)
	return n, err
}

func (d unprovedIn) refuse(uint64, uint32, error) {}

func (d unprovedIn) handleSend(c *verbs.Completion, t *trailer) (known bool) {
	if c.Imm != immUp {
		d.failUnproved(auth.ErrNoSecret)
		return false
	}
	if err := d.process.upProof.checkUp(recvData(c)); err != nil {
		d.failUnproved(err)
		return true
	}
	d.dialect = d.nativeIn
	d.v.owner.opened(d.inbound)
	return d.nativeIn.handleSend(c, t)
}
