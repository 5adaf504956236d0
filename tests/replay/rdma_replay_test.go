package replay

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/fakeverbs"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vansession"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/env"
	"github.com/stepaf/stepaf-go/van/rdma"
)

// rdmaScripts are the applications of the sessions over RDMA.
var rdmaScripts = map[string]script{
	"rdma_s1w1_batch": tensors(batches{{2, 1}}, small, 1000),
	"rdma_s2w2_batch": tensors(batches{{2, 1}}, small, 1000),
	"rdma_s1w1_kinds": tensors(batches{{1, 0}, {0, 1}, {1, 1}, {2, 0}, {0, 2}, {3, 2}}, small, 0),
	"rdma_s1w1_split": tensors(batches{{1, 1}}, big, 0),
}

// TestReplayRDMA plays the sessions over RDMA with one node being ours, and compares the
// work requests that it posts with those of the recorded one.
func TestReplayRDMA(t *testing.T) {
	t.Cleanup(func() {
		for name := range rdmaIntended {
			if _, ok := intendedSeen.Load(name); !ok && name != "probes" && !t.Failed() && !partial() {
				t.Errorf("difference %q was not seen", name)
			}
		}
	})
	for name := range rdmaScripts {
		s := loadRDMA(t, name)
		for _, inline := range []int{512, 256, 0} {
			for _, n := range s.Nodes {
				t.Run(fmt.Sprintf("%s/inline %d/%s%d", name, inline, n.Role, n.Rank), func(t *testing.T) {
					t.Parallel()
					r := newRDMARun(t, s, n, inline)
					r.play()
					r.compare()
				})
			}
		}
	}
}

// rdmaRun is one session played with one node being ours.
type rdmaRun struct {
	*run
	session  *rdmaSession
	messages []*rdmaMessage
	stack    *fakeverbs.Stack // of our node
	peers    map[int]*cppNode
	crash    bool // the recording ends without an end
	cancel   context.CancelFunc
	bound    chan struct{}
	open     map[int]int     // connections that a peer has opened to our node
	echo     map[request]ref // of requests, which answers repeat
	pending  []*rdmaMessage  // may come later, see late

	mu      sync.Mutex
	records []fakeverbs.Record
}

// ref is the fields of a request that its answer repeats.
type ref struct {
	addr   uint64
	option int32
}

func newRDMARun(t *testing.T, s *rdmaSession, self vansession.Node, inline int) *rdmaRun {
	net := fakeverbs.NewNet(func(c *fakeverbs.Config) { c.MaxInline = inline })
	t.Cleanup(func() { checkNet(t, net) })
	r := &rdmaRun{session: s, messages: s.messages(t), peers: map[int]*cppNode{}, open: map[int]int{}, echo: map[request]ref{},
		crash: s.Name == "rdma_s1w1_kinds", bound: make(chan struct{})}
	r.run = &run{t: t, session: &s.Session, self: self, script: rdmaScripts[s.Name],
		delivered: make(chan struct{}, 1024), actions: make(chan struct{}, 64), left: make(chan error, 1)}
	if r.crash {
		r.mend()
	}
	ctx, cancel := context.WithTimeout(context.Background(), 6*patience)
	r.cancel = cancel
	r.finalizes = &signal{Context: ctx, reached: make(chan struct{})}
	for _, n := range s.Nodes {
		if n.ID == self.ID {
			continue
		}
		id := van.Empty
		if n.ID == van.SchedulerID {
			id = n.ID
		}
		p := newCPP(t, net, netip.AddrPortFrom(netip.MustParseAddr(n.Hostname), uint16(n.Port)), roles[n.Role], id)
		p.stack.SetName(van.NodeName(n.ID))
		p.split = s.Env["STEPMESH_SPLIT_QP_LAG"] == "1"
		r.peers[n.ID] = p
	}
	r.stack = net.Stack(netip.MustParseAddr(self.Hostname))
	net.Trace(func(rec fakeverbs.Record) {
		if rec.Stack == r.stack {
			r.mu.Lock()
			r.records = append(r.records, rec)
			r.mu.Unlock()
		}
	})
	o := r.rdmaOptions()
	go func() { r.left <- r.live(ctx, o) }()
	t.Cleanup(func() {
		for _, p := range r.peers {
			p.die()
		}
		cancel()
		select {
		case <-r.left:
		case <-time.After(patience):
			t.Error("our node does not end")
		}
	})
	return r
}

var roles = map[string]van.Role{"scheduler": van.Scheduler, "server": van.Server, "worker": van.Worker}

