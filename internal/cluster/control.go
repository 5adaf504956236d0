package cluster

// Runs the membership machine: passes messages and time to it, and waits for its barriers.

import (
	"context"
	"errors"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/internal/wake"
	"github.com/stepaf/stepaf-go/postoffice/membership"
	"github.com/stepaf/stepaf-go/van"
)

// control is the membership machine and its outputs that are not performed yet.
type control struct {
	self    *nodeInfo
	life    *lifetime
	members members
	queues  outputQueues
	probe   func(id int) bool // reports whether a peer's transport answers probes; nil without, see van.LivenessProber

	mu              sync.Mutex // guards the fields below, and changes of life
	machine         *membership.Machine
	outputs         []membership.Output
	draining        bool            // a goroutine performs outputs
	pendingConnects map[int]int     // by peer, Connect outputs that are not performed yet
	waiters         map[int]*waiter // by barrier number
	rearm           chan struct{}   // the time of the next tick may have changed
}

// waiter is a call that waits for a barrier.
type waiter struct {
	ended chan error // receives result when the output that ends the barrier is performed
	// over: the machine has ended the barrier, with result. control.mu guards both.
	over   bool
	result error
}

// now is the machine's clock.
func now() time.Duration { return time.Duration(clock.Now()) }

// step passes an input to the machine and performs its outputs in order. If another goroutine, or a caller of step further
// up, is performing outputs already, it also performs the new ones.
func (c *control) step(input func(time.Duration)) {
	c.mu.Lock()
	c.advance(input)
	if c.draining {
		c.mu.Unlock()
		return
	}
	c.drain()
	c.mu.Unlock()
	wake.Put(c.rearm)
}

// advance passes an input to the machine, queues its outputs, and updates the tables that depend on them. mu is held.
func (c *control) advance(input func(time.Duration)) {
	t := now()
	input(t)
	outs := c.machine.Take()
	// Outputs that are due now precede the application's next calls. Messages of this node to itself are delivered first,
	// such as the release of a barrier at its deadline.
	if at, wanted := c.machine.NextTick(); wanted && at <= t && !sendsTo(outs, c.machine.ID()) {
		c.tick(t)
		outs = append(outs, c.machine.Take()...)
	}
	c.members.updateProcesses(outs, c.machine.Incarnation(van.SchedulerID))
	c.members.updateLosses(outs)
	for _, o := range outs {
		switch o := o.(type) {
		case membership.Connect:
			c.addPendingConnect(o.ID, 1)
		case membership.BarrierDone:
			c.barrierOver(o.Barrier, nil)
		case membership.BarrierFailed:
			c.barrierOver(o.Barrier, o.Err)
		}
	}
	c.outputs = append(c.outputs, outs...)
}

// drain performs the queued outputs, including those that are queued meanwhile. mu is held, but not while an output is
// performed.
func (c *control) drain() {
	c.draining = true
	for len(c.outputs) > 0 {
		outs := c.outputs
		c.outputs = nil
		c.mu.Unlock()
		for _, o := range outs {
			c.queues.dispatch(o)
		}
		c.mu.Lock()
	}
	c.draining = false
}

// tick passes the time to the machine, and before that the peers whose transports still answer although the machine
// would declare them dead. mu is held.
func (c *control) tick(t time.Duration) {
	if c.probe != nil {
		for _, id := range c.machine.Silent(t) {
			if c.probe(id) {
				c.machine.ProbeAnswered(t, id)
			}
		}
	}
	c.machine.Tick(t)
}

func sendsTo(outs []membership.Output, id int) bool {
	return slices.ContainsFunc(outs, func(o membership.Output) bool {
		m, ok := o.(membership.Send)
		return ok && m.To == id
	})
}

// addPendingConnect counts the Connect outputs that are not performed yet. mu is held.
func (c *control) addPendingConnect(id, more int) {
	if c.pendingConnects[id] += more; c.pendingConnects[id] == 0 {
		delete(c.pendingConnects, id)
	}
}

// runTimer steps the machine at the times that it asks for.
func (c *control) runTimer() {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		c.mu.Lock()
		at, wanted := c.machine.NextTick()
		c.mu.Unlock()
		if wanted {
			timer.Reset(max(at-now(), 0))
		} else {
			timer.Stop()
		}
		select {
		case <-timer.C:
			c.step(c.tick)
		case <-c.rearm:
		case <-c.life.stop:
			return
		}
	}
}

// peerChanged is called by the transport.
func (c *control) peerChanged(id int, up bool, cause error) {
	var process uint32 // at the other end of the lost connection
	if e := (*van.ConnectionError)(nil); errors.As(cause, &e) {
		process = e.Incarnation
	}
	c.step(func(t time.Duration) {
		known := c.machine.Incarnation(id)
		switch {
		case process != 0 && known != 0 && process != known: // the process that had the id before
		case up:
			c.machine.PeerBack(t, id)
		case id == van.SchedulerID && !c.machine.Ready() && errors.Is(cause, syscall.ECONNREFUSED) && !errors.Is(cause, van.ErrReplaced):
			// The scheduler does not listen yet. All other known peers listen.
		case c.pendingConnects[id] > 0:
			// The lost connection is that of the earlier process of the id. The connection to the present one is not
			// made yet.
		default:
			c.machine.PeerLost(t, id, cause)
		}
	})
}

// receive passes a control message to the machine.
func (c *control) receive(msg *van.Message) {
	c.step(func(t time.Duration) {
		if err := c.machine.StepFrom(t, msg.Sender, msg.Origin, &msg.Meta); err != nil {
			c.self.droppedControl(msg.Sender, err)
		}
	})
}

// await starts a barrier and waits for its end.
func (c *control) await(ctx context.Context, op string, begin func(time.Duration) (int, error)) error {
	start := time.Now()
	w := &waiter{ended: make(chan error, 1)}
	var ticket int
	var err error
	c.step(func(t time.Duration) {
		if ticket, err = begin(t); err == nil {
			c.waiters[ticket] = w
		}
	})
	if err != nil {
		return err
	}
	select {
	case err := <-w.ended:
		return err
	case <-c.life.failed:
		return c.life.err
	case <-c.life.closing:
		err = van.ErrClosed
	case <-ctx.Done():
		err = van.TimedOut(context.Cause(ctx))
	}
	var over bool // before this call was canceled
	missing, hint := "", ""
	c.step(func(time.Duration) {
		delete(c.waiters, ticket)
		if over = w.over; !over {
			missing, hint = c.machine.Missing(ticket)
			c.machine.CancelBarrier(ticket)
		}
	})
	if over {
		return w.result
	}
	return &van.Error{Op: op, Node: c.self.Name(), Detail: missing, Elapsed: time.Since(start), Err: err, Hint: hint}
}

// barrierOver records the result of a barrier that the machine has ended. mu is held.
func (c *control) barrierOver(ticket int, err error) {
	if w := c.waiters[ticket]; w != nil {
		w.over, w.result = true, err
	}
}

// barrierEnded ends the call that waits for a barrier.
func (c *control) barrierEnded(ticket int, err error) {
	c.mu.Lock()
	w := c.waiters[ticket]
	delete(c.waiters, ticket)
	c.mu.Unlock()
	if w != nil {
		w.ended <- err
	}
}
