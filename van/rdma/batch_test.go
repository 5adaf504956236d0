package rdma

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/tests/fakeverbs"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/env"
	"github.com/stepaf/stepaf-go/van/rdma/conn"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// notifications counts the writes with a notification of each node.
func (r *rig) notifications(nodes ...*testNode) []*atomic.Int64 {
	counts := make([]*atomic.Int64, len(nodes))
	for i := range counts {
		counts[i] = new(atomic.Int64)
	}
	r.net.FailWR(func(wr fakeverbs.WR) verbs.Status {
		for i, n := range nodes {
			if wr.Stack == n.stack && wr.Op == verbs.OpWriteImm {
				counts[i].Add(1)
			}
		}
		return verbs.StatusOK
	})
	return counts
}

// sendMore queues m without posting its work requests if more is set: another call, or push, follows then.
func (n *testNode) sendMore(m *van.Message, more bool) error {
	p := (*n.tables.peers.Load())[m.Receiver]
	p.mu.Lock()
	err := whyRefused(p, m)
	var done bool
	if err == nil {
		done, err = p.queue(m)
	}
	if err == nil {
		p.pump()
	}
	if !more || err != nil {
		p.flush()
	}
	p.mu.Unlock()
	if done {
		m.Done.Sent()
	}
	if err != nil {
		return n.sendError(m, p, err)
	}
	return nil
}

// push posts the work requests of earlier calls of sendMore.
func (n *testNode) push(id int) {
	p := (*n.tables.peers.Load())[id]
	p.mu.Lock()
	p.flush()
	p.mu.Unlock()
}

// pushed is a part that pushes v.
func pushed(key uint64, v []byte) van.Part {
	p := van.Part{Key: key, Push: true, Len: len(v), Device: backend.Host, Dim: 1, Vals: backend.Bytes(v)}
	p.Shape[0] = int64(len(v))
	return p
}

// pulled is a part that pulls into dst.
func pulled(key uint64, dst []byte) van.Part {
	p := pushed(key, dst)
	p.Push, p.Into, p.Vals = false, p.Vals, backend.Mem{}
	return p
}

// batch makes a request with these parts.
func batch(to *testNode, ts int, parts ...van.Part) *van.Message {
	m := &van.Message{}
	m.Reset()
	m.Receiver, m.Request, m.Timestamp, m.AppID, m.CustomerID, m.Parts = to.who.ID, true, int32(ts), 0, 0, parts
	m.WriteDirectory()
	return m
}

// answerBatch makes the answer to the pulls of m, a batch, with the values vals.
func answerBatch(m *van.Message, vals ...[]byte) *van.Message {
	a := batch(&testNode{who: van.Node{ID: m.Sender}}, 0)
	a.Request = false
	for i := range m.Parts {
		if p := m.Parts[i]; !p.Push {
			p.Vals = backend.Bytes(vals[len(a.Parts)])
			a.Parts = append(a.Parts, p)
		}
	}
	a.Timestamp = a.Parts[0].Timestamp
	a.WriteDirectory()
	return a
}

// wantParts checks the values of a batch, where nil stands for a pull.
func (n *testNode) wantParts(m *van.Message, values ...[]byte) {
	n.r.Helper()
	if err := vantest.SameParts(m, values); err != nil {
		n.r.Fatalf("batch %d at %s: %v", m.Timestamp, van.NodeName(n.who.ID), err)
	}
}

// idle waits until both nodes have all their slots back.
func (r *rig) idle(w, s *testNode) {
	r.Helper()
	for _, e := range [][2]*testNode{{w, s}, {s, w}} {
		p := (*e[0].tables.peers.Load())[e[1].who.ID]
		r.until(e[1].who.Addr()+" has its slots back", func() bool {
			p.mu.Lock()
			l := p.link
			p.mu.Unlock()
			p.handleReclaim(l, &reclaimRequest{slots: maxIndex, bytes: 1 << 40})
			return e[1].budget.slots.Len() == 0
		})
	}
}

