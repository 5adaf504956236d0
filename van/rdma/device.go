package rdma

import (
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/internal/fifo"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/engine"
	"github.com/stepaf/stepaf-go/van/rdma/conn"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// This file owns the state of one RDMA device of a van: its memory, its due queues, and the state of its poller.

// device is a van's state on one RDMA device. It is the engine's source for the device's completions.
type device struct {
	v       *rvan
	dev     verbs.Device
	regions *conn.Regions
	feed    *engine.Feed[*van.Message]
	spinner engine.Spinner // used by the holder of the feed
	queues  peerQueues
	pool    pool
	stopped chan struct{}

	areaSet
	polls    pollResult
	sleeping atomic.Bool // the loop sleeps, or is about to
	dead     atomic.Bool // many polls in a row have failed

	// The holder of the feed uses these.
	ready          fifo.Queue[*received] // complete messages, not delivered yet
	deferredQueues []*peerQueue          // queues that have deferred messages
	trailer        trailer               // of the message that is being decoded
	sleepTime      time.Duration
	now            uint64 // time of the last poll; other times may be later

	// Due queues: of connections with credits to send or messages that wait, of connections whose peers' slot requests wait, and of
	// idle connections to probe.
	active, requests, probes conn.DueQueue
	housekeptAt, evictedAt   uint64
}

// areaSet is the memory of values that peers of the device may write to.
type areaSet struct {
	areasMu sync.Mutex
	areas   map[*area]bool
}

// pollResult is the result of the last poll. The holder of both the feed and cq uses it, and so does the sleeping loop, which holds only
// cq.
type pollResult struct {
	cq       sync.Mutex
	wcs      [pollBatch]verbs.Completion
	n        int // number of completions in wcs
	failures int // in a row
}

// newArea registers n bytes of new memory on the node's device, or on the host.
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
	a := &area{Block: b, device: d}
	a.Mem = a.Mem.WithOwner(a)
	a.refs.Store(1)
	d.areasMu.Lock()
	d.areas[a] = true
	d.areasMu.Unlock()
	return a, nil
}

func (d *areaSet) removeArea(a *area) {
	d.areasMu.Lock()
	delete(d.areas, a)
	d.areasMu.Unlock()
}

// awaitFlush waits for the last completions of a broken connection. There may be fewer completions than receive requests: Soft-RoCE does
// not flush requests that are posted after a queue pair has failed.
func (d *device) awaitFlush(in *inbound) {
	limit, check := time.After(flushTime), time.Tick(flushPause)
	for last := int32(0); ; {
		select {
		case <-in.drain.drained:
			return
		case <-limit:
			return
		case <-d.stopped:
			return
		case <-check:
			n := in.drain.flushed.Load()
			if n > 0 && n == last {
				return
			}
			last = n
		}
	}
}

// exclusive calls f while no other goroutine handles completions.
func (d *device) exclusive(f func()) {
	d.feed.Lock()
	defer d.feed.Unlock()
	f()
}

// close deregisters everything on the device. Memory of messages that the application still holds stays mapped until they are released.
func (d *device) close() error {
	errs := []error{d.regions.Close()}
	d.areasMu.Lock()
	for a := range d.areas {
		errs = append(errs, a.Deregister())
	}
	d.areasMu.Unlock()
	return errors.Join(errs...)
}
