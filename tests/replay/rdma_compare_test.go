package replay

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/stepaf/stepaf-go/tests/fakeverbs"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// rdmaMasks are the bytes in which our node's work requests may differ from the
// recorded ones, besides those of dontCare in metas.
var rdmaMasks = []struct {
	kind, name, why string
	off, len        int
	only            func(want []byte) bool // nil: always
	zero            bool                   // it must be zero where the recorded one is, and only there
}{
	{kind: kindStart, name: "origin_addr", why: "the sender's handle, which comes back in the reply", off: 48, len: 8},
	{kind: kindStart, name: "data_len[0]", why: "left over when data_num is 0", off: 16, len: 8, only: arrays(0)},
	{kind: kindStart, name: "data_len[1]", why: "left over when data_num is 0", off: 24, len: 8, only: arrays(1)},
	{kind: kindStart, name: "data_len[2]", why: "left over when data_num is less than 3", off: 32, len: 8, only: arrays(2)},
	{kind: kindStart, name: "data_len[3]", why: "left over: no message has 4 arrays", off: 40, len: 8, only: arrays(3)},
	{kind: kindReply, name: "meta_addr", why: "an address of the run", off: 0, len: 8, zero: true},
	{kind: kindReply, name: "meta_rkey", why: "a key of the run", off: 8, len: 4, zero: true},
	{kind: kindReply, name: "data_addr", why: "an address of the run", off: 16, len: 8, zero: true},
	{kind: kindReply, name: "data_rkey", why: "a key of the run", off: 24, len: 4, zero: true},
	{kind: kindReply, name: "origin_addr", why: "the asker's handle; it checks it", off: 32, len: 8},
	{kind: kindReply, name: "idx", why: "an index of the run; the asker checks its range and what arrives under it", off: 40, len: 4},
	{kind: kindMeta, name: "option of a pull request", why: "a key of the run", off: offOption, len: 4, zero: true, only: func(want []byte) bool {
		return want[32] == 1 && want[68] == 0 && le.Uint32(want[8:]) == 0
	}},
}

// arrays tells whether a rendezvous start has no array i.
func arrays(i uint64) func([]byte) bool {
	return func(want []byte) bool { return le.Uint64(want[8:]) <= i }
}

// rdmaIntended lists the intended differences of our node from the original, besides
// dontCare, repairs and late. TestReplayRDMA fails when one of them is
// not seen, but probes, which are sent by the clock.
var rdmaIntended = map[string]string{
	"private data": "16 bytes more, by which nodes of this library know each other; the original reads 24",
	"retry_count":  "6 instead of 7, which is for ever on some devices, so that a write to a dead peer would not fail",
	"recv_wr":      "rx_depth/QP_NUM for each queue pair, which is what the original posts, too; it asks for rx_depth",
	"itself":       "no connection of a node to itself: what it has to say to itself stays inside",
	"order":        "is kept in a batch with new and known keys; the original's server crashes over it",
	"moved tensor": "is sent from where it is; the original sends what lies where the first one of the key lay",
	"inline":       "whatever fits, control messages and rendezvous, too; this is not on the wire",
	"chains":       "of all that goes out together; the original's have only a push's value and meta",
	"probes":       "writes of 0 bytes on idle connections whose answers are awaited; the peer does not see them",
}

// intended notes that our node differs in this way.
func (r *rdmaRun) intended(name string) {
	if rdmaIntended[name] == "" {
		r.t.Errorf("%q is not in rdmaIntended", name)
	}
	intendedSeen.Store(name, true)
}

var intendedSeen sync.Map

// flow is one connection of a node.
type flow struct {
	peer    int
	active  bool
	qps     []uint32
	private []byte // of the node's end
	starts  []*post
	replies []*post
	writes  [qpCount][]*post
}

// post is one work request.
type post struct {
	seq   int
	kind  string
	op    string
	imm   uint32
	len   int
	data  []byte
	chain int
	in    bool // inline
}

