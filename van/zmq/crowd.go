package zmq

// Limits on the number and age of unauthenticated connections. Even an idle connection costs a descriptor and memory
// of libzmq.

import (
	"fmt"
	"math"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/van"
)

const (
	silentTime   = 10 * time.Second       // how long a connection may carry no message
	crowdLook    = time.Second            // between two checks for silent connections
	crowdBase    = 4096                   // unauthenticated connections of a kind: thousands of handshakes a second may be under way
	crowdNode    = 4                      // further ones for each node of the cluster: they are made before the table of nodes arrives
	crowdShare   = 8                      // each kind may use at most one in crowdShare of the process's descriptors
	failingPause = 100 * time.Millisecond // the shortest time between two rounds of closing connections because no descriptor is left
)

// crowd limits unauthenticated connections. Silent connections and connections that have sent a message have separate limits:
// neither kind can use up the other's.
type crowd struct {
	silent  connSet
	heard   connSet       // a message has arrived from them
	most    int           // the limit of connections of a kind
	limit   time.Duration // silentTime, except in tests
	failing time.Time     // the last time that a connection could not be accepted
	stop    chan struct{}
}

func newCrowd(n *shared) crowd {
	c := crowd{most: crowdBase + crowdNode*(n.cfg.NumWorkers+n.cfg.NumServers)*max(n.cfg.GroupSize, 1), limit: silentTime, stop: make(chan struct{})}
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err == nil && limit.Cur < math.MaxInt32 {
		c.most = min(c.most, max(int(limit.Cur)/crowdShare, 1))
	}
	return c
}

// place counts in by its present kind: silent, or has sent a message. If that kind then exceeds its limit, place closes
// one connection. The caller holds g.mu.
func (g *guard) place(in *incoming) {
	of := &g.crowd.silent
	if in.taken > 0 {
		of = &g.crowd.heard
	}
	if in.member != nil || in.ended || in.gone || in.line == of {
		return
	}
	in.uncount()
	of.add(in)
	if of.n > g.crowd.most {
		g.turnOutBut(g.crowd.most, of, fmt.Sprintf("more than %d connections are not members'", g.crowd.most))
	}
}

// originals counts, by host, the C++ StepMesh members that have not sent a message yet: such a member opens a connection on
// which it may never send.
func (g *guard) originals() map[netip.Addr]int {
	l := map[netip.Addr]int{}
	for _, c := range *g.n.peers.Load() {
		if id := c.who.Load().id; c.incarnation == 0 && id > van.SchedulerID && !c.seen() {
			l[addrOfNode(&c.peer)]++
		}
	}
	return l
}

// addrOfNode returns the address in a node's record. It is invalid if the record has a host name.
func addrOfNode(n *van.Node) netip.Addr {
	a, _ := netip.ParseAddr(n.Hostname)
	return a.Unmap()
}

// turnOutBut closes connections of s until at most most are left. Silent connections of hosts with C++ StepMesh members
// may exceed that number. The caller holds g.mu.
func (g *guard) turnOutBut(most int, s *connSet, why string) {
	var spare map[netip.Addr]int
	if s == &g.crowd.silent {
		spare = g.originals()
	}
	for s.n > most {
		in := s.next(spare)
		if in == nil {
			return
		}
		g.turnOut(in, why)
	}
}

// turnOut closes an unauthenticated connection and logs why. The caller holds g.mu.
func (g *guard) turnOut(in *incoming, why string) {
	from := g.shut(in)
	if n, speak := g.lines.Next(); speak {
		g.n.log.Warn("closed the connection of an unknown process, which is not a member of the cluster", "from", from, "why", why, "messages", in.taken > 0,
			"open for", time.Since(in.since).Round(time.Millisecond), "ended so far", n)
	}
}

// notAccepted reacts to a connection that could not be accepted because no descriptor is left. libzmq retries without a pause,
// so notAccepted closes half of the unauthenticated connections.
func (g *guard) notAccepted() {
	g.mu.Lock()
	defer g.mu.Unlock()
	now := time.Now()
	if now.Sub(g.crowd.failing) < failingPause {
		return
	}
	g.crowd.failing = now
	silent, heard := &g.crowd.silent, &g.crowd.heard
	if n, speak := g.full.Next(); speak {
		g.n.log.Error("a connection could not be accepted: the process has no descriptor left (ulimit -n)", "connections", len(g.conns),
			"not members'", silent.n+heard.n, "so far", n)
	}
	for _, s := range []*connSet{silent, heard} {
		g.turnOutBut(s.n/2, s, "no connection can be accepted: the process has no descriptor left")
	}
}

// watchCrowd closes connections that have been silent for too long. It returns when the guard is closed.
func (g *guard) watchCrowd() {
	tick := time.NewTicker(min(crowdLook, g.crowd.limit))
	defer tick.Stop()
	for {
		select {
		case <-g.crowd.stop:
			return
		case <-tick.C:
			g.lookAround(time.Now())
		}
	}
}

// lookAround closes connections that have been silent for too long, and forgets connections whose descriptors libzmq has closed. In a
// cluster with C++ StepMesh nodes, silent connections are closed only if there are many: a member may connect from another address
// than that of its record.
func (g *guard) lookAround(now time.Time) {
	for _, in := range g.due(now) {
		g.mu.Lock() // separately for each connection, so that messages can be counted in between
		switch {
		case in.line == &g.crowd.silent:
			g.turnOut(in, fmt.Sprintf("it sent no message within %s", g.crowd.limit))
		case g.conns[in.fd] == in && (in.gone || in.ended) && !in.is():
			g.forget(in)
		}
		g.mu.Unlock()
	}
	g.mu.Lock()
	g.pause()
	g.mu.Unlock()
}

// due lists the connections that have ended or have been silent for too long.
func (g *guard) due(now time.Time) (l []*incoming) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, in := range g.conns {
		if in.gone || in.ended {
			l = append(l, in)
		}
	}
	for _, c := range *g.n.peers.Load() {
		if c.incarnation == 0 && c.who.Load().id > van.SchedulerID && g.crowd.silent.n < g.crowd.most/2 {
			return l
		}
	}
	spare := g.originals()
	for host, conns := range g.crowd.silent.of {
		e := conns.Front()
		for left := conns.Len(); left > spare[host] && now.Sub(e.Value.(*incoming).since) >= g.crowd.limit; left-- {
			l = append(l, e.Value.(*incoming))
			e = e.Next()
		}
	}
	return l
}
