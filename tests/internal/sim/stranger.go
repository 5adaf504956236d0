package sim

// An unknown peer on the network that is no member. It knows all addresses, the name of the cluster and the scheduler's
// incarnation, but no incarnation of a worker or server, and listens nowhere. At random
// times it sends forged messages to any process. All promises of the checker must still hold.

import (
	"fmt"
	"hash/fnv"
	"net"
	"slices"
	"strconv"
	"time"

	"github.com/stepaf/stepaf-go/postoffice/membership"
	"github.com/stepaf/stepaf-go/tests/internal/sim/plan"
	"github.com/stepaf/stepaf-go/van"
)

// strangerPause is the longest time between two messages of the unknown peer.
const strangerPause = 100 * time.Millisecond

// stranger is an unknown peer, which sends until the cluster ends.
type stranger struct {
	c *cluster
	r stream
}

// strange reports whether there is an unknown peer. There is none in clusters with nodes of the original, whose messages prove nothing,
// nor with PS_RESEND, where places are given away without a proof.
func (c *cluster) strange() bool {
	return c.fabric == nil && len(c.plan.Cluster.Foreign) == 0 && !c.plan.Transport.Resend && !c.gentle && c.seed.of("stranger").chance(0.5)
}

// named reports whether the cluster has a name because there is an unknown peer. Some of its records then have none.
func (c *cluster) named() bool { return c.strange() && c.seed.of("named").chance(0.5) }

// haunt starts the unknown peer, if there is one.
func (c *cluster) haunt() {
	if c.strange() {
		s := &stranger{c: c, r: stream{s: c.seed.of("what the stranger says")}}
		s.again()
	}
}

func (s *stranger) again() {
	s.c.net.after(s.r.next().upTo(strangerPause)+time.Microsecond, func() {
		s.c.mu.Lock()
		over := s.c.over
		s.c.mu.Unlock()
		if !over {
			s.speak()
			s.again()
		}
	})
}

// pick is a number below n.
func (s *stranger) pick(n int) int { return int(s.r.next().share() * float64(n)) }

// incarnation is one that no process has.
func (s *stranger) incarnation() uint32 { return 0xeeee0000 + uint32(s.pick(1<<16)) }

