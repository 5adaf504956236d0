package collective

// Calls with tensors on a device: they begin when its work has made the tensors, or does not use
// them any more.

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/internal/streamqueue"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// copies are what a communicator has of the device: calls that wait for it, and copies of own parts in a stream of the
// communicator's. Nothing is before these that they would wait for, and when one is over is known also when its call has failed.
type copies struct {
	b     *base
	queue *streamqueue.Queue

	mu     sync.Mutex // of what follows; held until the stream is not used any more: Close frees it
	stream uintptr    // 0 before the first
	none   bool       // there are no more of them
}

// deviceCopy is what a call with tensors on the device has to do there.
type deviceCopy struct {
	is     bool          // the tensors are there
	copied backend.Event // of the copy of own into out; nil when there is nothing to wait for
	err    error         // of that copy
}

// startBehind makes one call, which begins when the work that is in the stream now is done.
func (c *Comm) startBehind(p *plan, on []af.Stream) (Op, error) {
	stream := uintptr(af.DefaultStream)
	if len(on) > 0 {
		stream = uintptr(on[0])
	}
	if len(on) > 1 {
		return Op{}, c.b.check(p.call, fmt.Errorf("%w: %d streams, want one", van.ErrInvalid, len(on)))
	}
	ready, err := c.flight.copies.queue.Mark(stream)
	var o *op
	if err = c.b.check(p.call, err); err == nil {
		c.pair.Lock()
		o, err = c.flight.reserve(p)
		c.pair.Unlock()
	}
	if err != nil {
		c.flight.copies.queue.Unmark(ready)
		return Op{}, err
	}
	h := Op{o, o.gen}
	if ready == nil {
		o.launch()
		return h, nil
	}
	o.retain()
	c.b.mu.Lock()
	o.refs++
	c.b.mu.Unlock()
	if !c.flight.copies.queue.Add(o, ready) {
		o.SendNow(van.ErrClosed)
	}
	return h, nil
}

// launch begins the call and, while the others are asked, has the device copy this rank's own part.
func (o *op) launch() {
	o.b.mu.Lock()
	ended := o.ended
	if !ended {
		o.busy++ // Wait does not return before the copy is known
	}
	o.b.mu.Unlock()
	if ended {
		return
	}
	o.begin()
	if o.result.toCopy() {
		var err error
		if o.device.copied, err = o.l.copies.begin(o.result); err != nil {
			o.device.err = &van.Error{Op: kinds[o.call.kind], Node: o.b.node.Name(), Detail: o.String() + ": copy of this rank's own part", Err: err}
			o.b.fail(o.device.err)
		}
	}
	o.rest()
}

// begin begins a copy. It returns an event of its end, or nil when there is nothing to wait for.
func (l *copies) begin(r result) (backend.Event, error) {
	b := l.b.node.Backend()
	a, ok := b.(backend.AsyncCopier)
	if !ok {
		return nil, b.Copy(r.out, r.own) // which waits
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.none {
		return nil, van.ErrClosed
	}
	var err error
	if l.stream == 0 {
		if l.stream, err = a.NewStream(); err != nil {
			return nil, err
		}
	}
	if err = a.CopyAsync(r.out, r.own, l.stream); err != nil {
		return nil, err
	}
	end, err := l.queue.Mark(l.stream)
	if err != nil {
		return nil, b.Copy(r.out, r.own)
	}
	return end, nil
}

// close ends what the communicator has of the device. What is in its stream still runs.
func (l *copies) close() {
	l.queue.Close()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.none = true
	if l.stream != 0 {
		_ = l.b.node.Backend().(backend.AsyncCopier).FreeStream(l.stream) // of a device that has failed, perhaps
		l.stream = 0
	}
}

// copyLimit is how long a copy within the device may take.
const copyLimit = 10 * time.Second

// endCopy waits until the device has copied this rank's own part, also when the call has failed with err: the
// memory is the caller's when Wait returns.
func (o *op) endCopy(err error) error {
	err = cmp.Or(o.device.err, err)
	if o.device.copied == nil {
		return err
	}
	if done, failed := o.device.copied.Query(); done && failed == nil {
		return err
	}
	ctx, cancel := context.WithTimeoutCause(context.Background(), copyLimit, van.ErrTimeout)
	defer cancel()
	begun := clock.Now()
	if failed := o.device.copied.Sync(ctx); failed != nil {
		late := &van.Error{Op: kinds[o.call.kind], Node: o.b.node.Name(), Detail: o.String() + ": copy of this rank's own part, which may still be written",
			Elapsed: time.Duration(clock.Now() - begun), Limit: copyLimit, Err: van.TimedOut(failed)}
		o.b.fail(late)
		err = errors.Join(err, late)
	}
	return err
}

// Dead implements streamqueue.Entry.
func (o *op) Dead() bool {
	o.b.mu.Lock()
	defer o.b.mu.Unlock()
	return o.ended
}

// SendNow implements streamqueue.Entry: it begins the call.
func (o *op) SendNow(err error) {
	switch {
	case err == nil:
		o.launch()
	case !o.Dead(): // which would be why
		err = &van.Error{Op: kinds[o.call.kind], Node: o.b.node.Name(), Detail: o.String(), Err: err}
		o.b.fail(err)
		o.end(err)
	}
	release(o.wants.into)
	o.release()
	o.l.unref(o)
}
