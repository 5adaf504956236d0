package van

// The Van interface, the optional abilities of a transport, and the registry of transports.

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/stepaf/stepaf-go/van/auth"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/engine"
	"github.com/stepaf/stepaf-go/van/env"
)

// Van carries messages between one node and its peers. It knows addresses and
// bytes, not what a message means. All methods are safe for concurrent use.
//
// The order of calls is Bind, Start, then Connect, Send, Rename and Disconnect
// in any order, then Close. Data messages of one peer arrive in the order they were
// sent, and so do control and simple-app messages; a transport may let one kind
// overtake the other.
type Van interface {
	// Type names the transport: "zmq", "rdma".
	Type() string

	// Bind listens at self.Hostname and self.Port (0: any free port) and returns
	// the port. For the scheduler self.ID is SchedulerID, for others Empty.
	Bind(ctx context.Context, self Node) (port int, err error)

	// Start begins to hand received messages to recv. Messages of one peer come
	// one after the other and in order; those of different peers may come at the
	// same time. recv may block: peers other than the message's must still be
	// served.
	Start(recv Receiver)

	// SetID tells the van its node's id as soon as the scheduler has given it.
	// Connections made afterwards carry it.
	SetID(id int)

	// Connect opens (or replaces) the connection over which Send reaches id. It
	// does not wait for the peer: what is sent before the peer listens is kept.
	// id is the peer's node id, or any negative number that the caller uses for a
	// peer that has no id yet.
	Connect(ctx context.Context, id int, peer Node) error

	// Rename makes the connection to old serve new instead.
	Rename(old, new int) error

	// Disconnect closes the connection to id, after giving what was sent a short
	// time to leave. It does nothing when there is none.
	Disconnect(id int)

	// Send hands msg to the transport for msg.Receiver and returns without waiting
	// for the peer. It stamps PostSend in the message's trace. Errors wrap
	// ErrUnknownPeer, ErrPeerLost, ErrQueueFull or ErrClosed.
	Send(msg *Message) error

	// Close stops receiving, lets what was sent leave until ctx ends, and frees
	// everything. No receiver runs after it returns; a receiver that calls it gives it a
	// ctx made by engine.Within for its message's Turn, so that it does not wait for
	// itself. Close twice is harmless.
	Close(ctx context.Context) error
}

// Receiver takes one received message. See Message for how long it is valid.
type Receiver func(*Message)

// BufferRegistrar is implemented by vans that can put a push straight into
// memory that the application has named.
type BufferRegistrar interface {
	// RegisterRecvBuffer makes dst the destination of values that sender pushes under
	// key. Such messages are delivered with Placed set and Vals inside dst.
	RegisterRecvBuffer(sender int, key uint64, dst backend.Mem) error
}

// Invalidator is implemented by transports whose peers write into memory that Message.Into names.
type Invalidator interface {
	// Invalidate withdraws the peers' access to the memory that a pull request has named and whose answer is no
	// longer awaited. After Invalidate returns, no peer can write there. A peer that tries loses its connection,
	// which is then made again.
	Invalidate(backend.Mem)
}

// Canceler is implemented by transports that read the memory of messages after Send has returned.
type Canceler interface {
	// Cancel cancels the messages of these requests that have not left. After Cancel returns, the bytes of their
	// frames belong to the caller, whether or not Done has been called. A receiver of this library gets a canceled
	// message as it was sent, or not at all. A C++ StepMesh receiver may get what that memory holds later.
	Cancel(Requests)
}

// Requests are those of one customer with consecutive timestamps.
type Requests struct {
	App, Customer int32
	First         int32 // timestamp
	Count         int32
}

// Has tells whether a message with that meta is one of the requests.
func (r *Requests) Has(m *Meta) bool {
	return m.Request && !m.IsControl() && m.AppID == r.App && m.CustomerID == r.Customer && m.Timestamp >= r.First && m.Timestamp-r.First < r.Count
}

// Advertiser is implemented by vans that tell peers about themselves in the node
// record.
type Advertiser interface {
	// Endpoint is for NodeExtension.Local, at most MaxLocalLen bytes, or nil. It is known
	// after Bind.
	Endpoint() []byte
}

