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
		items[i].Run = func(uint64) {
			ran = append(ran, i)
			if i == 1 && again {
				q.Add(&items[i])
			}
		}
	}
	const later = 1 << 62
	run := func(what string, now uint64, early bool, order ...int) {
		t.Helper()
		q.Run(now, early)
		if !slices.Equal(ran, order) {
			t.Errorf("%s: ran %v, want %v", what, ran, order)
		}
		ran = nil
	}
	run("empty", later, false)
	if !q.Empty() || q.Wait(0, time.Second) != time.Second {
		t.Error("an empty queue is not empty")
	}
	for _, i := range []int{2, 1, 1, 2} {
		q.Add(&items[i])
	}
	run("not due yet", 0, false)
	if q.Empty() || q.Wait(items[2].at-5, time.Second) != 5 || q.Wait(later, time.Second) != 0 {
		t.Error("what is due later is not waited for")
	}
	q.Add(&items[3])
	run("due", later, false, 2, 1, 3)
	again = false
	run("added again", later, false, 1)
	q.Add(&items[0])
	run("early", 0, true, 0)
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
		items[i].Run = func(uint64) {
			mu.Lock()
			defer mu.Unlock()
			served[i] = asked[i]
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
