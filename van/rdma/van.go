package rdma

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync/atomic"

	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/internal/freeport"
	"github.com/stepaf/stepaf-go/internal/logx"
	"github.com/stepaf/stepaf-go/internal/random"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/engine"
	"github.com/stepaf/stepaf-go/van/rdma/conn"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
	"github.com/stepaf/stepaf-go/van/rendezvous"
)

// This file owns the van: its creation, its listener, and the events of the connection manager.

var (
	_ van.BufferRegistrar = (*rvan)(nil)
	_ van.Invalidator     = (*rvan)(nil)
	_ van.Canceler        = (*rvan)(nil)
	_ van.PeerWatcher     = (*rvan)(nil)
	_ van.LivenessProber  = (*rvan)(nil)
	_ van.Meter           = (*rvan)(nil)
	_ van.HostChooser     = (*rvan)(nil)
	_ van.PathChooser     = (*rvan)(nil)
)

// rvan is one node's RDMA van.
type rvan struct {
	*node
	stack    verbs.Stack
	delivery delivery
	fences   fences
	liveness livenessState

	// These are guarded by mu.
	accepted     accepted
	closingPeers map[*peer]bool // peers that have left the table
}

// delivery is how received messages reach the node: its engine, which polls the devices, and its receiver.
type delivery struct {
	engine     *engine.Engine
	recvBudget *engine.Budget // of messages that are queued for their handlers
	recv       van.Receiver
	movedBytes atomic.Uint64 // bytes sent and received when movedBulk was last called

	// rvan's mu guards these.
	started       bool // recv is set
	noMoreDevices bool // Close has stopped all devices
}

// accepted holds the connections that peers have opened to this node.
type accepted struct {
	listen      verbs.ID
	rejections  logx.Causes // log lines about connect requests
	inbounds    map[string]*inbound
	unproved    []*inbound // connections whose opener has not proved itself yet, the oldest first
	maxUnproved int        // limit of len(unproved); tests change it
}

// New makes an unbound van on the RDMA libraries of this machine.
func New(o van.Options) (van.Van, error) {
	stack, err := verbs.Load(verbs.Options{Log: o.Log})
	if err != nil {
		return nil, fmt.Errorf("van type %q (%s): %w", o.Config.VanType, o.Config.Origin("DMLC_PS_VAN_TYPE"), err)
	}
	v := NewOn(stack, o)
	v.(*rvan).liveness.real = true
	return v, nil
}

// NewOn makes a van on the given stack.
func NewOn(stack verbs.Stack, o van.Options) van.Van {
	v := &rvan{stack: stack, delivery: delivery{engine: o.Engine}, accepted: accepted{inbounds: map[string]*inbound{}, maxUnproved: maxUnproved}, closingPeers: map[*peer]bool{},
		fences: fences{lastControl: map[controlSource]uint32{}}}
	v.node = &node{cfg: o.Config, log: o.Log, backend: o.Backend, local: localNode{incarnation: o.Incarnation, epoch: uint32(random.Uint64())}, times: defaultTimes, owner: v,
		budget:  budgets{slots: newTable(min(o.Config.AddressPoolSize, maxIndex)), perPeer: int64(o.Config.RDMAPeerBudget), total: int64(o.Config.RDMABudget)},
		buffers: recvBuffers{m: map[bufferKey]backend.Mem{}}, eventsEnded: make(chan struct{})}
	v.liveness.van = v.node
	v.secret.guard.Keys = o.Keys
	if v.delivery.engine == nil {
		v.delivery.engine = engine.New(v.cfg.BusyPoll.Spin())
	}
	if !failpoint.On("recv-budget") {
		v.delivery.recvBudget = engine.NewBudget(int64(v.cfg.RecvBudgetPeer), int64(v.cfg.RecvBudget))
	}
	v.log = cmp.Or(v.log, slog.New(slog.DiscardHandler))
	v.secret.guard.Log = v.log
	v.cm.Log, v.cm.Rejection, v.cm.Inline, v.cm.SplitPorts = v.log, rejection, inlineWanted, v.cfg.SplitQPLag
	v.cm.SendDepth, v.cm.RecvDepth = depths(v.cfg)
	v.cm.AckTimeout = v.cfg.RDMAAckTimeout
	v.tables.peers.Store(&map[int]*peer{})
	v.tables.conns.Store(&map[uint32]*connection{})
	v.tables.devices.Store(&[]*device{})
	v.local.id.Store(van.Empty)
	return v
}

// newTable makes a table of n slots. Some are reserved for control messages.
func newTable(n int) *rendezvous.SlotTable[slotMemory] {
	return rendezvous.NewSlotTable[slotMemory](n, min(max(n/8, 1), 256, n-1))
}

func (v *rvan) Type() string { return "ibverbs" }

