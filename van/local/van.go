package local

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/internal/dispatch"
	"github.com/stepaf/stepaf-go/internal/env"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// Van is a van whose data messages to peers of the same host go through memory.
type Van struct {
	inner       van.Van
	innerPoller van.Poller // nil when it has none
	cfg         *env.Config
	log         *slog.Logger

	token    token
	off      bool // there is no link, and never will be
	listener *net.UnixListener
	bell     *bell
	bellFD   int

	id   atomic.Int32
	role atomic.Int32
	recv van.Receiver
	loop *dispatch.Loop[*parcel]

	// For tests.
	streamOnly bool                     // as where reading other processes is forbidden
	memory     func(n int) (int, error) // newMemory

	// What who receives uses; see receive.go.
	rx       sync.Mutex
	turn     int
	chunks   atomic.Uint64 // of streams, received
	patience patience
	spin     time.Duration
	hot      bool // the loop's: a message has come since it last slept
	pollers  atomic.Int32
	parked   atomic.Bool
	ins      atomic.Pointer[[]*inLink]

	links     atomic.Pointer[map[int]*outLink] // by node id
	outs      atomic.Pointer[[]*outLink]       // the same
	linked    atomic.Int32                     // peers with a link
	elsewhere atomic.Int32                     // peers without one that send data

	closing  atomic.Bool // nothing is sent any more
	stopping atomic.Bool // nothing is received any more
	ctx      context.Context
	cancel   context.CancelFunc

	mu      sync.Mutex // guards changes of the above, and what follows
	started bool
	closed  bool
	nodes   map[int]*neighbour
	peers   map[int]*peer
	greeted map[*net.UnixConn]bool // connections of peers
	wg      sync.WaitGroup
	losses  losses

	places *places
	blocks blocks
	pool   pool
	stats  stats
}

// neighbour is a peer that data goes to.
type neighbour struct {
	token    token
	admitted bool // not in place of another one, or Admit was called
	tries    int  // to make a lost link again
}

var (
	_ van.Van             = (*Van)(nil)
	_ van.Wrapper         = (*Van)(nil)
	_ van.PeerWatcher     = (*Van)(nil)
	_ van.Poller          = (*Van)(nil)
	_ van.Flusher         = (*Van)(nil)
	_ van.Meter           = (*Van)(nil)
	_ van.BufferRegistrar = (*Van)(nil)
	_ van.Revoker         = (*Van)(nil)
	_ van.Advertiser      = (*Van)(nil)
	_ van.Admitter        = (*Van)(nil)
)

// New wraps inner, which must not have been bound. Where shared memory cannot be
// had, the van works as inner does, and the log says why. Use van.As to find the
// other abilities of inner.
func New(inner van.Van, o van.Options) *Van {
	v := &Van{inner: inner, cfg: o.Config, log: o.Log, bellFD: -1, spin: spinFor(o.Config.BusyPoll),
		nodes: map[int]*neighbour{}, peers: map[int]*peer{}, greeted: map[*net.UnixConn]bool{}, places: newPlaces(), memory: newMemory}
	v.losses.current = func(id int, n *neighbour) bool {
		v.mu.Lock()
		defer v.mu.Unlock()
		return v.nodes[id] == n && !v.closed
	}
	v.ctx, v.cancel = context.WithCancel(context.Background())
	if v.log == nil {
		v.log = slog.New(slog.DiscardHandler)
	}
	v.innerPoller, _ = van.As[van.Poller](inner)
	v.ins.Store(&[]*inLink{})
	v.outs.Store(&[]*outLink{})
	v.links.Store(&map[int]*outLink{})
	v.id.Store(van.Empty)
	v.loop = dispatch.NewLoop(v.receive, v.deliverOne)
	v.loop.Discard = func(p *parcel) {
		p.from.inHand.Add(-1)
		v.release(p)
	}
	return v
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
	v.id.Store(int32(self.ID))
	v.mu.Lock()
	defer v.mu.Unlock()
	if self.Role == van.Scheduler || v.listener != nil || v.off || v.closed {
		return port, nil
	}
	if err := v.open(); err != nil {
		v.off = true
		v.log.Warn("no data goes through shared memory", "err", err)
	}
	return port, nil
}

