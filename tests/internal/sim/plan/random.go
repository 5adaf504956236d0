package plan

import (
	"fmt"
	"math/rand/v2"
	"time"
)

// Random makes a plan from a seed: the same one for the same seed. It has a phase without
// faults, then one in which a few things go wrong, after each other or at once. The
// cluster can survive it: at no time is more than one part of the cluster gone forever.
func Random(seed uint64) *Plan {
	g := &generator{Rand: rand.New(rand.NewPCG(seed, 0x73746570))}
	return g.plan(seed)
}

type generator struct {
	*rand.Rand
	p        *Plan
	used     map[Node]bool // nodes with a story of their own
	duration time.Duration
}

func (g *generator) chance(p float64) bool { return g.Float64() < p }

// between is a duration from a to b, small ones more often.
func (g *generator) between(a, b time.Duration) Duration {
	x := g.Float64()
	return Duration(a + time.Duration(x*x*float64(b-a))).rounded()
}

// rounded drops digits without interest.
func (d Duration) rounded() Duration { return Duration(d.D().Round(10 * time.Microsecond)) }

func pick[T any](g *generator, l ...T) T { return l[g.IntN(len(l))] }

func (g *generator) plan(seed uint64) *Plan {
	g.p = &Plan{Name: fmt.Sprintf("random-%d", seed), About: "Made from a seed."}
	g.used = map[Node]bool{}
	p := g.p
	c := &p.Cluster
	c.Workers, c.Servers = 1+g.IntN(3), 1+g.IntN(2)
	c.API = pick(g, "tensor", "tensor", "python")
	if g.chance(0.08) {
		c.Workers, c.Servers, c.Group = 1, 1, 2
	}
	if seed%16 == 11 { // the meaning of the other seeds stays
		c.API = "kv"
	}
	c.PlainScheduler = c.API == "python" && seed%3 == 2
	c.Env = map[string]string{}
	if g.chance(0.4) {
		c.Env["PS_HEARTBEAT_INTERVAL"], c.Env["PS_HEARTBEAT_TIMEOUT"] = "1", "3"
	}
	c.FinalizeEarly = g.chance(0.3)
	c.LoopEnds = c.API == "python" && !c.FinalizeEarly && seed%2 == 1
	if c.API == "tensor" && g.chance(0.1) {
		for range 1 + g.IntN(2) {
			c.Foreign = append(c.Foreign, pick(g, c.All()[1:]...))
		}
	}
	g.transport()
	switch seed % 15 { // the meaning of seeds that have failed before stays
	case 0, 1, 13, 14:
		t := &p.Transport
		t.Backoff, t.Silence = true, Duration(10*time.Second)
		if c.Env["PS_HEARTBEAT_TIMEOUT"] != "" {
			t.Silence = Duration(3 * time.Second)
		}
	}
	g.duration = time.Duration(10+g.IntN(30)) * time.Second
	load := Load{Nodes: "workers", Every: g.between(20*time.Millisecond, 400*time.Millisecond), Size: MinSize << g.IntN(7), Pushes: 1 + g.IntN(3),
		Pulls: 1 + g.IntN(2), Window: 1 + g.IntN(4), Limit: g.between(500*time.Millisecond, 5*time.Second)}
	if g.chance(0.3) {
		load.Barrier = 4 + g.IntN(12)
	}
	calm := load
	calm.Limit = Duration(5 * time.Second)
	p.Phases = []Phase{
		{Name: "calm", For: Duration(time.Second), Loads: []Load{calm}},
		{Name: "faults", For: Duration(g.duration), Loads: []Load{load}},
	}
	if p.Transport.Break == 0 && p.Transport.Loss == 0 && c.API != "python" {
		p.Phases[0].Expect = []Expect{{Nodes: "workers", Rounds: "all"}}
	}
	for range 1 + g.IntN(3) {
		g.story()
	}
	g.name()
	return p
}

// name gives the cluster a name if so many nodes die that the others are too few for a
// restarted scheduler to recognize their cluster: the name lets it do so.
func (g *generator) name() {
	c := &g.p.Cluster
	dead := map[Node]bool{}
	for _, e := range g.p.Phases[1].Events {
		if e.Do == Kill {
			dead[e.Node] = true
		}
	}
	all := len(c.All()) - 1
	if dead["scheduler"] && 2*(all-(len(dead)-1)) < all {
		c.Env["STEPAF_CLUSTER_ID"] = "sim"
	}
}

