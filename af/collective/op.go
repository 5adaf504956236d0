package collective

// One call in flight: what this rank asks of others, and what they take of it.

import (
	"cmp"
	"context"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/internal/datamsg"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// op is a call in flight.
type op struct {
	postoffice.Request
	c     *Comm
	call  call
	epoch uint64
	seq   uint32
	pull  postoffice.Call

	from  []int         // node ids that are asked, ascending
	into  []backend.Mem // where their parts are wanted
	came  []bool        // which of them have come; guarded by c.mu
	parts []backend.Mem // by rank: what others take
	takes []taking      // by rank
	msg   van.Message   // for requests
	key   [8]byte
	body  []byte

	// Of a reduction, nil and none for other calls, but those that copy on the device.
	fold folder
	out  backend.Mem // of what is in room, and own
	own  backend.Mem // this rank's part
	room []uint64    // where parts come

	onDevice bool          // tensors are there
	copied   backend.Event // of the copy of own into out, by the device; nil when there is nothing to wait for
	copyErr  error         // of that copy

	left   atomic.Int32       // 1 until the request has ended, and 1 for each part that is not taken
	next   *op                // the call that begins after the reduction; this one has a reference to it
	done   chan struct{}      // one token when the call has ended
	run    func()             // reduce
	isDone func() bool        // tells whether it is there, or there is work
	work   atomic.Pointer[op] // what the waiter is to reduce, since it polls: o, or the call before it
	timer  *time.Timer        // for waiting; nil until it was needed
	start  uint64

	// Guarded by c.mu.
	gen   uint32 // tells uses of the op apart
	refs  int    // the caller until Wait, the request until Recycle, memory that is lent, and who uses it
	begun bool   // others may have their parts
	ended bool
	busy  int  // begin and reduce use the memory
	ran   bool // reduce has been started
	told  bool // done has its token
	err   error
	waits bool
	polls bool // the waiter looks for work
}

// taking is a part that another rank takes.
type taking struct {
	o     *op
	rank  int
	state takeState // guarded by c.mu
	msg   van.Message
	key   [8]byte
}

type takeState uint8

const (
	notWanted takeState = iota // the rank does not need this one's part
	awaited
	sent
	over // taken, or the call has ended before
)

// Sent implements van.Completion: the other rank has its part.
func (t *taking) Sent() {
	o, c := t.o, t.o.c
	c.mu.Lock()
	t.state = over
	c.sending--
	if c.sending == 0 && c.quiet != nil {
		close(c.quiet)
		c.quiet = nil
	}
	c.mu.Unlock()
	o.settle()
	c.unref(o)
}

// Op is a call in flight. It is a small value that may be copied.
type Op struct {
	o   *op
	gen uint32
}

// take returns an op for use. mu is held.
func (c *Comm) take(k call) *op {
	var o *op
	if n := len(c.free); n > 0 {
		o, c.free = c.free[n-1], c.free[:n-1]
	} else {
		o = &op{c: c, done: make(chan struct{}, 1), parts: make([]backend.Mem, len(c.ids)), takes: make([]taking, len(c.ids))}
		o.run = o.reduce
		o.isDone = func() bool { return len(o.done) > 0 || o.work.Load() != nil }
		for r := range o.takes {
			o.takes[r].o, o.takes[r].rank = o, r
		}
	}
	select {
	case <-o.done:
	default:
	}
	o.call, o.gen, o.refs, o.begun, o.ended, o.err, o.waits = k, o.gen+1, 1, false, false, nil, false
	o.busy, o.ran, o.told, o.next, o.pull = 0, false, false, nil, postoffice.Call{}
	o.from, o.into, o.came = o.from[:0], o.into[:0], o.came[:0]
	for r := range o.takes {
		o.takes[r].state = notWanted
	}
	return o
}

// unref drops a reference to o.
func (c *Comm) unref(o *op) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if o.refs--; o.refs > 0 {
		return
	}
	clear(o.into)
	clear(o.parts)
	c.giveRoom(o.room)
	o.fold, o.out, o.own, o.room, o.next = nil, backend.Mem{}, backend.Mem{}, nil, nil
	if len(c.free) < maxInFlight {
		c.free = append(c.free, o)
	}
}

