package rdma

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/tests/fakeverbs"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/env"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// notifications counts the writes with a notification of each node, without those of split values.
func (r *rig) notifications(nodes ...*testNode) []*atomic.Int64 {
	counts := make([]*atomic.Int64, len(nodes))
	for i := range counts {
		counts[i] = new(atomic.Int64)
	}
	r.net.FailWR(func(wr fakeverbs.WR) verbs.Status {
		for i, n := range nodes {
			if wr.Stack == n.stack && wr.Op == verbs.OpWriteImm && wr.Imm&immSlave == 0 {
				counts[i].Add(1)
			}
		}
		return verbs.StatusOK
	})
	return counts
}

// batch makes a request with a part for each length: a push, or a pull of as many bytes if the length is negative.
func batch(to *testNode, ts, seed int, lens ...int) *van.Message {
	m := &van.Message{}
	m.Reset()
	m.Receiver, m.AppID, m.CustomerID, m.Timestamp, m.Request = to.who.ID, 0, 0, int32(ts), true
	for i, n := range lens {
		p := van.Part{Key: uint64(i), Push: n >= 0, Len: max(n, -n), Device: backend.Host, Dtype: 1, Dim: 1}
		if p.Shape[0] = int64(p.Len); p.Push {
			p.Vals = backend.Bytes(value(n, seed+i))
		} else {
			p.Into = backend.Bytes(make([]byte, -n))
			p.Addr = p.Into.Addr()
		}
		m.Parts = append(m.Parts, p)
	}
	m.Key, m.ValLen = m.Parts[0].Key, int32(m.Parts[0].Len)
	m.WriteDirectory()
	return m
}

// answerTo makes the answer to the pulls of all, a request of m's form that was received.
func answerTo(sender, seed int, all []van.Part) *van.Message {
	m := &van.Message{}
	m.Reset()
	m.Receiver, m.AppID, m.CustomerID = sender, 0, 0
	for i, p := range all {
		if p.Push {
			continue
		}
		p.Vals = backend.Bytes(value(p.Len, seed+i))
		m.Parts = append(m.Parts, p)
	}
	m.Timestamp, m.Key, m.ValLen = m.Parts[0].Timestamp, m.Parts[0].Key, int32(m.Parts[0].Len)
	m.WriteDirectory()
	return m
}

// parts receives a batch of count parts, in one message or in those of ps-lite. release releases the messages.
func (n *testNode) parts(count int) (all []van.Part, release func()) {
	n.r.Helper()
	var messages []*van.Message
	for len(all) < count {
		m := n.next()
		messages = append(messages, m)
		if m.IsBatch() {
			all = append(all, m.Parts...)
			continue
		}
		p := van.PartOf(&m.Meta)
		p.Vals, p.Placed = m.Vals, m.Placed
		all = append(all, p)
	}
	return all, func() {
		for _, m := range messages {
			m.Release()
		}
	}
}

// checkParts compares received parts with those that were sent.
func (r *rig) checkParts(what string, got, sent []van.Part, first int) {
	r.Helper()
	if len(got) != len(sent) {
		r.Fatalf("%s: %d parts, want %d", what, len(got), len(sent))
	}
	for i := range got {
		g, s := &got[i], &sent[i]
		if g.Key != s.Key || g.Push != s.Push || g.Len != s.Len || int(g.Timestamp) != first+i || !bytes.Equal(g.Vals.Host(), s.Vals.Host()) {
			r.Fatalf("%s: part %d has key %d, push %t, %d bytes, timestamp %d and a value of %d bytes; want %d, %t, %d, %d and %d, or other bytes", what, i,
				g.Key, g.Push, g.Len, g.Timestamp, g.Vals.Len(), s.Key, s.Push, s.Len, first+i, s.Vals.Len())
		}
	}
}

// repeat is n times the length size.
func repeat(n, size int) []int { return slices.Repeat([]int{size}, n) }

