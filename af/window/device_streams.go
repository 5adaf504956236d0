package window

// What streams do for each rank of a window on devices: they put, and they wait for signals.

import (
	"cmp"
	"context"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

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
	writes [3]backend.FlagWrite
	lent   []lent // sources in use, in their order
	broken error  // a mark could not be written
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
	plain := s == uintptr(af.Complete)
	if plain {
		s = l.m.own
	}
	l.p.out.mu.Lock()
	defer l.p.out.mu.Unlock()
	if err := l.p.out.unsendable(op); err != nil {
		return err
	}
	err := l.m.readable(src)
	if err == nil && (src.Len() == 0 || l.waits(s)) { // or the copy tells whether the stream is captured
		if err := l.m.refuse(op, s); err != nil {
			return err
		}
		err = l.behind(s)
	}
	if err == nil {
		err = l.queue(offset, src, signal, s, plain)
	}
	if err != nil {
		return cmp.Or(l.m.refuse(op, s), l.p.w.wrong(op, l.p.rank, err))
	}
	return nil
}

// queue puts a copy, a signal and the mark into stream s. Each word takes the device a microsecond or two, so the first one is that for
// which the receiver is likely to wait: on the host, if this call is plain and names no stream either. p.out.mu is held.
func (l *streamOut) queue(offset int, src backend.Mem, signal uint16, s uintptr, plain bool) (err error) {
	l.reap()
	m, n := l.m, l.puts.Load()+1
	writes := l.writes[:0]
	if signal != noSignal {
		k := l.sent[signal] + 1
		word, count := m.place(k)
		writes = append(writes, backend.FlagWrite{Word: m.word(m.far[l.p.rank], m.b.self, int(signal), word).Sub(0, 4), V: uint32(count)})
		if w, has := m.host.write(l.p.rank, m.b.self, int(signal), k); has {
			if writes = append(writes, w); plain {
				writes[0], writes[1] = w, writes[0]
			}
		}
	}
	writes = append(writes, backend.FlagWrite{Word: l.mark, V: n})
	if src.Len() == 0 {
		err = m.d.WriteFlags(s, writes)
	} else {
		err = m.d.CopyFlags(m.far[l.p.rank].Sub(m.at+offset, src.Len()), src, s, writes)
	}
	if err != nil && m.refuse("put", s) != nil { // the stream is captured, or cannot be used now: nothing is queued, nor is the mark to be
		return err
	}
	if src.OnHost() && src.Len() > 0 || src.Owner() != nil {
		src.Retain()
		l.lent = append(l.lent, lent{src, n})
	}
	switch {
	case err != nil: // the copy may be queued: the mark tells when it is done
		if l.broken = m.d.WriteFlags(s, writes[len(writes)-1:]); l.broken != nil {
			return err
		}
	case signal != noSignal:
		l.sent[signal]++
	}
	l.puts.Store(n)
	l.last = s
	return err
}

// behind makes stream s wait for what was put to the rank in another one, and for nothing that was put into that since.
// p.out.mu is held.
func (l *streamOut) behind(s uintptr) error {
	if l.broken != nil || !l.waits(s) {
		return l.broken
	}
	return l.m.d.WaitFlag(s, l.mark, l.puts.Load())
}

