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

// This file owns the state of one RDMA device of a van: its memory, its due queues, and
// what its poller keeps.

// device is what a van has on one RDMA device: memory, and the source of the engine that
// takes its completions.
type device struct {
	v       *rvan
	dev     verbs.Device
	regions *conn.Regions
	feed    *engine.Feed[*van.Message]
	spinner engine.Spinner // of who holds the feed
	queues  peerQueues
	pool    pool
	stopped chan struct{}

	areaSet
	polls    pollResult
	sleeping atomic.Bool // the loop, or it is about to
	dead     atomic.Bool // many polls in a row have failed

	// All that follows is of who holds the feed.
	ready          fifo.Queue[*received] // not delivered
	deferredQueues []*peerQueue          // with messages that were put aside
	trailer        trailer               // of the message being looked at
	written        writtenMessages       // the write being looked at
	sleepTime      time.Duration

	// What housekeeping looks at: connections with credits to send or messages that wait,
	// those whose peers' slot requests wait, and those that nothing is sent on.
	active, requests, probes conn.DueQueue
	housekeptAt, evictedAt   uint64
}

// areaSet is the memory for values that the device's peers may write to.
type areaSet struct {
	areasMu sync.Mutex
	areas   map[*area]bool
}

// pollResult is what the last poll has found. Who holds the feed and cq has it, or the loop
// that sleeps, which holds cq alone.
type pollResult struct {
	cq       sync.Mutex
	wcs      [pollBatch]verbs.Completion
	n        int // of wcs
	failures int // one after the other
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

// awaitFlush waits for the last completions of a connection that has been broken.
// There may be fewer than receive requests: Soft-RoCE does not see those that are
// posted once a queue pair has ended.
func (d *device) awaitFlush(in *inbound) {
	limit, look := time.After(flushTime), time.Tick(flushPause)
	for last := int32(0); ; {
		select {
		case <-in.drain.drained:
			return
		case <-limit:
			return
		case <-d.stopped:
			return
		case <-look:
			n := in.drain.flushed.Load()
			if n > 0 && n == last {
				return
			}
			last = n
		}
	}
}

// exclusive calls f while nobody takes completions.
func (d *device) exclusive(f func()) {
	d.feed.Lock()
	defer d.feed.Unlock()
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
