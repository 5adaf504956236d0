package collective

// Calls with tensors on a device: they begin when its work has made the tensors, or does not use
// them any more.

import (
	"context"

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
		c.begin(o)
	} else {
		o.retain()
		c.mu.Lock()
		o.refs++
		c.mu.Unlock()
		if !c.queue.Add(o, ready) {
			o.SendNow(van.ErrClosed)
		}
	}
	if p.copies() { // while the others are asked
		if o.copied, err = c.copyBehind(p, stream); err != nil {
			err = &van.Error{Op: kinds[o.call.kind], Node: c.node.Name(), Detail: "copy of this rank's own part", Err: err}
			c.fail(err)
		}
	}
	return h, nil
}

// copyBehind copies this rank's own part, behind the work in the stream, and returns the event of that,
// or nil when it is done.
func (c *Comm) copyBehind(p *plan, stream uintptr) (backend.Event, error) {
	b := c.node.Backend()
	a, ok := b.(backend.AsyncCopier)
	if !ok || stream == uintptr(af.Complete) {
		return nil, b.Copy(p.out, p.own)
	}
	if err := a.CopyAsync(p.out, p.own, stream); err != nil {
		return nil, err
	}
	return c.queue.Mark(stream)
}

// endCopy waits until the device has copied this rank's own part, unless the call has failed.
func (o *op) endCopy(ctx context.Context) error {
	if o.copied == nil || o.err != nil {
		return o.err
	}
	err := o.copied.Sync(ctx)
	if err != nil {
		err = &van.Error{Op: kinds[o.call.kind], Node: o.c.node.Name(), Detail: "copy of this rank's own part", Err: timeout(err)}
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
		c.begin(o)
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
