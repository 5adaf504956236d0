package engine

// The decision whether queued messages wait for a slow application or for the transport.

import (
	"sync/atomic"
	"time"
)

// Slow reports whether a delivery of this queue is slow, or items wait for such a delivery to end.
func (q *PeerQueue[T]) Slow() bool { return q.slow.Load() }

// Paused reports whether reading of this queue's items is paused.
func (q *PeerQueue[T]) Paused() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.paused
}

// SlowDetector detects that messages wait because the application is slow, and not because the transport still
// copies long values. The zero SlowDetector is ready for use. Its methods may be called concurrently.
type SlowDetector struct{ watched atomic.Bool }

// Watch returns at once, and observes busy and waits while waits is true. It calls slow if during slowTime busy was true for most of
// the time, and waits for all of it. slow runs on a goroutine of its own, at most once until waits was false.
func (d *SlowDetector) Watch(waits, busy func() bool, slow func()) {
	if d.watched.Swap(true) {
		return
	}
	samples, times := 0, 0
	var sample func()
	sample = func() {
		if busy() {
			times++
		}
		samples++
		switch {
		case !waits():
			d.watched.Store(false)
		case samples%slowSamples > 0:
			time.AfterFunc(slowTime/slowSamples, sample)
		case times >= slowSamples*3/4:
			d.watched.Store(false)
			slow()
		case samples < maxSamples:
			times = 0
			time.AfterFunc(slowTime/slowSamples, sample)
		default:
			d.watched.Store(false)
		}
	}
	time.AfterFunc(slowTime/slowSamples, sample)
}

// slowTime is the time for which an application is observed before it counts as slow. slowSamples is the number of samples in that time.
// maxSamples is the largest number of samples of one Watch, so that the observation of a closed node ends.
const (
	slowTime    = time.Second
	slowSamples = 20
	maxSamples  = 60 * slowSamples
)