// TestBatch: a batch is one message in each direction, with one Done. Large answers lie in the tensors that the request names. A batch that cannot
// be one message arrives as the messages of ps-lite. No slot and no memory is lost.
func TestBatch(t *testing.T) {
	split := func(c *env.Config) { c.SplitQPLag = true }
	for _, s := range []struct {
		name    string
		lens    []int
		options func(*env.Config)
		there   int // messages with the request
		long    bool
	}{
		{name: "small", lens: []int{200, 300, 100, -200}, there: 1},
		{name: "empty values", lens: []int{0, 0, -1}, there: 1},
		{name: "pulls", lens: []int{-100, -70000, -3000}, there: 1},
		{name: "one", lens: []int{-70000}, there: 1},
		{name: "no pull", lens: []int{100, 70000}, there: 1},
		{name: "more than a cell", lens: []int{1000, 1200, 1100, -1000, -1200}, there: 1},
		{name: "around the inline length", lens: []int{inlineValue - 1, inlineValue, inlineValue + 1, -inlineValue, -inlineValue - 1}, there: 1},
		{name: "large", lens: []int{70000, 1 << 20, 5000, -70000, -1 << 20}, there: 1},
		{name: "mixed", lens: []int{70000, 3, 0, 9000, 1000, -70000, -3, -1000}, there: 1},
		{name: "split", lens: []int{70000, 3, minSplit, minSplit - 1, -70000, -3, -minSplit}, options: split, there: 1},
		{name: "split, nothing large", lens: []int{3000, 3, -3000}, options: split, there: 1},
		{name: "many small", lens: append(repeat(500, 100), repeat(500, -100)...), there: 1},
		{name: "as many parts as a batch may have", lens: append(repeat(van.MaxParts-1, 8), -8), there: 1},
		{name: "as many inline values as a batch may have", lens: append(repeat(van.MaxParts-1, inlineValue), -8), there: 1, long: true},
		{name: "as many writes as the queue takes", lens: append(repeat(191, 2000), -10), there: 1},
		{name: "more writes than the queue takes", lens: append(repeat(192, 2000), -10), there: 193},
		{name: "shallow queue", lens: append(repeat(7, 2000), -10), options: func(c *env.Config) { c.RDMAStartDepth, c.RDMARxDepth = 8, 8 }, there: 1},
		{name: "a share of the peer's memory", lens: []int{30 << 10, 30 << 10, -5}, options: func(c *env.Config) { c.RDMAPeerBudget = 1 << 20 }, there: 1},
		{name: "more than a share of the peer's memory", lens: []int{32 << 10, 32 << 10, -5}, options: func(c *env.Config) { c.RDMAPeerBudget = 1 << 20 }, there: 3},
		{name: "more than a share with small values", lens: append(repeat(64, 1000), -5), options: func(c *env.Config) { c.RDMAPeerBudget = 1 << 20 }, there: 65},
		{name: "as many pull tensors as a batch may have", lens: append([]int{5}, repeat(maxDestinations, -10)...), there: 1},
		{name: "more pull tensors than a batch may have", lens: append([]int{5}, repeat(maxDestinations+1, -10)...), there: maxDestinations + 2},
	} {
		t.Run(s.name, func(t *testing.T) {
			if s.long && testing.Short() {
				t.Skip("-short")
			}
			if s.options == nil {
				s.options = func(*env.Config) {}
			}
			r := newRig(t)
			w, v := r.pair(s.options)
			pulls := 0
			for _, n := range s.lens {
				if n < 0 {
					pulls++
				}
			}
			round := func(i int) {
				m := batch(v, i*len(s.lens), i, s.lens...)
				m.Done = w
				w.must(m)
				got, release := v.parts(len(s.lens))
				r.checkParts("the request", got, m.Parts, i*len(s.lens))
				if pulls > 0 {
					a := answerTo(9, 1000+i, got)
					a.Done = v
					v.must(a)
					back, releaseAnswer := w.parts(pulls)
					r.checkParts("the answer", back, a.Parts, i*len(s.lens)+len(s.lens)-pulls)
					for k := range back {
						p := &m.Parts[len(s.lens)-pulls+k]
						if (p.Len > 0) != back[k].Placed || !bytes.Equal(p.Into.Host(), a.Parts[k].Vals.Host()) {
							t.Fatalf("round %d: answer %d of %d bytes is not in the pull tensor; placed: %t", i, k, p.Len, back[k].Placed)
						}
					}
					releaseAnswer()
				}
				release()
			}
			round(0) // with its slot requests
			counts := r.notifications(w, v)
			const rounds = 3
			for i := range rounds {
				round(1 + i)
			}
			r.until("Done of all", func() bool { return w.dones.Load() == 1+rounds && (pulls == 0 || v.dones.Load() == 1+rounds) })
			if n := int(counts[0].Load()); n != rounds*s.there {
				t.Errorf("%d messages with %d requests, want %d", n, rounds, rounds*s.there)
			}
			if n := int(counts[1].Load()); pulls > 0 && n != rounds {
				t.Errorf("%d messages with %d answers, want as many", n, rounds)
			}
			for _, n := range []*testNode{w, v} {
				r.until("no memory is in use", func() bool { return n.Stats().LentValues == 0 })
				if x := n.Stats().Malformed; x != 0 {
					t.Errorf("%d malformed messages: %s", x, n.logged.String())
				}
			}
			p := (*w.tables.peers.Load())[8]
			r.until("the slots are returned", func() bool {
				p.handleReclaim(p.currentLink(), &reclaimRequest{slots: maxIndex, bytes: 1 << 40})
				return v.budget.slots.Len() == 0
			})
		})
	}
}

