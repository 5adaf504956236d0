package backend

// Copies between host and device, and the streams that they run on.

import (
	"context"
	"fmt"
	"runtime"
	"slices"
)

// Copy copies between host and device or within the device, on a stream of its own,
// and returns when the bytes have arrived. It does not wait for other streams that still
// write src: see SyncCopy.
func (g *gpu) Copy(dst, src Mem) error {
	if err := g.copyable("Copy", dst, src); err != nil || src.n == 0 {
		return err
	}
	if dst.OnHost() && src.OnHost() {
		copy(dst.Host(), src.Host())
		return nil
	}
	c := copying{g: g}
	err := g.enter(func() (err error) {
		if c.stream, err = g.takeStream(); err != nil {
			return err
		}
		err = g.queueCopy(dst, src, c.stream)
		if err != nil {
			g.putStream(c.stream)
		}
		return err
	})
	if err == nil {
		// The copy uses the caller's memory until the stream is idle, so only that or a
		// failed device ends this wait.
		err = g.wait(context.Background(), &c)
		if e := g.with("Copy", func() error { g.putStream(c.stream); return nil }); err == nil {
			err = e
		}
	}
	keep(dst, src)
	return g.copyError("Copy", dst, src, err)
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
	g      *gpu
	stream uintptr
}

func (c *copying) Query() (done bool, err error) {
	err = c.g.enter(func() error {
		err := c.g.d.streamQuery(c.stream)
		if notReady(err) {
			return nil
		}
		done = err == nil
		return err
	})
	return done, err
}

func (c *copying) check() error { return nil }

// CopyAsync queues a copy on stream.
func (g *gpu) CopyAsync(dst, src Mem, stream uintptr) error {
	if err := g.copyable("CopyAsync", dst, src); err != nil || src.n == 0 {
		return err
	}
	if dst.OnHost() && src.OnHost() {
		return g.invalid("CopyAsync from host to host: want one of them on the device")
	}
	return g.copyError("CopyAsync", dst, src, g.enter(func() error { return g.queueCopy(dst, src, stream) }))
}

func (g *gpu) queueCopy(dst, src Mem, stream uintptr) error {
	switch {
	case dst.OnHost():
		return g.d.copyToHost(dst.ptr, uintptr(src.ptr), src.n, stream)
	case src.OnHost():
		return g.d.copyToDevice(uintptr(dst.ptr), src.ptr, src.n, stream)
	default:
		return g.d.copyAsync(uintptr(dst.ptr), uintptr(src.ptr), src.n, stream)
	}
}

// copyable checks that the lengths fit and that this device reaches both ends.
func (g *gpu) copyable(op string, dst, src Mem) error {
	if dst.n != src.n {
		return g.invalid("%s of %d bytes into %d", op, src.n, dst.n)
	}
	for _, m := range [...]Mem{dst, src} {
		if i, ok := m.owner.(*imported); m.OnHost() || ok && i.g == g || !ok && m.dev == g.Device() {
			continue
		}
		if m.dev == g.Device() {
			return g.invalid("%s of %d bytes: another process's memory, imported by another backend: %w", op, src.n, ErrWrongDevice)
		}
		return fmt.Errorf("%s of %d bytes from %s to %s: %w", op, src.n, src.dev, dst.dev, CheckDevice(g, m))
	}
	return nil
}

func (g *gpu) copyError(op string, dst, src Mem, err error) error {
	if err == nil {
		return nil
	}
	op = fmt.Sprintf("%s of %d bytes from %s %#x to %s %#x", op, src.n, src.dev, uintptr(src.ptr), dst.dev, uintptr(dst.ptr))
	if err == ErrClosed {
		return g.invalid("%s: %w", op, err)
	}
	return g.failed(op, err)
}

// takeStream returns a stream for a copy; the context must be current. Copies do not share
// streams, so none waits for another.
func (g *gpu) takeStream() (uintptr, error) {
	g.mu.Lock()
	idle := len(g.idle) - 1
	if idle >= 0 {
		s := g.idle[idle]
		g.idle = g.idle[:idle]
		g.mu.Unlock()
		return s, nil
	}
	late := g.late
	g.late = nil
	g.mu.Unlock()
	done := slices.IndexFunc(late, g.finished)
	if done < 0 {
		g.putLate(late...)
		return g.d.streamCreate()
	}
	s := late[done]
	g.putLate(slices.Delete(late, done, done+1)...)
	return s, nil
}

// finished tells whether all that was queued on s is done. A query would invalidate a capture.
func (g *gpu) finished(s uintptr) bool {
	capturing, err := g.d.streamCapturing(s)
	return err == nil && !capturing && g.d.streamQuery(s) == nil
}

func (g *gpu) putLate(s ...uintptr) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.late = append(g.late, s...)
}

func (g *gpu) putStream(s uintptr) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.idle = append(g.idle, s)
}

// Idle tells whether all that was queued on stream is done.
func (g *gpu) Idle(stream uintptr) (idle bool, err error) {
	err = g.with("Idle", func() error {
		if capturing, err := g.d.streamCapturing(stream); capturing || err != nil {
			return err // a query would invalidate the capture
		}
		err := g.d.streamQuery(stream)
		if notReady(err) {
			return nil
		}
		idle = err == nil
		return err
	})
	return idle, err
}

// NewStream makes a stream.
func (g *gpu) NewStream() (s uintptr, err error) {
	err = g.with("NewStream", func() (err error) {
		if s, err = g.takeStream(); err != nil {
			return err
		}
		g.mu.Lock()
		defer g.mu.Unlock()
		g.streams[s] = struct{}{}
		return nil
	})
	return s, err
}

// FreeStream gives back a stream of NewStream. It is kept for the next one, not destroyed: while a launch of other
// code waits for room in the driver's queue, the driver returns neither from that nor from making one, and a
// receiver that waited for it would keep from the streams what they wait for.
func (g *gpu) FreeStream(s uintptr) error {
	return g.with("FreeStream", func() error {
		g.mu.Lock()
		_, ok := g.streams[s]
		delete(g.streams, s)
		g.mu.Unlock()
		if !ok {
			return g.invalid("FreeStream: %#x is not a stream of NewStream, or was freed before", s)
		}
		g.putLate(s)
		return nil
	})
}
