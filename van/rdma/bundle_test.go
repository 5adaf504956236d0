package rdma

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"sync/atomic"
	"testing"

	"github.com/stepaf/stepaf-go/tests/fakeverbs"
	"github.com/stepaf/stepaf-go/van"
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

// sendMore queues m as sendBatch queues a message that stands for a part. With more it does not post the work requests: another call, or
// push, follows.
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

// mustMore is sendMore with more. It must succeed.
func (n *testNode) mustMore(m *van.Message) {
	n.r.Helper()
	if err := n.sendMore(m, true); err != nil {
		n.r.Fatal(err)
	}
}

// push posts the work requests of earlier calls of sendMore.
func (n *testNode) push(id int) {
	p := (*n.tables.peers.Load())[id]
	p.mu.Lock()
	p.flush()
	p.mu.Unlock()
}

// TestBundle: the small messages of a call, and its answers, are one write in each direction. They arrive in order, and return their slot once, when the
// last value in it is released. For a node that does not accept bundles, each message is one write.
func TestBundle(t *testing.T) {
	for _, takes := range []bool{true, false} {
		t.Run(fmt.Sprintf("taken=%v", takes), func(t *testing.T) {
			r := newRig(t)
			w, s := r.pair()
			for _, end := range [][2]*testNode{{w, s}, {s, w}} {
				p := (*end[0].tables.peers.Load())[end[1].who.ID]
				p.mu.Lock()
				if !p.link.bundles {
					t.Error("a node of this library does not announce that it accepts bundles")
				}
				p.link.bundles = takes
				p.mu.Unlock()
			}
			dst := make([]byte, 700)
			round := func(i int) {
				w.mustMore(push(s, 1, 3*i, value(500, i)))
				w.mustMore(push(s, 2, 3*i+1, value(300, i+1)))
				w.must(pull(s, 3, 3*i+2, dst))
				var in []*van.Message
				for k, n := range []int{500, 300, 0} {
					m := s.next()
					if int(m.Timestamp) != 3*i+k || !m.Request || m.Push != (k < 2) {
						t.Fatalf("message %d of round %d is %v", k, i, &m.Meta)
					}
					if m.Vals.Len() != n || n > 0 && !bytes.Equal(m.Vals.Host(), value(n, i+k)) {
						t.Fatalf("message %d of round %d has %d bytes, or wrong ones, want %d", k, i, m.Vals.Len(), n)
					}
					in = append(in, m)
				}
				for k, m := range in[:2] {
					a := push(w, m.Key, int(m.Timestamp), nil)
					a.Request = false
					s.mustMore(a)
					if i%2 == k {
						m.Release()
						in[k] = nil
					}
				}
				s.must(answer(in[2], value(700, i)))
				for k := range 3 {
					m := w.next()
					if int(m.Timestamp) != 3*i+k || m.Request {
						t.Fatalf("answer %d of round %d is %v", k, i, &m.Meta)
					}
					m.Release()
				}
				if !bytes.Equal(dst, value(700, i)) {
					t.Fatalf("round %d: wrong bytes in the pull tensor", i)
				}
				for _, m := range in {
					if m != nil {
						m.Release()
					}
				}
			}
			round(0) // with its slot requests
			counts := r.notifications(w, s)
			const rounds = 100
			for i := range rounds {
				round(i + 1)
			}
			for i, n := range counts {
				// Credits that arrive in the middle of a batch cause queued messages to be sent.
				if got := n.Load(); takes && got > rounds*3/2 || !takes && got != 3*rounds {
					t.Errorf("node %d has sent %d writes with a notification for %d rounds", i, got, rounds)
				}
			}
			if n := s.budget.slots.Len(); n > 30 {
				t.Errorf("%d slots after %d rounds of one call at a time", n, rounds)
			}
		})
	}
}

