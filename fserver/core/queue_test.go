package core

import (
	"context"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/internal/testcluster"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/vantest"
)

// TestLostInstance: a server waits for its own instance of each worker. Another one that
// comes back does not make up for it.
func TestLostInstance(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{Group: 2})
	n := c.Servers[0]
	s := &Session{node: n, queue: newQueue(n)}
	type event struct {
		id int
		up bool
	}
	events := make(chan event, 16)
	t.Cleanup(n.OnPeer(func(id int, up bool, _ error) { events <- event{id, up} })) // after the queue's
	await := func(want event) {
		t.Helper()
		for end := time.After(20 * time.Second); ; {
			select {
			case got := <-events:
				if got == want {
					return
				}
			case <-end:
				t.Fatalf("no event %v", want)
			}
		}
	}
	join := func(rank int) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		if _, err := c.Join(ctx, "worker", rank, nil); err != nil {
			t.Fatal(err)
		}
		await(event{van.WorkerID(rank), true})
	}
	lost := func() {
		t.Helper()
		_, err := s.GetBatch(nil, time.Millisecond)
		vantest.Fails(t, err, van.ErrPeerLost, "get_batch", n.PeerName(van.WorkerID(0)))
	}
	for rank := range c.Workers {
		c.Workers[rank].Close()
		await(event{van.WorkerID(rank), false})
	}
	lost()
	join(1)
	lost()
	join(0)
	_, err := s.GetBatch(nil, time.Millisecond)
	vantest.Fails(t, err, ErrPending)
}
