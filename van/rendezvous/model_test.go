package rendezvous

import (
	"errors"
	"flag"
	"fmt"
	"hash"
	"hash/fnv"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"

	_ "github.com/stepaf/stepaf-go/tests/testlimit"
)

// item is a message of the model.
type item struct {
	seq           int
	oneShot       bool
	key           uint64
	push, request bool
	meta, data    int

	done string // "put", "dropped"; "" while it is queued
}

// event is a slot request or a message from the sender.
type event struct {
	origin uint64 // of a slot request
	need   Need
	asker  *item // that the slot request is for
	item   *item // of a message
	index  uint32
	back   []uint32 // slots that the sender gives back
}

// answer is a message of the receiver, on a path that may change the order.
type answer func()

// model is a Sender with a receiver that behaves as the transports' receivers do, and checks
// the messages.
type model struct {
	t        testing.TB
	rng      *rand.Rand
	s        *Sender[*item]
	original bool
	room     int // number of actions that may be executed

	keys    map[uint64]bool // the sender's: keys whose buffers have been announced
	wire    []event
	answers []answer
	epoch   int

	// Of the receiver.
	table      *SlotTable[int] // meta bytes
	held       []*ReceiveSlot[int]
	unanswered []*item // requests that StepMesh has not answered
	inFlight   map[Route]*item
	registered map[uint64]int // bytes of the buffers, by key
	told       map[uint64]bool
	refuse     float64
	memory     int // number of slots with memory
	refusals   int
	last       [2]int
	arrived    int
	returned   int
	all        []*item
	credits    bool // whether the receiver gives any

	story hash.Hash64 // of all actions of the Sender
}

func newModel(t testing.TB, seed uint64, original bool) *model {
	m := &model{t: t, rng: rand.New(rand.NewPCG(seed, 1)), original: original, room: 1 << 30, credits: true, memory: 1 << 30,
		registered: map[uint64]int{}, story: fnv.New64a()}
	m.s = NewSender(m.need)
	m.forget()
	return m
}

// forget ends the connection.
func (m *model) forget() {
	m.table = NewSlotTable[int](1<<12, 0)
	m.wire, m.answers, m.held, m.unanswered = nil, nil, nil, nil
	m.inFlight, m.keys, m.told = map[Route]*item{}, map[uint64]bool{}, map[uint64]bool{}
	m.epoch++
}

func (m *model) need(o *item) Need {
	n := Need{OneShot: o.oneShot, Meta: o.meta}
	if m.original {
		n.Route, n.Data = Route{Key: o.key, Push: o.push, Request: o.request}, o.data
		return n
	}
	switch n.Route.Class, n.Data = Class(o.data); {
	case o.oneShot:
		n.Data = o.data
	case m.keys[o.key] && m.fitsBuffer(o):
		n.Route.Class, n.Data = Class(0)
	}
	return n
}

// fitsBuffer reports whether o can be written to a buffer of its key.
func (m *model) fitsBuffer(o *item) bool {
	return !m.original && !o.oneShot && o.push && o.request && o.data > 0 && o.data <= m.registered[o.key]
}

// pump executes the Sender's actions, up to room.
func (m *model) pump() {
	for ; m.room > 0; m.room-- {
		a, ok := m.s.Next()
		if !ok {
			return
		}
		m.tell(a)
		switch a.Kind {
		case Request:
			m.wire = append(m.wire, event{origin: a.Origin, need: a.Need, asker: a.Item})
		case Put:
			m.put(a.Item, a.Slot)
		case Drop:
			if !m.original || !errors.Is(a.Err, ErrGrown) {
				m.t.Fatalf("item %d is dropped: %v", a.Item.seq, a.Err)
			}
			m.drop(a.Item)
		}
	}
}

// tell records an action of the Sender.
func (m *model) tell(a Action[*item]) {
	slot := RemoteSlot{}
	if a.Slot != nil {
		slot = RemoteSlot{Index: a.Slot.Index, MetaLen: a.Slot.MetaLen, DataLen: a.Slot.DataLen}
	}
	seq := 0
	if a.Item != nil {
		seq = a.Item.seq
	}
	fmt.Fprintln(m.story, a.Kind, seq, a.Origin, a.Need, slot.Index, slot.MetaLen, slot.DataLen, m.s.Waiting())
}

