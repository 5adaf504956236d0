package membership

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/van"
)

// world is several machines and the network between them. Each connection is ordered, and lossless while both ends
// live. Messages to an address where no node listens yet are queued, as ZeroMQ does.
type world struct {
	now   time.Duration
	nodes []*testNode // in order of addition
	queue []packet    // on the wire, oldest first
	log   func(format string, args ...any)
	// verbose shows actions and messages, not only events.
	verbose bool
	seen    func(*testNode, Output) // if not nil, is called with every output

	processes uint32 // so far
}

type testNode struct {
	name  string
	addr  string
	m     *Machine
	conns map[int]testConn
	id    int // set by SetID
	dead  bool

	frozen bool
	busy   bool // frozen, except for its transport
}

type testConn struct {
	addr     string
	identity int // of the sender, as of the time of connecting
}

type packet struct {
	to   string // address
	from int
	name string // of the sender, for the log
	meta van.Meta
}

// foreign changes cfg to that of a C++ StepMesh node, for add.
func foreign(cfg Config) Config {
	cfg.Self.Endpoint = []byte("foreign")
	return cfg
}

func (w *world) add(name string, cfg Config) (*testNode, error) {
	if string(cfg.Self.Endpoint) == "foreign" {
		cfg.Self.Endpoint = nil
	} else if v, ok := van.ExtensionVersionOf(cfg.Self.Endpoint); !ok || v == van.ExtensionVersion { // else of another release
		w.processes++
		id, _ := cfg.Self.Extension()
		id.Incarnation = w.processes
		if id.Settings.Known {
			full := cfg
			full.GroupSize = max(cfg.GroupSize, 1) // as New takes it
			id.Settings.Workers, id.Settings.Servers = full.instances(van.Worker), full.instances(van.Server)
		}
		if cfg.Role == van.Scheduler && id.Cluster == 0 {
			id.Cluster = 1<<16 + w.processes
		}
		cfg.Self.Endpoint = id.Encode()
	}
	m, err := New(cfg)
	if err != nil {
		return nil, err
	}
	n := &testNode{name: name, addr: m.table.self.Addr(), m: m, conns: map[int]testConn{}, id: m.ID()}
	w.nodes = append(w.nodes, n)
	m.Start(w.now)
	w.take(n)
	return n, nil
}

func (w *world) node(name string) *testNode {
	for i := len(w.nodes) - 1; i >= 0; i-- { // the latest of that name
		if w.nodes[i].name == name {
			return w.nodes[i]
		}
	}
	return nil
}

// at returns the node that listens at an address.
func (w *world) at(addr string) *testNode {
	for i := len(w.nodes) - 1; i >= 0; i-- {
		if w.nodes[i].addr == addr && !w.nodes[i].dead {
			return w.nodes[i]
		}
	}
	return nil
}

// forVan reports whether the van performs o.
func forVan(o Output) bool {
	switch o.(type) {
	case Send, Connect, Disconnect, Rename, SetID:
		return true
	}
	return false
}

// take performs a node's actions and shows its outputs.
func (w *world) take(n *testNode) {
	for {
		out := n.m.Take()
		if len(out) == 0 {
			return
		}
		for _, o := range out {
			if w.seen != nil {
				w.seen(n, o)
			}
			if !forVan(o) || w.verbose {
				w.log("%s: %s", n.name, showOutput(o))
			}
			switch o := o.(type) {
			case Policies:
				n.m.PoliciesAre(w.now, o.Version, strings.Repeat("y", len(o.List)))
			case SetID:
				n.id = o.ID
			case Connect:
				n.conns[o.ID] = testConn{o.Node.Addr(), n.id}
			case Rename:
				n.conns[o.New] = n.conns[o.Old]
				delete(n.conns, o.Old)
			case Disconnect:
				delete(n.conns, o.ID)
			case Send:
				c, ok := n.conns[o.To]
				if o.To == n.id {
					c, ok = testConn{n.addr, n.id}, true
				}
				if !ok {
					w.log("%s: BUG: no connection to %d", n.name, o.To)
					continue
				}
				var copied van.Meta
				copied.CopyFrom(&o.Meta)
				w.queue = append(w.queue, packet{c.addr, c.identity, n.name, copied})
			}
		}
	}
}

// deliver delivers messages, also those that are sent in answer, as far as pick agrees and their receivers listen,
// until none is left or n messages were delivered.
func (w *world) deliver(n int, pick func(*packet) bool) (delivered int) {
	for delivered < n {
		i := slices.IndexFunc(w.queue, func(p packet) bool {
			return (pick == nil || pick(&p)) && (w.at(p.to) != nil && !w.at(p.to).frozen || w.gone(p.to))
		})
		if i < 0 {
			return delivered
		}
		p := w.queue[i]
		w.queue = slices.Delete(w.queue, i, i+1)
		to := w.at(p.to)
		if to == nil {
			continue // a dead process receives nothing
		}
		if w.verbose {
			w.log("%s -> %s: %s", p.name, to.name, showMeta(&p.meta))
		}
		if err := to.m.Step(w.now, p.from, &p.meta); err != nil {
			w.log("%s: dropped: %v", to.name, err)
		}
		w.take(to)
		delivered++
	}
	return delivered
}

