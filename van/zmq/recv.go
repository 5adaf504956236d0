package zmq

import (
	"context"
	"errors"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/engine"
	"github.com/stepaf/stepaf-go/van/env"
)

var errDisconnected = errors.New("its connection was closed")

// receiver reads one socket and hands messages up.
type receiver struct {
	v      *zvan
	sock   *socket
	loop   *engine.Loop[*van.Message]
	spins  bool // looks for a while before it sleeps
	helped bool // Poll receives from this socket, too
	router bool // the socket is the ROUTER, else the DEALER of peer
	peer   *conn
	nap    *time.Timer
	recall chan struct{} // ends a nap
	hot    bool          // a message has come lately
	next   *van.Message
	err    error
	turn   bool // a message that was kept is ready
	try    func(uintptr) bool
	lanes  *lanes
	pool   pool

	// mu is held by who receives from the socket: the loop, or a Poll, which holds
	// it while it delivers, too. missed says that the loop was kept from looking.
	mu     sync.Mutex
	missed atomic.Bool
	away   bool         // Polls are under way: do not sleep on the descriptor
	parked atomic.Bool  // the loop sleeps on the descriptor, or is about to
	inHand atomic.Int32 // messages that the loop has received and not delivered
}

func newReceiver(v *zvan, s *socket, peer *conn, spins, helped bool) *receiver {
	r := &receiver{v: v, sock: s, router: peer == nil, peer: peer, lanes: new(lanes), spins: spins && v.spin > 0, helped: helped,
		nap: time.NewTimer(time.Hour), recall: make(chan struct{}, 1)}
	r.try = func(uintptr) bool {
		r.away = r.helped && v.polling()
		return r.away || r.poll(0, true)
	}
	if r.router {
		r.lanes = &v.senders
	}
	r.loop = engine.NewLoop(r.receive, r.deliver)
	r.loop.Discard = func(msg *van.Message) {
		r.inHand.Add(-1)
		r.done(msg)
	}
	r.loop.Weight = func(msg *van.Message) int { n, _ := weight(msg); return int(n) }
	r.loop.Budget = v.flow.budget(r.router)
	v.flow.watch(r.loop)
	return r
}

// spinTime is how long to look for a message before sleeping: waking a sleeper
// costs more than a small message. The looker yields to others meanwhile.
func spinTime(b env.BusyPoll) time.Duration {
	if b == env.AlwaysBlock {
		return 0
	}
	return 100 * time.Microsecond
}

// stop ends the loop and waits for the handler that may be running.
func (r *receiver) stop(ctx context.Context) {
	r.sock.stop()
	if r.loop.Stop(ctx) == nil && r.next != nil {
		r.pool.Free(r.next)
		r.next = nil
	}
	r.pool.close()
}

// poll tries to receive into r.next. It returns true when there is a message or
// an error.
func (r *receiver) poll(spin time.Duration, park bool) bool {
	if r.router && r.v.early.n.Load() > 0 {
		r.turn = true
		return true
	}
	if !r.mu.TryLock() {
		// The holder looks at missed after it has unlocked.
		r.missed.Store(true)
		if f := testMissed.Load(); f != nil {
			(*f)()
		}
		if !r.mu.TryLock() {
			return false
		}
	}
	defer r.mu.Unlock()
	ok, err := r.sock.recv((*frames)(r.next.Native()), spin, park, r.v.lent)
	r.err = err
	if ok {
		r.inHand.Add(1)
	}
	return ok || err != nil
}

// testMissed, if not nil, is called by a loop that was kept from looking, between its two
// tries.
var testMissed atomic.Pointer[func()]

// receive blocks until a well-formed message has come.
func (r *receiver) receive() (*van.Message, *lane, bool) {
	for {
		if r.router {
			if msg := r.v.early.next(); msg != nil {
				r.inHand.Add(1)
				return msg, r.lanes.of(msg.Sender).of(msg), true
			}
		}
		if r.next == nil {
			r.next = r.pool.get()
		}
		if !r.await() {
			return nil, nil, false
		}
		if r.turn {
			r.turn = false
			continue
		}
		if r.err != nil {
			if r.sock.closed.Load() {
				return nil, nil, false
			}
			r.v.log.Warn("receive failed", "err", r.err)
			continue
		}
		msg := r.next
		what := r.accept(msg)
		if what != deliver {
			r.inHand.Add(-1)
			if what == kept {
				r.next = nil
			}
			continue
		}
		r.next = nil
		return msg, r.lanes.of(msg.Sender).of(msg), true
	}
}

