package zmq

// The state that all parts of a van share: the node's own names, its peers, and its counters.

import (
	"bytes"
	"context"
	"crypto/hmac"
	"log/slog"
	"maps"
	"net"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/internal/hostaddr"
	"github.com/stepaf/stepaf-go/internal/logx"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/auth"
	"github.com/stepaf/stepaf-go/van/env"
)

// shared is a van's configuration, its own names, and its peers.
type shared struct {
	cfg *env.Config
	log *slog.Logger

	curve  *curve // nil: connections are plain
	redial func(*conn)
	proofs proofs

	incarnation uint32 // own; 0: the node uses the protocol of the original

	self  van.Node     // set by Bind
	id    atomic.Int32 // own node id
	watch func(id int, up bool, cause error)

	onDropped func(*van.Message, string) // van.Options.OnDropped

	mu      sync.Mutex // guards changes of peers
	peers   atomic.Pointer[map[int]*conn]
	closed  atomic.Bool
	classes atomic.Pointer[map[int]int] // traffic classes of peers, see SetTrafficClasses
	stats   stats

	monitors atomic.Uint64 // monitors made so far; numbers the next one
}

// proofs is what a node knows of peers that did not prove themselves.
type proofs struct {
	warns  *auth.Keys    // set with STEPAF_AUTH=warn
	limit  time.Duration // proofTime, except in tests
	failed logx.Causes   // handshakes that failed
}

// WatchPeers implements van.PeerWatcher.
func (n *shared) WatchPeers(f func(id int, up bool, cause error)) { n.watch = f }

// Stats implements van.Meter.
func (n *shared) Stats() van.Stats { return n.stats.get() }

// endpoint returns the address of a node in libzmq's form.
func (n *shared) endpoint(peer *van.Node) string {
	if n.cfg.Local {
		return "ipc://" + localPath(peer.Port)
	}
	return "tcp://" + net.JoinHostPort(hostaddr.Canonical(peer.Hostname), strconv.Itoa(peer.Port))
}

// nameTo returns this node's routing id toward the process with that incarnation, 0 for a node of the original.
func (n *shared) nameTo(incarnation uint32) string {
	if incarnation == 0 {
		return routingID(peerName{id: int(n.id.Load())}, 0)
	}
	return routingID(peerName{int(n.id.Load()), n.incarnation}, incarnation)
}

// setID sets the node's id. The caller holds n.mu.
func (n *shared) setID(id int) {
	n.id.Store(int32(id))
	for _, c := range *n.peers.Load() {
		n.name(c, c.who.Load().id)
	}
}

// peerIncarnation returns the incarnation of peer, 0 if it or this node does not use incarnations.
func (n *shared) peerIncarnation(peer *van.Node) uint32 {
	if who, ok := peer.Extension(); ok && n.incarnation != 0 {
		return who.Incarnation
	}
	return 0
}

// heartbeats returns the interval of libzmq's heartbeats and the limit for their answers; 0 means no heartbeats. A
// stopped peer is detected within the sum of both.
func (n *shared) heartbeats() (every, limit time.Duration) {
	if every, limit = n.cfg.Heartbeats(); every <= 0 || limit <= 0 {
		return 0, 0
	}
	return min(every, limit/4), limit
}

// name makes c the connection to id.
func (n *shared) name(c *conn, id int) {
	c.who.Store(&identity{id, routingID(peerName{id, c.incarnation}, n.incarnation), n.nameTo(c.incarnation),
		n.self.Role != van.Worker && id > 0 && van.RoleOf(id) == van.Worker})
}

// replace changes the table of peers. The caller holds n.mu.
func (n *shared) replace(change func(map[int]*conn)) {
	m := maps.Clone(*n.peers.Load())
	change(m)
	n.peers.Store(&m)
}

