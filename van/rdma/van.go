package rdma

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/engine"
	"github.com/stepaf/stepaf-go/van/env"
	"github.com/stepaf/stepaf-go/van/rdma/conn"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
	"github.com/stepaf/stepaf-go/van/rendezvous"
)

var (
	_ van.BufferRegistrar = (*rvan)(nil)
	_ van.Revoker         = (*rvan)(nil)
	_ van.Recaller        = (*rvan)(nil)
	_ van.Flusher         = (*rvan)(nil)
	_ van.Poller          = (*rvan)(nil)
	_ van.PeerWatcher     = (*rvan)(nil)
	_ van.Meter           = (*rvan)(nil)
	_ van.HostChooser     = (*rvan)(nil)
)

func init() {
	van.Register("ibverbs", New)
}

// rvan is one node's RDMA van.
type rvan struct {
	cfg     *env.Config
	log     *slog.Logger
	backend backend.Backend
	stack   verbs.Stack
	spin    time.Duration // how long to look for completions before sleeping

	self                    van.Node // set by Bind
	id                      atomic.Int32
	listen                  verbs.ID
	cm                      conn.Manager // IDs and queue pairs
	recv                    van.Receiver
	watch                   func(id int, up bool, cause error)
	incarnation             uint32 // this process; 0: not said
	peerBudget, totalBudget int64  // of leased bytes; 0: no bound

	epoch uint32 // added to serials to tell connections of different processes apart

	times            times // for tests to change
	peers            atomic.Pointer[map[int]*peer]
	conns            atomic.Pointer[map[uint32]*connection]
	devices          atomic.Pointer[[]*device]
	serials          atomic.Uint32
	slots            *rendezvous.SlotTable[slotMemory]
	leased           atomic.Int64   // bytes that are registered for peers
	recvBudget       *engine.Budget // of messages that wait for their handlers
	slotsScannedAt   atomic.Uint64  // when all slots were last looked at
	stats            stats
	waiterPolls      atomic.Bool
	waiterPolledAt   atomic.Uint64 // when the last Poll ended
	oversubscribedAt atomic.Uint64 // when a Poll last left it to another
	pollers          atomic.Int32  // callers of Poll
	movedBytes       atomic.Uint64 // bytes sent and received when busy was last called
	warnPin          sync.Once

	mu            sync.Mutex // guards changes of the tables above, and what follows
	inbounds      map[string]*inbound
	buffers       map[bufferKey]backend.Mem
	lastControl   map[controlSource]uint32 // of the last control message
	leaving       map[*peer]bool           // not in peers any more
	replaced      []uint32                 // incarnations of processes that others have replaced, the latest last
	started       bool
	noMoreDevices bool // nothing is on its way out any more
	closed        atomic.Bool
	wg            sync.WaitGroup // goroutines that end by themselves
	eventsEnded   chan struct{}
}

// New makes a van that has not bound yet, on the RDMA libraries of this machine.
func New(o van.Options) (van.Van, error) {
	stack, err := verbs.Load(verbs.Options{Log: o.Log})
	if err != nil {
		return nil, fmt.Errorf("van type %q (%s): %w", o.Config.VanType, o.Config.Origin("DMLC_PS_VAN_TYPE"), err)
	}
	return NewOn(stack, o), nil
}