// What accept makes of received frames.
type verdict int

const (
	nothing verdict = iota // there is nothing to deliver, and msg is empty
	kept                   // msg has another owner now
	deliver                // msg is to be delivered
)

// accept turns received frames into a message.
func (r *receiver) accept(msg *van.Message) verdict {
	f := (*frames)(msg.Native())
	now := clock.Now()
	name, c := r.senderOf(f)
	probe := r.router && f.probe()
	var err error
	mark := byte(markSent)
	if !probe {
		mark, err = parse(msg, f, name.incarnation != 0)
	}
	member := c != nil && c.isOf(name)
	if r.router && (!member || !c.seen.Load()) {
		var who *conn
		if member {
			who = c
		}
		r.v.guard.heard(f.source(), f.wire(), name, who)
	}
	switch {
	case err != nil:
		r.v.malformed(err, f)
	case !msg.IsControl() && r.fenced(c, name):
		r.v.fenced(name, f)
	case mark == markRecalled:
		r.v.log.Debug("dropped a message that was given up while it was being sent", "from", van.NodeName(name.id), "timestamp", msg.Timestamp)
	case probe, member && msg.Control.Cmd == van.Heartbeat && r.v.noticed(c, msg.Body):
	default:
		return r.take(msg, f, now, name, c, member)
	}
	r.pool.clear(msg)
	return nothing
}

// take takes a message of the node that calls itself name, for which c is the
// connection, and which is a member.
func (r *receiver) take(msg *van.Message, f *frames, now uint64, name peerName, c *conn, member bool) verdict {
	msg.Sender = name.id
	if msg.Request {
		msg.RequestTrace.PostRecv = now
	} else {
		msg.ResponseTrace.PostRecv = now
	}
	msg.Receiver = int(r.v.id.Load())
	size := f.dataLen(msg.Frames)
	r.v.stats.received(size)
	kind := ofStranger
	switch {
	case !r.router:
		kind = ofServer
	case member:
		kind = ofMember
	}
	f.setWeight(size+messageCost, kind)
	if !r.v.flow.arrived(msg) {
		r.pool.clear(msg)
		return nothing
	}
	msg.Adopt(&r.pool, msg.Native())
	if r.router && c != nil && !msg.IsControl() && (!member || r.v.early.n.Load() > 0) && !failpoint.On("incarnation") &&
		r.v.early.keep(r.v, msg, name) {
		return kept
	}
	return deliver
}

// senderOf reads who sent a message, and finds the connection to the node that has that
// id, if there is one.
func (r *receiver) senderOf(f *frames) (peerName, *conn) {
	name := peerName{id: van.Empty}
	if f.len() > 0 {
		name = nameOf(f.bytes(0))
	}
	if !r.router {
		return name, r.peer
	}
	if name.id == van.Empty {
		return name, nil
	}
	return name, (*r.v.peers.Load())[name.id]
}

// fenced tells whether data that calls itself name's is not to be heard: another process
// has taken its place, or, on the connection that this node has made to c, it is
// another's. Control messages say themselves which process sends them, and the rules of
// the cluster judge that: a process that was replaced is told so.
func (r *receiver) fenced(c *conn, name peerName) bool {
	if c == nil || failpoint.On("incarnation") {
		return false
	}
	if r.router {
		return name.incarnation != 0 && name.incarnation == c.before
	}
	return name != peerName{c.who.Load().id, c.incarnation}
}

// await looks for a message for a while if one has come lately, then sleeps until
// there is one.
func (r *receiver) await() bool {
	if r.spins && r.hot && !r.v.busy() && r.look() {
		return true
	}
	// While callers poll, a sleeper on the descriptor would be woken for each of
	// their messages. It looks now and then instead, for what nobody waits for.
	for {
		r.parked.Store(true) // before try asks whether somebody polls
		r.hot = r.sock.wait(r.try)
		r.parked.Store(false)
		if !r.hot || !r.away {
			return r.hot
		}
		r.nap.Reset(pollGrace)
		select {
		case <-r.nap.C:
		case <-r.recall:
		}
		if r.poll(0, true) {
			return true
		}
	}
}

