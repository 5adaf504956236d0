package fakeverbs

// What is to happen later.

import (
	"container/heap"
	"sync"
	"time"
)

// agenda is what is to happen later, by time and then by order of entry.
type agenda struct {
	mu    *sync.Mutex // of the Net
	queue entries
	seq   uint64
	timer *time.Timer
	over  bool
}

type entries []entry

type entry struct {
	due time.Time
	seq uint64
	do  func()
}

func (a entries) Len() int { return len(a) }
func (a entries) Less(i, j int) bool {
	if !a[i].due.Equal(a[j].due) {
		return a[i].due.Before(a[j].due)
	}
	return a[i].seq < a[j].seq
}
func (a entries) Swap(i, j int) { a[i], a[j] = a[j], a[i] }
func (a *entries) Push(x any)   { *a = append(*a, x.(entry)) }
func (a *entries) Pop() any {
	old := *a
	e := old[len(old)-1]
	old[len(old)-1] = entry{}
	*a = old[:len(old)-1]
	return e
}

// at calls do, under mu, when it is due. The caller holds mu.
func (a *agenda) at(due time.Time, do func()) {
	if a.over {
		return
	}
	a.seq++
	heap.Push(&a.queue, entry{due, a.seq, do})
	if a.queue[0].seq == a.seq {
		a.arm()
	}
}

func (a *agenda) after(d time.Duration, do func()) { a.at(time.Now().Add(d), do) }

func (a *agenda) arm() {
	d := time.Until(a.queue[0].due)
	if a.timer == nil {
		a.timer = time.AfterFunc(d, a.fire)
	} else {
		a.timer.Reset(d)
	}
}

func (a *agenda) fire() {
	a.mu.Lock()
	defer a.mu.Unlock()
	for len(a.queue) > 0 {
		if a.queue[0].due.After(time.Now()) {
			a.arm()
			return
		}
		heap.Pop(&a.queue).(entry).do()
	}
}

// end drops all. The caller holds mu.
func (a *agenda) end() {
	a.over, a.queue = true, nil
	if a.timer != nil {
		a.timer.Stop()
	}
}
