package rendezvous

import (
	"errors"
	"math"
	"slices"
	"testing"
)

func TestClass(t *testing.T) {
	for _, s := range []struct {
		n     int
		class int8
		size  int
	}{{-1, 1, 0}, {0, 1, 0}, {1, 9, 512}, {512, 9, 512}, {513, 10, 1024}, {1 << 20, 20, 1 << 20}, {1<<20 + 1, 21, 1 << 21},
		{math.MaxInt32, 31, 1 << 31}} {
		class, size := Class(s.n)
		if class != s.class || size != s.size {
			t.Errorf("Class(%d) = %d, %d; want %d, %d", s.n, class, size, s.class, s.size)
		}
		if again, _ := Class(size); again != class {
			t.Errorf("the class of %d is %d, that of its size %d", s.n, class, again)
		}
	}
	for _, s := range []struct{ bytes, want int }{{0, 64}, {1 << 20, 64}, {2 << 20, 32}, {16 << 20, 4}, {1 << 31, 4}} {
		if n := Eager(s.bytes); n != s.want {
			t.Errorf("Eager(%d) = %d, want %d", s.bytes, n, s.want)
		}
	}
}

// TestBatchOverEager has a receiver that returns no slot before it has a complete
// batch, which needs more slots than are requested at once.
func TestBatchOverEager(t *testing.T) {
	m := newModel(t, 1, false)
	m.credits = false
	m.connect()
	const batch, size = 20, 32 << 20
	if Eager(size) >= batch {
		t.Fatal("the batch is too small")
	}
	var all []*item
	for i := range batch {
		o := &item{seq: i + 1, key: uint64(i % 3), request: true, push: i%2 == 0, meta: 300, data: size}
		all = append(all, o)
		m.submit(o)
	}
	// Nothing is consumed: only Ticks help.
	for range 10 * batch {
		for len(m.wire) > 0 {
			m.receive()
		}
		for len(m.answers) > 0 {
			f := m.answers[0]
			m.answers = m.answers[1:]
			f()
		}
		m.check()
		m.tick()
	}
	if m.arrived != batch {
		t.Errorf("%d of %d have arrived", m.arrived, batch)
	}
	for _, o := range all {
		if o.done != "put" {
			t.Errorf("item %d: %q", o.seq, o.done)
		}
	}
	if n := len(m.s.granted); n > batch+Eager(size) {
		t.Errorf("%d slots for %d items", n, batch)
	}
}

// TestFreeSlotTooSmall: a message at the head gets a slot of its own when all that fit are in use by messages that wait for it, although smaller ones are free.
func TestFreeSlotTooSmall(t *testing.T) {
	m := newModel(t, 1, false)
	m.connect()
	m.submit(&item{seq: 1, request: true, push: true, meta: 300, data: 1000})
	m.settle()
	for len(m.held)+len(m.answers) > 0 {
		m.step()
	}
	m.credits = false
	const big = 1 << 20
	n := Eager(1024 + big)
	for i := range n + 1 {
		m.submit(&item{seq: i + 2, request: true, push: true, meta: big, data: 1000})
	}
	for range 10 {
		for len(m.wire) > 0 {
			m.receive()
		}
		for len(m.answers) > 0 {
			f := m.answers[0]
			m.answers = m.answers[1:]
			f()
		}
		m.check()
		m.tick()
	}
	if m.arrived != n+2 {
		t.Errorf("%d of %d have arrived", m.arrived, n+2)
	}
	if len(m.s.granted) > n+2 {
		t.Errorf("%d slots for %d messages", len(m.s.granted), n+2)
	}
}