// look receives without sleeping for a while, unless others do.
func (r *receiver) look() (found bool) {
	if r.helped && r.v.polling() || !r.v.spinning.CompareAndSwap(false, true) {
		return false
	}
	defer r.v.spinning.Store(false)
	const slices = 4 // a Poll need not wait longer than one of them
	for i := 0; i < slices && !found && !r.sock.closed.Load(); i++ {
		if r.v.pollers.Load() > 0 {
			return false // it sleeps instead, or naps if the Poll is for its socket, too
		}
		found = r.poll(r.v.spin/slices, false)
		if r.v.cfg.BusyPoll == env.SpinForever {
			i = 0
		}
	}
	return found
}

// bulk is the number of bytes, sent or received since the last look, that take
// longer than it pays to look for what comes next: the processors have them to
// copy.
const bulk = 256 << 10

// busy tells whether much has been sent or received since it was last called.
func (v *zvan) busy() bool {
	n := v.stats.sentB.Load() + v.stats.recvB.Load()
	return v.cfg.BusyPoll != env.SpinForever && n-v.moved.Swap(n) > bulk
}

// maxPoll bounds a Poll: its caller has a deadline.
const maxPoll = time.Millisecond

// pollGrace is how long after a Poll another one is expected.
const pollGrace = time.Millisecond

// polling tells whether somebody polls, or has done so a moment ago.
func (v *zvan) polling() bool {
	return v.pollers.Load() > 0 || clock.Now()-v.polled.Load() < uint64(pollGrace)
}

// Poll receives and delivers on the caller's goroutine what comes to a worker from
// its servers, or to a server from its workers, until done or until nothing has
// come for a while. It saves the one who waits from being woken. Only one caller at
// a time polls; others return at once.
func (v *zvan) Poll(done func() bool) {
	if v.spin <= 0 || v.busy() {
		return
	}
	v.pollers.Add(1)
	begun := clock.Now()
	for !v.spinning.CompareAndSwap(false, true) {
		// Another Poll, or the loop, which makes room.
		if v.pollers.Load() > 1 || clock.Now()-begun > uint64(v.spin) {
			v.pollers.Add(-1)
			return
		}
		runtime.Gosched()
	}
	rs := *v.helped.Load()
	defer func() {
		v.pollers.Add(-1)
		if done() {
			v.polled.Store(clock.Now())
			v.spinning.Store(false)
			return
		}
		// The caller goes to sleep: the loops take over at once.
		v.polled.Store(0)
		v.spinning.Store(false)
		for _, r := range rs {
			select {
			case r.recall <- struct{}{}:
			default:
			}
		}
	}()
	for _, r := range rs {
		// A Poll takes what would wake a sleeper, and may leave messages behind, so
		// the loop must not sleep on the descriptor from now on.
		if r.parked.Load() {
			r.sock.wake()
		}
	}
	for start := clock.Now(); !done(); {
		got := false
		for _, r := range rs {
			got = r.help(v.spin/time.Duration(8*len(rs)*len(rs))) || got
		}
		if got {
			start = clock.Now()
		}
		if now := clock.Now(); len(rs) == 0 || now-start > uint64(v.spin) || now-begun > uint64(maxPoll) {
			return
		}
	}
}

// help receives and delivers one message in place of the loop.
func (r *receiver) help(spin time.Duration) bool {
	if !r.mu.TryLock() {
		return false
	}
	got := r.helpLocked(spin)
	r.mu.Unlock()
	if r.missed.Swap(false) {
		r.sock.wake()
	}
	return got
}

func (r *receiver) helpLocked(spin time.Duration) bool {
	if r.sock.closed.Load() || r.inHand.Load() != 0 || r.router && r.v.early.n.Load() > 0 {
		return false // an earlier message is still being delivered
	}
	msg := r.pool.get()
	ok, err := r.sock.recv((*frames)(msg.Native()), spin, false, r.v.lent)
	if err != nil || !ok {
		r.pool.Free(msg)
		return false
	}
	switch r.accept(msg) {
	case kept:
		return false
	case nothing:
		r.pool.Free(msg)
		return false
	}
	r.v.recv(msg)
	r.done(msg)
	return true
}

func (r *receiver) deliver(msg *van.Message, turn *engine.Turn) {
	msg.Turn = turn
	r.v.recv(msg)
	r.done(msg)
	r.inHand.Add(-1)
}

// done gives up a message that was delivered, or never will be.
func (r *receiver) done(msg *van.Message) {
	r.v.flow.left(msg)
	msg.Release()
}

