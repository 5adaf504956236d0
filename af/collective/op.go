package collective

// One call in flight, from its making to its end.

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

// op is a call in flight. It is used again.
type op struct {
	cluster.Request
	b     *base
	l     *flight
	call  call
	epoch uint64
	seq   uint32
	start uint64
	left  atomic.Int32 // 1 until the request has ended, and 1 for each part that is not taken

	wants   wants
	gives   gives
	result  result
	folding folding
	device  deviceCopy
	waiter  waiter

	// Guarded by base.mu.
	pull  cluster.Call
	gen   uint32 // tells uses of the op apart
	refs  int    // the caller until Wait, the request until Recycle, memory that is lent, and who uses it
	begun bool   // others may have their parts
	ended bool
	busy  int // begin and reduce use the memory
	err   error
}

// waiter is who waits for a call.
type waiter struct {
	done   chan struct{}      // one token when the call has ended
	isDone func() bool        // tells whether it is there, or there is work
	work   atomic.Pointer[op] // what the waiter is to reduce, since it polls: the op, or the call before it
	timer  *time.Timer        // nil until it was needed

	// Guarded by base.mu.
	told  bool          // done has its token
	ended chan struct{} // closed when told; nil unless Op.Done has asked for it
	waits bool
	polls bool // the waiter looks for work
}

// Sent implements van.Completion: the other rank has its part.
func (t *taking) Sent() {
	o := t.o
	o.b.mu.Lock()
	t.state = over
	o.l.takenBack()
	o.b.mu.Unlock()
	o.settle()
	o.l.unref(o)
}

// take returns an op for use. base.mu is held.
func (l *flight) take(k call) *op {
	var o *op
	if n := len(l.free); n > 0 {
		o, l.free = l.free[n-1], l.free[:n-1]
	} else {
		n := len(l.b.ids)
		o = &op{b: l.b, l: l, gives: gives{make([]backend.Mem, n), make([]taking, n)}}
		w := &o.waiter
		w.done, w.isDone = make(chan struct{}, 1), func() bool {
			o.device.between()
			return len(w.done) > 0 || w.work.Load() != nil
		}
		o.folding.run = o.reduce
		l.made(o)
		for r := range o.gives.takes {
			o.gives.takes[r].o, o.gives.takes[r].rank = o, r
		}
	}
	select {
	case <-o.waiter.done:
	default:
	}
	o.call, o.gen, o.refs, o.busy, o.begun, o.ended, o.err, o.pull = k, o.gen+1, 1, 0, false, false, nil, cluster.Call{}
	o.waiter.told, o.waiter.waits, o.folding.ran, o.folding.next = false, false, false, nil
	w := &o.wants
	w.from, w.into, w.came = w.from[:0], w.into[:0], w.came[:0]
	for r := range o.gives.takes {
		o.gives.takes[r].state = notWanted
	}
	return o
}

// reserve gives a call its number. The caller begins it, see begin.
func (l *flight) reserve(p *plan) (*op, error) {
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
	w, left := &o.wants, int32(1)
	if o.device.is = p.device; p.device {
		o.result = p.result
		o.result.retain() // until forget
	}
	ask := p.ask
	if p.fold != nil {
		n := p.result.out.Len() * len(b.ids)
		o.result, o.folding.by, o.folding.room = p.result, p.fold, l.rooms.take(n)
		ask = share{mem: backend.Slice(o.folding.room).Sub(0, n), by: p.call.dtype.Size(), of: everybody}
	}
	for r, id := range b.ids {
		if r == b.self {
			continue
		}
		if into, wanted := ask.part(r, len(b.ids)); wanted {
			w.from, w.into, w.came = append(w.from, id), append(w.into, into), append(w.came, false)
		}
		if part, wanted := p.give.part(r, len(b.ids)); wanted {
			o.gives.parts[r], o.gives.takes[r].state = part, awaited
			left++
		}
	}
	o.left.Store(left)
	o.device.unserved.Store(left - 1)
	o.epoch, o.seq = b.epoch, l.next
	l.next++
	l.window[o.seq%maxInFlight] = o
	return o, nil
}

// begin sends the requests and answers those that have come for it.
func (o *op) begin() {
	b := o.b
	b.mu.Lock()
	if o.ended {
		b.mu.Unlock()
		return
	}
	o.busy++
	o.refs += 2 // the request, and this function
	b.mu.Unlock()
	defer o.l.unref(o)
	defer o.rest()
	o.retain()
	name := kinds[o.call.kind]
	if err := b.customer.Open(&o.Request, name, o, 1, o.wants.from); err != nil {
		o.Finished(err)
		o.Recycle()
		return
	}
	b.mu.Lock()
	o.pull = o.Request.Call(-1)
	b.mu.Unlock()
	if o.Begin() {
		err := o.wants.send(b, o.call, o.epoch, o.seq, o.First())
		o.End()
		if err != nil {
			b.customer.Abort(&o.Request, &van.Error{Op: name, Node: b.node.Name(), Detail: o.String(), Err: err})
		}
	}
	b.mu.Lock()
	err := b.err // of a failure before the request was there
	if o.ended {
		err = o.err
	}
	o.begun = true // what is asked for from now on is not kept
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

// rest notes that begin or reduce does not use the memory any more.
func (o *op) rest() {
	o.b.mu.Lock()
	defer o.b.mu.Unlock()
	o.busy--
	o.deliver()
}

// deliver lets Wait return when the call has ended and its memory is not used. base.mu is held.
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
	retain(o.wants.into)
	retain(o.gives.parts)
	o.result.retain()
}