func (p *post) String() string {
	return fmt.Sprintf("%s %s imm %#x, %d bytes, chain %d", p.kind, p.op, p.imm, p.len, p.chain)
}

func newPost(l *rdmaLine) *post {
	p := &post{seq: l.Seq, kind: l.Post, op: l.Op, len: l.Len, data: l.bytes, chain: l.Chain, in: strings.Contains(l.Flags, "I")}
	if l.Imm != nil {
		p.imm = *l.Imm
	}
	if len(p.data) < p.len {
		p.data = l.value(p.len)
	}
	return p
}

var opNames = map[verbs.Opcode]string{verbs.OpSendImm: "SEND_WITH_IMM", verbs.OpWrite: "RDMA_WRITE", verbs.OpWriteImm: "RDMA_WRITE_WITH_IMM"}

// oursPost makes a post of a work request of our node.
func oursPost(r *fakeverbs.Record) *post {
	p := &post{seq: r.Seq, op: opNames[r.WR.Op], imm: r.WR.Imm, len: int(r.WR.Len), data: r.Data, chain: r.Chain, in: r.WR.Flags&verbs.Inline != 0}
	switch {
	case r.WR.Op == verbs.OpWrite:
		p.kind = kindPayload
	case r.WR.Op == verbs.OpWriteImm && p.imm&0x8000 != 0:
		p.kind = kindSlave
	case r.WR.Op == verbs.OpWriteImm:
		p.kind = kindMeta
	case p.imm == 0:
		p.kind = kindStart
	case p.imm == 1:
		p.kind = kindReply
	default:
		p.kind = fmt.Sprintf("SEND with immediate %d", p.imm)
	}
	return p
}

// compare compares the posts of our node with the recording.
func (r *rdmaRun) compare() {
	r.mu.Lock()
	defer r.mu.Unlock()
	ours, theirs := r.oursFlows(), r.recordedFlows()
	if len(ours) != len(theirs) {
		r.t.Fatalf("%d connections with others, want %d", len(ours), len(theirs))
	}
	order := func(a, b *flow) int {
		if a.peer != b.peer {
			return a.peer - b.peer
		}
		return len(fmt.Sprint(a.active)) - len(fmt.Sprint(b.active))
	}
	slices.SortStableFunc(ours, order)
	slices.SortStableFunc(theirs, order)
	for i, want := range theirs {
		got := ours[i]
		name := fmt.Sprintf("connection with %s, opened by our node: %t", van.NodeName(want.peer), want.active)
		if got.peer != want.peer || got.active != want.active {
			r.t.Fatalf("a connection with %s, opened by our node: %t, want a %s", van.NodeName(got.peer), got.active, name)
		}
		if len(got.qps) != qpCount || len(want.qps) != qpCount {
			r.t.Errorf("%s: %d queue pairs, want %d", name, len(got.qps), len(want.qps))
		}
		if len(got.private) != 40 || !bytes.Equal(got.private[:24], want.private) || string(got.private[24:28]) != "SAF1" {
			r.t.Errorf("%s: private data\n%x, want\n%x and 16 bytes", name, got.private, want.private)
		}
		r.intended("private data")
		r.stream(name+", starts", got.starts, want.starts)
		r.stream(name+", replies", got.replies, want.replies)
		for q := range qpCount {
			r.stream(fmt.Sprintf("%s, writes on queue pair %d", name, q), got.writes[q], want.writes[q])
		}
		checkSlaves(r, name, got)
	}
	r.parameters()
}

// checkSlaves checks that the notifications of the other parts name the message.
func checkSlaves(r *rdmaRun, name string, f *flow) {
	var split []uint32
	for _, p := range f.writes[0] {
		if p.kind == kindMeta && le.Uint32(p.data[offSlaves:]) > 0 {
			split = append(split, p.imm|0x8000)
		}
	}
	var slaves []uint32
	for _, p := range f.writes[1] {
		slaves = append(slaves, p.imm)
	}
	if !slices.Equal(split, slaves) {
		r.t.Errorf("%s: the other parts are notified as %#x, want %#x", name, slaves, split)
	}
}