// Admitter is implemented by vans on which messages of a process that replaces a
// lost one could arrive before this node knows of the replacement.
type Admitter interface {
	// Admit lets messages of peer id be delivered: all of this node knows the process
	// that the latest Connect named in place of the former one.
	Admit(id int)
}

// TrafficClassSetter is implemented by vans whose connections can carry a traffic class.
type TrafficClassSetter interface {
	// SetTrafficClasses makes classes those of what leaves for these peers, by id: 0 to 63, the
	// DSCP. All others have the system's. Connections that are made later get them, too.
	SetTrafficClasses(classes map[int]int)
	// TrafficClassApplied tells whether what leaves for peer id has its class now, and otherwise whether
	// it ever can.
	TrafficClassApplied(id int) (now, ever bool)
}

// Flusher is implemented by vans that hold messages sent with More.
type Flusher interface {
	// Flush sends what is held for peer id.
	Flush(id int)
}

// PeerWatcher is implemented by vans that notice when a peer goes away.
type PeerWatcher interface {
	// WatchPeers makes the van call f when the connection to a peer breaks (up
	// false) and when it is back (up true). A van may also call it when an attempt to
	// connect fails, with a cause that wraps syscall.ECONNREFUSED; it keeps
	// trying. f must not block. It must not be called within Send or Cancel: wrappers hold
	// locks there that f may need. Call WatchPeers before Start.
	WatchPeers(f func(id int, up bool, cause error))
}

// Prober is implemented by vans that can say why a peer is not reached, and that can reply to a
// process which they do not reach.
type Prober interface {
	// Probe tries the address of a peer within ctx: nil if a node may listen there. It makes no connection for
	// messages. An error wraps the system's errno, ErrMalformed if another program listens there, or ErrTimeout if what
	// listens there is silent: another program, or a node that is stopped.
	Probe(ctx context.Context, peer Node) error
	// Reply sends a control message to the process with that incarnation, which has no id yet, on the
	// connection that it has made to this node. If there is none, the error wraps ErrPeerLost.
	Reply(incarnation uint32, msg *Message) error
}

// LivenessProber is implemented by transports that probe their peers themselves. A dedicated OS thread
// answers probes; it takes no locks of the program and does not depend on Go's scheduler. A peer that is
// busy computing therefore still answers, and a stopped process does not.
type LivenessProber interface {
	// Alive reports whether the connection to peer id stands and the process that the latest Connect named
	// has answered a probe within PS_HEARTBEAT_TIMEOUT, or a fourth more at most. Once Alive turns false, the
	// transport may end the connection. Alive must not block.
	Alive(id int) bool
}

// Reorderer is implemented by vans that can tell whether they keep a peer's messages in
// order.
type Reorderer interface {
	// Reorders tells whether a message may be handed up before one that the same peer
	// sent earlier, as when that one was lost and is sent again.
	Reorders() bool
}

// HostChooser is implemented by vans that cannot use every address of this host,
// such as one that needs an RDMA device.
type HostChooser interface {
	// ChooseHost returns the address that a node which is not the scheduler should
	// bind and tell others, and why that one, on one line for the log. It is asked
	// before Bind when DMLC_INTERFACE decides, or nothing does: that is, unless
	// DMLC_NODE_HOST is set and DMLC_INTERFACE is not auto. An empty host leaves the
	// choice to the rules for any transport.
	ChooseHost() (host, why string, err error)
}

// Path is how data goes to one peer.
type Path struct {
	// Over names what carries it: a transport, or "shared memory".
	Over string
	// Device says that values on the node's device go as they are. On other paths they are
	// copied to the host first.
	Device bool
}

// PathChooser is implemented by vans that choose what carries the data of each peer, and
// by those that take values on a device.
type PathChooser interface {
	// PathTo returns the path to peer id. While it is not settled PathTo waits, as Send
	// does. Without a connection to id it is that of most peers.
	PathTo(id int) Path
}

