package window

// What this rank puts and signals, and how much of it may be under way.

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/clock"
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
	l.p.wakeAll()
}

// Put writes src to the memory of a rank, offset bytes behind its beginning. It returns when the
// data is on its way: src is the library's until Flush to that rank, or Close, has returned. It waits while too much
// is under way to the rank.
//
// In a window on devices it is put into a stream of the device, af.DefaultStream if none is named, and returns at once; so
// are PutSignal and Signal. src is complete when the stream comes there, and the caller's behind that in the stream. With
// af.Complete it is the caller's when Flush has returned. src is memory of the device, or pinned host memory of the node's backend
// (backend.HostPinner); other host memory is refused, since a copy of it would wait for all that is in the stream.
func (w *Window) Put(ctx context.Context, rank, offset int, src af.Tensor, on ...af.Stream) error {
	return w.put(ctx, "put", rank, offset, src, noSignal, on)
}

// PutSignal is Put and Signal in one message: who has waited for the signal has the data.
func (w *Window) PutSignal(ctx context.Context, rank, offset int, src af.Tensor, signal int, on ...af.Stream) error {
	if signal < 0 || signal >= w.signals {
		return w.bad("put and signal", w.noSuch(signal))
	}
	return w.put(ctx, "put and signal", rank, offset, src, uint16(signal), on)
}

// Signal adds one to a signal of this rank at another one, behind everything that was put there before.
func (w *Window) Signal(ctx context.Context, rank, signal int, on ...af.Stream) error {
	if signal < 0 || signal >= w.signals {
		return w.bad("signal", w.noSuch(signal))
	}
	return w.put(ctx, "signal", rank, 0, af.Tensor{}, uint16(signal), on)
}

func (w *Window) noSuch(signal int) error {
	return fmt.Errorf("%w: signal %d, want one of %d from 0", van.ErrInvalid, signal, w.signals)
}

// notOnHost takes the tensor by value, so that no other call's goes to the heap.
func notOnHost(t af.Tensor) error {
	return fmt.Errorf("%w: %s, want host memory; windows on devices are opened with Options.Device", van.ErrInvalid, &t)
}

// bad is the error of arguments that make no sense.
func (w *Window) bad(op string, err error) error {
	return &van.Error{Op: op, Node: w.app.Name(), Detail: w.String(), Err: err}
}

// String names the window, for errors.
func (w *Window) String() string {
	return fmt.Sprintf("window %d of communicator %d", w.tenant.Number, w.layer.ID())
}

func (w *Window) badRank(op string, rank int) error {
	return w.bad(op, fmt.Errorf("%w: rank %d, want 0 to %d", van.ErrInvalid, rank, len(w.peers)-1))
}

// oneStream is the stream that a call names, or else.
func (w *Window) oneStream(op string, on []af.Stream, or af.Stream) (uintptr, error) {
	switch {
	case len(on) > 1:
		return 0, w.bad(op, fmt.Errorf("%w: %d streams, want one", van.ErrInvalid, len(on)))
	case w.dev == nil && len(on) > 0 && on[0] != af.Complete:
		return 0, w.bad(op, fmt.Errorf("%w: a stream of the device, and a window on the host: wait for the stream before this call, or open the window with Options.Device", van.ErrInvalid))
	case len(on) > 0:
		or = on[0]
	}
	return uintptr(or), nil
}

func (w *Window) put(ctx context.Context, op string, rank, offset int, src af.Tensor, signal uint16, on []af.Stream) error {
	n := src.Len()
	stream, err := w.oneStream(op, on, af.DefaultStream)
	if err != nil {
		return err
	}
	switch m := src.Mem(); {
	case rank < 0 || rank >= len(w.peers):
		return w.badRank(op, rank)
	case !m.OnHost() && w.dev == nil:
		return w.bad(op, notOnHost(src))
	case n > af.MaxTensorBytes:
		return w.bad(op, fmt.Errorf("%w: %d bytes, want at most %d", van.ErrInvalid, n, af.MaxTensorBytes))
	case offset < 0 || offset > w.mem.Len() || n > w.mem.Len()-offset:
		return w.bad(op, fmt.Errorf("%w: %d bytes at offset %d, beyond the %d of the window", van.ErrInvalid, n, offset, w.mem.Len()))
	}
	if w.dev != nil {
		return w.dev.put(op, rank, offset, src.Mem(), signal, stream)
	}
	p := w.peers[rank]
	if rank == w.self {
		return p.putOwn(op, offset, src.Mem(), signal)
	}
	for {
		p.send.Lock()
		if p.room() {
			break
		}
		p.send.Unlock()
		if err := p.await(ctx, op, waitRoom, 0); err != nil {
			return err
		}
	}
	err = p.unsendable(op)
	if err == nil {
		err = p.post(&note{verb: verbPut, offset: uint64(offset), signal: signal}, src.Mem())
	}
	p.send.Unlock()
	return err
}

// Flush waits until everything that was put before is in the rank's memory, and every signal counted: its
// sources are the caller's again. In a window on devices with a stream it returns at once, and what is put into that
// stream behind it comes behind what was put to the rank in others.
func (w *Window) Flush(ctx context.Context, rank int, on ...af.Stream) error {
	const op = "flush"
	stream, err := w.oneStream(op, on, af.Complete)
	if err != nil {
		return err
	}
	if rank < 0 || rank >= len(w.peers) {
		return w.badRank(op, rank)
	}
	switch {
	case w.dev != nil && w.closed.Load():
		return w.dev.links[rank].wrong(op, errClosed)
	case w.dev != nil && stream != uintptr(af.Complete):
		return w.dev.flushIn(op, rank, stream)
	}
	return w.flush(ctx, op, rank)
}