func (m *model) connect() {
	m.s.Connect(m.original)
	m.pump()
}

func (m *model) tick() {
	m.s.Tick()
	m.pump()
}

func (m *model) put(o *item, at *RemoteSlot) {
	if o.done != "" {
		m.t.Fatalf("item %d is put, it was %s", o.seq, o.done)
	}
	o.done = "put"
	if at.MetaLen < o.meta || at.DataLen < o.data && !(m.keys[o.key] && m.fitsBuffer(o)) {
		m.t.Fatalf("item %d with %d and %d bytes is put in a slot with %d and %d", o.seq, o.meta, o.data, at.MetaLen, at.DataLen)
	}
	m.wire = append(m.wire, event{item: o, index: at.Index})
}

func (m *model) drop(o *item) {
	if o.done != "" {
		m.t.Fatalf("item %d is dropped, it was %s", o.seq, o.done)
	}
	o.done = "dropped"
}

// receive processes the next event on the wire.
func (m *model) receive() {
	e := m.wire[0]
	m.wire = m.wire[1:]
	if e.back != nil {
		m.takeBack(e.back)
		return
	}
	if e.item == nil {
		m.grant(e)
		return
	}
	l := m.table.Get(e.index)
	if l == nil {
		m.t.Fatalf("item %d came to slot %d, which there is not", e.item.seq, e.index)
	}
	ok, over := l.Hold()
	if !ok {
		m.t.Fatalf("item %d came to slot %d, which has ended", e.item.seq, e.index)
	}
	queue := 1
	if e.item.oneShot {
		queue = 0
	}
	if e.item.seq <= m.last[queue] {
		m.t.Fatalf("item %d came after %d", e.item.seq, m.last[queue])
	}
	m.last[queue] = e.item.seq
	m.arrived++
	if m.original && !l.OneShot {
		l.Drop()
		if e.item.request {
			if o := m.inFlight[l.Route]; o != nil {
				m.t.Fatalf("item %d came while item %d with the same key was not answered", e.item.seq, o.seq)
			}
			m.inFlight[l.Route] = e.item
			m.unanswered = append(m.unanswered, e.item)
		}
		return
	}
	if over {
		m.t.Fatalf("item %d came to slot %d, which was in use", e.item.seq, e.index)
	}
	if l.OneShot {
		m.table.End(l)
	}
	m.held = append(m.held, l)
}

// grant answers a slot request as package rdma does.
func (m *model) grant(e event) {
	reply := func(f func()) { m.answers = append(m.answers, func() { f(); m.pump() }) }
	need, origin := e.need, e.origin
	if !m.original && (m.rng.Float64() < m.refuse || m.table.Len() >= m.memory) {
		m.refusals++
		reply(func() {
			o, refused, ok := m.s.Refused(origin)
			if ok && refused != need {
				m.t.Fatalf("item %d with %+v is refused, %+v was requested", o.seq, refused, need)
			}
			if ok && o.oneShot != need.OneShot || ok && m.need(o) != need {
				m.t.Fatalf("item %d with %+v is refused, %+v was requested", o.seq, m.need(o), need)
			}
			if !ok {
				return
			}
			m.drop(o)
			if o.seq%4 == 0 && !o.oneShot { // smaller ones take its place
				parts := []*item{{seq: o.seq + 1, key: o.key, push: o.push, request: o.request, meta: 300, data: o.data / 4},
					{seq: o.seq + 2, key: o.key, push: o.push, request: o.request, meta: 300, data: o.data / 2}}
				m.all = append(m.all, parts...)
				m.s.Replace(parts)
			}
		})
		return
	}
	if m.fitsBuffer(e.asker) && !m.told[e.asker.key] {
		m.told[e.asker.key] = true
		if m.rng.IntN(2) == 0 { // the buffer is announced by another message meanwhile
			key := e.asker.key
			m.answers = append(m.answers, func() {
				m.keys[key] = true
				m.s.NeedsChanged()
			})
		}
		reply(func() {
			if m.keys[e.asker.key] = true; !m.s.NotNeeded(origin) {
				m.t.Fatalf("slot request %d is not open", origin)
			}
		})
		return
	}
	l := &ReceiveSlot[int]{Memory: need.Meta, Route: need.Route, Data: need.Data, OneShot: need.OneShot}
	if err := m.table.Add(l, false); err != nil {
		m.t.Fatal(err)
	}
	reply(func() {
		if !m.s.Reply(origin, RemoteSlot{Index: l.Index()}) {
			m.t.Fatalf("slot request %d is not open", origin)
		}
	})
}

