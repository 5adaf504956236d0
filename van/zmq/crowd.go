package zmq

// How many connections strangers may have, and for how long. A connection costs a descriptor, and memory of libzmq, also
// when nothing arrives on it.

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
	crowdLook    = time.Second            // between two looks for silent connections
	crowdBase    = 4096                   // connections of a kind that are not members': thousands of handshakes a second may be under way; besides crowdNode for each node
	crowdNode    = 4                      // of the cluster: they are made before the table of nodes arrives
	crowdShare   = 8                      // of the descriptors that the process may have, one in crowdShare is for those of a kind
	failingPause = 100 * time.Millisecond // between two times that connections are ended since there is no descriptor left
)

// crowd bounds the connections that are not members', those of each kind by themselves: silent ones cost a process no place that has proved
// itself by a message, and those that send messages cost no place of a process that is still in the handshake.
type crowd struct {
	silent  strangers
	heard   strangers     // those that a message has arrived from
	most    int           // connections of a kind
	limit   time.Duration // silentTime, other than in tests
	failing time.Time     // when a connection could not be accepted last
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

// place counts in as what it is now, a silent connection or one that sends messages. If there are too many of that kind then, one is
// ended. g.mu is held.
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

// originals counts by host the members of C++ StepMesh that no message has arrived from: such a member opens a connection on which it
// may never send.
func (g *guard) originals() map[netip.Addr]int {
	l := map[netip.Addr]int{}
	for _, c := range *g.n.peers.Load() {
		if id := c.who.Load().id; c.incarnation == 0 && id > van.SchedulerID && !c.seen() {
			l[addrOfNode(&c.peer)]++
		}
	}
	return l
}

// addrOfNode is the address of a node's record; it is not valid if the record has a name.
func addrOfNode(n *van.Node) netip.Addr {
	a, _ := netip.ParseAddr(n.Hostname)
	return a.Unmap()
}

// turnOutBut ends connections of s until there are as many as most. Silent ones of hosts that have C++ StepMesh members
// may be more. g.mu is held.
func (g *guard) turnOutBut(most int, s *strangers, why string) {
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

// turnOut ends a connection of a stranger. g.mu is held.
func (g *guard) turnOut(in *incoming, why string) {
	from := g.shut(in)
	if n, speak := g.lines.Next(); speak {
		g.n.log.Warn("ended the connection of a stranger, which is not a member of the cluster", "from", from, "why", why, "messages", in.taken > 0,
			"open for", time.Since(in.since).Round(time.Millisecond), "ended so far", n)
	}
}

// notAccepted is told that a connection could not be accepted: no descriptor is left. libzmq tries again without a pause, so half of the
// strangers' connections make room.
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
	for _, s := range []*strangers{silent, heard} {
		g.turnOutBut(s.n/2, s, "no connection can be accepted: the process has no descriptor left")
	}
}

// watchCrowd ends connections that carry no message for too long, until the guard is closed.
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

// lookAround ends connections that carry no message for too long, and forgets those whose descriptors libzmq has closed. In a cluster with nodes
// of C++ StepMesh silent connections are ended only if there are many: one may be a member's that has another address than its record.
func (g *guard) lookAround(now time.Time) {
	for _, in := range g.due(now) {
		g.mu.Lock() // for each: messages arrive meanwhile
		switch {
		case in.line == &g.crowd.silent:
			g.turnOut(in, fmt.Sprintf("it sent no message within %s", g.crowd.limit))
		case g.conns[in.fd] == in && (in.gone || in.ended):
			if cookie, err := unix.GetsockoptUint64(in.fd, unix.SOL_SOCKET, unix.SO_COOKIE); err != nil || cookie != in.cookie {
				g.forget(in)
			}
		}
		g.mu.Unlock()
	}
	g.mu.Lock()
	g.pause()
	g.mu.Unlock()
}

// due lists the connections that have ended, or that carry no message for too long.
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
	for _, h := range g.crowd.silent.hosts {
		e := h.conns.Front()
		for left := h.conns.Len(); left > spare[h.addr] && now.Sub(e.Value.(*incoming).since) >= g.crowd.limit; left-- {
			l = append(l, e.Value.(*incoming))
			e = e.Next()
		}
	}
	return l
}
