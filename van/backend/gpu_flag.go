package backend

// The 32-bit words that streams write and await: flags of events, and those of callers.

import (
	"errors"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/stepaf/stepaf-go/internal/clock"
)

// A flag is a 32-bit word in pinned host memory that a stream writes. Recording an
// event queues the write of a number; the event is done when the word has it.
//
// At most one write is ever queued for a word: an event that is recorded again, or
// closed, before its write has arrived gives the word up, and the word is not used until
// the write arrives. So comparing for equality is enough, and late writes do no harm.
type flag struct {
	word *atomic.Uint32
	addr uintptr // of word, for the device
	seq  uint32  // what the latest write writes
}

func (f *flag) arrived() bool { return f.word.Load() == f.seq }

// flagPool keeps the flags of a device. The gpu's mutex guards it.
type flagPool struct {
	all     []*flag
	free    []*flag
	pending []*flag // given back before their write has arrived
	pages   []unsafe.Pointer
}

const (
	flagPage   = 4096
	flagStride = 64 // a cache line each, against false sharing
)

// takeFlag returns a flag; the context must be current.
func (g *gpu) takeFlag() (*flag, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	p := &g.flags
	p.reclaim()
	if len(p.free) == 0 {
		page, err := g.d.hostAlloc(flagPage)
		if err != nil {
			return nil, err
		}
		addr, err := g.d.hostDeviceAddr(page)
		if err != nil {
			return nil, errors.Join(err, g.d.hostFree(page))
		}
		p.pages = append(p.pages, page)
		clear(unsafe.Slice((*byte)(page), flagPage))
		for off := 0; off < flagPage; off += flagStride {
			f := &flag{word: (*atomic.Uint32)(unsafe.Add(page, off)), addr: addr + uintptr(off)}
			p.all, p.free = append(p.all, f), append(p.free, f)
		}
	}
	f := p.free[len(p.free)-1]
	p.free = p.free[:len(p.free)-1]
	return f, nil
}

// putFlag takes f back.
func (g *gpu) putFlag(f *flag) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.flags.pending = append(g.flags.pending, f)
	g.flags.reclaim()
}

// reclaim frees the flags whose write has arrived.
func (p *flagPool) reclaim() {
	rest := p.pending[:0]
	for _, f := range p.pending {
		if f.arrived() {
			p.free = append(p.free, f)
		} else {
			rest = append(rest, f)
		}
	}
	clear(p.pending[len(rest):])
	p.pending = rest
}

// settle waits until all queued writes have arrived, and returns how many have not at the
// limit. No event may be recorded meanwhile.
func (p *flagPool) settle(limit time.Duration) int {
	for end := time.Now().Add(limit); ; clock.Sleep(time.Millisecond) {
		late := 0
		for _, f := range p.all {
			if !f.arrived() {
				late++
			}
		}
		if late == 0 || time.Now().After(end) {
			return late
		}
	}
}

// probeFlags finds out whether streams can write words, by doing it: the driver's
// attribute is about an older interface, which newer drivers do not offer.
func (g *gpu) probeFlags() error {
	return g.with("try a stream's write to host memory", func() error {
		s, err := g.takeStream()
		if err != nil {
			return err
		}
		defer g.putStream(s)
		f, err := g.takeFlag()
		if err != nil {
			return err
		}
		f.seq++
		if err := g.d.writeValue32(s, f.addr, f.seq); err != nil {
			f.seq--
			g.putFlag(f)
			return nil // not supported: events are the driver's
		}
		for end := time.Now().Add(time.Second); !f.arrived(); {
			if err := g.d.streamQuery(s); err != nil && !notReady(err) {
				return err
			}
			if time.Now().After(end) {
				break
			}
		}
		g.info.StreamFlags = f.arrived()
		g.putFlag(f)
		return nil
	})
}

// WriteFlag makes stream write v into word.
func (g *gpu) WriteFlag(stream uintptr, word Mem, v uint32) error {
	return g.with("WriteFlag", func() error {
		addr, err := g.flagAddr("WriteFlag", word, 4)
		if err != nil {
			return err
		}
		return g.d.writeValue32(stream, addr, v)
	})
}

// WaitFlag makes stream wait until word has reached v.
func (g *gpu) WaitFlag(stream uintptr, word Mem, v uint32) error {
	g.blocking.Store(true)
	return g.with("WaitFlag", func() error {
		addr, err := g.flagAddr("WaitFlag", word, 4)
		if err != nil {
			return err
		}
		return g.d.waitValue32(stream, addr, v)
	})
}

// WaitBits makes stream wait until one of bits is set in word.
func (g *gpu) WaitBits(stream uintptr, word Mem, bits uint64) error {
	g.blocking.Store(true)
	return g.with("WaitBits", func() error {
		addr, err := g.flagAddr("WaitBits", word, 8)
		if err != nil {
			return err
		}
		return g.d.waitBits64(stream, addr, bits)
	})
}

// WaitCount makes stream wait until the number in word is n or more.
func (g *gpu) WaitCount(stream uintptr, word Mem, n uint64) error {
	g.blocking.Store(true)
	return g.with("WaitCount", func() error {
		addr, err := g.flagAddr("WaitCount", word, 8)
		if err != nil {
			return err
		}
		return g.d.waitValue64(stream, addr, n)
	})
}

// Capturing tells whether stream is being captured into a graph.
func (g *gpu) Capturing(stream uintptr) (yes bool, err error) {
	err = g.with("Capturing", func() error {
		yes, err = g.d.streamCapturing(stream)
		return err
	})
	return yes, err
}

// flagAddr is the device's address of word, which has n bytes.
func (g *gpu) flagAddr(op string, word Mem, n int) (uintptr, error) {
	if word.n < n || uintptr(word.ptr)%uintptr(n) != 0 {
		return 0, g.invalid("%s: %d bytes at %#x: want %d bytes, aligned to %d", op, word.n, uintptr(word.ptr), n, n)
	}
	if !g.info.StreamFlags {
		return 0, g.invalid("%s: %w: streams cannot write words (cuStreamWriteValue32_v2)", op, ErrUnsupported)
	}
	switch o := word.owner.(type) {
	case *hostMem:
		if o.g == g && word.OnHost() {
			return o.deviceAddr(word), nil
		}
	case *imported:
		if o.g == g {
			return uintptr(word.ptr), nil
		}
	}
	if word.dev == g.Device() {
		return uintptr(word.ptr), nil
	}
	return 0, g.invalid("%s: a word on %s that was neither pinned nor registered with this backend: %w", op, word.dev, ErrWrongDevice)
}
