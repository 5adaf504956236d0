package rdma

import (
	"bytes"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/auth"
	"github.com/stepaf/stepaf-go/van/env"
	"github.com/stepaf/stepaf-go/van/rdma/conn"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

const (
	secretA = "the secret of one cluster"
	secretB = "the secret of another one"
)

// keysOf returns the keys of a secret, nil without a secret.
func keysOf(t testing.TB, secret string, required bool) *auth.Keys {
	t.Helper()
	if secret == "" {
		return nil
	}
	k, err := auth.New([]byte(secret), "a cluster", required)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// proving makes a node with keys that listens under its id.
func (r *rig) proving(id int, k *auth.Keys, options ...func(*env.Config)) *testNode {
	r.Helper()
	n := r.make(id, options...)
	n.secret.guard.Keys = k
	n.listenOn(0)
	n.Start(func(m *van.Message) { n.in <- m.Retain() })
	return n
}

// TestProofModes: for each combination of secrets and modes, whether the two ends connect, and what both log.
func TestProofModes(t *testing.T) {
	type end struct {
		secret   string
		required bool
	}
	var (
		off, require, warn          = end{}, end{secretA, true}, end{secretA, false}
		otherRequire, otherWarn     = end{secretB, true}, end{secretB, false}
		noSecret, differs, admitted = auth.ErrNoSecret.Error(), auth.ErrOtherSecret.Error(), "is admitted: STEPAF_AUTH is warn"
		secretThere                 = auth.ErrSecretThere.Error()
	)
	for _, c := range []struct {
		name             string
		opener, acceptor end
		connects         bool
		unproved         [2]bool // counts of the opener and the acceptor
		openerSays       string
		acceptorSays     string
	}{
		{"off, off", off, off, true, [2]bool{}, "", ""},
		{"require, require", require, require, true, [2]bool{}, "", ""},
		{"require, warn", require, warn, true, [2]bool{}, "", ""},
		{"warn, require", warn, require, true, [2]bool{}, "", ""},
		{"require, off", require, off, false, [2]bool{true, false}, noSecret, secretThere},
		{"warn, off", warn, off, true, [2]bool{true, false}, admitted, secretThere},
		{"off, require", off, require, false, [2]bool{false, true}, "it requires a proof of the cluster's secret", noSecret},
		{"off, warn", off, warn, true, [2]bool{false, true}, "", admitted},
		{"require, another's require", require, otherRequire, false, [2]bool{false, true}, "STEPAF_CLUSTER_ID differs from this node's", differs},
		{"require, another's warn", require, otherWarn, false, [2]bool{true, true}, differs, differs},
		{"warn, another's require", warn, otherRequire, false, [2]bool{false, true}, "STEPAF_CLUSTER_ID differs from this node's", differs},
		{"warn, another's warn", warn, otherWarn, true, [2]bool{true, true}, differs, differs},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t)
			w := r.proving(9, keysOf(t, c.opener.secret, c.opener.required))
			s := r.proving(8, keysOf(t, c.acceptor.secret, c.acceptor.required))
			w.connect(s)
			if c.connects {
				w.wantUp(s)
				for i := range 3 {
					w.must(push(s, 1, i, value(50_000, i)))
					s.wantValue(i, value(50_000, i))
				}
			} else {
				w.wantDown(s)
				for _, n := range []*testNode{w, s} {
					if n.lines("WARN", "secret")+n.lines("WARN", "STEPAF_SECRET") == 0 {
						t.Errorf("%s does not warn", van.NodeName(n.who.ID))
					}
				}
			}
			w.says(c.openerSays)
			s.says(c.acceptorSays)
			for i, n := range []*testNode{w, s} {
				r.until("it is counted", func() bool { return (n.Stats().Unauthenticated > 0) == c.unproved[i] })
				for _, secret := range []string{secretA, secretB} {
					if strings.Contains(n.logged.String(), secret) {
						t.Error("a log shows a secret")
					}
				}
			}
			w.Disconnect(8) // it does not try again
			s.budget.slots.Each(func(*receiveSlot) {
				if !c.connects {
					t.Error("an unproved peer has a slot")
				}
			})
		})
	}
}