// NewOn makes a van on the given stack.
func NewOn(stack verbs.Stack, o van.Options) van.Van {
	v := &rvan{cfg: o.Config, log: o.Log, backend: o.Backend, stack: stack, incarnation: o.Incarnation, times: defaultTimes,
		peerBudget: int64(o.Config.RDMAPeerBudget), totalBudget: int64(o.Config.RDMABudget), spin: spinTime(o.Config.BusyPoll), epoch: rand.Uint32(),
		slots:    newTable(min(o.Config.AddressPoolSize, maxIndex)),
		inbounds: map[string]*inbound{}, buffers: map[bufferKey]backend.Mem{},
		leaving: map[*peer]bool{}, lastControl: map[controlSource]uint32{}, eventsEnded: make(chan struct{})}
	if !failpoint.On("recv-budget") {
		v.recvBudget = engine.NewBudget(int64(v.cfg.RecvBudgetPeer), int64(v.cfg.RecvBudget))
	}
	if v.log == nil {
		v.log = slog.New(slog.DiscardHandler)
	}
	v.cm.Log, v.cm.Rejection, v.cm.Inline, v.cm.SplitPorts = v.log, rejection, inlineWanted, v.cfg.SplitQPLag
	v.cm.SendDepth, v.cm.RecvDepth = v.depths()
	v.peers.Store(&map[int]*peer{})
	v.conns.Store(&map[uint32]*connection{})
	v.devices.Store(&[]*device{})
	v.id.Store(van.Empty)
	return v
}

// newTable makes the table of n slots. Some are kept for control messages, whatever data
// is on its way.
func newTable(n int) *rendezvous.SlotTable[slotMemory] {
	return rendezvous.NewSlotTable[slotMemory](n, min(max(n/8, 1), 256, n-1))
}

// spinTime is how long to look for completions before sleeping: waking a sleeper
// costs more than a small message.
func spinTime(b env.BusyPoll) time.Duration {
	if b == env.AlwaysBlock {
		return 0
	}
	return time.Millisecond
}

func (v *rvan) Type() string { return "ibverbs" }

// Reorders implements van.Reorderer: a message with a key that is new waits for its
// rendezvous, those behind it do not, when the peer is a node of the original.
func (v *rvan) Reorders() bool { return true }

func (v *rvan) WatchPeers(f func(id int, up bool, cause error)) { v.watch = f }

func (v *rvan) SetID(id int) { v.id.Store(int32(id)) }

// hello is what this node says of itself.
func (v *rvan) hello(epoch uint32) hello {
	return hello{node: int(v.id.Load()), port: v.self.Port, host: v.self.Hostname, native: true, epoch: epoch, qpCount: v.cfg.QPNum, incarnation: v.incarnation}
}

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
	id, err := ch.NewID(0)
	if err != nil {
		return fail(errors.Join(err, ch.Close()))
	}
	if err := id.Bind(addr); err != nil {
		return fail(errors.Join(err, id.Destroy(), ch.Close()))
	}
	if err := id.Listen(backlog); err != nil {
		return fail(errors.Join(fmt.Errorf("listen: %w", err), id.Destroy(), ch.Close()))
	}
	v.self, v.cm.Channel, v.listen = self, ch, id
	v.self.Port = int(id.LocalAddr().Port())
	if !addr.Addr().IsUnspecified() {
		v.cm.Source = addr.Addr()
	}
	if self.ID != van.Empty {
		v.SetID(self.ID)
	}
	go v.events()
	return v.self.Port, nil
}

// backlog is StepMesh's.
const backlog = 128

// events takes what the connection manager says, until the channel is closed.
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
			v.accept(ev)
			continue
		}
		serial, q := conn.CookieOf(ev.Cookie)
		x := (*v.conns.Load())[serial]
		if v.cfg.PrintRDMALog {
			v.log.Info("rdma: event", "type", ev.Type.String(), "status", ev.Status, "connection", serial, "qp", q)
		}
		switch {
		case x == nil:
		case x.in != nil:
			switch ev.Type {
			case verbs.Disconnected, verbs.DeviceRemoval, verbs.Unreachable, verbs.Rejected:
				x.in.fail(fmt.Errorf("%w: %w", van.ErrPeerLost, v.cm.EventError(ev)))
			}
		default:
			if ev.Type == verbs.Disconnected || ev.Type == verbs.DeviceRemoval {
				x.link.fail(fmt.Errorf("%w: %w", van.ErrPeerLost, v.cm.EventError(ev)))
			}
		}
		v.cm.Deliver(ev)
	}
}

