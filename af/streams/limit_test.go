package streams

import (
	"sync/atomic"
	"testing"
	"time"
)

// TestAnswerOfTheRoundBefore: the device was asked about a round that waited, and answers when the next one has begun.
// That one has all its time, and is asked about by itself before it is over.
func TestAnswerOfTheRoundBefore(t *testing.T) {
	const limit = uint64(time.Second)
	x := &Exchange{ends: &Ends{changed: make(chan struct{})}, done: make(chan struct{}),
		timing: timing{limit: time.Duration(limit), begun: new(atomic.Uint32), answer: make(chan bool, 1)}}
	x.timing.begun.Store(unseen)
	x.check(1)
	x.timing.asking, x.timing.asked = true, 2 // as at the limit; the answer is not there yet
	x.timing.begun.Store(unseen)              // the next round
	x.check(3)
	x.timing.answer <- true
	x.check(4)
	x.check(3 + limit) // it has had its time: the device is asked, where the words of no peer are missing
	x.ends.failing.Wait()
	x.check(4 + limit)
	if err := x.failed.Load(); err != nil {
		t.Errorf("a round that was answered: %v", *err)
	}
	if v := x.timing.begun.Load(); v != 0 {
		t.Errorf("the round that was answered is taken to be under way: %d", v)
	}
}