// reclaim wants slots back.
func (m *model) reclaim(places, bytes int) {
	m.answers = append(m.answers, func() { m.s.Reclaim(places, bytes) })
}

// giveBack sends the slots that the sender gives back.
func (m *model) giveBack() {
	if b := m.s.Returns(); len(b) > 0 {
		fmt.Fprintln(m.story, "back", b)
		m.wire = append(m.wire, event{back: slices.Clone(b)})
		m.s.ReturnsSent(len(b))
	}
}

func (m *model) takeBack(back []uint32) {
	for _, i := range back {
		l := m.table.Get(i)
		if l == nil || l.Held() {
			m.t.Fatalf("slot %d is given back; it is %+v", i, l)
		}
		m.table.End(l)
		m.returned++
	}
}

// consume ends the use of a held slot.
func (m *model) consume(i int) {
	l := m.held[i]
	m.held = append(m.held[:i], m.held[i+1:]...)
	if last, _ := l.Drop(); !last || !m.credits {
		return
	}
	m.answers = append(m.answers, func() {
		if m.table.Get(l.Index()) == l && !m.s.Credit(l.Index()) {
			m.t.Fatalf("credit for slot %d is refused", l.Index())
		}
	})
}

// respond answers a request, as a StepMesh node.
func (m *model) respond(i int) {
	o := m.unanswered[i]
	m.unanswered = append(m.unanswered[:i], m.unanswered[i+1:]...)
	delete(m.inFlight, Route{Key: o.key, Push: o.push, Request: true})
	m.answers = append(m.answers, func() {
		m.s.Answered(o.key, o.push)
		m.pump()
	})
}

// step executes a random possible event.
func (m *model) step() bool {
	for _, k := range m.rng.Perm(4) {
		switch {
		case k == 0 && len(m.wire) > 0:
			m.receive()
		case k == 1 && len(m.answers) > 0:
			i := m.rng.IntN(len(m.answers))
			f := m.answers[i]
			m.answers = append(m.answers[:i], m.answers[i+1:]...)
			f()
			m.giveBack() // behind all that was put before
			m.pump()
		case k == 2 && len(m.held) > 0:
			m.consume(m.rng.IntN(len(m.held)))
		case k == 3 && len(m.unanswered) > 0:
			m.respond(m.rng.IntN(len(m.unanswered)))
		default:
			continue
		}
		m.check()
		return true
	}
	return false
}

// check compares the Sender's counters with the counted objects.
func (m *model) check() {
	s := m.s
	asking, queued := map[*route]int{}, map[*route]int{}
	for origin, a := range s.requests {
		if a.route != nil {
			asking[a.route]++
		}
		if origin > s.origin {
			m.t.Fatalf("slot request %d is open, the last was %d", origin, s.origin)
		}
	}
	for i := range s.queues[1].q.Len() {
		if r := s.queues[1].at(i).route; r != nil {
			queued[r]++
		}
	}
	places := 0
	for key, r := range s.routes {
		free := 0
		for _, p := range r.slots {
			if !p.busy {
				free++
			}
			if p.route != r || s.granted[p.Index] != p {
				m.t.Fatalf("slot %d of route %+v is not what the tables say", p.Index, key)
			}
		}
		places += len(r.slots)
		if r.free != free || r.requests != asking[r] || r.queued != queued[r] {
			m.t.Fatalf("route %+v: free %d, asking %d, queued %d; want %d, %d, %d", key, r.free, r.requests, r.queued, free, asking[r], queued[r])
		}
		if r.Route != key {
			m.t.Fatalf("route %+v is at %+v", r.Route, key)
		}
	}
	if len(s.granted) != places {
		m.t.Fatalf("%d slots by index, %d by route", len(s.granted), places)
	}
}