// Reorders implements van.Reorderer. A message with a new key waits for its rendezvous; if the peer is a StepMesh node, messages behind it
// do not wait.
func (v *rvan) Reorders() bool { return true }

func (v *node) WatchPeers(f func(id int, up bool, cause error)) { v.watch = f }

func (v *node) SetID(id int) { v.local.id.Store(int32(id)) }

// Bind listens for connections.
func (v *rvan) Bind(ctx context.Context, self van.Node) (int, error) {
	fail := func(err error) (int, error) {
		return 0, &van.Error{Op: "bind", Node: van.NodeName(self.ID), Detail: self.Addr(), Err: err}
	}
	addr, err := resolve(ctx, self)
	if err != nil {
		return fail(err)
	}
	if self.ID == van.SchedulerID && v.cfg.Kubernetes {
		addr = netip.AddrPortFrom(netip.IPv4Unspecified(), addr.Port())
	}
	ch, err := v.stack.NewChannel()
	if err != nil {
		return fail(err)
	}
	avoid := v.cfg.RootPort
	if self.Port != 0 || self.ID == van.SchedulerID {
		avoid = 0 // the scheduler's own port, or one chosen by the program
	}
	var id verbs.ID
	_, err = freeport.Except(avoid, func() (_ int, _ func(), err error) {
		if id, err = ch.NewID(0); err != nil {
			return 0, nil, err
		}
		first := id
		if err := id.Bind(addr); err != nil {
			return 0, nil, errors.Join(err, id.Destroy())
		}
		return int(id.LocalAddr().Port()), func() { _ = first.Destroy() }, nil
	})
	if err != nil {
		return fail(errors.Join(err, ch.Close()))
	}
	if err := id.Listen(backlog); err != nil {
		return fail(errors.Join(fmt.Errorf("listen: %w", err), id.Destroy(), ch.Close()))
	}
	v.local.self, v.cm.Channel, v.accepted.listen = self, ch, id
	v.local.self.Port = int(id.LocalAddr().Port())
	if !addr.Addr().IsUnspecified() {
		v.cm.Source = addr.Addr()
	}
	if self.ID != van.Empty {
		v.SetID(self.ID)
	}
	v.liveness.start(id.LocalAddr())
	go v.events()
	return v.local.self.Port, nil
}

// backlog is the same as StepMesh's.
const backlog = 128

// events handles the events of the connection manager, until the channel is closed.
func (v *rvan) events() {
	defer close(v.eventsEnded)
	for {
		ev, err := v.cm.Channel.Next()
		if err != nil {
			if !errors.Is(err, verbs.ErrClosed) {
				v.log.Error("rdma: the connection manager's events ended", "err", err)
			}
			return
		}
		if ev.Type == verbs.ConnectRequest {
			acceptor{v}.accept(ev)
			continue
		}
		serial, q := conn.CookieOf(ev.Cookie)
		x := (*v.tables.conns.Load())[serial]
		if v.cfg.PrintRDMALog {
			v.log.Info("rdma: event", "type", ev.Type.String(), "status", ev.Status, "connection", serial, "qp", q)
		}
		switch {
		case x == nil:
		case x.in != nil:
			switch ev.Type {
			case verbs.Disconnected, verbs.DeviceRemoval, verbs.Unreachable, verbs.Rejected:
				x.in.fail(fmt.Errorf("%w: %w", van.ErrPeerLost, conn.EventError(ev))) // without the private data, since any process may have opened it
			}
		default:
			if ev.Type == verbs.Disconnected || ev.Type == verbs.DeviceRemoval {
				x.link.fail(fmt.Errorf("%w: %w", van.ErrPeerLost, v.cm.EventError(ev)))
			}
		}
		v.cm.Deliver(ev)
	}
}

// Start starts the delivery of messages.
func (v *rvan) Start(recv van.Receiver) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.delivery.recv, v.delivery.started = recv, true
	for _, d := range *v.tables.devices.Load() {
		d.feed.Start()
	}
}

// Stats implements van.Meter. Pinned is the number of registered regions in use.
func (v *node) Stats() van.Stats {
	s := van.Stats{SentMessages: v.stats.sentN.Load(), SentBytes: v.stats.sentB.Load(), ReceivedMessages: v.stats.recvN.Load(),
		ReceivedBytes: v.stats.recvB.Load(), Malformed: v.stats.malformed.Load(), FencedMessages: v.stats.fenced.Load(), RefusedSends: v.stats.refusedSends.Load(), Unauthenticated: v.secret.guard.Count(),
		PausedReads: v.stats.paused.Load(), RefusedSlots: v.stats.refusedSlots.Load(), SlotWaits: v.stats.slotWaits.Load()}
	for _, d := range *v.tables.devices.Load() {
		s.LentValues += uint64(d.regions.InUse())
	}
	return s
}
