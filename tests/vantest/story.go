package vantest

// Stories: two nodes exchange messages of random lengths in both directions while the test breaks their connections.

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// Story checks the messages between two nodes:
//
//   - a message arrives once, with its own bytes, and in the order of its kind: requests, answers;
//   - if a message that was sent does not arrive, and was not canceled, both ends are notified that the other end is lost: after the message
//     was sent, or before, and not yet that it is back. If Path is set, the receiver may have been notified before the message was sent: the
//     sender noticed later that the connection broke;
//   - unless Late is set, the receiver is notified of each run of missing messages before a later message of that kind arrives. Messages that
//     had arrived before the loss may be delivered after it;
//   - each sent message is given back once;
//   - the memory of a canceled request, and the memory for an answer after Invalidate, belongs to the caller;
//   - when nothing is broken any more, messages arrive in both directions.
type Story struct {
	T    testing.TB
	Seed uint64
	Ends [2]*Teller

	Late bool // one loss may be several runs of messages, and a receiver may be notified after later messages have arrived
	// Path, if not nil, returns the connection that a message of x would take. Each is another value.
	Path   func(x *Teller) any
	Either bool // only the sender may be notified of a loss
	Places bool // receivers register buffers, and pulls name memory for the answers

	mu sync.Mutex // guards the fields of both ends
}

// Teller is one end of a story. It sends to the other end, and checks what arrives.
type Teller struct {
	van.Van
	ID    int
	story *Story
	other *Teller
	given [2]atomic.Int64 // messages given back: requests, answers

	sent    [2][]fate // by kind and number
	arrived [2]int    // the last number of each kind, plus 1
	gaps    [2]int    // runs of missing messages of each kind
	events  []string
	losses  int    // reported to the watcher
	down    bool   // no return was reported to the watcher since
	path    any    // Path of the latest message
	pasts   [2]int // the other end's past at the latest message, and at the last one before path
	missing []fate // messages that did not arrive, and were not canceled
	ended   [2]context.Context
	last    [2]context.CancelFunc // called when a last message arrives
	places  [2]map[int]*place     // of the other end's messages, by kind and number
}

// fate is what became of a message that was sent.
type fate struct {
	length   int
	second   int // the length of the second value of a batch
	canceled bool
	before   [2]int // losses reported to the sender and to the receiver when it was sent, without one that lasted
}

// place is memory for a value of the other end.
type place struct {
	bytes    []byte
	placed   bool   // the value has arrived there
	released []byte // the content after Invalidate
}

// NewStory makes a story of two nodes with these ids. Both are bound; the caller starts and connects them, and calls Receive and Watch.
func NewStory(t testing.TB, seed uint64, a, b van.Van, idA, idB int) *Story {
	s := &Story{T: t, Seed: seed, Ends: [2]*Teller{{Van: a, ID: idA}, {Van: b, ID: idB}}}
	for i, x := range s.Ends {
		x.story, x.other = s, s.Ends[1-i]
		for kind := range x.last {
			x.ended[kind], x.last[kind] = context.WithCancel(context.Background())
			x.places[kind] = map[int]*place{}
		}
	}
	return s
}

// Random returns a source of random numbers for one purpose.
func (s *Story) Random(of uint64) *rand.Rand { return rand.New(rand.NewPCG(s.Seed, of)) }

// lastLength is the length of the last message of each kind.
const lastLength = 3

// StoryLength returns the length of a value, most often a small one.
func StoryLength(r *rand.Rand) int {
	n := []int{1, 200, 8000, 100_000, 1_500_000}[r.IntN(5)]
	if n = r.IntN(n + 1); n == lastLength {
		n++
	}
	return n
}

// length returns the length of x's value with that kind and number.
func (x *Teller) length(kind, number int) int {
	return StoryLength(x.story.Random(uint64(1000 + x.ID*1_000_000 + kind*100_000 + number)))
}

// value returns a value of a message of x.
func (x *Teller) value(kind, number, part, n int) []byte {
	return Pattern(x.ID<<20+kind<<19+part<<18+number, n)
}

type givenBack struct{ n *atomic.Int64 }

func (g givenBack) Sent() { g.n.Add(1) }

// Watch records that a loss or a return of the peer was reported to the watcher of x.
func (x *Teller) Watch(up bool) {
	x.story.mu.Lock()
	defer x.story.mu.Unlock()
	if x.down = !up; up {
		x.events = append(x.events, "up")
		return
	}
	x.losses++
	x.events = append(x.events, "lost")
}

// past returns how many losses of x are over. The caller holds mu.
func (x *Teller) past() int {
	if x.down {
		return x.losses - 1
	}
	return x.losses
}

// Note adds an event to the text that describes a failure.
func (x *Teller) Note(event string) {
	x.story.mu.Lock()
	defer x.story.mu.Unlock()
	x.events = append(x.events, event)
}