// TestProofKeepsOrder: messages sent before the connection is established arrive in order after the proof, over two queue pairs, in both directions, and
// again after the connection has broken.
func TestProofKeepsOrder(t *testing.T) {
	r := newRig(t)
	k := keysOf(t, secretA, true)
	split := func(c *env.Config) { c.SplitQPLag = true }
	w, s := r.proving(9, k, split), r.proving(8, k, split)
	w.connect(s)
	s.connect(w)
	const all = 40
	for i := range all {
		w.must(push(s, uint64(i%3), i, value(100+i*1000, i)))
		s.must(push(w, uint64(i%3), i, value(100+i*1000, i)))
	}
	for i := range all {
		s.wantValue(i, value(100+i*1000, i))
		w.wantValue(i, value(100+i*1000, i))
	}
	w.incomingOf(8).fail(van.ErrPeerLost)
	s.wantDown(w)
	s.wantUp(w)
	s.must(push(w, 1, 1000, value(5000, 1)))
	w.wantValue(1000, value(5000, 1))
	if n := w.Stats().Unauthenticated + s.Stats().Unauthenticated; n != 0 {
		t.Errorf("%d unproved, want none", n)
	}
}

// request returns a connect request of p that proves the secret of k.
func (p *raw) request(k *auth.Keys, to *testNode, epoch uint32, q, qps int) []byte {
	h := handshake{node: p.node.ID, port: p.port, host: p.addr.String(), epoch: epoch, qp: q, qpCount: qps, incarnation: 77}
	return requestData(k, &h, netip.AddrPortFrom(to.addr, uint16(to.who.Port)))
}

// tryDial connects one queue pair and returns the event that ends the attempt.
func (p *raw) tryDial(to *testNode, private []byte) verbs.Event {
	p.r.Helper()
	id, err := p.ch.NewID(1)
	p.check(err)
	p.check(id.ResolveAddr(p.addr, netip.AddrPortFrom(to.addr, uint16(to.who.Port)), patience))
	p.event(verbs.AddrResolved)
	p.check(id.ResolveRoute(patience))
	p.event(verbs.RouteResolved)
	p.use(id)
	p.check(id.Connect(verbs.ConnParam{Private: private}))
	ev, err := p.ch.Next()
	p.check(err)
	return ev
}

// opening returns the inputs of the opener's proof after its request.
func (c *rawConn) opening(k *auth.Keys, request []byte) *upProof {
	return &upProof{keys: k, nonce: nonce(c.answers[0][nativeContextLen:]), first: request}
}

// slotWanted is a slot request that a node grants.
var slotWanted = slotRequest{metaLen: conn.CellSize, dataNum: nativeSlotRequest, data: [4]uint64{1024, 0, 600}, origin: 5, key: 6}

// TestUnprovedRequests: connect requests without a valid proof are rejected, and no state is made for them.
func TestUnprovedRequests(t *testing.T) {
	const differs, none = "STEPAF_CLUSTER_ID differs", "requires a proof"
	k := keysOf(t, secretA, true)
	for _, c := range []struct {
		name, want string
		request    func(p *raw, s *testNode) []byte
	}{
		{"no proof", none, func(p *raw, s *testNode) []byte { return p.privateData(true, 1, 0, 1) }},
		{"a C++ node", none, func(p *raw, s *testNode) []byte { return p.privateData(false, 1, 0, 1) }},
		{"zeros for a proof", none, func(p *raw, s *testNode) []byte {
			return append(p.privateData(true, 1, 0, 1), make([]byte, auth.ProofLen)...)
		}},
		{"a wrong proof", differs, func(p *raw, s *testNode) []byte {
			b := p.request(k, s, 1, 0, 1)
			b[len(b)-1] ^= 1
			return b
		}},
		{"a proof that is cut off", differs, func(p *raw, s *testNode) []byte {
			b := p.request(k, s, 1, 0, 1)
			return b[:len(b)-1]
		}},
		{"another secret", differs, func(p *raw, s *testNode) []byte { return p.request(keysOf(t, secretB, true), s, 1, 0, 1) }},
		{"another handshake than is proved", differs, func(p *raw, s *testNode) []byte {
			b := p.request(k, s, 1, 0, 1)
			b[offEpoch]++
			return b
		}},
		{"a request to another node", differs, func(p *raw, s *testNode) []byte {
			other := &testNode{addr: netip.MustParseAddr("10.77.9.9"), who: s.who}
			return p.request(k, other, 1, 0, 1)
		}},
		{"a request to another port", differs, func(p *raw, s *testNode) []byte {
			other := &testNode{addr: s.addr, who: s.who}
			other.who.Port++
			return p.request(k, other, 1, 0, 1)
		}},
		{"the proof of an answer", differs, func(p *raw, s *testNode) []byte {
			c := p.dial(s, 1, func(q int) []byte { return p.request(k, s, 2, q, 1) })
			return append(p.privateData(true, 1, 0, 1), c.answers[0][offAnswerProof:][:auth.ProofLen]...)
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t)
			s := r.proving(8, k, oneQP)
			p := newRaw(r, rawAddr, van.Node{ID: 9})
			defer p.end()
			private := c.request(p, s)
			before := len(*s.tables.conns.Load())
			ev := p.tryDial(s, private)
			if err := rejection(ev.Private); ev.Type != verbs.Rejected || err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("event %v with %v, want a rejection that says %q", ev.Type, err, c.want)
			}
			if n := s.Stats().Unauthenticated; n != 1 {
				t.Errorf("counted %d, want 1", n)
			}
			if n := len(*s.tables.conns.Load()); n != before {
				t.Errorf("%d connections, want %d", n, before)
			}
		})
	}
}

