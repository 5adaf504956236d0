package engine

// Whether an application is slow, or the transport that waits for it.

import (
	"sync/atomic"
	"time"
)

// Slow reports whether a delivery of this lane takes long, or items wait behind such a delivery.
func (l *Lane[T]) Slow() bool { return l.slow.Load() }

// Paused reports whether the items of this lane are not to be received.
func (l *Lane[T]) Paused() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.paused
}

// Blame finds out whether what waits for an application waits because the application is slow, and not because the transport itself still
// copies long values. The zero Blame is ready for use. Its methods may be called concurrently.
type Blame struct{ watched atomic.Bool }

// Watch calls slow if busy was true for most of blameTime, and waits for all of that time. Watch returns at once. While waits is true
// it goes on; slow runs on a goroutine of its own, at most once until waits was false.
func (b *Blame) Watch(waits, busy func() bool, slow func()) {
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

// How long an application is watched before it is called slow, how often in that time, and how often at most for one Watch: a node that has
// been closed is not watched for ever.
const (
	blameTime  = time.Second
	blameLooks = 20
	blameMost  = 60 * blameLooks
)
