package backend

// Streams of a GPU, and the words of callers that they write and await.

import (
	"cmp"
	"slices"
	"sync"
)

// streamPool has the streams of copies and of NewStream, and keeps them for their next use.
type streamPool struct {
	c    *gpuContext
	d    streamDriver
	once onceDriver

	mu   sync.Mutex
	made map[uintptr]struct{} // of NewStream
	idle []uintptr            // not in use
	late []uintptr            // not in use, but work queued there may not be done yet
}

// take returns a stream for a copy; the context must be current. Copies do not share
// streams, so none waits for another.
func (p *streamPool) take() (uintptr, error) {
	p.mu.Lock()
	idle := len(p.idle) - 1
	if idle >= 0 {
		s := p.idle[idle]
		p.idle = p.idle[:idle]
		p.mu.Unlock()
		return s, nil
	}
	late := p.late
	p.late = nil
	p.mu.Unlock()
	done := slices.IndexFunc(late, p.finished)
	if done < 0 {
		p.putLate(late...)
		return p.d.streamCreate()
	}
	s := late[done]
	p.putLate(slices.Delete(late, done, done+1)...)
	return s, nil
}

// finished reports whether all that was queued on s is done. A query would invalidate a capture.
func (p *streamPool) finished(s uintptr) bool {
	capturing, err := p.d.streamCapturing(s)
	return err == nil && !capturing && p.d.streamQuery(s) == nil
}

// done is finished for a stream that is not captured. The context is current.
func (p *streamPool) done(s uintptr) (bool, error) {
	err := p.d.streamQuery(s)
	if notReady(err) {
		return false, nil
	}
	return err == nil, err
}

func (p *streamPool) putLate(s ...uintptr) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.late = append(p.late, s...)
}

func (p *streamPool) put(s uintptr) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.idle = append(p.idle, s)
}

// Idle reports whether all that was queued on stream is done.
func (p *streamPool) Idle(stream uintptr) (idle bool, err error) {
	err = p.c.live(func() error {
		idle, err = p.once.idleIn(p.c.ctx, stream)
		return err
	})
	return idle, p.c.failed("Idle", err)
}

// NewStream makes a stream.
func (p *streamPool) NewStream() (s uintptr, err error) {
	err = p.c.with("NewStream", func() (err error) {
		if s, err = p.take(); err != nil {
			return err
		}
		p.mu.Lock()
		defer p.mu.Unlock()
		p.made[s] = struct{}{}
		return nil
	})
	return s, err
}

// FreeStream releases a stream of NewStream. The stream is kept for the next NewStream, not destroyed: while a
// launch of other code waits for space in the driver's queue, the driver returns neither from destroying nor from
// making a stream. A receiver that waited for that would withhold from the streams the messages they wait for.
func (p *streamPool) FreeStream(s uintptr) error {
	return p.c.with("FreeStream", func() error {
		p.mu.Lock()
		_, ok := p.made[s]
		delete(p.made, s)
		p.mu.Unlock()
		if !ok {
			return p.c.invalid("FreeStream: %#x is not a stream of NewStream, or was freed before", s)
		}
		p.putLate(s)
		return nil
	})
}

// Capturing reports whether stream is being captured into a graph.
func (p *streamPool) Capturing(stream uintptr) (yes bool, err error) {
	err = p.c.with("Capturing", func() error {
		yes, err = p.d.streamCapturing(stream)
		return err
	})
	return yes, err
}

// Point returns the position in the work captured on stream.
func (p *streamPool) Point(stream uintptr) (at [6]uintptr, err error) {
	err = p.c.with("Point", func() error {
		at, err = p.d.capturePoint(stream)
		return err
	})
	return at, err
}

// Rewind makes later work of stream wait only for the work before at.
func (p *streamPool) Rewind(stream uintptr, at [6]uintptr) error {
	return p.c.with("Rewind", func() error {
		if now, err := p.d.capturePoint(stream); err != nil || at[0] == 0 || now[0] != at[0] {
			return cmp.Or(err, p.c.invalid("Rewind of stream %#x, in capture %d, to a point in capture %d", stream, now[0], at[0]))
		}
		return p.d.captureRewind(stream, at)
	})
}

// WriteFlag makes stream write v into word.
func (p *streamPool) WriteFlag(stream uintptr, word Mem, v uint32) error {
	return p.onWord("WriteFlag", word, 4, func(addr uintptr) error { return p.d.writeValue32(stream, addr, v) })
}