// maxRooms is how many pieces of memory for reductions a communicator keeps for later ones: an
// AllReduce needs one at a time.
const maxRooms = 2

// takeRoom returns memory for n bytes, of elements of any type. mu is held.
func (c *Comm) takeRoom(n int) []uint64 {
	n = (n + 7) / 8
	for i, room := range c.rooms {
		if cap(room) >= n {
			c.rooms = slices.Delete(c.rooms, i, i+1)
			return room[:n]
		}
	}
	return make([]uint64, n)
}

// giveRoom takes back what nobody writes into any more, in place of the smallest. mu is held.
func (c *Comm) giveRoom(room []uint64) {
	if room == nil {
		return
	}
	c.rooms = append(c.rooms, room)
	if len(c.rooms) > maxRooms {
		slices.SortFunc(c.rooms, func(a, b []uint64) int { return cmp.Compare(cap(b), cap(a)) })
		c.rooms = slices.Delete(c.rooms, maxRooms, len(c.rooms))
	}
}

// share is what of some memory is each rank's.
type share struct {
	mem  backend.Mem
	by   int         // the size of elements: mem is divided by them among the ranks; 0: all is everybody's
	list []af.Tensor // instead of mem: one for each rank
	of   int         // everybody, nobody, or the only rank that has any
}

// Values of share.of that are no rank.
const (
	everybody = -1
	nobody    = -2
)

// part is what is a rank's, of n, and whether anything is.
func (s *share) part(r, n int) (m backend.Mem, any bool) {
	switch {
	case s.of != everybody && s.of != r:
		return m, false
	case s.list != nil:
		return s.list[r].Mem(), true
	case s.by == 0:
		return s.mem, true
	}
	count := s.mem.Len() / s.by
	from, to := r*count/n*s.by, (r+1)*count/n*s.by
	return s.mem.Sub(from, to-from), true
}

// plan is what a call does: which ranks it asks for what, and what others take. Of a reduction
// what it asks for comes into a room, of the length of out for each rank.
type plan struct {
	call      call
	ask, give share
	fold      folder
	out, own  backend.Mem // own goes into out, if they are not the same, or its reduction
	device    bool        // tensors lie there
}

// toCopy tells whether a rank's own part does not lie in the result already.
func toCopy(out, own backend.Mem) bool { return out.Addr() != own.Addr() && out.Len() > 0 }

// reserve gives a call its number. The caller begins it, see begin.
func (c *Comm) reserve(p *plan) (*op, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	name := kinds[p.call.kind]
	if err := cmp.Or(c.err, c.left); err != nil {
		return nil, c.failed(name, err)
	}
	if c.window[c.next%maxInFlight] != nil {
		return nil, c.full(name)
	}
	o := c.take(p.call)
	o.start = clock.Now()
	left := int32(1)
	if o.onDevice = p.device; o.onDevice {
		o.out, o.own = p.out, p.own
		o.out.Retain() // until forget
		o.own.Retain()
	}
	ask := p.ask
	if p.fold != nil {
		n := p.out.Len() * len(c.ids)
		o.fold, o.out, o.own, o.room = p.fold, p.out, p.own, c.takeRoom(n)
		ask = share{mem: backend.Slice(o.room).Sub(0, n), by: p.call.dtype.Size(), of: everybody}
	}
	for r, id := range c.ids {
		if r == c.self {
			continue
		}
		if into, wanted := ask.part(r, len(c.ids)); wanted {
			o.from, o.into, o.came = append(o.from, id), append(o.into, into), append(o.came, false)
		}
		if part, wanted := p.give.part(r, len(c.ids)); wanted {
			o.parts[r], o.takes[r].state = part, awaited
			left++
		}
	}
	o.left.Store(left)
	o.epoch, o.seq = c.epoch, c.next
	c.next++
	c.window[o.seq%maxInFlight] = o
	return o, nil
}

