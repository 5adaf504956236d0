package local

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"unsafe"

	"github.com/stepaf/stepaf-go/tests/inproc"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// batch makes a request to node to: a push of each value, under keys from 0 on.
func batch(to, ts int, vals ...[]byte) *van.Message {
	m := &van.Message{}
	m.Reset()
	m.Receiver, m.Timestamp, m.Request, m.Push, m.AppID, m.CustomerID = to, int32(ts), true, true, 0, 0
	for i, v := range vals {
		p := van.Part{Key: uint64(i), Push: true, Len: len(v), Device: backend.Host, Dtype: 1, Dim: 1, Vals: backend.Bytes(v)}
		p.Shape[0] = int64(len(v))
		m.Parts = append(m.Parts, p)
	}
	m.WriteDirectory()
	return m
}

// values are one for each length.
func values(seed int, lens ...int) (all [][]byte) {
	for i, n := range lens {
		all = append(all, pattern(seed+i, n))
	}
	return all
}

// TestLongDirectory: a batch whose directory is longer than a record arrives, however little room the ring has when it is sent.
func TestLongDirectory(t *testing.T) {
	var lens []int
	for range 1500 {
		lens = append(lens, 1)
	}
	lens = append(lens, 100_000, 5, 200_000)
	vals := values(7, lens...)
	for _, mode := range readModes {
		for _, free := range []int{2 * recordHead, recordHead + chunkHead, 40 << 10, 100 << 10, 160 << 10} {
			t.Run(fmt.Sprintf("%s/%d", mode.name, free), func(t *testing.T) {
				worker, server := unread(t, nil, mode.set)
				l, before := worker.peers.link(8), 0
				for l.space() > free { // each message before the batch takes a record
					n := min(l.space()-free, 32<<10) &^ (recordAlign - 1)
					worker.must(data(8, before, make([]byte, max(n-1024, 0))))
					before++
					if n < 1024 {
						break
					}
				}
				worker.must(batch(8, before, vals...))
				server.start()
				for i := range before {
					m := server.next()
					if int(m.Timestamp) != i {
						t.Fatalf("message %d came when %d was due", m.Timestamp, i)
					}
					m.Release()
				}
				m := server.next()
				if err := vantest.SameParts(m, vals); err != nil {
					t.Error(err)
				}
				m.Release()
				eventually(t, "everything pinned is given back", func() bool { return worker.Stats().LentValues == 0 })
			})
		}
	}
}

// TestRecallBatches: batches that are canceled when they are written in part, queued in part or queued, arrive as they were sent or not at
// all. Their memory is released at once. Other messages arrive, and the receiver keeps nothing of the canceled ones.
func TestRecallBatches(t *testing.T) {
	shapes := [][]int{{100, 200_000, 10, 300_000, 20}, {3 << 20, 100, 1 << 20}, {100, 30_000}, {500_000, 0, 500_000, 0}, {40_000, 10, 10, 10, 10}, {31_000, 31_000, 31_000, 31_000}}
	for _, mode := range readModes {
		t.Run(mode.name, func(t *testing.T) {
			worker, server := unread(t, nil, mode.set)
			const sent = 60
			vals, dones := make([][][]byte, sent), make([]done, sent)
			recalled := func(i int) bool { return i%5 != 4 && i != 0 }
			for i := range sent {
				vals[i] = values(i, shapes[i%len(shapes)]...)
				m := batch(8, 100*i, vals[i]...)
				m.Done = &dones[i]
				worker.must(m)
			}
			for i := range sent {
				if !recalled(i) {
					continue
				}
				worker.Cancel(van.Requests{First: int32(100 * i), Count: 10})
				if dones[i].count() != 1 {
					t.Errorf("batch %d: told %d times that its memory is free, want once", i, dones[i].count())
				}
				for _, v := range vals[i] {
					copy(v, bytes.Repeat([]byte{0xee}, len(v)))
				}
			}
			server.start()
			came := map[int]bool{}
			for last := 0; last != sent-1; {
				m := server.next()
				last = int(m.Timestamp) / 100
				if err := vantest.SameParts(m, values(last, shapes[last%len(shapes)]...)); err != nil {
					t.Errorf("batch %d: %v", last, err)
				}
				if came[last] {
					t.Errorf("batch %d came twice", last)
				}
				came[last] = true
				m.Release()
			}
			for i := range sent {
				if !came[i] && !recalled(i) {
					t.Errorf("batch %d, which was not canceled, did not come", i)
				}
			}
			eventually(t, "everything pinned is given back", func() bool { return worker.Stats().LentValues == 0 })
			for i := range dones {
				eventually(t, "Done is called", func() bool { return dones[i].count() == 1 })
			}
		})
	}
}

