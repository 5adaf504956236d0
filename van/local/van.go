package local

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/engine"
	"github.com/stepaf/stepaf-go/van/env"
	"github.com/stepaf/stepaf-go/van/hostmem"
	"github.com/stepaf/stepaf-go/van/landing"
	"github.com/stepaf/stepaf-go/van/links"
)

// Van is a van that sends data messages to peers of the same host through shared memory.
type Van struct {
	inner   van.Van
	cfg     *env.Config
	log     *slog.Logger
	backend backend.Backend
	stats   stats

	own      endpoint
	role     atomic.Int32
	none     error // why this van makes no links; nil if it does
	dests    *landing.Table
	copies   copies
	peers    *peers // its Mu guards none, too
	rx       inCommon
	tx       outCommon
	receiver receiver
	dialer   dialer
	acceptor acceptor
}

var (
	_ van.Van             = (*Van)(nil)
	_ van.Wrapper         = (*Van)(nil)
	_ van.PeerWatcher     = (*Van)(nil)
	_ van.Meter           = (*Van)(nil)
	_ van.BufferRegistrar = (*Van)(nil)
	_ van.Invalidator     = (*Van)(nil)
	_ van.Canceler        = (*Van)(nil)
	_ van.Advertiser      = (*Van)(nil)
	_ van.Admitter        = (*Van)(nil)
	_ van.PathChooser     = (*Van)(nil)
)

// New wraps in, which must not be bound yet. If shared memory is not available, the van works like in and
// logs the cause. Use van.As to find the other capabilities of in.
func New(in van.Van, o van.Options) *Van {
	v := &Van{inner: in, cfg: o.Config, log: o.Log, backend: o.Backend, dests: landing.New(streamFrom, o.Config.Resend)}
	v.log = cmp.Or(v.log, slog.New(slog.DiscardHandler))
	v.own.id.Store(van.Empty)
	v.own.bell.fd, v.own.linkTime = -1, linkTime
	v.own.guard.Keys, v.own.guard.Log = o.Keys, v.log
	p := &peers{bell: &v.own.bell, returnTime: returnTime, senders: map[int]*inPeer{}}
	v.peers = p
	v.rx.self, v.rx.log, v.rx.stats, v.rx.copies, v.rx.dests, v.rx.dropTime = &v.own, v.log, &v.stats, &v.copies, v.dests, dropTime
	v.rx.mapsMemory = o.Config.SHMMap
	v.tx = outCommon{log: v.log, stats: &v.stats, copies: &v.copies, budget: int64(o.Config.SendBudget), memory: newRingMemory(v.log, o.Config), roomTimeout: roomTimeout}
	v.receiver = receiver{self: &v.own, in: &v.rx, peers: v.peers, log: v.log, maxSleep: maxSleep}
	over := func() string { return van.PathTo(in, van.Empty, true).Over }
	v.dialer.self, v.dialer.peers, v.dialer.out, v.dialer.log, v.dialer.over, v.dialer.readers = &v.own, p, &v.tx, v.log, over, admitReaders
	p.Open(links.Options[outData, *outLink, *inLink]{Log: v.log, Inner: in, Over: SharedMemory, Link: "a link through shared memory", Kind: markKind,
		Together: true, TakesUnknown: true,
		Retry: links.Retry{Path: "through shared memory", Inside: over, Hopeless: hopeless},
		Dial:  v.dialer.link, Failed: v.dialer.failed, Keep: v.dialer.keep, Gone: v.dests.Forget, InsideLost: p.insideLost,
		Device:      func(l *outLink) bool { return l.device },
		StartLocked: p.start, ArrivedLocked: p.arrived, EndLocked: p.fence})
	v.acceptor = acceptor{self: &v.own, peers: v.peers, in: &v.rx, log: v.log, conns: map[*net.UnixConn]bool{}}
	if o.Engine == nil {
		o.Engine = engine.New(o.Config.BusyPoll.Spin())
	}
	v.receiveWith(o.Engine)
	return v
}

