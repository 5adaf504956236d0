package rdma

import (
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
	"github.com/stepaf/stepaf-go/van/rendezvous"
)

// incoming is a connection that a peer has opened to this node.
type incoming struct {
	v      *rvan
	serial uint32
	hello  hello // of its first queue pair
	key    string
	from   netip.AddrPort
	host   *device
	once   sync.Once
	gone   atomic.Bool
	// foreign is set while its process is not the one that the table names: a newer one, of
	// which this node has not heard yet.
	foreign atomic.Bool
	probed  atomic.Uint64 // when something empty was last written to it
	old     atomic.Uint64 // since when there is a newer one of the same process
	stands  atomic.Bool   // its opener knows that it stands, as far as can be told

	// Of who has the receiving role.
	slaves uint64 // notifications of split messages' other parts
	held   []*rxMsg
	holds  atomic.Bool // len(held) > 0
	lanes  [2]*lane    // of its messages, once known: data's, and control messages'
	over   int64       // bytes that the last question was over the peer's budget

	flushed atomic.Int32  // receive requests that have ended
	drained chan struct{} // closed when all have

	mu       sync.Mutex
	out      *pipe // for answers to questions, and credits
	ids      []verbs.ID
	qps      []verbs.QP
	accepted int         // of them
	waits    *time.Timer // for the others of a node of the original
	leases   map[rendezvous.Route][]*lease
	areas    map[uint64]*area // of a node of the original, by key
	cells    cells            // for metas: what one peer may write to, no other may
	suspect  struct {         // a place to which a node of the original has written while a message lay there
		lease *lease
		key   uint64
		since uint64
	}
	warned  bool // that it has overwritten a value in use
	credits []uint16
	since   uint64        // when the oldest of them came
	backlog []note        // what found no room
	later   [2][]question // that wait for a place: of control messages, and others
	wanted  struct {      // places that the peer is asked to give back
		at, since uint64 // when it was last asked, and first without an answer
	}
	closed   bool
	owed     atomic.Int32 // len(credits)
	bytes    atomic.Int64 // registered for it
	oneShots atomic.Int32 // places for control messages
	doubts   atomic.Bool  // suspect.lease is not nil
	stalled  atomic.Bool  // what it has sent waits for its handler, and is too much
}

// note is a SEND that waits for room.
type note struct {
	imm  uint32
	n    int
	data [verbs.RecvSize]byte
}

type lease = rendezvous.Lease[memory]

// memory is a lease's.
type memory struct {
	meta   cell
	data   backend.Mem
	area   *area   // that data lies in
	region *region // of a registered receive buffer
	bytes  int     // registered for meta
}

// area is memory for values that several leases may share: those of one key of a
// node of the original.
type area struct {
	*block
	host *device
	refs atomic.Int32
	of   *incoming // for whom it was registered; nil in tests
}

// accept takes a connect request.
func (v *rvan) accept(ev verbs.Event) {
	id := ev.New
	h, err := decodeHello(ev.Private)
	why := ""
	switch {
	case err != nil:
		why = err.Error()
	case v.closed.Load():
		why = "the node is closing"
	case h.ours && v.isReplaced(h.incarnation):
		v.log.Warn("rdma: rejected a process that has been replaced", "from", ev.Peer, "node", van.NodeName(h.node))
		_ = id.Reject(refusalOf(codeReplaced, van.NodeName(h.node)+" is another process by now, this one has been replaced"))
		_ = id.Destroy()
		return
	case h.ours && h.qpCount != v.cfg.QPNum:
		why = fmt.Sprintf("STEPAF_QP_NUM is %d here and %d there", v.cfg.QPNum, h.qpCount)
	}
	if why != "" {
		v.log.Warn("rdma: rejected a connection", "from", ev.Peer, "node", h.node, "why", why)
		_ = id.Reject(refusal(why))
		_ = id.Destroy()
		return
	}
	in, err := v.endpoint(h, id, ev.Peer)
	if err == nil {
		err = in.join(id, h)
	}
	if err != nil {
		v.log.Warn("rdma: could not accept a connection", "from", ev.Peer, "node", h.node, "err", err)
		_ = id.Reject(refusal(err.Error()))
		_ = id.Destroy()
		if in != nil {
			in.fail(err)
		}
	}
}