// TestBatch: a batch is one notification, and so is its answer, however long the values are. Values are written to registered buffers and
// to pull tensors. All slots are returned.
func TestBatch(t *testing.T) {
	for _, split := range []bool{false, true} {
		for _, lens := range [][]int{{1024, 1024, 1024}, {100, 0, 8}, {70000, 70000, 70000}, {1 << 20, 700, 3000}, {4000, 1500, 0}} {
			t.Run(fmt.Sprintf("%v, split=%v", lens, split), func(t *testing.T) {
				r := newRig(t)
				w, s := r.pair(func(c *env.Config) { c.SplitQPLag = split })
				registered := make([]byte, lens[0]+1)
				if err := s.RegisterRecvBuffer(9, 1, backend.Bytes(registered)); err != nil {
					t.Fatal(err)
				}
				var counts []*atomic.Int64
				for round := range 20 {
					if round == 1 { // the first has slot requests
						counts = r.notifications(w, s)
					}
					a, b, c, d := value(lens[0], round), value(lens[1], round+1), value(lens[2], round+2), value(lens[0]/2, round+3)
					dst, small := make([]byte, len(d)), make([]byte, 10)
					w.must(batch(s, 10*round, pushed(1, a), pushed(2, b), pushed(3, c), pulled(4, dst), pulled(5, small)))
					m := s.next()
					s.wantParts(m, a, b, c, nil, nil)
					if p := m.Parts[0]; p.Placed != (lens[0] > smallPayload) || p.Placed && &p.Vals.Host()[0] != &registered[0] {
						t.Errorf("a push of %d bytes of a key with a registered buffer: placed %v", lens[0], p.Placed)
					}
					s.must(answerBatch(m, d, value(10, round)))
					x := w.next()
					w.wantParts(x, d, value(10, round))
					if !x.Parts[0].Placed || !x.Parts[1].Placed || !bytes.Equal(dst, d) || !bytes.Equal(small, value(10, round)) {
						t.Error("the answers are not in the pull tensors")
					}
					x.Release()
					m.Release()
				}
				for i, n := range counts {
					if got := n.Load(); !split && got != 19 {
						t.Errorf("node %d has sent %d notifications for 19 batches", i, got)
					}
				}
				r.idle(w, s)
			})
		}
	}
}

// TestBatchDone: Done of a batch is called once, when the last value was sent.
func TestBatchDone(t *testing.T) {
	r := newRig(t)
	w, s := r.pair()
	for i, lens := range [][]int{{100}, {100, 50000}, {50000, 60000, 70000}, {1600}} {
		var parts []van.Part
		var values [][]byte
		for k, n := range lens {
			values = append(values, value(n, k))
			parts = append(parts, pushed(uint64(k), values[k]))
		}
		m := batch(s, 10*i, parts...)
		m.Done = w
		w.must(m)
		got := s.next()
		s.wantParts(got, values...)
		got.Release()
		r.until("Done", func() bool { return int(w.dones.Load()) == i+1 })
	}
	r.idle(w, s)
	if n := w.dones.Load(); n != 4 {
		t.Errorf("Done was called %d times for 4 batches", n)
	}
}

// TestBatchOfManyParts: values up to 512 bytes follow a directory that is longer than a cell; longer ones have slots of their own.
func TestBatchOfManyParts(t *testing.T) {
	r := newRig(t)
	w, s := r.pair()
	for _, x := range []struct{ parts, bytes int }{{200, 33}, {100, 600}, {van.MaxParts, 1}, {3000, 512}} {
		values := make([][]byte, x.parts)
		all := make([]van.Part, x.parts)
		for i := range values {
			values[i] = value(x.bytes, i)
			all[i] = pushed(uint64(i), values[i])
		}
		w.must(batch(s, 0, all...))
		m := s.next()
		s.wantParts(m, values...)
		m.Release()
	}
	r.idle(w, s)
}

// TestBatchBeforeTheConnection: batches that are sent before there is a connection arrive as batches, in their order among other messages.
func TestBatchBeforeTheConnection(t *testing.T) {
	r := newRig(t)
	w, s := r.node(9), r.node(8)
	r.net.RejectNext(1<<30, 8)
	w.connect(s)
	for i := range 5 {
		w.must(batch(s, 10*i, pushed(1, value(100, i)), pushed(2, value(50000, i))))
		w.must(push(s, 1, 10*i+5, value(100, i)))
	}
	r.net.RejectNext(0, 0)
	for i := range 5 {
		m := s.next()
		s.wantParts(m, value(100, i), value(50000, i))
		m.Release()
		s.wantValue(10*i+5, value(100, i))
	}
}

