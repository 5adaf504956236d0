package streams

// An exchange that is prepared: its peers, how long its rounds may take, and its end.

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/van"
)

// ErrOver is wrapped by what is returned when an exchange is over: it must be prepared anew. The
// error says why.
var ErrOver = errors.New("exchange is over")

// Option changes an Exchange.
type Option interface{ apply(x *Exchange) }

// Limit is how long a round of a worker may take, from where the stream comes to what QueueSend has put there, or from Send; 0 or
// less means no limit. It is postoffice.DefaultTimeout without this option, and counts for workers only.
type Limit time.Duration

func (l Limit) apply(x *Exchange) {
	if x.first {
		x.timing.limit = max(time.Duration(l), 0)
	}
}

// Exchange is one end of an exchange. All methods are safe for concurrent use; a Send or Receive during another one is refused with af.ErrStarted.
type Exchange struct {
	dir   *directory
	first bool // it sends first: a worker's
	peers []*peer
	words words
	host  *host // nil: an exchange in streams

	spin    time.Duration // how long Receive looks before it sleeps, less than 0 for ever
	crowded bool          // other goroutines may have no other thread meanwhile

	names   []name // what it is called in dir.all; guarded by dir.mu
	ready   bool   // Prepare has returned it, so it may be in streams; guarded by dir.mu
	meeting bool   // a worker's offer stands, and not all servers have answered; guarded by dir.mu

	queueing sync.Mutex // of sendNext; what is put into a stream is put there under it
	sendNext bool
	captured atomic.Bool
	closed   atomic.Bool

	failed atomic.Pointer[error]
	done   chan struct{} // closed when the streams of an exchange that is over may go on
	timing timing
}

// peer is another end.
type peer struct {
	id      int
	out, in []af.KeyTensor
	over    bool  // its end is over, or it is lost; guarded by dir.mu, as what follows
	offered bool  // the worker's offer has gone to the process that is there now
	said    *note // its offer or its answer, nil before that; it does not change once all have come
}

// with is the index of a peer, or -1.
func (x *Exchange) with(id int) int {
	return slices.IndexFunc(x.peers, func(p *peer) bool { return p.id == id })
}

// QueueSend makes stream tell the peers that the tensors for them are ready: when it comes to this point, each time if
// it is being captured into a graph that is replayed. A worker sends first, a server receives first, and
// then both take turns, in the order in which the streams come there, too.
func (x *Exchange) QueueSend(stream af.Stream) error { return x.queue("queue a send", stream, true) }

// QueueReceive makes stream wait until all peers have sent, and copy what they have into the tensors of
// this end. When the exchange is over it waits for nothing, and the tensors may hold anything: see Check.
func (x *Exchange) QueueReceive(stream af.Stream) error {
	return x.queue("queue a receive", stream, false)
}

// queue queues a send or a receive, which take turns.
func (x *Exchange) queue(op string, stream af.Stream, send bool) error {
	if stream == af.Complete {
		return x.wrong(op, fmt.Errorf("%w: no stream", van.ErrInvalid))
	}
	if x.host != nil {
		return x.wrong(op, fmt.Errorf("%w: it is made by hosts, want Send and Receive", van.ErrInvalid))
	}
	x.queueing.Lock()
	defer x.queueing.Unlock()
	if err := x.turn(op, send); err != nil {
		return err
	}
	s := uintptr(stream)
	if !x.captured.Load() {
		captures, err := x.words.m.dev.Capturing(s)
		if err != nil {
			return x.wrong(op, err)
		}
		x.captured.Store(captures)
	}
	put := x.words.receive
	if send {
		put = x.words.send
	}
	if err := put(s); err != nil {
		x.fail(err) // a part may be in the stream
		return x.wrong(op, err)
	}
	x.sendNext = !send
	return nil
}

