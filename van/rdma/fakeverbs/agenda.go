package fakeverbs

import (
	"container/heap"
	"time"
)

// agenda is what is to happen later, by time and then by order of entry.
type agenda []entry

type entry struct {
	due time.Time
	seq uint64
	do  func()
}

func (a agenda) Len() int { return len(a) }
func (a agenda) Less(i, j int) bool {
	if !a[i].due.Equal(a[j].due) {
		return a[i].due.Before(a[j].due)
	}
	return a[i].seq < a[j].seq
}
func (a agenda) Swap(i, j int) { a[i], a[j] = a[j], a[i] }
func (a *agenda) Push(x any)   { *a = append(*a, x.(entry)) }
func (a *agenda) Pop() any {
	old := *a
	e := old[len(old)-1]
	old[len(old)-1] = entry{}
	*a = old[:len(old)-1]
	return e
}

// at calls do, under n.mu, when it is due. The caller holds n.mu.
func (n *Net) at(due time.Time, do func()) {
	if n.closed {
		return
	}
	n.agendaSeq++
	heap.Push(&n.agenda, entry{due, n.agendaSeq, do})
	if n.agenda[0].seq == n.agendaSeq {
		n.arm()
	}
}

func (n *Net) after(d time.Duration, do func()) { n.at(time.Now().Add(d), do) }

func (n *Net) arm() {
	d := time.Until(n.agenda[0].due)
	if n.timer == nil {
		n.timer = time.AfterFunc(d, n.fire)
	} else {
		n.timer.Reset(d)
	}
}

func (n *Net) fire() {
	n.mu.Lock()
	defer n.mu.Unlock()
	for len(n.agenda) > 0 {
		if n.agenda[0].due.After(time.Now()) {
			n.arm()
			return
		}
		heap.Pop(&n.agenda).(entry).do()
	}
}