// TestBatchCanceled: a batch that is canceled while its values wait for slots does not arrive, nor does one that is canceled when the
// device has it. The slots serve later batches.
func TestBatchCanceled(t *testing.T) {
	r := newRig(t)
	w, s := r.pair()
	var b []byte
	for i := range 12 {
		a := value(50000, i)
		if i < 6 {
			b = make([]byte, 100000<<i)
		}
		copy(b, value(len(b), i))
		m := batch(s, 10*i, pushed(1, a), pushed(2, b), pushed(3, value(8, i)))
		m.Done = w
		cancel := func() {
			if i%3 == 0 {
				w.Cancel(van.Requests{First: int32(10 * i), Count: 3})
				clear(a)
				clear(b)
			}
		}
		if i < 6 { // b waits for a slot, since it is longer than those before
			s.device0().exclusive(func() {
				w.must(m)
				w.must(push(s, 4, 10*i+5, nil))
				cancel()
			})
		} else { // the device has all
			r.net.Hold()
			w.must(m)
			w.must(push(s, 4, 10*i+5, nil))
			cancel()
			r.net.Release()
		}
		got := s.next()
		if i%3 != 0 {
			s.wantParts(got, a, b, value(8, i))
			got.Release()
			got = s.next()
		}
		if int(got.Timestamp) != 10*i+5 {
			t.Fatalf("message %d arrives, want %d", got.Timestamp, 10*i+5)
		}
		got.Release()
		r.until("the memory is released", func() bool { return int(w.dones.Load()) == i+1 })
	}
	r.idle(w, s)
	if n := s.Stats().Malformed; n > 0 {
		t.Errorf("%d malformed messages", n)
	}
}

// TestBatchInvalidated: an invalidated pull tensor of a queued batch is not named to the peer.
func TestBatchInvalidated(t *testing.T) {
	r := newRig(t)
	w, s := r.node(9), r.node(8)
	r.net.RejectNext(1<<30, 8)
	w.connect(s)
	kept, gone := make([]byte, 5000), make([]byte, 5000)
	w.must(batch(s, 0, pulled(1, kept), pulled(2, gone)))
	w.Invalidate(backend.Bytes(gone))
	r.net.RejectNext(0, 0)
	m := s.next()
	if m.Parts[0].Option == 0 || m.Parts[1].Option != 0 {
		t.Errorf("remote keys %d and %d, want one of the first pull only", m.Parts[0].Option, m.Parts[1].Option)
	}
	m.Release()
	w.Invalidate(backend.Bytes(kept))
}

// TestBatchRefused: if the peer refuses the slot of one value, the whole batch is dropped, Done is called, and messages behind it arrive.
func TestBatchRefused(t *testing.T) {
	for _, last := range []bool{false, true} {
		t.Run(fmt.Sprintf("last=%v", last), func(t *testing.T) {
			r := newRig(t)
			w, s := r.node(9), r.node(8, func(c *env.Config) { c.RDMAPeerBudget = 1 << 20 })
			r.link(w, s)
			parts := []van.Part{pushed(1, value(50000, 1)), pushed(2, value(4<<20, 2)), pushed(3, value(60000, 3))}
			if last {
				parts[1], parts[2] = parts[2], parts[1]
			}
			for i := range 3 {
				m := batch(s, 10*i, parts...)
				m.Done = w
				w.must(m)
				w.must(push(s, 1, 10*i+5, value(100, i)))
				s.wantValue(10*i+5, value(100, i))
				r.until("Done", func() bool { return int(w.dones.Load()) == i+1 })
			}
			w.wantDown(s, "STEPAF_RDMA_PEER_BUDGET")
			w.must(batch(s, 50, parts[0], pushed(4, value(60000, 3))))
			m := s.next()
			s.wantParts(m, value(50000, 1), value(60000, 3))
			m.Release()
			r.idle(w, s)
		})
	}
}

