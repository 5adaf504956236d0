package rdma

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/env"
	"github.com/stepaf/stepaf-go/van/rdma/conn"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// The messages that wait for a slow peer are limited in bytes.
func TestSendBudget(t *testing.T) {
	r := newRig(t)
	w, s := r.node(9, func(c *env.Config) { c.SendBudget = 1 << 20 }), r.node(8, places(4))
	r.link(w, s)
	v := value(100<<10, 1)
	var err error
	sent := 0
	for ; err == nil && sent < 100; sent++ {
		err = w.Send(push(s, 1, sent, v))
	}
	if !errors.Is(err, van.ErrQueueFull) || !strings.Contains(err.Error(), "STEPAF_SEND_BUDGET") || !strings.Contains(err.Error(), van.NodeName(8)) {
		t.Fatalf("Send of message %d: %v, want %v that names the variable and the peer", sent, err, van.ErrQueueFull)
	}
	if n := w.Stats().RefusedSends; n != 1 {
		t.Errorf("%d messages are counted as refused, want 1", n)
	}
	w.says("rdma: a message is refused: too many bytes are queued for its peer", van.NodeName(8), "STEPAF_SEND_BUDGET")
	w.must(control(s, 1000)) // these do not count
	got := 0
	for range sent {
		m := s.next()
		if !m.IsControl() {
			got++
		}
		m.Release()
	}
	if got != sent-1 {
		t.Errorf("%d messages came, want %d", got, sent-1)
	}
	w.must(push(s, 1, 2000, v)) // the budget is free again
	s.wantValue(2000, v)
	p := (*w.tables.peers.Load())[8]
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.unsent != 0 {
		t.Errorf("%d bytes are said to wait, want none", p.unsent)
	}
}

// TestBatchBeyondTheBudget: a batch is accepted whole, however many bytes and messages wait then. Other messages are refused then. All accepted
// messages arrive.
func TestBatchBeyondTheBudget(t *testing.T) {
	const size = 300 << 10
	v := value(size, 1)
	for _, x := range []struct {
		name, limit string
		set         func(*env.Config)
	}{
		{"bytes", "want less than 1048576 (STEPAF_SEND_BUDGET)", func(c *env.Config) { c.SendBudget = 1 << 20 }},
		{"messages", "BYTEPS_RDMA_MAX_CONCURR_WR", func(c *env.Config) { c.RDMAStartDepth, c.RDMARxDepth, c.RDMAMaxConcurrWR = 8, 8, 24 }},
	} {
		t.Run(x.name, func(t *testing.T) {
			r := newRig(t)
			w, s := r.node(9, x.set), r.node(8, places(4))
			r.link(w, s)
			const sent = 50
			m := &van.Message{}
			m.Reset()
			m.Receiver, m.Request, m.Timestamp, m.AppID, m.CustomerID = s.who.ID, true, 0, 0, 0
			for range sent {
				m.Parts = append(m.Parts, van.Part{Key: 1, Push: true, Len: size, Device: backend.Host, Dim: 1, Vals: backend.Bytes(v)})
				m.Parts[len(m.Parts)-1].Shape[0] = size
			}
			m.WriteDirectory()
			r.net.Hold() // no slot is granted meanwhile
			w.must(m)
			for _, n := range []int{0, size} {
				vantest.Fails(t, w.Send(push(s, 1, sent, v[:n])), van.ErrQueueFull, van.NodeName(8), x.limit)
			}
			r.net.Release()
			for i := 0; i < sent; {
				got, release := s.parts(1)
				r.checkParts("the batch", got, m.Parts[i:][:len(got)], i)
				release()
				i += len(got)
			}
			w.must(push(s, 1, sent, v))
			s.wantValue(sent, v)
		})
	}
}

// If a handler is slow for one peer, that peer's queued messages stay within the budget. Other peers are not affected, and in the end all messages have
// arrived, in order. Then the peer gets new slots again.
func TestReceiveBudget(t *testing.T) {
	r := newRig(t)
	const budget, size, count = 1 << 20, 64 << 10, 200
	s := r.make(8, func(c *env.Config) { c.RecvBudgetPeer = budget })
	s.listenOn(0)
	gate := make(chan bool)
	next := 0
	done := make(chan bool)
	s.Start(func(m *van.Message) {
		if m.IsControl() || m.Sender != 9 || m.Timestamp == count {
			s.in <- m.Retain()
			return
		}
		<-gate
		if int(m.Timestamp) != next || !bytes.Equal(m.Vals.Host(), value(size, next)) {
			t.Errorf("timestamp %d, want %d, or the value has changed", m.Timestamp, next)
		}
		if next++; next == count {
			close(done)
		}
	})
	w, other := r.node(9), r.node(11)
	r.link(w, s)
	r.link(other, s)
	for i := range count {
		w.must(push(s, 1, i, value(size, i)))
	}
	r.until("the peer is paused", func() bool { return s.Stats().PausedReads > 0 })
	s.says("rdma: messages of a peer wait for a slow handler", van.NodeName(9), "STEPAF_RECV_BUDGET_PEER")
	for i := range 20 { // meanwhile
		other.must(push(s, 1, i, value(size, i)))
		s.wantValue(i, value(size, i))
		w.must(control(s, i))
		m := s.next()
		if !m.IsControl() {
			t.Errorf("timestamp %d, want a control message", m.Timestamp)
		}
		m.Release()
	}
	// Slots that the peer had when it was paused, and the budget, but not slots for all messages.
	if n := s.incomingOf(9).slots.registeredBytes.Load(); n > count*size*3/4 {
		t.Errorf("%d bytes are registered for the peer", n)
	}
	close(gate)
	<-done
	r.until("nothing waits", func() bool { return s.delivery.recvBudget.Used() == 0 })
	w.must(push(s, 1, count, value(8*size, count))) // none of its slots is large enough
	s.wantValue(count, value(8*size, count))
}

