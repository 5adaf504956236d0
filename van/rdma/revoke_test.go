package rdma

import (
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/van/backend"
)

// A request that has not been sent yet must not hand out memory that was revoked.
func TestRevokeOfWaitingRequest(t *testing.T) {
	p := newPair(t, nil)
	end := p.rejectAll()
	p.connect(p.worker, serverID, p.server)
	kept, gone := make([]byte, 64<<10), make([]byte, 64<<10)
	for i, into := range [][]byte{kept, gone} {
		if err := p.worker.Send(pullInto(serverID, i, uint64(i), into)); err != nil {
			t.Fatal(err)
		}
	}
	p.worker.Revoke(backend.Bytes(gone))
	end()
	for i := range 2 {
		m := p.next(p.atServer)
		if int(m.Timestamp) != i || (m.Option != 0) != (i == 0) {
			t.Errorf("request %d comes with option %d, want a key of remote memory in that with kept memory only", m.Timestamp, m.Option)
		}
		m.Release()
	}
	p.worker.Revoke(backend.Bytes(kept))
}

// So it is when the connection is no longer wanted, and what was sent leaves.
func TestRevokeWhileLeaving(t *testing.T) {
	p := newPair(t, nil)
	end := p.rejectAll()
	p.connect(p.worker, serverID, p.server)
	into := make([]byte, 64<<10)
	if err := p.worker.Send(pullInto(serverID, 1, 1, into)); err != nil {
		t.Fatal(err)
	}
	p.worker.Disconnect(serverID)
	p.worker.Revoke(backend.Bytes(into))
	end()
	select {
	case m := <-p.atServer:
		if m.Option != 0 {
			t.Errorf("the request comes with option %d, want 0: its memory was revoked", m.Option)
		}
		m.Release()
	case <-time.After(leaveTime): // it has not left, that is right, too
	}
}