// TestBatchMetaRefused: if the peer refuses the slot of the meta while values wait, the batch is dropped.
func TestBatchMetaRefused(t *testing.T) {
	r := newRig(t)
	w, s := r.node(9), r.node(8, func(c *env.Config) { c.RDMAPeerBudget = 1 << 20 })
	r.link(w, s)
	parts := []van.Part{pushed(1, value(600000, 1)), pushed(2, value(600000, 1))} // not both fit
	for i := range van.MaxParts - 2 {
		parts = append(parts, pushed(uint64(3+i), value(512, 1))) // these need a meta of 16 MiB
	}
	m := batch(s, 0, parts...)
	m.Done = w
	w.must(m)
	w.must(push(s, 1, 5, value(100, 1)))
	s.wantValue(5, value(100, 1))
	r.until("Done", func() bool { return w.dones.Load() == 1 })
	r.idle(w, s)
}

// TestBatchOutgrown: a longer value of a key with a registered buffer, queued behind a batch whose first value has been written to a slot
// of that key, does not end that slot. Nor does a control message in between change that.
func TestBatchOutgrown(t *testing.T) {
	r := newRig(t)
	w, s := r.pair()
	if err := s.RegisterRecvBuffer(9, 1, backend.Bytes(make([]byte, 1<<20))); err != nil {
		t.Fatal(err)
	}
	first := func(n int) []byte { return value(n, 1) } // the next push overwrites it, with the same bytes
	for i := range 6 {
		n := 2000 + 1000*i
		w.must(batch(s, 100*i, pushed(1, first(n))))
		m := s.next()
		s.wantParts(m, first(n))
		if !m.Parts[0].Placed {
			t.Error("the value is not in the registered buffer")
		}
		m.Release()
		r.until("the slot is returned", func() bool { return s.incomingOf(9).owed.count.Load() == 0 })
		w.must(control(s, i)) // it has a slot, or gets one before the batch
		long := value(100000<<i, i)
		s.device0().exclusive(func() { // long waits for a slot
			w.must(batch(s, 100*i+1, pushed(1, first(n)), pushed(2, long)))
			w.must(control(s, i))
			w.must(batch(s, 100*i+3, pushed(1, first(n+500)), pushed(1, first(n+700))))
		})
		var got []*van.Message
		for controls := 0; len(got) < 2 || controls < 2; {
			if m := s.next(); m.IsControl() {
				controls++
				m.Release()
			} else {
				got = append(got, m)
			}
		}
		s.wantParts(got[0], first(n), long) // now nothing writes to the registered buffer
		s.wantParts(got[1], first(n+500), first(n+700))
		got[0].Release()
		got[1].Release()
	}
	if n := s.Stats().Malformed; n > 0 {
		t.Errorf("%d malformed messages", n)
	}
	r.idle(w, s)
}

// TestBatchEndsWithTheConnection: if the connection ends between the values of a batch and the batch, nothing of it arrives on the next one.
func TestBatchEndsWithTheConnection(t *testing.T) {
	r := newRig(t)
	w, s := r.pair()
	first := batch(s, 0, pushed(1, value(50000, 1)), pushed(2, value(300000, 1)))
	w.must(first)
	m := s.next()
	m.Release()
	second := batch(s, 10, pushed(1, value(50000, 1)), pushed(3, value(900000, 1)))
	second.Done = w
	s.device0().exclusive(func() { // the first value finds a slot, the second does not
		w.must(second)
		p := (*w.tables.peers.Load())[8]
		r.until("the first value is written", func() bool {
			p.mu.Lock()
			defer p.mu.Unlock()
			return p.sender.Waiting() == 2 && p.link.queue.Idle()
		})
		p.currentLink().fail(errTest)
		w.wantDown(s, errTest.Error())
	})
	w.wantUp(s)
	r.until("Done", func() bool { return w.dones.Load() == 1 })
	w.must(batch(s, 20, pushed(1, value(50000, 2)), pushed(3, value(900000, 2))))
	m = s.next()
	if m.Timestamp != 20 {
		t.Errorf("batch %d arrives, want 20", m.Timestamp)
	}
	s.wantParts(m, value(50000, 2), value(900000, 2))
	m.Release()
	r.idle(w, s)
}