func (c *Comm) full(name string) error {
	return &van.Error{Op: name, Node: c.node.Name(), Detail: fmt.Sprintf("communicator %d has %d calls in flight", c.id, maxInFlight),
		Hint: "wait for earlier ones", Err: van.ErrQueueFull}
}

// begin sends the requests of o and answers those that have come for it.
func (c *Comm) begin(o *op) {
	c.mu.Lock()
	if o.ended {
		c.mu.Unlock()
		return
	}
	o.busy++
	o.refs += 2 // the request, and this function
	c.mu.Unlock()
	defer c.unref(o)
	defer o.rest()
	o.retain()
	name := kinds[o.call.kind]
	if err := c.customer.Open(&o.Request, name, o, 1, o.from); err != nil {
		o.Finished(err)
		o.Recycle()
		return
	}
	c.mu.Lock()
	o.pull = o.Request.Call(-1)
	c.mu.Unlock()
	if o.Begin() {
		err := o.sendAsks(o.First())
		o.End()
		if err != nil {
			c.customer.Abort(&o.Request, err)
		}
	}
	c.mu.Lock()
	err := c.err // of a failure before the request was there
	if o.ended {
		err = o.err
	}
	o.begun = true // what is asked for from now on is not kept
	c.mu.Unlock()
	if err != nil {
		c.customer.Abort(&o.Request, err)
	}
	for r := range c.ids {
		c.mu.Lock()
		kept := &c.asked[r][o.seq%maxInFlight]
		a := *kept
		found := a.kept && a.seq == o.seq && a.epoch == o.epoch
		if found {
			kept.kept = false
		}
		c.mu.Unlock()
		if found {
			o.serve(&a)
		}
	}
}

// rest notes that begin or reduce does not use the memory any more.
func (o *op) rest() {
	o.c.mu.Lock()
	defer o.c.mu.Unlock()
	o.busy--
	o.deliver()
}

// deliver lets Wait return when the call has ended and its memory is not used. c.mu is held.
func (o *op) deliver() {
	if o.ended && o.busy == 0 && !o.told {
		o.told = true
		o.done <- struct{}{}
	}
}

// retain keeps the memory until release.
func (o *op) retain() {
	for i := range o.into {
		o.into[i].Retain()
	}
	for i := range o.parts {
		o.parts[i].Retain()
	}
	o.out.Retain()
	o.own.Retain()
}

// release gives back what others take and reduce or the device uses.
func (o *op) release() {
	for i := range o.parts {
		o.parts[i].Release()
	}
	o.out.Release()
	o.own.Release()
}

// sendAsks sends the requests for parts.
func (o *op) sendAsks(ts int32) error {
	c := o.c
	key := partKey(o.seq, c.self)
	binary.LittleEndian.PutUint64(o.key[:], key)
	o.body = o.call.appendAsk(o.body[:0], o.epoch)
	first := 0
	if c.node.Order(c.customer.AppID()) == "ring" { // a policy: not all ask the same one first
		first, _ = slices.BinarySearch(o.from, c.ids[c.self])
	}
	for i := range o.from {
		i = (i + first) % len(o.from)
		id := o.from[i]
		m, into := &o.msg, o.into[i]
		m.Reset()
		m.Receiver, m.Request, m.Timestamp, m.Head = id, true, ts, van.Single
		m.AppID, m.CustomerID = int32(c.customer.AppID()), int32(c.customer.ID())
		m.Key, m.Addr, m.ValLen = key, into.Addr(), int32(into.Len())
		m.Body = append(m.Body, o.body...)
		datamsg.SetData(m, backend.Bytes(o.key[:]), backend.Mem{}, backend.Mem{}, van.TypeOther)
		m.Into = into
		if err := c.node.Send(m); err != nil {
			return err
		}
	}
	return nil
}

