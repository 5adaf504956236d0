package rdma

import (
	"slices"
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
	var took []time.Duration // those for which there was no slot
	for i := range many + 6 {
		began := time.Now()
		if err := p.worker.Send(tensor(serverID, i, 1, true, true, vals)); err != nil {
			t.Fatal(err)
		}
		defer p.next(p.atServer).Release()
		if i >= many {
			took = append(took, time.Since(began))
			p.until("sleep", (*p.worker.devices.Load())[0].sleeping.Load)
		}
	}
	if slices.Sort(took); took[2] > 500*time.Millisecond { // a machine that stands still does so in one or two
		t.Errorf("messages took %s, want some milliseconds", took)
	}
}
