package backend

// Copies between host and device.

import (
	"context"
	"fmt"
	"runtime"
)

// copies queues copies, and waits for those on streams of its own.
type copies struct {
	c       *gpuContext
	streams *streamPool
	waiter  *waiter
}

// Copy copies between host and device or within the device, on a stream of its own,
// and returns when the bytes have arrived. It does not wait for other streams that still
// write src.
func (p *copies) Copy(dst, src Mem) error {
	if err := p.copyable("Copy", dst, src); err != nil || src.Len() == 0 {
		return err
	}
	if dst.OnHost() && src.OnHost() {
		copy(dst.Host(), src.Host())
		return nil
	}
	w := copying{streams: p.streams}
	err := p.c.enter(func() (err error) {
		if w.stream, err = p.streams.take(); err != nil {
			return err
		}
		err = p.queue(dst, src, w.stream)
		if err != nil {
			p.streams.put(w.stream)
		}
		return err
	})
	if err == nil {
		// The copy uses the caller's memory until the stream is idle, so only that or a
		// failed device ends this wait.
		err = p.waiter.wait(context.Background(), &w)
		if e := p.c.with("Copy", func() error { p.streams.put(w.stream); return nil }); err == nil {
			err = e
		}
	}
	keep(dst, src)
	return p.failed("Copy", dst, src, err)
}

// keep keeps memory reachable up to this call if only the caller's Mem refers to it.
func keep(ms ...Mem) {
	for _, m := range ms {
		runtime.KeepAlive(m.ptr)
		runtime.KeepAlive(m.owner)
	}
}

// copying is a stream with one copy, for wait.
type copying struct {
	streams *streamPool
	stream  uintptr
}

func (w *copying) Query() (done bool, err error) {
	err = w.streams.c.enter(func() (err error) {
		done, err = w.streams.done(w.stream)
		return err
	})
	return done, err
}

func (w *copying) check() error { return nil }

// CopyAsync queues a copy on stream.
func (p *copies) CopyAsync(dst, src Mem, stream uintptr) error {
	if err := p.copyable("CopyAsync", dst, src); err != nil || src.Len() == 0 {
		return err
	}
	if dst.OnHost() && src.OnHost() {
		return p.c.invalid("CopyAsync from host to host: want one of them on the device")
	}
	return p.failed("CopyAsync", dst, src, p.c.enter(func() error { return p.queue(dst, src, stream) }))
}

// CopyRecord queues a copy on stream and records e behind it.
func (g *gpu) CopyRecord(dst, src Mem, stream uintptr, e Event) error {
	if f, is := e.(*flagEvent); is && f.of == &g.events && !dst.OnHost() && !src.OnHost() && src.Len() > 0 {
		if err := g.copyable("CopyRecord", dst, src); err != nil {
			return err
		}
		if done, err := f.copied(uintptr(dst.ptr), uintptr(src.ptr), src.Len(), stream); done || err != nil {
			return g.copies.failed("CopyRecord", dst, src, err)
		}
	}
	if err := g.CopyAsync(dst, src, stream); err != nil {
		return err
	}
	return e.Record(stream)
}

// CopyFlags queues a copy on stream and behind it the writes of l.
func (g *gpu) CopyFlags(dst, src Mem, stream uintptr, l []FlagWrite) error {
	if dst.OnHost() || src.OnHost() || src.Len() == 0 || len(l) == 0 || len(l) > len(wordWrites{}.addrs) {
		captured, err := g.Capturing(stream)
		if captured {
			err = g.captured("CopyFlags", stream)
		}
		if err == nil {
			err = g.CopyAsync(dst, src, stream)
		}
		if err == nil {
			err = g.WriteFlags(stream, l)
		}
		return err
	}
	if err := g.copyable("CopyFlags", dst, src); err != nil {
		return err
	}
	w, err := g.writes("CopyFlags", l)
	if err != nil {
		return err
	}
	captured := false
	err = g.live(func() (err error) {
		captured, err = g.streamPool.once.copyIn(g.ctx, uintptr(dst.ptr), uintptr(src.ptr), src.Len(), stream, w)
		return err
	})
	switch {
	case captured:
		return g.captured("CopyFlags", stream)
	case notSupported(err) && err.(*driverError).call == batchWrites:
		err = g.enter(func() error { return g.writeEach(stream, w) })
	}
	return g.copies.failed("CopyFlags", dst, src, err)
}

func (p *copies) queue(dst, src Mem, stream uintptr) error {
	switch {
	case dst.OnHost():
		return p.streams.d.copyToHost(dst.ptr, uintptr(src.ptr), src.Len(), stream)
	case src.OnHost():
		return p.streams.d.copyToDevice(uintptr(dst.ptr), src.ptr, src.Len(), stream)
	default:
		return p.streams.d.copyAsync(uintptr(dst.ptr), uintptr(src.ptr), src.Len(), stream)
	}
}

// copyable checks that the lengths fit and that this device reaches both ends.
func (p *copies) copyable(op string, dst, src Mem) error {
	if dst.Len() != src.Len() {
		return p.c.invalid("%s of %d bytes into %d", op, src.Len(), dst.Len())
	}
	for _, m := range [...]Mem{dst, src} {
		if i, ok := m.owner.(*imported); m.OnHost() || ok && i.c == p.c || !ok && m.Device() == p.c.Device() {
			continue
		}
		if m.Device() == p.c.Device() {
			return p.c.invalid("%s of %d bytes: another process's memory, imported by another backend: %w", op, src.Len(), ErrWrongDevice)
		}
		return fmt.Errorf("%s of %d bytes from %s to %s: %w", op, src.Len(), src.Device(), dst.Device(), p.c.wrongDevice(m))
	}
	return nil
}

func (p *copies) failed(op string, dst, src Mem, err error) error {
	if err == nil {
		return nil
	}
	op = fmt.Sprintf("%s of %d bytes from %s %#x to %s %#x", op, src.Len(), src.Device(), uintptr(src.ptr), dst.Device(), uintptr(dst.ptr))
	return p.c.failed(op, err)
}
