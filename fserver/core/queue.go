package core

// The queue of complete batches between the tensor server and get_batch, and the batches that get_batch has returned
// and that have no answer yet.

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/internal/fifo"
	"github.com/stepaf/stepaf-go/internal/wake"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van"
)

// Item is one batch that the queue has handed out. The caller must release it after answering it.
type Item struct {
	ID uint64
	af.Batch
	acked bool // the batch needs no answer
}

// queue is a FIFO queue of complete batches for each worker.
type queue struct {
	node     cluster.App
	changed  chan struct{} // has a token when take may succeed
	poll     func() bool   // ends GetBatch's polling
	anyReady chan struct{} // has a token when takeAny may succeed; used after the first GetAny
	pollAny  func() bool   // ends GetAny's polling
	eager    atomic.Bool   // GetAny has been called
	polling  atomic.Int32  // callers of take that are receiving

	mu       sync.Mutex         // guards the fields below
	workers  []fifo.Queue[Item] // by group rank, oldest first
	filled   int                // workers that have a batch
	next     uint64
	out      map[uint64]af.Batch // handed out and not answered
	acked    recent[struct{}]    // handed out without pulls: an answer is allowed, but not needed
	canceled recent[int]         // handed out, then canceled by their workers (group ranks): an answer is dropped
	lost     map[int]loss        // workers by group rank
	bytes    []int               // queued for each worker, by group rank
	full     int                 // workers that have used up STEPAF_RECV_BUDGET_PEER
	room     chan struct{}       // closed and replaced when such a worker is below its budget again
	turn     int                 // the worker (group rank) whose batch takeAny takes next, if it has one
	shown    batchDescriptors

	callers callers      // the threads that call get_batch
	refuses bool         // the server is in stop(), and no thread calls get_batch
	over    *atomic.Bool // see Session.Finished
}

// recent has a value for each of the latest ids that were added and not deleted since.
type recent[V any] struct {
	of    map[uint64]V
	order fifo.Queue[uint64] // of all ids that were added
}

// add adds id. If there are keep ids, it removes the oldest.
func (r *recent[V]) add(id uint64, v V, keep int) {
	if r.order.Len() == keep {
		delete(r.of, r.order.Take())
	}
	r.of[id] = v
	r.order.Put(id)
}

// loss is the cause and the time of a worker's loss, and the time of the latest error about it.
type loss struct {
	cause    error
	at, told time.Time
}

func newQueue(n *postoffice.Node) *queue {
	q := &queue{node: (*cluster.Node)(n).App(), workers: make([]fifo.Queue[Item], n.Topology().NumWorkers), out: map[uint64]af.Batch{}, lost: map[int]loss{},
		acked: recent[struct{}]{of: map[uint64]struct{}{}}, canceled: recent[int]{of: map[uint64]int{}}, over: &atomic.Bool{},
		bytes: make([]int, n.Topology().NumWorkers), room: make(chan struct{}), changed: make(chan struct{}, 1), anyReady: make(chan struct{}, 1)}
	q.poll = func() bool {
		q.mu.Lock()
		defer q.mu.Unlock()
		// If a worker is over its budget, polling would deadlock: put would wait for take
		// on the goroutine that is to call take.
		return q.enough() || q.full > 0
	}
	q.pollAny = func() bool {
		q.mu.Lock()
		defer q.mu.Unlock()
		return q.filled > 0
	}
	q.node.OnPeer(func(id int, up bool, cause error) {
		if van.RoleOf(id) != van.Worker || van.RankOf(id)%n.Topology().GroupSize != n.Topology().Instance {
			return // another instance receives its batches
		}
		q.mu.Lock()
		defer q.unlock(true)
		rank := van.RankOf(id) / n.Topology().GroupSize
		if up {
			delete(q.lost, rank)
		} else {
			q.lost[rank] = loss{cause: cause, at: time.Now()}
			q.dropCanceled(rank)
		}
	})
	q.node.OnEnded(func(int) { q.wakeAll() })
	q.node.OnExit(q.clear)
	return q
}

