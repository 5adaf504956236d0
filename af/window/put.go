package window

// The calls of a window: argument checks and dispatch to host or device windows.

import (
	"context"
	"fmt"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/van"
)

// Put writes src to the memory of a rank, at offset bytes. It returns when the data is on its way: the library uses
// src until Flush to that rank, or Close, has returned. Put waits while the limits of data in flight to the rank are
// reached.
//
// In a device window, Put, PutSignal and Signal queue their work in a stream of the device, by default
// af.DefaultStream, and return at once. src must be complete when the stream reaches the work, and is the caller's
// for later work of that stream. With af.Complete, src is the caller's when Flush has returned. src is device memory,
// or pinned host memory of the node's backend (backend.HostPinner). Other host memory is refused, since its copy
// would wait for all work in the stream.
func (w *Window) Put(ctx context.Context, rank, offset int, src af.Tensor, on ...af.StreamOption) error {
	return w.put(ctx, "put", rank, offset, src, noSignal, on)
}

// PutSignal is Put and Signal in one message: a receiver that has waited for the signal has the data.
func (w *Window) PutSignal(ctx context.Context, rank, offset int, src af.Tensor, signal int, on ...af.StreamOption) error {
	if signal < 0 || signal >= w.base.signals {
		return w.base.bad("put and signal", w.base.noSuch(signal))
	}
	return w.put(ctx, "put and signal", rank, offset, src, uint16(signal), on)
}

// Signal adds one to a signal of this rank at another rank, after everything that was put there before.
func (w *Window) Signal(ctx context.Context, rank, signal int, on ...af.StreamOption) error {
	if signal < 0 || signal >= w.base.signals {
		return w.base.bad("signal", w.base.noSuch(signal))
	}
	return w.put(ctx, "signal", rank, 0, af.Tensor{}, uint16(signal), on)
}

func (b *base) noSuch(signal int) error {
	return fmt.Errorf("%w: signal %d, want one of %d from 0", van.ErrInvalid, signal, b.signals)
}

// notOnHost takes the tensor by value, so that tensors of valid calls are not moved to the heap.
func notOnHost(t af.Tensor) error {
	return fmt.Errorf("%w: %s, want host memory; windows on devices are opened with Options.Device", van.ErrInvalid, &t)
}

// oneStream returns the stream option of a call, or the default or.
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

// Flush waits until everything that was put before is in the rank's memory and every signal is counted; the sources
// are then the caller's again. In a device window with a stream, Flush returns at once: later work of that stream
// waits for everything that was put to the rank in other streams.
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

// flush is Flush on the host.
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

// WaitSignal waits for a signal of a rank, and consumes one count: each Signal and PutSignal adds one to that signal,
// each WaitSignal subtracts one. Everything that the rank put here before the signal is then in this rank's memory. A
// WaitSignal that fails has consumed none, and may be repeated, unless the error says that the rank is lost or has
// closed the window.
//
// In a device window with a stream, the stream waits, without a limit, and the call returns at once. If the window
// ends, the stream continues: see Check. Streams consume the counts of a signal in call order. A call without a
// stream consumes counts that have arrived and that no stream waits for, even if it began to wait before the stream.
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
