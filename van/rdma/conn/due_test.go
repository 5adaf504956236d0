package conn

import (
	"slices"
	"sync"
	"testing"
	"time"
)

// TestDueQueue: items run once each, in the order in which they were added. Items that are not due yet stay, and an item that adds itself again runs the next time.
func TestDueQueue(t *testing.T) {
	var q DueQueue
	var ran []int
	items := make([]DueItem, 5)
	again := true
	for i := range items {
		items[i].Run = func(uint64, bool) bool {
			ran = append(ran, i)
			if i == 1 && again {
				q.Add(&items[i])
			}
			return i == 3
		}
	}
	const later = 1 << 62
	want := func(what string, did, wantDid bool, order ...int) {
		t.Helper()
		if did != wantDid || !slices.Equal(ran, order) {
			t.Errorf("%s: ran %v, did %v; want %v, %v", what, ran, did, order, wantDid)
		}
		ran = nil
	}
	want("empty", q.Run(later, false), false)
	if !q.Empty() || q.Wait(0, time.Second) != time.Second {
		t.Error("an empty queue is not empty")
	}
	for _, i := range []int{2, 1, 1, 2} {
		q.Add(&items[i])
	}
	want("not due yet", q.Run(0, false), false)
	if q.Empty() || q.Wait(items[2].at-5, time.Second) != 5 || q.Wait(later, time.Second) != 0 {
		t.Error("what is due later is not waited for")
	}
	q.Add(&items[3])
	want("due", q.Run(later, false), true, 2, 1, 3)
	again = false
	want("added again", q.Run(later, false), false, 1)
	q.Add(&items[0])
	want("early", q.Run(0, true), false, 0)
	if !q.Empty() {
		t.Error("it is not empty at the end")
	}
}

// TestDueQueueAdders: no item that is added while the queue runs is lost.
func TestDueQueueAdders(t *testing.T) {
	const adders, each = 4, 2000
	var q DueQueue
	var items [adders]DueItem
	var asked, served [adders]int
	var mu sync.Mutex
	for i := range items {
		items[i].Run = func(uint64, bool) bool {
			mu.Lock()
			defer mu.Unlock()
			served[i] = asked[i]
			return true
		}
	}
	var all sync.WaitGroup
	for i := range items {
		all.Go(func() {
			for range each {
				mu.Lock()
				asked[i]++
				mu.Unlock()
				q.Add(&items[i])
			}
		})
	}
	done := make(chan struct{})
	go func() {
		all.Wait()
		close(done)
	}()
	for ended := false; !ended; {
		select {
		case <-done:
			ended = true
		default:
		}
		q.Run(0, true)
	}
	if served != asked {
		t.Errorf("served %v, want %v", served, asked)
	}
}
