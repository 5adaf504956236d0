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

	held []backend.Mem // other memory that then uses

	left  atomic.Int32  // 1 until the request has ended, and 1 for each part that is not taken
	then  func()        // what to do when all have come, on a goroutine of its own, before end
	next  *op           // the call that begins then; this one has a reference to it
	done  chan struct{} // one token when the call has ended
	start uint64

	// Guarded by c.mu.
	gen   uint32 // tells uses of the op apart
	refs  int    // the caller until Wait, the request until Recycle, memory that is lent, and who uses it
	begun bool   // others may have their parts
	ended bool
	busy  int  // begin and then use the memory
	ran   bool // then has been started
	told  bool // done has its token
	err   error
	waits bool
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
		for r := range o.takes {
			o.takes[r].o, o.takes[r].rank = o, r
		}
	}
	select {
	case <-o.done:
	default:
	}
	o.call, o.gen, o.refs, o.begun, o.ended, o.err, o.waits = k, o.gen+1, 1, false, false, nil, false
	o.busy, o.ran, o.told, o.then, o.next, o.pull = 0, false, false, nil, nil, postoffice.Call{}
	o.held = o.held[:0]
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
	clear(o.held)
	o.then, o.next = nil, nil
	if len(c.free) < maxInFlight {
		c.free = append(c.free, o)
	}
}

// plan is what a call does: which ranks it asks for what, and what others take.
type plan struct {
	call call
	ask  func(rank int) (into backend.Mem, wanted bool)
	give func(rank int) (part backend.Mem, wanted bool)
	then func()
	hold []backend.Mem // what then uses besides
}

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
	for r, id := range c.ids {
		if r == c.self {
			continue
		}
		if into, wanted := p.ask(r); wanted {
			o.from, o.into, o.came = append(o.from, id), append(o.into, into), append(o.came, false)
		}
		if part, wanted := p.give(r); wanted {
			o.parts[r], o.takes[r].state = part, awaited
			left++
		}
	}
	o.left.Store(left)
	o.then = p.then
	o.held = append(o.held, p.hold...)
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
	defer func() {
		o.rest()
		c.unref(o)
	}()
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
	o.begun = true
	var kept []*ask
	for r := range c.ids {
		if a := c.asked[r][o.seq]; a != nil && a.epoch == o.epoch {
			kept = append(kept, a)
			delete(c.asked[r], o.seq)
		}
	}
	c.mu.Unlock()
	if err != nil {
		c.customer.Abort(&o.Request, err)
	}
	for _, a := range kept {
		o.serve(a)
	}
}

// rest notes that begin or then does not use the memory any more.
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
	for i := range o.held {
		o.held[i].Retain()
	}
}

// release gives back what others take and then uses.
func (o *op) release() {
	for i := range o.parts {
		o.parts[i].Release()
	}
	for i := range o.held {
		o.held[i].Release()
	}
}

// sendAsks sends the requests for parts.
func (o *op) sendAsks(ts int32) error {
	c := o.c
	key := partKey(o.seq, c.self)
	binary.LittleEndian.PutUint64(o.key[:], key)
	o.body = o.call.appendAsk(o.body[:0], o.epoch)
	for i, id := range o.from {
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
		c.fail(&van.Error{Op: kinds[o.call.kind], Node: c.node.Name(), Peer: c.name(a.rank), Err: err})
		c.refuse(&a.request, fmt.Errorf("rank %d: %w", c.self, err))
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
	switch {
	case a.call != o.call:
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
		_, why, err := parseReason(msg.Body)
		if err != nil {
			return err
		}
		return why
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
		o.end(err)
		o.c.fail(err)
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
	run := o.then != nil && !o.ended
	if run {
		o.ran = true
		o.busy++
		o.refs++
	}
	c.mu.Unlock()
	if !run {
		o.release()
		o.end(nil)
		return
	}
	go func() {
		o.then()
		o.release()
		next := o.next
		o.end(nil)
		o.rest()
		if next != nil {
			c.begin(next)
			o.dropNext(next)
		}
		c.unref(o)
	}()
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
func (h Op) Wait(ctx context.Context) error {
	o := h.o
	if o == nil {
		return &van.Error{Op: "wait", Err: postoffice.ErrUnknownHandler, Hint: "this Op was returned with an error, or never made"}
	}
	c := o.c
	c.mu.Lock()
	if o.gen != h.gen || o.waits {
		c.mu.Unlock()
		return &van.Error{Op: "wait", Node: c.node.Name(), Detail: fmt.Sprintf("communicator %d", c.id), Err: postoffice.ErrUnknownHandler,
			Hint: "wait once for each Op"}
	}
	o.waits = true
	c.mu.Unlock()
	err := o.wait(ctx)
	o.forget()
	return err
}

// forget ends the use of o by its caller. It has ended.
func (o *op) forget() {
	o.c.mu.Lock()
	pull := o.pull
	o.c.mu.Unlock()
	_ = pull.Wait(context.Background()) // at once: its result is o's
	o.c.unref(o)
}

func (o *op) wait(ctx context.Context) error {
	c := o.c
	select {
	case <-o.done:
		return o.err
	default:
	}
	limit := c.limit(ctx)
	var late <-chan time.Time
	if limit > 0 {
		timer := time.NewTimer(max(limit-time.Duration(clock.Now()-o.start), 0))
		defer timer.Stop()
		late = timer.C
	}
	alive := time.NewTicker(aliveEvery)
	defer alive.Stop()
	for {
		select {
		case <-o.done:
			return o.err
		case <-late:
			o.giveUp(van.ErrTimeout, limit)
			late = nil
		case <-ctx.Done():
			o.giveUp(timeout(context.Cause(ctx)), 0)
			<-o.done
			return o.err
		case <-alive.C:
			if err := c.node.Alive(); err != nil {
				c.fail(err)
			}
		}
	}
}

// giveUp ends o because its waiter's time is over.
func (o *op) giveUp(cause error, limit time.Duration) {
	c := o.c
	var missing []string
	c.mu.Lock()
	for r := range o.takes {
		if s := o.takes[r].state; s == awaited || s == sent {
			missing = append(missing, c.name(r))
		}
	}
	c.mu.Unlock()
	what := "parts of others have not come"
	if len(missing) > 0 {
		what = "not taken by " + strings.Join(missing, ", ")
	}
	err := &van.Error{Op: kinds[o.call.kind], Node: c.node.Name(), Detail: fmt.Sprintf("communicator %d, call %d: %s", c.id, o.seq, what),
		Elapsed: time.Duration(clock.Now() - o.start), Limit: limit, Err: cause}
	c.fail(err)
	o.end(err)
}