// receiveWith makes v a source of e.
func (v *Van) receiveWith(e *engine.Engine) {
	v.tx.engine = e
	v.rx.feed = engine.NewFeed(e, &v.receiver, engine.FeedOptions{Polls: true, Spins: true, PollArmsLoop: true, DetectsBusyCores: true})
	v.receiver.limit(v.cfg)
}

// Unwrap implements van.Wrapper.
func (v *Van) Unwrap() van.Van { return v.inner }

// Type implements van.Van.
func (v *Van) Type() string { return v.inner.Type() }

// Bind implements van.Van.
func (v *Van) Bind(ctx context.Context, self van.Node) (int, error) {
	port, err := v.inner.Bind(ctx, self)
	if err != nil {
		return port, err
	}
	v.role.Store(int32(self.Role))
	v.own.id.Store(int32(self.ID))
	v.peers.Mu.Lock()
	defer v.peers.Mu.Unlock()
	if self.Role == van.Scheduler || v.acceptor.listener != nil || v.none != nil || v.peers.Closed() {
		return port, nil
	}
	if err := v.open(); err != nil {
		v.none = err
		v.log.Warn("no data goes through shared memory", "err", err)
	}
	return port, nil
}

// open opens the doorbell and the socket. The caller holds peers.Mu.
func (v *Van) open() (err error) {
	s := &v.own
	if s.token, err = newToken(); err != nil {
		return err
	}
	if err = s.bell.open(); err != nil {
		return err
	}
	if v.acceptor.listener, err = listen(&s.token); err != nil {
		v.acceptor.listener = nil
		s.bell.close()
		return err
	}
	if s.device, s.noDevice = openDevice(v.backend, s.token.name[:]); s.noDevice != nil && v.backend != nil && v.backend.Device().Type != backend.CPU {
		v.log.Warn("values on the device go through host memory, also on this host", "err", s.noDevice)
	}
	v.peers.WG.Add(1)
	go v.acceptor.run()
	return nil
}

// Endpoint implements van.Advertiser. It returns nil if the node cannot be reached
// through memory.
func (v *Van) Endpoint() []byte {
	v.peers.Mu.Lock()
	defer v.peers.Mu.Unlock()
	if v.acceptor.listener == nil {
		return nil
	}
	return v.own.token.encode()
}

// Start implements van.Van.
func (v *Van) Start(recv van.Receiver) {
	v.peers.Mu.Lock()
	v.receiver.deliver = recv
	start := v.acceptor.listener != nil && !v.peers.Closed()
	v.peers.Mu.Unlock()
	v.inner.Start(func(m *van.Message) {
		if !m.IsControl() {
			if v.peers.Marked(m) {
				return
			}
			if n := v.peers.Of(m.Sender); n != nil {
				n.Data.inside.Add(1)
				defer n.Data.inside.Add(-1)
			}
		}
		if !m.Request && !m.Push && !m.IsControl() {
			v.dests.Answered(m)
		}
		recv(m)
	})
	if start {
		v.rx.feed.Start()
	}
}

// SetID implements van.Van.
func (v *Van) SetID(id int) {
	v.own.id.Store(int32(id))
	v.inner.SetID(id)
}

// Connect implements van.Van. Links to reachable peers are made when this node sends its first data message to one
// of them: a node that sends no data shares no memory. Messages wait until the result is known.
func (v *Van) Connect(ctx context.Context, id int, peer van.Node) error {
	if err := v.inner.Connect(ctx, id, peer); err != nil {
		return err
	}
	if id <= 0 || id == van.SchedulerID || v.role.Load() == int32(van.Scheduler) || v.own.id.Load() == van.Empty {
		return nil // this node sends no data to that peer
	}
	n := &outPeer{}
	who, _ := peer.Extension()
	t, offers := parseToken(who.Local)
	n.Data.token = t
	n.Init(id, t.name, who.Incarnation)
	v.peers.Mu.Lock()
	on, none := v.acceptor.listener != nil, v.none
	v.peers.Mu.Unlock()
	switch why := v.own.token.reach(&t); {
	case !on:
		n.Unlink(none)
	case !offers || why != "":
		if !offers {
			why = "the peer offers none: it is a C++ node, or has BYTEPS_ENABLE_IPC=0"
		}
		v.log.Info("no shared memory with a peer", "peer", n.Name(), "why", why)
		n.Unlink(errors.New(why))
	}
	v.peers.Connect(n)
	return nil
}

