package tcp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/engine"
	"github.com/stepaf/stepaf-go/van/landing"
	"github.com/stepaf/stepaf-go/van/links"
)

// Van is a van whose data messages to nodes of this library go over TCP connections of its own.
type Van struct {
	own      common
	inner    van.Van
	engine   *engine.Engine
	peers    *peers
	dialer   dialer
	acceptor acceptor
	source   source
	port     int // where the node accepts data; 0: nowhere
}

var (
	_ van.Van                = (*Van)(nil)
	_ van.Wrapper            = (*Van)(nil)
	_ van.PeerWatcher        = (*Van)(nil)
	_ van.Meter              = (*Van)(nil)
	_ van.BufferRegistrar    = (*Van)(nil)
	_ van.Invalidator        = (*Van)(nil)
	_ van.Canceler           = (*Van)(nil)
	_ van.DataAcceptor       = (*Van)(nil)
	_ van.Admitter           = (*Van)(nil)
	_ van.TrafficClassSetter = (*Van)(nil)
	_ van.PathChooser        = (*Van)(nil)
)

// New wraps in, which must not have been bound.
func New(in van.Van, o van.Options) *Van {
	v := &Van{inner: in, engine: o.Engine}
	n := &v.own
	n.cfg, n.log, n.incarnation, n.places = o.Config, cmp.Or(o.Log, slog.New(slog.DiscardHandler)), o.Incarnation, landing.New(placeFrom, o.Config.Resend)
	n.id.Store(van.Empty)
	n.guard.Keys, n.guard.Log = o.Keys, n.log
	p := &peers{n: n, senders: map[int]*sender{}, read: func(c *inConn) error { return v.source.add(c.fd, c) }}
	v.peers = p
	v.source.n, v.source.left = n, p.leave
	v.dialer = dialer{n: n, peers: p, unwatch: v.source.remove, dialTime: dialTime}
	v.acceptor.n, v.acceptor.peers = n, p
	p.Open(links.Options[string, *outConn, *inConn]{Log: n.log, Inner: in, Over: "tcp", Link: "a connection for data", Kind: markKind, KeepsLoss: true,
		Retry: links.Retry{Path: "over tcp", Inside: in.Type, Hopeless: hopeless},
		Dial:  v.dialer.dial, OpenLocked: v.open, Failed: v.dialer.failed, Keep: v.dialer.keep, Gone: n.places.Forget, InsideLost: (*outConn).insideLost,
		StartLocked: p.start, EndLocked: p.end})
	if v.engine == nil {
		v.engine = engine.New(o.Config.BusyPoll.Spin())
	}
	return v
}

// open watches c, a new connection to peer id. peers.Mu is held.
func (v *Van) open(c *outConn, id int) error {
	if err := v.source.add(c.fd, c); err != nil {
		return err
	}
	if class := v.own.classOf(id); class != 0 {
		c.setClass(class)
	}
	return nil
}

// Unwrap implements van.Wrapper.
func (v *Van) Unwrap() van.Van { return v.inner }

// Type implements van.Van.
func (v *Van) Type() string { return v.inner.Type() }

// Bind implements van.Van. The scheduler carries no data and accepts none.
func (v *Van) Bind(ctx context.Context, self van.Node) (int, error) {
	if v.own.cfg.TLS {
		var err error
		if v.own.tls, err = newTLS(v.own.guard.Keys); err != nil {
			return 0, err
		}
	}
	port, err := v.inner.Bind(ctx, self)
	if err != nil {
		return port, err
	}
	v.own.id.Store(int32(self.ID))
	if self.Role == van.Scheduler || v.own.incarnation == 0 {
		return port, nil
	}
	if err := v.source.open(v.engine, v.peers.sender); err != nil {
		v.own.log.Warn("no data goes over tcp", "err", err)
		return port, nil
	}
	if v.port, err = v.acceptor.listen(self.Hostname, v.own.cfg.RootPort); err != nil {
		v.own.log.Warn("no data goes over tcp", "err", err)
		v.port = 0
		return port, nil
	}
	v.acceptor.wg.Add(1)
	go v.acceptor.run()
	return port, nil
}

