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

// This file owns the making and the end of this node's connections to its peers.

// Times of making and ending a connection.
const (
	flushTime  = 2 * time.Second
	flushPause = 200 * time.Millisecond
	minBackoff = 10 * time.Millisecond
	maxBackoff = 1 * time.Second
)

// keepConnected keeps the connection of p: it makes it, and makes it again, until ctx ends.
func (p connector) keepConnected(ctx context.Context) {
	defer close(p.state.stopped)
	backoff, told, late := minBackoff, false, false
	for ctx.Err() == nil {
		p.mu.Lock()
		parts := p.state.detached && p.state.connectCount > 0 // before that, what was sent has not left
		p.mu.Unlock()
		if parts {
			<-ctx.Done()
			return
		}
		l, err := p.dial(ctx)
		if err != nil {
			if ctx.Err() != nil {
				return
			}
			if !told || p.v.cfg.PrintRDMALog {
				level := slog.LevelInfo
				if isSecretMismatch(err) {
					level = slog.LevelWarn // it does not pass by itself
				}
				p.v.log.Log(ctx, level, "rdma: no connection yet, trying again", "peer", p.name(), "err", err)
			}
			told = true
			if !late && (errors.Is(err, van.ErrTimeout) || errors.Is(err, syscall.ETIMEDOUT)) {
				late = true // once: a busy host is no lost peer
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
		backoff, told, late = minBackoff, false, false
		p.connected(l)
		select {
		case err = <-l.failed:
		case <-ctx.Done():
			err = nil
		}
		p.disconnected(l, err)
	}
}

// connected gives p a connection.
func (p connector) connected(l *link) {
	p.v.log.Info("rdma: connected", "peer", p.name(), "device", l.queue.Device.Name(), "qps", numbers(l.queue.QueuePairs), "inline", l.queue.Inline, "stepaf", l.native)
	p.notifying.Lock()
	p.mu.Lock()
	lost, in := p.state.lost, p.inbound.Load()
	same := p.state.process == 0 || l.process == 0 || p.state.process == l.process // a scheduler that was started again has its predecessor's address
	p.state.oneWay = p.state.lost && l.native && p.isMyServer() && p.hasConnected.Load() && !established(in)
	p.link, p.inboundDown, p.state.lost, p.state.queueForReconnect, p.state.connecting = l, nil, p.state.oneWay, false, false
	if lost && established(in) {
		p.confirmedSerial = in.serial // what was lost has been told
	}
	p.state.process = l.process
	p.remoteIncarnation.Store(l.process)
	p.state.connectCount++
	oneWay := p.state.oneWay
	p.mu.Unlock()
	if !same && !lost {
		p.v.notify(p.peer, false, fmt.Errorf("%w: another process answers there", van.ErrPeerLost)) // it knows nothing of this node
	}
	if !oneWay {
		p.v.notify(p.peer, true, nil) // before the peer may ask: what a lost peer asks for is dropped
	}
	p.notifying.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	l.probeDue.Run = func(now uint64, _ bool) bool { return p.probeLink(l, now) }
	l.device.probes.Add(&l.probeDue)
	// Messages that were sent before it was known which dialect the peer speaks.
	refused := p.sender.Disconnect(func(o *outgoing) bool { return l.dialect.check(o) == nil })
	if l.native {
		l.sendUp(lost && same)
	}
	p.sender.Connect(!l.native)
	p.pump()
	p.flush(false)
	for _, o := range refused {
		p.dropQueued(o, l.dialect.check(o))
	}
}

// sendUp tells the peer that this node takes the connection as established: replies to
// slot requests that the peer sends from now on will arrive.
func (l *link) sendUp(afterLoss bool) {
	if id, _, stage, ok := l.queue.Begin(); ok {
		says := byte(up)
		if afterLoss {
			says = upAfterLoss
		}
		l.queue.Record(id).Note.data = afterLoss // without it the peer would wait: a break is none of control messages only
		l.queue.Add(id, 0, l.queue.Staged(verbs.SendWR{Op: verbs.OpSendImm, Flags: verbs.Signaled, Imm: immUp}, stage[:copy(stage, l.upProof.encodeUp(says))]))
	}
}

// disconnected takes the connection from p and ends it. Without a cause p is no longer
// wanted.
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
	// Where only control messages were under way nothing is lost: they are sent again.
	quiet := cause != nil && l.numbered && len(p.pulls) == 0 && len(dropped) == 0 && !l.carriesData() && errors.Is(cause, errUnacknowledged)
	p.state.lost = p.state.lost || cause != nil && !quiet
	ups := p.state.connectCount
	p.mu.Unlock()
	if cause != nil {
		level := slog.LevelInfo // peers come and go
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
		time.AfterFunc(p.v.times.quiet, func() { p.notifyUnlessReconnected(ups, cause) })
	case cause != nil:
		p.notifying.Lock()
		defer p.notifying.Unlock()
		p.v.notify(p.peer, false, cause)
	}
}

// notifyUnlessReconnected tells that the connection is lost unless it has been made again since there were
// so many.
func (p connector) notifyUnlessReconnected(ups int, cause error) {
	p.notifying.Lock()
	defer p.notifying.Unlock()
	p.mu.Lock()
	lost := p.state.connectCount == ups && !p.state.lost && !p.state.ended
	p.state.lost = p.state.lost || lost
	p.mu.Unlock()
	if lost {
		p.v.notify(p.peer, false, cause)
	}
}

// resubmit lets the control messages among all, which may not have arrived, wait for the next
// connection, in their order. The peer knows them by their numbers.
func (p connector) resubmit(l *link, all []finished, wanted bool) {
	slices.SortFunc(all, func(x, y finished) int { return cmp.Compare(x.Note.seq, y.Note.seq) })
	p.mu.Lock()
	defer p.mu.Unlock()
	var kept []*outgoing
	for i := range all {
		switch o := all[i].Note.control; {
		case o == nil:
		case wanted && l.numbered && !p.state.ended:
			kept = append(kept, o)
		default:
			p.recycle(o)
		}
	}
	p.sender.Resubmit(kept)
}

// dropMessages is the end of messages that will not be sent.
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

// drainAndClose lets what was sent leave until ctx ends, then ends the connection.
func (p connector) drainAndClose(ctx context.Context) {
	tick := time.Tick(time.Millisecond)
	for !p.drained() {
		select {
		case <-tick: // completions of the last messages have no signal of their own
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

// drained tells whether everything has left.
func (p connector) drained() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.flush(false)
	if p.state.ended || p.state.lost && p.link == nil {
		return true // nothing, or nobody, to wait for
	}
	return p.sender.Waiting() == 0 && (p.link == nil || p.link.queue.Idle())
}

// awaitCompletions waits for the last completions of a connection that has been broken: they say
// what the peer has not received.
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

// destroyLink takes apart a connection of this node's, and returns what it held.
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
	l.queue.Each(l.markUncertain)
	all, uncertain := l.queue.FinishAll(), l.uncertain
	p.ending = nil
	p.mu.Unlock()
	_ = l.queue.Close()
	for _, in := range uncertain { // a slot that is given back twice would be overwritten
		in.fail(fmt.Errorf("%w: the other connection broke, and with it messages that gave back slots of this one", van.ErrPeerLost))
	}
	return all
}