// TestTickConsidersNeeds: a waiting message whose need has changed gets the free slot that fits it now.
func TestTickConsidersNeeds(t *testing.T) {
	small, large := Need{Route: Route{Class: 1}, Meta: 300}, Need{Route: Route{Class: 20}, Meta: 300, Data: 1 << 20}
	need := small
	s := NewSender(func(int) Need { return need })
	s.Connect(false)
	next := func(want Kind) Action[int] {
		t.Helper()
		a, ok := s.Next()
		if !ok || a.Kind != want {
			t.Fatalf("action %+v, %t; want one of kind %d", a, ok, want)
		}
		return a
	}
	submit := func(i int) Action[int] {
		t.Helper()
		s.Submit(i, false)
		return next(Request)
	}
	s.Reply(submit(0).Origin, RemoteSlot{Index: 7})
	next(Put)
	s.Credit(7)
	need = large
	submit(1) // the request is not answered
	if a, ok := s.Next(); ok {
		t.Fatalf("action %+v, want none", a)
	}
	need = small
	s.Tick()
	s.Tick()
	if a := next(Put); a.Item != 1 || a.Slot.Index != 7 {
		t.Errorf("message %d in slot %d, want 1 and 7", a.Item, a.Slot.Index)
	}
}

// TestDirect: an item gets a free slot at once if none waits.
func TestDirect(t *testing.T) {
	need := Need{Route: Route{Class: 1}, Meta: 300}
	s := NewSender(func(int) Need { return need })
	if s.Direct(1) != nil {
		t.Error("a slot without a connection")
	}
	s.Connect(false)
	if s.Direct(1) != nil {
		t.Error("a slot that was not granted")
	}
	for i := range 2 {
		s.Submit(i, false)
	}
	first, _ := s.Next()
	second, _ := s.Next()
	s.Reply(first.Origin, RemoteSlot{Index: 0})
	s.Reply(second.Origin, RemoteSlot{Index: 1})
	if s.Direct(2) != nil {
		t.Error("a slot before an item that waits")
	}
	for range 2 {
		if a, ok := s.Next(); !ok || a.Kind != Put {
			t.Errorf("action %+v, want a message", a)
		}
	}
	if s.Direct(2) != nil {
		t.Error("a slot that is in use")
	}
	s.Credit(1)
	if p := s.Direct(2); p == nil || p.Index != 1 || s.Direct(3) != nil {
		t.Errorf("slot %+v, want number 1, once", p)
	}
}

// TestLargeMetas: the bytes of metas limit how many slots are requested at once.
func TestLargeMetas(t *testing.T) {
	m := newModel(t, 1, false)
	m.connect()
	for i := range 20 {
		m.submit(&item{seq: i + 1, request: true, push: true, meta: 16 << 20, data: 100})
	}
	if len(m.wire) != 4 {
		t.Errorf("%d slots are requested, want 4", len(m.wire))
	}
	m.settle()
}

// TestRefused: the message that needs what was refused is removed, and others of its route are sent.
func TestRefused(t *testing.T) {
	for _, x := range []struct {
		name    string
		metas   []int
		refused int // the request that is refused
		want    int // the message that is removed; 0: none
		before  func(*model)
	}{
		{name: "the second", metas: []int{300, 1 << 20, 300}, refused: 1, want: 2},
		{name: "the first", metas: []int{1 << 20, 300}, refused: 0, want: 1},
		{name: "one that has found another slot", metas: []int{300, 301, 1 << 20}, refused: 0, want: 0, before: func(m *model) {
			m.s.Reply(m.wire[1].origin, RemoteSlot{Index: 77}) // for the first message
			m.pump()
		}},
	} {
		t.Run(x.name, func(t *testing.T) {
			m := newModel(t, 1, false)
			m.connect()
			for i, n := range x.metas {
				m.submit(&item{seq: i + 1, request: true, push: true, meta: n, data: 1000})
			}
			if x.before != nil {
				x.before(m)
			}
			o, need, ok := m.s.Refused(m.wire[x.refused].origin)
			switch {
			case ok != (x.want > 0):
				t.Fatalf("a message is removed: %t, want %t", ok, x.want > 0)
			case ok && (o.seq != x.want || need.Meta != x.metas[x.refused]):
				t.Errorf("message %d is removed with %d bytes of meta, want %d", o.seq, need.Meta, x.want)
			}
		})
	}
}