// open makes the doorbell and listens.
func (v *Van) open() (err error) {
	if v.token, err = newToken(); err != nil {
		return err
	}
	if v.bellFD, err = v.memory(bellLen); err != nil {
		return err
	}
	if v.bell, err = mapBell(v.bellFD); err == nil {
		v.listener, err = listen(&v.token)
	}
	if err != nil {
		v.freeBell()
		return err
	}
	if admitted, err := admitReaders(); err != nil {
		v.log.Warn("peers may have to copy large values twice", "err", err)
	} else if admitted {
		v.log.Info("processes of the same user may read this one's memory", "why", yamaScope+" is 1")
	}
	v.wg.Add(1)
	go v.accept()
	return nil
}

func (v *Van) freeBell() {
	if v.bell != nil {
		v.bell.unmap()
		v.bell = nil
	}
	_ = unix.Close(v.bellFD)
	v.bellFD = -1
}

// Endpoint implements van.Advertiser: it is nil when the node cannot be reached
// through memory.
func (v *Van) Endpoint() []byte {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.listener == nil {
		return nil
	}
	return v.token.encode()
}

// Start implements van.Van.
func (v *Van) Start(recv van.Receiver) {
	v.mu.Lock()
	v.recv = recv
	start := v.listener != nil && !v.closed
	v.started = start
	v.mu.Unlock()
	v.inner.Start(recv)
	if start {
		v.loop.Start()
	}
}

// SetID implements van.Van.
func (v *Van) SetID(id int) {
	v.id.Store(int32(id))
	v.inner.SetID(id)
}

// WatchPeers implements van.PeerWatcher: a peer is also reported as lost when its
// link breaks.
func (v *Van) WatchPeers(f func(id int, up bool, cause error)) {
	v.losses.watch.Store(&f)
	if w, ok := van.As[van.PeerWatcher](v.inner); ok {
		w.WatchPeers(f)
	}
}

// Connect implements van.Van. It also makes the link to a peer within reach.
func (v *Van) Connect(ctx context.Context, id int, peer van.Node) error {
	if err := v.inner.Connect(ctx, id, peer); err != nil {
		return err
	}
	if id <= 0 || id == van.SchedulerID || v.role.Load() == int32(van.Scheduler) || v.id.Load() == van.Empty {
		return nil // no data goes there
	}
	v.mu.Lock()
	old := (*v.links.Load())[id]
	v.setLink(id, nil)
	n := &neighbour{}
	t, offers := parseToken(peer.Endpoint)
	n.token = t
	was := v.nodes[id]
	n.admitted = was == nil || was.admitted && was.token.name == t.name
	v.nodes[id] = n
	v.admitLocked(id)
	v.losses.forget(id)
	v.countLocked()
	on := !v.closed && v.listener != nil
	if on {
		v.wg.Add(1)
		defer v.wg.Done()
	}
	v.mu.Unlock()
	if old != nil {
		old.close(true)
	}
	if !on {
		return nil
	}
	if !offers {
		v.log.Debug("no shared memory with a peer", "peer", van.NodeName(id), "why", "it does not offer it")
		return nil
	}
	if why := v.token.reach(&t); why != "" {
		level := slog.LevelInfo
		if t.host != v.token.host {
			level = slog.LevelDebug // nobody would expect it
		}
		v.log.Log(ctx, level, "data goes over "+v.Type(), "peer", van.NodeName(id), "why", why)
		return nil
	}
	l, err := v.dial(ctx, id, &t)
	if err != nil {
		v.log.Warn("data goes over "+v.Type()+", not through shared memory", "peer", van.NodeName(id), "err", err)
		return nil
	}
	v.addOut(id, n, l)
	return nil
}

// setLink makes l, which may be nil, the link to id. v.mu is held.
func (v *Van) setLink(id int, l *outLink) {
	links := maps.Clone(*v.links.Load())
	delete(links, id)
	if l != nil {
		links[id] = l
	}
	outs := slices.Collect(maps.Values(links))
	v.links.Store(&links)
	v.outs.Store(&outs)
	v.countLocked()
}

