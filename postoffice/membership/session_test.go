package membership

import (
	"fmt"
	"path/filepath"
	"reflect"
	"sort"
	"strconv"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/tests/vansession"
	"github.com/stepaf/stepaf-go/van"
)

// TestRecordedSessions feeds every node of every recorded session the messages that its C++ model received. Its
// control messages must equal those of the C++ node in content, order and timestamps, and its connections must be the
// same in the same order.
func TestRecordedSessions(t *testing.T) {
	paths, err := filepath.Glob("../../van/testdata/sessions/*.jsonl")
	if err != nil || len(paths) == 0 {
		t.Fatalf("no sessions: %v", err)
	}
	for _, p := range paths {
		s, err := vansession.Load(p)
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range s.Nodes {
			t.Run(fmt.Sprintf("%s/%s%d", s.Name, n.Role, n.ID), func(t *testing.T) { replay(t, s, n) })
		}
	}
}

type recorded struct {
	to   int
	meta van.Meta
}

type replayed struct {
	t        *testing.T
	m        *Machine
	now      time.Duration
	want     []recorded
	sent     int
	connects []string
}

func replay(t *testing.T, s *vansession.Session, node vansession.Node) {
	r := &replayed{t: t}
	channels := map[[2]int][]van.Meta{} // control messages on their way: {from, to}; 0 for no id
	var inputs []func()
	var wantConnects []string
	cfg := Config{NumWorkers: atoi(t, s.Env["DMLC_NUM_WORKER"]), NumServers: atoi(t, s.Env["DMLC_NUM_SERVER"]),
		GroupSize: atoi(t, s.Env["DMLC_GROUP_SIZE"])}
	if v := s.Env["PS_HEARTBEAT_INTERVAL"]; v != "" {
		cfg.HeartbeatInterval = time.Duration(atoi(t, v)) * time.Second
	}
	self := map[string]van.Node{}
	for _, e := range s.Events {
		e := e
		switch {
		case e.Type == vansession.Socket && e.What == "connect" && e.From == node.ID:
			if e.Addr != fmt.Sprintf("tcp://%s:%d", node.Hostname, node.Port) {
				wantConnects = append(wantConnects, e.Addr)
			}
		case e.Type == vansession.Send:
			var meta van.Meta
			if err := van.DecodeMeta(e.Frame("meta").Bytes, &meta); err != nil {
				t.Fatal(err)
			}
			from := e.From
			if !e.IDKnown {
				from = 0
			}
			channels[[2]int{from, e.To}] = append(channels[[2]int{from, e.To}], meta)
			if e.From == node.ID && controls(&meta) {
				r.want = append(r.want, recorded{e.To, meta})
			}
			if meta.Control.Cmd == van.AddNode && e.To == van.SchedulerID && e.From == node.ID {
				self[node.Role] = meta.Control.Nodes[0]
			}
		case e.Type == vansession.Recv && e.To == node.ID:
			from := e.From
			ch := channels[[2]int{from, e.To}]
			if len(ch) == 0 {
				t.Fatalf("event %d: nothing on its way from %d", e.Seq, from)
			}
			meta := ch[0]
			channels[[2]int{from, e.To}] = ch[1:]
			if !controls(&meta) {
				continue
			}
			if from == 0 {
				from = van.Empty
			}
			inputs = append(inputs, func() {
				if err := r.m.Step(r.now, from, &meta); err != nil {
					t.Errorf("event %d: %v", e.Seq, err)
				}
			})
		}
	}
	sort.SliceStable(r.want, func(i, j int) bool { return r.want[i].meta.Timestamp < r.want[j].meta.Timestamp })

	for _, n := range s.Nodes {
		if n.Role == "scheduler" {
			cfg.Scheduler = van.Node{Hostname: n.Hostname, Port: n.Port}
		}
	}
	cfg.Role = map[string]van.Role{"scheduler": van.Scheduler, "server": van.Server, "worker": van.Worker}[node.Role]
	cfg.Self = self[node.Role]
	m, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	r.m = m
	m.Start(0)
	r.drain()
	for _, in := range inputs {
		r.application()
		in()
		r.drain()
	}
	r.application()
	if r.sent != len(r.want) {
		t.Errorf("%d control messages, want %d", r.sent, len(r.want))
	}
	if r.sent == 0 {
		t.Error("no control messages at all")
	}
	if m.ID() != node.ID || !m.Ready() {
		t.Errorf("id %d, ready %t; want %d, true", m.ID(), m.Ready(), node.ID)
	}
	if !reflect.DeepEqual(r.connects, wantConnects) {
		t.Errorf("connects to %v, want %v", r.connects, wantConnects)
	}
}

// controls reports whether this package handles a message.
func controls(m *van.Meta) bool {
	switch m.Control.Cmd {
	case van.AddNode, van.Barrier, van.InstanceBarrier, van.Heartbeat:
		return true
	}
	return false
}

// application makes the next calls of the recorded node: barriers, and the timer's heartbeats.
func (r *replayed) application() {
	for r.m.Ready() && r.sent < len(r.want) && len(r.m.open) == 0 {
		switch w := r.want[r.sent].meta; {
		case w.Request:
			if _, err := r.m.Barrier(r.now, int(w.CustomerID), w.Control.BarrierGroup,
				w.Control.Cmd == van.InstanceBarrier); err != nil {
				r.t.Fatal(err)
			}
		case w.Control.Cmd == van.Heartbeat && r.m.sched == nil:
			r.beat()
		default:
			return
		}
		r.drain()
	}
	for r.m.Ready() && r.sent < len(r.want) && r.m.sched == nil && r.want[r.sent].meta.Control.Cmd == van.Heartbeat {
		r.beat()
		r.drain()
	}
}

func (r *replayed) beat() {
	next, ok := r.m.NextTick()
	if !ok {
		r.t.Fatal("no heartbeat is due")
	}
	r.now = next
	r.m.Tick(r.now)
}

func (r *replayed) drain() {
	for _, o := range r.m.Take() {
		switch o := o.(type) {
		case Connect:
			r.connects = append(r.connects, "tcp://"+o.Node.Addr())
		case Send:
			if r.sent >= len(r.want) {
				r.t.Fatalf("sent one more: %s to %d", o.Meta.String(), o.To)
			}
			w := r.want[r.sent]
			if got := overWire(r.t, &o.Meta); o.To != w.to || !same(got, w.meta) {
				r.t.Errorf("message %d\ngot  to %d: %+v\nwant to %d: %+v", r.sent, o.To, got, w.to, w.meta)
			}
			r.sent++
		case Failed:
			r.t.Error(o.Err)
		case Warning:
			r.t.Error(o.Text)
		}
	}
}

func overWire(t *testing.T, m *van.Meta) van.Meta {
	t.Helper()
	b, err := m.AppendTo(nil)
	if err != nil {
		t.Fatal(err)
	}
	var out van.Meta
	if err := van.DecodeMeta(b, &out); err != nil {
		t.Fatal(err)
	}
	return out
}

// same compares all but the trace, which the van stamps.
func same(a, b van.Meta) bool {
	for _, m := range []*van.Meta{&a, &b} {
		m.RequestTrace, m.ResponseTrace = van.Trace{}, van.Trace{}
	}
	return fmt.Sprintf("%+v", a) == fmt.Sprintf("%+v", b)
}

func atoi(t *testing.T, s string) int {
	t.Helper()
	n, err := strconv.Atoi(s)
	if err != nil {
		t.Fatal(err)
	}
	return n
}
