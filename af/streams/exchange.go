package streams

// An exchange that is prepared: what goes into streams, and its end.

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

var le = binary.LittleEndian

// A word's lower half is arrived when its peer has sent. The upper one is when the exchange is over.
const (
	arrived = 1
	goOn    = uint64(arrived)<<32 | arrived
)

// ErrOver is wrapped by what is returned when an exchange is over: it must be prepared anew. The
// error says why.
var ErrOver = errors.New("exchange in streams is over")

// Option changes an Exchange.
type Option interface{ apply(x *Exchange) }

// Limit is how long a round of a worker may take, from where the stream comes to what QueueSend has put there; 0 or
// less means no limit. It is postoffice.DefaultTimeout without this option, and counts for workers only.
type Limit time.Duration

func (l Limit) apply(x *Exchange) {
	if x.first {
		x.limit = max(time.Duration(l), 0)
	}
}

// Exchange is one end of an exchange in streams. All methods are safe for concurrent use.
type Exchange struct {
	e      *Ends
	first  bool // it sends first: a worker's
	limit  time.Duration
	peers  []*peer
	slot   backend.Mem
	copied []copied
	names  []name // what it is called in e.all; guarded by e.mu
	ready  bool   // Prepare has returned it, so it may be in streams; guarded by e.mu

	meeting bool // a worker's offer stands, and not all servers have answered; guarded by e.mu

	begunMem backend.Mem // pinned host memory; none without a limit
	begun    *atomic.Uint32
	voidMem  backend.Mem // likewise, with or without one
	voided   *atomic.Uint32

	queueing sync.Mutex
	sendNext bool
	captured atomic.Bool
	closed   atomic.Bool

	failed atomic.Pointer[error]
	done   chan struct{} // closed when the streams of an exchange that is over may go on
	timing timing
}

// timing is what watch knows of a worker's exchange.
type timing struct {
	since    uint64    // clock.Now when it saw first that the last round had begun
	asking   bool      // the device is asked whether it is under way
	asked    uint64    // when
	answer   chan bool // what it says
	stale    bool      // a round has begun since it was asked
	underWay bool      // it was when the device was asked, and no other one has begun since
}

// What begun holds: the stream writes unseen at each QueueSend, watch makes it seen.
const (
	unseen = 1
	seen   = 2
)

// with is the index of a peer, or -1.
func (x *Exchange) with(id int) int {
	for i, p := range x.peers {
		if p.id == id {
			return i
		}
	}
	return -1
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
	x.queueing.Lock()
	defer x.queueing.Unlock()
	if err := x.Check(); err != nil {
		return err
	}
	if x.sendNext != send {
		x.sendNext = send // what was queued last may have been in a capture that was given up
		return x.wrong(op, fmt.Errorf("%w: sends and receives take turns; if the last one was in a capture that was given up, try again", af.ErrStarted))
	}
	d, s := x.e.dev, uintptr(stream)
	if !x.captured.Load() {
		captures, err := d.Capturing(s)
		if err != nil {
			return x.wrong(op, err)
		}
		x.captured.Store(captures)
	}
	put := x.putReceive
	if send {
		put = x.putSend
	}
	if err := put(d, s); err != nil {
		x.fail(err) // a part may be in the stream
		return x.wrong(op, err)
	}
	x.sendNext = !send
	return nil
}

// putSend puts a send into stream s.
func (x *Exchange) putSend(d *device, s uintptr) error {
	for _, c := range x.copied {
		if err := d.CopyAsync(c.to.Mem().Sub(0, c.src.Len()), c.src, s); err != nil {
			return err
		}
	}
	for _, p := range x.peers {
		if err := d.WriteFlag(s, p.word.Sub(0, 4), 0); err != nil {
			return err
		}
	}
	valid := x.slot.Sub(validAt, 4)
	for _, p := range x.peers {
		if err := d.CopyAsync(p.far, valid, s); err != nil {
			return err
		}
	}
	if x.begun == nil {
		return nil
	}
	return d.WriteFlag(s, x.begunMem, unseen)
}

