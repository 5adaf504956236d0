package rdma

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"syscall"
	"time"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// This file owns the life of this node's connections to its peers: connecting, reconnecting, and ending.

// Times of connecting and disconnecting.
const (
	flushTime  = 2 * time.Second
	flushPause = 200 * time.Millisecond
	minBackoff = 10 * time.Millisecond
	maxBackoff = 1 * time.Second
)

// keepConnected connects to the peer, and reconnects when the connection breaks, until ctx ends.
func (p connector) keepConnected(ctx context.Context) {
	defer close(p.state.stopped)
	backoff, logged, retried := minBackoff, false, false
	for ctx.Err() == nil {
		p.mu.Lock()
		detached := p.state.detached && p.state.connectCount > 0 // before the first connection, queued messages have not been sent yet
		p.mu.Unlock()
		if detached {
			<-ctx.Done()
			return
		}
		l, err := p.dial(ctx)
		if err != nil {
			if ctx.Err() != nil {
				return
			}
			if !logged || p.v.cfg.PrintRDMALog {
				level := slog.LevelInfo
				if isSecretMismatch(err) {
					level = slog.LevelWarn // a wrong secret needs an operator
				}
				p.v.log.Log(ctx, level, "rdma: no connection yet, trying again", "peer", p.name(), "err", err)
			}
			logged = true
			if !retried && (errors.Is(err, van.ErrTimeout) || errors.Is(err, syscall.ETIMEDOUT)) {
				retried = true // retry once: a busy host is not a lost peer
				continue
			}
			p.mu.Lock()
			p.state.lost = p.state.lost || p.state.connectCount > 0 && !p.state.queueForReconnect
			p.mu.Unlock()
			p.v.notify(p.peer, false, fmt.Errorf("no connection could be made: %w: %w", syscall.ECONNREFUSED, err))
			select {
			case <-time.After(backoff/2 + rand.N(backoff)):
			case <-ctx.Done():
				return
			}
			backoff = min(2*backoff, maxBackoff)
			continue
		}
		backoff, logged, retried = minBackoff, false, false
		p.connected(l)
		select {
		case err = <-l.failed:
		case <-ctx.Done():
			err = nil
		}
		p.disconnected(l, err)
	}
}

// connected makes l the connection of p.
func (p connector) connected(l *link) {
	p.v.log.Info("rdma: connected", "peer", p.name(), "device", l.queue.Device.Name(), "qps", numbers(l.queue.QueuePairs), "inline", l.queue.Inline, "stepaf", l.native)
	p.notifying.Lock()
	p.mu.Lock()
	lost, in := p.state.lost, p.inbound.Load()
	same := p.state.process == 0 || l.process == 0 || p.state.process == l.process // a restarted scheduler has its predecessor's address
	p.state.oneWay = p.state.lost && l.native && p.isMyServer() && p.hasConnected.Load() && !established(in)
	p.link, p.inboundDown, p.state.lost, p.state.queueForReconnect, p.state.connecting = l, nil, p.state.oneWay, false, false
	if lost && established(in) {
		p.confirmedSerial = in.serial // the loss that in would report has been notified already
	}
	p.state.process = l.process
	p.remoteIncarnation.Store(l.process)
	p.state.connectCount++
	oneWay := p.state.oneWay
	// Messages that were queued before the peer's dialect was known. Send checks others as soon as p.mu is released.
	for _, o := range p.sender.Disconnect(func(o *outgoing) bool { return l.dialect.check(o) == nil }) {
		p.dropQueued(o, l.dialect.check(o)) // notifies the watcher later: p.notifying is held
	}
	p.mu.Unlock()
	if !same && !lost {
		p.v.notify(p.peer, false, fmt.Errorf("%w: another process answers there", van.ErrPeerLost)) // the new process does not know this node
	}
	if !oneWay {
		p.v.notify(p.peer, true, nil) // before the peer sends requests: requests of a lost peer are dropped
	}
	p.notifying.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	l.probeDue.Run = func(uint64) { p.probeLink(l) }
	l.device.probes.Add(&l.probeDue)
	if l.native {
		l.sendUp(lost && same)
	}
	p.sender.Connect(!l.native)
	p.pump()
	p.flush()
}

// sendUp tells the peer that this node considers the connection established. Replies to slot requests that the peer sends from now on will
// be received.
func (l *link) sendUp(afterLoss bool) {
	if id, _, stage, ok := l.queue.Begin(); ok {
		state := byte(up)
		if afterLoss {
			state = upAfterLoss
		}
		l.queue.Record(id).Note.data = afterLoss // counts as data, so that a break now is reported: the peer waits for it
		l.queue.Add(id, 0, l.queue.Staged(&verbs.SendWR{Op: verbs.OpSendImm, Flags: verbs.Signaled, Imm: immUp}, stage[:copy(stage, l.upProof.encodeUp(state))]))
	}
}