// stream compares work requests in order.
func (r *rdmaRun) stream(name string, got, want []*post) {
	for i := range min(len(got), len(want)) {
		g, w := got[i], want[i]
		switch {
		case g.kind != w.kind || g.op != w.op || g.len != w.len:
			r.t.Fatalf("%s: number %d is %s, want %s (event %d)", name, i, g, w, w.seq)
		case w.chain > 0 && g.chain == 0:
			r.t.Errorf("%s: number %d is not in one list with what is before it (event %d)", name, i, w.seq)
		case (w.kind == kindStart || w.kind == kindReply) && g.imm != w.imm:
			r.t.Errorf("%s: number %d is %s, want %s (event %d)", name, i, g, w, w.seq)
		}
		if g.in != w.in {
			r.intended("inline")
		}
		if g.chain > w.chain {
			r.intended("chains")
		}
		if d := r.postDifference(g, w); d != "" {
			r.t.Errorf("%s: number %d (event %d), %s: %s", name, i, w.seq, g, d)
		}
	}
	for _, p := range got[min(len(got), len(want)):] {
		r.t.Errorf("%s: %s more than recorded", name, p)
	}
	for _, p := range want[min(len(got), len(want)):] {
		r.t.Errorf("%s: %s missing (event %d)", name, p, p.seq)
	}
}

// postDifference compares the bytes of work requests of one length.
func (r *rdmaRun) postDifference(got, want *post) string {
	g, w := slices.Clone(got.data), slices.Clone(want.data)
	if len(g) != len(w) {
		return fmt.Sprintf("%d bytes, want %d", len(g), len(w))
	}
	if want.kind == kindMeta {
		var gm, wm van.Meta
		if err := van.DecodeMeta(g, &gm); err != nil {
			return err.Error()
		}
		must(r.t, van.DecodeMeta(w, &wm))
		m := &message{meta: wm, packed: w, data: [][]byte{make([]byte, 8), nil}}
		for _, p := range repairs {
			p.apply(m)
		}
		g, w = r.masked(g, &gm), r.masked(w, &wm)
	}
	for _, d := range rdmaMasks {
		if d.kind != want.kind || d.only != nil && !d.only(want.data) {
			continue
		}
		a, b := g[d.off:][:d.len], w[d.off:][:d.len]
		if d.zero && bytes.Equal(a, make([]byte, d.len)) != bytes.Equal(b, make([]byte, d.len)) {
			return fmt.Sprintf("%s is %x, want %x or another one", d.name, a, b)
		}
		cover(a)
		cover(b)
	}
	for i := range w {
		if g[i] != w[i] {
			return fmt.Sprintf("byte %d is %#x, want %#x\n got %x\nwant %x", i, g[i], w[i], g[max(i-16, 0):min(i+32, len(g))], w[max(i-16, 0):min(i+32, len(w))])
		}
	}
	return ""
}

// oursFlows sorts the posts of our node by connection.
func (r *rdmaRun) oursFlows() (all []*flow) {
	peers := map[*fakeverbs.Stack]int{}
	for id, p := range r.peers {
		peers[p.stack] = id
	}
	byQP := map[uint32]*flow{}
	for i := range r.records {
		rec := &r.records[i]
		switch {
		case rec.Kind == fakeverbs.RecordCM && (rec.Event == fakeverbs.EventConnect || rec.Event == fakeverbs.EventAccept):
			id, ok := peers[rec.Peer]
			if !ok {
				r.t.Fatalf("%s with an unknown peer at %v", rec.Event, rec.Remote)
			}
			f := partner(&all, id, rec.Event == fakeverbs.EventConnect)
			f.qps, f.private = append(f.qps, rec.QP), rec.Private
			byQP[rec.QP] = f
		case rec.Kind == fakeverbs.RecordPost && rec.WR.Op == verbs.OpWrite && rec.WR.Len == 0:
			r.intended("probes")
		case rec.Kind == fakeverbs.RecordPost:
			f := byQP[rec.QP]
			f.add(oursPost(rec), slices.Index(f.qps, rec.QP))
		}
	}
	return all
}

