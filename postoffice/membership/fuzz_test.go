package membership

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/van"
)

// FuzzMachines lets the input choose the events in a small cluster: deliveries, losses, duplicates, nonsense, deaths,
// restarts, barriers. In every case: no machine panics, sends where it has no connection, sends a message that cannot
// be encoded, or has outputs after it failed; each barrier ends at most once; and no node is reported dead twice.
func FuzzMachines(f *testing.F) {
	for seed := range uint64(4) {
		f.Add(randomBytes(seed, 400))
	}
	f.Fuzz(func(t *testing.T, b []byte) { chaos(t, b, nil) })
}

func TestChaos(t *testing.T) {
	for seed := range uint64(400) {
		chaos(t, randomBytes(seed, 1500), nil)
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
}

func randomBytes(seed uint64, n int) []byte {
	r := rand.New(rand.NewPCG(seed, 2))
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return b
}

type input []byte

// pick takes a number below n from the input.
func (in *input) pick(n int) int {
	if len(*in) == 0 {
		return 0
	}
	v := int((*in)[0])
	*in = (*in)[1:]
	return v % n
}

// chaos passes a line about each event to log, if that is not nil.
func chaos(t *testing.T, b []byte, log func(line string)) {
	in := input(b)
	w := newWorld(t)
	w.verbose = log != nil
	w.log = func(format string, args ...any) {
		s := fmt.Sprintf(format, args...)
		if strings.Contains(s, "BUG") {
			t.Error(s)
		}
		if log != nil {
			log(s)
		}
	}
	checks := map[*testNode]*checker{}
	w.seen = func(n *testNode, o Output) {
		if checks[n] == nil {
			checks[n] = &checker{t: t, n: n, ended: map[int]bool{}, dead: map[int]bool{}}
		}
		checks[n].check(o)
		if s, ok := o.(Send); ok && log != nil {
			m, c := &s.Meta, &s.Meta.Control
			from, to := m.Incarnations()
			log(fmt.Sprint(m.Key, m.CustomerID, m.Request, from, to, c.BarrierGroup))
			for i := range c.Nodes {
				log(fmt.Sprint(c.Nodes[i].AuxID, c.Nodes[i].CustomerID, c.Nodes[i].Endpoint))
			}
		}
	}
	add := func(name string, cfg Config) {
		if _, err := w.add(name, cfg); err != nil {
			t.Fatal(err)
		}
	}
	const workers, servers = 2, 1
	cfg := func(role van.Role, addr string, rank int) Config {
		c := testConfig(role, workers, servers, addr, rank)
		c.HeartbeatInterval, c.HeartbeatTimeout = time.Second, 3*time.Second
		c.StartTimeout, c.StopTimeout = 30*time.Second, 10*time.Second
		return c
	}
	rank := in.pick(2) - 1
	add("sched", cfg(van.Scheduler, "", 0))
	add("w0", cfg(van.Worker, "10.0.0.1:1", rank))
	add("w1", cfg(van.Worker, "10.0.0.2:1", 2*rank+1))
	add("s0", cfg(van.Server, "10.0.0.3:1", rank))
	extra := 0
	if in.pick(2) == 0 {
		w.deliver(1<<30, nil)
	}
	for len(in) > 0 {
		n := w.nodes[in.pick(len(w.nodes))]
		switch op := in.pick(16); op {
		case 0, 1, 2, 3:
			w.deliver(1+in.pick(8), nil)
		case 4:
			if len(w.queue) > 0 { // lost or duplicated
				i := in.pick(len(w.queue))
				if in.pick(2) == 0 {
					w.queue = append(w.queue[:i:i], w.queue[i+1:]...)
				} else {
					w.queue = append(w.queue, w.queue[i])
				}
			}
		case 5:
			w.pass(time.Duration(in.pick(40))*100*time.Millisecond, in.pick(2) == 0)
		case 6:
			n.m.PeerLost(w.now, anyID(&in), errors.New("gone"))
		case 7:
			n.m.PeerBack(w.now, anyID(&in))
		case 8, 9:
			_, _ = n.m.Barrier(w.now, in.pick(3), in.pick(12)-1, in.pick(2) == 0)
		case 10:
			if in.pick(4) == 0 {
				_, _ = n.m.Finalize(w.now, 0)
			} else {
				n.m.CancelBarrier(in.pick(6))
			}
		case 11:
			if n.name == "sched" && extra < 8 && in.pick(4) == 0 { // is restarted
				extra++
				n.dead = true
				add("sched", cfg(van.Scheduler, "", 0))
			} else if n.name != "sched" && extra < 8 { // dies, and is perhaps replaced
				n.dead = true
				extra++
				role := []van.Role{van.Worker, van.Server}[in.pick(2)]
				port := 1 + in.pick(3)
				add(fmt.Sprintf("x%d", extra), cfg(role, fmt.Sprintf("10.0.0.%d:%d", 1+in.pick(3), port), in.pick(2)-1))
			}
		case 12:
			if len(w.queue) > 0 { // a node sends a nearly valid message
				p := &w.queue[in.pick(len(w.queue))]
				var meta van.Meta
				meta.CopyFrom(&p.meta)
				lie(&in, &meta)
				if to := w.at(p.to); to != nil {
					step(w, to, p.from, &meta)
				}
			}
		case 13:
			from := anyID(&in)
			meta := nonsense(&in)
			meta.SetIncarnations(n.m.Incarnation(from), n.m.table.own.Incarnation)
			step(w, n, from, meta)
		default:
			from := anyID(&in)
			step(w, n, from, nonsense(&in))
		}
		for _, n := range w.nodes {
			w.take(n)
		}
	}
	w.pass(time.Minute, true)
	for _, n := range w.nodes {
		w.log("%s: %s, dead %v", n.name, n.m.Report(w.now), n.m.DeadNodes(w.now, time.Second))
		for _, id := range n.m.KnownPeers() {
			if _, ok := n.m.Node(id); !ok {
				t.Errorf("%s: no record of peer %d", n.name, id)
			}
		}
	}
}

func step(w *world, n *testNode, from int, meta *van.Meta) {
	if err := n.m.Step(w.now, from, meta); err != nil {
		w.log("%s: dropped: %v", n.name, err)
	}
	w.take(n)
}

// lie changes one field, mostly to a value at the edge of the valid range.
func lie(in *input, m *van.Meta) {
	edges := []int{-2, -1, 0, 1, 2, 6, 7, 8, 9, 10, 11, 12, 13, van.Empty - 1, van.Empty, van.Empty + 1}
	edge := edges[in.pick(len(edges))]
	var n *van.Node
	if k := len(m.Control.Nodes); k > 0 {
		n = &m.Control.Nodes[in.pick(k)]
	}
	switch field := in.pick(14); {
	case field == 0:
		m.Timestamp = int32(edge)
	case field == 1:
		m.Timestamp += int32(in.pick(5)) - 2
	case field == 2:
		m.Control.BarrierGroup = edge
	case field == 3:
		m.CustomerID = int32(edge)
	case field == 4:
		m.Key = uint64(edge)
	case field == 5:
		m.Request = !m.Request
	case field == 6:
		m.Body = append(m.Body, " 8"...)
	case field == 7 && len(m.Body) > 0:
		m.Body = m.Body[:in.pick(len(m.Body))]
	case n == nil:
		m.Control.Cmd = van.Command(in.pick(11))
	case field == 8:
		n.ID = edge
	case field == 9:
		n.Role = van.Role(in.pick(6) - 1)
	case field == 10:
		n.AuxID = edge
	case field == 11:
		n.Port = []int{0, 1, 65535, 65536}[in.pick(4)]
	case field == 12:
		n.IsRecovery = !n.IsRecovery
	case field == 13:
		m.Control.Nodes = m.Control.Nodes[:in.pick(len(m.Control.Nodes))]
	}
}

func anyID(in *input) int {
	return []int{1, 8, 9, 10, 11, 13, -1, -2, van.Empty, 0, 77, 1 << 40}[in.pick(12)]
}

func nonsense(in *input) *van.Meta {
	var m van.Meta
	m.Reset()
	m.Control.Cmd = van.Command(in.pick(11))
	if in.pick(2) == 0 {
		m.Control.Cmd = []van.Command{van.AddNode, van.Barrier, van.InstanceBarrier, van.Heartbeat}[in.pick(4)]
	}
	m.Request = in.pick(2) == 0
	m.Timestamp = int32(in.pick(3)) - 1
	m.CustomerID = int32(in.pick(4)) - 1
	m.Control.BarrierGroup = in.pick(12) - 2
	for range in.pick(4) {
		m.Control.Nodes = append(m.Control.Nodes, van.Node{Role: van.Role(in.pick(5) - 1), ID: anyID(in),
			Hostname: fmt.Sprintf("10.0.0.%d", in.pick(4)), Port: in.pick(4), AuxID: in.pick(4) - 1,
			IsRecovery: in.pick(2) == 0, CustomerID: in.pick(2)})
	}
	switch in.pick(4) {
	case 0:
		m.Body = []byte([]string{"stepaf/1 dead 8 x", "stepaf/1 back 8", "stepaf/1 dead 9 y", "stepaf/1 barrier-failed 6 group z",
			"stepaf/1 barrier-failed 7 instance z", "stepaf/1 waiting w", "stepaf/1 error no", "stepaf/1 dead 99 x"}[in.pick(8)])
	case 1:
		for range in.pick(20) {
			m.Body = append(m.Body, byte(in.pick(256)))
		}
	}
	return &m
}

// checker checks the outputs of one machine.
type checker struct {
	t      *testing.T
	n      *testNode
	failed bool
	ended  map[int]bool
	dead   map[int]bool
}

func (c *checker) check(o Output) {
	if c.failed {
		c.t.Errorf("%s: %s after it failed", c.n.name, showOutput(o))
	}
	number := 0
	switch o := o.(type) {
	case Failed:
		c.failed = true
	case BarrierDone:
		number = o.Barrier
	case BarrierFailed:
		number = o.Barrier
		if o.Err == nil {
			c.t.Errorf("%s: barrier %d failed without an error", c.n.name, o.Barrier)
		}
	case PeerDead:
		if c.dead[o.ID] || !errors.Is(o.Cause, van.ErrPeerLost) {
			c.t.Errorf("%s: %s", c.n.name, showOutput(o))
		}
		c.dead[o.ID] = true
	case PeerAlive:
		if !c.dead[o.ID] {
			c.t.Errorf("%s: %s though it was not dead", c.n.name, showOutput(o))
		}
		delete(c.dead, o.ID)
	case PeerReplaced:
		delete(c.dead, o.ID)
	case Send:
		if err := o.Meta.Validate(); err != nil {
			c.t.Errorf("%s: %s: %v", c.n.name, showOutput(o), err)
		}
	}
	if number != 0 {
		if c.ended[number] {
			c.t.Errorf("%s: barrier %d ended twice", c.n.name, number)
		}
		c.ended[number] = true
	}
}
