package rdma

import (
	"context"
	"runtime"
	"time"

	"github.com/stepaf/stepaf-go/internal/affinity"
	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/engine"
	"github.com/stepaf/stepaf-go/van/env"
	"github.com/stepaf/stepaf-go/van/rdma/conn"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// This file makes a device a source of the engine: it takes the device's completions, and does its housekeeping.

const (
	// pollBatch is the number of completions that are polled at once.
	pollBatch = 32
	// spinTime is how long to poll before sleeping: waking a sleeping thread costs more than a small message.
	spinTime = time.Millisecond
	// spinSlice is the length of one call into C. The Go runtime's monitor takes the processor away from a call that lasts two of its
	// rounds, and then hardly sleeps itself.
	spinSlice = 10 * time.Microsecond
	maxSleep  = time.Second
	tickTime  = 2 * time.Millisecond // of housekeeping
	evictTime = time.Second          // between two searches for unused regions
	probeTime = time.Second          // between probes of an idle connection
)

func newDevice(v *rvan, dev verbs.Device) *device {
	d := &device{v: v, dev: dev, regions: conn.NewRegions(dev, v.backend), areaSet: areaSet{areas: map[*area]bool{}}, stopped: make(chan struct{})}
	d.now = clock.Now()
	d.housekeptAt, d.evictedAt = d.now, d.now
	d.spinner = v.delivery.engine.Spinner()
	d.probes.Delay = v.times.probe
	d.regions.OnStuck = func(r *conn.Region, err error) {
		v.log.Error("rdma: memory stays registered and is not freed", "device", dev.Name(), "bytes", r.Mem.Len(), "err", err)
	}
	d.feed = engine.NewFeed(v.delivery.engine, d, engine.FeedOptions{Polls: true, Spins: true, LongPolls: true, Spin: spinTime, Busy: v.movedBulk, CannotSleep: d.dead.Load})
	l := d.feed.Loop
	l.Begin = d.begin
	l.Budget, l.Weight = v.delivery.recvBudget, weight
	l.Paused = d.logPaused
	l.Resumed = func(*engine.PeerQueue[*van.Message]) { d.feed.Wake() }
	return d
}

// weight returns the cost of a message that is queued for its handler. A value that is placed is in memory of the application.
func weight(m *van.Message) int {
	n := messageBytes + len(m.Body) + len(m.Parts)*van.PartBytes
	if !m.Placed {
		n += m.PayloadLen()
	}
	for i := range m.Parts {
		if x := &m.Parts[i]; x.Placed {
			n -= x.Vals.Len()
		}
	}
	return n
}

// messageBytes is the approximate size of a message without its data.
const messageBytes = 1 << 10

// logPaused logs that a sender's messages are not read for a while.
func (d *device) logPaused(l *engine.PeerQueue[*van.Message], bytes int64) {
	d.v.stats.paused.Add(1)
	d.queues.of(l.ID, false).blame.Watch(l.Paused, l.Slow, func() {
		n, speak := d.v.stats.slowHandlerLog.Next()
		if !speak {
			return
		}
		d.v.log.Warn("rdma: messages of a peer wait for a slow handler; the peer gets no more slots until some have been handled",
			"peer", van.NodeName(l.ID), "bytes", bytes, "STEPAF_RECV_BUDGET_PEER", d.v.cfg.RecvBudgetPeer, "of all peers", d.v.delivery.recvBudget.Used(), "STEPAF_RECV_BUDGET", d.v.cfg.RecvBudget, "so far", n)
	})
}

// begin binds the polling goroutine to the core that STEPMESH_BIND_CPU_CORE assigns, on a thread of its own that ends with the goroutine.
// Without a binding any thread will do: after each yield or sleep the goroutine would have to wait for its own thread.
func (d *device) begin() {
	if !d.bound() {
		return
	}
	runtime.LockOSThread()
	core := d.v.cfg.Core(env.CorePoller)
	if err := affinity.Bind(core); err != nil {
		d.v.log.Warn("STEPMESH_BIND_CPU_CORE: the thread that polls completions is not bound", "err", err)
		return
	}
	d.v.log.Info("the thread that polls completions is bound", "device", d.dev.Name(), "core", core)
}

func (d *device) bound() bool {
	cfg := d.v.cfg
	return cfg.BindCPUCore && cfg.GPU >= 0 && d.v.local.self.Role != van.Scheduler
}

// Take implements engine.Source.
func (d *device) Take(slice time.Duration, poll bool) (*van.Message, *engine.PeerQueue[*van.Message], engine.PollResult) {
	rx, l, found := d.next(poll)
	if found == engine.Nothing {
		d.housekeep(d.now, false)
		if d.complete(min(slice, spinSlice)) {
			if rx, l, found = d.next(poll); found == engine.Nothing && poll {
				found = engine.Progress // the loop need not poll more because a send has completed
			}
		}
	}
	if found != engine.Message {
		return nil, nil, found
	}
	return &rx.msg, &l.PeerQueue, found
}

// complete takes completions and adds their messages to d.ready. It reports whether there were completions, and sets d.now.
func (d *device) complete(spin time.Duration) bool {
	if !d.polls.cq.TryLock() {
		d.spinner.YieldGoroutines()
		d.now = clock.Now()
		return false // the loop is in Sleep, and has been woken
	}
	defer d.polls.cq.Unlock()
	if d.polls.n == 0 {
		d.poll(spin, 0)
	}
	n := d.polls.n
	d.polls.n, d.now = 0, clock.Now()
	for i := range d.polls.wcs[:n] {
		d.handleCompletion(&d.polls.wcs[i])
	}
	return n > 0
}

// poll polls completions. d.cq is held.
func (d *device) poll(spin, block time.Duration) {
	n, err := d.dev.Poll(d.polls.wcs[:], spin, block)
	d.polls.n = n
	switch {
	case err != nil:
		d.polls.failures++
		d.dead.Store(d.polls.failures > 8)
		if d.polls.failures&(d.polls.failures-1) == 0 && !d.v.closed.Load() {
			d.v.log.Error("rdma: polling completions failed", "device", d.dev.Name(), "err", err, "so far", d.polls.failures)
		}
	case d.polls.failures > 0:
		d.polls.failures = 0
		d.dead.Store(false)
	}
}

// Arm implements engine.Source. From now on, credits are sent at once, and a queued message wakes the loop, since both see d.sleeping.
func (d *device) Arm(engine.Sleeper) bool {
	d.sleeping.Store(true)
	now := clock.Now()
	d.housekeep(now, true)
	d.sleepTime = d.probes.Wait(now, d.v.times.sleep)
	if !d.active.Empty() || !d.requests.Empty() {
		d.sleepTime = tickTime
	}
	return d.polls.n > 0 || d.ready.Len() > 0 || d.mayResume()
}

// Disarm implements engine.Source.
func (d *device) Disarm() {}

// Sleep implements engine.Source. It holds cq from before it arms, so that no other goroutine polls and takes the wake-up meant for the
// loop.
func (d *device) Sleep(_ engine.Sleeper, arm func() bool, _ time.Duration) {
	d.polls.cq.Lock()
	defer d.polls.cq.Unlock()
	if !arm() {
		d.poll(0, d.sleepTime)
	}
	d.sleeping.Store(false)
}

// Wake implements engine.Source.
func (d *device) Wake(engine.Sleeper) { d.dev.Wake() }

// Deliver implements engine.Source.
func (d *device) Deliver(m *van.Message, inPoll bool) {
	m.InPoll = inPoll
	d.v.delivery.recv(m)
	m.Release()
}

// Discard implements engine.Source.
func (d *device) Discard(m *van.Message) { m.Release() }

// housekeep runs the due items. now may be earlier than in the previous call: the first poll after a sleep uses the time
// of the poll before it. An idle connection costs only a probe each
// second.
func (d *device) housekeep(now uint64, sleeping bool) {
	if !sleeping && time.Duration(now-d.housekeptAt) < tickTime {
		return
	}
	d.housekeptAt = now
	d.active.Run(now, sleeping)
	d.probes.Run(now, false)
	if time.Duration(now-d.evictedAt) > evictTime {
		d.evictedAt = now
		d.regions.Evict(now)
	}
	d.requests.Run(now, false)
}

// pollBulk is the number of bytes since the last call of movedBulk from which spinning does not pay: moving them takes too long.
const pollBulk = 256 << 10

// movedBulk reports whether more than pollBulk bytes were sent and received since its last call.
func (v *rvan) movedBulk() bool {
	n := v.stats.sentB.Load() + v.stats.recvB.Load()
	return v.cfg.BusyPoll != env.SpinForever && n-v.delivery.movedBytes.Swap(n) > pollBulk
}

// stop ends the loop, and waits for the Poll that uses the device.
func (d *device) stop() {
	_ = d.feed.Stop(context.Background()) // without a deadline there are no errors
	_ = d.feed.Free(context.Background(), func() {
		for d.ready.Len() > 0 {
			d.ready.Take().msg.Release()
		}
		for _, l := range d.deferredQueues {
			for l.deferred.Len() > 0 {
				l.deferred.Take().msg.Release()
			}
		}
	})
	close(d.stopped)
}

// device returns the van's state on dev, and starts polling dev.
func (v *rvan) device(dev verbs.Device) (*device, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, d := range *v.tables.devices.Load() {
		if d.dev == dev {
			return d, nil
		}
	}
	if v.delivery.noMoreDevices { // Close lets connections that are being made send their queued messages
		return nil, van.ErrClosed
	}
	d := newDevice(v, dev)
	all := append(append([]*device(nil), *v.tables.devices.Load()...), d)
	v.tables.devices.Store(&all)
	if v.delivery.started {
		d.feed.Start()
	}
	return d, nil
}
