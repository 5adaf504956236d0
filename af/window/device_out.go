package window

// What calls put into streams for a rank of a window on devices.

import (
	"cmp"
	"context"
	"slices"
	"sync/atomic"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// streamOut is what was put to a rank, which may be this one, that streams do or have done.
type streamOut struct {
	m *memory
	p *peer

	// mark is a word in host memory. Right behind each put and signal its stream writes the number of that there, so
	// others can wait for it without what was put into the stream since, and nothing is made or destroyed for it.
	mark backend.Mem
	done *atomic.Uint32 // the same
	puts atomic.Uint32  // the last number; changed with p.out.mu held. Numbers go in a circle

	// Guarded by p.out.mu.
	last   uintptr  // the stream of the last one
	sent   []uint64 // signals
	lent   []lent   // sources in use, in their order
	broken error    // a mark could not be written
}

// lent is a source that a stream reads until put number n is done.
type lent struct {
	mem backend.Mem
	n   uint32
}

// arrived tells whether put number n is done, and all before.
func (l *streamOut) arrived(n uint32) bool { return int32(l.done.Load()-n) >= 0 }

// reap lets go of the sources of puts that are done. p.out.mu is held.
func (l *streamOut) reap() {
	k := 0
	for k < len(l.lent) && l.arrived(l.lent[k].n) {
		l.lent[k].mem.Release()
		k++
	}
	if k > 0 {
		l.lent = slices.Delete(l.lent, 0, k)
	}
}

// begin takes the mark, when there is one.
func (l *streamOut) begin() {
	l.mark = l.m.mark(l.p.rank)
	l.done = (*atomic.Uint32)(l.mark.Ptr())
}

// put puts the copy of src, and the signal if there is one, into a stream.
func (l *streamOut) put(op string, offset int, src backend.Mem, signal uint16, s uintptr) error {
	if s == uintptr(af.Complete) {
		s = l.m.own
	}
	l.p.out.mu.Lock()
	defer l.p.out.mu.Unlock()
	if err := cmp.Or(l.p.out.unsendable(op), l.m.refuse(op, s)); err != nil {
		return err
	}
	err := l.m.readable(src)
	if err == nil {
		err = l.behind(s)
	}
	if err == nil {
		err = l.queue(offset, src, signal, s)
	}
	if err != nil {
		return l.p.w.wrong(op, l.p.rank, err)
	}
	return nil
}

// queue puts a copy, a signal and the mark into stream s. p.out.mu is held.
func (l *streamOut) queue(offset int, src backend.Mem, signal uint16, s uintptr) (err error) {
	l.reap()
	m, n := l.m, l.puts.Load()+1
	if src.Len() > 0 {
		if err = m.d.CopyAsync(m.far[l.p.rank].Sub(m.at+offset, src.Len()), src, s); err != nil {
			return err
		}
		if src.OnHost() || src.Owner() != nil {
			src.Retain()
			l.lent = append(l.lent, lent{src, n})
		}
	}
	if signal != noSignal {
		word, count := m.place(l.sent[signal] + 1)
		if err = m.d.WriteFlag(s, m.word(m.far[l.p.rank], m.b.self, int(signal), word).Sub(0, 4), uint32(count)); err == nil {
			l.sent[signal]++
		}
	}
	if e := m.d.WriteFlag(s, l.mark, n); e != nil { // nobody will know when the copy is done
		l.broken = e
		return cmp.Or(err, e)
	}
	l.puts.Store(n)
	l.last = s
	return err
}

// behind makes stream s wait for what was put to the rank in another one, and for nothing that was put into that since.
// p.out.mu is held.
func (l *streamOut) behind(s uintptr) error {
	n := l.puts.Load()
	if l.broken != nil || l.last == s || l.arrived(n) {
		return l.broken
	}
	return l.m.d.WaitFlag(s, l.mark, n)
}

// flush waits until all that was put to the rank is there.
func (l *streamOut) flush(ctx context.Context, op string) error {
	w := l.p.w
	n, err := l.state()
	if err == nil && l.arrived(n) {
		return nil
	}
	begun, limit := clock.Now(), w.layer.Limit(ctx)
	if err == nil {
		w.app.PollFor(ctx, limit, func() bool { return l.arrived(n) })
		err = l.m.sleep(ctx, begun, limit, func() bool { return l.arrived(n) })
	}
	_, _ = l.state()
	if err != nil {
		return &van.Error{Op: op, Node: w.app.Name(), Peer: w.layer.Name(l.p.rank), Detail: w.String() + ": the stream has not come so far",
			Elapsed: elapsed(begun), Limit: limit, Err: err}
	}
	return nil
}

// state lets go of the sources of puts that are done, and returns the number of the last put, and why nobody will know of it.
func (l *streamOut) state() (n uint32, err error) {
	l.p.out.mu.Lock()
	defer l.p.out.mu.Unlock()
	l.reap()
	return l.puts.Load(), l.broken
}

// flushIn makes stream s wait until all that was put to the rank is there.
func (l *streamOut) flushIn(op string, s uintptr) error {
	l.p.out.mu.Lock()
	defer l.p.out.mu.Unlock()
	err := l.m.refuse(op, s)
	if err == nil {
		if err = l.behind(s); err != nil {
			err = l.p.w.wrong(op, l.p.rank, err)
		}
	}
	return err
}