// disconnected takes the broken link l from p and ends it. Without a cause, the connection is no longer wanted.
func (p connector) disconnected(l *link, cause error) {
	p.mu.Lock()
	p.link, p.ending, p.inboundDown, p.state.oneWay = nil, l, nil, false
	p.remoteIncarnation.Store(0)
	l.queue.Broken = true
	var dropped []*outgoing
	if cause != nil {
		dropped = p.sender.Disconnect(func(o *outgoing) bool { return o.oneShot })
	}
	inFlight := len(p.pulls) > 0 || !l.queue.Idle()
	// If only control messages were in flight, nothing is lost: they are sent again.
	quiet := cause != nil && l.numbered && len(p.pulls) == 0 && len(dropped) == 0 && !l.carriesData() && errors.Is(cause, errUnacknowledged)
	p.state.lost = p.state.lost || cause != nil && !quiet
	connectCount := p.state.connectCount
	p.mu.Unlock()
	if cause != nil {
		level := slog.LevelInfo // a peer may end at any time
		if inFlight || len(dropped) > 0 {
			level = slog.LevelWarn
		}
		p.v.log.Log(context.Background(), level, "rdma: the connection broke", "peer", p.name(), "err", cause, "dropped", len(dropped))
	}
	ended := p.destroyLink(l)
	p.resubmit(l, ended, cause != nil)
	p.finishAll(append(ended, p.dropMessages(dropped)...))
	switch {
	case quiet:
		time.AfterFunc(p.v.times.quiet, func() { p.notifyUnlessReconnected(connectCount, cause) })
	case cause != nil:
		p.notifying.Lock()
		defer p.notifying.Unlock()
		p.v.notify(p.peer, false, cause)
	}
}

// notifyUnlessReconnected notifies the watcher of the loss unless p has connected again, that is, unless its number of connections has changed
// from connectCount.
func (p connector) notifyUnlessReconnected(connectCount int, cause error) {
	p.notifying.Lock()
	defer p.notifying.Unlock()
	p.mu.Lock()
	lost := p.state.connectCount == connectCount && !p.state.lost && !p.state.ended
	p.state.lost = p.state.lost || lost
	p.mu.Unlock()
	if lost {
		p.v.notify(p.peer, false, cause)
	}
}

// resubmit queues the control messages in all, which may or may not have arrived, for the next connection, in their order. The peer drops
// repeated ones by their numbers.
func (p connector) resubmit(l *link, all []finished, wanted bool) {
	slices.SortFunc(all, func(x, y finished) int { return cmp.Compare(x.Note.seq, y.Note.seq) })
	p.mu.Lock()
	defer p.mu.Unlock()
	var resubmitted []*outgoing
	for i := range all {
		switch o := all[i].Note.control; {
		case o == nil:
		case wanted && l.numbered && !p.state.ended:
			resubmitted = append(resubmitted, o)
		default:
			p.recycle(o)
		}
	}
	p.sender.Resubmit(resubmitted)
}

// dropMessages recycles messages that will not be sent, and returns their completions.
func (p connector) dropMessages(all []*outgoing) (ended []finished) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, o := range all {
		ended = append(ended, finished{Note: sentMessage{done: o.done}})
		p.recycle(o)
	}
	return ended
}

func (p connector) finishAll(all []finished) {
	for i := range all {
		finishSent(&all[i])
	}
}

func numbers(qps []verbs.QP) []uint32 {
	var n []uint32
	for _, q := range qps {
		n = append(n, q.Num())
	}
	return n
}

// drainAndClose waits until queued messages have been sent or ctx ends, then ends the connection.
func (p connector) drainAndClose(ctx context.Context) {
	tick := time.Tick(time.Millisecond)
	for !p.drained() {
		select {
		case <-tick: // the last completions wake nobody, so check regularly
			continue
		case <-ctx.Done():
		case <-p.v.eventsEnded:
		}
		break
	}
	p.mu.Lock()
	p.state.ended = true
	dropped := p.sender.Disconnect(func(*outgoing) bool { return false })
	expected := p.pulls
	p.pulls = map[pullKey]pullDestination{}
	p.mu.Unlock()
	p.finishAll(p.dropMessages(dropped))
	for _, x := range expected {
		x.region.Release()
	}
	p.state.stop()
	<-p.state.stopped
}

// drained reports whether all messages have been sent.
func (p connector) drained() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.flush()
	if p.state.ended || p.state.lost && p.link == nil {
		return true // nothing can be sent any more
	}
	return p.sender.Waiting() == 0 && (p.link == nil || p.link.queue.Idle())
}

// awaitCompletions waits for the last completions of a broken connection. They say which messages the peer has not received.
func (p connector) awaitCompletions(l *link) {
	tick, limit := time.Tick(time.Millisecond), time.After(flushPause)
	for {
		p.mu.Lock()
		done := l.queue.Outstanding() <= 0
		p.mu.Unlock()
		if done {
			return
		}
		select {
		case <-tick:
		case <-limit:
			return
		case <-l.device.stopped:
			return
		}
	}
}

// destroyLink ends a connection of this node and returns its unfinished messages.
func (p connector) destroyLink(l *link) []finished {
	v := p.v
	for _, id := range l.ids {
		_ = id.Disconnect()
	}
	p.awaitCompletions(l)
	for _, id := range l.ids {
		_ = id.Destroy()
		v.cm.Release(l.queue.Device)
	}
	v.removeConn(l.epoch - v.local.epoch)
	p.mu.Lock()
	for i := range l.carried {
		l.markUncertain(&l.carried[i])
	}
	all, uncertain := l.queue.FinishAll(), l.uncertain
	p.ending = nil
	p.mu.Unlock()
	_ = l.queue.Close()
	for _, in := range uncertain { // returning a slot twice would let the peer overwrite it
		in.fail(fmt.Errorf("%w: the other connection broke with messages that returned slots of this one", van.ErrPeerLost))
	}
	return all
}
