package rdma

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/internal/env"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/rdma/choose"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
	"github.com/stepaf/stepaf-go/van/rendezvous"
)

var (
	_ van.BufferRegistrar = (*rvan)(nil)
	_ van.Revoker         = (*rvan)(nil)
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
	cfg   *env.Config
	log   *slog.Logger
	back  backend.Backend
	stack verbs.Stack
	spin  time.Duration // how long to look for completions before sleeping

	self    van.Node // set by Bind
	id      atomic.Int32
	channel verbs.Channel
	listen  verbs.ID
	source  netip.Addr // what outgoing connections bind; invalid: any
	recv    van.Receiver
	watch   func(id int, up bool, cause error)
	epoch   uint32 // added to serials to tell connections of different processes apart

	peers    atomic.Pointer[map[int]*peer]
	conns    atomic.Pointer[map[uint32]*conn]
	devices  atomic.Pointer[[]*device]
	serials  atomic.Uint32
	table    *rendezvous.Table[memory]
	stats    stats
	spinning atomic.Bool
	polled   atomic.Uint64 // when the last Poll ended
	pollers  atomic.Int32  // callers of Poll
	moved    atomic.Uint64 // bytes sent and received when busy was last called
	warnPin  sync.Once

	reserve  sync.Mutex
	reserved map[verbs.Device]int // room in completion queues

	mu        sync.Mutex // guards changes of the tables above, and what follows
	ids       map[uint64]*cmID
	endpoints map[string]*incoming
	buffers   map[bufferKey]backend.Mem
	leaving   map[*peer]bool // not in peers any more
	started   bool
	closed    atomic.Bool
	wg        sync.WaitGroup // goroutines that end by themselves
	cmEnd     chan struct{}
}

