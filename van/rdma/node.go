package rdma

import (
	"log/slog"
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/internal/logx"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/auth"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/env"
	"github.com/stepaf/stepaf-go/van/rdma/conn"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
	"github.com/stepaf/stepaf-go/van/rendezvous"
)

// This file owns the state that all parts of a van share.

// node is the part of a van that its connections, in both directions, use.
type node struct {
	cfg     *env.Config
	log     *slog.Logger
	backend backend.Backend
	local   localNode
	times   times // tests change them
	owner   owner
	watch   func(id int, up bool, cause error)
	stats   stats
	secret  secretState

	cm          conn.Manager  // IDs and queue pairs
	eventsEnded chan struct{} // closed when the connection manager's events have ended
	warnPin     sync.Once
	serials     atomic.Uint32
	tables      tables

	budget budgets

	mu      sync.Mutex // guards changes of tables, and buffers
	buffers recvBuffers
	closed  atomic.Bool
	wg      sync.WaitGroup // goroutines that end by themselves
}

// localNode is what this node says of itself to its peers.
type localNode struct {
	self        van.Node // set by Bind
	id          atomic.Int32
	incarnation uint32 // of this process; 0: not set
	epoch       uint32 // added to serial numbers, so that connections of different processes differ
}

// tables are read without a lock. To change one, hold node.mu and store a new map or slice.
type tables struct {
	peers   atomic.Pointer[map[int]*peer]
	conns   atomic.Pointer[map[uint32]*connection] // by serial number
	devices atomic.Pointer[[]*device]
	classes atomic.Pointer[map[int]int] // traffic classes of peers, see SetTrafficClasses
}

// secretState decides about peers that do not prove the cluster's secret.
type secretState struct {
	guard             auth.Guard  // its Keys are nil if this node proves nothing
	secretMismatchLog logx.Sparse // log lines about peers that have a secret while this node has none
	unprovedLog       logx.Sparse // log lines about connections that end because a proof is missing
}

// budgets limits the slots and the bytes that are registered for peers.
type budgets struct {
	slots          *rendezvous.SlotTable[slotMemory]
	perPeer, total int64 // bytes; 0: no limit
	registered     atomic.Int64
	slotsScannedAt atomic.Uint64 // time of the last scan of all slots
	slotWaitLog    logx.Sparse
}

// owner is the part of the van that its connections call.
type owner interface {
	// device returns the van's state on dev, and starts polling dev.
	device(dev verbs.Device) (*device, error)
	// linkInbounds assigns to each peer the connection that it has opened to this node.
	linkInbounds()
	// opened assigns in to its process after its opener has proved itself.
	opened(in *inbound)
	// destroyInbound ends a connection to this node. p is the peer whose own connection it is, or nil.
	destroyInbound(in *inbound, p *peer, cause error)
}

// PathTo implements van.PathChooser: values in device memory are sent from there, to every peer.
func (v *node) PathTo(int, bool) van.Path { return van.Path{Over: "ibverbs", Device: true} }

// newHandshake returns this node's handshake.
func (v *node) newHandshake(epoch uint32) handshake {
	return handshake{node: int(v.local.id.Load()), port: v.local.self.Port, host: v.local.self.Hostname, native: true, epoch: epoch, qpCount: v.cfg.QPNum, incarnation: v.local.incarnation}
}

func (v *node) addConnLocked(serial uint32, c *connection) {
	m := maps.Clone(*v.tables.conns.Load())
	m[serial] = c
	v.tables.conns.Store(&m)
}

func (v *node) removeConn(serial uint32) {
	v.mu.Lock()
	defer v.mu.Unlock()
	m := maps.Clone(*v.tables.conns.Load())
	delete(m, serial)
	v.tables.conns.Store(&m)
	v.cm.Remove(serial, v.cfg.QPNum)
}

// malformedFrom counts an invalid message. It logs the 1st, 2nd, 4th, 8th, ..., so that a flood of messages is not a flood of log lines.
func (v *node) malformedFrom(who string, err error) {
	if n := v.stats.malformed.Add(1); n&(n-1) == 0 {
		v.log.Warn("dropped a malformed message", "err", err, "from", who, "dropped so far", n)
	}
}

// stats are counters that need no lock.
type stats struct {
	sentN, sentB, recvN, recvB, malformed atomic.Uint64

	refusedSlots atomic.Uint64 // slot requests that were refused
	slotWaits    atomic.Uint64 // slot requests that had to wait for memory, or for earlier requests

	fenced, refusedSends, paused atomic.Uint64

	slowHandlerLog logx.Sparse // warnings about slow handlers
}

func (s *stats) sent(bytes int) { s.sentN.Add(1); s.sentB.Add(uint64(bytes)) }

func (s *stats) received(bytes int) { s.recvN.Add(1); s.recvB.Add(uint64(bytes)) }

// times are limits that depend on the speed of the peer.
type times struct {
	connect, connectStepMesh time.Duration // for the answer to a connect request
	allQueuePairs            time.Duration // for the connect requests of all queue pairs; a StepMesh node may open fewer
	inboundDown              time.Duration // how long a peer may be without its own connection to this node
	quiet                    time.Duration // how long a lost connection that carried no data may take to be restored before the watcher is notified
	overwriteGrace           time.Duration // how long a request may stay unreleased after its answer
	budgetWait               time.Duration // how long a slot request waits for bytes of its own peer, and for peers above their share before all are asked
	reclaim                  time.Duration // how long a peer with unused slots may return none when asked, also on a busy machine
	sleep                    time.Duration // the longest sleep of a loop
	probe                    time.Duration // between two probes of an idle connection
	proof                    time.Duration // how long the opener of a connection may take to prove itself
}

// defaultTimes: connectStepMesh is long because a StepMesh node aborts if a connect request is withdrawn. There the connection manager,
// which tries for about a minute, must report the time-out.
var defaultTimes = times{connect: 5 * time.Second, connectStepMesh: 90 * time.Second, allQueuePairs: 10 * time.Second, quiet: time.Second, overwriteGrace: 100 * time.Millisecond, budgetWait: 5 * time.Second, reclaim: 10 * time.Second,
	inboundDown: inboundDownTime, sleep: maxSleep, probe: probeTime, proof: proofTime}

// connection is the connection of a serial number: an outgoing one with its peer, or an inbound one.
type connection struct {
	link *link
	peer *peer
	in   *inbound
}
