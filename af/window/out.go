package window

// Sent messages of a rank, and the limits of messages in flight.

import (
	"context"
	"encoding/binary"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/internal/datamsg"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// Limits of messages in flight to a rank; a Put waits at a limit. The receiver reports its counts often enough that
// messages which it has processed never reach a limit.
const (
	maxUnderWay = 128
	maxBytes    = 32 << 20
	tellEvery   = maxUnderWay / 4
	tellBytes   = maxBytes / 4

	// ring is how many message numbers can be distinguished: those in flight, and one request of Flush for each of
	// them.
	ring = 2*maxUnderWay + 2
)

// outbox is the send state of a rank.
type outbox struct {
	p   *peer
	mu  sync.Mutex  // held while a message gets its number and is sent, and while work is put into a stream for the rank
	msg van.Message // used with mu held, under which the next two fields change

	next     atomic.Uint64 // number of the next message
	bytes    atomic.Uint64 // data in all messages with lower numbers
	said     bool          // verbClose was sent; guarded by mu, as are the next two fields
	puts     uint64        // number after the last put or signal
	asked    uint64        // a verbTaken for all lower numbers was requested
	lendings [ring]lending // by number

	placed      atomic.Uint64 // messages that the rank has processed
	placedBytes atomic.Uint64 // data in them
}

// lending is the memory of one message that a transport reads.
type lending struct {
	p   *peer
	mem backend.Mem
	seq atomic.Uint64 // the message's number plus 1; 0 if no memory is in use
}

// Sent implements van.Completion.
func (l *lending) Sent() {
	mem := l.mem
	l.mem = backend.Mem{}
	l.seq.Store(0)
	mem.Release()
	l.p.sleepers.wakeAll()
}

// room reports whether another message may be sent. Without mu held the result is approximate.
func (o *outbox) room() bool {
	next := o.next.Load()
	return next-o.placed.Load() < maxUnderWay && o.bytes.Load()-o.placedBytes.Load() <= maxBytes && o.lendings[next%ring].seq.Load() == 0 ||
		o.p.end() != nil
}

// flushed reports whether all messages with lower numbers were processed, and their memory is no longer read.
func (o *outbox) flushed(want uint64) bool {
	if o.placed.Load() < want {
		return false
	}
	for i := range o.lendings {
		if seq := o.lendings[i].seq.Load(); seq != 0 && seq <= want {
			return false
		}
	}
	return true
}

// post assigns a number to a message and sends it. mu is held.
func (o *outbox) post(n *note, data backend.Mem) error {
	w, seq := o.p.w, o.next.Load()
	n.seq = seq
	ts := w.timestamp(seq)
	if n.verb == verbClose { // messages to different ranks may have one timestamp; takeBack cancels puts by it
		o.p.in.mu.Lock()
		ts = o.p.oddTimestamp()
		o.p.in.mu.Unlock()
	}
	m := o.p.message(&o.msg, n, true, ts)
	var l *lending
	if data.Len() > 0 {
		datamsg.SetData(m, keyMem, data, backend.Mem{}, van.TypeOther)
		m.Key, m.ValLen = dataKey, int32(data.Len())
		l = &o.lendings[seq%ring]
		data.Retain()
		l.mem = data
		l.seq.Store(seq + 1)
		m.Done = l
	}
	o.bytes.Add(uint64(data.Len()))
	o.next.Store(seq + 1) // before Send, since the answer may arrive before Send returns
	err := w.app.Send(m)
	m.Vals = backend.Mem{}
	if err == nil && n.verb == verbPut {
		o.puts = seq + 1
	}
	if err != nil {
		o.next.Store(seq)
		o.bytes.Add(-uint64(data.Len()))
		if l != nil {
			l.Sent()
		}
	}
	return err
}

// ask requests the counts of the rank, if necessary. It returns the number after the last put, and whether there is
// nothing to wait for.
func (o *outbox) ask(op string) (want uint64, done bool, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	want = o.puts
	if o.flushed(want) {
		return want, true, nil
	}
	err = o.p.failure(op)
	if o.placed.Load() >= want {
		return want, false, nil // a rank that has closed the window has processed everything before
	}
	if err == nil && o.asked < want {
		if err = o.post(&note{verb: verbAsk, signal: noSignal}, backend.Mem{}); err != nil {
			return want, false, o.p.w.wrong(op, o.p.rank, err)
		}
		o.asked = o.next.Load()
	}
	return want, false, err
}

// sayClosed notifies the rank that this end is closed.
func (o *outbox) sayClosed() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.said = true
	if err := o.p.end(); err != nil && err != errRankClosed { // a rank that has closed the window waits for all others
		return
	}
	n := note{verb: verbClose, signal: noSignal, taken: o.p.in.expected.Load(), bytes: o.p.in.takenBytes.Load()}
	if err := o.post(&n, backend.Mem{}); err != nil {
		o.p.w.app.Rarely("window close").Info("could not notify a rank that a window was closed",
			"window", o.p.w.String(), "rank", o.p.rank, "err", err)
	}
}

// unsendable returns why a call may send nothing more to the rank, or nil. mu is held.
func (o *outbox) unsendable(op string) error {
	if o.said {
		return o.p.w.wrong(op, o.p.rank, errClosed)
	}
	return o.p.failure(op)
}

// learn records how many messages the rank has processed.
func (o *outbox) learn(n *note) error {
	if n.taken > o.next.Load() || n.bytes > o.bytes.Load() {
		return fmt.Errorf("%w: it reports %d messages with %d bytes as processed, but %d with %d were sent", van.ErrMalformed,
			n.taken, n.bytes, o.next.Load(), o.bytes.Load())
	}
	raise(&o.placedBytes, n.bytes)
	raise(&o.placed, n.taken) // last, since Flush reads it
	o.p.sleepers.wakeAll()
	return nil
}

// raise raises a to at least n.
func raise(a *atomic.Uint64, n uint64) {
	for old := a.Load(); old < n; old = a.Load() {
		if a.CompareAndSwap(old, n) {
			return
		}
	}
}

// keyMem is the key frame of messages with data.
var keyMem = backend.Bytes(binary.LittleEndian.AppendUint64(nil, dataKey))

// peers are all ranks of a window.
type peers []*peer

// takeBack waits until transports no longer read memory of callers.
func (l peers) takeBack(ctx context.Context, b *base) error {
	if !l.lends() {
		return nil
	}
	if x, ok := van.As[van.Canceler](b.app.Van()); ok {
		l.lent(func(seq uint64) {
			x.Cancel(van.Requests{App: int32(b.id), Customer: int32(b.id), First: b.timestamp(seq), Count: 1})
		})
		return nil
	}
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for l.lends() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return &van.Error{Op: "close window", Node: b.app.Name(), Detail: "the transport still reads memory of puts",
				Err: van.TimedOut(context.Cause(ctx))}
		}
	}
	return nil
}

// lent calls f with the numbers of messages whose memory a transport reads.
func (l peers) lent(f func(seq uint64)) {
	for _, p := range l {
		for i := range p.out.lendings {
			if seq := p.out.lendings[i].seq.Load(); seq != 0 {
				f(seq - 1)
			}
		}
	}
}

// lends reports whether there are any.
func (l peers) lends() (any bool) {
	l.lent(func(uint64) { any = true })
	return any
}
