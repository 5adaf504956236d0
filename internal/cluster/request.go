package cluster

// Request: the answers that receivers still owe, and how a request finishes, fails or is canceled.

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/internal/wake"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/env"
)

// Sink receives the answers to a request.
type Sink interface {
	// Answer handles an answer of receiver index from: to timestamp index i of the request, or, if msg is a batch of n parts, to the n
	// timestamps from i on. It runs on the transport's goroutine; answers of different
	// receivers may run at the same time. msg is valid until it returns. An error
	// fails the request.
	Answer(i, from int, msg *van.Message) error

	// Finished is called once, before any Wait returns: with nil after the last
	// answer, or with the error. No Answer runs any more, and the
	// transport no longer reads the memory of messages sent before.
	Finished(err error)

	// Recycle is called once after Finished, when the request is no longer referred to;
	// the sink may then be used for another request.
	Recycle()
}

// Request is one or several consecutive timestamps in flight. Every receiver owes an answer to each of them. It is
// part of a larger object that pools it; the zero value is ready for Customer.Open.
type Request struct {
	// Pushes is the number of timestamps that push values; they are the first ones. An answer to a later timestamp also acknowledges them,
	// since a server answers only complete batches. Set Pushes before Open.
	Pushes int

	mu        sync.Mutex
	c         *Customer
	sink      Sink
	op        string
	first     int32
	n         int32
	receivers []int    // node ids, ascending
	owed      []uint64 // n rows of words bits, set while an answer is owed
	words     int
	left      int // answers owed
	busy      int // calls of Answer that run, and Begin without End
	state     state
	err       error
	start     uint64        // clock.Now at Open
	limit     time.Duration // see Expire; 0: none
	waiting   bool
	gen       uint64        // counts uses, so that a late access notices that r was reused
	unsent    bool          // no message of it was sent
	keepSent  bool          // see Call.KeepSent
	ringIndex int           // in requests.finished, -1 when not there
	done      chan struct{} // one token when finished
	isDone    func() bool   // reports whether done has its token
	over      bool          // done has got its token
	ended     chan struct{} // closed when over; nil unless Call.Done has asked for it
}

type state uint8

const (
	unused   state = iota
	open           // answers are awaited
	failing        // failed, calls of Answer still run
	finished       // Finished has been called
)

// reset prepares r for n timestamps from first. r.mu is held.
func (r *Request) reset(c *Customer, op string, sink Sink, first int32, n int, receivers []int) {
	r.c, r.op, r.sink = c, op, sink
	r.first, r.n = first, int32(n)
	r.receivers = append(r.receivers[:0], receivers...)
	if !slices.IsSorted(r.receivers) {
		slices.Sort(r.receivers)
	}
	r.words = (len(receivers) + 63) / 64
	if need := n * r.words; cap(r.owed) < need {
		r.owed = make([]uint64, need)
	} else {
		r.owed = r.owed[:need]
	}
	for i := range r.owed {
		r.owed[i] = ^uint64(0)
		if i%r.words == r.words-1 && len(receivers)%64 != 0 {
			r.owed[i] = 1<<(len(receivers)%64) - 1
		}
	}
	r.left, r.busy, r.err = n*len(receivers), 0, nil
	r.state, r.waiting, r.unsent, r.keepSent, r.over = open, false, false, false, false
	r.gen++
	r.limit, r.ringIndex = 0, -1
	r.start = clock.Now()
	if r.done == nil {
		r.done = make(chan struct{}, 1)
		r.isDone = func() bool { return len(r.done) > 0 }
	}
	select {
	case <-r.done:
	default:
	}
}

// First is the first timestamp: the handler of the request.
func (r *Request) First() int32 { return r.first }

// Pending reports whether r still waits for answers: it has neither been answered nor failed.
func (r *Request) Pending() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.state == open
}

// Begin keeps r from finishing while a goroutine other than the one that opened it sends its messages: Finished is
// not called before End. When r has been answered or has failed it returns false, and End must not be called.
func (r *Request) Begin() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.state != open {
		return false
	}
	r.busy++
	return true
}

// End ends a Begin.
func (r *Request) End() {
	r.mu.Lock()
	r.busy--
	r.finishIfDone()
}

// Arrived reports that all receivers have the messages of the first n timestamps, as an answer to a later one may
// show. When it returns they are not sent again (PS_RESEND), whether or not they were acknowledged, and their memory
// may change.
func (r *Request) Arrived(n int) {
	if n > 0 && r.c.node.cfg.Resend {
		r.cancelMessages(int32(n))
	}
}

// cancelMessages takes the memory of the messages of the first n timestamps back from the transport.
func (r *Request) cancelMessages(n int32) {
	if x := r.c.node.transport.canceler; x != nil {
		x.Cancel(van.Requests{App: int32(r.c.app), Customer: int32(r.c.id), First: r.first, Count: n})
	}
}