// TestRandomWholeBatches sends batches of random forms and answers them, holds their values for random times, and breaks connections. A
// batch arrives whole, once and in order, or not at all. All values are right for as long as they are held, and no slot is lost.
func TestRandomWholeBatches(t *testing.T) {
	for _, x := range []struct {
		name   string
		fails  bool
		change func(*env.Config)
		jitter time.Duration
	}{
		{name: "plain"},
		{name: "split", change: func(c *env.Config) { c.SplitQPLag = true }, jitter: 200 * time.Microsecond},
		{name: "few slots", change: places(40)},
		{name: "shallow", change: func(c *env.Config) { c.RDMAStartDepth, c.RDMARxDepth = 8, 8 }},
		{name: "fails", fails: true},
		{name: "fails, split", fails: true, change: func(c *env.Config) { c.SplitQPLag = true }},
	} {
		t.Run(x.name, func(t *testing.T) {
			r := newRig(t, func(c *fakeverbs.Config) { c.Jitter = x.jitter })
			if x.change == nil {
				x.change = func(*env.Config) {}
			}
			w, s := r.pair(x.change)
			rng := rand.New(rand.NewPCG(1, 2))
			var failing atomic.Bool
			r.net.FailWR(func(fakeverbs.WR) verbs.Status {
				if failing.Load() && rand.N(150) == 0 {
					return []verbs.Status{verbs.StatusRetryExceeded, verbs.StatusRemoteAccess}[rand.N(2)]
				}
				return verbs.StatusOK
			})
			failing.Store(x.fails)
			up := func(n *testNode, id int) bool {
				p := (*n.tables.peers.Load())[id]
				p.mu.Lock()
				defer p.mu.Unlock()
				return p.link != nil && !p.state.lost && !p.state.oneWay
			}
			connections := func() int {
				p := (*w.tables.peers.Load())[8]
				p.mu.Lock()
				defer p.mu.Unlock()
				if p.link == nil {
					return -1
				}
				return p.state.connectCount
			}
			var releases sync.WaitGroup
			hold := func(m *van.Message, check func(string)) {
				check("on arrival")
				releases.Go(func() {
					check("when it is released")
					m.Release()
				})
			}
			length := func() int { return []int{0, rng.IntN(100), rng.IntN(3000), rng.IntN(100000)}[rng.IntN(4)] }
			last, whole := -1, 0
			for round := range 150 {
				var parts []van.Part
				var want, answers [][]byte
				for k := range rng.IntN(5) {
					v := value(length(), round+k)
					parts, want = append(parts, pushed(uint64(rng.IntN(6)), v)), append(want, v)
				}
				for k := range rng.IntN(3) + 1 {
					v := value(length(), round+10+k)
					parts, want = append(parts, pulled(uint64(10+k), make([]byte, len(v)))), append(want, nil)
					answers = append(answers, v)
				}
				pulls := slices.Clone(parts[len(parts)-len(answers):])
				b := batch(s, 100*round, parts...)
				b.Done = w
				r.until("both are connected", func() bool { return up(w, 8) && up(s, 9) })
				before := connections()
				if err := w.Send(b); err != nil {
					if !x.fails {
						t.Fatal(err)
					}
					w.dones.Add(1)
					continue
				}
				var m *van.Message
				r.until("the batch, or the end of the connection", func() bool {
					select {
					case m = <-s.in:
						return true
					default:
						return x.fails && int(w.dones.Load()) == round+1 && connections() != before
					}
				})
				if m == nil {
					continue // it is lost, or arrives in a later round
				}
				if !x.fails && int(m.Timestamp) != 100*round || int(m.Timestamp) <= last {
					t.Fatalf("batch %d arrives after %d in round %d", m.Timestamp, last, round)
				}
				if last = int(m.Timestamp); last != 100*round {
					m.Release()
					continue
				}
				whole++
				same := func(m *van.Message, want [][]byte) func(string) {
					return func(when string) {
						if err := vantest.SameParts(m, want); err != nil {
							t.Errorf("batch %d, %s: %v", m.Timestamp, when, err)
						}
					}
				}
				a := answerBatch(m, answers...)
				hold(m, same(m, want))
				if err := s.Send(a); err != nil && !x.fails {
					t.Fatal(err)
				}
				if x.fails {
					continue
				}
				got := w.next()
				for i, p := range pulls {
					if !bytes.Equal(p.Into.Host(), answers[i]) {
						t.Errorf("round %d: wrong bytes in pull tensor %d", round, i)
					}
				}
				hold(got, same(got, answers))
			}
			failing.Store(false)
			r.until("both are connected", func() bool { return up(w, 8) && up(s, 9) })
			releases.Wait()
			r.until("all memory is released", func() bool { return w.dones.Load() == 150 })
			for len(s.in)+len(w.in) > 0 {
				select {
				case m := <-s.in:
					m.Release()
				case m := <-w.in:
					m.Release()
				}
			}
			if t.Logf("%d of 150 batches have arrived", whole); !x.fails && whole < 150 {
				t.Error("some were lost without a failure")
			}
			r.idle(w, s)
			if n := w.Stats().Malformed + s.Stats().Malformed; n > 0 {
				t.Errorf("%d malformed messages", n)
			}
		})
	}
}

