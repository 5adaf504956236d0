package collective

// One call in flight, from its creation to its end.

import (
	"cmp"
	"context"
	"encoding/binary"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/internal/datamsg"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// op is a call in flight. Ops are reused.
type op struct {
	cluster.Request
	b     *base
	l     *callWindow
	call  call
	epoch uint64
	seq   uint32
	start uint64
	left  atomic.Int32 // the call ends at 0: 1 until begin has ended, 1 until the request has ended, and 1 for each part that another rank has not received

	receives  receivePlan
	sends     sendPlan
	result    result
	reduction reduction
	device    deviceCopy
	waiter    waiter

	// Guarded by base.mu.
	pull  cluster.Call
	gen   uint32 // distinguishes uses of the op
	refs  int    // held by the caller until Wait, the request until Recycle, parts being sent, and running functions
	begun bool   // other ranks may have their parts
	ended bool
	busy  int // number of functions (begin, reduce) that use the memory
	err   error
}

// waiter is the state of the goroutine that waits for a call.
type waiter struct {
	done   chan struct{}      // one token when the call has ended
	isDone func() bool        // reports whether the token or work is there
	work   atomic.Pointer[op] // the op that a polling waiter is to reduce: this op, or the call before it
	timer  *time.Timer        // nil until needed

	// Guarded by base.mu.
	told  bool          // done has its token
	ended chan struct{} // closed with told; nil unless Op.Done was called
	waits bool
	polls bool // the waiter polls for work
}

// Sent implements van.Completion: the other rank has received its part.
func (t *sendPart) Sent() {
	o := t.o
	o.b.mu.Lock()
	t.state = over
	o.l.sendDone()
	o.b.mu.Unlock()
	o.settle()
	o.l.unref(o)
}

// take returns an op for use. base.mu is held.
func (l *callWindow) take(k call) *op {
	var o *op
	if n := len(l.free); n > 0 {
		o, l.free = l.free[n-1], l.free[:n-1]
	} else {
		n := len(l.b.ids)
		o = &op{b: l.b, l: l, sends: sendPlan{make([]backend.Mem, n), make([]sendPart, n)}}
		w := &o.waiter
		w.done, w.isDone = make(chan struct{}, 1), func() bool {
			o.device.between()
			return len(w.done) > 0 || w.work.Load() != nil
		}
		o.reduction.run = o.reduce
		l.made(o)
		for r := range o.sends.to {
			o.sends.to[r].o = o
		}
	}
	select {
	case <-o.waiter.done:
	default:
	}
	o.call, o.gen, o.refs, o.busy, o.begun, o.ended, o.err, o.pull = k, o.gen+1, 1, 0, false, false, nil, cluster.Call{}
	o.waiter.told, o.waiter.waits, o.reduction.ran, o.reduction.next = false, false, false, nil
	w := &o.receives
	w.from, w.into, w.came = w.from[:0], w.into[:0], w.came[:0]
	for r := range o.sends.to {
		o.sends.to[r].state = notWanted
	}
	return o
}

// reserve assigns a number to a call. The caller begins the call, see begin.
func (l *callWindow) reserve(p *plan) (*op, error) {
	b := l.b
	b.mu.Lock()
	defer b.mu.Unlock()
	name := kinds[p.call.kind]
	if err := cmp.Or(b.err, b.left); err != nil {
		return nil, b.failed(name, err)
	}
	if l.window[l.next%maxInFlight] != nil {
		return nil, l.full(name)
	}
	o := l.take(p.call)
	o.start = clock.Now()
	w, parts := &o.receives, int32(0)
	if o.device.is = p.device; p.device {
		o.result = p.result
		o.result.retain() // until endUse
	}
	ask := p.ask
	if p.fold != nil {
		n := p.result.out.Len() * len(b.ids)
		o.result, o.reduction.by, o.reduction.scratch = p.result, p.fold, l.scratch.take(n)
		ask = share{mem: backend.Slice(o.reduction.scratch).Sub(0, n), by: p.call.dtype.Size(), of: everybody}
	}
	for r, id := range b.ids {
		if r == b.self {
			continue
		}
		if into, wanted := ask.part(r, len(b.ids)); wanted {
			w.from, w.into, w.came = append(w.from, id), append(w.into, into), append(w.came, false)
		}
		if part, wanted := p.give.part(r, len(b.ids)); wanted {
			o.sends.parts[r], o.sends.to[r].state = part, awaited
			parts++
		}
	}
	o.left.Store(2 + parts)
	o.device.unserved.Store(parts)
	o.epoch, o.seq = b.epoch, l.next
	l.next++
	l.window[o.seq%maxInFlight] = o
	return o, nil
}

// begin sends the requests, and answers the queued requests of other ranks for this call.
func (o *op) begin() {
	b := o.b
	b.mu.Lock()
	if o.ended {
		b.mu.Unlock()
		return
	}
	o.busy++
	o.refs += 2 // one for the request, one for this function
	b.mu.Unlock()
	defer o.l.unref(o)
	defer o.rest()
	defer o.settle()
	o.retain()
	name := kinds[o.call.kind]
	if err := b.customer.Open(&o.Request, name, o, 1, o.receives.from); err != nil {
		o.Finished(err)
		o.Recycle()
		return
	}
	b.mu.Lock()
	o.pull = o.Request.Call(-1)
	b.mu.Unlock()
	if o.Begin() {
		err := o.receives.send(b, o.call, o.epoch, o.seq, o.First())
		o.End()
		if err != nil {
			b.customer.Abort(&o.Request, &van.Error{Op: name, Node: b.node.Name(), Detail: o.String(), Err: err})
		}
	}
	b.mu.Lock()
	err := b.err // of a failure before the request was open
	if o.ended {
		err = o.err
	}
	o.begun = true // later requests are not queued
	b.mu.Unlock()
	if err != nil {
		b.customer.Abort(&o.Request, err)
	}
	for r := range b.ids {
		b.mu.Lock()
		kept := &o.l.asked[r][o.seq%maxInFlight]
		a := *kept
		found := a.kept && a.seq == o.seq && a.epoch == o.epoch
		if found {
			kept.kept = false
		}
		b.mu.Unlock()
		if found {
			o.serve(&a)
		}
	}
}

// rest records that begin or reduce no longer uses the memory.
func (o *op) rest() {
	o.b.mu.Lock()
	defer o.b.mu.Unlock()
	o.busy--
	o.deliver()
}

// deliver lets Wait return when the call has ended and its memory is unused. base.mu is held.
func (o *op) deliver() {
	if o.ended && o.busy == 0 && !o.waiter.told {
		o.waiter.told = true
		if o.waiter.ended != nil {
			close(o.waiter.ended)
			o.waiter.ended = nil
		}
		o.waiter.done <- struct{}{}
	}
}

// retain keeps the memory until release.
func (o *op) retain() {
	retain(o.receives.into)
	retain(o.sends.parts)
	o.result.retain()
}

// release releases the memory that other ranks, the reduction or the device use.
func (o *op) release() {
	release(o.sends.parts)
	o.result.release()
}

// receiveAsk answers a request for a part, or queues it until this rank makes the call.
func (l *callWindow) receiveAsk(q *request, msg *van.Message) error {
	b := l.b
	want, epoch, err := parseAsk(msg.Body, len(b.ids))
	if err != nil {
		return err
	}
	seq, rank := parseKey(msg.Key)
	switch {
	case rank != q.rank:
		return &van.FieldError{Field: "key", Value: rank, Want: fmt.Sprintf("the sender's rank, %d", q.rank)}
	case msg.ValLen < 0:
		return &van.FieldError{Field: "val_len", Value: msg.ValLen, Want: "0 or more"}
	}
	a := ask{request: *q, epoch: epoch, seq: seq, call: want, bytes: int(msg.ValLen)}
	b.mu.Lock()
	switch {
	case b.closed:
		err = van.ErrClosed
	case epoch > b.epoch && b.joining: // this rank has not finished the round
		return l.keep(&a)
	case b.err != nil:
		err = b.err
	case epoch != b.epoch:
		err = errRebuild
	case int32(seq-l.next) >= 0 && b.left == nil:
		return l.keep(&a)
	case int32(seq-l.next) >= 0: // a rank has closed the communicator, so this rank makes no more calls
		err = b.left
	}
	var o *op
	if err == nil {
		o = l.window[seq%maxInFlight]
		last := &l.asked[rank][seq%maxInFlight]
		again := last.epoch == epoch && last.seq == seq
		switch {
		case o == nil || o.seq != seq:
			b.mu.Unlock()
			if again {
				return fmt.Errorf("%w: second request for call %d", van.ErrMalformed, seq)
			}
			// The call has ended here, so every rank with a part in it has received its part.
			l.mismatch(q, want.kind, fmt.Errorf("%w: call %d: %s there, a different call here, which has ended", ErrMismatch, seq, want))
			return nil
		case !o.begun:
			return l.keep(&a)
		case !last.kept:
			last.epoch, last.seq = epoch, seq
		}
		o.refs++ // until it is answered
	}
	b.mu.Unlock()
	if err != nil {
		b.refuse(q, err)
		return nil
	}
	o.serve(&a)
	l.unref(o)
	return nil
}

// serve answers a request for a part of o. The caller has a reference.
func (o *op) serve(a *ask) {
	b, t := o.b, &o.sends.to[a.rank]
	b.mu.Lock()
	wanted := t.state != notWanted
	b.mu.Unlock()
	if err := o.fits(a, wanted); err != nil {
		o.l.mismatch(&a.request, o.call.kind, err)
		return
	}
	b.mu.Lock()
	if t.state != awaited || o.ended || b.err != nil {
		err := cmp.Or(o.err, b.err)
		b.mu.Unlock()
		if err != nil {
			b.refuse(&a.request, err)
		}
		return
	}
	t.state = sent
	o.l.sending++
	o.refs++
	b.mu.Unlock()
	m := &t.msg
	a.reply.Fill(m)
	binary.LittleEndian.PutUint64(t.key[:], a.reply.Key)
	datamsg.SetData(m, backend.Bytes(t.key[:]), o.sends.parts[a.rank], backend.Mem{}, van.TypeOther)
	m.Done = t
	err := b.node.Send(m)
	if o.device.is {
		o.device.lastServed.Store(clock.Now())
		o.device.unserved.Add(-1)
	}
	if err != nil {
		// Fail first: once this part is released, the call may end without an error.
		b.fail(&van.Error{Op: kinds[o.call.kind], Node: b.node.Name(), Peer: b.name(a.rank), Detail: o.String(), Err: err})
		b.refuse(&a.request, err)
		t.Sent()
	}
}

// fits returns an error if request a does not match o; wanted reports whether its sender gets a part of o.
func (o *op) fits(a *ask, wanted bool) error {
	call := o.call
	if call.kind == allToAll && a.bytes == 0 {
		call.dtype = a.call.dtype // a rank without any bytes does not know the type
	}
	switch {
	case a.call != call:
		return fmt.Errorf("%w: call %d: %s there, %s here", ErrMismatch, a.seq, a.call, o.call)
	case !wanted:
		return fmt.Errorf("%w: call %d, %s: the rank requests a part, but this call has none for it", ErrMismatch, a.seq, o.call)
	case a.bytes != o.sends.parts[a.rank].Len():
		return fmt.Errorf("%w: call %d, %s: %d bytes are expected there, %d sent here", ErrMismatch, a.seq, o.call, a.bytes, o.sends.parts[a.rank].Len())
	}
	return nil
}

// Answer implements cluster.Sink: a part has arrived.
func (o *op) Answer(_, from int, msg *van.Message) error {
	if msg.Frames == 0 && len(msg.Body) > 0 {
		v, err := verbOf(msg.Body)
		if err == nil && v != verbRefused {
			err = &van.FieldError{Field: "body verb", Value: v, Want: "a refusal"}
		}
		if err != nil {
			return err
		}
		return refusal(msg.Body)
	}
	return o.receives.take(o.b, from, msg)
}

// needs reports whether the call cannot end without the rank. base.mu is held.
func (o *op) needs(rank int) bool {
	i, asked := slices.BinarySearch(o.receives.from, o.b.ids[rank])
	return asked && !o.receives.came[i] || o.sends.to[rank].state == awaited
}

// String names the call, for errors.
func (o *op) String() string { return fmt.Sprintf("communicator %d, call %d", o.b.id, o.seq) }

// named converts the error of the call's request to an error of the call: callers do not know the handler of the
// request, and a rank has a number of its own in each communicator.
func (o *op) named(err error) error {
	e, is := err.(*van.Error)
	if !is || e.PeerID == 0 {
		return err
	}
	as := *e
	as.Detail = o.String()
	as.Peer = fmt.Sprintf("rank %d (%s)", slices.Index(o.b.ids, e.PeerID), e.Peer)
	return &as
}

// Finished implements cluster.Sink: all parts have arrived, or the request has failed.
func (o *op) Finished(err error) {
	if err != nil {
		err = o.named(err)
		if r := o.b.revoker; r != nil {
			for _, m := range o.receives.into {
				r.Invalidate(m) // a late part must not be written there
			}
		}
		o.b.fail(err) // before end: a rank that asks for a call that ended without error would be refused with a mismatch
		o.end(err)
	}
	release(o.receives.into)
	o.settle()
}

// Recycle implements cluster.Sink.
func (o *op) Recycle() { o.l.unref(o) }

// settle records that one of the events that o waits for has happened. After the last one it starts the reduction, or
// ends the call.
func (o *op) settle() {
	if o.left.Add(-1) > 0 {
		return
	}
	f := &o.reduction
	o.b.mu.Lock()
	run := f.by != nil && !o.ended
	handed := false
	if run {
		f.ran = true
		o.busy++
		o.refs++
		waited := o
		if f.next != nil {
			waited = f.next
			f.next.busy++ // the reduction writes memory of both
		}
		if handed = waited.waiter.polls; handed {
			waited.waiter.work.Store(o)
		}
	}
	o.b.mu.Unlock()
	if !run {
		o.release()
		o.end(nil)
		return
	}
	if !handed {
		go f.run() // the caller may be a goroutine that must not wait or send
	}
}

// reduce computes the result of the parts that have arrived, ends the call, and begins the next one.
func (o *op) reduce() {
	o.reduction.make(&o.result, o.b.self, len(o.b.ids))
	next := o.reduction.next
	if next == nil {
		o.release()
	}
	o.end(nil)
	o.rest()
	if next != nil {
		next.begin() // retains the memory before it is released below
		next.rest()
		o.release()
		o.dropNext(next)
	}
	o.l.unref(o)
}

// dropNext ends the use of o, whose result is awaited only through the call after it, next.
func (o *op) dropNext(next *op) {
	o.l.unref(next)
	o.endUse()
}

// end ends the call, once.
func (o *op) end(err error) {
	b, l := o.b, o.l
	b.mu.Lock()
	if o.ended {
		b.mu.Unlock()
		return
	}
	o.ended, o.err = true, err
	if l.window[o.seq%maxInFlight] == o {
		l.window[o.seq%maxInFlight] = nil
	}
	untaken := 0
	for r := range o.sends.to {
		if t := &o.sends.to[r]; t.state == awaited {
			t.state = over
			untaken++
		}
	}
	o.refs++
	begun, next := o.begun, o.reduction.next
	drop := next != nil && !o.reduction.ran
	o.deliver()
	b.mu.Unlock()
	if err != nil && begun {
		b.customer.Abort(&o.Request, err)
	}
	if err != nil && o.device.is {
		l.copies.queue.Cancel(o)
	}
	for range untaken {
		o.settle()
	}
	if drop {
		go func() { // the caller may be finishing the request
			<-o.waiter.done // begin, if it runs, has recorded the request
			o.dropNext(next)
			l.unref(o)
		}()
		return
	}
	l.unref(o)
}

// endUse ends the caller's use of o. The call has ended.
func (o *op) endUse() {
	o.b.mu.Lock()
	pull := o.pull
	o.b.mu.Unlock()
	_ = pull.Wait(context.Background()) // returns at once: its result is that of o
	if o.device.is {
		o.l.copies.queue.ReturnEvent(o.device.copied)
		o.device.copied, o.device.err = nil, nil
		o.device.due.Store(false)
		o.result.release()
	}
	o.l.unref(o)
}
