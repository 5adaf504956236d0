package rdma

import (
	"bytes"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/tests/fakeverbs"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/env"
	"github.com/stepaf/stepaf-go/van/rendezvous"
)

// A request that has not been sent yet must not give a peer access to memory that was invalidated.
func TestInvalidateQueuedRequest(t *testing.T) {
	p := newPair(t, nil)
	end := p.rejectAll()
	p.connect(p.worker, serverID, p.server)
	kept, gone := make([]byte, 64<<10), make([]byte, 64<<10)
	for i, into := range [][]byte{kept, gone} {
		if err := p.worker.Send(pullInto(serverID, i, uint64(i), into)); err != nil {
			t.Fatal(err)
		}
	}
	p.worker.Invalidate(backend.Bytes(gone))
	end()
	for i := range 2 {
		m := p.next(p.atServer)
		if int(m.Timestamp) != i || (m.Option != 0) != (i == 0) {
			t.Errorf("request %d comes with option %d, want a key of remote memory in that with kept memory only", m.Timestamp, m.Option)
		}
		m.Release()
	}
	p.worker.Invalidate(backend.Bytes(kept))
}

// The same holds while the connection ends and sends its queued messages.
func TestInvalidateWhileDraining(t *testing.T) {
	p := newPair(t, nil)
	end := p.rejectAll()
	p.connect(p.worker, serverID, p.server)
	into := make([]byte, 64<<10)
	if err := p.worker.Send(pullInto(serverID, 1, 1, into)); err != nil {
		t.Fatal(err)
	}
	p.worker.Disconnect(serverID)
	p.worker.Invalidate(backend.Bytes(into))
	end()
	select {
	case m := <-p.atServer:
		if m.Option != 0 {
			t.Errorf("the request comes with option %d, want 0: its memory was invalidated", m.Option)
		}
		m.Release()
	case <-time.After(drainTime): // it was not sent, which is correct, too
	}
}

// TestPullsOfEndedPeer: the destinations of unanswered pulls are released when their peer is disconnected.
func TestPullsOfEndedPeer(t *testing.T) {
	p := newPair(t, nil)
	p.both()
	inUse := func() (n int) {
		for _, d := range *p.worker.tables.devices.Load() {
			n += d.regions.InUse()
		}
		return n
	}
	for i := range 3 {
		if err := p.worker.Send(pullInto(serverID, i, uint64(i), make([]byte, 64<<10))); err != nil {
			t.Fatal(err)
		}
		p.next(p.atServer).Release() // it is not answered
	}
	if n := inUse(); n != 3 {
		t.Errorf("%d regions are in use, want those of 3 pulls", n)
	}
	p.worker.Disconnect(serverID)
	p.until("end of the holds for the peer", func() bool { return inUse() == 0 })
}

// Requests that were canceled before they could be sent are not sent with the later content of their memory. Other requests are sent, also from the same
// memory.
func TestCancelQueuedRequests(t *testing.T) {
	p := newPair(t, nil)
	end := p.rejectAll()
	p.connect(p.worker, serverID, p.server)
	values := make([][]byte, 5)
	var dones atomic.Int32
	for i := range values {
		values[i] = bytes.Repeat([]byte{byte(i)}, 64<<10)
		m := tensor(serverID, i, 1, true, true, values[i])
		m.Done = completion(func() { dones.Add(1) })
		if err := p.worker.Send(m); err != nil {
			t.Fatal(err)
		}
	}
	if err := p.worker.Send(tensor(serverID, 9, 1, true, true, values[4])); err != nil {
		t.Fatal(err)
	}
	p.worker.Cancel(van.Requests{First: 1, Count: 2})
	p.worker.Cancel(van.Requests{First: 3, Count: 1, Customer: 1})
	p.worker.Cancel(van.Requests{First: 4, Count: 1})
	for _, i := range []int{1, 2} {
		clear(values[i])
	}
	end()
	for _, ts := range []int{0, 3, 9} {
		m := p.next(p.atServer)
		want := values[min(ts, 4)]
		if int(m.Timestamp) != ts || !bytes.Equal(m.Vals.Host(), want) {
			t.Errorf("request %d came, with the right bytes: %t; want %d", m.Timestamp, bytes.Equal(m.Vals.Host(), want), ts)
		}
		m.Release()
	}
	p.until("all memory is released", func() bool { return dones.Load() == int32(len(values)) })
	for ts := 20; ts < 30; ts++ { // they reuse the objects of the canceled requests, and are not canceled
		if err := p.worker.Send(tensor(serverID, ts, 1, true, true, values[4])); err != nil {
			t.Fatal(err)
		}
	}
	for ts := 20; ts < 30; ts++ {
		m := p.next(p.atServer)
		if int(m.Timestamp) != ts {
			t.Errorf("request %d came, want %d", m.Timestamp, ts)
		}
		m.Release()
	}
}

