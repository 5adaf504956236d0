package cluster

// Trials: attempts to reach the address of another node from this host.

import (
	"context"
	"log/slog"
	"net/netip"
	"time"

	"github.com/stepaf/stepaf-go/internal/hostaddr"
	"github.com/stepaf/stepaf-go/postoffice/membership"
	"github.com/stepaf/stepaf-go/van"
)

const (
	trialTime = 2500 * time.Millisecond // two attempts of TCP, and soon enough for a message within 5 s
	maxTrials = 32                      // concurrent trials
)

// trials makes the attempts of a node to reach addresses of others, and sends its replies to processes that have no id yet. If
// the van is no van.Prober, trials does neither.
type trials struct {
	van   van.Prober
	log   *slog.Logger
	stop  <-chan struct{} // closed when the node leaves
	slots chan struct{}   // has an element for each trial under way
}

func newTrials(n *Node) trials {
	p, _ := van.As[van.Prober](n.van)
	return trials{van: p, log: n.log, stop: n.stop, slots: make(chan struct{}, maxTrials)}
}

// try tries the address of a node and calls tried with the result and the address of this host, own by default,
// from which it was tried. It does not call tried if the node leaves meanwhile.
func (t *trials) try(other van.Node, own string, tried func(from string, err error)) {
	if t.van == nil {
		return
	}
	select {
	case t.slots <- struct{}{}:
		defer func() { <-t.slots }()
	case <-t.stop:
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), trialTime)
	defer cancel()
	go func() {
		select {
		case <-t.stop:
			cancel()
		case <-ctx.Done():
		}
	}()
	err := t.van.Probe(ctx, other)
	select {
	case <-t.stop:
		return
	default:
	}
	if to, err := netip.ParseAddr(other.Hostname); err == nil {
		if addr, _, ok := hostaddr.This().Toward(to); ok && !addr.IsLoopback() {
			own = addr.String()
		}
	}
	tried(own, err)
}

// reply sends a message of the machine to a process that has no id yet. sender is this node's id.
func (t *trials) reply(o membership.Reply, sender int) {
	if t.van == nil {
		return
	}
	msg := &van.Message{Meta: o.Meta, Sender: sender, Receiver: van.Empty}
	if err := t.van.Reply(o.Incarnation, msg); err != nil {
		t.log.Debug("no reply to a process that has registered", "err", err) // the process or its connection has ended
	}
}
