package rdma

import (
	"errors"
	"testing"

	"github.com/stepaf/stepaf-go/tests/fakeverbs"
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