// TestBatchBeforeTheConnection: batches that wait for the first connection arrive, in order.
func TestBatchBeforeTheConnection(t *testing.T) {
	p := newPair(t, nil)
	end := p.rejectAll()
	p.connect(p.worker, serverID, p.server)
	at := &testNode{who: van.Node{ID: serverID}}
	for i := range 3 {
		if err := p.worker.Send(batch(at, 3*i, i, 100, 70000, -100)); err != nil {
			t.Fatal(err)
		}
	}
	end()
	for ts := 0; ts < 9; {
		m := p.next(p.atServer)
		if int(m.Timestamp) != ts {
			t.Fatalf("timestamp %d, want %d", m.Timestamp, ts)
		}
		ts += max(len(m.Parts), 1)
		m.Release()
	}
}

// TestBatchRefused: a batch for which the peer has no memory is sent as the messages of ps-lite in its place, and later ones of its size are at once.
func TestBatchRefused(t *testing.T) {
	r := newRig(t)
	w, s := r.node(9), r.node(8, func(c *env.Config) { c.RDMAPeerBudget = 1 << 20 })
	r.link(w, s)
	lens := []int{300 << 10, 100, 300 << 10, 300 << 10, 3000, 300 << 10, 300 << 10, -70000, -5}
	counts := r.notifications(w)
	for round := range 3 {
		first := round * 100
		before := batch(s, first, round, 200, 2000)
		m := batch(s, first+10, round, lens...)
		after := batch(s, first+30, round, 300)
		in := s.incomingOf(9)
		for _, q := range in.sends.QueuePairs {
			r.net.HoldQP(q.Num()) // all are queued before the refusal
		}
		for _, x := range []*van.Message{before, m, after} {
			x.Done = w
			w.must(x)
		}
		r.net.Release()
		for _, x := range []*van.Message{before, m, after} {
			var got []van.Part
			var release []func()
			for len(got) < len(x.Parts) {
				all, f := s.parts(1)
				got = append(got, all...)
				if x == m {
					r.checkParts("the request", all, m.Parts[len(got)-len(all):][:len(all)], first+10+len(got)-len(all))
					f() // the server has no memory for all at once
					continue
				}
				release = append(release, f)
			}
			if x != m {
				r.checkParts("the request", got, x.Parts, int(x.Timestamp))
			}
			if x == m {
				for _, p := range got[7:] {
					a := answerTo(9, 1000, []van.Part{p})
					s.must(a)
					back, f := w.parts(1)
					if !back[0].Placed || !bytes.Equal(back[0].Vals.Host(), value(p.Len, 1000)) {
						t.Error("the answer is not in the pull tensor")
					}
					f()
				}
			}
			for _, f := range release {
				f()
			}
		}
		r.until("Done of all", func() bool { return int(w.dones.Load()) == 3*(round+1) })
	}
	if n := s.Stats().RefusedSlots; n != 1 {
		t.Errorf("%d requests were refused, want 1", n)
	}
	if n := int(counts[0].Load()); n != 3*(2+len(lens)) {
		t.Errorf("%d messages, want %d", n, 3*(2+len(lens)))
	}
	w.wantNoLoss()
	p := (*w.tables.peers.Load())[8]
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.unsent != 0 {
		t.Errorf("%d bytes are said to wait, want none", p.unsent)
	}
}