// rawBatch encodes m, a batch, with the table entries e and the values behind it, and a trailer.
func (h *hostileWorld) rawBatch(m *van.Message, entries [][3]uint64, behind []byte, change func(*trailer)) []byte {
	b := encode(h.rig, m, nil)
	t := trailer{batch: true, metaLen: len(b)}
	b = append(b, make([]byte, aligned(len(b))-len(b))...)
	for _, e := range entries {
		b = le.AppendUint64(b, e[0])
		b = le.AppendUint32(b, uint32(e[1]))
		b = le.AppendUint32(b, uint32(e[2]))
	}
	if len(behind) > 0 {
		b = append(b, make([]byte, aligned(len(b))-len(b))...)
	}
	b = append(b, behind...)
	if change != nil {
		change(&t)
	}
	n := len(b)
	b = append(b, make([]byte, trailerLen)...)
	t.put(b[n:])
	return b
}

// TestHostileBatch: a batch whose directory is invalid, or whose table does not match it or names memory that is not the sender's, is refused
// as a whole. The slots that it names are returned, and serve the next batch.
func TestHostileBatch(t *testing.T) {
	h := newHostileWorld(t, true)
	const request = kindPush | kindRequest
	meta := h.c.ask(slotRequest{metaLen: 4 * conn.CellSize, dataNum: nativeSlotRequest, origin: 1})
	apart := h.c.ask(slotRequest{metaLen: 4 * conn.CellSize, dataNum: nativeSlotRequest, origin: 6})
	a := h.c.ask(slotRequest{metaLen: conn.CellSize, dataNum: nativeSlotRequest, data: [4]uint64{4096, request, 4000}, origin: 2})
	b := h.c.ask(slotRequest{metaLen: conn.CellSize, dataNum: nativeSlotRequest, data: [4]uint64{4096, request, 4000}, origin: 3})
	once := h.c.ask(slotRequest{metaLen: conn.CellSize, dataNum: nativeSlotRequest, data: [4]uint64{4096, kindOneShot, 4000}, origin: 4})
	bare := h.c.ask(slotRequest{metaLen: conn.CellSize, dataNum: nativeSlotRequest, origin: 5})
	h.w.must(batch(h.s, 900, pushed(1, value(4000, 1)), pushed(2, value(4000, 2))))
	held := h.s.next() // slots of another connection
	others := slices.Clone((*received)(held.Native()).slots)
	held.Release()
	long, short := value(4000, 1), value(100, 2)
	dst := make([]byte, 50)
	good := batch(h.s, 7, pushed(1, long), pushed(2, short), pulled(3, dst))
	inA, inline := [3]uint64{0, uint64(a.index), entrySlot}, [3]uint64{0, 0, entryInline}
	pull := [3]uint64{64, 5, entryNone}
	n := uint64(0)
	send := func(b []byte) { h.c.notify(0, meta.index, meta.meta, meta.metaKey, b) }
	refused := func(what string, m *van.Message, entries [][3]uint64, behind []byte, change func(*trailer)) {
		t.Helper()
		send(h.rawBatch(m, entries, behind, change))
		n++
		h.seen(n, what)
	}
	arrives := func(what string) {
		t.Helper()
		h.c.post(0, verbs.SendWR{Op: verbs.OpWrite, RemoteAddr: a.data, RKey: a.dataKey}, long)
		send(h.rawBatch(good, [][3]uint64{inA, inline, pull}, short, nil))
		m := h.s.next()
		h.s.wantParts(m, long, short, nil)
		if p := m.Parts[2]; p.Addr != 64 || p.Option != 5 || m.Sender != 11 {
			t.Errorf("%s: a pull tensor at %d with key %d from %d, want 64, 5, 11", what, p.Addr, p.Option, m.Sender)
		}
		refused("slots that hold a batch", good, [][3]uint64{inA, inline, pull}, short, nil)
		m.Release()
	}
	arrives("before")
	for i, e := range [][][3]uint64{
		nil, {inA},
		{inline, inline, pull},
		{{0, uint64(meta.index), entrySlot}, inline, pull}, // the slot of the batch itself
		{{0, uint64(bare.index), entrySlot}, inline, pull},
		{{0, uint64(once.index), entrySlot}, inline, pull},
		{{0, uint64(others[0].Index()), entrySlot}, inline, pull},
		{{0, uint64(others[1].Index()), entrySlot}, inline, pull},
		{{0, maxIndex, entrySlot}, inline, pull}, {{0, 1 << 31, entrySlot}, inline, pull}, {{0, math.MaxUint32, entrySlot}, inline, pull},
		{{0, uint64(a.index), entryNone}, inline, pull}, {inA, {}, pull},
		{{0, 0, entryPlaced}, inline, pull}, {inA, {0, 0, entryPlaced}, pull},
		{{0, 0, 4}, inline, pull}, {inA, inline, {0, 0, math.MaxUint32}},
		{inA, inline, inline}, {inA, inline, {0, uint64(b.index), entrySlot}}, {inA, inline, {0, 0, entryPlaced}},
	} {
		refused(fmt.Sprintf("table %d", i), good, e, short, nil)
	}
	refused("a slot twice", good, [][3]uint64{inA, inA, pull}, nil, nil)
	table := [][3]uint64{inA, inline, pull}
	for _, k := range []int{0, 1, 99, 101, 164, 500} {
		refused(fmt.Sprintf("%d bytes behind the table", k), good, table, value(k, 1), nil)
	}
	refused("two entries too many", good, append(slices.Clone(table), pull, pull), short, nil)
	for i, f := range []func(*trailer){
		func(t *trailer) { t.batch = false },
		func(t *trailer) { t.batch, t.inMeta = false, true },
		func(t *trailer) { t.metaLen = 0 },
		func(t *trailer) { t.metaLen-- },
		func(t *trailer) { t.metaLen += 200 },
		func(t *trailer) { t.metaLen = math.MaxUint32 },
		func(t *trailer) { t.n = maxCredits + 1 },
	} {
		refused(fmt.Sprintf("trailer %d", i), good, table, short, f)
	}
	refused("no batch", push(h.s, 1, 1, nil), table, short, nil)
	larger := batch(h.s, 7, pushed(1, value(4097, 1)), pushed(2, short), pulled(3, dst))
	refused("a value longer than its slot", larger, table, short, nil)
	huge := batch(h.s, 7, pushed(1, long), pushed(2, short), pulled(3, dst))
	for _, at := range []int{0, 32, 64} { // of the entries of the directory
		for _, x := range []struct {
			off int
			to  byte
		}{{8 + 3, 0x7f}, {8 + 3, 0xff}, {12, 2}, {13, 9}, {13, 255}, {14, 9}, {15, 1}, {24 + 7, 0x80}} {
			huge.WriteDirectory()
			huge.Body[at+x.off] = x.to
			if at == 64 && x.off == 8+3 && x.to == 0x7f { // a pull may have any length
				continue
			}
			refused(fmt.Sprintf("directory with %#x at %d", x.to, at+x.off), huge, table, short, nil)
		}
	}
	for _, k := range []int{1, 23, 31, 95} {
		huge.WriteDirectory()
		huge.Body = huge.Body[:k]
		refused(fmt.Sprintf("a directory of %d bytes", k), huge, table, short, nil)
	}
	empty := batch(h.s, 7)
	refused("an empty directory", empty, table, short, nil)
	late := batch(h.s, math.MaxInt32-1, pushed(1, long), pushed(2, short), pulled(3, dst))
	refused("timestamps beyond the last", late, table, short, nil)
	// Answers that nobody has asked for have no values in pull tensors, and end no request.
	unasked := batch(h.s, 7, pushed(1, long), pushed(2, short))
	unasked.Request = false
	unasked.Parts[0].Push, unasked.Parts[1].Push = false, false
	unasked.WriteDirectory()
	send(h.rawBatch(unasked, [][3]uint64{{64, 0, entryPlaced}, inline}, short, nil))
	m := h.s.next()
	if m.Parts[0].Vals.Len() != 0 || m.Parts[0].Placed || !bytes.Equal(m.Parts[1].Vals.Host(), short) {
		t.Errorf("an answer to nothing: %d bytes, placed %v, and %d bytes", m.Parts[0].Vals.Len(), m.Parts[0].Placed, m.Parts[1].Vals.Len())
	}
	m.Release()
	canceled := h.rawBatch(good, table, short, nil)
	canceled[len(canceled)-trailerLen+offFlags] |= trailerCanceled
	h.c.notify(0, apart.index, apart.meta, apart.metaKey, canceled)
	arrives("after")
	h.ends(n)
}