// bufferKey names a registered receive buffer.
type bufferKey struct {
	sender int
	key    uint64
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
	v := &rvan{cfg: o.Config, log: o.Log, back: o.Backend, stack: stack, spin: spinTime(o.Config.BusyPoll), epoch: rand.Uint32(),
		table: rendezvous.NewTable[memory](min(o.Config.AddressPoolSize, maxIndex)), reserved: map[verbs.Device]int{},
		ids: map[uint64]*cmID{}, endpoints: map[string]*incoming{}, buffers: map[bufferKey]backend.Mem{},
		leaving: map[*peer]bool{}, cmEnd: make(chan struct{})}
	if v.log == nil {
		v.log = slog.New(slog.DiscardHandler)
	}
	v.peers.Store(&map[int]*peer{})
	v.conns.Store(&map[uint32]*conn{})
	v.devices.Store(&[]*device{})
	v.id.Store(van.Empty)
	return v
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

func (v *rvan) WatchPeers(f func(id int, up bool, cause error)) { v.watch = f }

func (v *rvan) SetID(id int) { v.id.Store(int32(id)) }

// ChooseHost implements van.HostChooser: the address of the RDMA port that the
// configuration asks for, or of the one nearest to the node's GPU.
func (v *rvan) ChooseHost() (host, why string, err error) {
	devices, err := v.stack.Devices()
	if err != nil && len(devices) == 0 {
		return "", "", err
	}
	nets, err := choose.Interfaces()
	if err != nil {
		return "", "", err
	}
	root := os.DirFS("/")
	ask := choose.Request{Interface: v.cfg.Interface, GPU: v.gpu(root)}
	if v.cfg.NodeHost != "" {
		ask.Host, _ = netip.ParseAddr(v.cfg.NodeHost)
	}
	r, err := choose.Choose(choose.Machine{Devices: devices, Interfaces: nets, Root: root}, ask)
	if err != nil {
		return "", "", err
	}
	return r.Host.String(), r.String(), nil
}

// gpu is the PCI address of the node's GPU, "" when it has none.
func (v *rvan) gpu(root fs.FS) string {
	if d, ok := v.back.(backend.Describer); ok {
		if i, _, err := d.Describe(); err == nil {
			return i.PCIBusID
		}
	}
	if v.cfg.GPU < 0 || v.cfg.Backend != "GPU" {
		return ""
	}
	return choose.GPUAddress(root, v.cfg.GPU, "", false)
}

// hello is what this node says of itself.
func (v *rvan) hello(epoch uint32) hello {
	return hello{node: int(v.id.Load()), port: v.self.Port, host: v.self.Hostname, ours: true, epoch: epoch, qpCount: v.cfg.QPNum}
}

var lookup = func(ctx context.Context, host string) ([]netip.Addr, error) {
	return net.DefaultResolver.LookupNetIP(ctx, "ip", host)
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
	if err := errors.Join(id.Bind(addr)); err == nil {
		err = id.Listen(backlog)
		if err != nil {
			return fail(errors.Join(fmt.Errorf("listen: %w", err), id.Destroy(), ch.Close()))
		}
	} else {
		return fail(errors.Join(err, id.Destroy(), ch.Close()))
	}
	v.self, v.channel, v.listen = self, ch, id
	v.self.Port = int(id.LocalAddr().Port())
	if !addr.Addr().IsUnspecified() {
		v.source = addr.Addr()
	}
	if self.ID != van.Empty {
		v.SetID(self.ID)
	}
	go v.events()
	return v.self.Port, nil
}

// backlog is the original's.
const backlog = 128

// events takes what the connection manager says, until the channel is closed.
func (v *rvan) events() {
	defer close(v.cmEnd)
	for {
		ev, err := v.channel.Next()
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
		v.mu.Lock()
		c := v.ids[ev.Cookie]
		x := (*v.conns.Load())[uint32(ev.Cookie>>8)]
		v.mu.Unlock()
		if v.cfg.PrintRDMALog {
			v.log.Info("rdma: event", "type", ev.Type.String(), "status", ev.Status, "connection", ev.Cookie>>8, "qp", ev.Cookie&0xff)
		}
		switch {
		case x == nil:
		case x.in != nil:
			switch ev.Type {
			case verbs.Disconnected, verbs.DeviceRemoval, verbs.Unreachable, verbs.Rejected:
				x.in.fail(fmt.Errorf("%w: %w", van.ErrPeerLost, eventError(ev)))
			}
		default:
			if ev.Type == verbs.Disconnected || ev.Type == verbs.DeviceRemoval {
				x.link.fail(fmt.Errorf("%w: %w", van.ErrPeerLost, eventError(ev)))
			}
		}
		if c != nil && ev.Type != verbs.TimewaitExit {
			select {
			case c.events <- ev:
			default: // nobody waits
			}
		}
	}
}

// newID makes an ID whose events can be waited for.
func (v *rvan) newID(cookie uint64) (*cmID, error) {
	c := &cmID{cookie: cookie, events: make(chan verbs.Event, 8)}
	v.mu.Lock()
	v.ids[cookie] = c
	v.mu.Unlock()
	id, err := v.channel.NewID(cookie)
	if err != nil {
		return nil, err
	}
	c.id = id
	return c, nil
}

func (v *rvan) rememberConn(serial uint32, c *conn) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.rememberConnLocked(serial, c)
}