// PathTo returns how data goes from v to peer id.
func PathTo(v Van, id int) Path {
	if c, ok := As[PathChooser](v); ok {
		return c.PathTo(id)
	}
	return Path{Over: v.Type()}
}

// Wrapper is implemented by vans that wrap another one.
type Wrapper interface {
	// Unwrap returns the van inside.
	Unwrap() Van
}

// As finds the first van, from v inwards, that has the optional ability T, such
// as PeerWatcher or BufferRegistrar. Use it instead of a type assertion, which
// does not see the vans inside a wrapper.
func As[T any](v Van) (ability T, ok bool) {
	for v != nil {
		if ability, ok = v.(T); ok {
			return ability, true
		}
		w, wraps := v.(Wrapper)
		if !wraps {
			break
		}
		v = w.Unwrap()
	}
	return ability, false
}

// Stats are counters of a van since it was made. Those that a transport does not
// keep are 0.
type Stats struct {
	SentMessages, SentBytes         uint64
	ReceivedMessages, ReceivedBytes uint64
	Malformed                       uint64 // frames dropped because they were malformed
	LentValues                      uint64 // values that the transport holds at present

	PausedReads     uint64 // times that reading from a peer paused: STEPAF_RECV_BUDGET_PEER, STEPAF_RECV_BUDGET
	RefusedSends    uint64 // messages refused with ErrQueueFull: STEPAF_SEND_BUDGET
	DroppedUnknown  uint64 // connections ended and messages dropped: STEPAF_STRANGER_BUDGET
	Unauthenticated uint64 // connections without proof of the cluster's secret, refused or (STEPAF_AUTH=warn) admitted
	RefusedRings    uint64 // links through shared memory that got no memory, and rings that did not grow: STEPAF_SHM_BUDGET
	RefusedSlots    uint64 // peers' requests for memory that got none: STEPAF_RDMA_PEER_BUDGET
	SlotWaits       uint64 // those that had to wait: also STEPAF_RDMA_BUDGET, BYTEPS_ADDRESS_POOL_SIZE
	FencedMessages  uint64 // dropped: the process that sent them has been replaced
	UnsharedValues  uint64 // on the device, sent through host memory: their memory could not be shared
}

// Meter is implemented by vans that keep Stats.
type Meter interface{ Stats() Stats }

// Options is what a transport is made with.
type Options struct {
	Config *env.Config
	Log    *slog.Logger
	// Backend is where buffers for received values are allocated; nil means ordinary
	// memory. The caller closes it after the van.
	Backend backend.Backend
	// Incarnation is the node's, see NodeExtension; with 0 the van speaks as a C++ StepMesh
	// node does.
	Incarnation uint32
	// Engine receives for the node; nil makes the van use one of its own.
	Engine *engine.Engine
	// Keys prove that the node knows its cluster's secret; nil: it proves nothing.
	Keys *auth.Keys
}

// Factory makes a van.
type Factory func(Options) (Van, error)

var transports = struct {
	sync.RWMutex
	m map[string]Factory
}{m: map[string]Factory{}}

// Register adds a transport under the name that DMLC_ENABLE_RDMA and
// DMLC_PS_VAN_TYPE use. It is meant for init functions and panics when the name
// is taken.
func Register(name string, f Factory) {
	transports.Lock()
	defer transports.Unlock()
	if _, dup := transports.m[name]; dup {
		panic("van: Register called twice for " + name)
	}
	transports.m[name] = f
}

// New makes the transport that opts.Config names.
func New(opts Options) (Van, error) {
	name := opts.Config.VanType
	transports.RLock()
	f := transports.m[name]
	transports.RUnlock()
	if f == nil {
		have := Transports()
		return nil, fmt.Errorf("van type %q (%s): %w: this build has %s%s", name, opts.Config.Origin("DMLC_PS_VAN_TYPE"),
			ErrNoTransport, strings.Join(have, ", "), env.DidYouMean(name, have))
	}
	return f(opts)
}

// Transports lists the registered transports in order.
func Transports() []string {
	transports.RLock()
	defer transports.RUnlock()
	return slices.Sorted(maps.Keys(transports.m))
}