// flush waits on the host.
func (w *Window) flush(ctx context.Context, op string, rank int) (err error) {
	switch {
	case w.dev != nil:
		return w.dev.flush(ctx, op, rank)
	case rank == w.self:
		return nil
	}
	p := w.peers[rank]
	p.send.Lock()
	want := p.puts
	if p.flushed(want) {
		p.send.Unlock()
		return nil
	}
	err = p.failure(op)
	if p.placed.Load() >= want {
		err = nil // it has closed, and taken everything before
	}
	if err == nil && p.asked < want && p.placed.Load() < want {
		if err = p.post(&note{verb: verbAsk, signal: noSignal}, backend.Mem{}); err == nil {
			p.asked = p.next.Load()
		}
	}
	p.send.Unlock()
	if err != nil {
		return err
	}
	return p.await(ctx, op, waitFlushed, want)
}

// room tells whether another message may go. Without send held it is a guess.
func (p *peer) room() bool {
	next := p.next.Load()
	return next-p.placed.Load() < maxUnderWay && p.bytes.Load()-p.placedBytes.Load() <= maxBytes && p.lendings[next%ring].seq.Load() == 0 ||
		p.over() != nil
}

// flushed tells whether all messages with lower numbers have been taken, and their memory is not read any more.
func (p *peer) flushed(want uint64) bool {
	if p.placed.Load() < want {
		return false
	}
	for i := range p.lendings {
		if seq := p.lendings[i].seq.Load(); seq != 0 && seq <= want {
			return false
		}
	}
	return true
}

// post gives a message its number and sends it. send is held.
func (p *peer) post(n *note, data backend.Mem) error {
	w, seq := p.w, p.next.Load()
	n.seq = seq
	m := p.message(&p.out, n, true, w.timestamp(seq))
	var l *lending
	if data.Len() > 0 {
		datamsg.SetData(m, keyMem, data, backend.Mem{}, van.TypeOther)
		m.Key, m.ValLen = dataKey, int32(data.Len())
		l = &p.lendings[seq%ring]
		data.Retain()
		l.mem = data
		l.seq.Store(seq + 1)
		m.Done = l
	}
	p.bytes.Add(uint64(data.Len()))
	p.next.Store(seq + 1) // the answer may be here before Send returns
	err := w.app.Send(m)
	m.Vals = backend.Mem{}
	if err == nil && n.verb == verbPut {
		p.puts = seq + 1
	}
	if err != nil {
		p.next.Store(seq)
		p.bytes.Add(-uint64(data.Len()))
		if l != nil {
			l.Sent()
		}
	}
	return err
}

// message makes m one that says n.
func (p *peer) message(m *van.Message, n *note, push bool, ts int32) *van.Message {
	w := p.w
	n.window, n.epoch = w.tenant.Number, w.tenant.Epoch
	m.Reset()
	m.Receiver, m.Request, m.Push, m.Head, m.Timestamp = p.id, true, push, van.Single, ts
	m.AppID, m.CustomerID = int32(w.id), int32(w.id)
	m.Body = n.append(m.Body)
	return m
}

// sayClosed tells the rank that nothing follows.
func (p *peer) sayClosed() {
	p.send.Lock()
	defer p.send.Unlock()
	p.said = true
	if err := p.over(); err != nil && err != errRankClosed { // who has closed waits for all others
		return
	}
	n := note{verb: verbClose, signal: noSignal, taken: p.expected.Load(), bytes: p.takenBytes.Load()}
	if err := p.post(&n, backend.Mem{}); err != nil {
		if k, show := p.w.app.Rarely("window close"); show {
			p.w.app.Log().Info("could not tell a rank that its window was closed", "window", p.w.String(), "rank", p.rank, "err", err, "so far", k)
		}
	}
}

// putOwn is a put to this rank itself.
func (p *peer) putOwn(op string, offset int, data backend.Mem, signal uint16) error {
	p.recv.Lock()
	defer p.recv.Unlock()
	if err := p.failure(op); err != nil {
		return err
	}
	if err := p.w.copyIn(offset, data); err != nil {
		return err
	}
	p.count(signal)
	return nil
}

// unsendable is why a call may send nothing more to the rank. send is held.
func (p *peer) unsendable(op string) error {
	if p.said {
		return &van.Error{Op: op, Node: p.w.app.Name(), Peer: p.w.layer.Name(p.rank), Detail: p.w.String(), Err: errClosed}
	}
	return p.failure(op)
}

// over is why nothing can be sent to the rank, or nil.
func (p *peer) over() error {
	if err := p.w.over.Load(); err != nil {
		return *err
	}
	if err := p.gone.Load(); err != nil {
		return *err
	}
	return nil
}

// failure is over as the error of a call.
func (p *peer) failure(op string) error {
	if err := p.over(); err != nil {
		return &van.Error{Op: op, Node: p.w.app.Name(), Peer: p.w.layer.Name(p.rank), Detail: p.w.String(), Err: err}
	}
	return nil
}

// elapsed is for errors.
func elapsed(begun uint64) time.Duration { return time.Duration(clock.Now() - begun) }

var keyMem = backend.Bytes(keyFrame)