// TestBundleEnds: a message that does not fit gets a write of its own, as does a large value, and a control message between two small ones. The order is kept.
func TestBundleEnds(t *testing.T) {
	r := newRig(t)
	w, s := r.pair()
	sizes := []int{0, 1000, 600, 0, 0, 0, 0, 0, 0, 50000, 0, 1200, 1200, 10}
	batch := func(i int) {
		for k, n := range sizes {
			if k == 4 {
				w.mustMore(control(s, i))
			}
			m := push(s, uint64(10+k), 100*i+k, value(n, i+k))
			if err := w.sendMore(m, k+1 < len(sizes)); err != nil {
				t.Fatal(err)
			}
		}
		k, controls := 0, 0
		for k < len(sizes) || controls == 0 {
			m := s.next()
			if m.IsControl() {
				controls++
				m.Release()
				continue
			}
			if int(m.Timestamp) != 100*i+k || m.Vals.Len() != sizes[k] || m.Vals.Len() > 0 && !bytes.Equal(m.Vals.Host(), value(sizes[k], i+k)) {
				t.Fatalf("message %d of batch %d is %v with %d bytes, or wrong ones, want %d", k, i, &m.Meta, m.Vals.Len(), sizes[k])
			}
			m.Release()
			k++
		}
	}
	batch(0)
	counts := r.notifications(w)
	const batches = 50
	for i := range batches {
		batch(i + 1)
	}
	if n := counts[0].Load(); n > 10*batches {
		t.Errorf("%d writes with a notification for %d batches of %d messages", n, batches, len(sizes)+1)
	}
}

// TestHostileBundle: a write whose trailers describe no messages, or overlapping ones, is refused as a whole. If a later message is invalid, the messages before
// it are delivered, and the slot is returned.
func TestHostileBundle(t *testing.T) {
	h := newHostileWorld(t, true)
	h.acceptBundles()
	r := h.c.ask(slotRequest{metaLen: conn.CellSize, dataNum: nativeSlotRequest, data: [4]uint64{0, 0}, origin: 1})
	one := func(ts int) *van.Message {
		m := push(h.s, 1, ts, nil)
		m.Push = false
		return m
	}
	good := trailer{frames: 2, lens: [van.MaxFrames]uint32{8}}
	// two makes two messages, of which the second has trailer t.
	two := func(ts int, t trailer) []byte {
		b := encode(h.rig, one(ts), &good)
		t.previousEnd = len(b)
		return append(append(b, make([]byte, aligned(len(b))-len(b))...), encode(h.rig, one(ts+1), &t)...)
	}
	n := uint64(0)
	for _, before := range []int{1, 63, 64, rawMeta + trailerLen - 1, 400, 700, len(two(1, good)) - 1, len(two(1, good)), 2048, 0xffff} {
		b := two(1, good)
		le.PutUint16(b[len(b)-trailerLen+offBefore:], uint16(before))
		h.c.notify(0, r.index, r.meta, r.metaKey, b)
		n++
		h.seen(n, fmt.Sprintf("a message before that ends at %d", before))
	}
	bad := good
	bad.frames = 1
	h.c.notify(0, r.index, r.meta, r.metaKey, two(5, bad))
	n++
	h.seen(n, "a bundle whose second message makes no sense")
	if m := h.s.next(); m.Timestamp != 5 || m.Sender != 11 {
		t.Errorf("timestamp %d from %d, want 5 from 11", m.Timestamp, m.Sender)
	} else {
		m.Release()
	}
	h.c.notify(0, r.index, r.meta, r.metaKey, two(7, good))
	for ts := 7; ts < 9; ts++ {
		m := h.s.next()
		if int(m.Timestamp) != ts || m.Sender != 11 {
			t.Errorf("timestamp %d from %d, want %d from 11", m.Timestamp, m.Sender, ts)
		}
		m.Release()
	}
	h.ends(n)
}

// acceptBundles makes the server believe that the process accepts bundles.
func (h *hostileWorld) acceptBundles() {
	in := h.s.incomingOf(11)
	h.s.device0().exclusive(func() { in.handshake.bundles = true })
}

