package van

// The Van interface, the optional abilities of a transport, and the registry of transports.

import (
	"cmp"
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
// bytes, not the meaning of a message. All methods are safe for concurrent use.
//
// The order of calls is Bind, Start, then Connect, Send, Rename and Disconnect
// in any order, then Close. Data messages of one peer arrive in the order they were
// sent, and so do control and simple-app messages. A transport may let one kind
// overtake the other.
type Van interface {
	// Type names the transport: "zmq", "ibverbs".
	Type() string

	// Bind listens at self.Hostname and self.Port (0: any free port) and returns
	// the port. For the scheduler self.ID is SchedulerID, for others Empty.
	Bind(ctx context.Context, self Node) (port int, err error)

	// Start begins to pass received messages to recv. Calls for one peer's messages
	// are in order and do not overlap; calls for different peers may be concurrent.
	// recv may block. The van then still serves the other peers.
	Start(recv Receiver)

	// SetID tells the van its node's id as soon as the scheduler has given it.
	// Connections made afterwards carry it.
	SetID(id int)

	// Connect opens (or replaces) the connection over which Send reaches id. It
	// does not wait for the peer: messages sent before the peer listens are queued.
	// id is the peer's node id, or any negative number that the caller uses for a
	// peer that has no id yet.
	Connect(ctx context.Context, id int, peer Node) error

	// Rename makes the connection to old serve new instead.
	Rename(old, new int) error

	// Disconnect closes the connection to id. Messages already sent get a short time
	// to leave first. Without a connection to id it does nothing.
	Disconnect(id int)

	// Send queues msg for msg.Receiver and returns without waiting for the peer. It
	// stamps PostSend in the message's trace. A batch counts as one message. To a C++ node,
	// and if the van has no form of its own for batches, Send sends the messages of ps-lite
	// that stand for its parts (Message.Expand), all or none of them. Errors wrap
	// ErrUnknownPeer, ErrPeerLost, ErrQueueFull or ErrClosed.
	Send(msg *Message) error

	// Close stops receiving, sends the queued messages until ctx ends, and frees
	// everything. No receiver runs after Close returns, so a receiver must not call it. A second
	// Close does nothing.
	Close(ctx context.Context) error
}

// Receiver processes one received message. Message says how long the message is valid.
type Receiver func(*Message)

// BufferRegistrar is implemented by transports that can receive pushed values
// directly into memory of the application.
type BufferRegistrar interface {
	// RegisterRecvBuffer makes dst the destination of values that sender pushes under
	// key. The transport delivers such messages with Placed set and Vals inside dst.
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
	// message as it was sent, or not at all. A C++ StepMesh receiver, and over RDMA with STEPMESH_SPLIT_QP_LAG=1 any
	// receiver, may get what that memory holds later.
	Cancel(Requests)
}

// Requests is a range of requests of one customer, with consecutive timestamps.
type Requests struct {
	App, Customer int32
	First         int32 // timestamp
	Count         int32
}

// Has reports whether a message with that meta belongs to one of the requests.
func (r *Requests) Has(m *Meta) bool {
	return m.Request && !m.IsControl() && m.AppID == r.App && m.CustomerID == r.Customer && m.Timestamp >= r.First && m.Timestamp-r.First < r.Count
}

// Advertiser is implemented by transports that publish an endpoint in the node
// record.
type Advertiser interface {
	// Endpoint returns the value for NodeExtension.Local: at most MaxLocalLen bytes, or nil.
	// It is valid after Bind.
	Endpoint() []byte
}

// DataAcceptor is implemented by transports that accept data of nodes of this library at a TCP port of their own.
type DataAcceptor interface {
	// DataPort is the port for NodeExtension.DataPort, 0 if the transport accepts no such data. It is known after Bind.
	DataPort() int
}

// Admitter is implemented by transports on which messages of a replacement process
// could arrive before this node knows of the replacement.
type Admitter interface {
	// Admit allows the delivery of messages of peer id. The node calls it when all its
	// layers know the process that the latest Connect named.
	Admit(id int)
}

// TrafficClassSetter is implemented by transports whose connections can carry a traffic class.
type TrafficClassSetter interface {
	// SetTrafficClasses sets the DSCP, 0 to 63, of outgoing traffic for each peer id in classes. Other
	// peers have the system's default. The classes also apply to connections that are made later.
	SetTrafficClasses(classes map[int]int)
	// TrafficClassApplied reports whether outgoing traffic for peer id has its class now, and
	// whether it ever can.
	TrafficClassApplied(id int) (now, ever bool)
}

// PeerWatcher is implemented by transports that detect broken connections.
type PeerWatcher interface {
	// WatchPeers makes the van call f when the connection to a peer breaks (up
	// false) and when it is restored (up true). A van may also call f when an attempt to
	// connect fails, with a cause that wraps syscall.ECONNREFUSED; it keeps
	// trying. If the peer is replaced at the same time, f may be called for a connection to the replaced process. The
	// cause is therefore a *ConnectionError with the process, if the van knows it. f must not block. The van must not call f within Send or Cancel, since wrappers hold
	// locks there that f may need. Call WatchPeers before Start.
	WatchPeers(f func(id int, up bool, cause error))
}

// Prober is implemented by transports that can diagnose why a peer cannot be reached, and that can
// reply to a process to which they have no connection of their own.
type Prober interface {
	// Probe checks the address of a peer within ctx and returns nil if a node may listen there. It makes no connection
	// for messages. An error wraps the system's errno, ErrMalformed if another program listens there, or ErrTimeout if the
	// listener is silent: another program, or a stopped node.
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

// Reorderer is implemented by transports that may change the order of a peer's messages.
type Reorderer interface {
	// Reorders reports whether a message may be delivered before an earlier message of the
	// same peer, for example because the earlier one was lost and is sent again.
	Reorders() bool
}

// HostChooser is implemented by transports that cannot use every address of this host,
// for example because they need an RDMA device.
type HostChooser interface {
	// ChooseHost returns the address that a worker or server should bind and publish, and
	// the reason, on one line for the log. The node calls it before Bind, unless
	// DMLC_NODE_HOST is set and DMLC_INTERFACE is not auto. If host is empty, the rules for
	// all transports choose the address.
	ChooseHost() (host, why string, err error)
}

// Path is the route of data to one peer.
type Path struct {
	// Over is the carrier: a transport, or "shared memory". "" means that there is none, or that it is not chosen yet.
	Over string
	// Why says why there is no carrier, or why data does not go over a preferred one. Why is "" if Over is the preferred
	// carrier, if the configuration excludes the preferred ones, or if the reason is not known. PathTo sets Why only with
	// now, as Stats does.
	Why string
	// Device says that values on the node's device are sent directly. On other paths they
	// are copied to the host first.
	Device bool
}

// String returns the path as "tcp (why)", or "none (why)".
func (p Path) String() string {
	over := cmp.Or(p.Over, "none")
	if p.Why == "" {
		return over
	}
	return over + " (" + p.Why + ")"
}

// PathChooser is implemented by transports that choose a carrier for each peer, and
// by transports that send values on a device directly.
type PathChooser interface {
	// PathTo returns the path to peer id. While the path is undecided, PathTo waits, as Send
	// does; with now it returns at once, chooses nothing, and sets Why. Without a connection to id, it returns the usual path.
	PathTo(id int, now bool) Path
}

// PathTo returns the route of data from v to peer id, as PathChooser does.
func PathTo(v Van, id int, now bool) Path {
	if c, ok := As[PathChooser](v); ok {
		return c.PathTo(id, now)
	}
	return Path{Over: v.Type()}
}

// Undecided is a path that is chosen when data is first sent there.
func Undecided() Path { return Path{Why: "the first data to the peer chooses it"} }

// Not returns p with the reason why data does not go over a preferred carrier; "" if it is not known.
func (p Path) Not(carrier, why string) Path {
	if why == "" {
		return p
	}
	why = "not over " + carrier + ": " + why
	if p.Why != "" {
		why += "; " + p.Why
	}
	p.Why = why
	return p
}

// Wrapper is implemented by vans that wrap another van.
type Wrapper interface {
	// Unwrap returns the wrapped van.
	Unwrap() Van
}

// As finds the first van, from v inwards, that implements the optional interface T, such
// as PeerWatcher or BufferRegistrar. Use it instead of a type assertion, which
// does not see wrapped vans.
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

// Stats are the counters of a van since it was made. A counter that a transport does not
// keep is 0.
type Stats struct {
	SentMessages, SentBytes         uint64
	ReceivedMessages, ReceivedBytes uint64
	Malformed                       uint64 // malformed frames, which were dropped
	LentValues                      uint64 // values that the transport uses at present

	PausedReads     uint64 // pauses in reading from a peer: STEPAF_RECV_BUDGET_PEER, STEPAF_RECV_BUDGET
	RefusedSends    uint64 // messages refused with ErrQueueFull: STEPAF_SEND_BUDGET, or a rate of stepaf policy
	DroppedUnknown  uint64 // connections ended and messages dropped of unknown peers: STEPAF_STRANGER_BUDGET
	Unauthenticated uint64 // connections without proof of the cluster's secret, refused or (STEPAF_AUTH=warn) admitted
	RefusedRings    uint64 // links through shared memory that got no memory, and rings that did not grow: STEPAF_SHM_BUDGET
	RefusedSlots    uint64 // peers' requests for slot memory that were refused: STEPAF_RDMA_PEER_BUDGET, STEPAF_RDMA_BUDGET
	SlotWaits       uint64 // peers' requests for slot memory that had to wait: also BYTEPS_ADDRESS_POOL_SIZE
	FencedMessages  uint64 // messages of replaced processes, which were dropped
	LateAnswers     uint64 // answers that were arriving when their request ended, which were dropped; a node's LateAnswers includes them
	UnsharedValues  uint64 // device values sent through host memory, because their memory could not be shared
}

// Meter is implemented by transports that keep Stats.
type Meter interface{ Stats() Stats }

// Options are the parameters of a transport.
type Options struct {
	Config *env.Config
	Log    *slog.Logger
	// Backend allocates the buffers for received values; nil means ordinary memory. The
	// caller closes it after the van.
	Backend backend.Backend
	// Incarnation is the node's, see NodeExtension. With 0 the van behaves as a C++ StepMesh
	// node does.
	Incarnation uint32
	// Engine receives for the node. With nil the van makes an engine.
	Engine *engine.Engine
	// OnDropped, if not nil, is called with each data message of an unknown peer that was received and dropped
	// (STEPAF_STRANGER_BUDGET), and the reason. It must neither block nor keep the message.
	OnDropped func(msg *Message, why string)
	// Keys prove that the node knows its cluster's secret; nil: no proof.
	Keys *auth.Keys
}

// Factory makes a van.
type Factory func(Options) (Van, error)

var transports = struct {
	sync.RWMutex
	m map[string]Factory
}{m: map[string]Factory{}}

// Register adds a transport under the name that DMLC_ENABLE_RDMA and
// DMLC_PS_VAN_TYPE use. It is meant for init functions and panics if the name
// is registered already.
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

// Transports returns the names of the registered transports in alphabetical order.
func Transports() []string {
	transports.RLock()
	defer transports.RUnlock()
	return slices.Sorted(maps.Keys(transports.m))
}