// TestIncompleteBatch: the receiver keeps nothing of a batch that was canceled when a part of it was in the ring, although no message
// follows.
func TestIncompleteBatch(t *testing.T) {
	for _, mode := range readModes {
		for _, lens := range [][]int{{100, 9 << 20, 100_000}, {9 << 20, 100, 9 << 20}, {9 << 20, 9 << 20, 100}} {
			t.Run(fmt.Sprintf("%s/%v", mode.name, lens), func(t *testing.T) {
				worker, server := unread(t, nil, mode.set)
				var first, second done
				m := batch(8, 0, values(1, 20_000_000)...)
				m.Done = &first
				worker.must(m)
				m = batch(8, 100, values(1, lens...)...)
				m.Done = &second
				worker.must(m)
				worker.Cancel(van.Requests{First: 100, Count: 10})
				server.start()
				server.next().Release()
				eventually(t, "the ring is empty", func() bool {
					l := worker.peers.link(8)
					l.mu.Lock()
					defer l.mu.Unlock()
					return l.seg.head().Load() == l.tail && len(l.queue.list) == 0 && !l.streaming()
				})
				server.rx.feed.Lock()
				defer server.rx.feed.Unlock()
				if l := server.peers.Ins()[0]; l.batch.joined != nil || l.batch.open != nil {
					t.Error("the receiver keeps the canceled batch")
				}
			})
		}
	}
}

// TestDroppedBatch: a value of a dropped batch, which still waits for its copy, does not end a later batch that uses the memory of the
// dropped one's first record again.
func TestDroppedBatch(t *testing.T) {
	v := newNode(t, inproc.NewNetwork(), 8, nil)
	l := &inLink{c: &v.rx}
	again := func(number uint64) *inbound {
		return &inbound{head: l.batch.open, rec: record{kind: kindValue, batch: number<<16 | 1}}
	}
	h := &inbound{count: 2, rec: record{kind: kindMessage, batch: 1 << 16}}
	l.batch.open = h
	late := again(1)
	l.batch.open = nil // dropped
	h.rec.batch = 2 << 16
	l.opened(h)
	if l.drop(late); l.batch.open != h {
		t.Error("the drop of a value of the former batch ends the later one")
	}
	if p := l.join(h); p != nil {
		t.Errorf("the first record alone is the batch %v", p)
	}
	late = &inbound{head: h, rec: record{kind: kindValue, batch: 1<<16 | 1}}
	if p := l.join(late); p != nil || len(h.values) != 0 {
		t.Error("a value of the former batch is one of the later batch")
	}
	if p := l.join(again(2)); p != h {
		t.Errorf("the last value completes %p, want %p", p, h)
	}
}