// TestReplace: messages that take the place of a refused one keep its place in the order.
func TestReplace(t *testing.T) {
	for at := range 3 {
		m := newModel(t, 1, false)
		m.connect()
		for i := range 3 {
			meta := 300
			if i == at {
				meta = 1 << 20
			}
			m.submit(&item{seq: 10 * (i + 1), request: true, push: true, meta: meta, data: 1000})
		}
		if _, _, ok := m.s.Refused(m.wire[at].origin); !ok {
			t.Fatal("nothing was refused")
		}
		m.wire = slices.Delete(m.wire, at, at+1)
		var parts []*item
		for i := range 9 {
			parts = append(parts, &item{seq: 10*(at+1) + i, request: true, push: true, meta: 300, data: 10 << i})
		}
		m.s.Replace(parts)
		m.settle()
		for m.step() {
		}
		if m.arrived != 11 {
			t.Errorf("%d messages have arrived, want 11", m.arrived)
		}
	}
}

// TestManyKeys: the Sender's memory does not grow with the number of keys.
func TestManyKeys(t *testing.T) {
	m := newModel(t, 2, false)
	m.connect()
	for i := range 3000 {
		m.submit(&item{seq: i + 1, key: uint64(i), request: true, push: true, meta: 300, data: 1000})
		if i%5 == 0 {
			m.settle()
		}
	}
	m.settle()
	for m.step() {
	}
	if n := len(m.s.routes); n > 2 {
		t.Errorf("%d routes", n)
	}
	if n := len(m.s.granted); n > 16 {
		t.Errorf("%d slots", n)
	}
	if len(m.s.requests) != 0 || m.arrived != 3000 {
		t.Errorf("%d slot requests are open, %d have arrived", len(m.s.requests), m.arrived)
	}
}

// TestGrown: a StepMesh node never gets a request for a larger slot of a key than the first.
func TestGrown(t *testing.T) {
	send := func(m *model, seq, data int) *item {
		return &item{seq: seq, key: 5, request: true, push: true, meta: 300, data: data}
	}
	t.Run("after the answer", func(t *testing.T) {
		m := newModel(t, 1, true)
		m.connect()
		m.submit(send(m, 1, 100))
		m.settle()
		if err := m.s.Check(send(m, 2, 101)); !errors.Is(err, ErrGrown) {
			t.Errorf("error %v, want %v", err, ErrGrown)
		}
		m.submit(send(m, 3, 100))
		m.submit(send(m, 4, 1))
		m.settle()
		if m.arrived != 3 {
			t.Errorf("%d have arrived, want 3", m.arrived)
		}
	})
	t.Run("before the answer", func(t *testing.T) {
		m := newModel(t, 1, true)
		m.connect()
		m.submit(send(m, 1, 100))
		if err := m.s.Check(send(m, 2, 101)); !errors.Is(err, ErrGrown) {
			t.Errorf("error %v, want %v", err, ErrGrown)
		}
		m.settle()
	})
	t.Run("before the connection", func(t *testing.T) {
		m := newModel(t, 1, true)
		grown := send(m, 2, 101)
		m.submit(send(m, 1, 100))
		m.submit(grown)
		m.submit(send(m, 3, 50))
		m.connect()
		m.settle()
		if m.arrived != 2 || grown.done != "dropped" {
			t.Errorf("%d have arrived, want 2; the larger one was %q", m.arrived, grown.done)
		}
	})
}

// TestRequestsInOrder: slots are requested in the order of the messages, also for messages that waited for the connection.
func TestRequestsInOrder(t *testing.T) {
	for _, original := range []bool{false, true} {
		m := newModel(t, 1, original)
		sizes := []int{100, 5000, 70000, 1 << 20} // a route for each
		for i, n := range sizes[:3] {
			m.submit(&item{seq: i + 1, key: uint64(i), request: true, push: true, meta: 300, data: n})
		}
		m.connect()
		m.submit(&item{seq: 4, key: 3, request: true, push: true, meta: 300, data: sizes[3]})
		if !original {
			for i := range sizes {
				_, sizes[i] = Class(sizes[i])
			}
		}
		var got []int
		for _, e := range m.wire {
			got = append(got, e.need.Data)
		}
		if !slices.Equal(got, sizes) {
			t.Errorf("original %t: slots requested for %d bytes, want %d", original, got, sizes)
		}
		m.settle()
	}
}

