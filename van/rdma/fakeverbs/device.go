package fakeverbs

import (
	"net/netip"
	"sync"
	"syscall"
	"time"

	"github.com/stepaf/stepaf-go/internal/fifo"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// device implements verbs.Device: the protection domain and completion queue of one
// channel at one host. Everything is guarded by net.mu.
type device struct {
	net     *Net
	stack   *Stack
	ch      *channel
	host    *host
	cond    sync.Cond
	cq      fifo.Queue[entryCQ]
	size    int
	overrun error
	wake    bool
	polling bool
	timer   *time.Timer // ends the wait of Poll; used again
	until   time.Time   // when
	expired bool
	lkeys   map[uint32]*region
	rkeys   map[uint32]*region
}

// entryCQ is an entry of a completion queue.
type entryCQ struct {
	verbs.Completion
	qp  *qp
	pos uint64 // SendDone: of the work request in its queue
}

func newDevice(c *channel, h *host) *device {
	d := &device{net: c.net, stack: c.stack, ch: c, host: h, size: c.net.cfg.CQE,
		lkeys: map[uint32]*region{}, rkeys: map[uint32]*region{}}
	d.cond.L = &c.net.mu
	return d
}

func (d *device) addr() netip.AddrPort { return netip.AddrPortFrom(d.host.addr, 0) }
func (d *device) ended() bool          { return d.ch.ended() }
func (d *device) Name() string         { return d.host.name }

func (d *device) Info() (verbs.DeviceInfo, error) {
	if err := d.stack.hook(Op{Kind: OpInfo, Local: d.addr()}); err != nil {
		return verbs.DeviceInfo{}, err
	}
	n := d.net
	n.mu.Lock()
	defer n.mu.Unlock()
	if d.ended() {
		return verbs.DeviceInfo{}, fault("info", verbs.ErrClosed, "%s", d.stack.name)
	}
	if d.host.absent {
		return verbs.DeviceInfo{}, fault("info", syscall.ENODEV, "%s: %s", d.stack.name, d.host.name)
	}
	return n.info(d.host), nil
}

func (d *device) Reserve(size int) error {
	if err := d.stack.hook(Op{Kind: OpReserve, Local: d.addr(), Size: size}); err != nil {
		return err
	}
	n := d.net
	n.mu.Lock()
	defer n.mu.Unlock()
	if d.ended() {
		return fault("reserve", verbs.ErrClosed, "%s", d.stack.name)
	}
	if size > n.cfg.MaxCQE {
		return fault("reserve", syscall.EINVAL, "%s: %d completions, want up to %d", d.stack.name, size, n.cfg.MaxCQE)
	}
	d.size = max(d.size, size)
	return nil
}

func (d *device) Capacity() int {
	d.net.mu.Lock()
	defer d.net.mu.Unlock()
	return d.size
}

// complete enters a completion. A queue that is full is lost, as its device has it.
func (d *device) complete(e entryCQ) {
	if d.ended() || d.overrun != nil {
		return
	}
	if d.cq.Len() >= d.size {
		d.overrun = fault("completion queue", syscall.EOVERFLOW, "%s: %s: more than %d completions, want them polled or reserved",
			d.stack.name, d.host.name, d.size)
		d.net.report(d.overrun)
		for _, q := range d.net.byAge() {
			if q.dev == d {
				d.net.breakQP(q)
			}
		}
	} else {
		d.cq.Put(e)
	}
	d.cond.Broadcast()
}

func (d *device) Wake() {
	d.net.mu.Lock()
	defer d.net.mu.Unlock()
	d.stack.counters.Wakes++
	d.wake = true
	d.cond.Broadcast()
}

func (d *device) Poll(out []verbs.Completion, spin, block time.Duration) (int, error) {
	if err := d.stack.hook(Op{Kind: OpPoll, Local: d.addr()}); err != nil {
		return 0, err
	}
	n := d.net
	n.mu.Lock()
	defer n.mu.Unlock()
	if d.polling {
		err := fault("poll", syscall.EBUSY, "%s: %s: a second caller at the same time", d.stack.name, d.host.name)
		n.report(err)
		return 0, err
	}
	d.polling = true
	defer func() { d.polling = false }()
	d.stack.counters.Polls++
	if len(out) == 0 {
		return 0, fault("poll", syscall.EINVAL, "%s: room for no completion", d.stack.name)
	}
	d.wait(spin, block)
	for d.stack.stopped && !d.ended() {
		d.cond.Wait()
	}
	switch {
	case d.ended():
		return 0, fault("poll", verbs.ErrClosed, "%s: %s", d.stack.name, d.host.name)
	case d.cq.Len() == 0:
		return 0, d.overrun
	}
	return d.take(out), nil
}

// wait waits as Poll does.
func (d *device) wait(spin, block time.Duration) {
	limit := spin + max(block, 0)
	if d.cq.Len() > 0 || d.ended() || d.overrun != nil || spin >= 0 && limit <= 0 {
		return
	}
	d.expired = false
	if spin >= 0 {
		d.alarm(limit)
		defer d.timer.Stop()
	}
	for d.cq.Len() == 0 && !d.wake && !d.expired && !d.ended() && d.overrun == nil {
		d.cond.Wait()
	}
	if d.cq.Len() == 0 {
		d.wake = false
	}
}

// alarm ends the wait that begins now after limit.
func (d *device) alarm(limit time.Duration) {
	d.until = time.Now().Add(limit)
	if d.timer != nil {
		d.timer.Reset(limit)
		return
	}
	d.timer = time.AfterFunc(limit, func() {
		d.net.mu.Lock()
		defer d.net.mu.Unlock()
		if time.Now().Before(d.until) {
			return // it was set again meanwhile
		}
		d.expired = true
		d.cond.Broadcast()
	})
}

// take takes completions from the queue, frees what they stand for, and posts the
// receive requests again.
func (d *device) take(out []verbs.Completion) int {
	k := min(len(out), d.cq.Len())
	d.stack.counters.Completions += k
	again := make([]*qp, 0, 16)
	for i := range k {
		e := d.cq.Take()
		out[i] = e.Completion
		d.net.recordCompletion(&e)
		switch e.Type {
		case verbs.SendDone:
			e.qp.tail = max(e.qp.tail, e.pos+1)
			e.qp.checkSent(e.pos)
		case verbs.RecvSend, verbs.RecvWrite:
			again = append(again, e.qp)
		}
	}
	for _, q := range again {
		d.net.repost(q)
	}
	return k
}