// Receive checks a message from the other end.
func (x *Teller) Receive(m *van.Message) {
	kind, number := 1, int(m.Timestamp)/2
	if m.Request {
		kind = 0
	}
	got, placed, second := m.Vals, m.Placed, []byte(nil)
	if len(m.Parts) > 0 {
		got, placed, second = m.Parts[0].Vals, m.Parts[0].Placed, m.Parts[1].Vals.Host()
	}
	t := x.story.T
	x.story.mu.Lock()
	defer x.story.mu.Unlock()
	sent := x.other.sent[kind]
	switch {
	case number >= len(sent) || !bytes.Equal(got.Host(), x.other.value(kind, number, 0, sent[number].length)) ||
		!bytes.Equal(second, x.other.value(kind, number, 1, sent[number].second)):
		t.Errorf("node %d: kind %d, message %d: %d bytes arrived that were not sent so", x.ID, kind, number, got.Len())
		return
	case number < x.arrived[kind]:
		t.Errorf("node %d: kind %d: message %d arrived after message %d: %v", x.ID, kind, number, x.arrived[kind]-1, x.events)
		return
	}
	missing := len(x.missing)
	for i := x.arrived[kind]; i < number; i++ {
		if p := x.places[kind][i]; !sent[i].canceled && (p == nil || p.released == nil) {
			x.missing = append(x.missing, sent[i])
		}
	}
	if len(x.missing) > missing && !x.story.Late {
		if x.gaps[kind]++; x.gaps[kind] > x.told() {
			t.Errorf("node %d: kind %d: messages from %d on did not arrive before message %d, and no loss was reported: %v",
				x.ID, kind, x.arrived[kind], number, x.events)
		}
	}
	text := fmt.Sprint(kind, ":", number)
	if p := x.places[kind][number]; placed {
		if text += "p"; p == nil || got.Addr() != backend.Bytes(p.bytes).Addr() {
			t.Errorf("node %d: kind %d: message %d is in memory that is not for it", x.ID, kind, number)
		} else {
			p.placed = true
		}
	}
	x.events = append(x.events, text)
	x.arrived[kind] = number + 1
	if sent[number].length == lastLength {
		x.last[kind]() // a last message is sent again if its connection broke
	}
}

// told returns the number of losses that were reported to x, or, if that suffices, to either end. The caller holds mu.
func (x *Teller) told() int {
	if x.story.Either {
		return x.losses + x.other.losses
	}
	return x.losses
}

// untold returns how many messages of the other end did not arrive although no loss was reported, counted for the sender and for x.
func (x *Teller) untold() (bySender, byReceiver int) {
	x.story.mu.Lock()
	defer x.story.mu.Unlock()
	for _, f := range x.missing {
		sender, receiver := x.other.losses > f.before[0], x.losses > f.before[1]
		if !sender {
			bySender++
		}
		if !receiver && !(x.story.Either && sender) {
			byReceiver++
		}
	}
	return bySender, byReceiver
}

// message makes the message with that kind and number. values is what it sends.
func (x *Teller) message(r *rand.Rand, kind, number int, whole bool) (m *van.Message, f fate, values [][]byte) {
	f.length = lastLength
	if !whole {
		f.length = x.length(kind, number)
	}
	key := binary.LittleEndian.AppendUint64(nil, uint64(number))
	if x.story.Places && !whole && kind == 0 && r.IntN(3) == 0 {
		m, f.length = data(x.other.ID, 2*number, true, key, nil), 0
		m.Push = false
		x.story.mu.Lock()
		defer x.story.mu.Unlock()
		p := x.places[1][number] // of an attempt that failed
		if p == nil {
			p = &place{bytes: make([]byte, x.other.length(1, number))}
			x.places[1][number] = p
		}
		m.Into = backend.Bytes(p.bytes)
		return m, f, nil
	}
	values = [][]byte{x.value(kind, number, 0, f.length)}
	if whole || r.IntN(4) > 0 {
		m = data(x.other.ID, 2*number, kind == 0, key, values[0])
		m.Push = kind == 0
		return m, f, values
	}
	f.second = r.IntN(5000)
	values = append(values, x.value(kind, number, 1, f.second))
	var parts []van.Part
	for i, v := range values {
		p := van.Part{Key: uint64(number + i<<32), Push: kind == 0, Len: len(v), Device: backend.Host, Dtype: 1, Dim: 1, Vals: backend.Bytes(v)}
		p.Shape[0] = int64(len(v))
		parts = append(parts, p)
	}
	m = batchOf(x.other.ID, 2*number, kind == 0, parts)
	m.Push = kind == 0
	return m, f, values
}