// Requests that are canceled while they wait do not keep the slots that they get: later requests use these slots, and no others are requested.
func TestCancelReleasesSlots(t *testing.T) {
	p := newPair(t, nil)
	end := p.rejectAll()
	p.connect(p.worker, serverID, p.server)
	const size = 1 << 20
	n := 2 * rendezvous.Eager(size)
	for i := range n {
		if err := p.worker.Send(tensor(serverID, i, 1, true, true, value(size, i))); err != nil {
			t.Fatal(err)
		}
	}
	p.worker.Cancel(van.Requests{First: 0, Count: int32(n - 1)})
	end()
	m := p.next(p.atServer)
	if int(m.Timestamp) != n-1 {
		t.Errorf("request %d came, want %d", m.Timestamp, n-1)
	}
	m.Release()
	if got, most := p.server.budget.slots.Len(), rendezvous.Eager(size)+8; got > most { // and some for control messages
		t.Errorf("%d slots serve one key, want at most %d", got, most)
	}
}

// A request that the device has not read yet, or has to read again, arrives unchanged or not at all. Requests before and after it arrive.
func TestCancelPostedRequests(t *testing.T) {
	p := newPair(t, nil)
	p.connect(p.worker, serverID, p.server)
	values := make([][]byte, 4)
	send := func(i int) {
		values[i] = bytes.Repeat([]byte{byte(i + 1)}, 64<<10)
		if err := p.worker.Send(tensor(serverID, i, 1, true, true, values[i])); err != nil {
			t.Fatal(err)
		}
	}
	send(0)
	p.next(p.atServer).Release() // there is a slot from now on
	for _, canceled := range [][]int{{1}, {1, 2}, {3}} {
		p.net.Hold()
		for i := 1; i < len(values); i++ {
			send(i)
		}
		p.worker.Cancel(van.Requests{First: int32(canceled[0]), Count: int32(len(canceled))})
		for _, i := range canceled {
			clear(values[i])
		}
		p.net.Release()
		for i := 1; i < len(values); i++ {
			if slices.Contains(canceled, i) {
				continue
			}
			m := p.next(p.atServer)
			if int(m.Timestamp) != i || !bytes.Equal(m.Vals.Host(), values[i]) {
				t.Errorf("requests %d canceled: request %d came, with the right bytes: %t; want %d", canceled, m.Timestamp, bytes.Equal(m.Vals.Host(), values[i]), i)
			}
			m.Release()
		}
	}
}