// partner finds the connection whose second queue pair is still missing, or makes a new
// one.
func partner(all *[]*flow, peer int, active bool) *flow {
	for _, f := range *all {
		if f.peer == peer && f.active == active && len(f.qps) < qpCount {
			return f
		}
	}
	f := &flow{peer: peer, active: active}
	*all = append(*all, f)
	return f
}

func (f *flow) add(p *post, q int) {
	switch {
	case p.kind == kindStart && q == 0 && f.active:
		f.starts = append(f.starts, p)
	case p.kind == kindReply && q == 0 && !f.active:
		f.replies = append(f.replies, p)
	default: // any other post is a difference
		f.writes[q] = append(f.writes[q], p)
	}
}

// recordedFlows sorts the posts of the recorded node by connection. Its messages are those
// of the run, which may have been repaired.
func (r *rdmaRun) recordedFlows() (all []*flow) {
	byQP := map[uint32]*flow{}
	for _, l := range r.session.lines {
		switch {
		case l.CM == "rdma_connect" && l.Node == r.self.ID && l.Peer == r.self.ID:
			r.intended("itself")
		case (l.CM == "rdma_connect" || l.CM == "rdma_accept") && l.Node == r.self.ID && l.Peer != r.self.ID:
			f := partner(&all, l.Peer, l.CM == "rdma_connect")
			f.qps, f.private = append(f.qps, l.QP), l.bytes
			byQP[l.QP] = f
		case (l.Post == kindStart || l.Post == kindReply) && l.From == r.self.ID && l.To != r.self.ID:
			f := byQP[l.QP]
			f.add(newPost(l), slices.Index(f.qps, l.QP))
		}
	}
	for _, m := range r.messages {
		if m.from != r.self.ID || m.to == r.self.ID {
			continue
		}
		for _, l := range m.lines {
			p := newPost(l)
			if l.Post == kindMeta {
				p.data = m.packed
			}
			f := byQP[l.QP]
			f.add(p, slices.Index(f.qps, l.QP))
		}
	}
	return all
}

// parameters compares the parameters of our node's queue pairs and connections.
func (r *rdmaRun) parameters() {
	var want *rdmaLine
	for _, l := range r.session.lines {
		if l.CM == "create_qp" && l.Node == r.self.ID {
			if want != nil && (l.Send != want.Send || l.Recv != want.Recv || l.Inline != want.Inline) {
				r.t.Fatalf("event %d: other queue pairs had other parameters", l.Seq)
			}
			want = l
		}
	}
	n := 0
	for i := range r.records {
		rec := &r.records[i]
		o := &rec.Options
		switch {
		case rec.Kind != fakeverbs.RecordCM:
		case rec.Event == fakeverbs.EventCreateQP:
			n++
			if o.SendDepth != want.Send || o.RecvDepth != want.Recv/qpCount || o.Inline < want.Inline {
				r.t.Errorf("create_qp asks for %+v, want send %d, recv %d/%d, inline %d at least", *o, want.Send, want.Recv, qpCount, want.Inline)
			}
		case rec.Event == fakeverbs.EventConnect || rec.Event == fakeverbs.EventAccept:
			if rec.Param.RetryCount != 6 || rec.Param.RNRRetryCount != 7 {
				r.t.Errorf("%s with retry counts %d and %d, want 6 and 7", rec.Event, rec.Param.RetryCount, rec.Param.RNRRetryCount)
			}
		}
	}
	if n == 0 {
		r.t.Error("no queue pair was made")
	}
	r.intended("retry_count")
	r.intended("recv_wr")
}