// TestLongMetaOfAnEarlierNode: a node of a version without bundles has the 32-bit length of each meta where newer nodes have the end of the previous message.
func TestLongMetaOfAnEarlierNode(t *testing.T) {
	h := newHostileWorld(t, true) // it does not announce bundles
	for i, n := range []int{1000, 60000, 70000, 200000} {
		m := push(h.s, 1, i, nil)
		m.Push = false
		m.Body = make([]byte, n)
		b := encode(h.rig, m, &trailer{frames: 2, lens: [van.MaxFrames]uint32{8}})
		le.PutUint32(b[len(b)-trailerLen+offMetaLen:], uint32(len(b)-trailerLen))
		q := h.c.ask(slotRequest{metaLen: uint64(max(len(b), conn.CellSize)), dataNum: nativeSlotRequest, origin: uint64(i + 1)})
		h.c.notify(0, q.index, q.meta, q.metaKey, b)
		got := h.s.next()
		if len(got.Body) != n {
			t.Errorf("a body of %d bytes, want %d", len(got.Body), n)
		}
		got.Release()
	}
	h.ends(0)
}

// TestHostileBundleOfParts: a bundle in a one-shot slot, when too many messages wait for other parts. Its first message is released, but the memory of the
// second one is not released before that has been decoded.
func TestHostileBundleOfParts(t *testing.T) {
	h := newHostileWorld(t, true)
	h.acceptBundles()
	once := h.c.ask(slotRequest{metaLen: 1 << 16, dataNum: nativeSlotRequest, data: [4]uint64{0, kindOneShot}, origin: 2})
	in := h.s.incomingOf(11)
	h.s.device0().exclusive(func() { // as after so many messages whose parts are announced
		for len(in.order.incomplete) < maxIndex {
			rx := h.s.device0().pool.get()
			rx.in, rx.splits = in, math.MaxUint64
			in.order.incomplete = append(in.order.incomplete, rx)
		}
		in.order.hasIncomplete.Store(true)
	})
	p := push(h.s, 1, 2, value(64, 1))
	meta := encode(h.rig, p, nil)
	first := make([]byte, aligned(len(meta))+64+trailerLen)
	copy(first, meta)
	(&trailer{frames: 2, lens: [van.MaxFrames]uint32{8, 64}, inMeta: true, metaLen: len(meta)}).put(first[len(first)-trailerLen:])
	second := encode(h.rig, push(h.s, 1, 3, nil), &trailer{frames: 2, lens: [van.MaxFrames]uint32{8}, previousEnd: len(first)})
	h.c.notify(0, once.index, once.meta, once.metaKey, append(append(first, make([]byte, aligned(len(first))-len(first))...), second...))
	h.until("the connection ends", in.failed.Load)
	h.ends(0)
}

// FuzzBundle: whatever was written to a slot, the messages found there do not overlap, and are in order.
func FuzzBundle(f *testing.F) {
	b := make([]byte, 2*rawMeta+2*trailerLen+frameAlign)
	(&trailer{previousEnd: rawMeta + trailerLen}).put(b[len(b)-trailerLen:])
	f.Add(b)
	var w writtenMessages
	in := &inbound{}
	in.handshake.bundles = true
	f.Fuzz(func(t *testing.T, b []byte) {
		found, err := w.parse(nativeIn{slotSet{in}}, b, len(b))
		if err != nil {
			if !errors.Is(err, van.ErrMalformed) || len(found) > 0 {
				t.Errorf("%d messages and the error %v", len(found), err)
			}
			return
		}
		at := 0
		for i, m := range found {
			if len(found) > 1 && len(m) < rawMeta+trailerLen || at+len(m) > len(b) || &m[0] != &b[at] {
				t.Fatalf("message %d of %d has %d bytes at %d of %d", i, len(found), len(m), at, len(b))
			}
			at = aligned(at + len(m))
		}
		if last := found[len(found)-1]; &last[len(last)-1] != &b[len(b)-1] {
			t.Errorf("the last of %d messages does not end with the write", len(found))
		}
	})
}