// endpoint finds or makes the incoming connection that a queue pair belongs to.
func (v *rvan) endpoint(h hello, id verbs.ID, from netip.AddrPort) (*incoming, error) {
	key := h.key() + " from " + from.Addr().String() // the host's name may be cut off
	v.mu.Lock()
	old := v.endpoints[key]
	v.mu.Unlock()
	if old != nil && !old.gone.Load() && len(old.qps) < v.cfg.QPNum {
		return old, nil // connect requests may overtake each other
	}
	if old != nil {
		if h.ours { // the key has the connection's epoch
			return nil, fmt.Errorf("queue pair %d: %w: the connection has ended, or is complete", h.qp, van.ErrPeerLost)
		}
		// The peer has come again before its end was noticed, which is said when the new
		// connection is known.
		defer old.fail(fmt.Errorf("%w: it has connected again", van.ErrPeerLost))
	}
	dev, err := id.Device()
	if err != nil {
		return nil, err
	}
	host, err := v.device(dev)
	if err != nil {
		return nil, err
	}
	in := &incoming{v: v, serial: v.serials.Add(1), hello: h, key: key, from: from, host: host, drained: make(chan struct{}), cells: cells{dev: dev},
		leases: map[rendezvous.Route][]*lease{}, areas: map[uint64]*area{}}
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.closed.Load() {
		return nil, van.ErrClosed
	}
	for _, x := range v.endpoints {
		if h.ours && x.hello.ours && x.hello.node == h.node && x.hello.incarnation == h.incarnation && x.hello.port == h.port && x.hello.host == h.host {
			x.old.CompareAndSwap(0, max(clock.Now(), 1)) // it may carry the last of what was sent
		}
	}
	in.probed.Store(clock.Now())
	v.endpoints[key] = in
	v.judgeLocked()
	v.rememberConnLocked(in.serial, &conn{in: in})
	return in, nil
}

// join adds a queue pair and accepts it.
func (in *incoming) join(id verbs.ID, h hello) error {
	v, q := in.v, len(in.qps)
	dev, err := id.Device()
	if err != nil {
		return err
	}
	if dev != in.host.dev {
		return fmt.Errorf("queue pair %d came to device %s, the others to %s", q, dev.Name(), in.host.dev.Name())
	}
	c := cookie(in.serial, q)
	id.SetCookie(c)
	qp, err := v.createQP(id, dev, c, q, false)
	if err != nil {
		return err
	}
	_, rx := v.cfg.RDMADepths()
	in.mu.Lock()
	if in.gone.Load() {
		err = fmt.Errorf("%w meanwhile", van.ErrClosed) // endIncoming has looked at in.ids
	} else if in.out == nil {
		in.out, err = newPipe(dev, []verbs.QP{qp}, in.serial, rx, rx, verbs.RecvSize)
	}
	if err == nil {
		in.ids, in.qps = append(in.ids, id), append(in.qps, qp)
	}
	in.mu.Unlock()
	if err != nil {
		v.release(dev)
		return err
	}
	if !h.ours && q+1 < v.cfg.QPNum {
		// The original counts the routes that it has resolved and the answers with one
		// counter: an answer that comes before all its queue pairs have asked makes it wait
		// for ever.
		in.mu.Lock()
		if in.waits == nil {
			in.waits = time.AfterFunc(v.times.allAsk, in.acceptAll)
		}
		in.mu.Unlock()
		return nil
	}
	in.acceptAll()
	return nil
}

// acceptAll accepts the queue pairs that have asked.
func (in *incoming) acceptAll() {
	v, h := in.v, &in.hello
	in.mu.Lock()
	first := in.accepted == 0
	var failed error
	for failed == nil && in.accepted < len(in.ids) && !in.gone.Load() && !in.closed {
		mine := v.hello(h.epoch)
		mine.qp = in.accepted
		failed = in.ids[in.accepted].Accept(verbs.ConnParam{Private: mine.encode(), RetryCount: retryCount, RNRRetryCount: rnrRetryCount})
		in.accepted++
	}
	in.mu.Unlock()
	if failed != nil {
		in.fail(failed) // ends the IDs
		return
	}
	if first {
		v.log.Info("rdma: accepted", "node", h.node, "host", h.host, "port", h.port, "device", in.host.dev.Name(), "stepaf", h.ours)
		v.linkBack()
	}
}