// DataPort is where the node accepts data, 0 if it does not.
func (v *Van) DataPort() int { return v.port }

// Start implements van.Van.
func (v *Van) Start(recv van.Receiver) {
	v.source.deliver = recv
	v.inner.Start(func(m *van.Message) {
		if v.peers.Marked(m) {
			return
		}
		if !m.Request && !m.Push && !m.IsControl() {
			v.own.places.Answered(m)
		}
		recv(m)
	})
	if v.source.isOpen.Load() {
		v.source.feed.Start()
	}
}

// SetID implements van.Van.
func (v *Van) SetID(id int) {
	v.own.id.Store(int32(id))
	v.inner.SetID(id)
}

// Connect implements van.Van. The connection for data is made when this node first sends data to the peer.
func (v *Van) Connect(ctx context.Context, id int, record van.Node) error {
	if err := v.inner.Connect(ctx, id, record); err != nil {
		return err
	}
	if id <= van.AllNodes {
		return nil // no data goes there
	}
	who, native := record.Extension()
	n := &peer{}
	n.Init(id, processOf(who.Incarnation), who.Incarnation)
	switch {
	case v.port == 0:
		n.Unlink(errNoPort)
	case native && who.DataPort != 0:
		n.Data = net.JoinHostPort(record.Hostname, strconv.Itoa(int(who.DataPort)))
	default:
		n.Unlink(errPeerNoPort)
		v.own.log.Info("no data goes over tcp to a peer", "peer", n.Name(), "why", errPeerNoPort)
	}
	was := v.peers.Of(id)
	if was == nil || was.Incarnation() != n.Incarnation() || was.Data != n.Data { // otherwise the process is the same, and its connection stays
		v.peers.Connect(n)
	}
	return nil
}

// Why no data goes over tcp to a peer without an address for data.
var (
	errNoPort     = errors.New("this node accepts no data over tcp")
	errPeerNoPort = errors.New("the peer has no port for data: it is a C++ node, or has STEPAF_DATA=zmq")
)

// Admit implements van.Admitter.
func (v *Van) Admit(id int) { v.peers.Admit(id) }

// Disconnect implements van.Van. Messages that were sent before are written in the background.
func (v *Van) Disconnect(id int) { v.peers.Disconnect(id) }

// Rename implements van.Van.
func (v *Van) Rename(old, id int) error { return v.peers.Rename(old, id) }

// Send implements van.Van.
func (v *Van) Send(msg *van.Message) error {
	if msg.IsControl() {
		return v.inner.Send(msg)
	}
	n, c := v.peers.Of(msg.Receiver), (*outConn)(nil)
	if n != nil {
		c = n.Link()
	}
	if c == nil {
		n = v.peers.Await(msg.Receiver)
		if sent, err := v.peers.SendInside(n, msg); sent {
			return err
		}
		c = n.Link()
	}
	switch {
	case v.peers.Closed():
		return v.sendError(msg, van.ErrClosed)
	case c == nil:
		return v.sendError(msg, v.peers.unreachable(n))
	}
	msg.Trace().PostSend = clock.Now()
	if err := msg.CheckOnHost(); err != nil {
		return v.sendError(msg, fmt.Errorf("%w: %w", err, backend.ErrNotExportable))
	}
	expects := v.own.places.Expect(msg)
	err := c.send(msg)
	if err != nil && expects {
		v.own.places.Drop(msg)
	}
	switch {
	case err == nil:
		v.own.stats.sentMessages.Add(1)
		return nil
	case !errors.Is(err, errGone):
	case v.peers.Closed():
		err = van.ErrClosed
	case !v.peers.Current(n):
		return v.Send(msg) // another process has the id by now
	default:
		err = fmt.Errorf("%w: %w", van.ErrPeerLost, c.why())
	}
	return v.sendError(msg, err)
}

func (v *Van) sendError(msg *van.Message, err error) error {
	return &van.Error{Op: "send", Node: van.NodeName(int(v.own.id.Load())), Peer: van.NodeName(msg.Receiver) + " over tcp", Detail: msg.Meta.String(), Err: err}
}