// refused counts a handshake with peer that failed because of cause, and logs the first of each cause.
func (n *shared) refused(peer, addr string, cause error) {
	n.stats.unproved.Add(1)
	count, show := n.proofs.failed.Next(addr + logx.Kind(cause))
	if !show {
		return
	}
	level := slog.LevelWarn
	if count == 1 && cause == errMaybeSecret { // a peer that leaves the cluster may do this once; with another secret it fails again
		level = slog.LevelInfo
	}
	n.log.Log(context.Background(), level, "a connection was refused", "peer", peer, "addr", addr, "err", cause, "so far", count)
}

// proveRecord appends to m, a registration, the proof that STEPAF_AUTH=warn checks.
func (n *shared) proveRecord(m *van.Meta) {
	if len(m.Control.Nodes) != 1 {
		return
	}
	if proof := recordProof(n.proofs.warns, &m.Control.Nodes[0]); !bytes.HasSuffix(m.Body, proof[:]) { // a repeated registration has one
		m.Body = append(m.Body[:len(m.Body):len(m.Body)], proof[:]...) // after the part that membership writes
	}
}

// registerLen is the length of the text that membership writes into the body of a registration that proves its address.
const registerLen = len("stepaf/1 register 0123456789abcdef")

// checkRecord counts and logs the node that m registers if m has no valid proof. The node is admitted all the same. With
// STEPAF_AUTH=warn connections are plain, so an observer can replay a registration: the proof only shows which nodes are configured.
func (n *shared) checkRecord(m *van.Meta) {
	for i := range m.Control.Nodes {
		proof := recordProof(n.proofs.warns, &m.Control.Nodes[i])
		var given []byte
		if own := len(m.Body) - len(proof); own == 0 || own == registerLen {
			given, m.Body = m.Body[own:], m.Body[:own]
		}
		if hmac.Equal(proof[:], given) {
			continue
		}
		n.stats.unproved.Add(1)
		cause := errNoSecretThere
		if len(given) == len(proof) {
			cause = errOtherSecret
		}
		who, addr := &m.Control.Nodes[i], m.Control.Nodes[i].Addr()
		n.proofs.failed.Log(n.log, addr+logx.Kind(cause)).Warn("a node without proof was admitted (STEPAF_AUTH=warn)", "role", who.Role, "addr", addr, "err", cause)
	}
}

// recordProof returns the proof of a node's registration.
func recordProof(keys *auth.Keys, node *van.Node) [auth.ProofLen]byte {
	return keys.Proof("registration", []byte(node.Addr()), node.Endpoint)
}

// tell reports a change of c's connection to the watcher.
func (n *shared) tell(c *conn, up bool, cause error) {
	if n.watch == nil || c.leaves.Load() {
		return
	}
	if cause != nil {
		cause = &van.ConnectionError{Incarnation: c.incarnation, Err: cause}
	}
	n.watch(c.who.Load().id, up, cause)
}

// classOf returns the traffic class of messages to c, if one is set.
func (n *shared) classOf(c *conn) (class int, ok bool) {
	if m := n.classes.Load(); m != nil {
		class, ok = (*m)[c.who.Load().id]
	}
	return class, ok
}

// stats are the van's counters, which need no lock.
type stats struct {
	sentN, sentB, recvN, recvB, malformed, stale, strangers, unproved, refused, paused atomic.Uint64
}

func (s *stats) sent(bytes int)     { s.sentN.Add(1); s.sentB.Add(uint64(bytes)) }
func (s *stats) received(bytes int) { s.recvN.Add(1); s.recvB.Add(uint64(bytes)) }
func (s *stats) get() van.Stats {
	return van.Stats{SentMessages: s.sentN.Load(), SentBytes: s.sentB.Load(), ReceivedMessages: s.recvN.Load(),
		ReceivedBytes: s.recvB.Load(), Malformed: s.malformed.Load(),
		PausedReads: s.paused.Load(), RefusedSends: s.refused.Load(), DroppedUnknown: s.strangers.Load(), Unauthenticated: s.unproved.Load(), FencedMessages: s.stale.Load()}
}