// WriteFlags makes stream write what l says.
func (p *streamPool) WriteFlags(stream uintptr, l []FlagWrite) error {
	return p.c.with("WriteFlags", func() error {
		for len(l) > 0 {
			w, err := p.writes("WriteFlags", l)
			if err != nil {
				return err
			}
			err = p.d.writeValues32(stream, w)
			if notSupported(err) {
				err = p.writeEach(stream, w)
			}
			if err != nil {
				return err
			}
			l = l[w.n:]
		}
		return nil
	})
}

// writes is what the first ones of l are to the driver.
func (p *streamPool) writes(op string, l []FlagWrite) (w wordWrites, err error) {
	for w.n < min(len(l), len(w.addrs)) {
		if w.addrs[w.n], err = p.wordAddr(op, l[w.n].Word, 4); err != nil {
			return w, err
		}
		w.values[w.n] = l[w.n].V
		w.n++
	}
	return w, nil
}

// writeEach makes stream do w with a driver that does not do several at once. The context is current.
func (p *streamPool) writeEach(stream uintptr, w wordWrites) error {
	for i := range w.n {
		if err := p.d.writeValue32(stream, w.addrs[i], w.values[i]); err != nil {
			return err
		}
	}
	return nil
}

// WaitFlag makes stream wait until word has reached v.
func (p *streamPool) WaitFlag(stream uintptr, word Mem, v uint32) error {
	p.c.blocking.Store(true)
	return p.onWord("WaitFlag", word, 4, func(addr uintptr) error { return p.d.waitValue32(stream, addr, v) })
}

// WaitBits makes stream wait until one of bits is set in word.
func (p *streamPool) WaitBits(stream uintptr, word Mem, bits uint64) error {
	p.c.blocking.Store(true)
	return p.onWord("WaitBits", word, 8, func(addr uintptr) error { return p.d.waitBits64(stream, addr, bits) })
}

// WaitCount makes stream wait until the number in word is n or more.
func (p *streamPool) WaitCount(stream uintptr, word Mem, n uint64) error {
	p.c.blocking.Store(true)
	return p.onWord("WaitCount", word, 8, func(addr uintptr) error { return p.d.waitValue64(stream, addr, n) })
}

// onWord runs f, which calls the driver, with the device's address of word, which has n bytes.
func (p *streamPool) onWord(op string, word Mem, n int, f func(addr uintptr) error) error {
	return p.c.with(op, func() error {
		addr, err := p.wordAddr(op, word, n)
		if err != nil {
			return err
		}
		return f(addr)
	})
}

// wordAddr is the device's address of word, which has n bytes.
func (p *streamPool) wordAddr(op string, word Mem, n int) (uintptr, error) {
	if word.Len() < n || uintptr(word.ptr)%uintptr(n) != 0 {
		return 0, p.c.invalid("%s: %d bytes at %#x: want %d bytes, aligned to %d", op, word.Len(), uintptr(word.ptr), n, n)
	}
	if !p.c.info.StreamFlags {
		return 0, p.c.invalid("%s: %w: streams cannot write words (cuStreamWriteValue32_v2)", op, ErrUnsupported)
	}
	switch o := word.owner.(type) {
	case *hostMem:
		if o.c == p.c && word.OnHost() {
			return o.deviceAddr(word), nil
		}
	case *imported:
		if o.c == p.c {
			return uintptr(word.ptr), nil
		}
	}
	if word.Device() == p.c.Device() {
		return uintptr(word.ptr), nil
	}
	return 0, p.c.invalid("%s: a word on %s that was neither pinned nor registered with this backend: %w", op, word.Device(), ErrWrongDevice)
}

// Health implements HealthChecker. Once a context has failed, every call returns its error.
func (p *streamPool) Health() error {
	return p.c.with("check the device", func() error {
		s, err := p.take()
		if err != nil {
			return err
		}
		_, err = p.done(s)
		p.put(s)
		return err
	})
}

// close destroys all. The context is current.
func (p *streamPool) close(note func(op string, err error)) {
	for s := range p.made {
		note("Close: free a stream", p.d.streamDestroy(s))
	}
	for _, s := range slices.Concat(p.idle, p.late) {
		note("Close: free a stream", p.d.streamDestroy(s))
	}
	p.made, p.idle, p.late = nil, nil, nil
}