// clear releases the batches that were not handed out or not answered.
func (q *queue) clear() {
	q.mu.Lock()
	defer q.unlock(false)
	for rank := range q.workers {
		for w := &q.workers[rank]; w.Len() > 0; {
			it := w.Take()
			q.charge(rank, -weight(&it.Batch))
			release(it)
		}
	}
	q.filled = 0
	for id, b := range q.out {
		q.cancel(id, b)
	}
}

// keepCanceled is the number of canceled batches for which an answer is dropped without an error. For older ones an
// answer is an error.
const keepCanceled = 1 << 16

// cancel releases a batch that was handed out and will not be answered. The caller holds q.mu.
func (q *queue) cancel(id uint64, b af.Batch) {
	delete(q.out, id)
	q.canceled.add(id, b.Worker(), keepCanceled)
	b.Release()
}

// unlock ends a change of the queue: it shows the descriptors, unlocks q.mu, and wakes a caller of await for which there are
// batches. If all is set, it wakes one of each kind, since there may be an error.
func (q *queue) unlock(all bool) {
	each, some := q.enough(), q.filled > 0
	if q.shown.each != nil || q.shown.any != nil {
		late, due, next := overdue(q)
		if q.node.Alive() != nil || loopOver(q.node, q.lost) != nil {
			q.shown.show(true, true, 0)
		} else {
			q.shown.show(each || due >= 0, some || due >= 0 && len(late) == len(q.workers), next)
		}
	}
	q.mu.Unlock()
	if each || all {
		wake.Put(q.changed)
	}
	if (some || all) && q.eager.Load() { // GetAny is used
		wake.Put(q.anyReady)
	}
}

// wakeAll wakes callers of await and shows the descriptors after a change outside of the queue.
func (q *queue) wakeAll() {
	q.mu.Lock()
	q.unlock(true)
}

// weight estimates the memory that a batch takes, in bytes.
func weight(b *af.Batch) int {
	n := 512
	for _, p := range b.Pushes() {
		n += p.Val.Len()
	}
	return n
}

// put is the server's handler. It retains the batch for the caller of take. If the worker has used up its budget, put
// blocks until batches are taken; until then the node reads no messages of that worker. While a caller of take
// receives, put does not block, since it may run on that caller's goroutine: another put may have used up the budget
// after the caller has checked it.
func (q *queue) put(b af.Batch) {
	b.Retain()
	rank := b.Worker()
	q.mu.Lock()
	wait := q.polling.Load() == 0
	for paused := false; wait && q.bytes[rank] >= q.budget() && b.Wanted() && q.node.Alive() == nil; paused = true {
		if !paused {
			q.node.PausedRead(q.node.Topology().WorkerInstance(rank), q.bytes[rank], "a worker's batches wait for get_batch: the worker's other messages are not read until batches are taken")
		}
		room := q.room
		q.mu.Unlock()
		select {
		case <-room:
		case <-time.After(100 * time.Millisecond): // the worker or the node may be lost
		}
		q.mu.Lock()
	}
	if !b.Wanted() && !failpoint.On("lost-batches") {
		q.mu.Unlock()
		release(Item{Batch: b})
		return
	}
	if q.refuses {
		q.mu.Unlock()
		b.Refuse(errLeft(q.node.Name()))
		b.Release()
		return
	}
	w := &q.workers[rank]
	if w.Put(Item{ID: q.next, Batch: b}); w.Len() == 1 {
		q.filled++
	}
	q.charge(rank, weight(&b))
	q.next++
	q.unlock(false)
}

func (q *queue) budget() int {
	if failpoint.On("recv-budget") {
		return math.MaxInt
	}
	return q.node.Config().RecvBudgetPeer
}

// charge adds bytes to a worker's account. The caller holds q.mu.
func (q *queue) charge(rank, bytes int) {
	was, budget := q.bytes[rank] >= q.budget(), q.budget()
	q.bytes[rank] += bytes
	switch is := q.bytes[rank] >= budget; {
	case is && !was:
		q.full++
	case was && !is:
		q.full--
		close(q.room)
		q.room = make(chan struct{})
	}
}

// receive receives messages on the goroutine of a caller of take, until done returns true or no message has arrived for
// a short time.
func (q *queue) receive(done func() bool) {
	if done() {
		return
	}
	q.polling.Add(1)
	defer q.polling.Add(-1)
	q.node.Poll(done)
}