// parse checks the frames of a message and decodes them into msg. Frame 0 names
// the sender, frame 1 is the meta, the rest is data, and, in requests of nodes of this
// library, native, perhaps a mark.
func parse(msg *van.Message, f *frames, native bool) (mark byte, err error) {
	n := f.len()
	if n < 2 || f.excess() > 0 {
		return 0, &van.FieldError{Field: "frames", Value: n + f.excess(), Want: "a sender, a meta, and up to 3 data frames"}
	}
	if err := van.DecodeMeta(f.bytes(1), &msg.Meta); err != nil {
		return 0, err
	}
	data := n - 2
	if native && msg.Request && !msg.IsControl() {
		if data, mark, err = takeMark(f, data); err != nil {
			return 0, err
		}
	}
	if data == 1 || data > van.MaxFrames {
		return 0, &van.FieldError{Field: "data frames", Value: data, Want: "0, 2 or 3"}
	}
	msg.Frames = data
	for i := range data {
		msg.SetFrame(i, f.mem(i+2))
	}
	return mark, nil
}

// malformed counts and reports nonsense from the network: the 1st, 2nd, 4th, ...
// so that a flood of it does not become a flood of lines.
func (v *zvan) malformed(err error, f *frames) {
	n := v.stats.malformed.Add(1)
	if n&(n-1) != 0 {
		return
	}
	from := "unknown"
	if f.len() > 0 {
		from = strconv.QuoteToASCII(string(f.bytes(0)))
	}
	v.log.Warn("dropped a malformed message", "err", err, "from", from, "frames", f.len(), "dropped so far", n)
}

// fenced counts and reports messages of processes that have been replaced, like
// malformed.
func (v *zvan) fenced(name peerName, f *frames) {
	if n := v.stats.stale.Add(1); n&(n-1) == 0 {
		v.log.Warn("dropped a message of a process that was replaced", "from", strconv.QuoteToASCII(string(f.bytes(0))), "as", van.NodeName(name.id), "dropped so far", n)
	}
}

type lane = engine.Lane[*van.Message]

// lanes gives each sender its lane. Senders without an id share one.
type lanes struct {
	m sync.Map // int to *sender
}

func (l *lanes) of(id int) *sender {
	if p, ok := l.m.Load(id); ok {
		return p.(*sender)
	}
	s := &sender{id: id}
	s.lane.ID, s.control.ID = id, id
	p, _ := l.m.LoadOrStore(id, s)
	return p.(*sender)
}

// pool reuses messages together with their memory in C.
type pool struct {
	mu     sync.Mutex
	free   []*van.Message
	closed bool
}

// poolCap bounds what an idle receiver keeps.
const poolCap = 256

func (p *pool) get() *van.Message {
	p.mu.Lock()
	defer p.mu.Unlock()
	if n := len(p.free); n > 0 {
		m := p.free[n-1]
		p.free = p.free[:n-1]
		return m
	}
	m := &van.Message{}
	m.Adopt(p, unsafe.Pointer(newFrames()))
	return m
}

// Free takes back a message that nobody holds any more.
func (p *pool) Free(m *van.Message) {
	p.clear(m)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || len(p.free) >= poolCap {
		(*frames)(m.Native()).free()
		return
	}
	p.free = append(p.free, m)
}

// clear makes m empty, so that it can be received into.
func (p *pool) clear(m *van.Message) {
	f := (*frames)(m.Native())
	f.release()
	m.Reset()
	m.Adopt(p, unsafe.Pointer(f))
}

// close frees what the pool holds; messages still held elsewhere free themselves.
func (p *pool) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	for _, m := range p.free {
		(*frames)(m.Native()).free()
	}
	p.free = nil
}

// stats counts without locks.
type stats struct {
	sentN, sentB, recvN, recvB, malformed, stale, strangers, refused, paused atomic.Uint64
}

func (s *stats) sent(bytes int)     { s.sentN.Add(1); s.sentB.Add(uint64(bytes)) }
func (s *stats) received(bytes int) { s.recvN.Add(1); s.recvB.Add(uint64(bytes)) }
func (s *stats) get() van.Stats {
	return van.Stats{SentMessages: s.sentN.Load(), SentBytes: s.sentB.Load(), ReceivedMessages: s.recvN.Load(),
		ReceivedBytes: s.recvB.Load(), Malformed: s.malformed.Load(),
		PausedReads: s.paused.Load(), RefusedSends: s.refused.Load(), Strangers: s.strangers.Load(), FencedMessages: s.stale.Load()}
}
