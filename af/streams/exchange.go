package streams

// Exchange: a prepared exchange, its peers, the time limit of its rounds, and its end.

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/gpusync"
	"github.com/stepaf/stepaf-go/van"
)

// ErrOver is wrapped by errors of an exchange that has ended: the exchange must be prepared again. The error contains
// the reason.
var ErrOver = errors.New("exchange is over")

// Option changes an Exchange.
type Option interface{ apply(x *Exchange) }

// Limit is the time limit of a worker's round. It counts from the time when the stream reaches the work of QueueSend,
// or from Send; 0 or less means no limit. The default is postoffice.DefaultTimeout. Servers ignore it.
type Limit time.Duration

func (l Limit) apply(x *Exchange) {
	if x.first {
		x.timing.limit = max(time.Duration(l), 0)
	}
}

// Exchange is one end of an exchange. All methods are safe for concurrent use; a Send or Receive during another one is refused with af.ErrStarted.
type Exchange struct {
	ends  *Ends
	first bool // this end sends first: a worker
	peers []*peer
	mem   exchangeMemory
	host  *host // nil: an exchange in streams

	path string // see Path

	spin    time.Duration // how long Receive polls before it sleeps; negative: it never sleeps
	crowded bool          // while Receive polls, other goroutines may have no thread

	names      []name // its keys in ends.all; guarded by ends.mu
	connecting bool   // a worker's offer is open, and some servers have not answered; guarded by ends.mu

	queueing sync.Mutex // guards sendNext and half, and serializes the work put into streams
	sendNext bool
	half     bool // the first half of the open round was captured; no round is open if sendNext == first
	captured atomic.Bool
	closing  sync.Once

	failed atomic.Pointer[error]
	ending *gpusync.Ending
	done   chan struct{} // closed when streams of an ended exchange may continue
	timing timing
}

// peer is the end of another node.
type peer struct {
	id      int
	out, in []af.KeyTensor
	offered bool  // the worker's offer was sent to the present process of the peer; guarded by ends.mu, as is the next field
	said    *note // the peer's offer or answer, nil before it arrives; constant once all have arrived
}

// with returns the index of a peer, or -1.
func (x *Exchange) with(id int) int {
	return slices.IndexFunc(x.peers, func(p *peer) bool { return p.id == id })
}

// QueueSend makes stream notify the peers that the tensors for them are ready, when the stream reaches this point; in
// a captured graph, at each replay. A worker sends first and a server receives first, and then sends and receives
// alternate, also in the order in which streams execute them.
func (x *Exchange) QueueSend(stream af.Stream) error { return x.queue("queue a send", stream, true) }

// QueueReceive makes stream wait until all peers have sent, and then copy the peers' data into the tensors of this
// end. In a graph this can overlap the work captured since the QueueSend before, if that is in the same graph. When the
// exchange has ended, the stream is released, and begins no copy. The tensors may then be filled in part: see Check.
func (x *Exchange) QueueReceive(stream af.Stream) error {
	return x.queue("queue a receive", stream, false)
}

// queue queues a send or a receive, which alternate.
func (x *Exchange) queue(op string, stream af.Stream, send bool) error {
	if stream == af.Complete {
		return x.wrong(op, fmt.Errorf("%w: no stream", van.ErrInvalid))
	}
	if x.host != nil {
		return x.wrong(op, fmt.Errorf("%w: it is made by hosts, want Send and Receive", van.ErrInvalid))
	}
	x.queueing.Lock()
	defer x.queueing.Unlock()
	s := uintptr(stream)
	captures, err := x.mem.m.dev.Capturing(s)
	if err != nil && x.failed.Load() == nil {
		return x.wrong(op, err)
	}
	if err := x.turn(op, send, captures); err != nil {
		return err
	}
	if captures {
		x.captured.Store(true)
	}
	if send {
		err = x.mem.send(s, captures)
	} else {
		err = x.mem.receive(s, captures)
	}
	if err != nil {
		if captures { // the stream has done nothing
			x.sendNext = x.first
		} else {
			x.fail(err) // some of the work may be in the stream
		}
		return x.wrong(op, err)
	}
	x.sendNext, x.half = !send, captures
	return nil
}

