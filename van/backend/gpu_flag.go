package backend

// The flags of events: 32-bit words that streams write.

import (
	"errors"
	"sync"
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
	seq  uint32  // the value of the latest write
}

func (f *flag) arrived() bool { return f.word.Load() == f.seq }

// flagPool keeps the flags of a device.
type flagPool struct {
	c       *gpuContext
	d       memoryDriver
	streams *streamPool

	mu      sync.Mutex
	all     []*flag
	free    []*flag
	pending []*flag // given back before their write has arrived
	pages   [][]byte
}

const (
	flagPage   = 4096
	flagStride = 64 // a cache line each, against false sharing
)

// take returns a flag; the context must be current.
func (p *flagPool) take() (*flag, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.reclaim()
	if len(p.free) == 0 {
		page, err := pinNew(p.d, flagPage)
		if err != nil {
			return nil, err
		}
		addr, err := p.d.hostDeviceAddr(unsafe.Pointer(&page[0]))
		if err != nil {
			return nil, errors.Join(err, unpin(p.d, page))
		}
		p.pages = append(p.pages, page)
		for off := 0; off < flagPage; off += flagStride {
			f := &flag{word: (*atomic.Uint32)(unsafe.Pointer(&page[off])), addr: addr + uintptr(off)}
			p.all, p.free = append(p.all, f), append(p.free, f)
		}
	}
	f := p.free[len(p.free)-1]
	p.free = p.free[:len(p.free)-1]
	return f, nil
}

// put takes f back.
func (p *flagPool) put(f *flag) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.pending = append(p.pending, f)
	p.reclaim()
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

// probe finds out whether streams can write words, by doing it: the driver's
// attribute is about an older interface, which newer drivers do not offer.
func (p *flagPool) probe() error {
	return p.c.with("try a stream's write to host memory", func() error {
		s, err := p.streams.take()
		if err != nil {
			return err
		}
		defer p.streams.put(s)
		f, err := p.take()
		if err != nil {
			return err
		}
		f.seq++
		if err := p.streams.d.writeValue32(s, f.addr, f.seq); err != nil {
			f.seq--
			p.put(f)
			return nil // not supported: events are the driver's
		}
		for end := time.Now().Add(time.Second); !f.arrived(); {
			if err := p.streams.d.streamQuery(s); err != nil && !notReady(err) {
				return err
			}
			if time.Now().After(end) {
				break
			}
		}
		p.c.info.StreamFlags = f.arrived()
		p.put(f)
		return nil
	})
}

// close frees all. No write may be queued. The context is current.
func (p *flagPool) close(note func(op string, err error)) {
	for _, page := range p.pages {
		note("Close: free host memory", unpin(p.d, page))
	}
}
