package rdma

import (
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/van/rendezvous"
)

// The receiver may hold more messages than there are slots: more are asked for after
// a few milliseconds, also when nothing else happens.
func TestMorePlacesWhileIdle(t *testing.T) {
	p := newPair(t, nil)
	p.both()
	vals := make([]byte, 100)
	many := rendezvous.Eager(0)
	began := time.Now()
	for i := range many + 6 {
		if i == many {
			began = time.Now()
		}
		if err := p.worker.Send(tensor(serverID, i, 1, true, true, vals)); err != nil {
			t.Fatal(err)
		}
		defer p.next(p.atServer).Release()
		if i >= many {
			p.until("sleep", (*p.worker.devices.Load())[0].sleeping.Load)
		}
	}
	if d := time.Since(began); d > 3*time.Second {
		t.Errorf("6 messages took %s, want some milliseconds", d)
	}
}
