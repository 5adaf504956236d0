package cluster

// The description of a node that all its parts need: role, id, rank, names, configuration and log.

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/internal/logx"
	"github.com/stepaf/stepaf-go/van"
)

// nodeInfo describes a node.
type nodeInfo struct {
	cfg         *Config
	role        van.Role
	incarnation uint32 // of this process, see van.NodeExtension
	rand        func() uint64
	id          atomic.Int32
	name        atomic.Pointer[string]
	peers       sync.Map                               // node id to "host:port"
	onPeers     atomic.Pointer[func()]                 // see App.OnPeers
	onTrace     func(id int, timestamp int32, t Trace) // Options.OnTrace
	log         *slog.Logger
	debug       bool // log every message
	causes      logx.Causes
	counts      counts
}

// Name is the node's name: "worker 0 (id 9)".
func (n *nodeInfo) Name() string { return *n.name.Load() }

func (n *nodeInfo) setName(s string) { n.name.Store(&s) }

// peersChanged calls the function of App.OnPeers.
func (n *nodeInfo) peersChanged() {
	if f := n.onPeers.Load(); f != nil {
		(*f)()
	}
}

// peerAddress is the address of a peer, and that of its data port, "" if it has none.
type peerAddress struct{ node, data string }

// String returns the address of the peer.
func (p peerAddress) String() string { return p.node }

func addressOf(n *van.Node) peerAddress {
	at := peerAddress{node: n.Addr()}
	if x, ok := n.Extension(); ok && x.DataPort != 0 {
		at.data = fmt.Sprintf("%s:%d", n.Hostname, x.DataPort)
	}
	return at
}

// peerName names node id and its address: "server 1 (id 10) at 10.0.0.7:4021".
func (n *nodeInfo) peerName(id int) string {
	if addr, ok := n.peers.Load(id); ok {
		return fmt.Sprintf("%s at %s", van.NodeName(id), addr)
	}
	return van.NodeName(id)
}

// Log is the node's logger; its lines carry role, rank and id.
func (n *nodeInfo) Log() *slog.Logger { return n.log }

// Config is the configuration that the node was started with. Do not change it.
func (n *nodeInfo) Config() *Config { return n.cfg }

// Role is the node's role: worker, server or scheduler.
func (n *nodeInfo) Role() van.Role { return n.role }

// ID is the node's id.
func (n *nodeInfo) ID() int { return int(n.id.Load()) }

// Rank is the instance rank.
func (n *nodeInfo) Rank() int { return van.RankOf(n.ID()) }

// mayJoin reports whether a cluster of this size has a node with that id.
func (n *nodeInfo) mayJoin(id int) bool {
	switch {
	case id == van.SchedulerID:
		return true
	case id <= van.AllNodes || id >= van.Empty:
		return false
	case van.RoleOf(id) == van.Worker:
		return van.RankOf(id) < n.cfg.NumWorkers*n.cfg.GroupSize
	default:
		return van.RankOf(id) < n.cfg.NumServers*n.cfg.GroupSize
	}
}

// rarely is App.Rarely. Errors of one cause have the same logx.Kind or PeerKind.
func (n *nodeInfo) rarely(cause string) *slog.Logger { return n.causes.Log(n.log, cause) }

// pausedRead is App.PausedRead.
func (n *nodeInfo) pausedRead(id, bytes int, text string) {
	n.counts.paused.Add(1)
	n.rarely(text).Warn(text, "peer", n.peerName(id), "bytes", bytes, "limit (STEPAF_RECV_BUDGET_PEER)", n.cfg.RecvBudgetPeer)
}

// droppedControl logs that a control message of node from was dropped, and why.
func (n *nodeInfo) droppedControl(from int, why error) {
	n.rarely("control: "+logx.PeerKind(why)).Warn("dropped a control message", "err", why, "from", n.peerName(from))
}

// logMessage writes a line for one message at PS_VERBOSE=2.
func (n *nodeInfo) logMessage(way string, peer int, m *van.Meta) {
	if !n.debug {
		return
	}
	n.log.LogAttrs(context.Background(), slog.LevelDebug, way, slog.String("peer", van.NodeName(peer)), slog.String("message", m.String()))
}

// knownID is a log attribute that shows the node's id, or its rank, as soon as it is known.
type knownID struct {
	n    *nodeInfo
	rank bool // shows the rank
}

func (k knownID) LogValue() slog.Value {
	switch id := k.n.ID(); {
	case id == van.Empty:
		return slog.StringValue("-")
	case k.rank:
		return slog.IntValue(van.RankOf(id))
	default:
		return slog.IntValue(id)
	}
}

// lossMargin is the time for the steps after a missed heartbeat: the connection ends, and the layers above receive
// the loss.
const lossMargin = 3 * time.Second

// lossDetectionTime is the longest time from the stop of a process until it is found lost, 0 if heartbeats are off.
func (n *nodeInfo) lossDetectionTime() time.Duration {
	interval, silence := n.cfg.Heartbeats()
	if interval <= 0 || silence <= 0 {
		return 0
	}
	return silence + interval + lossMargin
}