func (v *rvan) rememberConnLocked(serial uint32, c *conn) {
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
	for q := range v.cfg.QPNum {
		delete(v.ids, cookie(serial, q))
	}
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
	if v.closed.Load() {
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

// Connect begins to connect to the peer, in place of a connection that serves the
// same id.
func (v *rvan) Connect(ctx context.Context, id int, node van.Node) error {
	addr, err := resolve(ctx, node)
	fail := func(err error) error {
		return &van.Error{Op: "connect", Node: van.NodeName(int(v.id.Load())), Peer: van.NodeName(id) + " at " + node.Addr(), Err: err}
	}
	if err != nil {
		return fail(err)
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.closed.Load() || v.channel == nil {
		return fail(van.ErrClosed)
	}
	old := (*v.peers.Load())[id]
	if old != nil && old.addr == addr && old.serves(int(v.id.Load())) {
		return nil
	}
	run, stop := context.WithCancel(context.Background())
	p := &peer{v: v, node: node, addr: addr, stop: stop, ends: make(chan struct{}), into: map[intoKey]into{}}
	p.id.Store(int32(id))
	p.snd = rendezvous.NewSender[*outgoing](p)
	v.replace(func(m map[int]*peer) { m[id] = p })
	v.linkBackLocked()
	if old != nil {
		v.leave(old, leaveTime)
	}
	v.wg.Go(func() { p.run(run) })
	v.log.Info("connect", "peer", van.NodeName(id), "addr", addr.String())
	return nil
}

// serves tells whether p has connected again, to a node of the original, under this
// node's id. That one takes a second connection under the same name for more queue
// pairs of the first, and never hears it.
func (p *peer) serves(id int) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.link != nil && !p.link.ours && p.link.as == id && p.ups > 1
}

// replace changes the table of peers. v.mu is held.
func (v *rvan) replace(change func(map[int]*peer)) {
	m := maps.Clone(*v.peers.Load())
	change(m)
	v.peers.Store(&m)
}

// linkBack tells each peer which connection it has opened to this node.
func (v *rvan) linkBack() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.linkBackLocked()
}

func (v *rvan) linkBackLocked() {
	for id, p := range *v.peers.Load() {
		for _, in := range v.endpoints {
			if in.hello.ours && in.hello.node == id && in.hello.port == p.node.Port && !in.gone.Load() {
				p.back.Store(in)
			}
		}
	}
}

func (v *rvan) unlinkBack(in *incoming) {
	for _, p := range *v.peers.Load() {
		p.back.CompareAndSwap(in, nil)
	}
}

// Rename makes the connection to old serve new instead.
func (v *rvan) Rename(old, new int) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	p := (*v.peers.Load())[old]
	if p == nil {
		return &van.Error{Op: "rename", Peer: van.NodeName(old), Err: van.ErrUnknownPeer}
	}
	other := (*v.peers.Load())[new]
	p.id.Store(int32(new))
	v.replace(func(m map[int]*peer) { delete(m, old); m[new] = p })
	v.linkBackLocked()
	if other != nil && other != p {
		v.leave(other, 0)
	}
	return nil
}

// leaveTime is how long Disconnect lets sent messages leave.
const leaveTime = 500 * time.Millisecond

// Disconnect ends the connection to id.
func (v *rvan) Disconnect(id int) {
	v.mu.Lock()
	defer v.mu.Unlock()
	p := (*v.peers.Load())[id]
	if p == nil {
		return
	}
	v.replace(func(m map[int]*peer) { delete(m, id) })
	v.leave(p, leaveTime)
}

// leave ends a peer that is not in the table any more, when what was sent has left or
// the time is over. v.mu is held.
func (v *rvan) leave(p *peer, limit time.Duration) {
	v.leaving[p] = true
	v.wg.Go(func() {
		ctx, cancel := context.WithTimeout(context.Background(), limit)
		defer cancel()
		p.end(ctx)
		v.mu.Lock()
		defer v.mu.Unlock()
		delete(v.leaving, p)
	})
}

// end lets what was sent leave until ctx ends, then ends the connection.
func (p *peer) end(ctx context.Context) {
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for !p.left() {
		select {
		case <-tick.C: // completions of the last messages have no signal of their own
			continue
		case <-ctx.Done():
		case <-p.v.cmEnd:
		}
		break
	}
	p.mu.Lock()
	p.ended = true
	dropped := p.snd.Down(func(*outgoing) bool { return false })
	expected := p.into
	p.into = map[intoKey]into{}
	p.mu.Unlock()
	p.finish(p.drop(dropped))
	for _, x := range expected {
		x.region.release()
	}
	p.stop()
	<-p.ends
}

// left tells whether everything has left.
func (p *peer) left() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.flush(false)
	if p.lost {
		return true // nobody to wait for
	}
	return p.snd.Waiting() == 0 && (p.link == nil || p.link.idle())
}

// endLink takes apart a connection of this node's, and returns what it held.
func (p *peer) endLink(l *link) []finished {
	v := p.v
	for _, id := range l.ids {
		_ = id.Disconnect()
	}
	for _, id := range l.ids {
		_ = id.Destroy()
		v.release(l.dev)
	}
	v.forgetConn(l.epoch - v.epoch)
	p.mu.Lock()
	all := l.abandon()
	p.mu.Unlock()
	_ = l.close()
	return all
}