func (v *rvan) rememberConn(serial uint32, c *connection) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.rememberConnLocked(serial, c)
}

func (v *rvan) rememberConnLocked(serial uint32, c *connection) {
	m := maps.Clone(*v.conns.Load())
	m[serial] = c
	v.conns.Store(&m)
}

func (v *rvan) forgetConn(serial uint32) {
	v.mu.Lock()
	defer v.mu.Unlock()
	m := maps.Clone(*v.conns.Load())
	delete(m, serial)
	v.conns.Store(&m)
	v.cm.Forget(serial, v.cfg.QPNum)
}

// device returns the van's part on dev, and starts polling it.
func (v *rvan) device(dev verbs.Device) (*device, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, d := range *v.devices.Load() {
		if d.dev == dev {
			return d, nil
		}
	}
	if v.noMoreDevices { // Close lets connections that are being made carry what waits for them
		return nil, van.ErrClosed
	}
	d := newDevice(v, dev)
	all := append(append([]*device(nil), *v.devices.Load()...), d)
	v.devices.Store(&all)
	if v.started {
		d.loop.Start()
	}
	return d, nil
}

// Start begins to receive.
func (v *rvan) Start(recv van.Receiver) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.recv, v.started = recv, true
	for _, d := range *v.devices.Load() {
		d.loop.Start()
	}
}

// slotReply takes the reply to a slot request. It tells whether it can be one.
func (p *peer) slotReply(l *link, r *reply) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.link != l || p.ended {
		return true
	}
	refused, why, ok := l.dialect.reply(p.sender, r)
	if refused != nil {
		p.dropOne(refused, why)
	}
	p.pump()
	p.flush(false)
	return ok
}

// sendError says what went wrong with a message for a peer.
func (v *rvan) sendError(msg *van.Message, p *peer, err error) error {
	e := &van.Error{Op: "send", Node: van.NodeName(int(v.id.Load())), Peer: van.NodeName(msg.Receiver), Detail: msg.Meta.String(), Err: err}
	if p != nil {
		v.Flush(msg.Receiver) // what was sent with More has waited for msg
		e.Peer += " at " + p.addr.String()
	}
	return e
}

// malformed counts and reports nonsense from the network: the 1st, 2nd, 4th, ... so
// that a flood of it does not become a flood of lines.
func (v *rvan) malformed(in *inbound, err error) { v.malformedFrom(in.name(), err) }

func (v *rvan) malformedFrom(who string, err error) {
	if n := v.stats.malformed.Add(1); n&(n-1) == 0 {
		v.log.Warn("dropped a malformed message", "err", err, "from", who, "dropped so far", n)
	}
}

// stats counts without locks.
type stats struct {
	sentN, sentB, recvN, recvB, malformed atomic.Uint64

	overBudget atomic.Uint64 // slot requests that were refused for good
	slotWaits  atomic.Uint64 // slot requests that had to wait

	fenced, refusedSends, paused atomic.Uint64
}

func (s *stats) sent(bytes int) { s.sentN.Add(1); s.sentB.Add(uint64(bytes)) }

func (s *stats) received(bytes int) { s.recvN.Add(1); s.recvB.Add(uint64(bytes)) }

// Stats implements van.Meter. Pinned is the number of registered regions in use.
func (v *rvan) Stats() van.Stats {
	s := van.Stats{SentMessages: v.stats.sentN.Load(), SentBytes: v.stats.sentB.Load(), ReceivedMessages: v.stats.recvN.Load(),
		ReceivedBytes: v.stats.recvB.Load(), Malformed: v.stats.malformed.Load(), FencedMessages: v.stats.fenced.Load(), RefusedSends: v.stats.refusedSends.Load(),
		PausedReads: v.stats.paused.Load()}
	for _, d := range *v.devices.Load() {
		s.Pinned += uint64(d.regions.InUse())
	}
	return s
}