// turn returns an error unless it is the turn of a send, or of a receive. Both halves of a round are captured, or neither is. If the
// first half was captured, an error ends the round, since its capture may have been canceled. queueing is held.
func (x *Exchange) turn(op string, send, captures bool) error {
	if err := x.Check(); err != nil {
		return err
	}
	mixed := x.sendNext != x.first && x.half != captures
	if x.sendNext == send && !mixed {
		return nil
	}
	if x.sendNext != x.first && x.half {
		x.sendNext = x.first
		return x.wrong(op, fmt.Errorf("%w: the first half of this round was captured, capture the other half, too; if that capture was canceled, begin the round again", af.ErrStarted))
	}
	if mixed {
		return x.wrong(op, fmt.Errorf("%w: the first half of this round was not captured, so the other half cannot be", af.ErrStarted))
	}
	return x.wrong(op, fmt.Errorf("%w: sends and receives alternate", af.ErrStarted))
}

func (x *Exchange) wrong(op string, err error) error {
	return &van.Error{Op: op, Node: x.ends.node.Name(), Detail: x.describe(), Err: err}
}

// describe describes the exchange in errors and in the log.
func (x *Exchange) describe() string {
	p, how := x.peers[0], "in streams"
	if x.host != nil {
		how = "by hosts"
	}
	return fmt.Sprintf("exchange %s of %d and %d tensors with %d peers", how, len(p.out), len(p.in), len(x.peers))
}

// Path returns how data goes to the peers: "streams: gpu:0 with server 0, server 1", or with ByHost "hosts: ...". It names
// tensors that this end first copies on its device because other processes cannot map their memory.
func (x *Exchange) Path() string { return x.path }

// pathOf returns the text of Path for an exchange that is not closed.
func pathOf(x *Exchange) string {
	how := "streams"
	if x.host != nil {
		how = "hosts"
	}
	var peers []string
	for _, p := range x.peers {
		peers = append(peers, fmt.Sprintf("%s %d", van.RoleOf(p.id), van.RankOf(p.id)))
	}
	path := fmt.Sprintf("%s: %s with %s", how, x.ends.node.Backend().Device(), strings.Join(peers, ", "))
	if n := len(x.mem.copied); n > 0 {
		path += fmt.Sprintf("; copied on the device first: %d of the tensors to send, whose memory other processes cannot map", n)
	}
	return path
}

// Check returns nil, or why the exchange has ended. If it returns nil, the data that streams have received so far is
// complete and correct. It does not wait.
func (x *Exchange) Check() error {
	err := x.failed.Load()
	if err == nil {
		return nil
	}
	return &van.Error{Op: "exchange", Node: x.ends.node.Name(), Detail: x.describe(), Err: fmt.Errorf("%w: %w", ErrOver, *err), Hint: "prepare it anew on all of its nodes"}
}

// fail ends the exchange. It returns when all steps are done, or at once if the exchange has ended before.
//  1. Sends of this end become invalid.
//  2. The peers are notified.
//  3. When all peers have confirmed the end, waiting streams are released.
//
// Released streams may overwrite tensors that peers are copying; Check of these peers reports their copies as
// invalid.
func (x *Exchange) fail(err error) {
	if x.host != nil {
		x.host.end() // before the tensors may be taken for the caller's
	}
	if !x.failed.CompareAndSwap(nil, &err) {
		return
	}
	defer close(x.done)
	e := x.ends
	e.mu.Lock()
	names, used := x.names, x.host == nil && x.ending.Begun()
	if !used { // no stream contains work of it
		e.remove(names)
	}
	e.mu.Unlock()
	var end error
	if used {
		end = x.mem.end()
	}
	x.tell(names, err)
	if !used {
		return
	}
	awaitPeersOver(x)
	if free := errors.Join(end, x.mem.free()); free != nil {
		e.node.Log().Error("streams that wait for an exchange may not be released", "exchange", x.describe(), "err", free)
	}
	e.mu.Lock()
	e.remove(names)
	e.mu.Unlock()
}

// tell notifies the peers that this end is over.
func (x *Exchange) tell(names []name, why error) {
	n := note{verb: verbOver, text: why.Error()}
	for i, p := range x.peers {
		if len(names) == 0 {
			break // no peer knows the exchange
		}
		if n.id = names[0].id; !x.first {
			n.id = names[i].id
		}
		if err := x.ends.send(p.id, &n); err != nil && !errors.Is(err, van.ErrPeerLost) && !errors.Is(err, van.ErrClosed) {
			x.ends.node.Log().Info("could not notify a peer of the end of an exchange", "peer", x.ends.node.PeerName(p.id), "err", err)
		}
	}
}