// TestUnprovedOpener: an attacker that replays a member's request is accepted, but gets no slot, delivers nothing, and does not replace the member's
// connection.
func TestUnprovedOpener(t *testing.T) {
	k := keysOf(t, secretA, true)
	for _, c := range []struct {
		name string
		do   func(c *rawConn, o *upProof)
	}{
		{"no proof", func(c *rawConn, o *upProof) { c.send(immUp, []byte{up}) }},
		{"nothing said", func(c *rawConn, o *upProof) { c.send(immUp, nil) }},
		{"zeros for a proof", func(c *rawConn, o *upProof) { c.send(immUp, make([]byte, 1+auth.ProofLen)) }},
		{"another secret", func(c *rawConn, o *upProof) {
			o.keys = keysOf(t, secretB, true)
			c.send(immUp, o.encodeUp(up))
		}},
		{"the proof of another connection", func(c *rawConn, o *upProof) {
			o.nonce[0]++
			c.send(immUp, o.encodeUp(up))
		}},
		{"the proof of another request", func(c *rawConn, o *upProof) {
			o.first = slices.Clone(o.first)
			o.first[offEpoch]++
			c.send(immUp, o.encodeUp(up))
		}},
		{"something else than is proved", func(c *rawConn, o *upProof) {
			b := o.encodeUp(up)
			b[0] = upAfterLoss
			c.send(immUp, b)
		}},
		{"the acceptor's own proof", func(c *rawConn, o *upProof) {
			c.send(immUp, append([]byte{up}, c.answers[0][offAnswerProof:][:auth.ProofLen]...))
		}},
		{"a proof that is cut off", func(c *rawConn, o *upProof) { c.send(immUp, o.encodeUp(up)[:auth.ProofLen]) }},
		{"a proof and more", func(c *rawConn, o *upProof) { c.send(immUp, append(o.encodeUp(up), 0)) }},
		{"a slot request", func(c *rawConn, o *upProof) {
			var b [slotRequestLen]byte
			q := slotWanted
			q.put(b[:])
			c.send(immSlotRequest, b[:])
		}},
		{"slots given back", func(c *rawConn, o *upProof) { c.send(immReturn, make([]byte, trailerLen)) }},
		{"credits", func(c *rawConn, o *upProof) { c.send(immCredits, make([]byte, trailerLen)) }},
		{"a write to a slot, and silence", func(c *rawConn, o *upProof) { c.notify(0, 0, 0, 0, nil) }},
		{"silence", func(*rawConn, *upProof) {}},
		{"silence, and the opener ends the connection", func(c *rawConn, _ *upProof) { _ = c.ids[0].Disconnect() }},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t)
			w, s := r.proving(9, k, oneQP), r.make(8, oneQP)
			s.secret.guard.Keys = k
			if strings.Contains(c.name, "silence") {
				s.times.proof = 200 * time.Millisecond
			}
			s.listenOn(0)
			s.Start(func(m *van.Message) { s.in <- m.Retain() })
			r.link(w, s)
			mine := s.incomingOf(9)
			r.until("the member has proved itself", func() bool { return (*s.tables.peers.Load())[9].inbound.Load() == mine })
			p := newRaw(r, rawAddr, van.Node{ID: 9})
			defer p.end()
			p.port, p.node.Hostname = w.who.Port, w.who.Hostname
			h := w.newHandshake(12345) // the worker's, with another epoch
			h.qpCount = 1
			request := requestData(k, &h, netip.AddrPortFrom(s.addr, uint16(s.who.Port)))
			x := p.dial(s, 1, func(int) []byte { return request })
			c.do(x, x.opening(k, request))
			p.event(verbs.Disconnected)
			r.until("it is counted", func() bool { return s.Stats().Unauthenticated == 1 })
			if mine.process.superseded.Load() || mine.failed.Load() || (*s.tables.peers.Load())[9].inbound.Load() != mine {
				t.Error("it has taken the place of the member's connection")
			}
			w.must(push(s, 1, 1, value(5000, 1)))
			s.wantValue(1, value(5000, 1))
			r.until("nothing is left of it", func() bool {
				s.mu.Lock()
				defer s.mu.Unlock()
				return len(s.accepted.unproved) == 0 && len(s.accepted.inbounds) == 1
			})
		})
	}
}

