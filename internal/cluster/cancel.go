package cluster

// Recent cancellations of workers, which a server remembers.

import (
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
)

// Canceled reports that a worker no longer waits for the answers to consecutive timestamps: it has canceled the
// request, or could not send all of it.
type Canceled struct {
	Sender   int   // node id of the worker's instance
	Customer int32 // its customer id
	First    int32 // timestamp
	Count    int32
}

// Has reports whether timestamp ts of that customer is among the canceled ones.
func (w *Canceled) Has(customer, ts int32) bool {
	return customer == w.Customer && ts >= w.First && ts-w.First < w.Count
}

// Limits of the time for which a cancellation is remembered, since messages of the request may still be in flight or
// wait for a slow handler, and of the number for each sender.
const (
	cancelMemory     = 5 * time.Minute
	maxCancellations = 1024
)

// cancellations has the recent cancellations of senders. Every received request is looked up here, so each sender has
// a list and a lock of its own.
type cancellations struct {
	mu sync.Mutex // guards changes of by
	by atomic.Pointer[map[int]*senderCancellations]
}

// senderCancellations are the cancellations of one sender, oldest first.
type senderCancellations struct {
	count atomic.Int32 // of list; usually 0, which saves the lock
	mu    sync.Mutex
	list  []cancellation
}

type cancellation struct {
	Canceled
	epoch uint32
	at    uint64
}

// of returns the cancellations of sender, nil if it has never canceled a request.
func (ws *cancellations) of(sender int) *senderCancellations {
	by := ws.by.Load()
	if by == nil {
		return nil
	}
	return (*by)[sender]
}

func (ws *cancellations) add(w Canceled, epoch uint32) {
	ws.mu.Lock()
	g := ws.of(w.Sender)
	if g == nil {
		by := map[int]*senderCancellations{}
		if old := ws.by.Load(); old != nil {
			by = maps.Clone(*old)
		}
		g = &senderCancellations{}
		by[w.Sender] = g
		ws.by.Store(&by)
	}
	ws.mu.Unlock()

	g.mu.Lock()
	defer g.mu.Unlock()
	now := clock.Now()
	g.expire(now, maxCancellations-1)
	g.list = append(g.list, cancellation{w, epoch, now})
	g.count.Store(int32(len(g.list)))
}

func (ws *cancellations) has(sender int, epoch uint32, customer, ts int32) bool {
	g := ws.of(sender)
	if g == nil || g.count.Load() == 0 {
		return false
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.expire(clock.Now(), maxCancellations)
	return slices.ContainsFunc(g.list, func(w cancellation) bool { return w.epoch == epoch && w.Has(customer, ts) })
}

// expire removes old entries, and the oldest ones above the limit most. g.mu is held.
func (g *senderCancellations) expire(now uint64, most int) {
	old := max(len(g.list)-most, 0)
	for old < len(g.list) && time.Duration(now-g.list[old].at) > cancelMemory {
		old++
	}
	if old == 0 {
		return
	}
	if g.list = slices.Delete(g.list, 0, old); len(g.list) == 0 {
		g.list = nil
	}
	g.count.Store(int32(len(g.list)))
}
