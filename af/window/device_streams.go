package window

// Work that streams do for each rank of a device window: puts, and waits for signals.

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
	"github.com/stepaf/stepaf-go/internal/gpusync"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// streamOut is the state of the puts of streams to a rank, which may be this one.
type streamOut struct {
	m *memory
	p *peer

	// mark is the put sequence in host memory. After each put and signal its stream writes the put's number there.
	// Others can wait for a put without waiting for later work of the stream, and no event is needed.
	mark backend.Mem
	done *atomic.Uint32 // mark as an integer
	puts atomic.Uint32  // the last number; changed with p.out.mu held; numbers wrap around

	// Guarded by p.out.mu.
	last   uintptr  // the stream of the last put
	sent   []uint64 // number of signals sent, by signal
	writes [3]backend.FlagWrite
	lent   []lent // sources in use, in order
	broken error  // the put sequence could not be written
}

// lent is a source that a stream reads until put number n is done.
type lent struct {
	mem backend.Mem
	n   uint32
}

// arrived reports whether put number n, and all before, are done.
func (l *streamOut) arrived(n uint32) bool { return int32(l.done.Load()-n) >= 0 }

// reap releases the sources of puts that are done. p.out.mu is held.
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

// begin sets mark, once it is allocated.
func (l *streamOut) begin() {
	l.mark = l.m.mark(l.p.rank)
	l.done = gpusync.OnHost(l.mark)
}

// put queues a copy of src, and the signal if there is one, in a stream.
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
	if err == nil && (src.Len() == 0 || l.waits(s)) { // otherwise the copy reports whether the stream is captured
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

// queue queues a copy, a signal and the put sequence in stream s. Each write takes the device a microsecond or two,
// so the flag that the receiver probably waits for is written first: the one on the host, if this call is plain and
// names no stream. p.out.mu is held.
func (l *streamOut) queue(offset int, src backend.Mem, signal uint16, s uintptr, plain bool) (err error) {
	l.reap()
	m, n := l.m, l.puts.Load()+1
	writes := l.writes[:0]
	if signal != noSignal {
		k := l.sent[signal] + 1
		word, count := m.place(k)
		writes = append(writes, backend.FlagWrite{Word: m.word(m.far[l.p.rank], m.b.self, int(signal), word).Lower(), V: uint32(count)})
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
	if err != nil && m.refuse("put", s) != nil { // the stream is captured, or cannot be used now: nothing was queued
		return err
	}
	if src.OnHost() && src.Len() > 0 || src.Owner() != nil {
		src.Retain()
		l.lent = append(l.lent, lent{src, n})
	}
	switch {
	case err != nil: // the copy may be queued: the put sequence tells when it is done
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

// behind makes stream s wait for puts to the rank in another stream, but not for later work of that stream. p.out.mu
// is held.
func (l *streamOut) behind(s uintptr) error {
	if l.broken != nil || !l.waits(s) {
		return l.broken
	}
	return l.m.d.WaitFlag(s, l.mark, l.puts.Load())
}

// waits reports whether work in s must wait for a put in another stream. p.out.mu is held.
func (l *streamOut) waits(s uintptr) bool {
	return l.broken != nil || l.last != s && !l.arrived(l.puts.Load())
}

// flush waits until everything that was put to the rank has arrived.
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
		return &van.Error{Op: op, Node: w.app.Name(), Peer: w.layer.Name(l.p.rank), Detail: w.String() + ": the stream has not reached this work",
			Elapsed: clock.Since(begun), Limit: limit, Err: err}
	}
	return nil
}

// state releases the sources of puts that are done. It returns the number of the last put, and an error if the put
// sequence could not be written.
func (l *streamOut) state() (n uint32, err error) {
	l.p.out.mu.Lock()
	defer l.p.out.mu.Unlock()
	l.reap()
	return l.puts.Load(), l.broken
}

// flushIn makes stream s wait until everything that was put to the rank has arrived.
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

// streamIn counts the consumed signals of a rank, which may be this one.
type streamIn struct {
	m        *memory
	p        *peer
	waiting  sync.Mutex      // held while a wait is put into a stream, which may block if the stream is full
	deciding sync.Mutex      // held while a claim is decided; never for longer than silence
	taken    []atomic.Uint64 // signals that were consumed or that a stream waits for; changed with waiting or deciding held
	streams  []atomic.Uint64 // the last of these that a stream waits for or has waited for
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
	if err = l.m.d.WaitCount(s, l.word(signal, word).Mem, count); err != nil {
		l.taken[signal].Store(n - 1)
		l.streams[signal].Store(n - 1)
	} else if count == l.m.lap/2 {
		err = l.m.d.WriteFlag(s, l.word(signal, 1-word).Lower(), 0)
	}
	if err != nil {
		return l.p.w.wrong(op, l.p.rank, err)
	}
	return nil
}

// claim assigns the next signal to a stream, if the stream may wait for it. If the rank is gone, the signal must have
// arrived; left, which records that a rank is gone, then checks the claims. waiting is held.
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

// claimed returns how many signals were consumed, and the last one that a stream waits for or has waited for, when no
// claim is being decided.
func (l *streamIn) claimed(signal int) (taken, byStream uint64) {
	l.deciding.Lock()
	defer l.deciding.Unlock()
	return l.taken[signal].Load(), l.streams[signal].Load()
}

// came reports whether signal n has arrived according to the flag of the device, for which streams wait.
func (l *streamIn) came(signal int, n uint64) (bool, error) {
	word, count := l.m.place(n)
	got, err := l.m.read(l.word(signal, word).Lower())
	return uint64(got) >= count, err
}

// take consumes a signal that has arrived according to host memory, or, if ask is set, according to the device. If
// the window is over, only the device counts.
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
			err = l.m.d.WriteFlag(l.m.release, l.word(signal, 1-word).Lower(), 0)
		}
	}
	return true, err
}

// maxPause is the maximum time between two reads of a flag of the device.
const maxPause = time.Millisecond

// await waits for a signal on the host.
func (l *streamIn) await(ctx context.Context, op string, signal int) error {
	w, p := l.p.w, l.p
	begun, limit := clock.Now(), w.layer.Limit(ctx)
	var timer *time.Timer
	l.spin(ctx, signal)
	ask := l.m.host.own == nil // read the device, which is slow
	for pause := 20 * time.Microsecond; ; {
		over := p.failure(op) // read first: signals before the failure count
		// The last poll reads the device.
		ask = ask || ctx.Err() != nil || limit > 0 && clock.Since(begun) >= limit
		if came, err := l.take(signal, ask, over != nil); err != nil {
			return l.p.w.wrong(op, l.p.rank, err)
		} else if came {
			return nil
		}
		if err := w.app.Alive(); err != nil {
			w.fail(err)
		}
		took := clock.Since(begun)
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

// awaited reports whether a stream waits for a signal of the rank that has not arrived.
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

// word returns one of the two flags of a signal here.
func (l *streamIn) word(signal, word int) gpusync.Flag {
	return l.m.word(l.m.whole, l.p.rank, signal, word)
}

// free releases waiting streams. Streams that wait for a signal wait on the flag of the last claimed count, or on the
// one before.
func (l *streamIn) free() error {
	for signal := range l.taken {
		n, _ := l.claimed(signal) // the window is over: signals claimed from now on have arrived
		if n == 0 {
			continue
		}
		last, _ := l.m.place(n)
		for word := range 2 {
			if word != last && n <= l.m.lap {
				continue
			}
			if err := l.word(signal, word).Release(l.m.d, l.m.release); err != nil {
				return err
			}
		}
	}
	return nil
}
