package zmq

import (
	"context"
	"errors"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/internal/hostaddr"
	"github.com/stepaf/stepaf-go/internal/logx"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/engine"
)

var errDisconnected = errors.New("its connection was closed")

// receiver reads one socket and hands messages up. It is the engine's source for that socket.
// The holder of the feed owns its fields, except where noted.
type receiver struct {
	in      *intake
	sock    *socket
	feed    *engine.Feed[*van.Message]
	router  bool  // the socket is the ROUTER, else the DEALER of peer
	peer    *conn // constant, read by all goroutines
	next    *van.Message
	came    bool         // next was received while the source was armed
	inHand  atomic.Int32 // messages that the loop has received and not delivered
	failing logx.Sparse
	lanes   *lanes
	pool    pool
}

func newReceiver(in *intake, s *socket, peer *conn, spins, polls bool) *receiver {
	r := &receiver{in: in, sock: s, router: peer == nil, peer: peer, lanes: new(lanes)}
	budget := in.flow.dealers
	if r.router {
		r.lanes, budget = &in.flow.senders, in.flow.router
	}
	r.lanes.hand = &r.inHand
	r.next = r.pool.get()
	r.feed = engine.NewFeed(in.engine, r, engine.FeedOptions{Polls: polls, Spins: spins, Busy: in.busy, DetectsBusyCores: true})
	r.feed.Loop.Weight = func(msg *van.Message) int { n, _ := weight(msg); return int(n) }
	r.feed.Loop.Budget = budget
	r.feed.Loop.Paused = func(l *lane, bytes int64) { in.flow.paused(r.lanes.of(l.ID), l, bytes) }
	return r
}

// stop ends the loop and waits for a running handler. It returns ctx's error if the handler runs longer.
func (r *receiver) stop(ctx context.Context) error {
	r.sock.stop()
	err := r.feed.Stop(ctx)
	// After Stop no goroutine receives into next, even if a handler of the loop still runs.
	err = errors.Join(err, r.feed.Free(ctx, func() { r.pool.Free(r.next) }))
	r.pool.close()
	return err
}

// Take implements engine.Source.
func (r *receiver) Take(slice time.Duration, poll bool) (*van.Message, *lane, engine.PollResult) {
	early := r.router && r.in.early.count.Load() > 0
	if poll && (early || r.inHand.Load() != 0) {
		return nil, nil, engine.Nothing // an earlier message is still being delivered
	}
	if early {
		if msg := r.in.early.next(); msg != nil {
			return msg, r.lanes.of(msg.Sender).of(msg), engine.Message
		}
	}
	if !r.came && !r.recv(slice, false) {
		return nil, nil, engine.Nothing
	}
	r.came = false
	msg := r.next
	if !r.accept(msg) {
		return nil, nil, engine.Progress
	}
	return msg, r.lanes.of(msg.Sender).of(msg), engine.Message
}

// recv receives into r.next. It spins for spin at most. With park, the socket's descriptor
// signals the next message.
func (r *receiver) recv(spin time.Duration, park bool) bool {
	if r.sock.closed.Load() {
		return false
	}
	ok, err := r.sock.recv((*frames)(r.next.Native()), spin, park)
	if err != nil && !r.sock.closed.Load() {
		if n, speak := r.failing.Next(); speak {
			r.in.n.log.Warn("receive failed", "err", err, "so far", n)
		}
	}
	if r.router && r.in.flow.drained.Load() == ok {
		r.in.flow.drained.Store(!ok)
	}
	return ok && err == nil
}

// Arm implements engine.Source.
func (r *receiver) Arm(engine.Sleeper) bool {
	r.came = r.came || r.recv(0, true)
	return r.came || r.router && r.in.early.count.Load() > 0
}

// Disarm implements engine.Source.
func (r *receiver) Disarm() {}

// Sleep implements engine.Source.
func (r *receiver) Sleep(_ engine.Sleeper, arm func() bool, _ time.Duration) { r.sock.rest(arm) }

// Wake implements engine.Source.
func (r *receiver) Wake(engine.Sleeper) { r.sock.wake() }

// Deliver implements engine.Source.
func (r *receiver) Deliver(msg *van.Message, inPoll bool) {
	msg.InPoll = inPoll
	r.in.recv(msg)
	r.Discard(msg)
}

// Discard implements engine.Source: it releases a message after its delivery, or a message that is not
// delivered.
func (r *receiver) Discard(msg *van.Message) {
	r.in.flow.left(msg)
	msg.Release()
}

// accept decodes the received frames in msg, which is r.next, and reports whether the message can be delivered now. If msg is delivered or
// queued, r.next is another message then. Otherwise msg is empty.
func (r *receiver) accept(msg *van.Message) (deliver bool) {
	f := (*frames)(msg.Native())
	now := clock.Now()
	name, c, ours := r.senderOf(f)
	probe := r.router && f.probe()
	var err error
	if !probe {
		err = parse(msg, f)
	}
	member := ours && c != nil && c.isOf(name)
	if r.router && r.in.guard != nil {
		// The guard counts every message of an unauthenticated connection, and a member's first message on each connection:
		// a member's new connection may exist together with a lost one, or with a connection of the member's former process.
		if fd := f.source(); !member || c.arrives.Load() != int64(fd)+1 {
			by := name
			if !ours {
				by = peerName{id: van.Empty}
			}
			r.in.guard.heard(fd, f.wire(), by)
		}
	}
	switch {
	case err != nil:
		r.in.malformed(err, f)
	case !probe && !ours && !msg.IsControl():
		r.in.fenced(name)
	case !msg.IsControl() && r.fenced(c, name):
		r.in.fenced(name)
	case probe:
	case r.take(msg, now, name, c, member, f.dataLen(f.len()-2)):
		r.next = r.pool.get()
		return !r.keep(msg, name, c, member)
	}
	r.pool.clear(msg)
	return false
}