// TestBatchRefusedWithCopies: the values that a refused batch has copied are sent, not those of later batches that use its memory again.
func TestBatchRefusedWithCopies(t *testing.T) {
	r := newRig(t)
	w, s := r.node(9), r.node(8, func(c *env.Config) { c.RDMAPeerBudget = 1 << 20 })
	r.link(w, s)
	m := batch(s, 10, 0, append(repeat(5, 300<<10), 1340)...)
	w.must(m)
	p := (*w.tables.peers.Load())[8]
	r.until("it is queued as single messages", func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.link.maxBatch > 0
	})
	sent := []*van.Message{m}
	for i := range 8 {
		x := batch(s, 100+10*i, 50+i, 1300)
		w.must(x)
		sent = append(sent, x)
	}
	for _, x := range sent {
		for k := 0; k < len(x.Parts); {
			got, release := s.parts(1)
			r.checkParts("the request", got, x.Parts[k:][:len(got)], int(x.Timestamp)+k)
			release() // the server has no memory for all at once
			k += len(got)
		}
	}
}

// TestBatchRefusedCanceled: a batch that is canceled while the peer's refusal is on its way does not arrive, and later messages do.
func TestBatchRefusedCanceled(t *testing.T) {
	r := newRig(t)
	w, s := r.node(9), r.node(8, func(c *env.Config) { c.RDMAPeerBudget = 1 << 20 })
	r.link(w, s)
	for _, q := range s.incomingOf(9).sends.QueuePairs {
		r.net.HoldQP(q.Num())
	}
	m := batch(s, 0, 0, repeat(5, 300<<10)...)
	m.Done = w
	w.must(m)
	next := batch(s, 10, 1, 200)
	w.must(next)
	w.Cancel(van.Requests{First: 0, Count: 5})
	r.net.Release()
	got, release := s.parts(1)
	r.checkParts("the next batch", got, next.Parts, 10)
	release()
	r.until("Done", func() bool { return w.dones.Load() == 1 })
	w.wantNoLoss()
}

// TestBatchUnregistered: a batch of which a pull tensor cannot be registered fails, and its other pull tensors are in use no more.
func TestBatchUnregistered(t *testing.T) {
	r := newRig(t)
	w, s := r.pair()
	w.must(batch(s, 0, 0, 10))
	_, release := s.parts(1)
	release()
	r.net.Fail(func(op fakeverbs.Op) error {
		if op.Kind == fakeverbs.OpRegister && op.Stack == w.stack && op.Size == 5003 {
			return syscall.ENOMEM
		}
		return nil
	})
	w.must(batch(s, 10, 0, 10, -5001, -5002, -5003))
	w.wantDown(s, "memory for the answer, 5003 bytes")
	r.net.Fail(nil)
	if n := w.Stats().LentValues; n != 0 {
		t.Errorf("%d regions are in use", n)
	}
	p := (*w.tables.peers.Load())[8]
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.pulls) != 0 {
		t.Errorf("%d pulls wait for answers", len(p.pulls))
	}
}

// TestBatchBreaks: a batch whose connection breaks at any of its writes does not arrive, and its Done is called. The next one arrives, and no slot is lost.
func TestBatchBreaks(t *testing.T) {
	lens := []int{9000, 100, 20000, -30000}
	for at := range 3 { // two values and the meta
		t.Run(fmt.Sprintf("write %d", at), func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			w, s := r.pair()
			first := batch(s, 0, 0, lens...)
			w.must(first)
			_, release := s.parts(len(lens)) // there is a slot from now on
			release()
			w.Invalidate(first.Parts[3].Into)
			writes := 0
			r.net.FailWR(func(wr fakeverbs.WR) verbs.Status {
				if wr.Stack != w.stack || wr.Op != verbs.OpWrite && wr.Op != verbs.OpWriteImm || wr.Len == 0 {
					return verbs.StatusOK
				}
				if writes++; writes == at+1 {
					return verbs.StatusRetryExceeded
				}
				return verbs.StatusOK
			})
			m := batch(s, 10, 1, lens...)
			m.Done = w
			w.must(m)
			w.wantDown(s)
			r.net.FailWR(nil)
			r.until("Done", func() bool { return w.dones.Load() == 1 })
			w.Invalidate(m.Parts[3].Into)
			next := batch(s, 20, 2, lens...)
			w.wantUpOrSend(s, next)
			got, release := s.parts(len(lens))
			r.checkParts("the next batch", got, next.Parts, 20)
			s.must(answerTo(9, 5, got))
			back, releaseAnswer := w.parts(1)
			if !back[0].Placed || !bytes.Equal(next.Parts[3].Into.Host(), value(30000, 8)) {
				t.Error("the answer is not in the pull tensor")
			}
			releaseAnswer()
			release()
			p := (*w.tables.peers.Load())[8]
			r.until("the slots are returned", func() bool {
				if l := p.currentLink(); l != nil {
					p.handleReclaim(l, &reclaimRequest{slots: maxIndex, bytes: 1 << 40})
				}
				return s.budget.slots.Len() == 0
			})
			if n := s.Stats().LentValues + w.Stats().LentValues; n != 0 {
				t.Errorf("%d regions are in use", n)
			}
		})
	}
}