func (g *generator) transport() {
	t := &g.p.Transport
	t.Delay, t.Jitter = g.between(20*time.Microsecond, 5*time.Millisecond), g.between(0, 5*time.Millisecond)
	switch g.IntN(10) {
	case 0, 1:
		t.Resend = true
		t.Loss, t.Duplicate = float64(g.IntN(5))/100, float64(g.IntN(5))/100
	case 2:
		t.Break = float64(1+g.IntN(10)) / 1000
	case 3:
		t.Bandwidth = int64(1+g.IntN(20)) << 20
	}
	t.Silence = Duration(time.Duration(10+g.IntN(20)) * time.Second)
}

func (g *generator) add(e Event) {
	ph := &g.p.Phases[1]
	if e.At.D() <= g.duration {
		ph.Events = append(ph.Events, e)
	}
}

// fresh chooses a worker or server that has no story yet.
func (g *generator) fresh(role string) (Node, bool) {
	var all []Node
	for _, n := range g.p.Cluster.All() {
		if n.Role() != "scheduler" && (role == "" || n.Role() == role) && !g.used[n] {
			all = append(all, n)
		}
	}
	if len(all) == 0 {
		return "", false
	}
	n := all[g.IntN(len(all))]
	g.used[n] = true
	return n, true
}

// Short is a time in which no node is taken for dead.
const Short = Duration(1500 * time.Millisecond)

// story is one fault and its consequences.
func (g *generator) story() {
	at := g.between(0, g.duration)
	c := &g.p.Cluster
	foreign := len(c.Foreign) > 0
	switch k := g.IntN(16); {
	case k < 5: // a process dies, and is mostly replaced
		n, ok := g.fresh("")
		if !ok {
			return
		}
		fork := g.chance(0.2) && !foreign
		if c.FinalizeEarly && (at.D() > g.duration-5*time.Second || fork) {
			return
		}
		g.add(Event{At: at, Do: Kill, Node: n, Fork: fork})
		if g.chance(0.8) || c.FinalizeEarly {
			wait := g.between(0, 5*time.Second)
			if fork {
				wait += Duration(12 * time.Second)
			}
			g.add(Event{At: at + wait, Do: Join, Node: n, NewHost: g.chance(0.3)})
		}
	case k < 8: // a process stops; sometimes another replaces it before it goes on
		n, ok := g.fresh("")
		if !ok {
			return
		}
		e := Event{At: at, Do: Stop, Node: n, For: g.between(100*time.Millisecond, 40*time.Second)}
		if g.chance(0.4) && !foreign && !c.FinalizeEarly {
			e.For = Duration(20*time.Second) + g.between(0, 10*time.Second)
			g.add(Event{At: at + Duration(16*time.Second) + g.between(0, 3*time.Second), Do: Join, Node: n})
		}
		if c.FinalizeEarly { // else it is dead, and the end fails because no process replaces it
			e.For = min(e.For, Short)
		}
		if foreign && g.p.Transport.Resend {
			// The timers of a stopped process run here: it would take its peers for dead,
			// and nothing tells a node without heartbeats that they live.
			e.For = min(e.For, Short)
		}
		g.add(e)
	case k < 10: // a partition
		e := Event{At: at, Do: Cut, Node: pick(g, c.All()...), For: g.between(100*time.Millisecond, 45*time.Second)}
		if peer := pick(g, c.All()...); g.chance(0.6) && peer != e.Node {
			e.Peer = peer
		}
		if c.FinalizeEarly {
			e.For = min(e.For, Short)
		}
		g.add(e)
	case k < 11:
		g.add(Event{At: at, Do: Break, Node: pick(g, c.All()...)})
	case k < 13: // the scheduler comes back
		if g.used["scheduler"] || foreign {
			return
		}
		g.used["scheduler"] = true
		g.add(Event{At: at, Do: Kill, Node: "scheduler"})
		g.add(Event{At: at + g.between(10*time.Millisecond, 8*time.Second), Do: Join, Node: "scheduler"})
	case k < 15:
		g.add(Event{At: at, Do: SlowHandler, Node: NodeOf("server", g.IntN(c.Servers*max(c.Group, 1))), For: g.between(100*time.Millisecond, 10*time.Second)})
	default: // all meet in a barrier
		if c.FinalizeEarly {
			return
		}
		for _, n := range c.All()[1:] {
			g.add(Event{At: at + g.between(0, 200*time.Millisecond), Do: Barrier, Node: n})
		}
	}
}
