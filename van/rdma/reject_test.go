package rdma

import (
	"errors"
	"testing"

	"github.com/stepaf/stepaf-go/tests/fakeverbs"
	"github.com/stepaf/stepaf-go/van/rdma/conn"
)

// A message whose memory cannot be registered releases its slot.
func TestRejectedMessageReleasesItsSlot(t *testing.T) {
	p := newPair(t, nil)
	p.both()
	vals := make([]byte, 64<<10)
	send := func(ts int, vals []byte) {
		t.Helper()
		if err := p.worker.Send(tensor(serverID, ts, 1, true, true, vals)); err != nil {
			t.Fatal(err)
		}
	}
	send(0, vals)
	p.next(p.atServer).Release()
	peer := (*p.worker.tables.peers.Load())[serverID]
	places := p.server.budget.slots.Len
	before := places()
	noMemory := errors.New("no memory")
	p.net.Fail(func(op fakeverbs.Op) error {
		if op.Kind == fakeverbs.OpRegister && op.Stack == p.worker.stack {
			return noMemory
		}
		return nil
	})
	for i := range 20 {
		send(1+i, make([]byte, 64<<10))
		p.until("end of a message", func() bool {
			peer.mu.Lock()
			defer peer.mu.Unlock()
			return peer.sender.Waiting() == 0
		})
	}
	p.net.Fail(nil)
	send(1000, vals)
	if m := p.next(p.atServer); m.Timestamp != 1000 {
		t.Errorf("message %d came, want 1000", m.Timestamp)
	}
	if n := places(); n > before+1 {
		t.Errorf("%d slots after messages that could not be sent, %d before", n, before)
	}
}

// TestRejectedControlMessageReturnsItsSlot: the slots of control messages that cannot be staged, and are not sent, are returned. Otherwise a
// few such messages would use up all slots for control messages.
func TestRejectedControlMessageReturnsItsSlot(t *testing.T) {
	r := newRig(t)
	w, s := r.pair(places(64))
	r.net.Fail(func(op fakeverbs.Op) error {
		if op.Kind == fakeverbs.OpRegister && op.Stack == w.stack {
			return errors.New("no memory")
		}
		return nil
	})
	for i := range 3 * s.budget.slots.Room() / oneShotShare {
		m := control(s, i)
		m.Body = make([]byte, 2*conn.CellSize)
		w.must(m)
		w.wantDown(s, "no memory")
		w.wantUp(s)
	}
	r.net.Fail(nil)
	w.must(control(s, 1000))
	if m := s.next(); m.Timestamp != 1000 {
		t.Errorf("message %d came, want 1000", m.Timestamp)
	} else {
		m.Release()
	}
	r.until("no slot for control messages is left", func() bool { return s.incomingOf(9).slots.oneShots.Load() == 0 })
	if n := s.Stats().Malformed; n != 0 {
		t.Errorf("%d malformed messages", n)
	}
}