// checkNet reports errors and leaks of net.
func checkNet(t testing.TB, net *fakeverbs.Net) {
	for _, err := range net.Errors() {
		t.Error(err)
	}
	for _, l := range net.Leaks() {
		t.Errorf("leaked: %s", l)
	}
	net.Close()
}

func (r *rdmaRun) rdmaOptions() postoffice.Options {
	root := r.session.node(van.SchedulerID)
	e := []string{"DMLC_ROLE=" + r.self.Role, "DMLC_PS_ROOT_URI=" + root.Hostname, fmt.Sprintf("DMLC_PS_ROOT_PORT=%d", root.Port),
		"BYTEPS_ENABLE_IPC=0"}
	for k, v := range r.session.Env {
		e = append(e, k+"="+v)
	}
	cfg, err := env.LoadFrom(env.FromList(e))
	must(r.t, err)
	if r.self.ID != van.SchedulerID {
		cfg.NodeRank, cfg.GPU, cfg.Port = r.self.Rank, 0, r.self.Port
	}
	cfg.Kubernetes = true // the host's addresses are not those of the network in memory
	level := slog.LevelError
	if testing.Verbose() {
		level = slog.LevelInfo
	}
	return postoffice.Options{
		Rand:   testcluster.Zero, // recorded timestamps begin at 0
		Config: cfg,
		Log:    slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level})),
		Van: func(o van.Options) (van.Van, error) {
			c := *o.Config
			c.Kubernetes = false
			o.Config = &c
			return &hosted{counted{rdma.NewOn(r.stack, o), r.delivered}, r.self.Hostname, r.bound}, nil
		},
	}
}

// hosted is a van whose host is not this one. It says when it listens: a
// node of the original that is rejected once never connects again.
type hosted struct {
	counted
	host  string
	bound chan struct{}
}

func (h *hosted) Bind(ctx context.Context, self van.Node) (int, error) {
	defer close(h.bound)
	return h.counted.Bind(ctx, self)
}

func (h *hosted) ChooseHost() (host, why string, err error) { return h.host, "the session's", nil }

// mend turns the session of a crash into one that could have gone on. In the recording the push
// with timestamp 10 came last, so that the server lost its batch. Our worker sends it in its
// place; our server waits for it. Its acknowledgement was not recorded.
func (r *rdmaRun) mend() {
	r.intended("order")
	find := func(from int, ts int32, what string) int {
		i := slices.IndexFunc(r.messages, func(m *rdmaMessage) bool { return !m.meta.IsControl() && m.from == from && m.meta.Timestamp == ts })
		if i < 0 {
			r.t.Fatalf("no %s with timestamp %d", what, ts)
		}
		return i
	}
	move := func(from, to int) {
		m := r.messages[from]
		r.messages = slices.Insert(slices.Delete(r.messages, from, from+1), to, m)
	}
	ack := *r.messages[find(8, 9, "acknowledgement")]
	ack.packed, ack.lines = slices.Clone(ack.packed), slices.Clone(ack.lines)
	push := r.messages[find(9, 10, "push")]
	copy(ack.packed[offTimestamp:][:4], push.packed[offTimestamp:])
	copy(ack.packed[offKey:][:16], push.packed[offKey:]) // and addr
	must(r.t, van.DecodeMeta(ack.packed, &ack.meta))
	r.messages = append(r.messages, &ack)
	switch r.self.ID {
	case 9:
		move(find(9, 10, "push"), find(9, 11, "pull"))
	case 8:
		for _, ts := range []int32{11, 12} {
			move(find(8, ts, "answer"), len(r.messages)-1)
		}
	}
}

// play goes through the recording.
func (r *rdmaRun) play() {
	first := r.firsts()
	for _, m := range r.messages {
		switch {
		case m.from == r.self.ID:
			if first(&message{meta: m.meta}) {
				r.actions <- struct{}{}
			}
			r.expectRDMA(m)
		case m.to == r.self.ID:
			r.deliverRDMA(m)
		}
	}
	if len(r.pending) > 0 {
		r.t.Fatalf("event %d: nothing follows %s", r.pending[0].seq, r.pending[0].meta.String())
	}
	for _, p := range r.peers {
		p.die()
	}
	if r.crash {
		r.cancel()
	}
	select {
	case err := <-r.left:
		r.left <- err
		if !r.crash {
			must(r.t, err)
		}
	case <-time.After(patience):
		r.t.Fatal("our node does not leave")
	}
	for _, p := range r.peers {
		p.nothing()
	}
}

