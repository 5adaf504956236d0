package window

// This file owns what calls put into streams in a window on devices, and how calls wait themselves.

import (
	"cmp"
	"context"
	"fmt"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// refuse is why nothing can be put into stream s.
func (v *onDevice) refuse(op string, s uintptr) error {
	captures, err := v.d.Capturing(s)
	if err == nil && captures {
		err = fmt.Errorf("%w: the stream is being captured, and a graph would count each signal once; exchanges of af/streams can be captured", backend.ErrUnsupported)
	}
	if err != nil {
		return v.w.bad(op, err)
	}
	return nil
}

// put puts the copy of src, and the signal if there is one, into a stream.
func (v *onDevice) put(op string, rank, offset int, src backend.Mem, signal uint16, s uintptr) error {
	if s == uintptr(af.Complete) {
		s = v.own
	}
	l := v.links[rank]
	p := l.p
	p.send.Lock()
	defer p.send.Unlock()
	if err := cmp.Or(p.unsendable(op), v.refuse(op, s)); err != nil {
		return err
	}
	err := v.readable(src)
	if err == nil {
		err = v.behind(l, s)
	}
	if err == nil {
		err = v.queue(l, offset, src, signal, s)
	}
	if err != nil {
		return l.wrong(op, err)
	}
	return nil
}

// readable is why streams cannot copy src. Copies of other host memory may wait for all that is in the stream, with a lock held.
func (v *onDevice) readable(src backend.Mem) error {
	if src.Len() > 0 && src.OnHost() {
		if p, is := v.d.Backend.(backend.PinTeller); !is || !p.Pinned(src) {
			return fmt.Errorf("%w: %d bytes of host memory that is not pinned, want memory of the device, or of AllocPinned or RegisterHost of the node's backend", van.ErrInvalid, src.Len())
		}
	}
	return backend.CheckDevice(v.d, src)
}

// queue puts a copy, a signal and the mark into stream s. p.send is held.
func (v *onDevice) queue(l *link, offset int, src backend.Mem, signal uint16, s uintptr) (err error) {
	l.reap()
	n := l.puts.Load() + 1
	if src.Len() > 0 {
		if err = v.d.CopyAsync(l.far.Sub(v.at+offset, src.Len()), src, s); err != nil {
			return err
		}
		if src.OnHost() || src.Owner() != nil {
			src.Retain()
			l.lent = append(l.lent, lent{src, n})
		}
	}
	if signal != noSignal {
		word, count := v.place(l.sent[signal] + 1)
		if err = v.d.WriteFlag(s, v.word(l.far, v.w.self, int(signal), word).Sub(0, 4), uint32(count)); err == nil {
			l.sent[signal]++
		}
	}
	if e := v.d.WriteFlag(s, l.mark, n); e != nil { // nobody will know when the copy is done
		l.broken = e
		return cmp.Or(err, e)
	}
	l.puts.Store(n)
	l.last = s
	return err
}

// word is one of the two of a signal of rank from, in the memory of its receiver.
func (v *onDevice) word(whole backend.Mem, from, signal, word int) backend.Mem {
	return whole.Sub(headLen+(from*v.w.signals+signal)*wordsLen+8*word, 8)
}

// behind makes stream s wait for what was put to the rank in another one, and for nothing that was put into that since.
// p.send is held.
func (v *onDevice) behind(l *link, s uintptr) error {
	n := l.puts.Load()
	if l.broken != nil || l.last == s || l.arrived(n) {
		return l.broken
	}
	return v.d.WaitFlag(s, l.mark, n)
}

// wait makes stream s wait for a signal of a rank.
func (v *onDevice) wait(op string, rank, signal int, s uintptr) error {
	l := v.links[rank]
	l.waiting.Lock()
	defer l.waiting.Unlock()
	if err := v.refuse(op, s); err != nil {
		return err
	}
	n, err := v.claim(op, rank, signal)
	if err != nil {
		return err
	}
	word, count := v.place(n)
	if err = v.d.WaitCount(s, v.word(v.whole, rank, signal, word), count); err != nil {
		l.taken[signal].Store(n - 1)
	} else if count == v.lap/2 {
		err = v.d.WriteFlag(s, v.word(v.whole, rank, signal, 1-word).Sub(0, 4), 0)
	}
	if err != nil {
		return l.wrong(op, err)
	}
	return nil
}

// claim takes the next signal for a stream, which may wait for it: also when the rank is gone, if the signal has come. Who
// notes that it is gone looks afterwards at what is claimed. waiting is held.
func (v *onDevice) claim(op string, rank, signal int) (n uint64, err error) {
	l := v.links[rank]
	l.deciding.Lock()
	defer l.deciding.Unlock()
	n = l.taken[signal].Load() + 1
	if err = l.p.failure(op); err != nil {
		if came, failed := v.came(rank, signal, n); !came || failed != nil {
			return 0, err
		}
	}
	l.taken[signal].Store(n)
	return n, nil
}

// claimed is how many signals were taken, when no claim is being decided.
func (l *link) claimed(signal int) uint64 {
	l.deciding.Lock()
	defer l.deciding.Unlock()
	return l.taken[signal].Load()
}

func (l *link) wrong(op string, err error) error {
	w := l.p.w
	return &van.Error{Op: op, Node: w.app.Name(), Peer: w.layer.Name(l.p.rank), Detail: w.String(), Err: err}
}

// came tells whether the n'th signal has come.
func (v *onDevice) came(rank, signal int, n uint64) (bool, error) {
	word, count := v.place(n)
	got, err := v.read(v.word(v.whole, rank, signal, word).Sub(0, 4))
	return uint64(got) >= count, err
}

// silence is how long a device may take to say what is in a word.
const silence = 10 * time.Second

// read reads 4 bytes of the device. It makes no stream and no event, and its copy is to pinned memory: the driver does
// nothing else while a launch waits for room in the queue of another stream, which may wait for who asks here.
func (v *onDevice) read(m backend.Mem) (uint32, error) {
	v.reading.Lock()
	defer v.reading.Unlock()
	if v.shut {
		return 0, errClosed
	}
	v.asked++
	err := v.d.CopyAsync(v.seen.Sub(0, 4), m, v.release)
	if err == nil {
		err = v.d.WriteFlag(v.release, v.seen.Sub(4, 4), v.asked)
	}
	if err != nil {
		return 0, err
	}
	done := (*atomic.Uint32)(v.seen.Sub(4, 4).Ptr())
	for begun := clock.Now(); done.Load() != v.asked; {
		switch took := elapsed(begun); {
		case took >= silence:
			return 0, fmt.Errorf("%w: a word of the device", van.ErrTimeout)
		case took >= 50*time.Microsecond:
			clock.Sleep(20 * time.Microsecond)
		default:
			runtime.Gosched()
		}
	}
	return (*atomic.Uint32)(v.seen.Ptr()).Load(), nil
}

// take takes a signal that has come.
func (v *onDevice) take(rank, signal int) (bool, error) {
	l := v.links[rank]
	l.waiting.Lock()
	defer l.waiting.Unlock()
	n := l.taken[signal].Load() + 1
	came, err := v.came(rank, signal, n)
	if !came || err != nil {
		return false, err
	}
	l.taken[signal].Store(n)
	if word, count := v.place(n); count == v.lap/2 {
		v.reading.Lock()
		defer v.reading.Unlock()
		if !v.shut {
			err = v.d.WriteFlag(v.release, v.word(v.whole, rank, signal, 1-word).Sub(0, 4), 0)
		}
	}
	return true, err
}

// maxPause bounds the time between two looks at a word of the device.
const maxPause = time.Millisecond

// await waits for a signal on the host.
func (v *onDevice) await(ctx context.Context, op string, rank, signal int) error {
	w, p := v.w, v.links[rank].p
	begun, limit := clock.Now(), w.layer.Limit(ctx)
	var timer *time.Timer
	for pause := 20 * time.Microsecond; ; {
		over := p.failure(op) // before the look: what has come before the failure counts
		if came, err := v.take(rank, signal); err != nil {
			return v.links[rank].wrong(op, err)
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
		case limit > 0 && took >= limit:
			return x.late(op, begun, limit, van.ErrTimeout)
		case took < aliveEvery/500: // a look takes its time, too
			if ctx.Err() == nil {
				continue
			}
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
			return x.late(op, begun, 0, timeout(context.Cause(ctx)))
		}
	}
}

// flush waits until all that was put to a rank is there.
func (v *onDevice) flush(ctx context.Context, op string, rank int) error {
	w, l := v.w, v.links[rank]
	l.p.send.Lock()
	n, err := l.puts.Load(), l.broken
	l.reap()
	l.p.send.Unlock()
	if err == nil && l.arrived(n) {
		return nil
	}
	begun, limit := clock.Now(), w.layer.Limit(ctx)
	if err == nil {
		w.app.PollFor(ctx, limit, func() bool { return l.arrived(n) })
		err = v.sleep(ctx, begun, limit, func() bool { return l.arrived(n) })
	}
	l.p.send.Lock()
	l.reap()
	l.p.send.Unlock()
	if err != nil {
		return &van.Error{Op: op, Node: w.app.Name(), Peer: w.layer.Name(rank), Detail: w.String() + ": the stream has not come so far",
			Elapsed: elapsed(begun), Limit: limit, Err: err}
	}
	return nil
}

// The pauses of sleep, and how often it looks whether the device works: if not, streams do nothing any more.
const (
	minSleep   = 20 * time.Microsecond
	maxSleep   = 200 * time.Microsecond
	healthLook = 100 * time.Millisecond
)

// sleep waits until done, which streams make true.
func (v *onDevice) sleep(ctx context.Context, begun uint64, limit time.Duration, done func() bool) error {
	looked := begun
	for pause := minSleep; !done(); pause = min(2*pause, maxSleep) {
		switch {
		case ctx.Err() != nil:
			return timeout(context.Cause(ctx))
		case limit > 0 && elapsed(begun) >= limit:
			return van.ErrTimeout
		case elapsed(looked) >= healthLook:
			if _, err := v.read(v.whole.Sub(0, 4)); err != nil {
				return err
			}
			looked = clock.Now()
		}
		clock.Sleep(pause)
	}
	return nil
}

// flushIn makes stream s wait until all that was put to a rank is there.
func (v *onDevice) flushIn(op string, rank int, s uintptr) error {
	l := v.links[rank]
	l.p.send.Lock()
	defer l.p.send.Unlock()
	err := v.refuse(op, s)
	if err == nil {
		if err = v.behind(l, s); err != nil {
			err = l.wrong(op, err)
		}
	}
	return err
}