// answer passes msg to the sink if its sender still owes this answer.
func (r *Request) answer(msg *van.Message) error {
	r.mu.Lock()
	i, n := int(msg.Timestamp-r.first), max(len(msg.Parts), 1)
	from, known := slices.BinarySearch(r.receivers, msg.Sender)
	switch {
	case r.state != open || i < 0 || i >= int(r.n):
		r.mu.Unlock()
		return errLate
	case !known:
		r.mu.Unlock()
		return fmt.Errorf("%w: no request was sent to %s", van.ErrMalformed, van.NodeName(msg.Sender))
	case n > int(r.n)-i:
		r.failOwing(msg.Sender, fmt.Errorf("%w: %d answers to timestamp %d and those after it, of a request of %d timestamps from %d on",
			van.ErrMalformed, n, msg.Timestamp, r.n, r.first))
		return nil
	}
	for k := range n {
		if r.isOwed(i+k, from) {
			continue
		}
		r.mu.Unlock()
		if msg.Push && i < r.Pushes {
			return nil // a later answer has acknowledged it
		}
		return fmt.Errorf("%w: %s answered twice", van.ErrMalformed, van.NodeName(msg.Sender))
	}
	for k := range n {
		r.take(i+k, from)
	}
	took, first, earlier := n, i, 0 // the number of answers in msg, the first of them, and the number of earlier pushes that msg acknowledges
	if msg.AcksBatch() {
		earlier = i
	} else if !msg.Push {
		earlier = min(r.Pushes, i)
	}
	for k := range earlier {
		if r.isOwed(k, from) {
			r.take(k, from)
			took++
			first = min(first, k)
		}
	}
	r.busy++
	sink := r.sink
	r.mu.Unlock()

	if t := r.c.traces; t != nil {
		for ts := r.first + int32(first); ts < msg.Timestamp+int32(n); ts++ {
			t.put(ts, msg)
			if f := r.c.node.onTrace; f != nil {
				f(msg.Sender, ts, Trace{msg.RequestTrace, msg.ResponseTrace})
			}
		}
	}
	err := sink.Answer(i, from, msg)

	r.mu.Lock()
	r.busy--
	r.left -= took
	if err != nil && r.state == open {
		r.err, r.state = r.wrap(err, msg.Sender), failing
	}
	r.finishIfDone()
	return nil
}

// isOwed reports whether receiver index from owes the answer to timestamp index i.
func (r *Request) isOwed(i, from int) bool { return r.owed[i*r.words+from/64]>>(from%64)&1 != 0 }

// take records the answer of receiver index from to timestamp index i.
func (r *Request) take(i, from int) { r.owed[i*r.words+from/64] &^= uint64(1) << (from % 64) }

// finishIfDone finishes the request when all answers have arrived, or it has failed, and no call of Answer runs. It
// unlocks r.mu.
func (r *Request) finishIfDone() {
	if r.busy > 0 || r.state == finished || r.state == unused || (r.state == open && r.left > 0) {
		r.mu.Unlock()
		return
	}
	sink, err, c, keep := r.sink, r.err, r.c, r.unsent || r.keepSent // Open may be setting unsent
	r.state = finished
	r.mu.Unlock()

	switch {
	case err != nil && !keep:
		if !failpoint.On("recall") {
			r.cancelMessages(r.n)
		}
		r.notifyCanceled()
	case err == nil:
		r.Arrived(int(r.n))
	}
	sink.Finished(err)

	r.mu.Lock()
	if r.ended != nil {
		close(r.ended)
		r.ended = nil
	}
	r.over = true
	wake.Put(r.done)
	waiting, gen := r.waiting, r.gen
	r.mu.Unlock()
	if !waiting {
		c.addFinished(r, gen)
	}
}

// notifyCanceled notifies the peers that still owe answers that the request is canceled. No other goroutine uses r
// meanwhile.
func (r *Request) notifyCanceled() {
	n := r.c.node
	if n.lifetime.Alive() != nil {
		return // the peers will see the connections end
	}
	for k, id := range r.receivers {
		if r.owes(k) > 0 {
			n.notices.cancel(id, r.c.app, Canceled{Customer: int32(r.c.id), First: r.first, Count: r.n})
		}
	}
}

// owes is the number of answers that the receiver with that index owes. r.mu is held, or no other goroutine uses r.
func (r *Request) owes(k int) (n int) {
	for i := range int(r.n) {
		if r.isOwed(i, k) {
			n++
		}
	}
	return n
}

// fail ends the request with err, once no call of Answer runs.
func (r *Request) fail(err error) {
	r.mu.Lock()
	if r.state != open {
		r.mu.Unlock()
		return
	}
	r.err, r.state = err, failing
	r.finishIfDone()
}

// failPeer fails the request if node id owes an answer and the request was opened up to openedUntil, a time of package clock.
func (r *Request) failPeer(id int, cause error, openedUntil uint64) {
	r.mu.Lock()
	if r.start > openedUntil {
		r.mu.Unlock()
		return
	}
	r.failOwing(id, cause)
}

// failAt is failPeer, but does nothing unless timestamp ts is of the request.
func (r *Request) failAt(ts int32, id int, cause error) {
	r.mu.Lock()
	if ts < r.first || ts-r.first >= r.n {
		r.mu.Unlock()
		return
	}
	r.failOwing(id, cause)
}