// Disconnect implements van.Van. It does not wait until the sent messages are delivered.
func (v *Van) Disconnect(id int) { v.peers.Disconnect(id) }

// Rename implements van.Van.
func (v *Van) Rename(old, id int) error { return v.peers.Rename(old, id) }

// Admit implements van.Admitter.
func (v *Van) Admit(id int) { v.peers.Admit(id) }

// WatchPeers implements van.PeerWatcher. It also reports a peer as lost when its link
// breaks.
func (v *Van) WatchPeers(f func(id int, up bool, cause error)) { v.peers.Watch(f) }

// Send implements van.Van.
func (v *Van) Send(msg *van.Message) error {
	if msg.IsControl() {
		return v.inner.Send(msg)
	}
	l := v.peers.link(msg.Receiver)
	if l == nil {
		n := v.peers.Await(msg.Receiver)
		sent, err := v.peers.SendInside(n, msg)
		switch {
		case errors.Is(err, van.ErrInvalid) && onDevice(msg):
			return fmt.Errorf("%w: %w", err, backend.ErrNotExportable) // a link has existed until now
		case sent:
			return err
		case v.peers.Closed():
			return v.sendError(msg, van.ErrClosed)
		}
		if state, why := v.peers.Status(n); state == links.Refused {
			return v.sendError(msg, fmt.Errorf("%w: %w", van.ErrPeerLost, why))
		}
		return v.Send(msg)
	}
	if v.peers.Closed() {
		return v.sendError(msg, van.ErrClosed)
	}
	msg.Trace().PostSend = clock.Now()
	if msg.Frames == 1 || msg.Frames < 0 || msg.Frames > van.MaxFrames {
		return v.sendError(msg, fmt.Errorf("%w: %d data frames, want 0, 2 or 3", van.ErrInvalid, msg.Frames))
	}
	x := exportLists.Get().(*exports)
	defer x.put(v.own.device)
	if err := x.fill(msg, l, v.own.device); err != nil {
		return v.sendError(msg, err)
	}
	size := msg.PayloadLen()
	expects := v.dests.Expect(msg)
	sent, err := l.send(msg, x.list)
	if expects && (!sent || err != nil) {
		v.dests.Drop(msg)
	}
	if !sent {
		if v.peers.link(msg.Receiver) != l {
			return v.Send(msg) // the link has been replaced or removed meanwhile
		}
		err = fmt.Errorf("%w: %w", van.ErrPeerLost, l.why())
		if v.peers.Closed() {
			err = van.ErrClosed
		}
	}
	if err != nil {
		return v.sendError(msg, err)
	}
	v.stats.sent(size)
	return nil
}

// onDevice reports whether a value of msg lies on a device.
func onDevice(msg *van.Message) bool {
	for i := range msg.Parts {
		if !msg.Parts[i].Vals.OnHost() {
			return true
		}
	}
	return msg.Frames >= partVals && !msg.Vals.OnHost()
}

// exports describe the values of a message that lie on the device.
type exports struct {
	list []*backend.Shared // of the message or of its parts; nil for a value on the host
}

var exportLists = sync.Pool{New: func() any { return new(exports) }}

// fill fills x with the exports of msg, which l is to send.
func (x *exports) fill(msg *van.Message, l *outLink, d *device) error {
	if !onDevice(msg) {
		return msg.CheckOnHost()
	}
	add := func(m backend.Mem) (err error) {
		var e *backend.Shared
		switch {
		case m.OnHost():
		case !l.device: // the link may have replaced one with a device
			return fmt.Errorf("%w: the values lie on %s, want host memory: %w", van.ErrInvalid, m.Device(), backend.ErrNotExportable)
		default:
			e, err = d.share(m, l.segments)
		}
		x.list = append(x.list, e)
		return err
	}
	for i := range msg.Parts {
		if err := add(msg.Parts[i].Vals); err != nil {
			return err
		}
	}
	if len(msg.Parts) > 0 {
		return nil
	}
	for i := range msg.Frames {
		if f := msg.Frame(i); i != partVals-1 && !f.OnHost() {
			return fmt.Errorf("%w: frame %d lies on %s, want host memory", van.ErrInvalid, i, f.Device())
		}
	}
	return add(msg.Vals)
}