// TestProvedOpener: with a valid proof, the connections of the previous test succeed.
func TestProvedOpener(t *testing.T) {
	for name, order := range map[string][]int{"in order": {0, 1}, "the second request overtakes the first": {1, 0}} {
		t.Run(name, func(t *testing.T) { provedOpener(t, order) })
	}
}

func provedOpener(t *testing.T, order []int) {
	r := newRig(t)
	k := keysOf(t, secretA, true)
	s := r.proving(8, k)
	p := newRaw(r, rawAddr, van.Node{ID: 11})
	defer p.end()
	x := p.dial(s, 2, func(q int) []byte { return p.request(k, s, 5, order[q], 2) })
	if n := x.opening(k, nil).nonce; !bytes.Equal(x.answers[1][nativeContextLen:][:nonceLen], n[:]) {
		t.Error("the answers for two queue pairs of one connection have different numbers")
	}
	x.send(immUp, x.opening(k, p.request(k, s, 5, 0, 2)).encodeUp(up))
	if got := x.ask(slotWanted); got.meta == 0 || got.data == 0 {
		t.Errorf("no slot: %+v", got)
	}
	if n := s.Stats().Unauthenticated; n != 0 {
		t.Errorf("%d unproved, want none", n)
	}
}

// TestManyUnproved: the number of unproved connections is limited, and they do not keep members out.
func TestManyUnproved(t *testing.T) {
	r := newRig(t)
	k := keysOf(t, secretA, true)
	w, s := r.proving(9, k, oneQP), r.proving(8, k, oneQP)
	s.accepted.maxUnproved, s.times.proof = 3, time.Hour
	p := newRaw(r, rawAddr, van.Node{ID: 11})
	defer p.end()
	for i := range uint32(5) {
		p.dial(s, 1, func(q int) []byte { return p.request(k, s, i+1, q, 1) })
	}
	for range 2 {
		p.event(verbs.Disconnected)
	}
	var held []uint32
	s.mu.Lock()
	for _, in := range s.accepted.unproved {
		held = append(held, in.handshake.epoch)
	}
	s.mu.Unlock()
	if !slices.Equal(held, []uint32{3, 4, 5}) {
		t.Errorf("connections %d wait for a proof, want the latest 3 of 5", held)
	}
	r.link(w, s)
	w.must(push(s, 1, 1, value(5000, 1)))
	s.wantValue(1, value(5000, 1))
	s.says("a connection ends, its opener does not prove")
}

// TestCloseEndsWaitForProof: a node that has been closed does not log, when the time is over, that an opener has sent no proof.
func TestCloseEndsWaitForProof(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		k := keysOf(t, secretA, true)
		s := r.proving(8, k, oneQP, func(c *env.Config) { c.BusyPoll = env.AlwaysBlock }) // a poller that spins would spin forever here
		p := newRaw(r, rawAddr, van.Node{ID: 11})
		p.dial(s, 1, func(q int) []byte { return p.request(k, s, 1, q, 1) })
		s.close()
		time.Sleep(2 * proofTime)
		if n := s.Stats().Unauthenticated; n != 0 || s.lines("a connection ends, its opener does not prove") > 0 {
			t.Errorf("%d openers are counted after Close:\n%s", n, s.logged.String())
		}
		p.end()
	})
}