// TestRecallWhileRead: batches that are canceled while they are sent and received arrive as they were sent, or not at all.
func TestRecallWhileRead(t *testing.T) {
	for _, mode := range readModes {
		t.Run(mode.name, func(t *testing.T) {
			worker, server := pairWith(t, mode.set)
			rng := rand.New(rand.NewPCG(1, 2))
			const sent = 100
			dones, lens, came := make([]done, sent), make([][]int, sent), map[int]bool{}
			for i := range sent {
				for range 1 + rng.IntN(6) {
					lens[i] = append(lens[i], []int{0, 1, 100, 5000, streamFrom - 1, streamFrom, 100_000, 1 << 20}[rng.IntN(8)])
				}
				vals := values(i, lens[i]...)
				m := batch(8, 100*i, vals...)
				m.Done = &dones[i]
				worker.must(m)
				if i == sent-1 || rng.IntN(3) == 0 {
					came[i] = false
					continue
				}
				worker.Cancel(van.Requests{First: int32(100 * i), Count: 100})
				for _, v := range vals {
					clear(v)
				}
			}
			for i := -1; i != sent-1; {
				m := server.next()
				i = int(m.Timestamp) / 100
				if err := vantest.SameParts(m, values(i, lens[i]...)); err != nil {
					t.Errorf("batch %d: %v", i, err)
				}
				came[i] = true
				m.Release()
			}
			for i, ok := range came {
				if !ok {
					t.Errorf("batch %d, which was not canceled, did not come", i)
				}
			}
			for i := range dones {
				eventually(t, "Done is called once", func() bool { return dones[i].count() == 1 })
			}
			eventually(t, "everything pinned is given back", func() bool { return worker.Stats().LentValues == 0 })
		})
	}
}

// TestBatchOfLostLink: batches on a link that ends are given back once, whether they were written, streamed or queued.
func TestBatchOfLostLink(t *testing.T) {
	for _, mode := range readModes {
		t.Run(mode.name, func(t *testing.T) {
			worker, server := unread(t, nil, mode.set)
			var h holder
			dones := make([]done, 20)
			for i := range dones {
				m := batch(8, 100*i, values(1, 100, 3<<20, 0, 30_000, 1<<20, 5)...)
				for k := range m.Parts {
					if b := m.Parts[k].Vals.Host(); len(b) > 0 {
						m.Parts[k].Vals = backend.At(unsafe.Pointer(&b[0]), len(b), backend.Host, &h)
					}
				}
				m.Done = &dones[i]
				worker.must(m)
			}
			if err := server.Close(t.Context()); err != nil {
				t.Fatal(err)
			}
			worker.event(8, false)
			eventually(t, "all is given back", func() bool { return h.n.Load() == 0 })
			for i := range dones {
				eventually(t, "Done is called once", func() bool { return dones[i].count() == 1 })
			}
		})
	}
}

// TestBatchLeavesSlots: the rest of a streamed value of a batch does not take a slot that the batch needs for its values by reference.
func TestBatchLeavesSlots(t *testing.T) {
	worker, _ := unread(t, nil, nil)
	l := worker.peers.link(8)
	l.mu.Lock()
	defer l.mu.Unlock()
	all := l.pins.free
	for _, c := range []struct {
		batch bool
		free  int
		want  bool // the rest is pinned
	}{{true, maxReferences + 1, false}, {true, maxReferences + 2, true}, {false, 1, true}, {false, 0, false}} {
		l.pins.free = all[:c.free:c.free]
		l.stream = stream{pin: pin{busy: true}, part: partVals, batch: c.batch}
		l.stream.mems[partVals] = backend.Bytes(make([]byte, streamFrom))
		if l.pinRest(); l.streaming() == c.want {
			t.Errorf("batch %t, %d slots are free: the rest is pinned: %t, want %t", c.batch, c.free, !l.streaming(), c.want)
		}
	}
	l.stream = stream{}
}

// holder counts the users of memory.
type holder struct{ n atomic.Int32 }

func (h *holder) Retain()  { h.n.Add(1) }
func (h *holder) Release() { h.n.Add(-1) }

// records are those of a batch of these values, each with a record of its own.
func records(t testing.TB, vals ...[]byte) (all [][]byte) {
	m := batch(8, 0, vals...)
	v := &van.Message{Meta: m.Meta, Frames: 2}
	for i := range vals {
		r := record{kind: kindMessage, batch: 1<<16 | uint64(i)}
		if i > 0 {
			r.kind = kindValue
		}
		v.Vals = m.Parts[i].Vals
		b := make([]byte, r.plan(v, partStream))
		if err := r.put(b, len(b), v, nil, nil); err != nil {
			t.Fatal(err)
		}
		all = append(all, b)
	}
	return all
}
