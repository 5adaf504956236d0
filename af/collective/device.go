package collective

// Calls with tensors on a device: they begin when its work has made the tensors, or does not use
// them any more.

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// startBehind makes one call, which begins when the work that is in the stream now is done.
func (c *Comm) startBehind(p *plan, on []af.Stream) (Op, error) {
	stream := uintptr(af.DefaultStream)
	if len(on) > 0 {
		stream = uintptr(on[0])
	}
	if len(on) > 1 {
		return Op{}, c.check(p.call, fmt.Errorf("%w: %d streams, want one", van.ErrInvalid, len(on)))
	}
	ready, err := c.queue.Mark(stream)
	var o *op
	if err = c.check(p.call, err); err == nil {
		c.pair.Lock()
		o, err = c.reserve(p)
		c.pair.Unlock()
	}
	if err != nil {
		c.queue.Unmark(ready)
		return Op{}, err
	}
	h := Op{o, o.gen}
	if ready == nil {
		o.launch()
		return h, nil
	}
	o.retain()
	c.mu.Lock()
	o.refs++
	c.mu.Unlock()
	if !c.queue.Add(o, ready) {
		o.SendNow(van.ErrClosed)
	}
	return h, nil
}

// launch begins the call and, while the others are asked, has the device copy this rank's own part.
func (o *op) launch() {
	c := o.c
	c.mu.Lock()
	ended := o.ended
	if !ended {
		o.busy++ // Wait does not return before the copy is known
	}
	c.mu.Unlock()
	if ended {
		return
	}
	c.begin(o)
	if toCopy(o.out, o.own) {
		if err := o.copyOwn(); err != nil {
			o.copyErr = &van.Error{Op: kinds[o.call.kind], Node: c.node.Name(), Detail: "copy of this rank's own part", Err: err}
			c.fail(o.copyErr)
		}
	}
	o.rest()
}

// copyOwn begins the copy, in a stream of the communicator's: nothing is before it that it would wait for, and
// when it is over is known also when the call has failed.
func (o *op) copyOwn() error {
	c := o.c
	b := c.node.Backend()
	a, ok := b.(backend.AsyncCopier)
	if !ok {
		return b.Copy(o.out, o.own) // which waits
	}
	c.copiesMu.Lock() // until the stream is not used any more: Close frees it
	defer c.copiesMu.Unlock()
	if c.noCopies {
		return van.ErrClosed
	}
	var err error
	if c.copies == 0 {
		if c.copies, err = a.NewStream(); err != nil {
			return err
		}
	}
	if err = a.CopyAsync(o.out, o.own, c.copies); err != nil {
		return err
	}
	if o.copied, err = c.queue.Mark(c.copies); err != nil {
		return b.Copy(o.out, o.own)
	}
	return nil
}

// endDevice ends what the communicator has of the device. What is in its stream still runs.
func (c *Comm) endDevice() {
	c.queue.Close()
	c.copiesMu.Lock()
	defer c.copiesMu.Unlock()
	c.noCopies = true
	if c.copies != 0 {
		_ = c.node.Backend().(backend.AsyncCopier).FreeStream(c.copies) // of a device that has failed, perhaps
		c.copies = 0
	}
}

// copyLimit is how long a copy within the device may take.
const copyLimit = 10 * time.Second

// endCopy waits until the device has copied this rank's own part, also when the call has failed with err: the
// memory is the caller's when Wait returns.
func (o *op) endCopy(err error) error {
	err = cmp.Or(o.copyErr, err)
	if o.copied == nil {
		return err
	}
	if done, failed := o.copied.Query(); done && failed == nil {
		return err
	}
	ctx, cancel := context.WithTimeoutCause(context.Background(), copyLimit, van.ErrTimeout)
	defer cancel()
	begun := clock.Now()
	if failed := o.copied.Sync(ctx); failed != nil {
		late := &van.Error{Op: kinds[o.call.kind], Node: o.c.node.Name(), Detail: "copy of this rank's own part, which may still be written",
			Elapsed: time.Duration(clock.Now() - begun), Limit: copyLimit, Err: timeout(failed)}
		o.c.fail(late)
		err = errors.Join(err, late)
	}
	return err
}

// Dead implements streamqueue.Entry.
func (o *op) Dead() bool {
	o.c.mu.Lock()
	defer o.c.mu.Unlock()
	return o.ended
}

// SendNow implements streamqueue.Entry: it begins the call.
func (o *op) SendNow(err error) {
	c := o.c
	switch {
	case err == nil:
		o.launch()
	case !o.Dead(): // which would be why
		err = &van.Error{Op: kinds[o.call.kind], Node: c.node.Name(), Err: err}
		c.fail(err)
		o.end(err)
	}
	for i := range o.into {
		o.into[i].Release()
	}
	o.release()
	c.unref(o)
}
