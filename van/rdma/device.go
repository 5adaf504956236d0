package rdma

import (
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/engine"
	"github.com/stepaf/stepaf-go/van/rdma/conn"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// This file owns the state of one RDMA device of a van: its memory, its due queues, and
// what its poller keeps.

// device is what a van has on one RDMA device: memory, and the loop that polls its
// completions and hands up messages.
type device struct {
	v       *rvan
	dev     verbs.Device
	regions *conn.Regions
	loop    *engine.Loop[*van.Message]
	lanes   lanes

	areaSet

	mu sync.Mutex // of the poller: the loop, or a caller of Poll, which holds it while it delivers
	pollResult
	sleeping    atomic.Bool
	lockWaiters atomic.Int32 // goroutines that wait for mu

	// What housekeeping looks at: connections with credits to send or messages that wait,
	// those whose peers' slot requests wait, and those that nothing is sent on.
	active, requests, probes conn.DueQueue
	housekeptAt, evictedAt   uint64

	ready       readyQueue
	undelivered atomic.Int32 // messages that have come and have not been delivered by the loop
	completedAt uint64       // when something has come last
	stopped     chan struct{}
	ending      atomic.Bool
	idling

	deferredLanes []*lane     // with messages that were put aside; of the goroutine with the receiving role
	resumed       atomic.Bool // one of them may go on

	pool pool
}

// areaSet is the memory for values that the device's peers may write to.
type areaSet struct {
	areasMu sync.Mutex
	areas   map[*area]bool
}

// pollResult is what the last poll has found.
type pollResult struct {
	wcs          [pollBatch]verbs.Completion
	polled       []*received
	trailer      trailer     // of the message being looked at
	pollFailures int         // one after the other
	dead         atomic.Bool // the device: many have failed
}

// idling is how the loop waits while callers of Poll poll in its place.
type idling struct {
	wakeup    chan struct{}
	idleTimer *time.Timer
	idleTime  time.Duration // how long it waits next
	idlesLong atomic.Bool
}

// readyQueue is the messages that wait for the loop to deliver them.
type readyQueue struct {
	mu    sync.Mutex
	all   []*received
	first int
}

func (q *readyQueue) push(all []*received) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.all = append(q.all, all...)
}

func (q *readyQueue) pop() *received {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.first == len(q.all) {
		return nil
	}
	rx := q.all[q.first]
	q.all[q.first] = nil
	if q.first++; q.first == len(q.all) {
		q.all, q.first = q.all[:0], 0
	}
	return rx
}

func (q *readyQueue) empty() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.first == len(q.all)
}

// newArea makes registered memory of n bytes on the node's device, or on the host.
func (d *device) newArea(n int, host bool) (*area, error) {
	const access = verbs.LocalWrite | verbs.RemoteWrite
	var b *conn.Block
	var err error
	if back := d.v.backend; !host && back != nil && back.Device() != backend.Host {
		b, err = conn.NewDeviceBlock(d.dev, back, n, access)
	} else {
		b, err = conn.NewBlock(d.dev, n, access)
	}
	if err != nil {
		return nil, err
	}
	a := &area{Block: b, host: d}
	a.Mem = a.Mem.WithOwner(a)
	a.refs.Store(1)
	d.areasMu.Lock()
	d.areas[a] = true
	d.areasMu.Unlock()
	return a, nil
}

func (d *areaSet) forgetArea(a *area) {
	d.areasMu.Lock()
	delete(d.areas, a)
	d.areasMu.Unlock()
}

// awaitFlush waits for the last completions of a connection that has been broken.
// There may be fewer than receive requests: Soft-RoCE does not see those that are
// posted once a queue pair has ended.
func (d *device) awaitFlush(in *inbound) {
	limit, look := time.NewTimer(flushTime), time.NewTicker(flushPause)
	defer limit.Stop()
	defer look.Stop()
	for last := int32(0); ; {
		select {
		case <-in.drained:
			return
		case <-limit.C:
			return
		case <-d.stopped:
			return
		case <-look.C:
			n := in.flushed.Load()
			if n > 0 && n == last {
				return
			}
			last = n
		}
	}
}

// wakeIdleLoops ends the long naps of loops: an answer will come for which nobody polls.
func (v *node) wakeIdleLoops() {
	for _, d := range *v.devices.Load() {
		if d.idlesLong.Load() {
			d.wakeLoop()
		}
	}
}

func (d *device) wakeLoop() {
	select {
	case d.wakeup <- struct{}{}:
	default:
	}
}

// exclusive calls f while nobody polls.
func (d *device) exclusive(f func()) {
	d.lockWaiters.Add(1)
	defer d.lockWaiters.Add(-1)
	d.dev.Wake() // the loop holds mu while it sleeps
	d.mu.Lock()
	defer d.mu.Unlock()
	f()
}

// close deregisters everything on the device. Memory of messages that somebody still
// holds stays until then.
func (d *device) close() error {
	errs := []error{d.regions.Close()}
	d.areasMu.Lock()
	for a := range d.areas {
		errs = append(errs, a.Deregister())
	}
	d.areasMu.Unlock()
	return errors.Join(errs...)
}
