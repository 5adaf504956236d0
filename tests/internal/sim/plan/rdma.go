package plan

import (
	"slices"
	"time"
)

// OverRDMA is the plan over RDMA instead of TCP, without what devices in memory cannot do: bandwidth, full
// queues, loss, connections that break, slow links, children that keep sockets open, nodes of the original.
// Loads leave a moment between calls, as each costs more than over TCP.
func (p *Plan) OverRDMA() *Plan {
	q := *p
	q.Name += "-over-rdma"
	q.Transport = Transport{Kind: "rdma", Delay: p.Transport.Delay, Jitter: p.Transport.Jitter}
	q.Cluster.Foreign = nil
	q.Phases = slices.Clone(p.Phases)
	for i := range q.Phases {
		ph := &q.Phases[i]
		ph.Loads = slices.Clone(ph.Loads)
		for j := range ph.Loads {
			ph.Loads[j].Every = max(ph.Loads[j].Every, Duration(2*time.Millisecond))
		}
		ph.Events = slices.DeleteFunc(slices.Clone(ph.Events), func(e Event) bool { return e.Do == Break || e.Do == SlowLink })
		for j := range ph.Events {
			ph.Events[j].Fork = false
		}
	}
	return &q
}

// RandomOverRDMA makes a plan over RDMA from a seed. A cluster whose scheduler and half of whose nodes die has
// a name: without one the scheduler that is started again waits until all the dead are replaced, and one that
// only the end of the plan replaces may come too late.
func RandomOverRDMA(seed uint64) *Plan {
	p := Random(seed).OverRDMA()
	dead := map[Node]bool{}
	for _, e := range p.Phases[1].Events {
		if e.Do == Kill {
			dead[e.Node] = true
		}
	}
	if dead["scheduler"] && 2*(len(dead)-1) >= len(p.Cluster.All())-1 {
		p.Cluster.Env["STEPAF_CLUSTER_ID"] = "sim"
	}
	return p
}
