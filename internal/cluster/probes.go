package cluster

// Probes: attempts to reach the address of another node from this host.

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
	probeTime = 2500 * time.Millisecond // two attempts of TCP, and early enough for a message within 5 s
	maxProbes = 32                      // concurrent probes
)

// probes performs the probes of a node, and sends its replies to processes that have no id yet. If the van is no
// van.Prober, it does neither.
type probes struct {
	prober  van.Prober
	log     *slog.Logger
	stop    <-chan struct{} // closed when the node leaves
	running chan struct{}   // has an element for each running probe
}

func newProbes(n *Node) probes {
	p, _ := van.As[van.Prober](n.transport.van)
	return probes{prober: p, log: n.log, stop: n.lifetime.stop, running: make(chan struct{}, maxProbes)}
}

// probe probes the address of a node. It calls probed with the result and the address of this host, own by default,
// from which the probe was made. It does not call probed if the node leaves meanwhile.
func (t *probes) probe(other van.Node, own string, tried func(from string, err error)) {
	if t.prober == nil {
		return
	}
	select {
	case t.running <- struct{}{}:
		defer func() { <-t.running }()
	case <-t.stop:
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), probeTime)
	defer cancel()
	go func() {
		select {
		case <-t.stop:
			cancel()
		case <-ctx.Done():
		}
	}()
	err := t.prober.Probe(ctx, other)
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
func (t *probes) reply(o membership.Reply, sender int) {
	if t.prober == nil {
		return
	}
	msg := &van.Message{Meta: o.Meta, Sender: sender, Receiver: van.Empty}
	if err := t.prober.Reply(o.Incarnation, msg); err != nil {
		t.log.Debug("no reply to a process that has registered", "err", err) // the process or its connection has ended
	}
}