// speak sends one message.
func (s *stranger) speak() {
	c := s.c
	c.mu.Lock()
	procs := slices.Clone(c.procs)
	scheduler := c.current["scheduler"]
	c.mu.Unlock()
	var to []*proc
	for _, p := range procs {
		if p.who != "scheduler" {
			to = append(to, p)
		}
	}
	if len(to) == 0 || scheduler == nil {
		return
	}
	p := to[s.pick(len(to))] // about whom, or to whom
	at := func() (host string, port int) {
		if v, ok := p.transportOf().(*node); ok {
			host, port = v.place()
		}
		if port == 0 || s.pick(3) == 0 {
			return "127.6.6.6", 1 + s.pick(60000) // no process listens there
		}
		if s.pick(2) == 0 {
			host = "::ffff:" + host
		}
		return host, port
	}
	cluster := uint32(0)
	if name := c.environ(scheduler)["STEPAF_CLUSTER_ID"]; name != "" {
		h := fnv.New32a()
		h.Write([]byte(name))
		cluster = h.Sum32()
	}
	record := func(id int, who uint32) van.Node {
		host, port := at()
		n := van.Node{Role: van.RoleOf(id), ID: id, Hostname: host, Port: port, Ports: []int32{int32(port)}, DevTypes: []int32{0}, DevIDs: []int32{0}, AuxID: van.RankOf(id)}
		if who != 0 {
			n.Endpoint = (&van.NodeExtension{Incarnation: who, Cluster: cluster}).Encode()
		}
		return n
	}
	id := idOf(p.who)
	m := &van.Message{}
	m.Reset()
	m.Timestamp = int32(s.pick(1 << 20))
	switch s.pick(7) {
	case 0: // a table of its own, as a scheduler of the original
		m.Control.Cmd = van.AddNode
		for _, other := range c.plan.Cluster.All() {
			if other == "scheduler" {
				continue
			}
			n := record(idOf(other), 0)
			if other == p.who {
				if v, ok := p.transportOf().(*node); ok {
					if host, port := v.place(); port != 0 {
						n.Hostname, n.Port = host, port
					}
				}
			}
			m.Control.Nodes = append(m.Control.Nodes, n)
		}
		s.send(p, van.SchedulerID, m)
	case 1: // the scheduler's words
		m.Control.Cmd = van.Heartbeat
		m.Body = []byte([]string{"stepaf/1 error go away", fmt.Sprintf("stepaf/1 dead %d it says so", id), "stepaf/1 down 8,9", "stepaf/1 register 0123456789abcdef", "stepaf/1 rejoin table"}[s.pick(5)])
		if s.pick(2) == 0 {
			m.SetIncarnations(s.incarnation(), s.incarnation())
		}
		s.send(p, van.SchedulerID, m)
	case 2: // the release of a barrier
		m.Control.Cmd, m.Key = van.InstanceBarrier, uint64(s.pick(100))
		s.send(p, van.SchedulerID, m)
	case 3: // a node that comes back to a scheduler that was started again
		who := s.incarnation()
		if cluster == 0 {
			cluster = 0xeeee // any
		}
		m.Control.Cmd, m.Control.Nodes = van.Heartbeat, []van.Node{record(id, who)}
		m.Key = uint64(s.pick(8))
		if s.pick(2) == 0 {
			m.Body = fmt.Appendf(nil, "stepaf/1 rejoin %016x", s.pick(1<<30))
		}
		m.SetIncarnations(who, s.incarnation())
		s.send(scheduler, id, m)
	case 4: // a registration. While nodes are missing it counts, like any registration.
		n := record(id, s.incarnation())
		if c.named() && s.pick(2) == 0 {
			n.Endpoint = nil
		}
		n.ID = van.Empty
		if s.pick(2) == 0 {
			n.AuxID = -1
		}
		m.Control.Cmd, m.Control.Nodes = van.AddNode, []van.Node{n}
		if s.pick(2) == 0 {
			m.Body = fmt.Appendf(nil, "stepaf/1 register %016x", s.pick(1<<30))
		}
		if isClosed(scheduler.started) && scheduler.err == nil {
			s.send(scheduler, van.Empty, m)
		}
	case 5: // a question
		host, port := at()
		if s.pick(3) == 0 {
			host = "0.0.0.0"
		}
		m.Control.Cmd = van.Heartbeat
		m.Body = membership.Question(s.incarnation(), net.JoinHostPort(host, strconv.Itoa(port)), "list")
		s.send(scheduler, van.Empty, m)
	case 6: // a barrier, as a member
		m.Control.Cmd, m.Control.BarrierGroup, m.Request = van.InstanceBarrier, van.AllNodes, true
		m.SetIncarnations(s.incarnation(), s.incarnation())
		s.send(scheduler, id, m)
	}
}

// idOf is the id of a worker or server.
func idOf(n plan.Node) int {
	if n.Role() == "worker" {
		return van.WorkerID(n.Rank())
	}
	return van.ServerID(n.Rank())
}

// send hands m to a process, as from sender, from a host that no process is on.
func (s *stranger) send(to *proc, sender int, m *van.Message) {
	v, ok := to.transportOf().(*node)
	if !ok {
		return
	}
	n := v.n
	n.mu.Lock()
	if v.frozen || v.dead || v.closed {
		n.mu.Unlock()
		return
	}
	n.noteMsg("stranger > "+v.name, "came", m)
	p := pack(m, sender, false)
	p.size = int64(m.PayloadLen()) + 300
	p.flow = &flow{c: &conn{n: n, ident: "stranger"}, bytes: p.size}
	p.msg.Sender, p.msg.Origin = sender, van.OriginOther
	v.take(p)
	n.mu.Unlock()
	v.ring()
}

func (p *proc) transportOf() transport {
	p.c.mu.Lock()
	defer p.c.mu.Unlock()
	return p.van
}

// place is where v listens; port is 0 before it does.
func (v *node) place() (host string, port int) {
	v.n.mu.Lock()
	defer v.n.mu.Unlock()
	return v.self.Hostname, v.self.Port
}