// replied takes the answer to a question.
func (p *peer) replied(l *link, r *reply) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.link != l || p.ended {
		return true
	}
	if l.ours && r.flags&replyRefused != 0 {
		o, need, ok := p.snd.Refused(r.origin)
		if ok {
			p.Refuse(o, fmt.Errorf("the peer has no memory for %d bytes", need.Data))
		}
		p.flush(false)
		return true
	}
	place := rendezvous.Place{Meta: r.meta, MetaKey: r.metaKey, Data: r.data, DataKey: r.dataKey, Index: r.index}
	if r.index >= maxIndex {
		return false
	}
	need, ok := p.snd.Asked(r.origin)
	if !ok {
		return false
	}
	var shared *rendezvous.Route
	if r.flags&replyNone != 0 {
		if !l.ours || need.OneShot || need.Route.Class != 0 {
			return false
		}
		p.rememberKey(need.Route.Key, false)
		p.snd.Elsewhere(r.origin)
		p.flush(false)
		return true
	}
	if l.ours && !need.OneShot && need.Route.Class == 0 {
		p.rememberKey(need.Route.Key, r.flags&replyShared == 0)
		if r.flags&replyShared != 0 {
			class, _ := rendezvous.Class(need.Data)
			shared = &rendezvous.Route{Class: class}
		}
	}
	p.snd.Reply(r.origin, place, shared)
	p.flush(false)
	return true
}

// maxKeys bounds what is remembered of keys without a place of their own.
const maxKeys = 1 << 16

func (p *peer) rememberKey(key uint64, own bool) {
	if len(p.keys) >= maxKeys {
		for k, own := range p.keys {
			if !own {
				delete(p.keys, k)
			}
		}
	}
	p.keys[key] = own
}

// RegisterRecvBuffer implements van.BufferRegistrar.
func (v *rvan) RegisterRecvBuffer(sender int, key uint64, dst backend.Mem) error {
	if dst.Len() == 0 {
		return fmt.Errorf("register receive buffer: %w: 0 bytes for key %d of %s", van.ErrInvalid, key, van.NodeName(sender))
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.buffers[bufferKey{sender, key}] = dst
	return nil
}

func (v *rvan) buffer(sender int, key uint64) (backend.Mem, bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	m, ok := v.buffers[bufferKey{sender, key}]
	return m, ok
}

// Revoke implements van.Revoker.
func (v *rvan) Revoke(m backend.Mem) {
	if m.Len() == 0 {
		return
	}
	var kept []*region
	for _, p := range v.everyPeer() {
		p.mu.Lock()
		for k, x := range p.into {
			switch {
			case !overlap(x.mem, m):
			case x.original:
				kept = append(kept, x.region)
			default:
				delete(p.into, k)
				x.region.release()
			}
		}
		p.snd.Each(func(o *outgoing) {
			if overlap(o.into, m) {
				o.into, o.revoked = backend.Mem{}, true
			}
		})
		p.mu.Unlock()
	}
	if len(kept) > 0 {
		v.log.Warn("rdma: memory stays open for a late answer of a node of the C++ library, which would abort if it were refused",
			"bytes", m.Len(), "requests", len(kept))
	}
	for _, d := range *v.devices.Load() {
		d.regions.revoke(m, kept)
	}
}

func overlap(x, y backend.Mem) bool {
	return x.Addr() < y.Addr()+uint64(y.Len()) && y.Addr() < x.Addr()+uint64(x.Len())
}

// everyPeer is the peers, and those that are leaving.
func (v *rvan) everyPeer() (all []*peer) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, p := range *v.peers.Load() {
		all = append(all, p)
	}
	for p := range v.leaving {
		all = append(all, p)
	}
	return all
}

// working tells whether somebody waits for something that only a look at the clock
// brings about.
func (v *rvan) working() bool {
	for _, c := range *v.conns.Load() {
		if c.peer != nil && c.peer.waits() || c.in != nil && c.in.owed.Load() > 0 {
			return true
		}
	}
	return false
}

func (p *peer) waits() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.link != nil && p.snd.Waiting() > 0
}

// tell reports a change of p's connection to the watcher.
func (v *rvan) tell(p *peer, up bool, cause error) {
	if v.watch != nil && !v.closed.Load() && (*v.peers.Load())[int(p.id.Load())] == p {
		v.watch(int(p.id.Load()), up, cause)
	}
}