// expectRDMA waits for a message of our node.
func (r *rdmaRun) expectRDMA(m *rdmaMessage) {
	if m.to == r.self.ID {
		must(r.t, r.expectOwn(&message{Event: &vansession.Event{Seq: m.seq}, meta: m.meta}))
		return
	}
	r.pending = append(r.pending, m)
	if late(&m.meta) {
		return
	}
	for _, m := range r.pending {
		got := r.comes(m)
		if !bytes.Equal(got.value, m.value) {
			r.t.Fatalf("event %d, %s: value %.32x... (%d bytes), want %.32x... (%d)", m.seq, m.meta.String(), got.value, len(got.value), m.value, len(m.value))
		}
		if got.meta.Request {
			r.echo[request{m.to, got.meta.Timestamp}] = ref{got.meta.Addr, got.meta.Option}
		} else if !got.meta.IsControl() {
			r.answer(m)
		}
	}
	r.pending = r.pending[:0]
}

// comes waits for a message of our node, which may have left before its message is read.
func (r *rdmaRun) comes(m *rdmaMessage) *cppMessage {
	left := r.left
	for {
		select {
		case got := <-r.peers[m.to].msgs:
			return got
		case err := <-left:
			left <- err
			if err != nil {
				r.t.Fatalf("event %d, %s: our node has left: %v", m.seq, m.meta.String(), err)
			}
			left = nil
		case <-time.After(patience):
			r.t.Fatalf("event %d, %s to %s: nothing comes", m.seq, m.meta.String(), van.NodeName(m.to))
		}
	}
}

// answer puts this run's address and key into an answer, as its request had them.
func (r *rdmaRun) answer(m *rdmaMessage) {
	peer := m.from
	if m.from == r.self.ID {
		peer = m.to
	}
	e, ok := r.echo[request{peer, m.meta.Timestamp}]
	if !ok {
		r.t.Fatalf("event %d: an answer without a request", m.seq)
	}
	c := slices.Clone(m.packed)
	le.PutUint64(c[offAddr:], e.addr)
	le.PutUint32(c[offOption:], uint32(e.option))
	m.packed = c
}

// deliverRDMA sends a recorded message to our node and waits until it has taken it.
func (r *rdmaRun) deliverRDMA(m *rdmaMessage) {
	p := r.peers[m.from]
	for ; r.open[m.from] <= m.flow; r.open[m.from]++ {
		r.openNext(m.from)
	}
	switch {
	case m.meta.IsControl():
		p.send(m.to, m.packed, nil)
	case !m.meta.Request:
		r.answer(m)
		if m.meta.Push {
			p.send(m.to, m.packed, nil)
		} else {
			p.send(m.to, m.packed, nil, le.AppendUint64(nil, m.meta.Key), m.value)
		}
	case m.meta.Push:
		r.echo[request{m.from, m.meta.Timestamp}] = ref{m.meta.Addr, m.meta.Option}
		p.send(m.to, m.packed, nil, le.AppendUint64(nil, m.meta.Key), m.value)
	default:
		into := make([]byte, m.meta.ValLen)
		p.send(m.to, m.packed, into, le.AppendUint64(nil, m.meta.Key), into)
		p.mu.Lock()
		r.echo[request{m.from, m.meta.Timestamp}] = ref{address(into), int32(p.regions[address(into)].mr.RKey())}
		p.mu.Unlock()
	}
	select {
	case <-r.delivered:
	case err := <-r.left:
		r.left <- err
		if err != nil {
			r.t.Fatalf("event %d: our node has left: %v", m.seq, err)
		}
	case <-time.After(patience):
		r.t.Fatalf("event %d: our node does not take %s from %s", m.seq, m.meta.String(), van.NodeName(m.from))
	}
}

// openNext makes a peer open its next connection to our node, as it did in the session.
func (r *rdmaRun) openNext(from int) {
	select {
	case <-r.bound:
	case <-time.After(patience):
		r.t.Fatal("our node does not listen")
	}
	p, k := r.peers[from], r.open[from]*qpCount
	for _, l := range r.session.lines {
		if l.CM == "rdma_connect" && l.Node == from && l.Peer == r.self.ID {
			if k--; k < 0 {
				p.mu.Lock()
				p.id = int(le.Uint32(l.bytes))
				p.mu.Unlock()
				p.connect(r.self.ID, netip.AddrPortFrom(netip.MustParseAddr(r.self.Hostname), uint16(r.self.Port)))
				return
			}
		}
	}
	r.t.Fatalf("%s has no connection %d", van.NodeName(from), r.open[from])
}

// partial tells whether only some tests were asked for.
func partial() bool { return strings.Contains(flag.Lookup("test.run").Value.String(), "/") }