// FuzzBatch: whatever directory, table and values are written to a slot, the values of a batch that is accepted lie in that slot or in
// slots of the connection, each in one of its own.
func FuzzBatch(f *testing.F) {
	in := &inbound{}
	d := &device{v: &rvan{node: &node{}}}
	d.v.budget.slots = newTable(30)
	for i := range 3 {
		l := &receiveSlot{Owner: in, Data: 100 * (i + 1), OneShot: i == 2}
		if err := d.v.budget.slots.Add(l, false); err != nil {
			f.Fatal(err)
		}
		l.Memory.data = backend.Bytes(make([]byte, l.Data))
	}
	m := batch(&testNode{}, 1, pushed(1, value(90, 1)), pushed(2, value(150, 1)), pulled(3, value(8, 1)))
	table := make([]byte, 3*entryLen)
	for i, e := range [][2]uint32{{0, entrySlot}, {1, entrySlot}, {5, entryNone}} {
		le.PutUint32(table[entryLen*i+offKey:], e[0])
		le.PutUint32(table[entryLen*i+offKind:], e[1])
	}
	f.Add(m.Body, table, true)
	le.PutUint32(table[offKind:], entryInline)
	f.Add(m.Body, append(append(table, make([]byte, aligned(len(table))-len(table))...), value(90, 1)...), true)
	f.Add(m.Body[64:], table[2*entryLen:], false)
	f.Fuzz(func(t *testing.T, body, b []byte, request bool) {
		rx := &received{d: d, in: in}
		rx.msg.Reset()
		rx.msg.Head, rx.msg.IsTensor, rx.msg.Request, rx.msg.Timestamp, rx.msg.Body = van.WholeBatch, true, request, 1, body
		err := rx.readParts(&trailer{batch: true}, b)
		if err != nil && !errors.Is(err, van.ErrMalformed) {
			t.Errorf("error %v", err)
		}
		seen := map[*byte]bool{}
		for i := range rx.msg.Parts {
			p := &rx.msg.Parts[i]
			if err != nil || p.Vals.Len() == 0 {
				continue
			}
			v := p.Vals.Host()
			if seen[&v[0]] || len(v) != p.Len {
				t.Errorf("part %d has %d bytes, want %d, or memory of another part", i, len(v), p.Len)
			}
			seen[&v[0]] = true
		}
		for _, l := range rx.slots {
			if l.Drop(); l.OneShot {
				t.Error("a one-shot slot is taken for a value")
			}
		}
		for i := range uint32(3) {
			if n := d.v.budget.slots.Get(i).Holders(); n != 0 {
				t.Fatalf("slot %d has %d holders", i, n)
			}
		}
	})
}