// tellFailure makes the requests fail that wait for p, whose connection stands.
func (v *rvan) tellFailure(p *peer, err error) {
	v.log.Error("rdma: a message could not be sent", "peer", p.name(), "err", err)
	v.tell(p, false, fmt.Errorf("%w: %w", van.ErrPeerLost, err))
	v.tell(p, true, nil)
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
func (v *rvan) malformed(in *incoming, err error) { v.malformedFrom(in.name(), err) }

func (v *rvan) malformedFrom(who string, err error) {
	if n := v.stats.malformed.Add(1); n&(n-1) == 0 {
		v.log.Warn("dropped a malformed message", "err", err, "from", who, "dropped so far", n)
	}
}

// stats counts without locks.
type stats struct {
	sentN, sentB, recvN, recvB, malformed atomic.Uint64
}

func (s *stats) sent(bytes int)     { s.sentN.Add(1); s.sentB.Add(uint64(bytes)) }
func (s *stats) received(bytes int) { s.recvN.Add(1); s.recvB.Add(uint64(bytes)) }

// Stats implements van.Meter. Pinned is the number of registered regions in use.
func (v *rvan) Stats() van.Stats {
	s := van.Stats{SentMessages: v.stats.sentN.Load(), SentBytes: v.stats.sentB.Load(), ReceivedMessages: v.stats.recvN.Load(),
		ReceivedBytes: v.stats.recvB.Load(), Malformed: v.stats.malformed.Load()}
	for _, d := range *v.devices.Load() {
		for _, r := range *d.regions.sorted.Load() {
			if r.refs.Load() > 0 {
				s.Pinned++
			}
		}
	}
	return s
}

// maxLinger is the longest that Close waits for messages to leave.
const maxLinger = 5 * time.Second

// Close ends everything; sent messages leave until ctx ends, at most maxLinger.
func (v *rvan) Close(ctx context.Context) error {
	v.mu.Lock()
	if v.closed.Swap(true) {
		v.mu.Unlock()
		return nil
	}
	peers := *v.peers.Load()
	v.peers.Store(&map[int]*peer{})
	for _, p := range peers {
		v.leaving[p] = true
	}
	v.mu.Unlock()
	if v.channel == nil {
		return nil
	}
	linger, cancel := context.WithTimeout(ctx, maxLinger)
	defer cancel()
	var all sync.WaitGroup
	for _, p := range peers {
		all.Go(func() { p.end(linger) })
	}
	all.Wait()
	errs := []error{v.listen.Destroy()}
	v.settle()
	v.mu.Lock()
	ins := v.endpoints
	v.endpoints = map[string]*incoming{}
	v.mu.Unlock()
	for _, in := range ins {
		in.fail(van.ErrClosed)
	}
	v.wg.Wait()
	devices := *v.devices.Load()
	ending, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second) // ctx may have ended with the connections
	defer cancel()
	for _, d := range devices {
		errs = append(errs, d.stop(ending))
	}
	for _, d := range devices {
		errs = append(errs, d.close())
	}
	errs = append(errs, v.channel.Close())
	<-v.cmEnd
	return errors.Join(errs...)
}

// settle waits until the connection manager's events so far have been taken: each
// connect request has an ID, and all must be gone before the channel is closed.
func (v *rvan) settle() {
	if !v.source.IsValid() {
		return // there is no address to ask for
	}
	serial := v.serials.Add(1)
	defer v.forgetConn(serial)
	c, err := v.newID(cookie(serial, 0))
	if err != nil {
		return
	}
	defer c.id.Destroy()
	if c.id.ResolveAddr(netip.Addr{}, netip.AddrPortFrom(v.source, uint16(v.self.Port)), resolveTime) == nil {
		_, _ = c.wait(context.Background(), verbs.AddrResolved, 2*resolveTime)
	}
}

// close deregisters everything on the device. Memory of messages that somebody still
// holds stays until then.
func (d *device) close() error {
	errs := []error{d.regions.close()}
	d.areasMu.Lock()
	for a := range d.areas {
		errs = append(errs, a.deregister())
	}
	d.areasMu.Unlock()
	return errors.Join(append(errs, d.cells.close())...)
}