// fail ends the connection.
func (in *incoming) fail(err error) {
	in.once.Do(func() {
		in.gone.Store(true)
		p := (*in.v.peers.Load())[in.hello.node]
		if p != nil && p.back.Load() != in {
			p = nil
		}
		in.v.wg.Go(func() { in.v.endIncoming(in, p, err) })
	})
}

// send posts b with imm on the connection's first queue pair. in.mu is held.
func (in *incoming) send(imm uint32, b []byte) {
	if in.closed || in.out == nil {
		return
	}
	n := note{imm: imm, n: len(b)}
	copy(n.data[:], b)
	if len(in.backlog) > 0 || !in.try(&n) {
		if len(in.backlog) >= maxIndex {
			in.fail(fmt.Errorf("%w: it does not take %d answers", van.ErrMalformed, maxIndex))
			return
		}
		in.backlog = append(in.backlog, n)
	}
}

func (in *incoming) try(n *note) bool {
	id, _, stage, ok := in.out.begin()
	if !ok {
		return in.out.broken // the message is lost with the connection
	}
	copy(stage, n.data[:n.n])
	in.out.add(id, 0, in.out.staged(verbs.SendWR{Op: verbs.OpSendImm, Flags: verbs.Signaled, Imm: n.imm}, stage[:n.n]))
	if err := in.out.post(); err != nil {
		in.fail(asLost(err))
	}
	return true
}

// pump sends what has waited for room. in.mu is held.
func (in *incoming) pump() {
	for len(in.backlog) > 0 && in.try(&in.backlog[0]) {
		in.backlog = in.backlog[1:]
	}
	if len(in.backlog) == 0 {
		in.backlog = nil
	}
}

// credit gives a place back to the peer: with the next message to it, or soon.
func (in *incoming) credit(l *lease) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.closed || !in.hello.ours || l == nil || in.v.table.Get(l.Index()) != l {
		return
	}
	if len(in.credits) == 0 {
		in.since = clock.Now()
	}
	in.credits = append(in.credits, uint16(l.Index()))
	in.owed.Store(int32(len(in.credits)))
	if len(in.credits) >= maxCredits || in.host.parked.Load() {
		in.giveBack()
	}
}

// take moves credits to t, which r carries.
func (in *incoming) take(t *trailer, r *record) {
	t.epoch = in.hello.epoch
	if in.owed.Load() == 0 {
		return
	}
	in.mu.Lock()
	t.n = copy(t.credits[:], in.credits)
	in.credits = in.credits[:copy(in.credits, in.credits[t.n:])]
	in.owed.Store(int32(len(in.credits)))
	r.back, r.given = in, t.n
	for i, index := range t.credits[:t.n] {
		r.credits[i] = in.v.table.Get(uint32(index))
	}
	in.mu.Unlock()
}

// giveBack sends the credits. in.mu is held.
func (in *incoming) giveBack() {
	for len(in.credits) > 0 {
		var t trailer
		t.epoch = in.hello.epoch
		t.n = copy(t.credits[:], in.credits)
		in.credits = in.credits[:copy(in.credits, in.credits[t.n:])]
		var b [trailerLen]byte
		t.put(b[:])
		in.send(immCredits, b[:])
	}
	in.owed.Store(0)
}

// creditAge is how long credits wait for a message that takes them along.
const creditAge = 1e6 // ns

// tick is called every few milliseconds, and before the receiver sleeps (all). It tells
// whether credits had to be sent alone.
func (in *incoming) tick(now uint64, all bool) (gave bool) {
	if in.owed.Load() > 0 {
		in.mu.Lock()
		if gave = all || now-in.since > creditAge; gave {
			in.giveBack()
		}
		in.mu.Unlock()
	}
	if in.doubts.Load() {
		in.clear(now)
	}
	if since := in.old.Load(); since != 0 && now-since > uint64(oldTime) {
		in.fail(fmt.Errorf("%w: it has connected again", van.ErrPeerLost))
	}
	if in.hello.ours && now-in.probed.Load() > uint64(probeTime) && !failpoint.On("rdma-reclaim") {
		in.probed.Store(now)
		in.mu.Lock()
		in.probe()
		in.mu.Unlock()
	}
	return gave
}

