package cluster

// The application of the scheduler's policies on a node.

import (
	"github.com/stepaf/stepaf-go/postoffice/membership"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/stack"
)

// applyPolicies puts the policies in force, in place of the earlier ones, and returns a membership.State for each.
func (n *Node) applyPolicies(list []membership.Policy) string {
	rates := stack.Rates{Peers: map[int]int64{}, Apps: map[int32]int64{}}
	classes, orders := map[int]int{}, map[int32]string{}
	for _, p := range list {
		switch {
		case p.Peer == 0:
			if p.Rate > 0 {
				rates.Apps[p.App] = p.Rate
			}
			if p.Order != "" {
				orders[p.App] = p.Order
			}
		case p.Peer != n.ID():
			if p.Rate > 0 {
				rates.Peers[p.Peer] = p.Rate
			}
			if p.Class > 0 {
				classes[p.Peer] = p.Class - membership.Class0
			}
		}
	}
	n.transport.stack.SetRates(rates)
	n.apps.orders.Store(&orders)
	marker, marks := van.As[van.TrafficClassSetter](n.transport.van)
	if marks {
		marker.SetTrafficClasses(classes)
	}
	states := make([]byte, len(list))
	for i, p := range list {
		_, connected := n.peers.Load(p.Peer)
		s := membership.InForce
		switch {
		case p.Peer == n.ID(), p.Peer != 0 && !connected:
			s = membership.NotApplicable
		case p.Peer == 0 && !n.apps.has(p.App):
			s = membership.Pending
		case p.Class == 0:
		case !marks:
			s = membership.Unsupported
		default:
			if now, ever := marker.TrafficClassApplied(p.Peer); !ever {
				s = membership.Unsupported
			} else if !now {
				s = membership.Pending
			}
		}
		states[i] = byte(s)
	}
	return string(states)
}

// Order is the order that a policy has set for a communicator's application, "" if none has.
func (a App) Order(app int) string {
	if o := a.apps.orders.Load(); o != nil {
		return (*o)[int32(app)]
	}
	return ""
}

// has reports whether this node has an application.
func (a *apps) has(app int32) bool {
	for k := range *a.table.Load() {
		if k.app == app {
			return true
		}
	}
	return false
}