// put releases the exports, and returns x to its pool.
func (x *exports) put(d *device) {
	for i, e := range x.list {
		if e != nil {
			d.unshare(e)
		}
		x.list[i] = nil
	}
	x.list = x.list[:0]
	exportLists.Put(x)
}

func (v *Van) sendError(msg *van.Message, err error) error {
	return &van.Error{Op: "send", Node: van.NodeName(int(v.own.id.Load())), Peer: van.NodeName(msg.Receiver) + " through shared memory",
		Detail: msg.Meta.String(), Err: err}
}

// RegisterRecvBuffer implements van.BufferRegistrar.
func (v *Van) RegisterRecvBuffer(sender int, key uint64, dst backend.Mem) error {
	if r, ok := van.As[van.BufferRegistrar](v.inner); ok {
		if err := r.RegisterRecvBuffer(sender, key, dst); err != nil {
			return err
		}
	}
	v.dests.Register(sender, key, dst)
	return nil
}

// Invalidate implements van.Invalidator.
func (v *Van) Invalidate(mem backend.Mem) {
	ctx, cancel := context.WithTimeout(context.Background(), v.rx.dropTime)
	defer cancel()
	if err := v.dests.Invalidate(ctx, mem); err != nil {
		v.log.Error("a copy to memory that is taken back does not end", "bytes", mem.Len(), "err", err)
	}
	if err := hostmem.Revoke(mem); err != nil {
		v.log.Error("a peer may still write to a tensor whose call has failed", "bytes", mem.Len(), "err", err)
	}
	if r, ok := van.As[van.Invalidator](v.inner); ok {
		r.Invalidate(mem)
	}
}

// Cancel implements van.Canceler.
func (v *Van) Cancel(q van.Requests) {
	for _, l := range v.peers.Links() {
		l.recall(&q)
	}
	if r, ok := van.As[van.Canceler](v.inner); ok {
		r.Cancel(q)
	}
}

// SharedMemory is Path.Over of peers that have a link.
const SharedMemory = "shared memory"

// PathTo implements van.PathChooser. Send refuses a value on the device that cannot be exported to other
// processes with backend.ErrNotExportable, even if Device is set.
func (v *Van) PathTo(id int, now bool) van.Path {
	if v.peers.Of(id) != nil {
		return v.peers.PathTo(id, now)
	}
	path := van.PathTo(v.inner, id, now)
	v.peers.Mu.Lock()
	defer v.peers.Mu.Unlock()
	if v.none != nil {
		path = path.Not(SharedMemory, v.none.Error())
	}
	return path
}

// Stats implements van.Meter. The counters include messages over the van inside.
func (v *Van) Stats() van.Stats {
	s := van.Stats{}
	if m, ok := van.As[van.Meter](v.inner); ok {
		s = m.Stats()
	}
	s = v.stats.add(s)
	s.PausedReads += v.rx.feed.Loop.Pauses()
	s.RefusedRings += v.tx.memory.refused.Load()
	s.Unauthenticated += v.own.guard.Count()
	return s
}

// Close implements van.Van.
func (v *Van) Close(ctx context.Context) error {
	p := v.peers
	first := p.BeginClose()
	p.Mu.Lock()
	listener := v.acceptor.listener
	p.Mu.Unlock()
	if !first || listener == nil {
		return v.inner.Close(ctx)
	}
	_ = listener.Close()
	err := p.Close(ctx, int(v.own.id.Load()), v.rx.feed, v.acceptor.closeConns, v.freeLinks)
	v.rx.blocks.close()
	if v.own.device != nil && err == nil {
		v.rx.awaitStranded(context.WithoutCancel(ctx))
		err = v.own.device.close()
	}
	return errors.Join(err, v.inner.Close(ctx))
}

// freeLinks ends all inbound links. The caller holds the feed.
func (v *Van) freeLinks() {
	for _, l := range v.peers.Ins() {
		v.peers.removeIn(l)
	}
	v.own.bell.close()
}