// release releases a batch that will not be answered.
func release(it Item) {
	if !it.acked { // the answer of an acked batch has released the first reference
		it.Release()
	}
	it.Release()
}

// dropCanceled releases the batches that their worker has canceled: queued batches, and batches that were handed out
// and not answered. The caller holds q.mu.
func (q *queue) dropCanceled(rank int) {
	if failpoint.On("lost-batches") {
		return
	}
	for id, b := range q.out {
		if b.Worker() == rank && !b.Wanted() {
			q.cancel(id, b)
		}
	}
	w := &q.workers[rank]
	had := w.Len()
	for range had {
		it := w.Take()
		if it.Wanted() {
			w.Put(it)
			continue
		}
		q.charge(rank, -weight(&it.Batch))
		release(it)
	}
	if had > 0 && w.Len() == 0 {
		q.filled--
	}
	if gone := had - w.Len(); gone > 0 {
		q.node.Log().Info("dropped batches that their worker has canceled", "worker", q.node.PeerName(q.node.Topology().WorkerInstance(rank)), "batches", gone)
	}
}

// onCanceled is called when a worker has canceled batches.
func (q *queue) onCanceled(worker postoffice.NodeID) {
	if worker.Rank()%q.node.Topology().GroupSize != q.node.Topology().Instance {
		return
	}
	q.mu.Lock()
	defer q.unlock(false)
	if rank := worker.Rank() / q.node.Topology().GroupSize; rank < len(q.workers) {
		q.dropCanceled(rank)
	}
}

// eachOne is a number of batches: one of each worker.
const eachOne = -1

// await is Session.GetBatch if most is eachOne, else Session.GetAny.
func (q *queue) await(items []Item, most int, slice time.Duration) ([]Item, error) {
	poll, changed := q.poll, q.changed
	if most != eachOne {
		poll, changed = q.pollAny, q.anyReady
	}
	var timer *time.Timer // created only if the batches do not arrive soon
	var end time.Time
	q.callers.calls.Add(1)
	q.callers.inside.Add(1)
	defer q.callers.inside.Add(-1)
	for {
		if err := q.node.Alive(); err != nil {
			return items, err
		}
		items, ok, err := q.take(items, most)
		if ok || err != nil {
			return items, err
		}
		if slice <= 0 {
			return items, ErrPending
		}
		if end.IsZero() {
			end = time.Now().Add(slice)
		}
		if q.receive(poll); q.ready(most) {
			continue
		}
		if timer == nil {
			timer = time.NewTimer(time.Until(end))
			defer timer.Stop()
		}
		select {
		case <-changed:
		case <-timer.C:
			return items, ErrPending
		}
	}
}

// enough reports whether every worker that has not ended has a batch. At least one worker then has a batch. A worker
// that has ended sends no more batches. The caller holds q.mu.
func (q *queue) enough() bool {
	if q.filled == 0 || q.filled == len(q.workers) {
		return q.filled > 0
	}
	for rank := range q.workers {
		if q.workers[rank].Len() == 0 && !q.node.HasEnded(q.node.Topology().WorkerInstance(rank)) {
			return false
		}
	}
	return true
}

// ready reports whether take would return batches.
func (q *queue) ready(most int) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.enough() || most != eachOne && q.filled > 0
}

// take appends the oldest batch of every worker to items if there are enough. Otherwise it returns false. It returns an
// error if a worker without a batch is lost and was not replaced within STEPAF_REPLACE_TIMEOUT, or if no worker will
// send another batch. If most is not eachOne, take is takeAny.
func (q *queue) take(items []Item, most int) ([]Item, bool, error) {
	q.mu.Lock()
	defer q.unlock(false) // wakes another caller if batches remain: two signals may have become one token
	q.refuses = false     // a thread serves
	if most != eachOne {
		return q.takeAny(items, most)
	}
	if !q.enough() && (q.filled == 0 || loopOver(q.node, q.lost) == nil) { // else these are the last batches: every other worker has ended or is lost
		return items, false, q.lostError(1)
	}
	for i := range q.workers {
		if q.workers[i].Len() > 0 {
			items = append(items, q.takeOf(i))
		}
	}
	return items, true, nil
}

