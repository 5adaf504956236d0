package rdma

import (
	"context"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/internal/affinity"
	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/engine"
	"github.com/stepaf/stepaf-go/van/env"
	"github.com/stepaf/stepaf-go/van/rdma/conn"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// This file owns the polling of a device's completions, by its loop or by a goroutine that waits for an answer.

// pollBatch is the number of completions that are polled at once.
const pollBatch = 32

func newDevice(v *rvan, dev verbs.Device) *device {
	d := &device{v: v, dev: dev, regions: conn.NewRegions(dev, v.backend), areaSet: areaSet{areas: map[*area]bool{}},
		stopped: make(chan struct{}), idling: idling{wakeup: make(chan struct{}, 1), idleTimer: time.NewTimer(time.Hour), idleTime: minIdleWait}}
	d.pool.d = d
	d.probes.Delay = probeTime
	d.regions.OnStuck = func(r *conn.Region, err error) {
		v.log.Error("rdma: memory stays registered, and is kept", "device", dev.Name(), "bytes", r.Mem.Len(), "err", err)
	}
	d.loop = engine.NewLoop(d.receive, d.deliver)
	d.loop.Begin, d.loop.End = d.begin, d.end
	d.loop.Budget, d.loop.Weight = v.recvBudget, weight
	d.loop.Paused = d.pausedLane
	d.loop.Resumed = func(*engine.Lane[*van.Message]) {
		d.resumed.Store(true)
		d.dev.Wake()
		d.wakeLoop()
	}
	d.loop.Discard = func(m *van.Message) {
		d.undelivered.Add(-1)
		m.Release()
	}
	return d
}

// weight is what a message costs while it waits for its handler.
func weight(m *van.Message) int {
	n := messageBytes + len(m.Body)
	if !m.Placed { // else it lies in memory of the application
		n += m.PayloadLen()
	}
	return n
}

// messageBytes is about what a message itself takes.
const messageBytes = 1 << 10

// pausedLane logs that a sender's messages are not taken any more for a while.
func (d *device) pausedLane(l *engine.Lane[*van.Message], bytes int64) {
	if n := d.v.stats.paused.Add(1); n&(n-1) == 0 {
		d.v.log.Warn("rdma: messages of a peer wait for a handler that is slow; it gets no more slots until some have been taken",
			"peer", van.NodeName(l.ID), "bytes", bytes, "STEPAF_RECV_BUDGET_PEER", d.v.cfg.RecvBudgetPeer, "of all peers", d.v.recvBudget.Used(), "STEPAF_RECV_BUDGET", d.v.cfg.RecvBudget, "so far", n)
	}
}

// begin gives the goroutine that polls a thread of its own, on the core that the
// original gives it.
func (d *device) begin() {
	runtime.LockOSThread()
	if !d.bound() {
		return
	}
	core := d.v.cfg.Core(env.CorePoller)
	if err := affinity.Bind(core); err != nil {
		d.v.log.Warn("STEPMESH_BIND_CPU_CORE: the thread that polls completions is not bound", "err", err)
		return
	}
	d.v.log.Info("the thread that polls completions is bound", "device", d.dev.Name(), "core", core)
}

// end gives back the thread, which would end with a goroutine that has locked it. One
// that was bound must.
func (d *device) end() {
	if !d.bound() {
		runtime.UnlockOSThread()
	}
}

func (d *device) bound() bool {
	cfg := d.v.cfg
	return cfg.BindCPUCore && cfg.GPU >= 0 && d.v.self.Role != van.Scheduler
}

// receive has the receiving role: it returns the next message.
func (d *device) receive() (*van.Message, *engine.Lane[*van.Message], bool) {
	for {
		if len(d.deferredLanes) > 0 {
			if rx, l := d.readmit(); rx != nil {
				return &rx.msg, &l.Lane, true
			}
		}
		if rx := d.ready.pop(); rx != nil {
			if l, ok := d.admit(rx); ok {
				return &rx.msg, &l.Lane, true
			}
			continue
		}
		if d.ending.Load() {
			return nil, nil, false
		}
		d.housekeep(false)
		if d.v.polling.waitersPoll() && d.undelivered.Load() == 0 { // else they cannot: see help
			d.idleWait()
			continue
		}
		d.idleTime = minIdleWait
		if d.pollOnce(); d.dead.Load() {
			time.Sleep(tickTime) // it will not get better; not in pollOnce, which holds mu
		}
		if d.lockWaiters.Load() > 0 {
			runtime.Gosched() // with few processors a goroutine that wakes up for mu would find it taken again
		}
	}
}

// idleWait leaves the polling to callers of Poll. The longer they poll, the longer the loop
// waits, as its waking up disturbs them where processors are few.
func (d *device) idleWait() {
	d.idleTimer.Reset(d.idleTime)
	d.idlesLong.Store(d.idleTime > minIdleWait)
	select {
	case <-d.idleTimer.C:
		d.idleTime = min(2*d.idleTime, maxIdleWait)
	case <-d.wakeup:
		d.idleTime = minIdleWait
	}
	d.idlesLong.Store(false)
	if clock.Now()-d.v.polling.oversubscribedAt.Load() > uint64(maxIdleWait) {
		return
	}
	// The caller of Poll polls for itself only, and others wait, too.
	d.idleTime = minIdleWait
	runtime.Gosched()
	if d.mu.TryLock() {
		d.poll(0, 0)
		d.enqueue()
		d.mu.Unlock()
	}
}

// pollOnce polls once: for a while, and when nothing has come for long it sleeps.
func (d *device) pollOnce() {
	d.mu.Lock()
	defer d.mu.Unlock()
	spin, block := spinSlice, time.Duration(0)
	switch d.v.cfg.BusyPoll {
	case env.SpinForever:
	case env.AlwaysBlock:
		spin, block = 0, maxSleep
	default:
		if d.v.movedMuch() {
			d.completedAt = 0
		}
		if clock.Now()-d.completedAt > uint64(d.v.polling.spin) {
			spin, block = 0, maxSleep
		}
	}
	if block > 0 {
		d.sleeping.Store(true)
		// Credits that come to be owed from now on are sent at once, and a message that begins
		// to wait wakes the loop: their senders see that it sleeps.
		d.housekeep(true)
		block = d.probes.Wait(clock.Now(), maxSleep)
		if !d.active.Empty() || !d.requests.Empty() {
			block = min(block, tickTime)
		}
		if d.v.polling.pollers.Load() > 0 || d.ending.Load() || d.lockWaiters.Load() > 0 || d.pending() {
			block = 0
		}
	}
	d.poll(spin, block)
	d.sleeping.Store(false)
	if len(d.polled) > 0 {
		d.completedAt = clock.Now()
	}
	d.enqueue()
}

// Times of the loop.
const (
	// spinSlice is the length of one call into C: shorter than it takes the runtime's
	// monitor to look twice, which takes its processor from one that lasts longer, and
	// then hardly sleeps itself.
	spinSlice = 10 * time.Microsecond
	maxSleep  = time.Second
	tickTime  = 2 * time.Millisecond // of housekeeping
	evictTime = time.Second          // between two looks for regions that nothing uses
	probeTime = time.Second          // of idle connections
)

// poll takes completions and turns them into messages in d.came. d.mu is held.
func (d *device) poll(spin, block time.Duration) int {
	n, err := d.dev.Poll(d.wcs[:], spin, block)
	if err != nil {
		d.pollFailures++
		d.dead.Store(d.pollFailures > 8)
		if d.pollFailures&(d.pollFailures-1) == 0 && !d.ending.Load() && !d.v.closed.Load() {
			d.v.log.Error("rdma: polling completions failed", "device", d.dev.Name(), "err", err, "so far", d.pollFailures)
		}
		return 0
	}
	if d.pollFailures > 0 {
		d.pollFailures = 0
		d.dead.Store(false)
	}
	for i := range d.wcs[:n] {
		d.completed(&d.wcs[i])
	}
	return n
}

// enqueue puts what has come into the loop's queue. d.mu is held.
func (d *device) enqueue() {
	if len(d.polled) == 0 {
		return
	}
	d.undelivered.Add(int32(len(d.polled)))
	d.ready.push(d.polled)
	clear(d.polled)
	d.polled = d.polled[:0]
}

func (d *device) pending() bool { return !d.ready.empty() || d.resumed.Swap(false) }

func (d *device) deliver(m *van.Message, turn *engine.Turn) {
	m.Turn = turn
	d.v.recv(m)
	m.Release()
	d.undelivered.Add(-1)
}

// housekeep does what is due. Idle connections cost nothing but a probe each second.
func (d *device) housekeep(sleeping bool) {
	now := clock.Now()
	if !sleeping && now-d.housekeptAt < uint64(tickTime) {
		return
	}
	d.housekeptAt = now
	if d.active.Run(now, sleeping) {
		d.idleTime = minIdleWait
	}
	d.probes.Run(now, false)
	if now-d.evictedAt > uint64(evictTime) {
		d.evictedAt = now
		d.regions.Evict(now)
	}
	if d.requests.Empty() {
		return
	}
	if !sleeping {
		d.mu.Lock() // as for any slot request
		defer d.mu.Unlock()
	}
	d.requests.Run(now, false)
}

// polling is what the callers of Poll, and the loops, know of each other.
type polling struct {
	spin             time.Duration // how long to poll before sleeping
	busy             atomic.Bool   // a caller of Poll polls
	endedAt          atomic.Uint64 // when the last Poll ended
	oversubscribedAt atomic.Uint64 // when a Poll last left it to another
	pollers          atomic.Int32  // callers of Poll
	movedBytes       atomic.Uint64 // bytes sent and received when movedMuch was last called
}

// Poll implements van.Poller: it receives and delivers on the caller's goroutine the
// answers that come to a worker, or the requests that come to a server, until done or
// until nothing has come for a while. Only one caller at a time polls; others return
// at once.
func (v *rvan) Poll(done func() bool) {
	if v.polling.spin <= 0 {
		return
	}
	if v.movedMuch() {
		v.leaveToLoops()
		return
	}
	v.polling.pollers.Add(1)
	if !v.polling.busy.CompareAndSwap(false, true) {
		v.polling.pollers.Add(-1)
		v.polling.oversubscribedAt.Store(clock.Now())
		v.wakeIdleLoops()
		return
	}
	devices := *v.devices.Load()
	for _, d := range devices {
		if d.sleeping.Load() {
			d.dev.Wake()
		}
	}
	begun := clock.Now()
	looked := false
	for last := begun; !done(); {
		got := false
		looked = true
		for _, d := range devices {
			got = d.pollInPlace(spinSlice) || got
		}
		now := clock.Now()
		if got {
			last = now
		}
		if len(devices) == 0 || now-last > uint64(v.polling.spin) || now-begun > uint64(maxPoll) {
			break
		}
	}
	switch {
	case !looked: // nor did it find anything
	case done():
		v.polling.endedAt.Store(clock.Now())
	default:
		v.polling.endedAt.Store(0)
	}
	v.polling.busy.Store(false)
	v.polling.pollers.Add(-1)
	if v.polling.endedAt.Load() == 0 {
		v.leaveToLoops()
	}
}

// leaveToLoops is for a caller of Poll that goes to sleep: the loops take over at once.
func (v *rvan) leaveToLoops() {
	v.polling.endedAt.Store(0)
	for _, d := range *v.devices.Load() {
		d.wakeLoop()
	}
}

// pollBulk is the number of bytes, sent or received since the last call of movedMuch, that take longer
// to move than it pays to poll for what comes next.
const pollBulk = 256 << 10

// movedMuch tells whether much has been sent or received since it was last called.
func (v *rvan) movedMuch() bool {
	n := v.stats.sentB.Load() + v.stats.recvB.Load()
	return v.cfg.BusyPoll != env.SpinForever && n-v.polling.movedBytes.Swap(n) > pollBulk
}

// maxPoll bounds a Poll: its caller has a deadline. pollGrace is how long after a Poll
// another one is expected. maxDoze is how long it may take until it is noticed that there
// was none.
const (
	maxPoll     = 2 * time.Millisecond
	minIdleWait = time.Millisecond
	maxIdleWait = 2 * time.Millisecond
)

// waitersPoll tells whether somebody polls, or has done so a moment ago.
func (v *polling) waitersPoll() bool {
	return v.pollers.Load() > 0 || clock.Now()-v.endedAt.Load() < uint64(minIdleWait)
}

// pollInPlace polls and delivers in place of the loop.
func (d *device) pollInPlace(spin time.Duration) bool {
	if !d.mu.TryLock() {
		runtime.Gosched()
		return false
	}
	defer d.mu.Unlock()
	if d.ending.Load() || d.undelivered.Load() != 0 {
		runtime.Gosched()
		return false // an earlier message is still being delivered
	}
	n := d.poll(spin, 0)
	for i, rx := range d.polled {
		if m := &rx.msg; m.IsControl() || m.SimpleApp || m.Request != (d.v.self.Role == van.Server) {
			// Its handler may take long: for the loop, and what comes behind it, too.
			d.polled = d.polled[:copy(d.polled, d.polled[i:])]
			d.enqueue()
			d.wakeLoop()
			return true
		}
		d.v.recv(&rx.msg)
		rx.msg.Release()
	}
	clear(d.polled)
	d.polled = d.polled[:0]
	return n > 0
}

// stop ends the loop.
func (d *device) stop(ctx context.Context) error {
	d.ending.Store(true)
	d.dev.Wake()
	d.wakeLoop()
	err := d.loop.Stop(ctx)
	for rx := d.ready.pop(); rx != nil; rx = d.ready.pop() {
		d.loop.Discard(&rx.msg)
	}
	if err == nil { // else the role is still held
		for _, l := range d.deferredLanes {
			for _, rx := range l.deferred {
				d.loop.Discard(&rx.msg)
			}
			l.deferred = nil
		}
	}
	close(d.stopped)
	return err
}

// device returns the van's part on dev, and starts polling it.
func (v *rvan) device(dev verbs.Device) (*device, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, d := range *v.devices.Load() {
		if d.dev == dev {
			return d, nil
		}
	}
	if v.noMoreDevices { // Close lets connections that are being made carry what waits for them
		return nil, van.ErrClosed
	}
	d := newDevice(v, dev)
	all := append(append([]*device(nil), *v.devices.Load()...), d)
	v.devices.Store(&all)
	if v.started {
		d.loop.Start()
	}
	return d, nil
}
