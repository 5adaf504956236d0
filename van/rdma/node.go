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

// This file owns what all parts of a van have in common.

// node is what the connections of a van, in both directions, know of it.
type node struct {
	cfg     *env.Config
	log     *slog.Logger
	backend backend.Backend
	local   localNode
	times   times // for tests to change
	owner   owner
	watch   func(id int, up bool, cause error)
	stats   stats
	secret  secretState

	cm          conn.Manager  // IDs and queue pairs
	eventsEnded chan struct{} // closed when the connection manager says no more
	warnPin     sync.Once
	serials     atomic.Uint32
	tables      tables

	budget budgets

	mu      sync.Mutex // guards changes of the tables above, and buffers
	buffers map[bufferKey]backend.Mem
	closed  atomic.Bool
	wg      sync.WaitGroup // goroutines that end by themselves
}

// localNode is what this node tells its peers of itself.
type localNode struct {
	self        van.Node // set by Bind
	id          atomic.Int32
	incarnation uint32 // of this process; 0: not set
	epoch       uint32 // added to serial numbers, so that connections of different processes differ
}

// tables are read without a lock. Who changes one holds node.mu and stores a new map or slice.
type tables struct {
	peers   atomic.Pointer[map[int]*peer]
	conns   atomic.Pointer[map[uint32]*connection] // by serial number
	devices atomic.Pointer[[]*device]
	classes atomic.Pointer[map[int]int] // traffic classes of peers, see SetTrafficClasses
}

// secretState is what decides about peers that do not prove the cluster's secret.
type secretState struct {
	guard             auth.Guard  // its Keys are nil if this node proves nothing
	secretMismatchLog logx.Sparse // log lines about peers that have a secret where this node has none
	unprovedLog       logx.Sparse // log lines about connections that end for want of a proof
}

// budgets bounds what is registered for peers: slots, and bytes.
type budgets struct {
	slots          *rendezvous.SlotTable[slotMemory]
	perPeer, total int64 // 0: no bound
	registered     atomic.Int64
	slotsScannedAt atomic.Uint64 // when all slots were last looked at
	slotWaitLog    logx.Sparse
}

// owner is the van as its connections see it: what they cannot do alone.
type owner interface {
	// device returns the van's part on dev, and starts polling it.
	device(dev verbs.Device) (*device, error)
	// linkInbounds tells each peer which connection it has opened to this node.
	linkInbounds()
	// opened makes in a connection of its process, whose opener has proved itself.
	opened(in *inbound)
	// destroyInbound takes apart a connection to this node. p is the peer whose own connection
	// it is, or nil.
	destroyInbound(in *inbound, p *peer, cause error)
}

// PathTo implements van.PathChooser: values on a device go as they are, to every peer.
func (v *node) PathTo(int) van.Path { return van.Path{Over: "ibverbs", Device: true} }

// newHandshake is what this node says of itself.
func (v *node) newHandshake(epoch uint32) handshake {
	return handshake{node: int(v.local.id.Load()), port: v.local.self.Port, host: v.local.self.Hostname, native: true, bundles: true, epoch: epoch, qpCount: v.cfg.QPNum, incarnation: v.local.incarnation}
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

// malformedFrom counts and reports nonsense from the network: the 1st, 2nd, 4th, ... so
// that a flood of it does not become a flood of lines.
func (v *node) malformedFrom(who string, err error) {
	if n := v.stats.malformed.Add(1); n&(n-1) == 0 {
		v.log.Warn("dropped a malformed message", "err", err, "from", who, "dropped so far", n)
	}
}

// stats counts without locks.
type stats struct {
	sentN, sentB, recvN, recvB, malformed atomic.Uint64

	refusedSlots atomic.Uint64 // slot requests that were refused for good
	slotWaits    atomic.Uint64 // slot requests that had to wait for room, or behind others

	fenced, refusedSends, paused atomic.Uint64

	slowHandlerLog logx.Sparse // warnings of handlers that are slow
}

func (s *stats) sent(bytes int) { s.sentN.Add(1); s.sentB.Add(uint64(bytes)) }

func (s *stats) received(bytes int) { s.recvN.Add(1); s.recvB.Add(uint64(bytes)) }

// times are those that depend on how fast the peer is.
type times struct {
	connect, connectStepMesh time.Duration // for the answer to a connect request
	allQueuePairs            time.Duration // for the connect requests of all queue pairs; StepMesh may have fewer
	inboundDown              time.Duration // that a peer may be without its own connection to this node
	quiet                    time.Duration // in which a lost connection that carried no data may be made again, before the watcher is notified
	overwriteGrace           time.Duration // that a request may be held after its answer
	budgetWait               time.Duration // that a slot request waits for bytes of its own peer
	sleep                    time.Duration // of a loop, at most
	probe                    time.Duration // between two probes of an idle connection
	proof                    time.Duration // for the opener of a connection to prove itself
}

// A StepMesh node aborts when a connect request is withdrawn: there the connection
// manager, which tries for about a minute, has to say that nobody answers.
var defaultTimes = times{connect: 5 * time.Second, connectStepMesh: 90 * time.Second, allQueuePairs: 10 * time.Second, quiet: time.Second, overwriteGrace: 100 * time.Millisecond, budgetWait: 5 * time.Second, inboundDown: inboundDownTime,
	sleep: maxSleep, probe: probeTime, proof: proofTime}

// conn is what a serial number names: an outgoing connection with its peer, or an
// incoming one.
type connection struct {
	link *link
	peer *peer
	in   *inbound
}