// release gives back what others take and reduce or the device uses.
func (o *op) release() {
	release(o.gives.parts)
	o.result.release()
}

// receiveAsk answers a request for a part, or keeps it until this rank makes the call.
func (l *flight) receiveAsk(q *request, msg *van.Message) error {
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
	case int32(seq-l.next) >= 0:
		return l.keep(&a)
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
				return fmt.Errorf("%w: asked twice for call %d", van.ErrMalformed, seq)
			}
			// It has ended, so all who have a part in it have taken theirs.
			l.mismatch(q, want.kind, fmt.Errorf("%w: call %d: %s there, here another one, which has ended", ErrMismatch, seq, want))
			return nil
		case !o.begun:
			return l.keep(&a)
		case !last.kept:
			last.epoch, last.seq = epoch, seq
		}
		o.refs++ // while it is answered
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
	b, t := o.b, &o.gives.takes[a.rank]
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
	datamsg.SetData(m, backend.Bytes(t.key[:]), o.gives.parts[a.rank], backend.Mem{}, van.TypeOther)
	m.Done = t
	err := b.node.Send(m)
	if o.device.is {
		o.device.lastServed.Store(clock.Now())
		o.device.unserved.Add(-1)
	}
	if err != nil {
		// First: with this part given back the call may have ended well.
		b.fail(&van.Error{Op: kinds[o.call.kind], Node: b.node.Name(), Peer: b.name(a.rank), Detail: o.String(), Err: err})
		t.Sent()
	}
}

// fits tells why a request is not for o, of which its sender may have a part if it is wanted.
func (o *op) fits(a *ask, wanted bool) error {
	call := o.call
	if call.kind == allToAll && a.bytes == 0 {
		call.dtype = a.call.dtype // a rank without any bytes knows of no type
	}
	switch {
	case a.call != call:
		return fmt.Errorf("%w: call %d: %s there, %s here", ErrMismatch, a.seq, a.call, o.call)
	case !wanted:
		return fmt.Errorf("%w: call %d, %s: it asks for a part that it does not get", ErrMismatch, a.seq, o.call)
	case a.bytes != o.gives.parts[a.rank].Len():
		return fmt.Errorf("%w: call %d, %s: %d bytes are wanted there, %d given here", ErrMismatch, a.seq, o.call, a.bytes, o.gives.parts[a.rank].Len())
	}
	return nil
}

// Answer implements cluster.Sink: a part has come.
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
	return o.wants.take(o.b, from, msg)
}

// needs tells whether the call cannot end without a rank. base.mu is held.
func (o *op) needs(rank int) bool {
	i, asked := slices.BinarySearch(o.wants.from, o.b.ids[rank])
	return asked && !o.wants.came[i] || o.gives.takes[rank].state == awaited
}

// String names the call, for errors.
func (o *op) String() string { return fmt.Sprintf("communicator %d, call %d", o.b.id, o.seq) }

// named is the error that the call's request has failed with as an error of the call: nobody knows the
// request's handler, and a rank has a number of its own in each communicator.
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

// Finished implements cluster.Sink: all parts have come, or the request has failed.
func (o *op) Finished(err error) {
	if err != nil {
		err = o.named(err)
		if r := o.b.revoker; r != nil {
			for _, m := range o.wants.into {
				r.Invalidate(m) // a part that is late must not come there
			}
		}
		o.b.fail(err) // first: who asks for a call that has ended well is refused
		o.end(err)
	}
	release(o.wants.into)
	o.settle()
}

// Recycle implements cluster.Sink.
func (o *op) Recycle() { o.l.unref(o) }

// settle notes that one of the things that o waits for is over.
func (o *op) settle() {
	if o.left.Add(-1) > 0 {
		return
	}
	f := &o.folding
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
			f.next.busy++ // what is reduced is memory of both
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
		go f.run() // this may be a goroutine that must not wait, or send
	}
}

// reduce makes the result of the parts that have come, and goes on.
func (o *op) reduce() {
	o.folding.make(&o.result, o.b.self, len(o.b.ids))
	next := o.folding.next
	if next == nil {
		o.release()
	}
	o.end(nil)
	o.rest()
	if next != nil {
		next.begin() // which keeps the memory before it is given back
		next.rest()
		o.release()
		o.dropNext(next)
	}
	o.l.unref(o)
}

// dropNext ends the use of o, of which only the call behind it, next, is waited for.
func (o *op) dropNext(next *op) {
	o.l.unref(next)
	o.forget()
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
	for r := range o.gives.takes {
		if t := &o.gives.takes[r]; t.state == awaited {
			t.state = over
			untaken++
		}
	}
	o.refs++
	begun, next := o.begun, o.folding.next
	drop := next != nil && !o.folding.ran
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
		go func() { // the request may be about to finish, further up
			o.dropNext(next)
			l.unref(o)
		}()
		return
	}
	l.unref(o)
}

// forget ends the use of o by its caller. It has ended.
func (o *op) forget() {
	o.b.mu.Lock()
	pull := o.pull
	o.b.mu.Unlock()
	_ = pull.Wait(context.Background()) // at once: its result is o's
	if o.device.is {
		o.l.copies.queue.ReturnEvent(o.device.copied)
		o.device.copied, o.device.err = nil, nil
		o.device.due.Store(false)
		o.result.release()
	}
	o.l.unref(o)
}