// waits tells whether something in another stream comes before what is put into s. p.out.mu is held.
func (l *streamOut) waits(s uintptr) bool {
	return l.broken != nil || l.last != s && !l.arrived(l.puts.Load())
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

// streamIn is which signals of a rank, which may be this one, were taken.
type streamIn struct {
	m        *memory
	p        *peer
	waiting  sync.Mutex      // held while a wait is put into a stream, which may wait for room there
	deciding sync.Mutex      // held while it is decided whether a wait may be; never for longer than silence
	taken    []atomic.Uint64 // signals that have come or that a stream waits for; changed with waiting or deciding held
	streams  []atomic.Uint64 // the last of these that a stream waits or has waited for
}

// wait makes stream s wait for a signal of the rank.
func (l *streamIn) wait(op string, signal int, s uintptr) error {
	l.waiting.Lock()
	defer l.waiting.Unlock()
	if err := l.m.refuse(op, s); err != nil {
		return err
	}
	n, err := l.claim(op, signal)
	if err != nil {
		return err
	}
	word, count := l.m.place(n)
	if err = l.m.d.WaitCount(s, l.word(signal, word), count); err != nil {
		l.taken[signal].Store(n - 1)
		l.streams[signal].Store(n - 1)
	} else if count == l.m.lap/2 {
		err = l.m.d.WriteFlag(s, l.word(signal, 1-word).Sub(0, 4), 0)
	}
	if err != nil {
		return l.p.w.wrong(op, l.p.rank, err)
	}
	return nil
}

// claim takes the next signal for a stream, which may wait for it: also when the rank is gone, if the signal has come. Who
// notes that it is gone looks afterwards at what is claimed. waiting is held.
func (l *streamIn) claim(op string, signal int) (n uint64, err error) {
	l.deciding.Lock()
	defer l.deciding.Unlock()
	n = l.taken[signal].Load() + 1
	if err = l.p.failure(op); err != nil {
		if came, failed := l.came(signal, n); !came || failed != nil {
			return 0, err
		}
	}
	l.taken[signal].Store(n)
	l.streams[signal].Store(n)
	return n, nil
}

// claimed is how many signals were taken, and the last one for which a stream waits or has waited, when no claim is being decided.
func (l *streamIn) claimed(signal int) (taken, byStream uint64) {
	l.deciding.Lock()
	defer l.deciding.Unlock()
	return l.taken[signal].Load(), l.streams[signal].Load()
}

// came tells whether the n'th signal has come, as the device's word says, for which streams wait.
func (l *streamIn) came(signal int, n uint64) (bool, error) {
	word, count := l.m.place(n)
	got, err := l.m.read(l.word(signal, word).Sub(0, 4))
	return uint64(got) >= count, err
}

// take takes a signal that has come, as the word in host memory says, or, if asked for, that of the device. In a window that is over only the latter
// counts.
func (l *streamIn) take(signal int, ask, over bool) (bool, error) {
	l.waiting.Lock()
	defer l.waiting.Unlock()
	n := l.taken[signal].Load() + 1
	came, err := !over && l.m.host.came(l.p.rank, signal, n), error(nil)
	if !came && (ask || over) {
		came, err = l.came(signal, n)
	}
	if !came || err != nil {
		return false, err
	}
	l.taken[signal].Store(n)
	if word, count := l.m.place(n); count == l.m.lap/2 {
		l.m.reading.Lock()
		defer l.m.reading.Unlock()
		if !l.m.shut {
			err = l.m.d.WriteFlag(l.m.release, l.word(signal, 1-word).Sub(0, 4), 0)
		}
	}
	return true, err
}

// maxPause bounds the time between two looks at a word of the device.
const maxPause = time.Millisecond

// await waits for a signal on the host.
func (l *streamIn) await(ctx context.Context, op string, signal int) error {
	w, p := l.p.w, l.p
	begun, limit := clock.Now(), w.layer.Limit(ctx)
	var timer *time.Timer
	l.spin(ctx, signal)
	ask := l.m.host.own == nil // the device, where a look takes its time
	for pause := 20 * time.Microsecond; ; {
		over := p.failure(op) // before the look: what has come before the failure counts
		// The last look is one at the device.
		ask = ask || ctx.Err() != nil || limit > 0 && elapsed(begun) >= limit
		if came, err := l.take(signal, ask, over != nil); err != nil {
			return l.p.w.wrong(op, l.p.rank, err)
		} else if came {
			return nil
		}
		if err := w.app.Alive(); err != nil {
			w.fail(err)
		}
		took := elapsed(begun)
		x := waiter{p: p, what: waitSignal, n: uint64(signal)}
		switch {
		case over != nil:
			return over
		case limit > 0 && took >= limit && ask:
			return x.late(op, begun, limit, van.ErrTimeout)
		case took < busyTime:
			if ctx.Err() == nil {
				runtime.Gosched()
				continue
			}
		}
		ask = true
		if w.app.Config().BusyPoll.Spin() < 0 && ctx.Err() == nil {
			l.spin(ctx, signal)
			continue
		}
		if timer == nil {
			timer = time.NewTimer(pause)
			defer timer.Stop()
		} else {
			timer.Reset(pause)
		}
		select {
		case <-timer.C:
			pause = min(2*pause, maxPause)
		case <-ctx.Done():
			return x.late(op, begun, 0, van.TimedOut(context.Cause(ctx)))
		}
	}
}

// awaited tells whether a stream waits for a signal of the rank that has not come.
func (l *streamIn) awaited() bool {
	for signal := range l.taken {
		if _, n := l.claimed(signal); n > 0 {
			if came, err := l.came(signal, n); !came || err != nil {
				return true
			}
		}
	}
	return false
}

// word is one of the two of a signal here.
func (l *streamIn) word(signal, word int) backend.Mem {
	return l.m.word(l.m.whole, l.p.rank, signal, word)
}

// free makes streams that wait go on: those for a signal wait in the word of the last one that was claimed, or in the one before.
func (l *streamIn) free() error {
	for signal := range l.taken {
		n, _ := l.claimed(signal) // the window is over: what is claimed from here on has come
		if n == 0 {
			continue
		}
		last, _ := l.m.place(n)
		for word := range 2 {
			if word != last && n <= l.m.lap {
				continue
			}
			if err := l.m.d.WriteFlag(l.m.release, l.word(signal, word).Sub(4, 4), 1); err != nil {
				return err
			}
		}
	}
	return nil
}