// TestBatchCanceled: a batch that is canceled before the device has sent it does not arrive, as a whole. Others do.
func TestBatchCanceled(t *testing.T) {
	for _, queued := range []bool{true, false} {
		t.Run(fmt.Sprintf("queued %t", queued), func(t *testing.T) {
			r := newRig(t)
			w, s := r.pair()
			if !queued {
				w.must(batch(s, 0, 0, 100, 20000, 20000))
				_, release := s.parts(3) // there is a slot from now on
				release()
			}
			to := (*w.tables.peers.Load())[8]
			for _, q := range to.currentLink().queue.QueuePairs {
				r.net.HoldQP(q.Num())
			}
			var sent []*van.Message
			for i := 1; i < 4; i++ {
				m := batch(s, 10*i, i, 100, 20000, 20000)
				m.Done = w
				w.must(m)
				sent = append(sent, m)
			}
			w.Cancel(van.Requests{First: 20, Count: 3})
			clear(sent[1].Parts[1].Vals.Host())
			r.net.Release()
			for _, i := range []int{0, 2} {
				got, release := s.parts(3)
				r.checkParts("a batch that was not canceled", got, sent[i].Parts, 10*(i+1))
				release()
			}
			r.until("Done of all", func() bool { return w.dones.Load() == 3 })
			if n := s.Stats().Malformed; n != 0 {
				t.Errorf("%d malformed messages", n)
			}
		})
	}
}

// TestBatchInvalidated: the answers to a canceled batch do not reach its pull tensors, whether they are inline or written there.
func TestBatchInvalidated(t *testing.T) {
	for _, size := range []int{500, 70000} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			r := newRig(t)
			w, s := r.pair()
			m := batch(s, 0, 0, 10, -size, -size)
			w.must(m)
			got, release := s.parts(3)
			w.Invalidate(m.Parts[1].Into)
			w.Invalidate(m.Parts[2].Into)
			s.must(answerTo(9, 5, got))
			release()
			if size > inlineValue {
				s.wantChange("the peer is down", func(c change) bool { return c.id == 9 && !c.up })
			} else {
				_, release := w.parts(2)
				release()
			}
			for _, p := range m.Parts[1:] {
				if slices.Max(p.Into.Host()) != 0 {
					t.Error("an answer reached memory that was invalidated")
				}
			}
			if n := w.Stats().LentValues; n != 0 {
				t.Errorf("%d regions are in use", n)
			}
		})
	}
}

// TestBatchOfReplaced: a batch that a replaced process writes to a slot does not arrive.
func TestBatchOfReplaced(t *testing.T) {
	r := newRig(t)
	w, s := r.pair()
	w.must(batch(s, 0, 0, 100, 20000))
	_, release := s.parts(2)
	release()
	for _, q := range (*w.tables.peers.Load())[8].currentLink().queue.QueuePairs {
		r.net.HoldQP(q.Num())
	}
	w.must(batch(s, 10, 1, 100, 20000))
	next := r.node(9)
	s.connect(next)
	next.connect(s)
	s.wantUp(next)
	next.wantUp(s)
	r.net.Release()
	m := batch(s, 20, 2, 100, 20000)
	next.must(m)
	got, release := s.parts(2)
	r.checkParts("the batch of the new process", got, m.Parts, 20)
	release()
}

