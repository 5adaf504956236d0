package main

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/stepaf/stepaf-go/tests/internal/real"
	"github.com/stepaf/stepaf-go/tests/internal/sim/plan"
)

// generator makes a plan by chance.
type generator struct {
	r   *rand.Rand
	leg real.Leg
	p   *plan.Plan
}

func (g *generator) pick(words ...string) string { return words[g.r.IntN(len(words))] }

// between is a time from a to b milliseconds.
func (g *generator) between(a, b int) plan.Duration {
	return plan.Duration(time.Duration(a+g.r.IntN(b-a+1)) * time.Millisecond)
}

func (g *generator) plan(seed uint64) {
	c := &g.p.Cluster
	c.Workers, c.Servers = 1+g.r.IntN(3), 1+g.r.IntN(2)
	c.API, c.FinalizeEarly = g.pick("tensor", "tensor", "python"), g.r.IntN(2) == 0
	if g.r.IntN(3) > 0 { // else those of the defaults
		c.Env = map[string]string{"PS_HEARTBEAT_INTERVAL": "1"}
	}
	if g.r.IntN(5) == 0 {
		g.p.Transport.Resend = true
	}
	switch seed % 8 { // the meaning of the other seeds stays
	case 3:
		c.API = "kv"
	case 5:
		c.Workers, c.Servers, c.Group = 1+g.r.IntN(2), 1, 2
	case 7:
		if g.leg != real.RDMA {
			c.API = "tensor"
			for range 1 + g.r.IntN(2) {
				c.Foreign = append(c.Foreign, plan.Node(g.pick("worker 0", "server 0")))
			}
			slices.Sort(c.Foreign)
			c.Foreign = slices.Compact(c.Foreign)
		}
	}
	if seed%3 == 1 && len(c.Foreign) == 0 { // as does the choice by 8
		if c.Env == nil {
			c.Env = map[string]string{}
		}
		c.Env["STEPAF_SECRET"] = "the secret of every third cluster"
	}
	for i := range 1 + g.r.IntN(3) {
		g.phase(i)
	}
}

func (g *generator) phase(i int) {
	ph := plan.Phase{Name: fmt.Sprint("part ", i), For: g.between(2000, 8000)}
	l := plan.Load{Nodes: "workers", Every: g.between(0, 10), Size: plan.MinSize << g.r.IntN(12), Pushes: 1 + g.r.IntN(3), Pulls: 1 + g.r.IntN(3),
		Window: 1 + g.r.IntN(4), Limit: g.between(500, 4000)}
	if g.r.IntN(20) == 0 {
		l.Size = 4 << 20
	}
	if g.p.Cluster.API == "python" && g.r.IntN(2) == 0 {
		l.Window = 1
	}
	ph.Loads = append(ph.Loads, l)
	all := g.p.Cluster.All()
	foreign := len(g.p.Cluster.Foreign) > 0 // nodes that cannot tell a process from the one before it, nor greet a scheduler that came back
	length := int(ph.For.D() / time.Millisecond)
	for range g.r.IntN(4) {
		n := all[g.r.IntN(len(all))]
		at := g.between(0, length-1000)
		e := plan.Event{At: at, Node: n}
		switch g.r.IntN(8) {
		case 0, 1, 2:
			if foreign && n == "scheduler" {
				continue
			}
			e.Do, e.Fork = plan.Kill, g.r.IntN(4) == 0 && !foreign
			ph.Events = append(ph.Events, e, plan.Event{At: min(at+g.between(0, 3000), ph.For), Do: plan.Join, Node: n})
			continue
		case 3, 4:
			e.Do, e.For = plan.Stop, g.between(50, 8000)
			if foreign {
				e.For = min(e.For, plan.Short)
			} else if g.r.IntN(2) == 0 && n != "scheduler" { // and is replaced meanwhile
				ph.Events = append(ph.Events, plan.Event{At: min(at+g.between(3000, 5000), ph.For), Do: plan.Join, Node: n})
			}
		case 5:
			if n.Role() != "server" {
				continue
			}
			e.Do, e.For = plan.SlowHandler, g.between(50, 5000)
		case 6:
			if n == "scheduler" || foreign && g.p.Cluster.FinalizeEarly {
				// A server that is started again does not come to it: a node of the original would
				// wait there, and can ask for no other barrier meanwhile.
				continue
			}
			e.Do = plan.Barrier
			for _, other := range all {
				if other != "scheduler" && other != n {
					ph.Events = append(ph.Events, plan.Event{At: at, Do: plan.Barrier, Node: other})
				}
			}
		case 7:
			peer := all[g.r.IntN(len(all))]
			if g.leg != real.TCP || !real.Privileged() || peer == n {
				continue
			}
			e.Do, e.Peer, e.For = plan.Cut, peer, g.between(50, 6000)
		}
		ph.Events = append(ph.Events, e)
	}
	g.p.Phases = append(g.p.Phases, ph)
}