// failOwing fails r if node id owes an answer. It unlocks r.mu.
func (r *Request) failOwing(id int, cause error) {
	from, known := slices.BinarySearch(r.receivers, id)
	if r.state != open || !known || r.owes(from) == 0 {
		r.mu.Unlock()
		return
	}
	r.err, r.state = r.wrap(cause, id), failing
	r.finishIfDone()
}

// wrap adds operation, node, peer and handler to err. r.mu is held.
func (r *Request) wrap(err error, peer int) error {
	return &van.Error{
		Op: r.op, Node: r.c.node.Name(), Peer: r.c.node.peerName(peer), PeerID: peer,
		Detail:  fmt.Sprintf("handler %d", r.first),
		Elapsed: time.Duration(clock.Now() - r.start), Err: err,
	}
}

// owingPeers lists the peers that still owe answers, for errors. r.mu is held.
func (r *Request) owingPeers() string {
	var names []string
	total := 0
	for k, id := range r.receivers {
		n := r.owes(k)
		if n == 0 {
			continue
		}
		if total++; len(names) < 8 {
			names = append(names, fmt.Sprintf("%s (%d of %d answers missing)", r.c.node.peerName(id), n, r.n))
		}
	}
	if total > len(names) {
		names = append(names, fmt.Sprintf("and %d more", total-len(names)))
	}
	return strings.Join(names, ", ")
}

// wait waits until r is finished and returns its error. When ctx ends or limit (counted from Open; 0: none) passes
// first, the request is canceled: its memory is the caller's again and late answers are dropped. When slice (counted
// from now; 0: none) passes first, wait returns ErrPending.
func (r *Request) wait(ctx context.Context, limit, slice time.Duration, timer *time.Timer) error {
	sliced := slice > 0
	var left time.Duration // 0: none
	if limit > 0 || sliced {
		left = slice
		if limit > 0 {
			left = max(limit-time.Duration(clock.Now()-r.start), time.Nanosecond)
			if sliced = sliced && slice < left; sliced {
				left = slice
			}
		}
		timer.Reset(left)
		defer timer.Stop()
	}
	App{r.c.node}.PollFor(ctx, left, r.isDone)
	select {
	case <-r.done:
		return r.err
	default:
	}
	var expired <-chan time.Time
	if timer != nil {
		expired = timer.C
	}
	select {
	case <-r.done:
		return r.err
	case <-ctx.Done():
		r.cancel(context.Cause(ctx), limit)
	case <-expired:
		if sliced {
			return ErrPending
		}
		r.cancel(van.ErrTimeout, limit)
	}
	<-r.done // running calls of Answer end soon
	return r.err
}

// PollFor polls before a wait sleeps. It polls on a worker only, since on a server it would run handlers of requests.
// When waits are to spin, it repeats that for limit (0: no limit).
func (a App) PollFor(ctx context.Context, limit time.Duration, done func() bool) {
	if a.role != van.Worker {
		return
	}
	poll := func() {
		if !a.apps.overfull.any() {
			a.transport.stack.Poll(done)
		}
	}
	if a.cfg.BusyPoll != env.SpinForever {
		poll()
		return
	}
	begun := clock.Now()
	poll()
	for !done() && ctx.Err() == nil && (limit <= 0 || time.Duration(clock.Now()-begun) < limit) {
		runtime.Gosched() // another waiter may be polling
		poll()
	}
}

// answered reports whether all answers to timestamp ts have arrived or r has failed, with r's error.
func (r *Request) answered(ts int32) (bool, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	i := int(ts - r.first)
	if r.state != open || i < 0 || i >= int(r.n) {
		return true, r.err
	}
	for _, w := range r.owed[i*r.words : (i+1)*r.words] {
		if w != 0 {
			return false, nil
		}
	}
	return r.busy == 0, nil
}

// cancel fails r because its wait has ended.
func (r *Request) cancel(cause error, limit time.Duration) {
	r.mu.Lock()
	r.cancelLocked(cause, limit)
}

// cancelLocked is cancel with r.mu held. It unlocks r.mu.
func (r *Request) cancelLocked(cause error, limit time.Duration) {
	if r.state != open {
		r.mu.Unlock()
		return
	}
	waited := time.Duration(clock.Now() - r.start)
	hint := ""
	if noticed := r.c.node.lossDetectionTime(); waited < noticed && waited > noticed/3 {
		hint = fmt.Sprintf("a stopped peer is found lost only after up to %v (PS_HEARTBEAT_TIMEOUT, PS_HEARTBEAT_INTERVAL): a limit of that length shows whether it is lost", noticed)
	}
	r.err = &van.Error{
		Op: r.op, Node: r.c.node.Name(), Detail: fmt.Sprintf("handler %d: no answer from %s", r.first, r.owingPeers()),
		Elapsed: waited, Limit: limit, Err: van.TimedOut(cause), Hint: hint,
	}
	r.state = failing
	r.finishIfDone()
}
