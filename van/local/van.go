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
	"time"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/engine"
	"github.com/stepaf/stepaf-go/van/env"
)

// Van is a van whose data messages to peers of the same host go through memory.
type Van struct {
	inner van.Van
	cfg   *env.Config
	log   *slog.Logger

	backend  backend.Backend
	device   *device // nil when values on the node's device are not shared
	noDevice error   // then: why

	token    token
	off      bool // there is no link, and never will be
	listener *net.UnixListener
	bell     *bell
	bellFD   int

	id     atomic.Int32
	role   atomic.Int32
	recv   van.Receiver
	feed   *engine.Feed[*parcel]
	engine *engine.Engine

	// For tests.
	streamOnly  bool                     // as where reading other processes is forbidden
	memory      func(n int) (int, error) // newMemory
	dropTime    time.Duration            // dropTime
	relief      time.Duration            // relief
	maxSleep    time.Duration            // maxSleep
	looked      func()                   // called after the last look before a sleep
	leaveTime   time.Duration            // leaveTime
	unknownTime time.Duration            // unknownTime
	returnTime  time.Duration            // returnTime
	readers     func() (bool, error)     // admitReaders
	refuse      func() error             // what accepting fails with

	// What who receives uses: who holds the feed.
	turn   int
	chunks atomic.Uint64 // of streams, received
	ins    atomic.Pointer[[]*inLink]

	// Of copies by the device; see device.go.
	copying   atomic.Int32  // by this node's device, under way
	lent      atomic.Int32  // values that a peer's device copies
	copyUntil atomic.Uint64 // until when it pays to look for their end without pause
	tidied    uint64        // when mappings were last looked through; under rx

	links     atomic.Pointer[map[int]*outLink] // by node id
	outs      atomic.Pointer[[]*outLink]       // the same
	linked    atomic.Int32                     // peers with a link
	dialling  atomic.Int32                     // peers of which it is not settled whether they will have one
	elsewhere atomic.Int32                     // peers without one that send data

	admitted sync.Once // readers of this process, where that has to be said

	closing atomic.Bool // nothing is sent any more
	ctx     context.Context
	cancel  context.CancelFunc
	late    context.Context // ends when nothing more is to leave
	tooLate context.CancelFunc

	mu       sync.Mutex // guards changes of the above, and what follows
	started  bool
	closed   bool
	nodes    map[int]*neighbour
	peers    map[int]*peer
	greeted  map[*net.UnixConn]bool // connections of peers
	leaving  map[int]chan struct{}  // closed when what was sent has left
	replaced [][16]byte             // names of processes whose place others have taken
	wg       sync.WaitGroup
	losses   losses

	places *places
	blocks blocks
	afford int64 // bytes unsent to one peer
	pool   pool
	stats  stats
}

var (
	_ van.Van             = (*Van)(nil)
	_ van.Wrapper         = (*Van)(nil)
	_ van.PeerWatcher     = (*Van)(nil)
	_ van.Flusher         = (*Van)(nil)
	_ van.Meter           = (*Van)(nil)
	_ van.BufferRegistrar = (*Van)(nil)
	_ van.Revoker         = (*Van)(nil)
	_ van.Recaller        = (*Van)(nil)
	_ van.Advertiser      = (*Van)(nil)
	_ van.Admitter        = (*Van)(nil)
	_ van.PathChooser     = (*Van)(nil)
)

