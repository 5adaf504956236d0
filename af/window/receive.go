package window

// What comes from other ranks.

import (
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/stepaf/stepaf-go/internal/logx"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// errStale: a message is for a window that is no more.
var errStale = fmt.Errorf("%w: a message for a window before this one, or after its end", van.ErrMalformed)

// receive handles a message. It runs on a goroutine of the transport.
func (w *Window) receive(msg *van.Message) {
	if err := w.handle(msg); err != nil {
		w.refused.Add(1)
		if n, show := w.app.Rarely("window: " + logx.Kind(err)); show {
			w.app.Log().Warn("refused a message to a window", "window", w.String(), "from", w.app.PeerName(msg.Sender), "err", err, "so far", n)
		}
	}
}

// handle handles a message, or says why it makes no sense.
func (w *Window) handle(msg *van.Message) error {
	rank, member := slices.BinarySearch(w.layer.NodeIDs(), msg.Sender)
	n, err := parse(msg.Body)
	switch {
	case err != nil:
		return err
	case !member || rank == w.self:
		return fmt.Errorf("%w: %s is not another rank of %s", van.ErrMalformed, van.NodeName(msg.Sender), w)
	case n.window != w.tenant.Number || n.epoch != w.tenant.Epoch:
		return errStale
	}
	p := w.peers[rank]
	switch {
	case n.verb == verbTaken:
		return p.learn(&n)
	case n.verb == verbOver && w.dev != nil:
		w.dev.over(rank)
		w.fail(fmt.Errorf("%w: the window is over at %s", van.ErrClosed, w.layer.Name(rank)))
		return nil
	case n.verb == verbOver, n.verb == verbPut && w.dev != nil:
		return fmt.Errorf("%w: verb %d, which is not for windows of this kind", van.ErrMalformed, n.verb)
	}
	p.recv.Lock()
	defer p.recv.Unlock()
	if w.over.Load() != nil {
		if !w.closed.Load() || n.verb != verbClose {
			return errStale
		}
		p.leaves(&n)
		return nil
	}
	switch ahead := n.seq - p.expected.Load(); {
	case ahead >= ring:
		return fmt.Errorf("%w: message %d, want %d or one of the %d after it", van.ErrMalformed, n.seq, p.expected.Load(), ring-1)
	case ahead > 0: // the transport does not keep the order
		slot := &p.early[n.seq%ring]
		if *slot != nil {
			return fmt.Errorf("%w: message %d has come twice", van.ErrMalformed, n.seq)
		}
		*slot = msg.Retain()
		return nil
	}
	for err = p.accept(msg, &n); ; {
		next := &p.early[p.expected.Load()%ring]
		if *next == nil {
			return err
		}
		msg, *next = *next, nil
		n, _ = parse(msg.Body) // it was parsed when it came
		if e := p.accept(msg, &n); e != nil {
			err = e
		}
		msg.Release()
	}
}

// accept takes the message whose turn it is. recv is held.
func (p *peer) accept(msg *van.Message, n *note) error {
	p.expected.Add(1)
	switch n.verb {
	case verbPut:
		if err := p.place(msg, n); err != nil {
			return err
		}
		p.count(n.signal)
	case verbClose:
		p.leaves(n)
		return nil
	}
	taken, bytes := p.expected.Load(), p.takenBytes.Load()
	if n.verb == verbAsk || taken-p.told >= tellEvery || bytes-p.toldBytes >= tellBytes {
		p.tell(taken, bytes)
	}
	return nil
}

// place writes the data of a put. It is all checked before.
func (p *peer) place(msg *van.Message, n *note) error {
	w, size := p.w, 0
	switch {
	case msg.Frames == 2:
		size = msg.Vals.Len()
	case msg.Frames != 0:
		return fmt.Errorf("%w: %d frames, want 0 or 2", van.ErrMalformed, msg.Frames)
	}
	p.takenBytes.Add(uint64(size))
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
		w.layer.Fail(&van.Error{Op: "take a put", Node: w.app.Name(), Peer: w.layer.Name(p.rank), Detail: w.String(), Err: err})
	}
	return err
}

// copyIn writes to this rank's memory.
func (w *Window) copyIn(offset int, data backend.Mem) error {
	if data.Len() == 0 {
		return nil
	}
	return w.app.Backend().Copy(w.mem.Sub(offset, data.Len()), data)
}

// tell says how much has been taken. recv is held.
func (p *peer) tell(taken, bytes uint64) {
	p.told, p.toldBytes = taken, bytes
	n := note{verb: verbTaken, signal: noSignal, taken: taken, bytes: bytes}
	m := p.message(&p.answer, &n, false, p.w.timestamp(p.tells)|1)
	p.tells++
	if err := p.w.app.Send(m); err != nil && p.w.over.Load() == nil && p.gone.Load() == nil {
		p.w.layer.Fail(&van.Error{Op: "answer a put", Node: p.w.app.Name(), Peer: p.w.layer.Name(p.rank), Detail: p.w.String(), Err: err})
	}
}

// learn notes how many messages the rank has taken.
func (p *peer) learn(n *note) error {
	if n.taken > p.next.Load() || n.bytes > p.bytes.Load() {
		return fmt.Errorf("%w: it has taken %d messages with %d bytes, and was sent %d with %d", van.ErrMalformed,
			n.taken, n.bytes, p.next.Load(), p.bytes.Load())
	}
	raise(&p.placed, n.taken)
	raise(&p.placedBytes, n.bytes)
	p.wakeAll()
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

// leaves notes that the rank has closed its window.
func (p *peer) leaves(n *note) {
	if err := p.learn(n); err != nil {
		p.w.refused.Add(1)
	}
	p.w.leave(p.rank, errRankClosed)
}

var errRankClosed = fmt.Errorf("%w: that rank's window", van.ErrClosed)

// quiesce waits for who is sending to the rank, or taking what comes from it: the window is over,
// and nobody else will.
func (p *peer) quiesce() {
	p.send.Lock()
	defer p.send.Unlock()
	p.recv.Lock()
	defer p.recv.Unlock()
	for i, msg := range p.early {
		if msg != nil {
			if n, _ := parse(msg.Body); n.verb == verbClose { // it has overtaken what does not matter any more
				p.leaves(&n)
			}
			msg.Release()
			p.early[i] = nil
		}
	}
}