// countLocked counts who is reached how, for Poll. v.mu is held.
func (v *Van) countLocked() {
	links := *v.links.Load()
	v.linked.Store(int32(len(links)))
	elsewhere := 0
	for id := range v.nodes {
		if links[id] == nil {
			elsewhere++
		}
	}
	v.elsewhere.Store(int32(elsewhere))
}

// addOut installs a new link to node n. It tells whether it is wanted.
func (v *Van) addOut(id int, n *neighbour, l *outLink) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.closed || v.nodes[id] != n {
		l.close(true)
		return false
	}
	v.setLink(id, l)
	v.wg.Go(func() {
		awaitEnd(l.conn)
		v.outLost(n, l)
	})
	return true
}

var errLinkBroke = errors.New("its link through shared memory broke")

// outLost cleans up after a link that has ended. If it was not ended here, the
// peer is lost, or the two must begin anew.
func (v *Van) outLost(n *neighbour, l *outLink) {
	l.close(false)
	v.mu.Lock()
	id := int(l.id.Load())
	current := !v.closed && (*v.links.Load())[id] == l
	v.mu.Unlock()
	if !current {
		return
	}
	cause := errLinkBroke
	if l.cause != nil {
		cause = l.cause
	}
	v.tell(n, id, false, cause)
	// Until it is settled what follows, Send finds the link, which says ErrPeerLost.
	var again *outLink
	var err error
	if n.tries++; n.tries <= maxTries {
		again, err = v.dial(v.ctx, id, &n.token)
	}
	switch {
	case again != nil:
		if v.addOut(id, n, again) {
			v.tell(n, id, true, nil)
		}
		return
	case errors.Is(err, syscall.ECONNREFUSED):
		// It is gone. The van inside says when it is there again.
	default:
		v.log.Warn("data goes over "+v.Type()+" from now on", "peer", van.NodeName(id), "links lost", n.tries, "err", err)
		defer v.tell(n, id, true, nil)
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if (*v.links.Load())[id] == l {
		v.setLink(id, nil)
	}
}

// maxTries is how often a link to the same peer is made again.
const maxTries = 3

// tell reports that n, peer id, is lost or there again.
func (v *Van) tell(n *neighbour, id int, up bool, cause error) {
	if !up {
		v.places.forget(id)
	}
	v.losses.tell(n, id, up, cause)
}

// peerOf returns the order of a sender's messages.
func (v *Van) peerOf(id int) *peer {
	v.mu.Lock()
	defer v.mu.Unlock()
	p := v.peers[id]
	if p == nil {
		p = &peer{id: id}
		v.peers[id] = p
	}
	return p
}

// addIn begins to receive from l. It tells whether the van is open.
func (v *Van) addIn(l *inLink) bool {
	v.mu.Lock()
	if v.closed {
		v.mu.Unlock()
		return false
	}
	ins := append(slices.Clone(*v.ins.Load()), l)
	v.ins.Store(&ins)
	same, n := v.isOf(l), v.nodes[l.from.id]
	if !same || !n.admitted {
		l.held.Store(true)
		time.AfterFunc(holdTime, func() { v.unhold(l) })
	}
	v.bell.wakeAll()
	v.mu.Unlock()
	if same {
		v.tell(n, l.from.id, true, nil)
	}
	return true
}

// holdTime is the longest that messages of a peer wait until this node knows it:
// the scheduler tells both at the same time.
const holdTime = time.Second

// unhold begins to take messages from l.
func (v *Van) unhold(l *inLink) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if l.held.Swap(false) && v.bell != nil {
		v.bell.wakeAll()
	}
}

// Admit implements van.Admitter.
func (v *Van) Admit(id int) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if n := v.nodes[id]; n != nil {
		n.admitted = true
		v.admitLocked(id)
	}
}

// admitLocked begins to take messages from peer id, if it may. v.mu is held.
func (v *Van) admitLocked(id int) {
	if !v.nodes[id].admitted || v.bell == nil {
		return
	}
	for _, l := range *v.ins.Load() {
		if l.from.id == id && v.isOf(l) && l.held.Swap(false) {
			v.bell.wakeAll()
		}
	}
}

