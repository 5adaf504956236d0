package window

// Received messages and signals of a rank. Messages take effect in the order of their numbers.

import (
	"cmp"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// errStale: a put is for a window that has ended, or for an earlier one. Other late messages are not reported.
var errStale = fmt.Errorf("%w: a message for a window before this one, or after its end", van.ErrMalformed)

// inbox is the receive state of a rank.
type inbox struct {
	p       *peer
	signals []atomic.Int64

	mu            sync.Mutex    // held while a message is processed; guards the fields below; locked after the outbox's mu
	expected      atomic.Uint64 // number of the next message; changed with mu held, as is takenBytes
	takenBytes    atomic.Uint64
	told          uint64 // the count in the last verbTaken
	toldBytes     uint64
	answer        van.Message        // for verbTaken and verbOver
	oddTimestamps uint64             // issued: for verbTaken, verbOver and verbClose
	early         [ring]*van.Message // messages that arrived before messages with lower numbers
}

// take consumes one count of a signal, if there is one.
func (i *inbox) take(signal int) bool {
	s := &i.signals[signal]
	for n := s.Load(); n > 0; n = s.Load() {
		if s.CompareAndSwap(n, n-1) {
			return true
		}
	}
	return false
}

// count adds one to a signal.
func (i *inbox) count(signal uint16) {
	if signal != noSignal {
		i.signals[signal].Add(1)
		i.p.sleepers.wakeAll()
	}
}

// receive processes a message when it is the next one, and then pending messages that follow it. It reports whether
// the rank has closed the window.
func (i *inbox) receive(msg *van.Message, n note) (left bool, err error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if w := i.p.w; w.over.Load() != nil {
		switch {
		case n.verb == verbPut:
			return false, errStale
		case n.verb == verbClose && w.closed.Load():
			i.leaves(&n)
			return true, nil
		}
		return false, nil
	}
	switch ahead := n.seq - i.expected.Load(); {
	case ahead >= ring:
		return false, fmt.Errorf("%w: message %d, want %d or one of the %d after it", van.ErrMalformed, n.seq, i.expected.Load(), ring-1)
	case ahead > 0: // the transport does not keep the order
		slot := &i.early[n.seq%ring]
		if *slot != nil {
			return false, fmt.Errorf("%w: message %d arrived twice", van.ErrMalformed, n.seq)
		}
		*slot = msg.Retain()
		return false, nil
	}
	for left, err = i.accept(msg, &n); ; {
		next := &i.early[i.expected.Load()%ring]
		if *next == nil {
			return left, err
		}
		msg, *next = *next, nil
		n, _ = parse(msg.Body) // it was parsed at its arrival
		l, e := i.accept(msg, &n)
		left, err = left || l, cmp.Or(e, err)
		msg.Release()
	}
}

// accept processes the next message. mu is held.
func (i *inbox) accept(msg *van.Message, n *note) (left bool, err error) {
	i.expected.Add(1)
	switch n.verb {
	case verbPut:
		if err := i.place(msg, n); err != nil {
			return false, err
		}
		i.count(n.signal)
	case verbClose:
		i.leaves(n)
		return true, nil
	}
	taken, bytes := i.expected.Load(), i.takenBytes.Load()
	if n.verb == verbAsk || taken-i.told >= tellEvery || bytes-i.toldBytes >= tellBytes {
		i.tell(taken, bytes)
	}
	return false, nil
}

// place writes the data of a put. Its arguments were checked before.
func (i *inbox) place(msg *van.Message, n *note) error {
	w, size := i.p.w, 0
	switch {
	case msg.Frames == 2:
		size = msg.Vals.Len()
	case msg.Frames != 0:
		return fmt.Errorf("%w: %d frames, want 0 or 2", van.ErrMalformed, msg.Frames)
	}
	i.takenBytes.Add(uint64(size))
	switch room := uint64(w.mem.Len()); {
	case n.offset > room || uint64(size) > room-n.offset:
		return fmt.Errorf("%w: a put of %d bytes at offset %d, beyond the %d of the window", van.ErrMalformed, size, n.offset, room)
	case n.signal != noSignal && int(n.signal) >= w.signals:
		return &van.FieldError{Field: "body signal", Value: n.signal, Want: fmt.Sprintf("one of %d from 0", w.signals)}
	case size == 0:
		return nil
	}
	err := w.copyIn(int(n.offset), msg.Vals)
	if err != nil { // the rank assumes that the data was written
		w.layer.Fail(w.wrong("take a put", i.p.rank, err))
	}
	return err
}

// tell reports the processed messages to the rank. mu is held.
func (i *inbox) tell(taken, bytes uint64) {
	i.told, i.toldBytes = taken, bytes
	p := i.p
	err := i.say(&note{verb: verbTaken, signal: noSignal, taken: taken, bytes: bytes})
	if err != nil && p.w.over.Load() == nil && p.gone.Load() == nil {
		p.w.layer.Fail(p.w.wrong("answer a put", p.rank, err))
	}
}

// say sends a message that is neither a put nor an answer to one. mu is held.
func (i *inbox) say(n *note) error {
	return i.p.w.app.Send(i.p.message(&i.answer, n, false, i.p.oddTimestamp()))
}

// leaves records the counts of a rank that has closed the window.
func (i *inbox) leaves(n *note) {
	if err := i.p.out.learn(n); err != nil {
		i.p.w.refused.Add(1)
	}
}

// put is a put of this rank to itself.
func (i *inbox) put(op string, offset int, data backend.Mem, signal uint16) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	if err := i.p.failure(op); err != nil {
		return err
	}
	if err := i.p.w.copyIn(offset, data); err != nil {
		return err
	}
	i.count(signal)
	return nil
}

// quiesce waits for calls that send to the rank or process its messages. The window is over, so there are no later
// ones. It reports whether the rank has closed the window.
func (p *peer) quiesce() (left bool) {
	p.out.mu.Lock()
	defer p.out.mu.Unlock()
	p.in.mu.Lock()
	defer p.in.mu.Unlock()
	for i, msg := range p.in.early {
		if msg != nil {
			if n, _ := parse(msg.Body); n.verb == verbClose { // it is ahead of messages that no longer matter
				p.in.leaves(&n)
				left = true
			}
			msg.Release()
			p.in.early[i] = nil
		}
	}
	return left
}