// The same holds while the connection ends and the device still sends: a request that is canceled just then does not arrive with the next content of its memory.
func TestCancelWhileDraining(t *testing.T) {
	p := newPair(t, nil)
	p.connect(p.worker, serverID, p.server)
	if err := p.worker.Send(tensor(serverID, 0, 1, true, true, value(64<<10, 1))); err != nil {
		t.Fatal(err)
	}
	p.next(p.atServer).Release() // there is a slot from now on
	to := (*p.worker.tables.peers.Load())[serverID]
	for _, q := range to.currentLink().queue.QueuePairs {
		p.net.HoldQP(q.Num())
	}
	v := value(64<<10, 2)
	if err := p.worker.Send(tensor(serverID, 1, 1, true, true, v)); err != nil {
		t.Fatal(err)
	}
	p.until("slot, and the request with the device", func() bool {
		to.mu.Lock()
		defer to.mu.Unlock()
		return to.sender.Waiting() == 0
	})
	var once sync.Once
	p.net.Fail(func(op fakeverbs.Op) error {
		if op.Kind == fakeverbs.OpDisconnect && op.Stack == p.worker.stack {
			once.Do(func() {
				p.worker.Cancel(van.Requests{First: 1, Count: 1})
				clear(v)
				p.net.Release()
			})
		}
		return nil
	})
	p.worker.Disconnect(serverID)
	p.until("end of the connection", func() bool {
		p.server.mu.Lock()
		defer p.server.mu.Unlock()
		return len(p.server.accepted.inbounds) == 0
	})
	p.net.Fail(nil)
	if p.server.Stats().ReceivedMessages == 1 {
		return
	}
	m := p.next(p.atServer)
	defer m.Release()
	if !bytes.Equal(m.Vals.Host(), value(64<<10, 2)) {
		t.Error("the request comes with what was put in its memory after it was canceled")
	}
}

// completion is a van.Completion.
type completion func()

func (f completion) Sent() { f() }

// TestInvalidateBesideASend: a value is sent correctly while memory beside it is invalidated, although an earlier pull had both as its destination.
func TestInvalidateBesideASend(t *testing.T) {
	r := newRig(t)
	w, s := r.pair()
	const half = 64 << 10
	all := make([]byte, 2*half)
	w.must(pull(s, 1, 0, all))
	q := s.next()
	s.must(answer(q, make([]byte, len(all))))
	q.Release()
	w.next().Release()
	v := all[half:]
	copy(v, value(half, 1))
	w.must(push(s, 2, 1, v))
	s.wantValue(1, v) // there is a slot from now on

	w.must(pull(s, 1, 2, all[:half])) // is canceled
	s.next().Release()
	to := (*w.tables.peers.Load())[8]
	for _, q := range to.currentLink().queue.QueuePairs {
		r.net.HoldQP(q.Num())
	}
	w.must(push(s, 2, 3, v))
	r.until("the value is with the device", func() bool {
		to.mu.Lock()
		defer to.mu.Unlock()
		return to.sender.Waiting() == 0
	})
	w.Invalidate(backend.Bytes(all[:half]))
	r.net.Release()
	s.wantValue(3, v)
	w.wantNoLoss()
}

// TestRepeatedAnswer: with PS_RESEND, an answer that is sent again does not reach the caller's memory, which the caller may have changed
// since the first one.
func TestRepeatedAnswer(t *testing.T) {
	r := newRig(t)
	w, s := r.pair(func(c *env.Config) { c.Resend = true })
	for i, n := range []int{100, 50_000} {
		single, parts := make([]byte, n), batch(s, 10+i, 0, 100, -n)
		w.must(pull(s, 5, i, single))
		w.must(parts)
		q := s.next()
		b := s.next()
		for range 2 {
			clear(single) // the memory belongs to the caller again
			clear(parts.Parts[1].Into.Host())
			s.must(answer(q, value(n, i)))
			s.must(answerTo(9, 0, b.Parts))
			m := w.next()
			if !bytes.Equal(m.Vals.Host(), value(n, i)) {
				t.Errorf("an answer has %d bytes, want %d, or they differ", m.Vals.Len(), n)
			}
			m.Release()
			w.next().Release()
		}
		if !bytes.Equal(single, make([]byte, n)) || !bytes.Equal(parts.Parts[1].Into.Host(), make([]byte, n)) {
			t.Errorf("a repeated answer of %d bytes was written to the destination of the first", n)
		}
		q.Release()
		b.Release()
	}
	if n := w.device0().regions.InUse(); n != 0 {
		t.Errorf("%d regions are in use, want none", n)
	}
}
