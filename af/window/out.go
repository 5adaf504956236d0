package window

// What is sent to a rank, and how much of it may be under way.

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

// What may be under way to a rank before a Put waits. The receiver tells what it has taken often enough
// that neither is ever reached by messages that it has all taken.
const (
	maxUnderWay = 128
	maxBytes    = 32 << 20
	tellEvery   = maxUnderWay / 4
	tellBytes   = maxBytes / 4

	// ring is how many numbers of messages can be told apart: those that Put waits for, and what Flush
	// asks, once for each of them at most.
	ring = 2*maxUnderWay + 2
)

// outbox is what is sent to a rank.
type outbox struct {
	p   *peer
	mu  sync.Mutex  // held while a message gets its number and is sent, and while something is put into a stream for the rank
	msg van.Message // with mu held, as all changes of the next two

	next     atomic.Uint64 // number of the next message
	bytes    atomic.Uint64 // data in all messages before that
	said     bool          // that this end is closed; guarded by mu, as the next two
	puts     uint64        // number behind the last put or signal
	asked    uint64        // a verbTaken for all lower numbers was asked for
	lendings [ring]lending // by number

	placed      atomic.Uint64 // messages that it has taken
	placedBytes atomic.Uint64 // data in those
}

// lending is the memory of one message that a transport reads.
type lending struct {
	p   *peer
	mem backend.Mem
	seq atomic.Uint64 // 1 more than the message's number, 0 when nothing is lent
}

// Sent implements van.Completion.
func (l *lending) Sent() {
	mem := l.mem
	l.mem = backend.Mem{}
	l.seq.Store(0)
	mem.Release()
	l.p.sleepers.wakeAll()
}

// room tells whether another message may go. Without mu held it is a guess.
func (o *outbox) room() bool {
	next := o.next.Load()
	return next-o.placed.Load() < maxUnderWay && o.bytes.Load()-o.placedBytes.Load() <= maxBytes && o.lendings[next%ring].seq.Load() == 0 ||
		o.p.end() != nil
}

// flushed tells whether all messages with lower numbers have been taken, and their memory is not read any more.
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

// post gives a message its number and sends it. mu is held.
func (o *outbox) post(n *note, data backend.Mem) error {
	w, seq := o.p.w, o.next.Load()
	n.seq = seq
	m := o.p.message(&o.msg, n, true, w.timestamp(seq))
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
	o.next.Store(seq + 1) // the answer may be here before Send returns
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

// ask has the rank say what it has taken, unless it need not. It returns the number behind all that was put, and
// whether there is nothing to wait for.
func (o *outbox) ask(op string) (want uint64, done bool, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	want = o.puts
	if o.flushed(want) {
		return want, true, nil
	}
	err = o.p.failure(op)
	if o.placed.Load() >= want {
		return want, false, nil // it may have closed, and has taken everything before
	}
	if err == nil && o.asked < want {
		if err = o.post(&note{verb: verbAsk, signal: noSignal}, backend.Mem{}); err != nil {
			return want, false, o.p.w.wrong(op, o.p.rank, err)
		}
		o.asked = o.next.Load()
	}
	return want, false, err
}

// sayClosed tells the rank that nothing follows.
func (o *outbox) sayClosed() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.said = true
	if err := o.p.end(); err != nil && err != errRankClosed { // who has closed waits for all others
		return
	}
	n := note{verb: verbClose, signal: noSignal, taken: o.p.in.expected.Load(), bytes: o.p.in.takenBytes.Load()}
	if err := o.post(&n, backend.Mem{}); err != nil {
		o.p.w.app.Rarely("window close").Info("could not tell a rank that its window was closed",
			"window", o.p.w.String(), "rank", o.p.rank, "err", err)
	}
}

// unsendable is why a call may send nothing more to the rank. mu is held.
func (o *outbox) unsendable(op string) error {
	if o.said {
		return o.p.w.wrong(op, o.p.rank, errClosed)
	}
	return o.p.failure(op)
}

// learn notes how many messages the rank has taken.
func (o *outbox) learn(n *note) error {
	if n.taken > o.next.Load() || n.bytes > o.bytes.Load() {
		return fmt.Errorf("%w: it has taken %d messages with %d bytes, and was sent %d with %d", van.ErrMalformed,
			n.taken, n.bytes, o.next.Load(), o.bytes.Load())
	}
	raise(&o.placedBytes, n.bytes)
	raise(&o.placed, n.taken) // the last, as Flush looks at it
	o.p.sleepers.wakeAll()
	return nil
}

// raise makes a at least n.
func raise(a *atomic.Uint64, n uint64) {
	for old := a.Load(); old < n; old = a.Load() {
		if a.CompareAndSwap(old, n) {
			return
		}
	}
}

// keyMem is the key frame of data.
var keyMem = backend.Bytes(binary.LittleEndian.AppendUint64(nil, dataKey))

// peers are all ranks of a window.
type peers []*peer

// takeBack makes what transports still read the caller's again.
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

// lent calls f with the numbers of messages of which a transport reads memory.
func (l peers) lent(f func(seq uint64)) {
	for _, p := range l {
		for i := range p.out.lendings {
			if seq := p.out.lendings[i].seq.Load(); seq != 0 {
				f(seq - 1)
			}
		}
	}
}

// lends tells whether there are any.
func (l peers) lends() (any bool) {
	l.lent(func(uint64) { any = true })
	return any
}