// send sends a message, if there is a connection, and perhaps cancels it. whole makes it try again until it is sent.
func (x *Teller) send(r *rand.Rand, kind int, whole bool) {
	s := x.story
	s.mu.Lock()
	number := len(x.sent[kind])
	s.mu.Unlock()
	m, f, values := x.message(r, kind, number, whole)
	s.mu.Lock()
	f.before = [2]int{x.past(), x.other.past()}
	if s.Path != nil {
		if p := s.Path(x); p != x.path {
			x.path, x.pasts[1] = p, x.pasts[0]
		}
		x.pasts[0], f.before[1] = f.before[1], x.pasts[1]
	}
	x.sent[kind] = append(x.sent[kind], f) // before it can arrive
	s.mu.Unlock()
	m.Done = givenBack{&x.given[kind]}
	for err := x.Send(m); err != nil; err = x.Send(m) {
		time.Sleep(time.Millisecond) // the connection is made again
		if !whole {
			s.mu.Lock()
			x.sent[kind] = x.sent[kind][:number]
			s.mu.Unlock()
			return
		}
	}
	if kind == 0 && !whole && r.IntN(6) == 0 {
		s.mu.Lock()
		x.sent[kind][number].canceled = true
		s.mu.Unlock()
		x.Cancel(van.Requests{First: m.Timestamp, Count: 1})
		for _, v := range values {
			clear(v)
		}
	}
	if kind == 0 && !whole && s.Places && r.IntN(6) == 0 {
		x.invalidate(r.IntN(number + 1))
	}
}

// Cancel cancels requests.
func (x *Teller) Cancel(q van.Requests) {
	if c, ok := van.As[van.Canceler](x.Van); ok {
		c.Cancel(q)
	}
}

// invalidate takes back the memory for an answer.
func (x *Teller) invalidate(number int) {
	s := x.story
	s.mu.Lock()
	p := x.places[1][number]
	if p == nil || p.released != nil {
		s.mu.Unlock()
		return
	}
	p.released = []byte{} // the answer may be dropped from now on
	s.mu.Unlock()
	if v, ok := van.As[van.Invalidator](x.Van); ok {
		v.Invalidate(backend.Bytes(p.bytes))
	}
	content := bytes.Clone(p.bytes)
	s.mu.Lock()
	p.released = append(p.released, content...)
	s.mu.Unlock()
}

// messages is the number of messages of each kind that each end sends.
const messages = 60

// Tell sends the messages of the story. between is called between two messages of the same end and kind; nil: nothing is done.
func (s *Story) Tell(between func(x *Teller, r *rand.Rand)) {
	var senders sync.WaitGroup
	for _, x := range s.Ends {
		x.register()
	}
	for i, x := range s.Ends {
		for kind := range 2 {
			senders.Go(func() {
				r := s.Random(uint64(10 + 2*i + kind))
				for range messages {
					x.send(r, kind, false)
					if between != nil {
						between(x, r)
					}
				}
			})
		}
	}
	senders.Wait()
}

// register registers buffers for some of the other end's requests.
func (x *Teller) register() {
	v, ok := van.As[van.BufferRegistrar](x.Van)
	if !ok || !x.story.Places {
		return
	}
	for r, i := x.story.Random(uint64(20+x.ID)), 0; i < messages; i++ {
		if n := x.other.length(0, i); n > 0 && r.IntN(3) == 0 {
			p := &place{bytes: make([]byte, n)}
			x.places[0][i] = p
			if err := v.RegisterRecvBuffer(x.other.ID, uint64(i), backend.Bytes(p.bytes)); err != nil {
				x.story.T.Error(err)
			}
		}
	}
}

// End sends the last messages until they arrive, and makes the checks that remain. Nothing is broken any more.
func (s *Story) End() {
	for _, x := range s.Ends {
		for kind := range 2 {
			Eventually(s.T, Limit, "the last message arrives", func() bool {
				x.send(s.Random(99), kind, true)
				select {
				case <-x.other.ended[kind].Done():
					return true
				case <-time.After(50 * time.Millisecond):
					return false
				}
			})
		}
	}
	for _, x := range s.Ends {
		for kind := range 2 {
			s.mu.Lock()
			sent := int64(len(x.sent[kind]))
			s.mu.Unlock()
			Eventually(s.T, Limit, "all messages are given back", func() bool { return x.given[kind].Load() >= sent })
			if got := x.given[kind].Load(); got != sent {
				s.T.Errorf("node %d, kind %d: %d of %d messages were given back", x.ID, kind, got, sent)
			}
		}
		x.finish()
	}
}

// finish checks the losses that were reported to x, and the memory for the other end's values.
func (x *Teller) finish() {
	s := x.story
	for end := time.Now().Add(Limit); ; time.Sleep(time.Millisecond) { // watchers are called by goroutines of their own
		sender, receiver := x.untold()
		if sender+receiver == 0 {
			break
		}
		if time.Now().After(end) {
			s.T.Errorf("node %d: %d messages did not arrive and no loss was reported to their sender; %d, to this node: %v; the sender: %v",
				x.ID, sender, receiver, x.events, x.other.events)
			break
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for kind := range 2 {
		for number, p := range x.places[kind] {
			want := p.released
			if p.placed && want == nil {
				want = x.other.value(kind, number, 0, len(p.bytes))
			}
			if want != nil && !slices.Equal(want, p.bytes) {
				s.T.Errorf("node %d: kind %d: the memory for message %d was written to after it was the caller's again", x.ID, kind, number)
			}
		}
	}
}