// TestHostileBatch writes batches whose directory, placements and values do not match. None is delivered, and the slot works afterwards.
func TestHostileBatch(t *testing.T) {
	h := newHostileWorld(t, true)
	if err := h.s.RegisterRecvBuffer(11, 0, backend.Bytes(make([]byte, 4096))); err != nil {
		t.Fatal(err)
	}
	q := h.c.ask(slotRequest{metaLen: 1 << 16, dataNum: nativeSlotRequest, data: [4]uint64{4096, 0, 4096}, origin: 1})
	good := trailer{}
	put := func(b []byte) { h.c.notify(0, q.index, q.meta, q.metaKey, b) }
	n := uint64(0)
	for _, x := range []struct {
		what   string
		lens   []int
		change func(*van.Message)
		places []placement
		extra  int
		t      trailer
	}{
		{what: "frames", lens: []int{8}, places: []placement{{}}, extra: 8, t: trailer{frames: 2}},
		{what: "no placements", lens: []int{8}, t: good},
		{what: "too few placements", lens: []int{8, 8, 8}, places: []placement{{}, {}}, t: good},
		{what: "an inline value too long", lens: []int{9}, places: []placement{{}}, extra: 8, t: good},
		{what: "the second inline value too long", lens: []int{8, 8}, places: []placement{{}, {}}, extra: 71, t: good},
		{what: "an inline value longer than any", lens: []int{inlineValue + 1}, places: []placement{{}}, extra: inlineValue + 1, t: good},
		{what: "an inline value without bytes", lens: []int{8}, places: []placement{{}}, t: good},
		{what: "a value longer than the slot", lens: []int{4097}, places: []placement{{where: valueInSlot}}, t: good},
		{what: "values longer than the slot", lens: []int{100, 3969}, places: []placement{{where: valueInSlot}, {where: valueInSlot}}, t: good},
		{what: "the longest value", lens: []int{8}, places: []placement{{where: valueInSlot}}, t: good,
			change: func(m *van.Message) { le.PutUint32(m.Body[8:], 1<<31-1) }},
		{what: "an unknown place", lens: []int{8}, places: []placement{{where: 3}}, extra: 8, t: good},
		{what: "the largest place", lens: []int{8}, places: []placement{{where: 1<<32 - 1}}, extra: 8, t: good},
		{what: "a buffer that is not announced", lens: []int{8}, places: []placement{{where: valueInPlace, addr: 4096}}, t: good},
		{what: "a length beyond 2 GiB", lens: []int{8}, places: []placement{{}}, extra: 8, t: good,
			change: func(m *van.Message) { le.PutUint32(m.Body[8:], 1<<31) }},
		{what: "half an entry", lens: []int{8}, places: []placement{{}}, extra: 8, t: good, change: func(m *van.Message) { m.Body = m.Body[:20] }},
		{what: "no entry", lens: []int{8}, places: []placement{{}}, extra: 8, t: good, change: func(m *van.Message) { m.Body = nil }},
		{what: "a push after a pull", lens: []int{-8, 8}, places: []placement{{}, {}}, extra: 8, t: good},
		{what: "a timestamp below 0", lens: []int{8}, places: []placement{{}}, extra: 8, t: good, change: func(m *van.Message) { m.Timestamp = -1 }},
	} {
		m := batch(h.s, 1, 0, x.lens...)
		if x.change != nil {
			x.change(m)
		}
		put(encodeParts(h.rig, m, x.places, make([]byte, x.extra), x.t))
		n++
		h.seen(n, x.what)
	}
	m := batch(h.s, 1, 0, 8)
	b := encode(h.rig, m, &trailer{})
	put(b) // without placements
	n++
	h.seen(n, "a batch in the form of other messages")

	// The slot still works. A value in the slot makes the server announce its buffer.
	v := value(2000, 1)
	h.c.post(0, verbs.SendWR{Op: verbs.OpWrite, RemoteAddr: q.data, RKey: q.dataKey}, v)
	put(encodeParts(h.rig, batch(h.s, 1, 0, 2000), []placement{{where: valueInSlot}}, nil, good))
	got := h.s.next()
	if len(got.Parts) != 1 || !bytes.Equal(got.Parts[0].Vals.Host(), v) {
		t.Errorf("%d parts, or wrong bytes", len(got.Parts))
	}
	got.Release()
	var r remoteBuffer
	h.p.check(r.get(h.c.receive(immBuffer)))
	if r.key != 0 || r.len != 4096 {
		t.Errorf("the buffer of key %d with %d bytes is announced, want key 0 and 4096", r.key, r.len)
	}
	for _, x := range []struct {
		n    int
		addr uint64
	}{{4097, r.addr}, {8, r.addr + 1}} {
		put(encodeParts(h.rig, batch(h.s, 1, 0, x.n), []placement{{where: valueInPlace, addr: x.addr}}, nil, good))
		n++
		h.seen(n, fmt.Sprintf("%d bytes at %#x of the buffer at %#x", x.n, x.addr, r.addr))
	}
	// Answers that nobody waits for are delivered without the values that were not sent.
	a := answerTo(8, 0, []van.Part{{Key: 1, Len: 100, Timestamp: 7}, {Key: 2, Len: 8, Timestamp: 8}})
	put(encodeParts(h.rig, a, []placement{{where: valueInPlace, addr: 4096}, {}}, make([]byte, 8), good))
	got = h.s.next()
	if len(got.Parts) != 2 || got.Parts[0].Vals.Len() != 0 || got.Parts[0].Placed || got.Parts[1].Vals.Len() != 8 {
		t.Errorf("late answers have %d parts: %+v", len(got.Parts), got.Parts)
	}
	got.Release()
	h.ends(n)
}