// takeAny appends batches to items, oldest first, at most most of them (0: no limit). If there are more, the workers take turns,
// also from one call to the next, so that a worker with many batches does not delay the others. If there is none, takeAny returns
// false, or an error if all workers are lost and none was replaced within STEPAF_REPLACE_TIMEOUT. The caller holds q.mu.
func (q *queue) takeAny(items []Item, most int) ([]Item, bool, error) {
	if q.filled == 0 {
		return items, false, q.lostError(len(q.workers))
	}
	had := len(items)
	for q.filled > 0 && (most == 0 || len(items)-had < most) {
		if q.workers[q.turn].Len() > 0 {
			items = append(items, q.takeOf(q.turn))
		}
		q.turn = (q.turn + 1) % len(q.workers)
	}
	slices.SortFunc(items[had:], func(a, b Item) int { return cmp.Compare(a.ID, b.ID) })
	return items, true, nil
}

// takeOf hands out the oldest batch of a worker. The caller holds q.mu.
func (q *queue) takeOf(rank int) Item {
	w := &q.workers[rank]
	it := w.Take()
	q.charge(rank, -weight(&it.Batch))
	if w.Len() == 0 {
		q.filled--
	}
	return q.handOut(it)
}

// lostError returns an error that wraps ErrLoopOver if no worker will send another batch. Otherwise it counts the
// workers without a batch that are lost and were not replaced within STEPAF_REPLACE_TIMEOUT. If there are at least
// least of them, it returns the error of one. These workers then have the same time again to be replaced, or a second
// if that time is 0. The caller holds q.mu.
func (q *queue) lostError(least int) (err error) {
	if err := loopOver(q.node, q.lost); err != nil {
		q.over.Store(true)
		return err
	}
	late, due, _ := overdue(q)
	if len(late) < least || due < 0 {
		return nil
	}
	l := q.lost[due]
	err = &van.Error{Op: "get_batch", Node: q.node.Name(), Peer: q.node.PeerName(q.node.Topology().WorkerInstance(due)), Err: l.cause,
		Elapsed: time.Since(l.at), Limit: q.node.Config().ReplaceTimeout,
		Hint: "batches of the other workers stay queued; a restarted worker takes its place"}
	for _, rank := range late {
		l := q.lost[rank]
		l.told = time.Now()
		q.lost[rank] = l
	}
	return err
}

// keepAcked is the number of batches without pulls that can still be answered.
const keepAcked = 4096

// handOut records that a batch has left the queue. A batch of several pushes and no pull needs no answer, and few
// programs answer it. handOut therefore answers it; only Python then holds its memory. The caller holds q.mu.
func (q *queue) handOut(it Item) Item {
	// A batch that GiveBack has returned may be acked already. A server that is closing refuses the answer, but has released the batch.
	it.acked = it.acked || !it.Single() && len(it.Pulls()) == 0 && (it.Respond(nil) == nil || it.Answered())
	if it.acked {
		q.acked.add(it.ID, struct{}{}, keepAcked)
	} else {
		q.out[it.ID] = it.Batch
	}
	return it
}

// answer is Session.Answer.
func (q *queue) answer(stream af.Stream, id uint64, tensors []af.KeyTensor, done van.Completion) (told bool, err error) {
	q.mu.Lock()
	if _, ok := q.acked.of[id]; ok {
		defer q.mu.Unlock()
		if len(tensors) > 0 {
			return false, misfit(id, 0, len(tensors))
		}
		delete(q.acked.of, id)
		return true, nil
	}
	if worker, ok := q.canceled.of[id]; ok {
		err := q.node.Alive()
		if err == nil {
			delete(q.canceled.of, id)
		}
		q.mu.Unlock()
		if err != nil {
			return false, err
		}
		q.unanswered(worker, tensors, done)
		return true, nil
	}
	b, ok := q.out[id]
	if !ok {
		err := q.unknown("respond", id)
		q.mu.Unlock()
		return false, err
	}
	delete(q.out, id)
	q.mu.Unlock()
	if len(b.Pulls()) != len(tensors) {
		q.putBack(id, b)
		return false, misfit(id, len(b.Pulls()), len(tensors))
	}
	worker := b.Worker()
	if !b.Wanted() && !failpoint.On("incarnation") && !failpoint.On("stale-answer") {
		b.Release()
		q.unanswered(worker, tensors, done)
		return true, nil
	}
	err = b.Respond(tensors, stream, af.OnSent(done))
	switch {
	case err != nil && !b.Answered():
		q.putBack(id, b)
		return false, err
	case errors.Is(err, van.ErrPeerLost):
		q.unanswered(worker, nil, nil) // Respond has called done
		return true, nil
	}
	return true, err
}

