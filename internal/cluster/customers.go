package cluster

// The customers of a node, and the requests that are queued for later ones.

import (
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/internal/logx"
	"github.com/stepaf/stepaf-go/van"
)

// apps routes data messages to customers. Requests for an application that does not exist yet are queued, since peers
// may start to send before this process has made it.
type apps struct {
	self      *nodeInfo
	processes *processes
	notices   *notices
	profile   *profile // nil unless asked for
	role      van.Role
	table     atomic.Pointer[map[appKey]*Customer]
	orders    atomic.Pointer[map[int32]string] // of communicators' applications, see App.Order

	mu         sync.Mutex
	queued     map[appKey][]queuedRequest
	usage      map[int]usage // of queued, by sender
	messages   int           // of queued
	bytes      int
	changed    sync.Cond     // requests have left queued, a customer was added, or another reason of a wait in enqueue has changed
	canceled   []earlyCancel // oldest first
	expiry     *time.Timer
	closed     bool
	ended      bool             // the node has failed or leaves: enqueue does not wait, add fails, and deliverToSelf drops its message
	endingCall string           // the call in which the ending program waits, see refuseNew
	next       map[appKey]int32 // first timestamps for customers that are made again
	noApp      logx.Sparse
	tooMany    logx.Sparse

	deliveries sync.WaitGroup // goroutines that deliver messages outside of the transport. No such goroutine starts after failAll and pendingMessages.close

	overfull overfull
}

type appKey struct{ app, customer int32 }

func (a *apps) init(self *nodeInfo, processes *processes, notices *notices) {
	a.self, a.processes, a.notices, a.role = self, processes, notices, self.role
	a.changed.L = &a.mu
	a.table.Store(&map[appKey]*Customer{})
	a.queued, a.usage, a.next = map[appKey][]queuedRequest{}, map[int]usage{}, map[appKey]int32{}
}

// key returns the customer of a message: on a worker the customer id selects it, elsewhere the application id is the
// customer id.
func (a *apps) key(app, customer int32) appKey {
	if a.role != van.Worker {
		customer = app
	}
	return appKey{app, customer}
}

func (a *apps) remove(c *Customer, next int32) {
	a.mu.Lock()
	defer a.mu.Unlock()
	m := maps.Clone(*a.table.Load())
	k := appKey{int32(c.app), int32(c.id)}
	if m[k] == c {
		delete(m, k)
		a.next[k] = next
	}
	a.table.Store(&m)
}

// Customer returns the node's customer with these ids, nil if there is none.
func (a App) Customer(app, id int) *Customer {
	return (*a.apps.table.Load())[a.apps.key(int32(app), int32(id))]
}

func (a *apps) customers() []*Customer {
	return slices.Collect(maps.Values(*a.table.Load()))
}
