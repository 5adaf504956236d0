package window

// The calls of a window: what they refuse, and which part of the window does the rest.

import (
	"context"
	"fmt"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/van"
)

// Put writes src to the memory of a rank, offset bytes behind its beginning. It returns when the
// data is on its way: src is the library's until Flush to that rank, or Close, has returned. It waits while too much
// is under way to the rank.
//
// In a window on devices it is put into a stream of the device, af.DefaultStream if none is named, and returns at once; so
// are PutSignal and Signal. src is complete when the stream comes there, and the caller's behind that in the stream. With
// af.Complete it is the caller's when Flush has returned. src is memory of the device, or pinned host memory of the node's backend
// (backend.HostPinner); other host memory is refused, since a copy of it would wait for all that is in the stream.
func (w *Window) Put(ctx context.Context, rank, offset int, src af.Tensor, on ...af.StreamOption) error {
	return w.put(ctx, "put", rank, offset, src, noSignal, on)
}

// PutSignal is Put and Signal in one message: who has waited for the signal has the data.
func (w *Window) PutSignal(ctx context.Context, rank, offset int, src af.Tensor, signal int, on ...af.StreamOption) error {
	if signal < 0 || signal >= w.base.signals {
		return w.base.bad("put and signal", w.base.noSuch(signal))
	}
	return w.put(ctx, "put and signal", rank, offset, src, uint16(signal), on)
}

// Signal adds one to a signal of this rank at another one, behind everything that was put there before.
func (w *Window) Signal(ctx context.Context, rank, signal int, on ...af.StreamOption) error {
	if signal < 0 || signal >= w.base.signals {
		return w.base.bad("signal", w.base.noSuch(signal))
	}
	return w.put(ctx, "signal", rank, 0, af.Tensor{}, uint16(signal), on)
}

func (b *base) noSuch(signal int) error {
	return fmt.Errorf("%w: signal %d, want one of %d from 0", van.ErrInvalid, signal, b.signals)
}

// notOnHost takes the tensor by value, so that no other call's goes to the heap.
func notOnHost(t af.Tensor) error {
	return fmt.Errorf("%w: %s, want host memory; windows on devices are opened with Options.Device", van.ErrInvalid, &t)
}

// oneStream is the stream that a call about a rank names, or else.
func (w *Window) oneStream(op string, rank int, on []af.StreamOption, or af.Stream) (uintptr, error) {
	for i, opt := range on {
		s, is := opt.(af.Stream)
		if !is {
			return 0, w.base.bad(op, fmt.Errorf("%w: option %d is nil", van.ErrInvalid, i))
		}
		or = s
	}
	switch {
	case w.dev == nil && len(on) > 0 && or != af.Complete:
		return 0, w.base.bad(op, fmt.Errorf("%w: a stream of the device, and a window on the host: wait for the stream before this call, or open the window with Options.Device", van.ErrInvalid))
	case rank < 0 || rank >= len(w.peers):
		return 0, w.base.bad(op, fmt.Errorf("%w: rank %d, want 0 to %d", van.ErrInvalid, rank, len(w.peers)-1))
	}
	return uintptr(or), nil
}

func (w *Window) put(ctx context.Context, op string, rank, offset int, src af.Tensor, signal uint16, on []af.StreamOption) error {
	n := src.Len()
	stream, err := w.oneStream(op, rank, on, af.DefaultStream)
	if err != nil {
		return err
	}
	switch m := src.Mem(); {
	case !m.OnHost() && w.dev == nil:
		return w.base.bad(op, notOnHost(src))
	case n > af.MaxTensorBytes:
		return w.base.bad(op, fmt.Errorf("%w: %d bytes, want at most %d", van.ErrInvalid, n, af.MaxTensorBytes))
	case offset < 0 || offset > w.base.mem.Len() || n > w.base.mem.Len()-offset:
		return w.base.bad(op, fmt.Errorf("%w: %d bytes at offset %d, beyond the %d of the window", van.ErrInvalid, n, offset, w.base.mem.Len()))
	}
	if w.dev != nil {
		return w.dev.outs[rank].put(op, offset, src.Mem(), signal, stream)
	}
	p, o := w.peers[rank], &w.peers[rank].out
	if rank == w.base.self {
		return p.in.put(op, offset, src.Mem(), signal)
	}
	for {
		o.mu.Lock()
		if o.room() {
			break
		}
		o.mu.Unlock()
		if err := p.await(ctx, op, waitRoom, 0); err != nil {
			return err
		}
	}
	err = o.unsendable(op)
	if err == nil {
		if err = o.post(&note{verb: verbPut, offset: uint64(offset), signal: signal}, src.Mem()); err != nil {
			err = w.base.wrong(op, rank, err)
		}
	}
	o.mu.Unlock()
	return err
}

// Flush waits until everything that was put before is in the rank's memory, and every signal counted: its
// sources are the caller's again. In a window on devices with a stream it returns at once, and what is put into that
// stream behind it comes behind what was put to the rank in others.
func (w *Window) Flush(ctx context.Context, rank int, on ...af.StreamOption) error {
	const op = "flush"
	stream, err := w.oneStream(op, rank, on, af.Complete)
	if err != nil {
		return err
	}
	switch {
	case w.dev != nil && w.base.closed.Load():
		return w.base.wrong(op, rank, errClosed)
	case w.dev != nil && stream != uintptr(af.Complete):
		return w.dev.outs[rank].flushIn(op, stream)
	}
	return w.flush(ctx, op, rank)
}

// flush waits on the host.
func (w *Window) flush(ctx context.Context, op string, rank int) error {
	switch {
	case w.dev != nil:
		return w.dev.outs[rank].flush(ctx, op)
	case rank == w.base.self:
		return nil
	}
	want, done, err := w.peers[rank].out.ask(op)
	if done || err != nil {
		return err
	}
	return w.peers[rank].await(ctx, op, waitFlushed, want)
}

// WaitSignal waits until a rank has signalled, and takes one: each Signal and PutSignal adds one to
// the signal of that number which the rank has here, each WaitSignal takes one away. What the rank put here before
// is in this rank's memory then. When it fails it has taken none, and may be called again, unless the
// error says that the rank is lost or has closed the window.
//
// In a window on devices with a stream it is the stream that waits, without a limit, and the call returns at once. When the
// window is over the stream goes on all the same: see Check. Streams take the signals of one number in the order of the calls; a call without
// a stream takes one that has come and that no stream waits for, also if it began to wait before the stream.
func (w *Window) WaitSignal(ctx context.Context, rank, signal int, on ...af.StreamOption) error {
	const op = "wait for a signal"
	stream, err := w.oneStream(op, rank, on, af.Complete)
	if err != nil {
		return err
	}
	switch {
	case signal < 0 || signal >= w.base.signals:
		return w.base.bad(op, w.base.noSuch(signal))
	case w.dev != nil && stream == uintptr(af.Complete):
		return w.dev.ins[rank].await(ctx, op, signal)
	case w.dev != nil:
		return w.dev.ins[rank].wait(op, signal, stream)
	}
	p := w.peers[rank]
	if p.in.take(signal) {
		return nil
	}
	return p.await(ctx, op, waitSignal, uint64(signal))
}