// turn is why it is not a send's, or a receive's, turn. queueing is held.
func (x *Exchange) turn(op string, send bool) error {
	if err := x.Check(); err != nil {
		return err
	}
	if x.sendNext == send {
		return nil
	}
	if x.host != nil {
		return x.wrong(op, fmt.Errorf("%w: sends and receives take turns", af.ErrStarted))
	}
	x.sendNext = send // what was queued last may have been in a capture that was given up
	return x.wrong(op, fmt.Errorf("%w: sends and receives take turns; if the last one was in a capture that was given up, try again", af.ErrStarted))
}

func (x *Exchange) wrong(op string, err error) error {
	return &van.Error{Op: op, Node: x.dir.node.Name(), Detail: x.String(), Err: err}
}

// String names the exchange, for errors.
func (x *Exchange) String() string {
	p, how := x.peers[0], "in streams"
	if x.host != nil {
		how = "by hosts"
	}
	return fmt.Sprintf("exchange %s of %d and %d tensors with %d peers", how, len(p.out), len(p.in), len(x.peers))
}

// Check returns why the exchange is over, from then on, or nil: then what streams have received by now is
// whole and right. It does not wait.
func (x *Exchange) Check() error {
	err := x.failed.Load()
	if err == nil {
		return nil
	}
	return &van.Error{Op: "exchange", Node: x.dir.node.Name(), Detail: x.String(), Err: fmt.Errorf("%w: %w", ErrOver, *err), Hint: "prepare it anew on all of its nodes"}
}

// fail ends the exchange: nothing that its streams send counts any more, then the peers are told, and when all of
// them have said that their ends are over, too, the streams that wait go on. They may change tensors then that peers
// are copying, and the peers' Check says that these copies are no good. It returns when this is done, or
// at once if the exchange is over.
func (x *Exchange) fail(err error) {
	if x.host != nil {
		x.host.end() // before anybody may take the tensors for the caller's
	}
	if !x.failed.CompareAndSwap(nil, &err) {
		return
	}
	defer close(x.done)
	d := x.dir
	d.mu.Lock()
	names, used := x.names, x.ready
	used = used && x.host == nil
	if !used { // nothing is in streams
		d.forget(names)
	}
	d.mu.Unlock()
	var end error
	if used {
		end = x.words.end()
	}
	x.tell(names, err)
	if !used {
		return
	}
	x.parted()
	if free := errors.Join(end, x.words.free()); free != nil {
		d.node.Log().Error("streams that wait for an exchange may not go on", "exchange", x.String(), "err", free)
	}
	d.mu.Lock()
	d.forget(names)
	d.mu.Unlock()
}

// tell tells the peers that this end is over.
func (x *Exchange) tell(names []name, why error) {
	n := note{verb: verbOver, text: why.Error()}
	for i, p := range x.peers {
		if len(names) == 0 {
			break // nobody knows of it
		}
		if n.id = names[0].id; !x.first {
			n.id = names[i].id
		}
		if err := x.dir.send(p.id, &n); err != nil && !errors.Is(err, van.ErrPeerLost) && !errors.Is(err, van.ErrClosed) {
			x.dir.node.Log().Info("could not tell a peer that an exchange is over", "peer", x.dir.node.PeerName(p.id), "err", err)
		}
	}
}

// partLimit is how long the streams of an exchange that is over wait for a peer to say that its end is over.
const partLimit = 10 * time.Second

// parted waits until the ends of all peers are over, as far as can be known.
func (x *Exchange) parted() {
	d := x.dir
	patience := time.NewTimer(partLimit)
	defer patience.Stop()
	closing := d.ended
	for {
		d.mu.Lock()
		changed := d.changed
		i := slices.IndexFunc(x.peers, func(p *peer) bool { return !p.over })
		d.mu.Unlock()
		if i < 0 {
			return
		}
		select {
		case <-changed:
		case <-d.node.Ended():
			return
		case <-closing:
			closing = nil
			patience.Reset(closeLimit)
		case <-patience.C:
			d.node.Log().Warn("streams go on, but a peer has not said that its end of the exchange is over, too", "exchange", x.String(), "peer", d.node.PeerName(x.peers[i].id))
			return
		}
	}
}

