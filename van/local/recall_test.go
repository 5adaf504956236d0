package local

import (
	"bytes"
	"errors"
	"reflect"
	"slices"
	"testing"
	"unsafe"

	"github.com/stepaf/stepaf-go/tests/inproc"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// TestRecall: canceled requests whose values the receiver has not read yet are not delivered. Their memory is
// released at once, later contents of it are not seen, and other requests arrive, also from the same memory.
func TestRecall(t *testing.T) {
	sizes := []int{100, 5000, 100_000, 3 << 20}
	for _, mode := range readModes {
		t.Run(mode.name, func(t *testing.T) {
			n := inproc.NewNetwork()
			worker, server := newNode(t, n, 9, nil), newNode(t, n, 8, mode.set)
			worker.start()
			worker.connect(server)
			server.connect(worker)
			const sent = 72
			vals, dones, h := make([][]byte, sent), make([]done, sent), holder{}
			recalled := func(i int) bool { return i >= 10 && i < sent-10 || i == 3 }
			for i := range sent {
				vals[i] = pattern(i, sizes[i%4])
				m := data(8, i, vals[i])
				m.Vals = backend.At(unsafe.Pointer(&vals[i][0]), len(vals[i]), backend.Host, &h)
				m.Done = &dones[i]
				worker.must(m)
			}
			shared := data(8, 5000, vals[51])
			worker.must(shared)
			answer := data(8, 52, pattern(52, 100_000)) // of a request of the peer's: it is not one of ours
			answer.Request = false
			worker.must(answer)
			worker.Cancel(van.Requests{First: 10, Count: sent - 20})
			worker.Cancel(van.Requests{First: 3, Count: 1})
			worker.Cancel(van.Requests{First: 20, Count: 4, Customer: 1})
			worker.Cancel(van.Requests{First: 3, Count: 1})
			for i := range sent {
				if recalled(i) && dones[i].count() != 1 {
					t.Errorf("message %d: told %d times that its memory is free, want once", i, dones[i].count())
				}
				if recalled(i) && i != 51 {
					copy(vals[i], bytes.Repeat([]byte{0xee}, len(vals[i])))
				}
			}
			worker.must(data(8, 9000, pattern(1, 3<<20)))
			server.start()
			came := map[int]bool{}
			for last := 0; last != 9000; {
				m := server.next()
				last = int(m.Timestamp)
				want := pattern(last, len(m.Vals.Host()))
				switch last {
				case 5000:
					want = pattern(51, 3<<20)
				case 9000:
					want = pattern(1, 3<<20)
				}
				if !bytes.Equal(m.Vals.Host(), want) {
					t.Errorf("message %d came with other bytes than it was sent with", last)
				}
				if came[last] && last != 52 {
					t.Errorf("message %d came twice", last)
				}
				came[last] = true
				m.Release()
			}
			for i := range sent {
				if !came[i] && !recalled(i) {
					t.Errorf("message %d, which was not given up, did not come", i)
				}
			}
			if !came[5000] || !came[52] {
				t.Error("a message that was not given up did not come")
			}
			eventually(t, "all memory is given back", func() bool { return worker.Stats().LentValues == 0 && h.n.Load() == 0 })
			l := worker.peers.Outs()[0]
			l.mu.Lock()
			defer l.mu.Unlock()
			if l.unsent() != 0 || len(l.queue.requests) != 0 {
				t.Errorf("%d bytes and %d requests are still counted", l.unsent(), len(l.queue.requests))
			}
		})
	}
}

// TestRequestsNamed: canceled requests belong to one application and customer, and to one range of timestamps.
func TestRequestsNamed(t *testing.T) {
	q := van.Requests{App: 3, Customer: 4, First: 10, Count: 2}
	var counts requestCounts
	for _, c := range []struct {
		app, customer, ts int32
		request, named    bool
	}{
		{3, 4, 10, true, true}, {3, 4, 11, true, true}, {3, 4, 9, true, false}, {3, 4, 12, true, false},
		{2, 4, 10, true, false}, {3, 5, 10, true, false}, {4, 3, 10, true, false}, {3, 4, 10, false, false},
	} {
		m := van.Meta{AppID: c.app, CustomerID: c.customer, Timestamp: c.ts, Request: c.request}
		r := requestOf(&m)
		if r.in(&q) != c.named {
			t.Errorf("%+v is named: %t", c, r.in(&q))
		}
		counts.add(r)
		counts.add(r)
		if counts.have(&q) != c.named {
			t.Errorf("%+v is among %v: %t", c, counts, !c.named)
		}
		counts.remove(r)
		if counts.have(&q) != c.named {
			t.Errorf("one more %+v is among %v: %t", c, counts, !c.named)
		}
		if counts.remove(r); len(counts) != 0 {
			t.Errorf("%v are left", counts)
		}
	}
}

// TestCounted: messages and bytes count once on each side, large and small.
func TestCounted(t *testing.T) {
	worker, server := pair(t)
	n, size := uint64(0), uint64(0)
	for i, values := range []int{0, 100, 5000, 100_000} {
		m := data(8, i, pattern(i, values))
		n, size = n+1, size+uint64(m.PayloadLen())
		worker.must(m)
		server.next().Release()
		if s := worker.stats.add(van.Stats{SentMessages: 5, SentBytes: 7}); s.SentMessages != n+5 || s.SentBytes != size+7 || s.ReceivedMessages != 0 {
			t.Errorf("the sender counts %d messages and %d bytes, %d received; want %d, %d", s.SentMessages-5, s.SentBytes-7, s.ReceivedMessages, n, size)
		}
		if s := server.stats.add(van.Stats{ReceivedMessages: 5, ReceivedBytes: 7}); s.ReceivedMessages != n+5 || s.ReceivedBytes != size+7 || s.SentMessages != 0 {
			t.Errorf("the receiver counts %d messages and %d bytes, %d sent; want %d, %d", s.ReceivedMessages-5, s.ReceivedBytes-7, s.SentMessages, n, size)
		}
	}
}

// meter is a van inside that has counted.
type meter struct {
	van.Van
	stats van.Stats
}

func (m meter) Stats() van.Stats { return m.stats }

// TestCountedInside: each number that the van inside counts is in that of the whole.
func TestCountedInside(t *testing.T) {
	x := newNode(t, inproc.NewNetwork(), 9, nil)
	inside := meter{Van: x.inner}
	for i, f := 0, reflect.ValueOf(&inside.stats).Elem(); i < f.NumField(); i++ {
		f.Field(i).SetUint(uint64(i + 1))
	}
	x.inner = inside
	if s := x.Stats(); s != inside.stats {
		t.Errorf("got %+v, want %+v", s, inside.stats)
	}
}

// TestRefusedPullNamesNothing: if a pull cannot be sent, the destination of its answer is removed.
func TestRefusedPullNamesNothing(t *testing.T) {
	worker, server := pair(t)
	pull := func(ts int) *van.Message {
		m := data(8, ts, nil)
		m.Push, m.Into = false, backend.Bytes(make([]byte, streamFrom))
		return m
	}
	places := worker.dests.Expected
	worker.must(pull(0))
	server.next().Release()
	if n := places(); n != 1 {
		t.Fatalf("%d places are wanted, want 1", n)
	}
	l := worker.peers.link(8)
	l.mu.Lock()
	kept := l.queue.list
	l.queue.list = make([]*queued, queueLen) // full
	l.mu.Unlock()
	if err := worker.Send(pull(1)); !errors.Is(err, van.ErrQueueFull) {
		t.Errorf("a pull for which there is no room: %v", err)
	}
	l.mu.Lock()
	l.queue.list = kept
	l.gone = true // as it is a moment before it is no link any more
	l.mu.Unlock()
	if n := places(); n != 1 {
		t.Errorf("%d places are wanted behind a refused pull, want 1", n)
	}
	if err := worker.Send(pull(2)); !errors.Is(err, van.ErrPeerLost) {
		t.Errorf("Send over a link that has ended: %v, want %v", err, van.ErrPeerLost)
	}
	l.mu.Lock()
	l.gone = false
	l.mu.Unlock()
	if n := places(); n != 1 {
		t.Errorf("%d places are wanted behind a pull that was not sent, want 1", n)
	}
}

// TestRecallOfEndedLinks: requests whose peer was disconnected, or is named anew, are taken back from the link that still
// had them, which may send for a while.
func TestRecallOfEndedLinks(t *testing.T) {
	for _, mode := range readModes {
		t.Run("disconnected/"+mode.name, func(t *testing.T) {
			worker, server := unread(t, func(v *Van) { v.peers.O.DrainTime = limit }, mode.set)
			const sent = 8
			vals, dones := make([][]byte, sent), make([]done, sent)
			for i := range sent {
				vals[i] = pattern(i, 1<<20)
				m := data(8, i, vals[i])
				m.Done = &dones[i]
				worker.must(m)
			}
			worker.Disconnect(8)
			worker.Cancel(van.Requests{Count: sent})
			for i := range sent {
				if n := dones[i].count(); n != 1 {
					t.Errorf("message %d: told %d times that its memory is free, want once", i, n)
				}
				clear(vals[i])
			}
			if err := worker.Connect(t.Context(), 8, server.self); err != nil {
				t.Fatal(err)
			}
			server.start()
			worker.must(data(8, sent, pattern(sent, 1<<20))) // it arrives after all messages sent before
			for last := 0; last != sent; {
				m := server.next()
				last = int(m.Timestamp)
				if !bytes.Equal(m.Vals.Host(), pattern(last, 1<<20)) {
					t.Errorf("message %d came with other bytes than it was sent with", last)
				}
				m.Release()
			}
		})
	}
	t.Run("replaced", func(t *testing.T) {
		worker, server := unread(t, nil, nil)
		var done done
		m := data(8, 1, pattern(1, 3<<20))
		m.Done = &done
		worker.must(m)
		l := worker.peers.link(8)
		l.mu.Lock() // as a sender does; Connect waits for it when it ends the link
		connected := make(chan error, 1)
		go func() { connected <- worker.Connect(t.Context(), 8, server.self) }()
		eventually(t, "the link is not found any more", func() bool { return worker.peers.link(8) != l })
		if !slices.Contains(worker.peers.Links(), l) {
			t.Error("Cancel does not find the link, which can still send")
		}
		l.mu.Unlock()
		worker.Cancel(van.Requests{First: 1, Count: 1})
		if n := done.count(); n != 1 {
			t.Errorf("told %d times that the memory is free, want once", n)
		}
		if err := <-connected; err != nil {
			t.Error(err)
		}
		if slices.Contains(worker.peers.Links(), l) {
			t.Error("the link is still remembered")
		}
	})
}