// overwritten notes that a message has come to a place where another one lies. That one may
// have been answered, and be about to be let go.
func (in *incoming) overwritten(l *lease, key uint64) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if !in.warned && in.suspect.lease == nil {
		in.suspect.lease, in.suspect.key, in.suspect.since = l, key, clock.Now()
		in.doubts.Store(true)
	}
}

// clear warns if the place has had two messages for a while.
func (in *incoming) clear(now uint64) {
	in.mu.Lock()
	defer in.mu.Unlock()
	x := &in.suspect
	switch {
	case x.lease == nil:
		return
	case x.lease.Holders() < 2:
	case now-x.since < uint64(in.v.times.letGo):
		return
	default:
		in.warned = true
		in.v.log.Warn("rdma: a peer has overwritten a value that is still in use: over RDMA a node of the C++ library may use a key again once it has its answer",
			"peer", in.name(), "key", x.key)
	}
	x.lease = nil
	in.doubts.Store(false)
}

// oldTime is how long a connection may stand when its process has made a newer one.
const oldTime = 2 * time.Second

// probe writes nothing to the peer: one that has gone without a word shows only in what
// is sent to it. in.mu is held.
func (in *incoming) probe() {
	if in.closed || in.out == nil || !in.out.idle() {
		return
	}
	if id, _, _, ok := in.out.begin(); ok {
		in.out.add(id, 0, verbs.SendWR{Op: verbs.OpWrite, Flags: verbs.Signaled | verbs.Inline})
		if err := in.out.post(); err != nil {
			in.fail(asLost(err))
		}
	}
}

func (in *incoming) name() string {
	return fmt.Sprintf("%s at %s:%d", van.NodeName(in.hello.node), in.hello.host, in.hello.port)
}

// endIncoming takes apart a connection: what has come is handed up, then its places
// end. p is the peer whose own connection it is, or nil.
func (v *rvan) endIncoming(in *incoming, p *peer, cause error) {
	if cause != nil && !v.closed.Load() {
		v.log.Info("rdma: a peer's connection ended", "peer", in.name(), "why", cause)
	}
	if l := p.current(); l != nil {
		defer p.halve(l, cause)
	}
	in.mu.Lock()
	ids, accepted := in.ids, in.accepted
	if in.waits != nil {
		in.waits.Stop()
	}
	in.mu.Unlock()
	for _, id := range ids {
		_ = id.Disconnect()
	}
	if accepted > 0 {
		in.host.awaitFlush(in)
	}
	in.host.dropHeld(in)
	in.mu.Lock()
	in.closed = true
	areas, out, qps := in.areas, in.out, len(in.qps)
	in.leases, in.areas, in.later, in.credits = nil, nil, [2][]question{}, nil
	in.owed.Store(0)
	in.mu.Unlock()
	for _, id := range ids {
		_ = id.Destroy()
	}
	for range qps {
		v.release(in.host.dev)
	}
	v.forgetConn(in.serial)
	v.mu.Lock()
	if v.endpoints[in.key] == in {
		delete(v.endpoints, in.key)
	}
	again := false
	for _, x := range v.endpoints {
		again = again || x.hello.node == in.hello.node && !x.gone.Load()
	}
	v.mu.Unlock()
	v.unlinkBack(in)
	if p := (*v.peers.Load())[in.hello.node]; p != nil && !in.hello.ours {
		p.unanswered(again)
	}
	in.host.exclusive(func() {
		v.table.Each(func(l *lease) {
			if l.Owner == in && v.table.End(l) {
				in.free(l)
			}
		})
	})
	in.host.dropHeld(in) // what has come since
	for _, a := range areas {
		a.put()
	}
	if err := in.cells.close(); err != nil {
		v.log.Error("rdma: memory for metas stays registered", "peer", in.name(), "err", err)
	}
	if out != nil {
		in.mu.Lock()
		all := out.abandon()
		in.mu.Unlock()
		for i := range all {
			all[i].end()
		}
		_ = out.close()
	}
}
