package collective

// Calls with tensors on a device: they begin when its work has made the tensors, or does not use
// them any more.

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// startBehind makes one call, which begins when the work that is in the stream now is done.
func (c *Comm) startBehind(p *plan, on []af.Stream) (Op, error) {
	stream := uintptr(af.DefaultStream)
	if len(on) > 0 {
		stream = uintptr(on[0])
	}
	ready, err := c.queue.Mark(stream)
	if len(on) > 1 {
		err = fmt.Errorf("%w: %d streams, want one", van.ErrInvalid, len(on))
	}
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
	if o.out.Len() > 0 && o.out.Addr() != o.own.Addr() {
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
	if a, ok := b.(backend.AsyncCopier); ok {
		stream, err := c.copyStream(a)
		if err == nil {
			err = a.CopyAsync(o.out, o.own, stream)
		}
		if err != nil {
			return err
		}
		if o.copied, err = c.queue.Mark(stream); err == nil {
			return nil
		}
	}
	return b.Copy(o.out, o.own) // which waits
}

// copyStream is the stream for such copies, which the first one makes.
func (c *Comm) copyStream(a backend.AsyncCopier) (uintptr, error) {
	c.copiesMu.Lock()
	defer c.copiesMu.Unlock()
	var err error
	if c.copies == 0 {
		c.copies, err = a.NewStream()
	}
	return c.copies, err
}

// endDevice ends what the communicator has of the device. What is in its stream still runs.
func (c *Comm) endDevice() {
	c.queue.Close()
	c.copiesMu.Lock()
	defer c.copiesMu.Unlock()
	if c.copies != 0 {
		_ = c.node.Backend().(backend.AsyncCopier).FreeStream(c.copies) // of a device that has failed, perhaps
		c.copies = 0
	}
}

// copyLimit is how long the copy of a rank's own part may take, which is the length of a copy.
const copyLimit = 10 * time.Second

// endCopy waits until the device has copied this rank's own part, also when the call has failed with err: what
// is written then is no longer the caller's.
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
	if failed := o.copied.Sync(ctx); failed != nil && err == nil {
		err = &van.Error{Op: kinds[o.call.kind], Node: o.c.node.Name(), Detail: "copy of this rank's own part", Err: timeout(failed)}
		o.c.fail(err)
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