// isOf tells whether l comes from the node that Connect has named, and not from one
// that has had, or will have, its id. v.mu is held.
func (v *Van) isOf(l *inLink) bool {
	n := v.nodes[l.from.id]
	return n != nil && n.token.name == l.name
}

// inLost is told that the connection of l has ended. Who receives removes it when
// the ring is empty.
func (v *Van) inLost(l *inLink) {
	l.lost.Store(true)
	v.mu.Lock()
	if v.bell != nil {
		v.bell.wakeAll()
	}
	v.mu.Unlock()
}

// removeIn forgets a link that has ended. v.rx is held.
func (v *Van) removeIn(l *inLink) {
	v.mu.Lock()
	ins := slices.DeleteFunc(slices.Clone(*v.ins.Load()), func(x *inLink) bool { return x == l })
	v.ins.Store(&ins)
	same, n := v.isOf(l), v.nodes[l.from.id]
	v.mu.Unlock()
	if l.stream != nil {
		v.release(l.stream)
		l.stream = nil
	}
	cause := errLinkBroke
	if err := l.cause.Load(); err != nil {
		cause = *err
	}
	inOrder := l.seg.bye().Load() != 0 && !l.failed()
	l.unref()
	if !inOrder && same {
		v.tell(n, l.from.id, false, cause)
	}
}

// Rename implements van.Van.
func (v *Van) Rename(old, id int) error {
	if err := v.inner.Rename(old, id); err != nil || old == id {
		return err
	}
	v.mu.Lock()
	l, other := (*v.links.Load())[old], (*v.links.Load())[id]
	if n := v.nodes[old]; n != nil {
		v.nodes[id] = n
		delete(v.nodes, old)
	}
	if l != nil {
		l.id.Store(int32(id))
	}
	v.setLink(old, nil)
	v.setLink(id, l)
	v.mu.Unlock()
	if other != nil {
		other.close(true)
	}
	return nil
}

// leaveTime is how long Disconnect lets sent messages leave.
const leaveTime = 500 * time.Millisecond

// Disconnect implements van.Van.
func (v *Van) Disconnect(id int) {
	v.mu.Lock()
	l := (*v.links.Load())[id]
	delete(v.nodes, id)
	v.setLink(id, nil)
	v.mu.Unlock()
	v.losses.forget(id)
	if l != nil {
		ctx, cancel := context.WithTimeout(context.Background(), leaveTime)
		l.linger(ctx)
		cancel()
		l.close(true)
	}
	v.inner.Disconnect(id)
	v.places.forget(id)
}

// Send implements van.Van.
func (v *Van) Send(msg *van.Message) error {
	if msg.IsControl() {
		return v.inner.Send(msg)
	}
	l := (*v.links.Load())[msg.Receiver]
	if l == nil {
		return v.inner.Send(msg)
	}
	if v.closing.Load() {
		return v.sendError(msg, van.ErrClosed)
	}
	if msg.Request {
		msg.RequestTrace.PostSend = clock.Now()
	} else {
		msg.ResponseTrace.PostSend = clock.Now()
	}
	if msg.Frames == 1 || msg.Frames < 0 || msg.Frames > van.MaxFrames {
		return v.sendError(msg, fmt.Errorf("%w: %d data frames, want 0, 2 or 3", van.ErrInvalid, msg.Frames))
	}
	for i := range msg.Frames {
		if f := msg.Frame(i); !f.OnHost() {
			return v.sendError(msg, fmt.Errorf("%w: frame %d lies on %s, want host memory", van.ErrInvalid, i, f.Device()))
		}
	}
	size := msg.PayloadLen()
	expects := v.places.expect(msg)
	sent, err := l.send(msg)
	if !sent {
		if now := (*v.links.Load())[msg.Receiver]; now != l {
			if expects {
				v.places.drop(msg)
			}
			return v.Send(msg) // the link has been replaced in between, or given up
		}
		err = van.ErrPeerLost
		if v.closing.Load() {
			err = van.ErrClosed
		}
	}
	if err != nil {
		if expects {
			v.places.drop(msg)
		}
		return v.sendError(msg, err)
	}
	v.stats.sent(size)
	return nil
}