// TestHostileBuffers: a peer announces buffers that do not exist. Values that are written there break its connection, and nothing else.
func TestHostileBuffers(t *testing.T) {
	r := newRig(t)
	w, s := r.pair()
	p := newRaw(r, rawAddr, van.Node{ID: 10})
	bad := &testNode{who: van.Node{ID: 10, Hostname: rawAddr.String(), Port: p.port}}
	w.connect(bad)
	c := p.accept(1, func(q int) []byte { return p.privateData(true, 0, q, 2) })
	c.send(immBuffer, make([]byte, remoteBufferLen)) // before the connection is established
	c.send(immBuffer, nil)
	r.until("the second is refused", func() bool { return w.Stats().Malformed == 1 })
	p.accept(1, func(int) []byte { return p.privateData(true, 0, 1, 2) })
	w.wantUp(bad)
	n := w.Stats().Malformed
	for _, b := range [][]byte{nil, make([]byte, remoteBufferLen-1), make([]byte, remoteBufferLen+1)} {
		c.send(immBuffer, b)
	}
	r.until("they are refused", func() bool { return w.Stats().Malformed == n+3 })
	var b [remoteBufferLen]byte
	for key := range uint64(300) {
		(&remoteBuffer{key: key, addr: 4096, rkey: 12345, len: 1<<32 - 1}).put(b[:])
		c.send(immBuffer, b[:])
	}
	to := (*w.tables.peers.Load())[10]
	r.until("they are noted", func() bool {
		to.mu.Lock()
		defer to.mu.Unlock()
		return to.link != nil && len(to.link.dialect.(*nativeOut).buffers) == 300
	})
	m := batch(bad, 1, 0, 70000, 8)
	m.Done = w
	w.must(m)
	var q slotRequest
	p.check(q.get(c.receive(immSlotRequest)))
	if q.data[0] != 0 {
		t.Errorf("the batch asks for %d bytes of values, want none", q.data[0])
	}
	var reply [slotReplyLen]byte
	(&slotReply{origin: q.origin, index: 1, meta: backend.Bytes(c.mem).Addr(), metaKey: p.mr.RKey()}).put(reply[:])
	c.send(immSlotReply, reply[:])
	w.wantDown(bad, "remote access error")
	r.until("Done", func() bool { return w.dones.Load() == 1 })
	w.Disconnect(10)
	w.must(push(s, 1, 3, value(2000, 1)))
	s.wantValue(3, value(2000, 1))
	p.end()
}