// Keys and lengths are copied before delivery, since the peer can still write to its slot.
func TestKeysAreCopied(t *testing.T) {
	h := newHostileWorld(t, true)
	r := h.c.ask(slotRequest{metaLen: conn.CellSize, dataNum: nativeSlotRequest, data: [4]uint64{4096, kindHost, 4096}, origin: 1})
	keys, vals, lens := value(800, 1), value(1000, 2), value(400, 3)
	data := make([]byte, 4096)
	copy(data, keys)
	copy(data[aligned(800):], vals)
	copy(data[aligned(aligned(800)+1000):], lens)
	inSlot := placement{where: valueInSlot}
	tr := trailer{frames: 3, lens: [van.MaxFrames]uint32{800, 1000, 400}}
	write := func(b []byte) {
		h.c.post(0, verbs.SendWR{Op: verbs.OpWrite, RemoteAddr: r.data, RKey: r.dataKey}, b)
		h.c.notify(0, r.index, r.meta, r.metaKey, encodeParts(h.rig, push(h.s, 1, 1, vals), []placement{inSlot, inSlot, inSlot}, nil, tr))
	}
	write(data)
	m := h.s.next()
	defer m.Release()
	// The peer writes other keys while the message is in use. That is refused, but written even so.
	for i := range data {
		data[i] = 0xff
	}
	before := h.s.Stats().Malformed
	write(data)
	h.seen(before+1, "slot in use")
	if !bytes.Equal(m.Keys.Host(), keys) || !bytes.Equal(m.Lens.Host(), lens) {
		t.Error("keys or lengths changed while they were in use")
	}
	if bytes.Equal(m.Vals.Host(), vals) {
		t.Error("the peer has not written to its slot")
	}
	h.ends(before + 1)
}

// Metas of two peers have different registrations: a peer that may write to one cannot write to the other.
func TestMetasOfPeersAreApart(t *testing.T) {
	h := newHostileWorld(t, true)
	h.w.must(push(h.s, 1, 1, value(100, 1)))
	h.s.wantValue(1, value(100, 1))
	a := h.c.ask(slotRequest{metaLen: conn.CellSize, dataNum: nativeSlotRequest, data: [4]uint64{0, 0}, origin: 1})
	h.s.budget.slots.Each(func(l *receiveSlot) {
		if l.Owner.(*inbound).handshake.node == 9 && l.Memory.meta.RKey == a.metaKey {
			t.Errorf("slot %d of another peer has the same key", l.Index())
		}
	})
	h.ends(0)
}

// TestReceiveBudgetWithoutValues: a peer whose handler is slow cannot fill this node's memory with messages without values either: their slots are not
// returned while other messages wait.
func TestReceiveBudgetWithoutValues(t *testing.T) {
	r := newRig(t)
	w := r.node(9)
	s := r.make(8, func(c *env.Config) { c.RecvBudgetPeer, c.RecvBudget = 64<<10, 128<<10 })
	s.listenOn(0)
	stop := make(chan bool)
	s.Start(func(*van.Message) { <-stop })
	defer close(stop)
	r.link(w, s)
	const all = 20000
	sent, refused := 0, 0
	r.until("all have been sent, or no more are taken", func() bool {
		for ; sent < all; sent++ {
			m := pull(s, 1, sent, nil)
			if w.sendMore(m, sent%8 != 7) != nil { // its own queue is full
				refused++
				break
			}
			refused = 0
		}
		w.push(8)
		return sent == all || refused > 100
	})
	waits, d := 0, s.device0()
	d.exclusive(func() {
		d.queues.m.Range(func(_, l any) bool { waits += l.(*peerQueue).deferred.Len(); return true })
	})
	if waits > 2000 {
		t.Errorf("%d of %d messages wait in memory, with a budget of %d bytes", waits, sent, s.cfg.RecvBudgetPeer)
	}
}