// take notes the sender, the origin and the time of a message, and counts its size bytes. It reports false if the budget for unknown
// senders refuses the message. c is the connection to the node with that name, if any; member reports whether the sender is c's process.
func (r *receiver) take(msg *van.Message, now uint64, name peerName, c *conn, member bool, size int) bool {
	msg.Sender, msg.Origin = name.id, van.OriginUnknown
	if msg.IsControl() {
		msg.Origin = r.originOf((*frames)(msg.Native()), name, c)
	}
	msg.Trace().PostRecv = now
	msg.Receiver = int(r.in.n.id.Load())
	r.in.n.stats.received(size)
	stranger := r.router && !member
	if stranger && msg.Control.Cmd == van.AddNode && r.in.n.proofs.warns != nil && r.in.n.self.ID == van.SchedulerID {
		r.in.n.checkRecord(&msg.Meta)
	}
	(*frames)(msg.Native()).setWeight(size+messageCost+len(msg.Parts)*van.PartBytes, stranger)
	return r.in.flow.arrived(msg)
}

// keep makes msg the owner of its frames. If the sender is not admitted yet, or earlier messages of it are queued, keep queues msg. It
// reports whether it did.
func (r *receiver) keep(msg *van.Message, name peerName, c *conn, member bool) bool {
	msg.Adopt(&r.pool, msg.Native())
	if r.router && c != nil && msg.Request && c.incarnation == name.incarnation && c.answers.Load() == undecided {
		c.answers.CompareAndSwap(undecided, overRouter)
	}
	return r.router && c != nil && !msg.IsControl() && (!member || r.in.early.count.Load() > 0) && !failpoint.On("incarnation") &&
		r.in.early.keep(msg, name)
}

// senderOf returns the sender of a message and the connection to the node with that id, if any. A name that was made for
// another process has no connection: its sender does not know this process.
func (r *receiver) senderOf(f *frames) (name peerName, c *conn, ours bool) {
	name, ours = peerName{id: van.Empty}, true
	if f.len() > 0 {
		name, ours = nameOf(f.bytes(0), r.in.n.incarnation)
	}
	switch {
	case !r.router:
		return name, r.peer, ours
	case !ours || name.id == van.Empty:
		return name, nil, ours
	}
	return name, (*r.in.n.peers.Load())[name.id], true
}

// originOf returns the evidence that a control message was sent by the node that name claims. c is the connection to that node.
func (r *receiver) originOf(f *frames, name peerName, c *conn) van.Origin {
	switch {
	case !r.router:
		return van.OriginDialed
	case name.id != van.SchedulerID || r.in.n.cfg.Local:
		return van.OriginUnknown
	case c == nil:
		return van.OriginOther
	}
	return originOf(f.host(), c.address(), hostaddr.This)
}

// originOf compares the source address of a connection with the address of the named node. If two processes of this host
// are connected, the source address is the address that was dialed; both addresses are then this host's. If either
// address is unknown, the origin is another host: nothing shows that the named node has sent the message.
func originOf(from, at netip.Addr, this func() hostaddr.Host) van.Origin {
	switch {
	case !from.IsValid() || !at.IsValid():
		return van.OriginOther
	case from == at:
		return van.OriginHost
	}
	if here := this(); here.Has(from) && here.Has(at) {
		return van.OriginHost
	}
	return van.OriginOther
}

// fenced reports whether data with the sender name must be dropped: another process has replaced the sender,
// or the data arrived on this node's connection to c and is of another process. Control messages are not
// fenced: they carry the sender's incarnation, and the membership rules check it. A replaced process is
// notified that way.
func (r *receiver) fenced(c *conn, name peerName) bool {
	if c == nil || failpoint.On("incarnation") {
		return false
	}
	if r.router {
		return name.incarnation != 0 && name.incarnation == c.before.Load()
	}
	return name != peerName{c.who.Load().id, c.incarnation}
}

// parse checks the frames of a message and decodes them into msg. Frame 0 names the sender, frame 1 is the
// meta, and the rest is data.
func parse(msg *van.Message, f *frames) error {
	n := f.len()
	if n < 2 || f.excess() > 0 {
		return &van.FieldError{Field: "frames", Value: n + f.excess(), Want: "a sender, a meta, and up to 3 data frames"}
	}
	if err := van.DecodeMeta(f.bytes(1), &msg.Meta); err != nil {
		return err
	}
	data := n - 2
	if data == 1 {
		return &van.FieldError{Field: "data frames", Value: data, Want: "0, 2 or 3"}
	}
	msg.Frames = data
	for i := range data {
		msg.SetFrame(i, f.mem(i+2))
	}
	return msg.Unpack()
}