// left is told that a peer's end is over.
func (x *Exchange) left(from int, text string) {
	x.fail(&van.Error{Op: "exchange", Peer: x.dir.node.PeerName(from), Err: fmt.Errorf("%w there: %q", van.ErrClosed, text)})
}

// Close ends this end, and with it the exchange, and returns why it was over before. It waits until the peers' ends
// are over, too; by hosts it does not, and devices of peers may still read tensors for a moment, for nothing. What was queued must be done, and received by the
// peers, as it is behind a barrier: what an end that is over has sent counts nowhere. The tensors are
// the caller's again, unless the exchange was ever captured: graphs may be replayed after Close, and copy then, but nothing waits for them
// or for what they wait for.
func (x *Exchange) Close() error {
	err := x.Check()
	if x.closed.Swap(true) {
		return nil
	}
	x.fail(fmt.Errorf("%w: its end", van.ErrClosed))
	<-x.done
	x.queueing.Lock() // one who queues something now had the tensors before
	defer x.queueing.Unlock()
	if !x.captured.Load() && x.host.settle() {
		if x.host != nil {
			if err := errors.Join(x.host.free(x.words.m), x.words.unmap()); err != nil {
				x.dir.node.Log().Warn("an exchange by hosts leaves something behind on its device", "exchange", x.String(), "err", err)
			}
		}
		x.words.putBack()
		for _, p := range x.peers {
			for _, t := range slices.Concat(p.in, p.out) {
				t.Val.Mem().Release()
			}
		}
	}
	return err
}

// look ends the exchange if its round has taken too long. Only the goroutine that watches calls it.
func (x *Exchange) look(now uint64) {
	if x.failed.Load() != nil {
		return
	}
	took, late, ask := x.timing.look(now)
	if late {
		err := x.timing.late(took, x.dir.names(x.peers))
		x.dir.begin(func() { x.fail(err) }) // other exchanges are looked at meanwhile
	}
	if ask && x.dir.begin(func() { x.timing.answer <- x.words.wait() }) {
		x.timing.asks(now)
	}
}

// What the word begun holds: the stream writes unseen at each QueueSend, timing makes it seen.
const (
	unseen = 1
	seen   = 2
)

// timing is what is known of an exchange's rounds, of the goroutine that watches them.
type timing struct {
	limit    time.Duration  // 0: none, and nothing is looked at
	begun    *atomic.Uint32 // the word
	since    uint64         // clock.Now when it was seen first that the last round had begun
	asking   bool           // the device is asked whether it is under way
	asked    uint64         // when
	answer   chan bool      // what it says
	stale    bool           // a round has begun since it was asked
	underWay bool           // it was when the device was asked, and no other one has begun since
}

// look tells whether a round has taken too long, and how long, or whether the device should be asked.
func (t *timing) look(now uint64) (took time.Duration, late, ask bool) {
	select {
	case waits := <-t.answer:
		t.asking = false
		switch {
		case t.stale: // it is about an earlier round
		case waits: // a round that has begun meanwhile is unseen at the next look
			t.underWay = true
			return 0, false, false
		default:
			t.begun.CompareAndSwap(seen, 0)
		}
	default:
	}
	switch t.begun.Load() {
	case 0:
	case unseen:
		t.begun.Store(seen) // a stream that writes it meanwhile has begun about now, too
		t.since, t.underWay, t.stale = now, false, t.asking
	default:
		took = time.Duration(now - t.since)
		// A device that does not answer has failed, or its driver lets nobody in.
		silent := t.asking && time.Duration(now-t.asked) >= max(t.limit, silence)
		late = took >= t.limit && (t.underWay || silent)
		ask = took >= t.limit && !late && !t.asking
	}
	return took, late, ask
}

// late says that a round has taken too long.
func (t *timing) late(took time.Duration, waitsFor string) error {
	return &van.Error{Op: "exchange", Detail: "a round waits for " + waitsFor, Elapsed: took, Limit: t.limit, Err: van.ErrTimeout}
}

// asks says that the device is asked now.
func (t *timing) asks(now uint64) { t.asking, t.asked, t.stale = true, now, false }
