package fakeverbs

// This file owns the calls of a device, except those of queue pairs and regions.

import (
	"syscall"
	"time"

	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

func (d *device) Info() (verbs.DeviceInfo, error) {
	err := d.stack.begin(Op{Kind: OpInfo, Local: d.addr()}, d.ended)
	n := d.net
	defer n.mu.Unlock()
	if err != nil {
		return verbs.DeviceInfo{}, err
	}
	if d.host.absent {
		return verbs.DeviceInfo{}, fault("info", syscall.ENODEV, "%s: %s", d.stack.name, d.host.name)
	}
	return d.host.info(&n.cfg), nil
}

func (d *device) Reserve(size int) error {
	err := d.stack.begin(Op{Kind: OpReserve, Local: d.addr(), Size: size}, d.ended)
	n := d.net
	defer n.mu.Unlock()
	if err != nil {
		return err
	}
	if size > n.cfg.MaxCQE {
		return fault("reserve", syscall.EINVAL, "%s: %d completions, want up to %d", d.stack.name, size, n.cfg.MaxCQE)
	}
	d.size = max(d.size, size)
	return nil
}

func (d *device) Wake() {
	d.net.mu.Lock()
	defer d.net.mu.Unlock()
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
		n.misuse.report(err)
		return 0, err
	}
	d.polling = true
	defer func() { d.polling = false }()
	if len(out) == 0 {
		return 0, fault("poll", syscall.EINVAL, "%s: no space for completions", d.stack.name)
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

// take moves completions to out, frees the positions of their work requests, and posts the receive requests again.
func (d *device) take(out []verbs.Completion) int {
	k := min(len(out), d.cq.Len())
	again := make([]*qp, 0, 16)
	for i := range k {
		e := d.cq.Take()
		out[i] = e.Completion
		d.net.trace.completion(&e)
		switch e.Type {
		case verbs.SendDone:
			e.qp.tail = max(e.qp.tail, e.pos+1)
			e.qp.checkSent(e.pos)
		case verbs.RecvSend, verbs.RecvWrite:
			again = append(again, e.qp)
		}
	}
	for _, q := range again {
		q.repost()
	}
	return k
}
