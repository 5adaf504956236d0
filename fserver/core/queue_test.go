package core

import (
	"context"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/testcluster"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/vantest"
)

// TestLostInstance: a server waits for its own instance of each worker. Another one that
// comes back does not make up for it.
func TestLostInstance(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{Group: 2, Set: func(c *postoffice.Config) { c.ReplaceTimeout = 0 }})
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

// TestTwoBatchesTwoCallers: when two rounds of batches have come before anybody woke, the
// first caller to take one wakes the second.
func TestTwoBatchesTwoCallers(t *testing.T) {
	worker, server := sessions(t)
	q := server.queue
	for i := range 2 {
		if _, err := worker.PushPull(af.DefaultStream, []af.KeyTensor{{Key: uint64(i), Val: tensor(t, make([]byte, 8))}}, nil); err != nil {
			t.Fatal(err)
		}
	}
	for end := time.Now().Add(20 * time.Second); ; {
		q.mu.Lock()
		n := q.workers[0].Len()
		q.mu.Unlock()
		if n == 2 {
			break
		}
		if time.Now().After(end) {
			t.Fatal("the batches do not come")
		}
	}
	for i := range 2 {
		select { // as a caller that sleeps
		case <-q.changed:
		case <-time.After(20 * time.Second):
			t.Fatalf("caller %d sleeps though a batch is there", i)
		}
		items, ok, err := q.take(nil)
		if !ok || err != nil || len(items) != 1 {
			t.Fatalf("caller %d got %d batches, %v", i, len(items), err)
		}
		items[0].Release()
	}
}