// TestUnprovedAcceptor: a node that has a secret sends nothing to an acceptor without proof.
func TestUnprovedAcceptor(t *testing.T) {
	k := keysOf(t, secretA, true)
	for _, c := range []struct {
		name, want string
		answer     func(h *handshake, requests [][]byte, q int) []byte
	}{
		{"no proof", "no secret", func(h *handshake, _ [][]byte, _ int) []byte { return h.encode() }},
		{"a C++ node", "no secret", func(h *handshake, _ [][]byte, _ int) []byte { return h.encode()[:contextLen] }},
		{"nothing", "no secret", func(*handshake, [][]byte, int) []byte { return nil }},
		{"the request, reflected", "no secret", func(_ *handshake, requests [][]byte, q int) []byte { return requests[q] }},
		{"the request's proof", "differs", func(h *handshake, requests [][]byte, q int) []byte {
			b := append(h.encode(), make([]byte, nonceLen)...)
			return append(b, requests[q][nativeContextLen:]...)
		}},
		{"another secret", "differs", func(h *handshake, requests [][]byte, q int) []byte {
			return answerData(keysOf(t, secretB, true), h, requests[q], nonce{1})
		}},
		{"another handshake than is proved", "differs", func(h *handshake, requests [][]byte, q int) []byte {
			b := answerData(k, h, requests[q], nonce{1})
			b[offIncarn]++
			return b
		}},
		{"another number than is proved", "differs", func(h *handshake, requests [][]byte, q int) []byte {
			b := answerData(k, h, requests[q], nonce{1})
			b[nativeContextLen]++
			return b
		}},
		{"a proof that is cut off", "differs", func(h *handshake, requests [][]byte, q int) []byte {
			b := answerData(k, h, requests[q], nonce{1})
			return b[:len(b)-1]
		}},
		{"a replayed answer", "differs", func(h *handshake, requests [][]byte, q int) []byte {
			b := slices.Clone(requests[q])
			b[offEpoch]++ // the answer to an earlier request
			return answerData(k, h, b, nonce{1})
		}},
		{"the answer for the other queue pair", "differs", func(h *handshake, requests [][]byte, q int) []byte {
			b := slices.Clone(requests[q])
			b[offQPIndex] ^= 1
			return answerData(k, h, b, nonce{1})
		}},
		{"another connection's answer for the second queue pair", "differs", func(h *handshake, requests [][]byte, q int) []byte {
			return answerData(k, h, requests[q], nonce{byte(q)})
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t)
			w := r.proving(9, k)
			p := newRaw(r, rawAddr, van.Node{ID: 10})
			defer p.end()
			bad := &testNode{who: van.Node{ID: 10, Hostname: rawAddr.String(), Port: p.port}}
			w.connect(bad)
			var requests [][]byte
			for q := range 2 {
				ev := p.event(verbs.ConnectRequest)
				requests = append(requests, ev.Private[:provedRequestLen])
				p.use(ev.New)
				h := handshake{node: 10, port: p.port, host: p.addr.String(), native: true, qp: q, qpCount: 2}
				if err := ev.New.Accept(verbs.ConnParam{Private: c.answer(&h, requests, q), RetryCount: 6, RNRRetryCount: 7}); err != nil && q == 0 {
					t.Fatal(err) // the node may have ended after that
				}
			}
			if down := w.wantDown(bad, c.want); errors.Is(down.cause, van.ErrReplaced) {
				t.Errorf("%v ends the node", down.cause)
			}
			w.Disconnect(10)
			var out [1]verbs.Completion
			if n, err := p.dev.Poll(out[:], 0, 0); err != nil || n == 1 && out[0].Type != verbs.RecvFailed {
				t.Errorf("the node has sent %v, error %v", out[0].Type, err)
			}
			if n := w.Stats().Unauthenticated; n == 0 {
				t.Error("it is not counted")
			}
		})
	}
}