// gone reports whether messages to addr are lost: the process that listened there is dead.
func (w *world) gone(addr string) bool {
	return w.at(addr) == nil && slices.ContainsFunc(w.nodes, func(n *testNode) bool { return n.addr == addr && n.dead })
}

// pass lets time pass; with deliver messages arrive at once.
func (w *world) pass(d time.Duration, deliver bool) {
	end := w.now + d
	for {
		if deliver {
			w.deliver(1<<30, nil)
		}
		next := end
		for _, n := range w.nodes {
			if t, ok := n.m.NextTick(); ok && !n.dead && !n.frozen {
				next = min(next, max(t, w.now))
			}
		}
		w.now = next
		for _, n := range w.nodes {
			if t, ok := n.m.NextTick(); ok && !n.dead && !n.frozen && t <= w.now {
				for _, id := range n.m.Silent(w.now) {
					if p := w.at(n.conns[id].addr); p != nil && p.busy {
						n.m.ProbeAnswered(w.now, id)
					}
				}
				n.m.Tick(w.now)
				w.take(n)
				if t2, ok := n.m.NextTick(); ok && t2 <= w.now {
					w.log("%s: BUG: Tick(%s) does not move NextTick", n.name, w.now)
					return
				}
			}
		}
		if w.now == end {
			if deliver {
				w.deliver(1<<30, nil)
			}
			return
		}
	}
}

func showOutput(o Output) string {
	switch o := o.(type) {
	case Send:
		return fmt.Sprintf("send to %d: %s", o.To, showMeta(&o.Meta))
	case Connect:
		return fmt.Sprintf("connect %d at %s", o.ID, o.Node.Addr())
	case Disconnect:
		return fmt.Sprintf("disconnect %d", o.ID)
	case Rename:
		return fmt.Sprintf("rename %d to %d", o.Old, o.New)
	case SetID:
		return fmt.Sprintf("set id %d", o.ID)
	case Assigned:
		s := fmt.Sprintf("ASSIGNED id=%d rank=%d", o.ID, o.Rank)
		if o.Recovery {
			s += " in place of a dead node"
		}
		return s
	case Ready:
		return "READY"
	case Waiting:
		return "WAITING " + o.Report.String()
	case BarrierDone:
		return fmt.Sprintf("BARRIER DONE %d", o.Barrier)
	case BarrierFailed:
		return fmt.Sprintf("BARRIER FAILED %d: %v", o.Barrier, o.Err)
	case PeerDead:
		return fmt.Sprintf("PEER DEAD %d: %v", o.ID, o.Cause)
	case PeerAlive:
		return fmt.Sprintf("PEER ALIVE %d", o.ID)
	case PeerReplaced:
		return fmt.Sprintf("PEER REPLACED %d by %s", o.ID, o.Node.Addr())
	case Failed:
		return fmt.Sprintf("FAILED %v", o.Err)
	case Warning:
		return "WARNING " + o.Text
	case Policies:
		return "POLICIES " + (&policies{version: o.Version, list: o.List}).text()
	}
	return fmt.Sprintf("%T", o)
}

func showMeta(m *van.Meta) string {
	s := fmt.Sprintf("%s ts=%d", m.Control.Cmd, m.Timestamp)
	switch m.Control.Cmd {
	case van.Barrier, van.InstanceBarrier:
		if m.Request {
			s += fmt.Sprintf(" request group=%d customer=%d", m.Control.BarrierGroup, m.CustomerID)
		} else {
			s += " release"
		}
	}
	if len(m.Body) > 0 {
		s += fmt.Sprintf(" %q", m.Body)
	}
	var nodes []string
	for i := range m.Control.Nodes {
		n := &m.Control.Nodes[i]
		r := fmt.Sprintf("%s %d %s", n.Role, n.ID, n.Addr())
		if n.ID == van.Empty {
			r = fmt.Sprintf("%s - %s aux=%d", n.Role, n.Addr(), n.AuxID)
		}
		if n.IsRecovery {
			r += " recovery"
		}
		nodes = append(nodes, r)
	}
	if len(nodes) > 0 {
		s += " [" + strings.Join(nodes, ", ") + "]"
	}
	return s
}

// newWorld makes a world that logs to t.
func newWorld(t testing.TB) *world { return &world{log: t.Logf} }