// putReceive puts a receive into stream s.
func (x *Exchange) putReceive(d *device, s uintptr) error {
	for _, p := range x.peers {
		if err := d.WaitBits(s, p.word, goOn); err != nil {
			return err
		}
		for i := range p.in {
			if m := p.in[i].Val.Mem(); m.Len() > 0 {
				if err := d.CopyAsync(m, p.from[i], s); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

func (x *Exchange) wrong(op string, err error) error {
	return &van.Error{Op: op, Node: x.e.node.Name(), Detail: x.String(), Err: err}
}

// String names the exchange, for errors.
func (x *Exchange) String() string {
	p := x.peers[0]
	return fmt.Sprintf("exchange in streams of %d and %d tensors with %d peers", len(p.out), len(p.in), len(x.peers))
}

// Check returns why the exchange is over, from then on, or nil: then what streams have received by now is
// whole and right. It does not wait.
func (x *Exchange) Check() error {
	err := x.failed.Load()
	if err == nil {
		return nil
	}
	return &van.Error{Op: "exchange", Node: x.e.node.Name(), Detail: x.String(), Err: fmt.Errorf("%w: %w", ErrOver, *err), Hint: "prepare it anew on all of its nodes"}
}

// fail ends the exchange: nothing that its streams send counts any more, then the peers are told, and when all of
// them have said that their ends are over, too, the streams that wait go on. They may change tensors then that peers
// are copying, and the peers' Check says that these copies are no good. It returns when this is done, or
// at once if the exchange is over.
func (x *Exchange) fail(err error) {
	if !x.failed.CompareAndSwap(nil, &err) {
		return
	}
	defer close(x.done)
	e := x.e
	e.mu.Lock()
	names, used := x.names, x.ready
	if !used { // nothing is in streams
		x.forget()
		e.wake()
	}
	e.mu.Unlock()
	var void error
	if used {
		void = x.void()
	}
	x.tell(names, err)
	if !used {
		return
	}
	x.parted()
	if free := errors.Join(void, x.free()); free != nil {
		e.node.Log().Error("streams that wait for an exchange may not go on", "exchange", x.String(), "err", free)
	}
	e.mu.Lock()
	x.forget()
	e.wake()
	e.mu.Unlock()
}

// forget takes the exchange out of those that peers may speak of. e.mu is held.
func (x *Exchange) forget() {
	for _, n := range x.names {
		delete(x.e.all, n)
	}
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
		if err := x.e.send(p.id, &n); err != nil && !errors.Is(err, van.ErrPeerLost) && !errors.Is(err, van.ErrClosed) {
			x.e.node.Log().Info("could not tell a peer that an exchange is over", "peer", x.e.node.PeerName(p.id), "err", err)
		}
	}
}

// partLimit is how long the streams of an exchange that is over wait for a peer to say that its end is over.
const partLimit = postoffice.DefaultTimeout

// parted waits until the ends of all peers are over, as far as can be known.
func (x *Exchange) parted() {
	e := x.e
	patience := time.NewTimer(partLimit)
	defer patience.Stop()
	closing := e.ended
	for {
		e.mu.Lock()
		changed := e.changed
		i := slices.IndexFunc(x.peers, func(p *peer) bool { return !p.over })
		e.mu.Unlock()
		if i < 0 {
			return
		}
		select {
		case <-changed:
		case <-e.node.Ended():
			return
		case <-closing:
			closing = nil
			patience.Reset(closeLimit)
		case <-patience.C:
			e.node.Log().Warn("streams go on, but a peer has not said that its end of the exchange is over, too", "exchange", x.String(), "peer", e.node.PeerName(x.peers[i].id))
			return
		}
	}
}

// void makes nothing count that the streams of the exchange send from now on, and takes back what peers have not
// seen: they may hear of the end later than this node's streams go on, if it cannot tell them.
//
// Only words are written, and the end of that is seen in host memory: the driver takes such writes also while a launch
// waits for room in the queue of another stream, unless that is the default stream.
func (x *Exchange) void() error {
	d, s := x.e.dev, x.e.release
	err := d.WriteFlag(s, x.slot.Sub(validAt, 4), 0)
	for _, p := range x.peers {
		if err == nil {
			err = d.WriteFlag(s, p.far, 0)
		}
	}
	if err == nil {
		err = d.WriteFlag(s, x.voidMem, 1)
	}
	if err != nil {
		return err
	}
	// The peers must not be told before it is done. Nothing in this stream waits.
	limit := time.NewTimer(silence)
	defer limit.Stop()
	for pause := 5 * time.Microsecond; x.voided.Load() == 0; pause = min(2*pause, time.Millisecond) {
		next := time.NewTimer(pause)
		select {
		case <-next.C:
		case <-limit.C:
			next.Stop()
			return fmt.Errorf("%w: a word of the device", van.ErrTimeout)
		}
	}
	return nil
}

// free makes the streams of the exchange go on.
func (x *Exchange) free() (err error) {
	for _, p := range x.peers {
		if err == nil {
			err = x.e.dev.WriteFlag(x.e.release, p.word.Sub(4, 4), arrived)
		}
	}
	return err
}

// left is told that a peer's end is over.
func (x *Exchange) left(from int, text string) {
	x.fail(&van.Error{Op: "exchange", Peer: x.e.node.PeerName(from), Err: fmt.Errorf("%w there: %q", van.ErrClosed, text)})
}

// Close ends this end, and with it the exchange, and returns why it was over before. It waits until the peers' ends
// are over, too. What was queued must be done. The tensors are
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
	if !x.captured.Load() {
		x.putBack()
		for _, p := range x.peers {
			letGo(p.in)
			letGo(p.out)
		}
	}
	return err
}

func letGo(l []af.KeyTensor) {
	for i := range l {
		m := l[i].Val.Mem()
		m.Release()
	}
}

// look ends the exchange if its round has taken too long. Only watch calls it.
func (x *Exchange) look(now uint64) {
	if x.begun == nil || x.failed.Load() != nil {
		return
	}
	t := &x.timing
	select {
	case waits := <-t.answer:
		t.asking = false
		switch {
		case t.stale: // it is about an earlier round
		case waits: // a round that has begun meanwhile is unseen at the next look
			t.underWay = true
			return
		default:
			x.begun.CompareAndSwap(seen, 0)
		}
	default:
	}
	switch x.begun.Load() {
	case 0:
	case unseen:
		x.begun.Store(seen) // a stream that writes it meanwhile has begun about now, too
		t.since, t.underWay, t.stale = now, false, t.asking
	default:
		took := time.Duration(now - t.since)
		// A device that does not answer has failed, or its driver lets nobody in.
		silent := t.asking && time.Duration(now-t.asked) >= max(x.limit, silence)
		switch {
		case took < x.limit:
		case t.underWay || silent:
			late := &van.Error{Op: "exchange", Detail: "a round waits for " + x.peerNames(), Elapsed: took, Limit: x.limit, Err: van.ErrTimeout}
			x.e.mu.Lock()
			if x.e.over == nil {
				x.e.failing.Go(func() { x.fail(late) }) // other exchanges are looked at meanwhile
			}
			x.e.mu.Unlock()
		case !t.asking:
			x.e.mu.Lock()
			if t.asking = x.e.over == nil; t.asking {
				t.asked, t.stale = now, false
				x.e.failing.Go(func() { x.ask(t.answer) })
			}
			x.e.mu.Unlock()
		}
	}
}

// silence is how long a device may take at least to say what is in its memory.
const silence = time.Second

// ask tells whether a round is under way, as the words in the device's memory say.
func (x *Exchange) ask(answer chan<- bool) {
	waits := false
	for _, p := range x.peers {
		var word [4]byte
		err := x.e.dev.Copy(backend.Bytes(word[:]), p.word.Sub(0, 4))
		waits = waits || err != nil || le.Uint32(word[:]) != arrived
	}
	answer <- waits
}

// peerNames names the peers, for errors.
func (x *Exchange) peerNames() string {
	var names []string
	for _, p := range x.peers {
		names = append(names, x.e.node.PeerName(p.id))
	}
	return strings.Join(names, ", ")
}

// elapsed is for errors.
func elapsed(begun uint64) time.Duration { return time.Duration(clock.Now() - begun) }