// TestNonsense: invalid messages of a hostile peer have no effect.
func TestNonsense(t *testing.T) {
	m := newModel(t, 1, false)
	m.connect()
	o := &item{seq: 1, key: 5, request: true, push: true, meta: 300, data: 100}
	m.submit(o)
	origin := m.wire[0].origin
	if m.s.Reply(origin+1, RemoteSlot{}) || m.s.Reply(0, RemoteSlot{}) || m.s.NotNeeded(origin+1) {
		t.Error("an answer to nothing is taken")
	}
	if _, _, ok := m.s.Refused(origin + 1); ok {
		t.Error("a refusal of nothing is taken")
	}
	m.settle()
	for m.step() {
	}
	if m.s.Reply(origin, RemoteSlot{Index: 9}) || m.s.NotNeeded(origin) {
		t.Error("a second answer is taken")
	}
	for i := range uint32(20) {
		if ok := m.s.Credit(i); ok == (m.s.granted[i] != nil) {
			t.Errorf("a credit for slot %d, which nobody uses: %t", i, ok)
		}
	}
	m.s.Answered(77, true)
	m.check()
}

// TestReclaim: free slots return at once, the others when they are free, up to the wanted
// number; queued messages request new slots.
func TestReclaim(t *testing.T) {
	m := newModel(t, 1, false)
	m.connect()
	for i := range 10 {
		m.submit(&item{seq: i + 1, request: true, key: 1, data: 600, meta: 300})
	}
	for len(m.wire)+len(m.answers) > 0 { // nothing is consumed
		if len(m.wire) > 0 {
			m.receive()
			continue
		}
		m.answers[0]()
		m.answers = m.answers[1:]
	}
	if n := len(m.s.granted); n < 4 {
		t.Fatalf("%d slots, want some", n)
	}
	all := len(m.s.granted)
	m.s.Reclaim(3, 0)
	if n := len(m.s.Returns()); n != 0 {
		t.Errorf("%d slots are given up, though none is free", n)
	}
	for len(m.held) > 0 {
		m.consume(0)
	}
	for len(m.answers) > 0 {
		m.answers[0]()
		m.answers = m.answers[1:]
	}
	if n := len(m.s.Returns()); n != 3 || len(m.s.granted) != all-3 {
		t.Errorf("%d of %d slots are given up, want 3", n, all)
	}
	m.giveBack()
	m.s.Reclaim(0, 1500) // two of 1024 and a meta each
	if n := len(m.s.Returns()); n != 2 {
		t.Errorf("%d slots are given up for 1500 bytes, want 2", n)
	}
	m.giveBack()
	m.settle()
	for i := range 10 {
		m.submit(&item{seq: 11 + i, request: true, key: 1, data: 600, meta: 300})
	}
	m.settle()
	m.s.Disconnect(func(*item) bool { return false })
	if m.s.Reclaim(5, 0); len(m.s.Returns()) != 0 {
		t.Error("slots of an ended connection come back")
	}
}

// TestReleasedOneShot: the slot of a one-shot that was not sent is returned to a native receiver. A StepMesh node takes no slot back.
func TestReleasedOneShot(t *testing.T) {
	for original, want := range map[bool][]uint32{false: {7}, true: nil} {
		s := NewSender(func(int) Need { return Need{OneShot: true, Meta: 100} })
		s.Connect(original)
		s.Submit(1, true)
		a, _ := s.Next()
		s.Reply(a.Origin, RemoteSlot{Index: 7})
		if a, _ = s.Next(); a.Kind != Put {
			t.Fatalf("action %+v, want a Put", a)
		}
		if s.Release(a.Slot); !slices.Equal(s.Returns(), want) {
			t.Errorf("a StepMesh node is the receiver: %t: slots %d are returned, want %d", original, s.Returns(), want)
		}
	}
}
