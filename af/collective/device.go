package collective

// Calls with tensors on a device: they begin when its work has made the tensors, or does not use
// them any more.

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
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
	o      *op
	is     bool          // the tensors are there
	due    atomic.Bool   // who waits is to begin the copy of own into out
	copied backend.Event // of that copy; nil when there is nothing to wait for
	err    error         // of that copy

	step    int         // of the look in launch
	until   uint64      // when that ends
	looks   func() bool // look
	between func()      // copyInTime, for who waits

	unserved   atomic.Int32  // other ranks that have not been given their parts
	lastServed atomic.Uint64 // when the last one was, or the call has begun
}

// The driver takes some microseconds to queue a copy. Others wait for this rank meanwhile, and so do copies of their parts, unless
// that is done when all have been given theirs, and their own parts have had the time to come: by who waits for
// the call, if anybody looks for messages while waiting. Larger copies take longer than that.
const (
	lateCopy  = 4 << 20
	lateAfter = 3 * time.Microsecond
)

// equip gives o what a call with tensors on the device needs.
func equip(o *op) {
	d := &o.device
	d.o, d.looks, d.between = o, d.look, d.copyInTime
}

// served tells whether the others have been given their parts, and this rank's own have had the time to come.
func (d *deviceCopy) served() bool {
	return d.unserved.Load() == 0 && clock.Now()-d.lastServed.Load() > uint64(lateAfter)
}

// startBehind makes one call, which begins when the work that is in the stream now is done.
func (c *Comm) startBehind(p *plan, on []af.StreamOption) (Op, error) {
	stream := uintptr(af.DefaultStream)
	for i, opt := range on {
		s, is := opt.(af.Stream)
		if !is {
			return Op{}, c.b.check(p.call, fmt.Errorf("%w: option %d is nil", van.ErrInvalid, i))
		}
		stream = uintptr(s)
	}
	ready, err := c.flight.copies.queue.RecordEvent(stream)
	var o *op
	if err = c.b.check(p.call, err); err == nil {
		c.pair.Lock()
		o, err = c.flight.reserve(p)
		c.pair.Unlock()
	}
	if err != nil {
		c.flight.copies.queue.ReturnEvent(ready)
		return Op{}, err
	}
	h := Op{o, o.gen}
	if ready == nil {
		o.launch(true)
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

// launch begins the call and, while the others are asked, has the device copy this rank's own part. The caller may look for what others
// ask, as a wait does, see Options.
func (o *op) launch(look bool) {
	o.b.mu.Lock()
	ended := o.ended
	if !ended {
		o.busy++ // Wait does not return before the copy is known
	}
	o.b.mu.Unlock()
	if ended {
		return
	}
	o.device.lastServed.Store(clock.Now())
	look = look && o.b.looks && o.b.early
	if o.device.step = lookFirst; look {
		o.b.node.Poll(o.device.looks)
	}
	if o.device.step < lookBegun { // nobody may look now
		o.device.begin(look)
	}
	o.rest()
}

// begin begins the call, and the copy of this rank's own part unless that is for later.
func (d *deviceCopy) begin(later bool) {
	o := d.o
	o.begin()
	switch {
	case !o.result.toCopy():
	case later && o.result.out.Len() <= lateCopy:
		d.due.Store(true)
	default:
		d.copyOwn()
	}
}

// The steps of look.
const (
	lookFirst = iota // nothing is received yet by who looks
	lookBegin
	lookBegun
)

// maxLook is how long a call looks for what others ask.
const maxLook = 10 * time.Microsecond

// look is a step of launch, which receives meanwhile in place of the transport: the call begins when nobody else need be woken any more for what
// comes. It ends when the others have been given their parts, and the copies of theirs have begun, or a little later.
func (d *deviceCopy) look() bool {
	switch d.step {
	case lookFirst:
		d.step = lookBegin
		return false
	case lookBegin:
		d.step = lookBegun
		d.begin(true)
		d.until = clock.Now() + uint64(maxLook)
		return false
	}
	if d.served() {
		d.copyIfDue()
		return true
	}
	return d.o.Canceled() || clock.Now() > d.until
}

// copyOwn begins the copy of this rank's own part.
func (d *deviceCopy) copyOwn() {
	o := d.o
	var err error
	if d.copied, err = o.l.copies.begin(o.result); errors.Is(err, van.ErrClosed) && d.endedWell() {
		err = o.b.node.Backend().Copy(o.result.out, o.result.own) // all else of the call was before the end of the communicator
	}
	if err != nil {
		d.err = &van.Error{Op: kinds[o.call.kind], Node: o.b.node.Name(), Detail: o.String() + ": copy of this rank's own part", Err: err}
		o.b.fail(d.err)
	}
}

// endedWell tells whether all others have theirs, and this rank has its own.
func (d *deviceCopy) endedWell() bool {
	d.o.b.mu.Lock()
	defer d.o.b.mu.Unlock()
	return d.o.ended && d.o.err == nil
}

// copyInTime begins that copy if the waiter is to, and it is time.
func (d *deviceCopy) copyInTime() {
	if d.due.Load() && d.served() {
		d.copyIfDue()
	}
}

// copyIfDue does that if the waiter is to, and has not.
func (d *deviceCopy) copyIfDue() {
	if d.due.Load() && d.due.Swap(false) {
		d.copyOwn()
	}
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
	end, err := l.queue.Event()
	if err != nil {
		return nil, err
	}
	if err = a.CopyRecord(r.out, r.own, l.stream, end); err != nil {
		return nil, errors.Join(err, l.settle(), end.Close())
	}
	return end, nil
}

// settle waits, for copyLimit at most, until nothing is under way in the stream: a copy that has failed may be queued all the same, and its memory is the
// caller's soon. Of a device that fails nothing is under way. mu is held.
func (l *copies) settle() error {
	i, is := l.b.node.Backend().(backend.StreamIdler)
	begun := clock.Now()
	for ; is && clock.Now()-begun < uint64(copyLimit); clock.Sleep(100 * time.Microsecond) {
		if idle, err := i.Idle(l.stream); idle || err != nil {
			return nil
		}
	}
	return fmt.Errorf("%w: the copy may still be under way after %s", van.ErrTimeout, time.Duration(clock.Now()-begun))
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
	if err == nil {
		o.device.copyIfDue()
	}
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

// Canceled implements streamqueue.Entry.
func (o *op) Canceled() bool {
	o.b.mu.Lock()
	defer o.b.mu.Unlock()
	return o.ended
}

// SendNow implements streamqueue.Entry: it begins the call.
func (o *op) SendNow(err error) {
	switch {
	case err == nil:
		o.launch(false)
	case !o.Canceled(): // which would be why
		err = &van.Error{Op: kinds[o.call.kind], Node: o.b.node.Name(), Detail: o.String(), Err: err}
		o.b.fail(err)
		o.end(err)
	}
	release(o.wants.into)
	o.release()
	o.l.unref(o)
}