// New wraps inner, which must not have been bound. Where shared memory cannot be
// had, the van works as inner does, and the log says why. Use van.As to find the
// other abilities of inner.
func New(inner van.Van, o van.Options) *Van {
	v := &Van{inner: inner, cfg: o.Config, log: o.Log, backend: o.Backend, bellFD: -1,
		nodes: map[int]*neighbour{}, peers: map[int]*peer{}, greeted: map[*net.UnixConn]bool{}, places: newPlaces(), memory: newMemory, dropTime: dropTime, relief: relief, leaveTime: leaveTime, readers: admitReaders, maxSleep: maxSleep, unknownTime: unknownTime, returnTime: returnTime, leaving: map[int]chan struct{}{}, afford: int64(o.Config.SendBudget)}
	v.losses.current = func(id int, n *neighbour) bool {
		v.mu.Lock()
		defer v.mu.Unlock()
		return v.nodes[id] == n && !v.closed
	}
	v.ctx, v.cancel = context.WithCancel(context.Background())
	v.late, v.tooLate = context.WithCancel(context.Background())
	if v.log == nil {
		v.log = slog.New(slog.DiscardHandler)
	}
	v.ins.Store(&[]*inLink{})
	v.outs.Store(&[]*outLink{})
	v.links.Store(&map[int]*outLink{})
	v.id.Store(van.Empty)
	if o.Engine == nil {
		o.Engine = engine.New(o.Config.BusyPoll.Spin())
	}
	v.receiveWith(o.Engine)
	return v
}