// serve answers a request for a part of o. The caller has a reference.
func (o *op) serve(a *ask) {
	c := o.c
	t := &o.takes[a.rank]
	c.mu.Lock()
	wanted := t.state != notWanted
	c.mu.Unlock()
	if err := o.fits(a, wanted); err != nil {
		c.mismatch(&a.request, o.call.kind, err)
		return
	}
	c.mu.Lock()
	if t.state != awaited || o.ended || c.err != nil {
		err := cmp.Or(o.err, c.err)
		c.mu.Unlock()
		if err != nil {
			c.refuse(&a.request, err)
		}
		return
	}
	t.state = sent
	c.sending++
	o.refs++
	c.mu.Unlock()
	m := &t.msg
	a.reply.Fill(m)
	binary.LittleEndian.PutUint64(t.key[:], a.reply.Key)
	datamsg.SetData(m, backend.Bytes(t.key[:]), o.parts[a.rank], backend.Mem{}, van.TypeOther)
	m.Done = t
	if err := c.node.Send(m); err != nil {
		t.Sent()
		c.fail(&van.Error{Op: kinds[o.call.kind], Node: c.node.Name(), Peer: c.name(a.rank), Err: err})
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
	case a.bytes != o.parts[a.rank].Len():
		return fmt.Errorf("%w: call %d, %s: %d bytes are wanted there, %d given here", ErrMismatch, a.seq, o.call, a.bytes, o.parts[a.rank].Len())
	}
	return nil
}

// Answer implements postoffice.Sink: a part has come.
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
	into := o.into[from]
	if msg.Frames < 2 || msg.Vals.Len() != into.Len() {
		return fmt.Errorf("%w: a part of %d bytes in %d frames, want %d in 2", van.ErrMalformed, msg.Vals.Len(), msg.Frames, into.Len())
	}
	if !msg.Placed && into.Len() > 0 {
		if err := o.c.node.Backend().Copy(into, msg.Vals); err != nil {
			return err
		}
	}
	o.c.mu.Lock()
	o.came[from] = true
	o.c.mu.Unlock()
	return nil
}

// needs tells whether the call cannot end without a rank. c.mu is held.
func (o *op) needs(rank int) bool {
	i, asked := slices.BinarySearch(o.from, o.c.ids[rank])
	return asked && !o.came[i] || o.takes[rank].state == awaited
}

// Finished implements postoffice.Sink: all parts have come, or the request has failed.
func (o *op) Finished(err error) {
	if err != nil {
		if r := o.c.revoker; r != nil {
			for _, m := range o.into {
				r.Revoke(m) // a part that is late must not come there
			}
		}
		o.c.fail(err) // first: who asks for a call that has ended well is refused
		o.end(err)
	}
	for i := range o.into {
		o.into[i].Release()
	}
	o.settle()
}

// Recycle implements postoffice.Sink.
func (o *op) Recycle() { o.c.unref(o) }

// settle notes that one of the things that o waits for is over.
func (o *op) settle() {
	if o.left.Add(-1) > 0 {
		return
	}
	c := o.c
	c.mu.Lock()
	run := o.fold != nil && !o.ended
	handed := false
	if run {
		o.ran = true
		o.busy++
		o.refs++
		waited := o
		if o.next != nil {
			waited = o.next
			o.next.busy++ // what is reduced is memory of both
		}
		if handed = waited.polls; handed {
			waited.work.Store(o)
		}
	}
	c.mu.Unlock()
	if !run {
		o.release()
		o.end(nil)
		return
	}
	if !handed {
		go o.run() // this may be a goroutine that must not wait, or send
	}
}