// RegisterRecvBuffer implements van.BufferRegistrar.
func (v *Van) RegisterRecvBuffer(sender int, key uint64, dst backend.Mem) error {
	if r, ok := van.As[van.BufferRegistrar](v.inner); ok {
		if err := r.RegisterRecvBuffer(sender, key, dst); err != nil {
			return err
		}
	}
	v.own.places.Register(sender, key, dst)
	return nil
}

// Invalidate implements van.Invalidator.
func (v *Van) Invalidate(mem backend.Mem) {
	_ = v.own.places.Invalidate(context.Background(), mem) // no device copies here, so it cannot fail
	if r, ok := van.As[van.Invalidator](v.inner); ok {
		r.Invalidate(mem)
	}
}

// Cancel implements van.Canceler.
func (v *Van) Cancel(q van.Requests) {
	for _, c := range v.peers.Links() {
		c.cancel(&q)
	}
	if r, ok := van.As[van.Canceler](v.inner); ok {
		r.Cancel(q)
	}
}

// PathTo implements van.PathChooser.
func (v *Van) PathTo(id int, now bool) van.Path {
	if v.peers.Of(id) == nil {
		return van.Path{Over: "tcp"}
	}
	return v.peers.PathTo(id, now)
}

// SetTrafficClasses implements van.TrafficClassSetter.
func (v *Van) SetTrafficClasses(classes map[int]int) {
	p := v.peers
	p.Mu.Lock() // no connection is installed meanwhile
	v.own.classes.Store(&classes)
	for id, n := range p.All() {
		if c := n.Link(); c != nil {
			c.setClass(classes[id]) // 0: the system's
		}
	}
	p.Mu.Unlock()
	if m, ok := van.As[van.TrafficClassSetter](v.inner); ok {
		m.SetTrafficClasses(classes)
	}
}

// TrafficClassApplied implements van.TrafficClassSetter.
func (v *Van) TrafficClassApplied(id int) (now, ever bool) {
	if n := v.peers.Of(id); n != nil {
		if c := n.Link(); c != nil && !c.hasClass(v.own.classOf(id)) {
			return false, true
		}
	}
	if m, ok := van.As[van.TrafficClassSetter](v.inner); ok {
		return m.TrafficClassApplied(id)
	}
	return false, false
}

// WatchPeers implements van.PeerWatcher.
func (v *Van) WatchPeers(f func(id int, up bool, cause error)) { v.peers.Watch(f) }

// Stats implements van.Meter. It counts what goes over the van inside, too.
func (v *Van) Stats() van.Stats {
	s := van.Stats{}
	if m, ok := van.As[van.Meter](v.inner); ok {
		s = m.Stats()
	}
	s.SentMessages += v.own.stats.sentMessages.Load()
	s.SentBytes += v.own.stats.sentBytes.Load()
	s.ReceivedMessages += v.own.stats.receivedMessages.Load()
	s.ReceivedBytes += v.own.stats.receivedBytes.Load()
	s.Malformed += v.own.stats.malformed.Load()
	s.RefusedSends += v.own.stats.refused.Load()
	s.FencedMessages += v.own.stats.fenced.Load()
	s.LateAnswers += v.own.stats.late.Load()
	s.Unauthenticated += v.own.guard.Count()
	if v.source.isOpen.Load() {
		s.PausedReads += v.source.feed.Loop.Pauses()
	}
	return s
}

// Close implements van.Van.
func (v *Van) Close(ctx context.Context) error {
	p := v.peers
	if !p.BeginClose() || !v.source.isOpen.Load() {
		return v.inner.Close(ctx)
	}
	v.acceptor.close()
	err := p.Close(ctx, int(v.own.id.Load()), v.source.feed, func() {}, v.free)
	return errors.Join(err, v.inner.Close(ctx))
}

// free closes what is received from. The feed is held.
func (v *Van) free() {
	v.source.join()
	for _, c := range v.peers.TakeIns() {
		if c.cur != nil {
			v.own.release(c.cur)
		}
		_ = unix.Close(c.fd)
	}
	v.source.close()
}
