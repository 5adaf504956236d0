package window

// Signals of a rank of a window on devices: who waits for which.

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// streamIn is which signals of a rank, which may be this one, were taken.
type streamIn struct {
	m        *memory
	p        *peer
	waiting  sync.Mutex      // held while a wait is put into a stream, which may wait for room there
	deciding sync.Mutex      // held while it is decided whether a wait may be; never for longer than silence
	taken    []atomic.Uint64 // signals that have come or that a stream waits for; changed with waiting or deciding held
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
	return n, nil
}

// claimed is how many signals were taken, when no claim is being decided.
func (l *streamIn) claimed(signal int) uint64 {
	l.deciding.Lock()
	defer l.deciding.Unlock()
	return l.taken[signal].Load()
}

// came tells whether the n'th signal has come.
func (l *streamIn) came(signal int, n uint64) (bool, error) {
	word, count := l.m.place(n)
	got, err := l.m.read(l.word(signal, word).Sub(0, 4))
	return uint64(got) >= count, err
}

// take takes a signal that has come.
func (l *streamIn) take(signal int) (bool, error) {
	l.waiting.Lock()
	defer l.waiting.Unlock()
	n := l.taken[signal].Load() + 1
	came, err := l.came(signal, n)
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
	for pause := 20 * time.Microsecond; ; {
		over := p.failure(op) // before the look: what has come before the failure counts
		if came, err := l.take(signal); err != nil {
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

// awaited tells whether a stream waits for a signal of the rank that has not come.
func (l *streamIn) awaited() bool {
	for signal := range l.taken {
		if n := l.claimed(signal); n > 0 {
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
		n := l.claimed(signal) // the window is over: what is claimed from here on has come
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