// reduce makes the result of the parts that have come, and goes on.
func (o *op) reduce() {
	o.foldParts()
	next := o.next
	if next == nil {
		o.release()
	}
	o.end(nil)
	o.rest()
	if next != nil {
		o.c.begin(next) // which keeps the memory before it is given back
		next.rest()
		o.release()
		o.dropNext(next)
	}
	o.c.unref(o)
}

// foldParts makes out the reduction of own and of what others have put into room, in the order
// of ranks.
func (o *op) foldParts() {
	n, self := o.out.Len(), o.c.self
	room, own := backend.Slice(o.room), o.own
	part := func(r int) backend.Mem {
		if r == self {
			return own
		}
		return room.Sub(r*n, n)
	}
	switch {
	case n == 0:
		return
	case len(o.c.ids) == 1:
		copy(o.out.Host(), own.Host())
		return
	case self > 1 && o.out.Addr() == own.Addr(): // it is needed later, and is about to be written
		keep := room.Sub(self*n, n)
		copy(keep.Host(), own.Host())
		own = keep
	}
	o.fold(o.out, part(0), part(1))
	for r := 2; r < len(o.c.ids); r++ {
		o.fold(o.out, o.out, part(r))
	}
}

// dropNext ends the use of o, of which only the call behind it, next, is waited for.
func (o *op) dropNext(next *op) {
	o.c.unref(next)
	o.forget()
}

// end ends the call, once.
func (o *op) end(err error) {
	c := o.c
	c.mu.Lock()
	if o.ended {
		c.mu.Unlock()
		return
	}
	o.ended, o.err = true, err
	if c.window[o.seq%maxInFlight] == o {
		c.window[o.seq%maxInFlight] = nil
	}
	untaken := 0
	for r := range o.takes {
		if t := &o.takes[r]; t.state == awaited {
			t.state = over
			untaken++
		}
	}
	o.refs++
	begun, next := o.begun, o.next
	drop := next != nil && !o.ran
	o.deliver()
	c.mu.Unlock()
	if err != nil && begun {
		c.customer.Abort(&o.Request, err)
	}
	if err != nil && o.onDevice {
		c.queue.GiveUp(o)
	}
	for range untaken {
		o.settle()
	}
	if drop {
		go func() { // the request may be about to finish, further up
			o.dropNext(next)
			c.unref(o)
		}()
		return
	}
	c.unref(o)
}

// Wait waits until the results are there and all others have taken their parts of what this
// rank gives. Wait once for each Op. Errors wrap van.ErrPeerLost, van.ErrTimeout, van.ErrClosed,
// ErrMismatch, ErrAborted or ctx's error, and name the rank concerned; the communicator has
// failed on all ranks then.
func (h Op) Wait(ctx context.Context) error { return h.WaitSlice(ctx, 0) }

// WaitSlice is Wait for callers that have other work from time to time: when slice passes first, it
// returns postoffice.ErrPending and the call goes on. A slice of 0 is Wait.
func (h Op) WaitSlice(ctx context.Context, slice time.Duration) error {
	o := h.o
	if o == nil {
		return &van.Error{Op: "wait", Err: postoffice.ErrUnknownHandler, Hint: "this Op was returned with an error, or never made"}
	}
	c := o.c
	c.mu.Lock()
	if o.gen != h.gen || o.waits {
		err := postoffice.ErrUnknownHandler
		if o.gen == h.gen {
			err = postoffice.ErrOtherWaits
		}
		c.mu.Unlock()
		return &van.Error{Op: "wait", Node: c.node.Name(), Detail: fmt.Sprintf("communicator %d", c.id), Err: err,
			Hint: "wait once for each Op"}
	}
	o.waits = true
	c.mu.Unlock()
	err := o.wait(ctx, slice)
	if err == postoffice.ErrPending {
		c.mu.Lock()
		o.waits = false
		c.mu.Unlock()
		return err
	}
	err = o.endCopy(err)
	o.forget()
	return err
}