// settle executes all possible events, and ticks, until no message is queued.
func (m *model) settle() {
	m.t.Helper()
	m.room = 1 << 30
	m.pump()
	for idle := 0; idle < 1000; idle++ {
		if m.step() {
			idle = 0
		} else if m.s.Waiting() == 0 {
			return
		}
		if idle > 0 {
			m.tick()
		}
	}
	m.t.Fatalf("%d items wait for ever: %d slot requests, %d slots", m.s.Waiting(), len(m.s.requests), len(m.s.granted))
}

func (m *model) submit(o *item) {
	m.t.Helper()
	if err := m.s.Check(o); err == nil {
		m.s.Submit(o, o.oneShot)
	} else {
		if !m.original || !errors.Is(err, ErrGrown) {
			m.t.Fatalf("item %d: %v", o.seq, err)
		}
		m.drop(o)
	}
	m.pump()
}

var update = flag.Bool("update", false, "rewrite what the stories of TestModel are")

// TestModel runs random traffic through a Sender and a model of its receiver. The model detects
// errors. The golden file detects a change in the Sender's actions or their order, such as
// too many or too few slot requests; -update rewrites it.
func TestModel(t *testing.T) {
	const path = "testdata/stories.sum"
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	was, is := strings.Split(string(b), "\n"), ""
	for seed := range 400 {
		t.Run(fmt.Sprintf("%d", seed), func(t *testing.T) {
			line := fmt.Sprintf("%d %016x", seed, testModel(t, uint64(seed), seed%3 == 2))
			if is += line + "\n"; !*update && (seed >= len(was) || line != was[seed]) {
				t.Errorf("the Sender wants other things than it did (run with -update to accept)")
			}
		})
	}
	if *update && strings.Count(is, "\n") == 400 {
		if err := os.WriteFile(path, []byte(is), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

func testModel(t *testing.T, seed uint64, original bool) (story uint64) {
	m := newModel(t, seed, original)
	if seed%2 == 0 {
		m.refuse = 0.05
	}
	keys := 1 + m.rng.IntN(12)
	for range m.rng.IntN(4) {
		m.registered[uint64(m.rng.IntN(keys))] = 1 << m.rng.IntN(16)
	}
	n, step, up := 0, 4, false
	if original {
		step = 1
	}
	for range 400 {
		switch k := m.rng.IntN(100); {
		case k < 40:
			n += step
			o := &item{seq: n, oneShot: m.rng.IntN(8) == 0, key: uint64(m.rng.IntN(keys)), request: m.rng.IntN(3) > 0,
				push: m.rng.IntN(3) > 0, meta: 300, data: m.rng.IntN(1 << m.rng.IntN(14))}
			if m.rng.IntN(4) == 0 {
				o.meta += m.rng.IntN(1000)
			}
			if !original && m.rng.IntN(40) == 0 {
				o.meta = 32 << 20
			}
			m.all = append(m.all, o)
			m.submit(o)
		case k < 85:
			if up {
				m.step()
			}
		case k < 90:
			m.room = m.rng.IntN(4)
		case k < 93:
			m.room = 1 << 30
			m.pump()
		case k < 95:
			m.tick()
		case k < 96:
			if up && !original {
				m.reclaim(m.rng.IntN(8), m.rng.IntN(2)*m.rng.IntN(1<<16))
			}
		case k < 98 && !up:
			up = true
			m.forget()
			m.connect()
		case up && m.rng.IntN(3) == 0:
			up = false
			for _, o := range m.s.Disconnect(func(o *item) bool { return o.oneShot }) {
				m.drop(o)
			}
			var again []*item // has not arrived, and must, in its order
			for _, e := range m.wire {
				if e.item != nil && e.item.oneShot {
					e.item.done = ""
					again = append(again, e.item)
				}
			}
			m.s.Resubmit(again)
			m.forget()
		}
		m.check()
	}
	if !up {
		m.forget()
		m.connect()
	}
	m.settle()
	for _, o := range m.all {
		if o.done == "" {
			t.Errorf("item %d was neither put nor dropped", o.seq)
		}
	}
	for _, r := range m.s.routes {
		if r.queued != 0 || r.requests != 0 || r.free != len(r.slots) {
			t.Errorf("route %+v at the end: %d queued, %d asking, %d of %d slots free", r.Route, r.queued, r.requests, r.free, len(r.slots))
		}
	}
	if len(m.s.requests) != 0 {
		t.Errorf("%d slot requests are open at the end", len(m.s.requests))
	}
	return m.story.Sum64()
}
