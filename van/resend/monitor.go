package resend

// The goroutine that resends messages, or fails them after the last try.

import (
	"errors"
	"fmt"
	"time"

	"github.com/stepaf/stepaf-go/van"
)

// monitorRun resends what is due. It sleeps while no message is kept.
func (v *Van) monitorRun() {
	defer v.monitor.Done()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		v.mu.Lock()
		var due <-chan time.Time
		if v.first != nil {
			timer.Reset(time.Until(v.first.due))
			due = timer.C
		}
		v.mu.Unlock()
		select {
		case <-v.quit:
			return
		case <-v.wake:
		case <-due:
			v.retry(time.Now())
		}
	}
}

// retry resends, or fails, the entries due by now.
func (v *Van) retry(now time.Time) {
	for {
		v.mu.Lock()
		e := v.first
		if e == nil || e.due.After(now) {
			v.mu.Unlock()
			return
		}
		if e.tries >= v.opts.MaxTries {
			tries := e.tries
			next, _ := v.removeLocked(e)
			v.quiet[e.key.peer] = true
			addr := v.conns[e.key.peer]
			v.mu.Unlock()
			v.timedOut(e, tries, addr)
			v.launch(next)
			continue
		}
		v.unlinkLocked(e)
		v.scheduleLocked(e)
		tries := e.tries
		e.refs.Add(1)
		v.mu.Unlock()
		v.log.Warn("not acknowledged, sending again", "to", van.NodeName(e.key.peer), "try", tries,
			"after", now.Sub(e.start), "msg", (*metaString)(&e.msg.Meta))
		if err := v.transmit(e); err != nil && !errors.Is(err, van.ErrQueueFull) {
			if next, ok := v.remove(e); ok {
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
	v.log.Error("message given up", "err", err)
	peer := e.key.peer
	v.fail(e, err)
	if v.watch != nil {
		v.watch(peer, false, err)
	}
}
