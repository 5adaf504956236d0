package collective

// Calls with device tensors. They begin when earlier work of the stream has written the tensors, or no longer uses
// them.

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

// copies holds a communicator's device state: the calls that wait for the device, and a stream of the communicator
// for copies of own parts. The stream contains nothing else, so these copies never wait for other work, and their end
// is known even if the call has failed.
type copies struct {
	b     *base
	queue *streamqueue.Queue

	mu     sync.Mutex // guards the fields below; held until the stream is no longer used, since Close frees it
	stream uintptr    // 0 before the first copy
	none   bool       // closed: no more copies
}

// deviceCopy is the device state of a call with device tensors.
type deviceCopy struct {
	o      *op
	is     bool          // the call has device tensors
	due    atomic.Bool   // the waiter is to start the copy of own into out
	copied backend.Event // event of that copy; nil if no wait is needed
	err    error         // error of that copy

	step     int         // the step of poll
	until    uint64      // end of the poll
	pollFunc func() bool // d.poll
	between  func()      // d.copyInTime, called by waiters

	unserved   atomic.Int32  // other ranks that have not received their parts
	lastServed atomic.Uint64 // time of the last part sent, or of the call's begin
}

// Queueing a copy takes the driver a few microseconds, during which the other ranks wait for this one. Copies of this
// rank's own part are therefore queued late: after all other ranks have been served, plus lateAfter, by the goroutine
// that waits for the call, if it polls. Parts larger than lateCopy are copied at once, since the copy itself takes
// longer than the delay saves.
const (
	lateCopy  = 4 << 20
	lateAfter = 3 * time.Microsecond
)

// equip prepares o for calls with device tensors.
func equip(o *op) {
	d := &o.device
	d.o, d.pollFunc, d.between = o, d.poll, d.copyInTime
}

// served reports whether lateAfter has passed since the other ranks were given their parts.
func (d *deviceCopy) served() bool {
	return d.unserved.Load() == 0 && clock.Since(d.lastServed.Load()) > lateAfter
}

// startBehind makes one call, which begins when the work that the stream contains now is done.
func (c *Comm) startBehind(p *plan, on []af.StreamOption) (Op, error) {
	stream := uintptr(af.DefaultStream)
	for i, opt := range on {
		s, is := opt.(af.Stream)
		if !is {
			return Op{}, c.b.check(p.call, fmt.Errorf("%w: option %d is nil", van.ErrInvalid, i))
		}
		stream = uintptr(s)
	}
	ready, err := c.calls.copies.queue.RecordEvent(stream)
	var o *op
	if err = c.b.check(p.call, err); err == nil {
		c.pair.Lock()
		o, err = c.calls.reserve(p)
		c.pair.Unlock()
	}
	if err != nil {
		c.calls.copies.queue.ReturnEvent(ready)
		return Op{}, c.b.failIfLeft(err)
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
	if !c.calls.copies.queue.Add(o, ready) {
		o.SendNow(van.ErrClosed)
	}
	return h, nil
}

// launch begins the call. It has the device copy this rank's own part while the requests to other ranks are under
// way. If poll is true, the caller may poll for requests of other ranks, as a wait does; see Options.Look.
func (o *op) launch(poll bool) {
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
	poll = poll && o.b.polls && o.b.early
	if o.device.step = pollFirst; poll {
		o.b.node.Poll(o.device.pollFunc)
	}
	if o.device.step < pollBegun { // another goroutine receives, so this one may not poll
		o.device.begin(poll)
	}
	o.rest()
}

// begin begins the call, and starts the copy of this rank's own part unless later is true and the part is small.
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

// Steps of poll.
const (
	pollFirst = iota // nothing was received yet
	pollBegin
	pollBegun
)

// maxPoll is how long a call polls for requests of other ranks.
const maxPoll = 10 * time.Microsecond

// poll is the poll function of launch, called while the caller receives in place of the transport. The first call
// returns, so that the transport need not wake another goroutine for messages; the second one begins the call. The
// poll ends when the other ranks have been given their parts and the copies of their parts have had time to start, or
// after maxPoll.
func (d *deviceCopy) poll() bool {
	switch d.step {
	case pollFirst:
		d.step = pollBegin
		return false
	case pollBegin:
		d.step = pollBegun
		d.begin(true)
		d.until = clock.Now() + uint64(maxPoll)
		return false
	}
	if d.served() {
		d.copyIfDue()
		return true
	}
	return d.o.Canceled() || clock.Now() > d.until
}

// copyOwn starts the copy of this rank's own part.
func (d *deviceCopy) copyOwn() {
	o := d.o
	var err error
	if d.copied, err = o.l.copies.begin(o.result); errors.Is(err, van.ErrClosed) && d.endedWell() {
		err = o.b.node.Backend().Copy(o.result.out, o.result.own) // the rest of the call completed before the communicator was closed
	}
	if err != nil {
		d.err = &van.Error{Op: kinds[o.call.kind], Node: o.b.node.Name(), Detail: o.String() + ": copy of this rank's own part", Err: err}
		o.b.fail(d.err)
	}
}

// endedWell reports whether the call has ended without an error.
func (d *deviceCopy) endedWell() bool {
	d.o.b.mu.Lock()
	defer d.o.b.mu.Unlock()
	return d.o.ended && d.o.err == nil
}

// copyInTime starts the copy if it is due and the other ranks are served.
func (d *deviceCopy) copyInTime() {
	if d.due.Load() && d.served() {
		d.copyIfDue()
	}
}

// copyIfDue starts the copy if it is due.
func (d *deviceCopy) copyIfDue() {
	if d.due.Load() && d.due.Swap(false) {
		d.copyOwn()
	}
}

// begin starts a copy. It returns the event of its end, or nil if the copy is complete.
func (l *copies) begin(r result) (backend.Event, error) {
	b := l.b.node.Backend()
	a, ok := b.(backend.AsyncCopier)
	if !ok {
		return nil, b.Copy(r.out, r.own) // which waits until the copy is complete
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

// settle waits, for copyLimit at most, until the stream is idle: a copy that has failed may be queued nevertheless,
// and its memory is the caller's soon. A device that reports an error is idle. mu is held.
func (l *copies) settle() error {
	i, is := l.b.node.Backend().(backend.StreamIdler)
	begun := clock.Now()
	for ; is && clock.Since(begun) < copyLimit; clock.Sleep(100 * time.Microsecond) {
		if idle, err := i.Idle(l.stream); idle || err != nil {
			return nil
		}
	}
	return fmt.Errorf("%w: the copy may still be under way after %s", van.ErrTimeout, clock.Since(begun))
}

// close ends the use of the device. Work in its stream continues.
func (l *copies) close() {
	l.queue.Close()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.none = true
	if l.stream != 0 {
		_ = l.b.node.Backend().(backend.AsyncCopier).FreeStream(l.stream) // an error is possible if the device has failed
		l.stream = 0
	}
}

// copyLimit is how long a copy within the device may take.
const copyLimit = 10 * time.Second

// endCopy waits until the device has copied this rank's own part, also if the call has failed with err: the caller
// owns the memory when Wait returns.
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
			Elapsed: clock.Since(begun), Limit: copyLimit, Err: van.TimedOut(failed)}
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
	case !o.Canceled(): // a canceled call has its error already
		err = &van.Error{Op: kinds[o.call.kind], Node: o.b.node.Name(), Detail: o.String(), Err: err}
		o.b.fail(err)
		o.end(err)
	}
	release(o.receives.into)
	o.release()
	o.l.unref(o)
}
