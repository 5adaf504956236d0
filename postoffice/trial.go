package postoffice

// Trials: whether the address of another node can be reached from here.

import (
	"context"
	"net/netip"
	"time"

	"github.com/stepaf/stepaf-go/internal/hostaddr"
	"github.com/stepaf/stepaf-go/postoffice/membership"
	"github.com/stepaf/stepaf-go/van"
)

const (
	trialTime = 2500 * time.Millisecond // two attempts of TCP, and soon enough for a message within 5 s
	maxTrials = 32                      // at a time
)

// try tries the address of a node, and tells the machine.
func (n *Node) try(other van.Node) {
	p, ok := van.As[van.Prober](n.van)
	if !ok {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), trialTime)
	defer cancel()
	select {
	case n.trials <- struct{}{}:
		defer func() { <-n.trials }()
	case <-n.stop:
		return
	}
	go func() {
		select {
		case <-n.stop:
			cancel()
		case <-ctx.Done():
		}
	}()
	err := p.Probe(ctx, other)
	select {
	case <-n.stop:
		return
	default:
	}
	from := n.self.Hostname
	if to, err := netip.ParseAddr(other.Hostname); err == nil {
		if addr, _, ok := hostaddr.This().Toward(to); ok && !addr.IsLoopback() {
			from = addr.String()
		}
	}
	n.step(func(t time.Duration) { n.machine.Tried(t, &other, from, err) })
}

// reply sends what the machine says to a process that has no id yet.
func (n *Node) reply(o membership.Reply) {
	p, ok := van.As[van.Prober](n.van)
	if !ok {
		return
	}
	msg := &van.Message{Meta: o.Meta, Sender: int(n.id.Load()), Receiver: van.Empty}
	if err := p.Reply(o.Incarnation, msg); err != nil {
		n.log.Debug("no reply to a process that has registered", "err", err) // it has gone, or its connection has
	}
}
