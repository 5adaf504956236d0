package window

// What comes from a rank: messages, which take effect in the order of their numbers, and signals.

import (
	"cmp"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// errStale: a put is for a window that is no more. What else comes late is not worth a word.
var errStale = fmt.Errorf("%w: a message for a window before this one, or after its end", van.ErrMalformed)

// inbox is what comes from a rank.
type inbox struct {
	p       *peer
	signals []atomic.Int64

	mu         sync.Mutex    // held while a message of it is taken; guards what follows; behind the outbox's
	expected   atomic.Uint64 // number of the next message, changed with mu held, as the next one
	takenBytes atomic.Uint64
	told       uint64 // what the last verbTaken said
	toldBytes  uint64
	answer     van.Message        // for those, and a verbOver
	tells      uint64             // number of both
	early      [ring]*van.Message // came before messages with lower numbers
}

// take takes one of a signal, if there is one.
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

// receive takes a message, when its turn comes, and those that have come before it and follow it. It tells whether the rank
// has closed its end.
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
			return false, fmt.Errorf("%w: message %d has come twice", van.ErrMalformed, n.seq)
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
		n, _ = parse(msg.Body) // it was parsed when it came
		l, e := i.accept(msg, &n)
		left, err = left || l, cmp.Or(e, err)
		msg.Release()
	}
}

// accept takes the message whose turn it is. mu is held.
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

// place writes the data of a put. It is all checked before.
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
	if err != nil { // the rank believes that the data is here
		w.layer.Fail(w.wrong("take a put", i.p.rank, err))
	}
	return err
}

// tell says how much has been taken. mu is held.
func (i *inbox) tell(taken, bytes uint64) {
	i.told, i.toldBytes = taken, bytes
	p := i.p
	err := i.say(&note{verb: verbTaken, signal: noSignal, taken: taken, bytes: bytes})
	if err != nil && p.w.over.Load() == nil && p.gone.Load() == nil {
		p.w.layer.Fail(p.w.wrong("answer a put", p.rank, err))
	}
}

// say sends a message that is no put, nor answers one. mu is held.
func (i *inbox) say(n *note) error {
	m := i.p.message(&i.answer, n, false, i.p.w.timestamp(i.tells)|1)
	i.tells++
	return i.p.w.app.Send(m)
}

// leaves notes what the rank has taken, which has closed its end.
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

// quiesce waits for who is sending to the rank, or taking what comes from it: the window is over,
// and nobody else will. It tells whether the rank has closed its end.
func (p *peer) quiesce() (left bool) {
	p.out.mu.Lock()
	defer p.out.mu.Unlock()
	p.in.mu.Lock()
	defer p.in.mu.Unlock()
	for i, msg := range p.in.early {
		if msg != nil {
			if n, _ := parse(msg.Body); n.verb == verbClose { // it has overtaken what does not matter any more
				p.in.leaves(&n)
				left = true
			}
			msg.Release()
			p.in.early[i] = nil
		}
	}
	return left
}