// TestManyBuffers: a peer cannot make a node remember more than maxBuffers buffers.
func TestManyBuffers(t *testing.T) {
	d := &nativeOut{buffers: map[uint64]*peerBuffer{}}
	for key := range uint64(maxBuffers + 10) {
		d.noteBuffer(remoteBuffer{key: key, len: 1})
	}
	d.noteBuffer(remoteBuffer{key: 3, len: 7})
	if len(d.buffers) != maxBuffers || d.buffers[3].len != 7 {
		t.Errorf("%d buffers, that of key 3 has %d bytes; want %d, and 7", len(d.buffers), d.buffers[3].len, maxBuffers)
	}
}

// TestBatchStalls: batches of a peer whose handler is slow stay within its receive budget, and all arrive in the end.
func TestBatchStalls(t *testing.T) {
	r := newRig(t)
	const budget, count = 1 << 20, 200
	s := r.make(8, func(c *env.Config) { c.RecvBudgetPeer = budget })
	s.listenOn(0)
	gate, done := make(chan bool), make(chan bool)
	next := 0
	s.Start(func(m *van.Message) {
		if m.IsControl() {
			return
		}
		<-gate
		if int(m.Timestamp) != 2*next || len(m.Parts) != 2 || !bytes.Equal(m.Parts[1].Vals.Host(), value(32<<10, next+1)) {
			t.Errorf("timestamp %d with %d parts, want %d with 2, or a value has changed", m.Timestamp, len(m.Parts), 2*next)
		}
		if next++; next == count {
			close(done)
		}
	})
	w := r.node(9)
	r.link(w, s)
	for i := range count {
		w.must(batch(s, 2*i, i, 32<<10, 32<<10))
	}
	r.until("the peer is paused", func() bool { return s.Stats().PausedReads > 0 })
	if n := s.incomingOf(9).slots.registeredBytes.Load(); n > count*64<<10*3/4 {
		t.Errorf("%d bytes are registered for the peer", n)
	}
	close(gate)
	select {
	case <-done:
	case <-time.After(patience):
		t.Fatal("not all batches have arrived")
	}
	r.until("nothing waits", func() bool { return s.delivery.recvBudget.Used() == 0 })
	if strings.Contains(s.logged.String(), "malformed") {
		t.Error(s.logged.String())
	}
}

// FuzzBatch: whatever a peer writes, each value of a batch lies within the memory that was written, and has the length in the directory.
func FuzzBatch(f *testing.F) {
	to := &testNode{who: van.Node{ID: 8}}
	m := batch(to, 1, 0, 8, 2000, 3, -8)
	var places [4 * placementLen]byte
	(&placement{where: valueInSlot}).put(places[placementLen:])
	f.Add(m.Body, append(places[:], make([]byte, 200)...), true)
	f.Add(answerTo(9, 0, m.Parts).Body, append(places[:placementLen], make([]byte, 200)...), false)
	f.Add([]byte{}, []byte{}, true)
	in := &inbound{v: NewOn(nil, van.Options{Config: env.Default()}).(*rvan).node}
	slot := &receiveSlot{Data: 3000}
	slot.Memory.data = backend.Bytes(make([]byte, 4096))
	f.Fuzz(func(t *testing.T, directory, behind []byte, request bool) {
		rx := &received{}
		m := &rx.msg
		m.Reset()
		m.Head, m.IsTensor, m.Request, m.Timestamp, m.Body = van.WholeBatch, true, request, 1, directory
		if err := (nativeIn{slotSet{in}}).frames(rx, slot, &trailer{metaLen: rawMeta}, behind); err != nil {
			if !errors.Is(err, van.ErrMalformed) {
				t.Errorf("error %v", err)
			}
			return
		}
		within := func(v, mem backend.Mem, n int) bool {
			return v.Addr() >= mem.Addr() && v.Addr()+uint64(v.Len()) <= mem.Addr()+uint64(n)
		}
		for i := range m.Parts {
			p := &m.Parts[i]
			if p.Vals.Len() == 0 && (p.Len == 0 || !m.HasValue(i) || !request) {
				continue
			}
			if p.Vals.Len() != p.Len || !within(p.Vals, backend.Bytes(behind), len(behind)) && !within(p.Vals, slot.Memory.data, slot.Data) || rx.slot != slot {
				t.Errorf("part %d of %d bytes has a value of %d bytes at %#x", i, p.Len, p.Vals.Len(), p.Vals.Addr())
			}
		}
	})
}
