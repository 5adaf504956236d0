package streams

// How long a round of a worker may take.

import (
	"sync/atomic"
	"time"
)

// What the word begun holds: the stream writes unseen at each QueueSend, timing makes it seen.
const (
	unseen = 1
	seen   = 2
)

// timing is what is known of an exchange's rounds, of the goroutine that watches them.
type timing struct {
	limit    time.Duration  // 0: none, and nothing is looked at
	begun    *atomic.Uint32 // the word
	since    uint64         // clock.Now when it was seen first that the last round had begun
	asking   bool           // the device is asked whether it is under way
	asked    uint64         // when
	answer   chan bool      // what it says
	stale    bool           // a round has begun since it was asked
	underWay bool           // it was when the device was asked, and no other one has begun since
}

// look tells whether a round has taken too long, and how long, or whether the device should be asked.
func (t *timing) look(now uint64) (took time.Duration, late, ask bool) {
	select {
	case waits := <-t.answer:
		t.asking = false
		switch {
		case t.stale: // it is about an earlier round
		case waits: // a round that has begun meanwhile is unseen at the next look
			t.underWay = true
			return 0, false, false
		default:
			t.begun.CompareAndSwap(seen, 0)
		}
	default:
	}
	switch t.begun.Load() {
	case 0:
	case unseen:
		t.begun.Store(seen) // a stream that writes it meanwhile has begun about now, too
		t.since, t.underWay, t.stale = now, false, t.asking
	default:
		took = time.Duration(now - t.since)
		// A device that does not answer has failed, or its driver lets nobody in.
		silent := t.asking && time.Duration(now-t.asked) >= max(t.limit, silence)
		late = took >= t.limit && (t.underWay || silent)
		ask = took >= t.limit && !late && !t.asking
	}
	return took, late, ask
}

// asks says that the device is asked now.
func (t *timing) asks(now uint64) { t.asking, t.asked, t.stale = true, now, false }
