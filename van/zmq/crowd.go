package zmq

// How many connections strangers may have, and for how long. A connection costs a descriptor, and memory of libzmq, also
// when nothing arrives on it.

import (
	"cmp"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/van"
)

const (
	silentTime   = 10 * time.Second       // how long a connection may carry no message
	crowdLook    = time.Second            // between two looks for silent connections
	firstTime    = time.Second            // from a connection to its first message, when there are many connections
	crowdBase    = 256                    // connections that are not members', besides crowdNode for each node
	crowdNode    = 4                      // of the cluster: they are made before the table of nodes arrives
	crowdShare   = 4                      // of the descriptors that the process may have, one in crowdShare is for them
	failingPause = 100 * time.Millisecond // between two times that connections are ended since there is no descriptor left
)

// crowd bounds the connections that are not members'.
type crowd struct {
	most    int           // connections
	silent  time.Duration // silentTime, other than in tests
	failing time.Time     // when a connection could not be accepted last
	stop    chan struct{}
}

func newCrowd(n *shared) crowd {
	c := crowd{most: crowdBase + crowdNode*(n.cfg.NumWorkers+n.cfg.NumServers)*max(n.cfg.GroupSize, 1), silent: silentTime, stop: make(chan struct{})}
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err == nil && limit.Cur < math.MaxInt32 {
		c.most = min(c.most, max(int(limit.Cur)/crowdShare, 1))
	}
	return c
}

// strangers lists the connections that are not members'. Those come first that are to be ended first: without a message for
// firstTime, then the oldest. Some that may be those of C++ StepMesh members are left out: such a member opens a connection on which it may
// never send. g.mu is held.
func (g *guard) strangers() (all []stranger) {
	spare := map[netip.Addr]int{}
	for _, c := range *g.n.peers.Load() {
		if id := c.who.Load().id; c.incarnation == 0 && id > van.SchedulerID && !c.seen() {
			spare[addrOfNode(&c.peer)]++
		}
	}
	for fd, in := range g.conns {
		if in.member == nil && !in.ended && !in.gone {
			all = append(all, stranger{fd, in})
		}
	}
	due := time.Now().Add(-firstTime)
	kind := func(s stranger) int {
		if s.taken == 0 && s.since.Before(due) {
			return 0
		}
		return 1
	}
	slices.SortFunc(all, func(a, b stranger) int { return cmp.Or(cmp.Compare(kind(a), kind(b)), a.since.Compare(b.since)) })
	for i := len(all) - 1; i >= 0 && len(spare) > 0; i-- { // the youngest: others had the time to send
		if host := all[i].host; all[i].taken == 0 && spare[host] > 0 {
			spare[host]--
			all = slices.Delete(all, i, i+1)
		}
	}
	return all
}

// addrOfNode is the address of a node's record; it is not valid if the record has a name.
func addrOfNode(n *van.Node) netip.Addr {
	a, _ := netip.ParseAddr(n.Hostname)
	return a.Unmap()
}

// thin ends connections of strangers until there are as many as may be. g.mu is held.
func (g *guard) thin() {
	if len(g.conns) > g.crowd.most {
		g.turnOutBut(g.crowd.most, g.strangers(), fmt.Sprintf("more than %d connections are not members'", g.crowd.most))
	}
}

// turnOutBut ends connections of all until there are as many as most. Each one is of the host that has most then, so that a host
// with few keeps them. g.mu is held.
func (g *guard) turnOutBut(most int, all []stranger, why string) {
	of := map[netip.Addr]int{}
	for _, e := range all {
		of[e.host]++
	}
	for len(all) > most {
		next := slices.IndexFunc(all, func(e stranger) bool {
			for _, n := range of {
				if n > of[e.host] {
					return false
				}
			}
			return true
		})
		g.turnOut(all[next], why)
		of[all[next].host]--
		all = slices.Delete(all, next, next+1)
	}
}

// turnOut ends a connection of a stranger. g.mu is held.
func (g *guard) turnOut(e stranger, why string) {
	g.held -= e.held
	from := g.shut(e.fd, e.incoming)
	e.held, e.ended = 0, true
	if n, speak := g.lines.Next(); speak {
		g.n.log.Warn("ended the connection of a stranger, which is not a member of the cluster", "from", from, "why", why, "messages", e.taken > 0,
			"open for", time.Since(e.since).Round(time.Millisecond), "ended so far", n)
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
	all := g.strangers()
	if n, speak := g.full.Next(); speak {
		g.n.log.Error("a connection could not be accepted: the process has no descriptor left (ulimit -n)", "connections", len(g.conns),
			"not members'", len(all), "so far", n)
	}
	g.turnOutBut(len(all)/2, all, "no connection can be accepted: the process has no descriptor left")
}

// watchCrowd ends connections that carry no message for too long, until the guard is closed.
func (g *guard) watchCrowd() {
	tick := time.NewTicker(min(crowdLook, g.crowd.silent))
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
	g.mu.Lock()
	defer g.mu.Unlock()
	for fd, in := range g.conns {
		if in.gone || in.ended {
			if cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_COOKIE); err != nil || cookie != in.cookie {
				g.forget(fd, in)
			}
		}
	}
	all := g.strangers()
	for _, c := range *g.n.peers.Load() {
		if c.incarnation == 0 && c.who.Load().id > van.SchedulerID && len(all) < g.crowd.most/2 {
			return
		}
	}
	for _, e := range all {
		if e.taken == 0 && now.Sub(e.since) >= g.crowd.silent {
			g.turnOut(e, fmt.Sprintf("it sent no message within %s", g.crowd.silent))
		}
	}
}