// TestUnprovedRejection: only a member's rejection makes a node believe that it has been replaced.
func TestUnprovedRejection(t *testing.T) {
	k := keysOf(t, secretA, true)
	for _, c := range []struct {
		name   string
		proves *auth.Keys
		ends   bool
	}{{"no proof", nil, false}, {"another secret", keysOf(t, secretB, true), false}, {"proof", k, true}} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t)
			w := r.proving(9, k, oneQP)
			p := newRaw(r, rawAddr, van.Node{ID: 10})
			defer p.end()
			bad := &testNode{who: van.Node{ID: 10, Hostname: rawAddr.String(), Port: p.port}}
			w.connect(bad)
			ev := p.event(verbs.ConnectRequest)
			b := refusal(codeReplaced, "another process")
			if c.proves != nil {
				proof := c.proves.Proof(rejectionProof, ev.Private[:provedRequestLen], b[:offRejectProof])
				copy(b[offRejectProof:], proof[:])
			}
			p.check(ev.New.Reject(b))
			if down := w.wantDown(bad); errors.Is(down.cause, van.ErrReplaced) != c.ends {
				t.Errorf("%v; it ends the node: want %t", down.cause, c.ends)
			}
			w.Disconnect(10)
		})
	}
}

// TestReplacedRejectionHasProof: a node's rejection of a replaced process has a valid proof.
func TestReplacedRejectionHasProof(t *testing.T) {
	r := newRig(t)
	k := keysOf(t, secretA, true)
	w, s := r.proving(9, k, oneQP), r.proving(8, k, oneQP)
	s.mu.Lock()
	s.fences.replaced = append(s.fences.replaced, w.local.incarnation)
	s.mu.Unlock()
	w.connect(s)
	if down := w.wantDown(s); !errors.Is(down.cause, van.ErrReplaced) {
		t.Errorf("notified of %v, want that it was replaced", down.cause)
	}
	w.Disconnect(8)
}

// TestPlainPrivateData: without a secret, private data and the first message have the same bytes as in versions without proofs.
func TestPlainPrivateData(t *testing.T) {
	h := handshake{node: 9, port: 5, host: "h", native: true, epoch: 7, qpCount: 2}
	to := netip.MustParseAddrPort("10.77.1.1:5")
	if b := requestData(nil, &h, to); !bytes.Equal(b, h.encode()) {
		t.Errorf("request %x", b)
	}
	if b := answerData(nil, &h, requestData(keysOf(t, secretA, true), &h, to), nonce{1}); !bytes.Equal(b, h.encode()) {
		t.Errorf("answer %x", b)
	}
	if b := (&upProof{}).encodeUp(upAfterLoss); !bytes.Equal(b, []byte{upAfterLoss}) {
		t.Errorf("first message %x", b)
	}
	for _, same := range [][2]string{{"10.77.1.1:5", "[::ffff:10.77.1.1]:5"}, {"[fe80::1%eth0]:5", "[fe80::1%2]:5"}} {
		if a, b := netip.MustParseAddrPort(same[0]), netip.MustParseAddrPort(same[1]); !bytes.Equal(addressBytes(a), addressBytes(b)) {
			t.Errorf("%s and %s are two addresses", a, b)
		}
	}
}

// FuzzPrivateProof: no private data and no first message that is made without the secret has a valid proof.
func FuzzPrivateProof(f *testing.F) {
	k, other := keysOf(f, secretA, true), keysOf(f, secretB, true)
	h := handshake{node: 9, port: 5, host: "h", native: true, epoch: 7, qpCount: 2}
	to := netip.MustParseAddrPort("10.77.1.1:5")
	req := requestData(other, &h, to)
	f.Add(req, true)
	f.Add(answerData(other, &h, req, nonce{1}), true)
	f.Add((&upProof{keys: other, first: req}).encodeUp(up), false)
	f.Add(make([]byte, verbs.MaxAcceptData), false)
	f.Fuzz(func(t *testing.T, b []byte, native bool) {
		h := handshake{native: native}
		if err := checkRequest(k, &h, b, to); !auth.IsUnproved(err) {
			t.Errorf("request: %v", err)
		}
		if _, err := checkAnswer(k, &h, b, req); !auth.IsUnproved(err) {
			t.Errorf("answer: %v", err)
		}
		if err := (&upProof{keys: k, first: req}).checkUp(b); !auth.IsUnproved(err) {
			t.Errorf("first message: %v", err)
		}
	})
}