// forget ends the use of o by its caller. It has ended.
func (o *op) forget() {
	o.c.mu.Lock()
	pull := o.pull
	o.c.mu.Unlock()
	_ = pull.Wait(context.Background()) // at once: its result is o's
	if o.onDevice {
		o.c.queue.Unmark(o.copied)
		o.copied, o.copyErr = nil, nil
		o.out.Release()
		o.own.Release()
	}
	o.c.unref(o)
}

// wait waits until the call has ended, or returns postoffice.ErrPending when slice, unless it is 0, has passed.
func (o *op) wait(ctx context.Context, slice time.Duration) error {
	c := o.c
	limit := c.limit(ctx)
	left := func() time.Duration { return limit - time.Duration(clock.Now()-o.start) }
	began := clock.Now()
	late := false
	next := func() time.Duration { // how long to wait before there is something to do
		d := aliveEvery
		if limit > 0 && !late {
			d = min(d, left())
		}
		if slice > 0 && !late {
			d = min(d, slice-time.Duration(clock.Now()-began))
		}
		return max(d, 0)
	}
	if c.looks {
		o.poll(ctx, func() time.Duration { return max(next(), time.Nanosecond) })
	}
	for {
		select {
		case <-o.done:
			return o.err
		default:
		}
		if o.timer == nil {
			o.timer = time.NewTimer(next())
		} else {
			o.timer.Reset(next())
		}
		select {
		case <-o.done:
			o.timer.Stop()
			return o.err
		case <-ctx.Done():
			o.timer.Stop()
			o.giveUp(timeout(context.Cause(ctx)), 0)
			<-o.done
			return o.err
		case <-o.timer.C:
		}
		if err := c.node.Alive(); err != nil {
			c.fail(err)
		} else if limit > 0 && !late && left() <= 0 {
			o.giveUp(van.ErrTimeout, limit)
			late = true
		} else if slice > 0 && !late && time.Duration(clock.Now()-began) >= slice {
			return postoffice.ErrPending
		}
	}
}

// poll receives in place of the transport for a while, and reduces what has come: nobody
// need be woken for that.
func (o *op) poll(ctx context.Context, left func() time.Duration) {
	c := o.c
	for {
		c.mu.Lock()
		o.polls = !o.told
		c.mu.Unlock()
		c.node.PollFor(ctx, left(), o.isDone)
		c.mu.Lock()
		o.polls = false
		c.mu.Unlock()
		work := o.work.Swap(nil)
		if work == nil {
			return
		}
		work.reduce()
	}
}

// giveUp ends o because its waiter's time is over.
func (o *op) giveUp(cause error, limit time.Duration) {
	c, x := o.c, o
	var takers, givers []string
	c.mu.Lock()
	if before := c.window[(o.seq-1)%maxInFlight]; !o.begun && before != nil && before.next == o {
		x = before // which o waits for
	}
	for r := range x.takes {
		if s := x.takes[r].state; s == awaited || s == sent {
			takers = append(takers, c.name(r))
		}
	}
	for i, id := range x.from {
		if !x.came[i] {
			givers = append(givers, c.name(slices.Index(c.ids, id)))
		}
	}
	begun := x.begun
	c.mu.Unlock()
	var missing []string
	if len(givers) > 0 {
		missing = append(missing, "nothing has come from "+strings.Join(givers, ", "))
	}
	if len(takers) > 0 {
		missing = append(missing, "not taken by "+strings.Join(takers, ", "))
	}
	what := cmp.Or(strings.Join(missing, "; "), "it has not ended")
	if x.onDevice && !begun {
		what = "the work before it in this rank's stream, or in that of an earlier call, is not done"
	}
	err := &van.Error{Op: kinds[o.call.kind], Node: c.node.Name(), Detail: fmt.Sprintf("communicator %d, call %d: %s", c.id, o.seq, what),
		Elapsed: time.Duration(clock.Now() - o.start), Limit: limit, Err: cause}
	c.fail(err)
	o.end(err)
}
