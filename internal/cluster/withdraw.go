package cluster

// What workers have given up, which a server remembers.

import (
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
)

// Withdrawn says that a worker no longer waits for the answers to consecutive timestamps:
// it has given the request up, or could not send all of it.
type Withdrawn struct {
	Sender   int   // node id of the worker's instance
	Customer int32 // its customer id
	First    int32 // timestamp
	Count    int32
}

// Has tells whether timestamp ts of that customer is among those given up.
func (w *Withdrawn) Has(customer, ts int32) bool {
	return customer == w.Customer && ts >= w.First && ts-w.First < w.Count
}

// How long a withdrawal is remembered, since messages of the request may still be under
// way or wait behind a slow handler, and how many of each sender.
const (
	rememberWithdrawn = 5 * time.Minute
	maxWithdrawn      = 1024
)

// withdrawals has what senders have given up recently. Every received request is looked up
// here, so each sender has a list and a lock of its own.
type withdrawals struct {
	mu sync.Mutex // of changes of by
	by atomic.Pointer[map[int]*givenUp]
}

// givenUp is what one sender has given up, oldest first.
type givenUp struct {
	count atomic.Int32 // of list; usually 0, which saves the lock
	mu    sync.Mutex
	list  []withdrawal
}

type withdrawal struct {
	Withdrawn
	epoch uint32
	at    uint64
}

// of returns the list of sender, nil if it has never given anything up.
func (ws *withdrawals) of(sender int) *givenUp {
	by := ws.by.Load()
	if by == nil {
		return nil
	}
	return (*by)[sender]
}

func (ws *withdrawals) add(w Withdrawn, epoch uint32) {
	ws.mu.Lock()
	g := ws.of(w.Sender)
	if g == nil {
		by := map[int]*givenUp{}
		if old := ws.by.Load(); old != nil {
			by = maps.Clone(*old)
		}
		g = &givenUp{}
		by[w.Sender] = g
		ws.by.Store(&by)
	}
	ws.mu.Unlock()

	g.mu.Lock()
	defer g.mu.Unlock()
	now := clock.Now()
	g.expire(now, maxWithdrawn-1)
	g.list = append(g.list, withdrawal{w, epoch, now})
	g.count.Store(int32(len(g.list)))
}

func (ws *withdrawals) has(sender int, epoch uint32, customer, ts int32) bool {
	g := ws.of(sender)
	if g == nil || g.count.Load() == 0 {
		return false
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.expire(clock.Now(), maxWithdrawn)
	return slices.ContainsFunc(g.list, func(w withdrawal) bool { return w.epoch == epoch && w.Has(customer, ts) })
}

// expire removes old entries, and the oldest beyond most. g.mu is held.
func (g *givenUp) expire(now uint64, most int) {
	old := max(len(g.list)-most, 0)
	for old < len(g.list) && time.Duration(now-g.list[old].at) > rememberWithdrawn {
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