// awaitPeersOver waits until the ends of all peers are over, up to gpusync.EndLimit.
func awaitPeersOver(x *Exchange) {
	e := x.ends
	if i := x.ending.Await(e.node.Ended(), e.ended); i >= 0 {
		e.node.Log().Warn("streams are released, but a peer has not confirmed the end of the exchange", "exchange", x.describe(), "peer", e.node.PeerName(x.peers[i].id))
	}
}

// left is called when a peer's end is over.
func (x *Exchange) left(from int, text string) {
	x.fail(&van.Error{Op: "exchange", Peer: x.ends.node.PeerName(from), Err: fmt.Errorf("%w there: %q", van.ErrClosed, text)})
}

// Close ends the exchange, and returns why it had ended before, or nil. Close waits until the peers' ends are over, for
// 10 s at most.
// With ByHost it does not wait, and devices of peers may still read the tensors for a moment, without using the data.
// Before Close, queued work must be done and the peers must have received it, for example after a barrier: data sent
// by an ended exchange is invalid. After Close the tensors are the caller's, unless the exchange was ever captured:
// replayed graphs do not wait, and no peer waits for them.
func (x *Exchange) Close() error {
	var err error
	x.closing.Do(func() { // another call waits
		err = x.Check()
		x.fail(fmt.Errorf("%w: its end", van.ErrClosed))
		<-x.done
		x.queueing.Lock() // a call that queues work now has taken the tensors before
		defer x.queueing.Unlock()
		if !x.captured.Load() && x.host.settle() {
			giveBack(x)
		}
	})
	return err
}

// giveBack releases the tensors and the buffers of an ended exchange that the device no longer uses.
func giveBack(x *Exchange) {
	if x.host != nil {
		if err := errors.Join(x.host.free(x.mem.m), x.mem.unmap()); err != nil {
			x.ends.node.Log().Warn("an exchange by hosts could not release all resources of its device", "exchange", x.describe(), "err", err)
		}
	}
	x.mem.putBack()
	for _, p := range x.peers {
		for _, t := range slices.Concat(p.in, p.out) {
			t.Val.Mem().Release()
		}
	}
}

// check ends the exchange if its round exceeds the limit. Only watch calls it.
func (x *Exchange) check(now uint64) {
	if x.failed.Load() != nil {
		return
	}
	took, late, ask := x.timing.check(now)
	if late {
		err := x.timing.late(took, x.ends.names(x.peers))
		x.ends.start(func() { x.fail(err) }) // watch continues with other exchanges meanwhile
	}
	if ask && x.ends.start(func() { x.timing.answer <- x.mem.wait() }) {
		x.timing.asks(now)
	}
}

// Values of the flag begun: the stream writes unseen at each QueueSend, timing replaces it by seen.
const (
	unseen = 1
	seen   = 2
)

// timing measures the rounds of an exchange. It belongs to the goroutine of watch.
type timing struct {
	limit    time.Duration  // 0: no limit, and no checks
	begun    *atomic.Uint32 // the flag begun
	since    uint64         // clock.Now when the begin of the last round was first seen
	asking   bool           // a query of the device is under way
	asked    uint64         // start of the query
	answer   chan bool      // result of the query
	stale    bool           // a round has begun since the query started
	underWay bool           // the query found the round under way, and no other round has begun since
}

// check reports how long the round has taken, whether it exceeds the limit, and whether the device should be queried.
func (t *timing) check(now uint64) (took time.Duration, late, ask bool) {
	select {
	case waits := <-t.answer:
		t.asking = false
		switch {
		case t.stale: // the answer is about an earlier round
		case waits: // a round that has begun meanwhile is unseen at the next check
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
		t.begun.Store(seen) // if a stream writes unseen at the same time, its round has begun about now, too
		t.since, t.underWay, t.stale = now, false, t.asking
	default:
		took = time.Duration(now - t.since)
		// A device that does not answer has failed, or its driver is blocked.
		silent := t.asking && time.Duration(now-t.asked) >= max(t.limit, silence)
		late = took >= t.limit && (t.underWay || silent)
		ask = took >= t.limit && !late && !t.asking
	}
	return took, late, ask
}

// late is the error of a round that exceeds the limit.
func (t *timing) late(took time.Duration, waitsFor string) error {
	return &van.Error{Op: "exchange", Detail: "a round waits for " + waitsFor, Elapsed: took, Limit: t.limit, Err: van.ErrTimeout}
}

// asks records that a query of the device starts now.
func (t *timing) asks(now uint64) { t.asking, t.asked, t.stale = true, now, false }
