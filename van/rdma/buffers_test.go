package rdma

import (
	"bytes"
	"fmt"
	"slices"
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

// writesTo counts the writes of n to each of the buffers.
func (r *rig) writesTo(n *testNode, buffers ...[]byte) []atomic.Int64 {
	counts := make([]atomic.Int64, len(buffers))
	r.net.FailWR(func(wr fakeverbs.WR) verbs.Status {
		for i, b := range buffers {
			if wr.Stack == n.stack && wr.Op == verbs.OpWrite && wr.RemoteAddr == backend.Bytes(b).Addr() {
				counts[i].Add(1)
			}
		}
		return verbs.StatusOK
	})
	return counts
}

// usable waits until values of these keys may be written to their buffers at the node s, and no others.
func (n *testNode) usable(s *testNode, keys ...uint64) {
	n.r.Helper()
	p := (*n.tables.peers.Load())[s.who.ID]
	n.r.until(fmt.Sprintf("the buffers of keys %d are known", keys), func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		d := p.link.dialect.(*nativeOut)
		return len(d.buffers) == len(keys) && !slices.ContainsFunc(keys, func(k uint64) bool { return d.bufferFor(k, 1) == nil })
	})
}

// returned waits until w knows that all slots of n that it has used are free.
func (n *testNode) returned(w *testNode) {
	n.r.Helper()
	n.r.until("the slots are returned", func() bool { return n.incomingOf(w.who.ID).owed.count.Load() == 0 })
	n.must(control(w, 0)) // it arrives after the credits
	w.next().Release()
}

// TestBatchToABuffer: pushes of keys for which the application has registered a receive buffer are in the buffer, if they fit. After the first one that is
// not inline, later ones are written there.
func TestBatchToABuffer(t *testing.T) {
	r := newRig(t)
	w, s := r.pair()
	buffers := [][]byte{make([]byte, 70000), make([]byte, 100), make([]byte, 70000)}
	for key, b := range buffers {
		if err := s.RegisterRecvBuffer(9, uint64(key), backend.Bytes(b)); err != nil {
			t.Fatal(err)
		}
	}
	writes := r.writesTo(w, buffers...)
	var written [3]int64
	round := func(i int, want [4]bool, lens ...int) {
		t.Helper()
		m := batch(s, 10*i, i, lens...)
		w.must(m)
		got, release := s.parts(len(lens))
		defer release()
		r.checkParts("the request", got, m.Parts, 10*i)
		for k := range got {
			fits := k < len(buffers) && lens[k] <= len(buffers[k])
			if got[k].Placed != fits || fits && got[k].Vals.Addr() != backend.Bytes(buffers[k]).Addr() {
				t.Errorf("round %d: the value of key %d is in its buffer: %t, want %t", i, k, got[k].Placed, fits)
			}
			if want[k] {
				written[k]++
			}
		}
		for k := range buffers {
			if n := writes[k].Load(); n != written[k] {
				t.Errorf("round %d: %d values of key %d were written to the buffer, want %d", i, n, k, written[k])
			}
		}
	}
	round(0, [4]bool{}, 70000, 70000, 500, 70000)
	w.usable(s, 0)
	round(1, [4]bool{true}, 70000, 70000, 70000, 70000)
	w.usable(s, 0, 2)
	round(2, [4]bool{true, false, true}, 5000, 70000, 70000, 70000)
	w.usable(s, 0, 2)
	round(3, [4]bool{false, false, true}, 70001, 50, 60000, 70000)
	w.usable(s, 0, 2)
	round(4, [4]bool{false, false, true}, 200, 100, 60000, 70000)
	w.usable(s, 0, 2)
	round(5, [4]bool{true, false, true}, 2000, 101, 60000, 70000)
	w.Disconnect(8) // the buffers are announced anew on the next connection
	w.connect(s)
	w.wantUp(s)
	r.until("the server's memory is released", func() bool { return s.Stats().LentValues == 0 })
	s.connect(w)
	s.wantUp(w)
	w.wantUpOrSend(s, batch(s, 100, 7, 70000, 8))
	got, release := s.parts(2)
	if !got[0].Placed || !bytes.Equal(got[0].Vals.Host(), value(70000, 7)) || writes[0].Load() != written[0] {
		t.Error("the first value on a new connection was written to the buffer, or is wrong")
	}
	release()
}