// refuse is Session.Refuse.
func (q *queue) refuse(id uint64, why error) error {
	q.mu.Lock()
	if _, ok := q.acked.of[id]; ok {
		q.mu.Unlock()
		return fmt.Errorf("refuse: %w: handler %d: pushes without a pull are acknowledged as they arrive", ErrMisuse, id)
	}
	if _, ok := q.canceled.of[id]; ok { // the worker is lost, or has canceled the batch
		defer q.mu.Unlock()
		err := q.node.Alive()
		if err == nil {
			delete(q.canceled.of, id)
		}
		return err
	}
	b, ok := q.out[id]
	if !ok {
		defer q.mu.Unlock()
		return q.unknown("refuse", id)
	}
	delete(q.out, id)
	q.mu.Unlock()
	return b.Refuse(why)
}

// canRespond is Session.CanRespond.
func (q *queue) canRespond(ids []uint64, tensors int) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	for i, id := range ids {
		b, ok := q.out[id]
		_, acked := q.acked.of[id]
		_, canceled := q.canceled.of[id]
		switch {
		case acked && tensors != 0:
			return misfit(id, 0, tensors)
		case !ok && !acked && !canceled:
			return q.unknown("respond", id)
		case slices.Contains(ids[:i], id):
			return fmt.Errorf("respond: %w: handler %d is there twice; respond once to each batch", van.ErrInvalid, id)
		case ok && len(b.Pulls()) != tensors:
			return misfit(id, len(b.Pulls()), tensors)
		}
	}
	return nil
}

// missing returns the names of the workers that have no batch.
func (q *queue) missing() (names []string) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for rank := range q.workers {
		if q.workers[rank].Len() == 0 {
			names = append(names, q.node.PeerName(q.node.Topology().WorkerInstance(rank)))
		}
	}
	return names
}

// unknown returns the error of an id that cannot be answered. It wraps ErrUnknownHandler unless the batch was answered
// already. The caller holds q.mu.
func (q *queue) unknown(op string, id uint64) error {
	if q.isQueued(id) {
		return fmt.Errorf("%s: %w: %w: get_batch has not returned handler %d yet", op, ErrMisuse, ErrUnknownHandler, id)
	}
	if id < q.next {
		return fmt.Errorf("%s: %w: handler %d was answered already; respond once to each batch", op, ErrMisuse, id)
	}
	return fmt.Errorf("%s: %w: %w %d, get_batch has returned handlers below %d", op, ErrMisuse, ErrUnknownHandler, id, q.next)
}

func misfit(id uint64, pulls, tensors int) error {
	return fmt.Errorf("respond: %w: %d tensors for handler %d, whose worker pulls %d", van.ErrInvalid, tensors, id, pulls)
}

// isQueued reports whether the batch with that id is still queued. The caller holds q.mu.
func (q *queue) isQueued(id uint64) bool {
	is := func(it Item) bool { return it.ID == id }
	return slices.ContainsFunc(q.workers, func(w fifo.Queue[Item]) bool { return slices.ContainsFunc(w.All(), is) })
}

// unanswered logs that an answer was dropped, and calls done for its tensors.
func (q *queue) unanswered(worker int, tensors []af.KeyTensor, done van.Completion) {
	q.node.Rarely("fserver: answer").Info("dropped an answer: its worker is lost, or has canceled the request",
		"worker", q.node.PeerName(q.node.Topology().WorkerInstance(worker)))
	for range tensors {
		if done != nil {
			done.Sent()
		}
	}
}

// putBack makes a batch answerable again after an answer that was refused, unless its worker has canceled it in the
// meantime, or the node has left the cluster.
func (q *queue) putBack(id uint64, b af.Batch) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.out[id] = b; (!b.Wanted() || q.node.Alive() != nil) && !failpoint.On("lost-batches") {
		q.cancel(id, b)
	}
}
