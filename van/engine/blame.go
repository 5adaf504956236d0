package engine

// The decision whether messages wait for a slow application or for the transport.

import (
	"sync/atomic"
	"time"
)

// Slow reports whether a delivery of this lane takes long, or items wait for such a delivery to end.
func (l *PeerQueue[T]) Slow() bool { return l.slow.Load() }

// Paused reports whether the items of this lane are not to be received.
func (l *PeerQueue[T]) Paused() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.paused
}

// SlowDetector finds out whether messages wait for an application because the application is slow, and not because the transport still
// copies long values. The zero SlowDetector is ready for use. Its methods may be called concurrently.
type SlowDetector struct{ watched atomic.Bool }

// Watch returns at once, and observes busy and waits while waits is true. It calls slow if during blameTime busy was true for most of
// the time, and waits for all of it. slow runs on a goroutine of its own, at most once until waits was false.
func (b *SlowDetector) Watch(waits, busy func() bool, slow func()) {
	if b.watched.Swap(true) {
		return
	}
	looks, times := 0, 0
	var look func()
	look = func() {
		if busy() {
			times++
		}
		looks++
		switch {
		case !waits():
			b.watched.Store(false)
		case looks%blameLooks > 0:
			time.AfterFunc(blameTime/blameLooks, look)
		case times >= blameLooks*3/4:
			b.watched.Store(false)
			slow()
		case looks < blameMost:
			times = 0
			time.AfterFunc(blameTime/blameLooks, look)
		default:
			b.watched.Store(false)
		}
	}
	time.AfterFunc(blameTime/blameLooks, look)
}

// blameTime is the time for which an application is observed before it counts as slow. blameLooks is the number of samples in that time.
// blameMost is the largest number of samples of one Watch, so that the observation of a closed node ends.
const (
	blameTime  = time.Second
	blameLooks = 20
	blameMost  = 60 * blameLooks
)