// TestPushToABuffer: a value that is pushed alone is written to the receive buffer of its key, also the first one and those in flight, if it fits. Others
// use the slots of their size, and small ones are copied.
func TestPushToABuffer(t *testing.T) {
	r := newRig(t)
	w, s := r.pair()
	buffer := make([]byte, 70000)
	if err := s.RegisterRecvBuffer(9, 1, backend.Bytes(buffer)); err != nil {
		t.Fatal(err)
	}
	writes := r.writesTo(w, buffer)
	written := int64(0)
	for i, x := range []struct {
		key     uint64
		size    int
		placed  bool
		written int64
	}{{1, 70000, true, 1}, {2, 70000, false, 0}, {1, 5000, true, 1}, {1, 70001, false, 0}, {1, 100, true, 0}, {1, 0, false, 0}, {2, 5000, false, 0}, {1, 60000, true, 1}} {
		if i > 0 {
			w.usable(s, 1)
		}
		w.must(push(s, x.key, i, value(x.size, i)))
		m := s.next()
		if m.Placed != x.placed || x.placed != (m.Vals.Addr() == backend.Bytes(buffer).Addr()) || !bytes.Equal(m.Vals.Host(), value(x.size, i)) {
			t.Errorf("push %d of %d bytes under key %d is in the buffer: %t, want %t, or has other bytes", i, x.size, x.key, m.Placed, x.placed)
		}
		if written += x.written; writes[0].Load() != written {
			t.Errorf("after push %d of %d bytes, %d values were written to the buffer, want %d", i, x.size, writes[0].Load(), written)
		}
		m.Release()
	}
	for i := range 20 { // in flight together, under keys of which every third has a buffer
		if err := s.RegisterRecvBuffer(9, uint64(100+3*i), backend.Bytes(make([]byte, 3000))); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 20 {
		w.must(push(s, uint64(100+i), 100+i, value(3000, 100+i)))
	}
	for i := range 20 {
		s.wantValue(100+i, value(3000, 100+i))
	}
	if n := s.Stats().Malformed + w.Stats().Malformed; n != 0 {
		t.Errorf("%d malformed messages: %s", n, s.logged.String())
	}
	w.wantNoLoss()
}

// TestBatchOfOneToABuffer: the first value of a batch of one push is written to the receive buffer of its key, as that of a push alone.
func TestBatchOfOneToABuffer(t *testing.T) {
	r := newRig(t)
	w, s := r.pair()
	buffer := make([]byte, 70000)
	if err := s.RegisterRecvBuffer(9, 0, backend.Bytes(buffer)); err != nil {
		t.Fatal(err)
	}
	writes := r.writesTo(w, buffer)
	m := batch(s, 1, 3, 70000)
	w.must(m)
	got, release := s.parts(1)
	defer release()
	r.checkParts("the request", got, m.Parts, 1)
	if n := writes[0].Load(); n != 1 || !got[0].Placed || got[0].Vals.Addr() != backend.Bytes(buffer).Addr() {
		t.Errorf("%d values were written to the buffer, want 1, or it was not delivered there", n)
	}
}

// TestBufferAnnouncedBySlot: a push that finds a free slot makes the receiver announce the buffer of its key, too.
func TestBufferAnnouncedBySlot(t *testing.T) {
	r := newRig(t)
	w, s := r.pair()
	buffer := make([]byte, 70000)
	if err := s.RegisterRecvBuffer(9, 1, backend.Bytes(buffer)); err != nil {
		t.Fatal(err)
	}
	writes := r.writesTo(w, buffer)
	w.must(push(s, 7, 0, value(70000, 0)))
	s.wantValue(0, value(70000, 0))
	s.returned(w)
	for i := range 2 {
		w.must(push(s, 1, 1+i, value(70000, i)))
		s.wantValue(1+i, value(70000, i))
		w.usable(s, 1)
	}
	if n := writes[0].Load(); n != 1 {
		t.Errorf("%d values were written to the buffer, want 1", n)
	}
}

// TestBufferAnnouncedWhileWaiting: a push that waits for a slot is sent when its buffer is announced, although the slot request is not answered.
func TestBufferAnnouncedWhileWaiting(t *testing.T) {
	r := newRig(t)
	w := r.node(9)
	p := newRaw(r, rawAddr, van.Node{ID: 10})
	to := &testNode{who: van.Node{ID: 10, Hostname: rawAddr.String(), Port: p.port}}
	w.connect(to)
	c := p.accept(2, func(q int) []byte { return p.privateData(true, 0, q, 2) })
	w.wantUp(to)
	const slot, at = 256 << 10, 512 << 10
	mem := c.mem
	w.must(push(to, 5, 1, nil))
	var q slotRequest
	p.check(q.get(c.receive(immSlotRequest)))
	var reply [slotReplyLen]byte
	(&slotReply{origin: q.origin, index: 1, meta: backend.Bytes(mem).Addr() + slot, metaKey: p.mr.RKey()}).put(reply[:])
	c.send(immSlotReply, reply[:])
	for wrote := false; !wrote; {
		var out [1]verbs.Completion
		n, err := p.dev.Poll(out[:], 0, time.Second)
		p.check(err)
		wrote = n == 1 && out[0].Type == verbs.RecvWrite
	}
	credit := trailer{epoch: (*w.tables.peers.Load())[10].currentLink().epoch, n: 1, decoded: 1}
	credit.credits[0] = 1
	var b [trailerLen]byte
	credit.put(b[:])
	c.send(immCredits, b[:])
	m := push(to, 1, 2, value(70000, 1))
	m.Done = w
	w.must(m)
	p.check(q.get(c.receive(immSlotRequest)))
	var buffer [remoteBufferLen]byte
	(&remoteBuffer{key: 1, addr: backend.Bytes(mem).Addr() + at, rkey: p.mr.RKey(), len: 70000}).put(buffer[:])
	c.send(immBuffer, buffer[:])
	r.until("Done", func() bool { return w.dones.Load() == 1 })
	if !equal(mem[at:at+70000], value(70000, 1)) {
		t.Error("the value is not in the buffer")
	}
	w.Disconnect(10)
	p.end()
}

// TestUnusableBuffer: a buffer that the device refuses is tried once. Values of its key are copied there.
func TestUnusableBuffer(t *testing.T) {
	r := newRig(t)
	w, s := r.pair()
	buffer := make([]byte, 70000)
	if err := s.RegisterRecvBuffer(9, 1, backend.Bytes(buffer)); err != nil {
		t.Fatal(err)
	}
	w.must(push(s, 7, 0, value(70000, 0)))
	s.wantValue(0, value(70000, 0))
	s.returned(w)
	var tried atomic.Int64
	r.net.Fail(func(op fakeverbs.Op) error {
		if op.Kind != fakeverbs.OpRegister || op.Stack != s.stack || op.Size != len(buffer) {
			return nil
		}
		tried.Add(1)
		return syscall.ENOMEM
	})
	for i := range 4 {
		w.must(push(s, 1, 1+i, value(70000, i)))
		got := s.next()
		if !got.Placed || !bytes.Equal(buffer, value(70000, i)) {
			t.Error("the value is not in the buffer")
		}
		got.Release()
	}
	if n := s.lines("a receive buffer is not registered with the device", "key=1"); n != 1 || tried.Load() != 1 {
		t.Errorf("%d registrations were tried, and %d log lines, want 1: %s", tried.Load(), n, s.logged.String())
	}
}

// TestNewestPush: a push that the peer has written to a receive buffer is not replaced by an older one that arrived in a slot or inline. The older one is sent
// before its sender knows the buffer, and decoded after the newer one has been sent.
func TestNewestPush(t *testing.T) {
	const large = 70000
	single := func(to *testNode, ts, size int) *van.Message { return push(to, 0, ts, value(size, ts)) }
	whole := func(to *testNode, ts, size int) *van.Message { return batch(to, ts, ts, size) }
	packed := func(to *testNode, ts, size int) *van.Message {
		m := pushMany(to, 2, ts, value(size, ts))
		clear(m.Keys.Host()[:8])
		return m
	}
	for _, x := range []struct {
		name string
		old  func(*testNode, int, int) *van.Message
		size int // of the older push
		form func(*testNode, int, int) *van.Message
		want func(*env.Config)
	}{
		{name: "single, slot", old: single, size: large, form: single},
		{name: "single, inline", old: single, size: 500, form: single},
		{name: "batch, slot", old: whole, size: large, form: whole},
		{name: "batch, inline", old: whole, size: 500, form: whole},
		{name: "several keys", old: packed, size: large, form: single},
		{name: "several keys, inline", old: packed, size: 400, form: whole},
		{name: "split", old: whole, size: large, form: whole, want: func(c *env.Config) { c.SplitQPLag = true }},
	} {
		t.Run(x.name, func(t *testing.T) {
			r := newRig(t)
			if x.want == nil {
				x.want = func(*env.Config) {}
			}
			w, s := r.pair(x.want)
			buffer := make([]byte, large)
			if err := s.RegisterRecvBuffer(9, 0, backend.Bytes(buffer)); err != nil {
				t.Fatal(err)
			}
			p := (*w.tables.peers.Load())[8]
			// Slots of each kind.
			s.device0().exclusive(func() {
				for _, f := range []func(*testNode, int, int) *van.Message{x.old, x.form} {
					for _, n := range []int{large, 500, 400} {
						for range 3 {
							m := f(s, 0, n)
							if m.Key = 5; m.IsBatch() {
								m.Parts[0].Key = 5
								m.WriteDirectory()
							} else {
								le.PutUint64(m.Keys.Host(), 5)
							}
							w.must(m)
						}
					}
				}
			})
			var all []*van.Message
			for range 18 {
				all = append(all, s.next())
			}
			for _, m := range all {
				m.Release()
			}
			s.returned(w)
			in := s.incomingOf(9)
			sent := func() {
				r.until("it is sent", func() bool {
					p.mu.Lock()
					defer p.mu.Unlock()
					return p.sender.Waiting() == 0
				})
			}
			r.net.HoldQP(in.sends.QueuePairs[0].Num())
			w.must(x.form(s, 1, large)) // it makes the server announce the buffer
			first := s.next()
			s.device0().exclusive(func() {
				w.must(x.old(s, 2, x.size))
				sent()
				r.net.Release()
				r.until("the buffer is announced", func() bool {
					p.mu.Lock()
					defer p.mu.Unlock()
					return len(p.link.dialect.(*nativeOut).buffers) == 1
				})
				w.must(x.form(s, 3, large))
				sent()
			})
			second, third := s.next(), s.next()
			for i, m := range []*van.Message{first, second, third} {
				v, placed := m.Vals, m.Placed
				if m.IsBatch() {
					v, placed = m.Parts[0].Vals, m.Parts[0].Placed
				}
				if !placed || v.Addr() != backend.Bytes(buffer).Addr() {
					t.Errorf("push %d is not in the buffer", i+1)
				}
			}
			if !bytes.Equal(buffer, value(large, 3)) {
				t.Error("the buffer does not have the last push")
			}
			for _, m := range []*van.Message{first, second, third} {
				m.Release()
			}
			w.usable(s, 0) // again
		})
	}
}

// TestSplitPushes: the parts of a value that is split over queue pairs do not replace those of a newer value of another length.
func TestSplitPushes(t *testing.T) {
	for _, sizes := range [][2]int{{64 << 10, 40 << 10}, {64 << 10, 64 << 10}} {
		r := newRig(t)
		w, s := r.pair(func(c *env.Config) { c.SplitQPLag = true })
		buffer := make([]byte, sizes[0])
		if err := s.RegisterRecvBuffer(9, 0, backend.Bytes(buffer)); err != nil {
			t.Fatal(err)
		}
		w.must(push(s, 0, 1, value(sizes[0], 1)))
		s.next().Release()
		s.device0().exclusive(func() { // slots for metas
			for range 3 {
				w.must(push(s, 7, 1, value(500, 1)))
			}
		})
		for range 3 {
			s.next().Release()
		}
		s.returned(w)
		w.usable(s, 0)
		p := (*w.tables.peers.Load())[8]
		p.mu.Lock()
		slow := p.link.queue.QueuePairs[0].Num()
		p.mu.Unlock()
		r.net.HoldQP(slow)
		var second atomic.Int64 // writes of second parts
		r.net.FailWR(func(wr fakeverbs.WR) verbs.Status {
			if d := wr.RemoteAddr - backend.Bytes(buffer).Addr(); wr.Stack == w.stack && d > 0 && d < uint64(len(buffer)) {
				second.Add(1)
			}
			return verbs.StatusOK
		})
		for i, n := range sizes {
			w.must(push(s, 0, 2+i, value(n, 2+i)))
		}
		r.until("both second parts are written, or the newer value waits", func() bool {
			p.mu.Lock()
			defer p.mu.Unlock()
			return second.Load() == 2 || second.Load() == 1 && p.sender.Waiting() == 1
		})
		r.net.Release()
		for range sizes {
			m := s.next()
			defer m.Release()
		}
		if want := value(sizes[1], 3); !bytes.Equal(buffer[:sizes[1]], want) {
			t.Errorf("%d bytes after %d: the buffer does not have the last push", sizes[1], sizes[0])
		}
	}
}
