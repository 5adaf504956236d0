package rdma

import (
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/internal/fifo"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/rdma/conn"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// This file owns a connection that a peer has opened to this node: the replies on it, and the credits that are owed to the peer.

// inbound is a connection that a peer has opened to this node.
type inbound struct {
	v         *node
	serial    uint32
	handshake handshake // of the first queue pair
	dialect   inboundDialect
	key       string
	from      netip.AddrPort
	device    *device
	once      sync.Once
	failed    atomic.Bool
	process   processState
	confirmed atomic.Int32 // the state in the peer's immUp, 0 before it; only native nodes send it
	stalled   atomic.Bool  // too many of its messages wait for their handler

	activeDue   conn.DueItem // for credits, and for slots that may have been overwritten
	probeDue    conn.DueItem
	requestsDue conn.DueItem // for pending slot requests

	order receiveState
	drain drainState

	mu      sync.Mutex
	closed  bool
	accept  acceptState
	sends   *conn.SendQueue[struct{}] // replies to slot requests, and credits
	backlog fifo.Queue[queuedSend]    // SENDs that wait for room in sends
	owed    creditList
	slots   slotState
}

// processState relates a connection to the process that has opened it.
type processState struct {
	// unlisted is set while the node table names another process: this one is newer, and its registration has not arrived yet.
	unlisted   atomic.Bool
	refused    atomic.Bool // it is counted as unauthenticated
	unproved   atomic.Bool // the opener must prove that it knows the cluster's secret; see prove.go
	upProof    upProof     // inputs of that proof
	superseded atomic.Bool // the same process has opened a newer connection
}

// besidesEnding reports whether another connection under the same node id has failed, and its queue pairs are not destroyed yet: until then
// its peer can write, and messages of it may not be decoded.
func (in *inbound) besidesEnding() bool {
	if !in.handshake.native || in.handshake.node == van.Empty {
		return false
	}
	for _, c := range *in.v.tables.conns.Load() {
		if x := c.in; x != nil && x != in && x.failed.Load() && x.handshake.native && x.handshake.node == in.handshake.node && !x.process.unproved.Load() {
			return true
		}
	}
	return false
}

// receiveState is the order of received messages. The holder of the feed uses it.
type receiveState struct {
	splits        uint64        // notifications of parts of split messages so far
	messages      uint32        // notifications of messages so far
	decoded       atomic.Uint32 // see trailer.decoded
	incomplete    []*received
	hasIncomplete atomic.Bool   // len(incomplete) > 0
	queues        [2]*peerQueue // of the sender, once known: for data, and for control messages
	overBudgetBy  int64         // bytes by which the last slot request exceeds the peer's budget
}

// drainState counts the receive requests that are flushed when the connection ends.
type drainState struct {
	flushed atomic.Int32
	drained chan struct{} // closed when all are flushed
}

// acceptState holds the queue pairs for which the peer has sent connect requests.
type acceptState struct {
	ids      []verbs.ID  // each has a queue pair
	requests [][]byte    // the private data that each answer's proof covers; nil: the answer has no proof
	accepted int         // number of ids that were accepted
	timer    *time.Timer // limits the wait for the other queue pairs of a StepMesh node, or for the proof of a native one
}

// creditList holds the slots that are owed to the peer.
type creditList struct {
	credits []uint16
	count   atomic.Int32 // len(credits)
}

// queuedSend is a SEND that waits for room in the send queue.
type queuedSend struct {
	imm  uint32
	n    int
	data [verbs.RecvSize]byte
}

// addQueuePair adds a queue pair and accepts it.
func (in *inbound) addQueuePair(id verbs.ID, h handshake, req []byte) error {
	v, q := in.v, len(in.accept.ids)
	dev, err := id.Device()
	if err != nil {
		return err
	}
	if dev != in.device.dev {
		return fmt.Errorf("queue pair %d arrived on device %s, the others on %s", q, dev.Name(), in.device.dev.Name())
	}
	c := conn.Cookie(in.serial, q)
	id.SetCookie(c)
	qp, err := v.cm.CreateQP(id, dev, c, 0)
	if err != nil {
		return err
	}
	_, rx := v.cfg.RDMADepths()
	more := !h.native && q+1 < v.cfg.QPNum
	in.mu.Lock()
	if in.failed.Load() {
		err = fmt.Errorf("%w meanwhile", van.ErrClosed) // destroyInbound has read in.accept.ids
	} else if in.sends == nil {
		in.sends, err = conn.NewSendQueue[struct{}](dev, []verbs.QP{qp}, in.serial, rx, rx, verbs.RecvSize)
	}
	if err == nil {
		in.accept.ids, in.accept.requests = append(in.accept.ids, id), append(in.accept.requests, req)
		if h.qp == 0 && in.process.upProof.keys != nil {
			in.process.upProof.first = req // connect requests may arrive out of order
		}
		if more && in.accept.timer == nil {
			in.accept.timer = time.AfterFunc(v.times.allQueuePairs, in.acceptAll)
		}
	}
	in.mu.Unlock()
	if err != nil {
		v.cm.Release(dev)
		return err
	}
	if !more { // A StepMesh node counts resolved routes and answers with one counter: if an
		// answer arrives before all its queue pairs have sent their requests, it waits forever.
		in.acceptAll()
	}
	return nil
}

// acceptAll accepts the queue pairs whose connect requests have arrived.
func (in *inbound) acceptAll() {
	v, h := in.v, &in.handshake
	in.mu.Lock()
	first := in.accept.accepted == 0
	var failed error
	for failed == nil && in.accept.accepted < len(in.accept.ids) && !in.failed.Load() && !in.closed {
		mine := v.newHandshake(h.epoch)
		mine.qp = in.accept.accepted
		failed = in.accept.ids[in.accept.accepted].Accept(verbs.ConnParam{Private: answerData(v.secret.guard.Keys, &mine, in.accept.requests[in.accept.accepted], in.process.upProof.nonce), RetryCount: retryCount, RNRRetryCount: rnrRetryCount})
		in.accept.accepted++
	}
	in.mu.Unlock()
	if failed != nil {
		in.fail(failed) // destroys the IDs
		return
	}
	if first {
		v.log.Info("rdma: accepted", "node", h.node, "host", h.host, "port", h.port, "device", in.device.dev.Name(), "stepaf", h.native)
		v.owner.linkInbounds()
	}
}

// fail ends the connection.
func (in *inbound) fail(err error) {
	in.once.Do(func() {
		in.failed.Store(true)
		p := (*in.v.tables.peers.Load())[in.handshake.node]
		if p != nil && p.inbound.Load() != in {
			p = nil
		}
		in.v.wg.Go(func() { in.v.owner.destroyInbound(in, p, err) })
	})
}

// send posts b with imm on the connection's first queue pair. in.mu is held.
func (in *inbound) send(imm uint32, b []byte) {
	if in.closed || in.sends == nil {
		return
	}
	n := queuedSend{imm: imm, n: len(b)}
	copy(n.data[:], b)
	if in.backlog.Len() > 0 || !in.trySend(&n) {
		if in.backlog.Len() >= maxIndex {
			in.fail(fmt.Errorf("%w: it has not read %d replies", van.ErrMalformed, maxIndex))
			return
		}
		in.backlog.Put(n)
	}
}

func (in *inbound) trySend(n *queuedSend) bool {
	id, _, stage, ok := in.sends.Begin()
	if !ok {
		return in.sends.Broken // if broken, the message is lost with the connection
	}
	copy(stage, n.data[:n.n])
	in.sends.Add(id, 0, in.sends.Staged(&verbs.SendWR{Op: verbs.OpSendImm, Flags: verbs.Signaled, Imm: n.imm}, stage[:n.n]))
	if err := in.sends.Post(); err != nil {
		in.fail(asLost(err))
	}
	return true
}

// sendQueued sends the queued SENDs that now fit. in.mu is held.
func (in *inbound) sendQueued() {
	for in.backlog.Len() > 0 && in.trySend(&in.backlog.All()[0]) {
		in.backlog.Take()
	}
}

// returnCredit returns a slot to the peer, with the next message to it or at the next housekeeping.
func (in *inbound) returnCredit(l *receiveSlot) {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.returnCreditLocked(l)
}

// returnCreditLocked is returnCredit for callers that hold mu.
func (in *inbound) returnCreditLocked(l *receiveSlot) {
	if in.closed || !in.handshake.native || l == nil || in.v.budget.slots.Get(l.Index()) != l {
		return
	}
	if in.slots.reclaim.since != 0 {
		in.slots.reclaim.since = clock.Now() // the peer has used this slot until now
	}
	in.owed.credits = append(in.owed.credits, uint16(l.Index()))
	in.owed.count.Store(int32(len(in.owed.credits)))
	in.device.active.Add(&in.activeDue)
	if len(in.owed.credits) >= maxCredits || in.device.sleeping.Load() {
		in.sendCredits()
	}
}

// release drops a reference to l. The last one returns the slot to the peer, or frees its memory if the slot has ended.
func (in slotSet) release(l *receiveSlot) {
	in.mu.Lock()           // before Drop: otherwise reclaim could see an unused slot and disconnect the peer for not returning it
	last, free := l.Drop() // not l.Held: another reference may be dropped concurrently
	if last {
		in.returnCreditLocked(l)
	}
	in.mu.Unlock()
	if free {
		in.freeSlot(l)
	}
}

// takeCredits moves credits into t, the trailer of a message, and records them in c.
func (in *inbound) takeCredits(t *trailer, c *carriedCredits) {
	t.epoch, t.decoded = in.handshake.epoch, in.order.decoded.Load()
	if in.owed.count.Load() == 0 {
		return
	}
	in.mu.Lock()
	t.n = copy(t.credits[:], in.owed.credits)
	in.owed.credits = in.owed.credits[:copy(in.owed.credits, in.owed.credits[t.n:])]
	in.owed.count.Store(int32(len(in.owed.credits)))
	c.of, c.n = in, t.n
	for i, index := range t.credits[:t.n] {
		c.slots[i] = in.v.budget.slots.Get(uint32(index))
	}
	in.mu.Unlock()
}

// noteDecoded counts the messages that need no copy to receive buffers any more. The feed is held.
func (in *inbound) noteDecoded() {
	if len(in.slots.buffers) == 0 {
		return
	}
	n := in.order.messages
	if len(in.order.incomplete) > 0 {
		n = in.order.incomplete[0].number - 1
	}
	in.order.decoded.Store(n)
}

// sendCredits sends all credits. in.mu is held.
func (in *inbound) sendCredits() {
	for len(in.owed.credits) > 0 {
		var t trailer
		t.epoch, t.decoded = in.handshake.epoch, in.order.decoded.Load()
		t.n = copy(t.credits[:], in.owed.credits)
		in.owed.credits = in.owed.credits[:copy(in.owed.credits, in.owed.credits[t.n:])]
		var b [trailerLen]byte
		t.put(b[:])
		in.send(immCredits, b[:])
	}
	in.owed.count.Store(0)
}

// tick sends the credits that no message has carried since the last housekeeping, and checks a slot that may have been overwritten.
func (in *inbound) tick(now uint64) {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.sendCredits()
	slotSet{in}.checkOverwrite(now)
}

// probe probes the connection if it is idle.
func (in *inbound) probe(uint64) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.closed || in.failed.Load() {
		return
	}
	in.device.probes.Add(&in.probeDue)
	if in.sends != nil && in.sends.Idle() {
		if err := in.sends.Probe(); err != nil {
			in.fail(asLost(err))
		}
	}
}

func (in *inbound) name() string { return in.handshake.name() }

// handleSendCompletion handles the completion of a reply to a slot request, or of credits.
func (in *inbound) handleSendCompletion(c *verbs.Completion) {
	q, id := conn.RecordOf(c.ID)
	if c.Status != verbs.StatusOK {
		in.fail(statusError(c.Status, "answer to a rendezvous on queue pair", q))
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.sends == nil || in.closed {
		return
	}
	if c.Status != verbs.StatusOK {
		in.sends.Broken = true
		return // its memory may still be in use until FinishAll
	}
	in.sends.Complete(id)
	in.sendQueued()
}

// handleReceiveFailure counts a receive request that was flushed with its queue pair.
func (in *inbound) handleReceiveFailure(c *verbs.Completion) {
	_, q := conn.CookieOf(c.Cookie)
	in.fail(statusError(c.Status, "receive on queue pair", q))
	in.mu.Lock()
	qps := len(in.accept.ids)
	in.mu.Unlock()
	if int(in.drain.flushed.Add(1)) == qps*in.v.cm.RecvDepth {
		close(in.drain.drained)
	}
}

func (in *inbound) malformed(err error) { in.v.malformedFrom(in.name(), err) }
