package fakeverbs

// A device with its completion queue.

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

func (d *device) addr() netip.AddrPort { return netip.AddrPortFrom(d.host.addr, 0) }
func (d *device) ended() bool          { return d.ch.ended() }
func (d *device) Name() string         { return d.host.name }

// enter enters a completion. A queue that is full is lost, as its device has it; full says that
// this was when.
func (d *device) enter(e entryCQ) (full bool) {
	if d.ended() || d.overrun != nil {
		return false
	}
	if full = d.cq.Len() >= d.size; full {
		d.overrun = fault("completion queue", syscall.EOVERFLOW, "%s: %s: more than %d completions, want them polled or reserved",
			d.stack.name, d.host.name, d.size)
		d.net.misuse.report(d.overrun)
	} else {
		d.cq.Put(e)
	}
	d.cond.Broadcast()
	return full
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
