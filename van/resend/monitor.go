package resend

// The goroutine that resends messages, or fails them after the last try.

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/stepaf/stepaf-go/van"
)

// monitorRun resends messages that are due. It sleeps while no message is kept.
func (v *Van) monitorRun() {
	defer v.monitor.Done()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		v.kept.mu.Lock()
		var due <-chan time.Time
		if v.kept.first != nil {
			timer.Reset(time.Until(v.kept.first.due))
			due = timer.C
		}
		v.kept.mu.Unlock()
		select {
		case <-v.quit:
			return
		case <-v.kept.wake:
		case <-due:
			v.retry(time.Now())
		}
	}
}

// retry resends, or fails, the entries due by now.
func (v *Van) retry(now time.Time) {
	for {
		v.kept.mu.Lock()
		e := v.kept.first
		if e == nil || e.due.After(now) {
			v.kept.mu.Unlock()
			return
		}
		if e.tries >= v.opts.MaxTries && !e.probe {
			tries, peer := e.tries, e.key.peer
			next, _ := v.kept.removeLocked(e)
			addr := v.kept.conns[peer]
			v.kept.mu.Unlock()
			v.timedOut(e, tries, addr)
			v.launch(next)
			v.sendProbe(peer) // earlier messages of the peer do not show that it is alive
			continue
		}
		v.kept.unlinkLocked(e)
		v.kept.scheduleLocked(e)
		v.kept.sending[e]++
		tries := e.tries
		e.refs.Add(1)
		v.kept.mu.Unlock()
		n, show, level := uint64(0), true, slog.LevelDebug
		if !e.probe { // many messages are late if a peer is suspended
			n, show = v.again.Next()
			level = slog.LevelWarn
		}
		if show {
			v.log.Log(context.Background(), level, "not acknowledged, sending again", "to", van.NodeName(e.key.peer), "try", tries,
				"after", now.Sub(e.start), "msg", &e.msg.Meta, "so far", n)
		}
		if err := v.transmit(e); err != nil && !errors.Is(err, van.ErrQueueFull) && !e.outlasts(err) {
			if next, ok := v.kept.remove(e); ok {
				v.fail(e, err)
				v.launch(next)
			}
		}
		e.release()
	}
}

func (v *Van) timedOut(e *entry, tries int, addr string) {
	err := &van.Error{Op: "resend", Node: van.NodeName(int(v.id.Load())), Peer: van.NodeName(e.key.peer) + " at " + addr,
		Detail:  fmt.Sprintf("not acknowledged in %d tries: %s", tries, e.msg.Meta.String()),
		Elapsed: time.Since(e.start), Limit: time.Duration(tries) * v.opts.Timeout, Err: van.ErrTimeout}
	v.log.Error("message failed: not acknowledged", "err", err)
	peer := e.key.peer
	v.fail(e, err)
	if v.watch != nil {
		v.watch(peer, false, err)
	}
}

// sendProbe sends a probe to a peer after a message to it has timed out, and repeats it until the peer
// acknowledges it: no other message may be sent to a peer that counts as lost. A probe is a heartbeat without
// records, which only the scheduler evaluates. The scheduler gets other heartbeats.
func (v *Van) sendProbe(peer int) {
	var m van.Message
	m.Reset()
	m.Receiver, m.Timestamp, m.Control.Cmd = peer, 0, van.Heartbeat
	self := int(v.id.Load())
	if v.kept.mu.Lock(); v.kept.closed {
		v.kept.mu.Unlock()
		return
	}
	v.kept.unresponsive[peer] = true
	v.kept.anyUnresponsive.Store(true)
	probed := v.kept.byKey[key{peer, signature(&m.Meta, self, peer)}] != nil
	v.kept.mu.Unlock()
	if probed || !isProbe(&m, peer, self) {
		return
	}
	if err := v.Send(&m); err != nil {
		v.log.Debug("no probe sent", "to", van.NodeName(peer), "err", err)
	}
}

// received records a message of a peer. If messages to the peer had timed out, it is reported as up again.
func (v *Van) received(peer int) {
	if v.kept.responded(peer) && v.watch != nil {
		v.watch(peer, true, nil)
	}
}