// receiveWith makes v a source of e.
func (v *Van) receiveWith(e *engine.Engine) {
	v.engine = e
	v.feed = engine.NewFeed(e, memory{v}, engine.FeedOptions{Polls: true, Spins: true, HandsOver: true})
	v.limitReceived(v.cfg)
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
	if v.device, v.noDevice = openDevice(v.backend, v.token.name[:]); v.noDevice != nil && v.backend != nil && v.backend.Device().Type != backend.CPU {
		v.log.Warn("values on the device go through host memory, also on this host", "err", v.noDevice)
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
	v.inner.Start(func(m *van.Message) {
		if !m.Request && !m.Push && !m.IsControl() {
			v.places.answered(m.Sender, &m.Meta)
		}
		recv(m)
	})
	if start {
		v.feed.Start()
	}
}

// SetID implements van.Van.
func (v *Van) SetID(id int) {
	v.id.Store(int32(id))
	v.inner.SetID(id)
}

// Send implements van.Van.
func (v *Van) Send(msg *van.Message) error {
	if msg.IsControl() {
		return v.inner.Send(msg)
	}
	l := v.linkTo(msg.Receiver)
	if l == nil {
		err := v.inner.Send(msg)
		if errors.Is(err, van.ErrInvalid) && msg.Frames >= partVals && !msg.Vals.OnHost() {
			err = fmt.Errorf("%w: %w", err, backend.ErrNotExportable) // there has been a link a moment ago
		}
		return err
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
	var export *backend.Shared
	for i := range msg.Frames {
		f := msg.Frame(i)
		if f.OnHost() {
			continue
		}
		if i == partVals-1 && !l.device { // but that of the link before, perhaps
			return v.sendError(msg, fmt.Errorf("%w: the values lie on %s, want host memory: %w", van.ErrInvalid, f.Device(), backend.ErrNotExportable))
		}
		if i != partVals-1 {
			return v.sendError(msg, fmt.Errorf("%w: frame %d lies on %s, want host memory", van.ErrInvalid, i, f.Device()))
		}
		var err error
		if export, err = v.device.share(f, l.segments); err != nil {
			return v.sendError(msg, err)
		}
	}
	size := msg.PayloadLen()
	expects := v.places.expect(msg)
	sent, err := l.send(msg, export)
	if export != nil {
		v.device.unshare(export)
	}
	if !sent {
		if now := (*v.links.Load())[msg.Receiver]; now != l {
			if expects {
				v.places.drop(msg)
			}
			return v.Send(msg) // the link has been replaced in between, or given up
		}
		err = fmt.Errorf("%w: %w", van.ErrPeerLost, l.why())
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
	if l := v.linkTo(id); l != nil {
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
	ctx, cancel := context.WithTimeout(context.Background(), v.dropTime)
	defer cancel()
	if err := v.places.revoke(ctx, mem); err != nil {
		v.log.Error("a copy to memory that is taken back does not end", "bytes", mem.Len(), "err", err)
	}
	if r, ok := van.As[van.Revoker](v.inner); ok {
		r.Revoke(mem)
	}
}

// Recall implements van.Recaller.
func (v *Van) Recall(q van.Requests) {
	for _, l := range *v.outs.Load() {
		l.recall(&q)
	}
	if r, ok := van.As[van.Recaller](v.inner); ok {
		r.Recall(q)
	}
}

// SharedMemory is Path.Over of the peers that this van links.
const SharedMemory = "shared memory"

// PathTo implements van.PathChooser. A value on the device that cannot be named to other
// processes is refused with backend.ErrNotExportable, whatever Device says.
func (v *Van) PathTo(id int) van.Path {
	if l := v.linkTo(id); l != nil {
		return van.Path{Over: SharedMemory, Device: l.device}
	}
	return van.PathTo(v.inner, id)
}

// Stats implements van.Meter. It counts what goes over the van inside, too.
func (v *Van) Stats() van.Stats {
	s := van.Stats{}
	if m, ok := van.As[van.Meter](v.inner); ok {
		s = m.Stats()
	}
	s = v.stats.add(s)
	s.PausedReads += v.feed.Loop.Pauses()
	return s
}

// Close implements van.Van.
func (v *Van) Close(ctx context.Context) error {
	v.engine.EndPoll(ctx)
	v.mu.Lock()
	if v.closed || v.listener == nil {
		v.closed = true
		v.mu.Unlock()
		return v.inner.Close(ctx)
	}
	v.closed = true
	v.closing.Store(true)
	links, leaving, started := *v.links.Load(), slices.Collect(maps.Values(v.leaving)), v.started
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
	for _, left := range leaving {
		select {
		case <-left:
		case <-ctx.Done():
		}
	}
	v.tooLate()
	all.Wait()
	// The loop has been woken: it ends at once unless a receiver is at work, also when
	// there is no time left for that.
	stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTime)
	defer cancel()
	if ctx.Err() == nil {
		stop = ctx
	}
	var err error
	if started {
		if err = v.feed.Stop(stop); errors.Is(err, engine.ErrInDeliver) {
			err = nil
		}
	}
	v.mu.Lock()
	for c := range v.greeted {
		_ = c.Close()
	}
	v.mu.Unlock()
	v.wg.Wait()
	if err == nil {
		if v.feed.Free(stop, v.freeLinks) != nil {
			v.log.Warn("a Poll still receives: its memory is kept")
		}
	} else { // what it uses stays
		err = &van.Error{Op: "close", Node: van.NodeName(int(v.id.Load())), Detail: "a receiver still runs", Err: err}
	}
	v.blocks.close()
	if v.device != nil && err == nil {
		err = v.device.close()
	}
	return errors.Join(err, v.inner.Close(ctx))
}

const stopTime = 200 * time.Millisecond

// freeLinks ends all that is received. The feed is held.
func (v *Van) freeLinks() {
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
	refused                               atomic.Uint64 // values for which the device had no memory
	unsent                                atomic.Uint64 // messages refused because too much was unsent
	fenced                                atomic.Uint64 // messages dropped because their process was replaced
	pinned                                atomic.Int64
}

func (s *stats) sent(bytes int)     { s.sentN.Add(1); s.sentB.Add(uint64(bytes)) }
func (s *stats) received(bytes int) { s.recvN.Add(1); s.recvB.Add(uint64(bytes)) }

func (s *stats) add(o van.Stats) van.Stats {
	return van.Stats{SentMessages: o.SentMessages + s.sentN.Load(), SentBytes: o.SentBytes + s.sentB.Load(),
		ReceivedMessages: o.ReceivedMessages + s.recvN.Load(), ReceivedBytes: o.ReceivedBytes + s.recvB.Load(),
		Malformed: o.Malformed + s.malformed.Load(), Pinned: o.Pinned + uint64(s.pinned.Load()), PausedReads: o.PausedReads,
		RefusedSends: o.RefusedSends + s.unsent.Load(), FencedMessages: o.FencedMessages + s.fenced.Load()}
}