func (v *Van) sendError(msg *van.Message, err error) error {
	return &van.Error{Op: "send", Node: van.NodeName(int(v.id.Load())), Peer: van.NodeName(msg.Receiver) + " through shared memory",
		Detail: msg.Meta.String(), Err: err}
}

// Flush implements van.Flusher.
func (v *Van) Flush(id int) {
	if l := (*v.links.Load())[id]; l != nil {
		l.flush()
		return
	}
	if f, ok := van.As[van.Flusher](v.inner); ok {
		f.Flush(id)
	}
}

// RegisterRecvBuffer implements van.BufferRegistrar.
func (v *Van) RegisterRecvBuffer(sender int, key uint64, dst backend.Mem) error {
	if r, ok := van.As[van.BufferRegistrar](v.inner); ok {
		if err := r.RegisterRecvBuffer(sender, key, dst); err != nil {
			return err
		}
	}
	v.places.register(sender, key, dst)
	return nil
}

// Revoke implements van.Revoker.
func (v *Van) Revoke(mem backend.Mem) {
	v.places.revoke(mem)
	if r, ok := van.As[van.Revoker](v.inner); ok {
		r.Revoke(mem)
	}
}

// Linked tells whether data to node id goes through shared memory.
func (v *Van) Linked(id int) bool { return (*v.links.Load())[id] != nil }

// Stats implements van.Meter. It counts what goes over the van inside, too.
func (v *Van) Stats() van.Stats {
	s := van.Stats{}
	if m, ok := van.As[van.Meter](v.inner); ok {
		s = m.Stats()
	}
	return v.stats.add(s)
}

// Close implements van.Van.
func (v *Van) Close(ctx context.Context) error {
	v.mu.Lock()
	if v.closed || v.listener == nil {
		v.closed = true
		v.mu.Unlock()
		return v.inner.Close(ctx)
	}
	v.closed = true
	v.closing.Store(true)
	links, started := *v.links.Load(), v.started
	v.mu.Unlock()
	_ = v.listener.Close()
	v.cancel()
	// Meanwhile what comes is received: the peer may be doing the same.
	var all sync.WaitGroup
	for id, l := range links {
		all.Go(func() {
			l.linger(ctx)
			if n := l.close(true); n > 0 {
				v.log.Warn("closed with messages that the peer has not taken", "peer", van.NodeName(id), "messages", n)
			}
		})
	}
	all.Wait()
	v.stopping.Store(true)
	v.bell.wakeAll()
	var err error
	if started {
		if err = v.loop.Stop(ctx); err != nil && !errors.Is(err, dispatch.ErrInDeliver) {
			err = &van.Error{Op: "close", Node: van.NodeName(int(v.id.Load())), Detail: "a receiver still runs", Err: err}
		} else {
			err = nil
		}
	}
	v.mu.Lock()
	for c := range v.greeted {
		_ = c.Close()
	}
	v.mu.Unlock()
	v.wg.Wait()
	v.freeReceiver(ctx)
	v.blocks.close()
	return errors.Join(err, v.inner.Close(ctx))
}

// freeReceiver frees what who receives uses, unless somebody still does, perhaps
// the caller.
func (v *Van) freeReceiver(ctx context.Context) {
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for !v.rx.TryLock() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
	defer v.rx.Unlock()
	for _, l := range *v.ins.Load() {
		v.removeIn(l)
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.freeBell()
}

// stats counts without locks.
type stats struct {
	sentN, sentB, recvN, recvB, malformed atomic.Uint64
	pinned                                atomic.Int64
}

func (s *stats) sent(bytes int)     { s.sentN.Add(1); s.sentB.Add(uint64(bytes)) }
func (s *stats) received(bytes int) { s.recvN.Add(1); s.recvB.Add(uint64(bytes)) }

func (s *stats) add(o van.Stats) van.Stats {
	return van.Stats{SentMessages: o.SentMessages + s.sentN.Load(), SentBytes: o.SentBytes + s.sentB.Load(),
		ReceivedMessages: o.ReceivedMessages + s.recvN.Load(), ReceivedBytes: o.ReceivedBytes + s.recvB.Load(),
		Malformed: o.Malformed + s.malformed.Load(), Pinned: o.Pinned + uint64(s.pinned.Load())}
}
