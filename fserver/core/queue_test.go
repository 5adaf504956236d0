package core

import (
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/hooks"
	"github.com/stepaf/stepaf-go/tests/simgpu"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// TestLostInstance: a server waits for its own instance of each worker. The return of another instance is not enough.
func TestLostInstance(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{Group: 2, Set: func(c *postoffice.Config) { c.ReplaceTimeout = 0 }})
	n := c.Servers[0]
	s := &Session{node: n, queue: newQueue(n)}
	type event struct {
		id int
		up bool
	}
	events := make(chan event, 16)
	t.Cleanup(n.OnPeer(func(id postoffice.NodeID, up bool, _ error) { events <- event{int(id), up} })) // called after the queue's function
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
		testcluster.Lost(t, c.Scheduler, van.WorkerID(rank))
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		if _, err := c.Join(ctx, "worker", rank, nil); err != nil {
			t.Fatal(err)
		}
		await(event{van.WorkerID(rank), true})
	}
	lost := func() {
		t.Helper()
		err := later(t, func(slice time.Duration) error {
			_, err := s.GetBatch(nil, slice)
			return err
		})
		vantest.Fails(t, err, van.ErrPeerLost, "get_batch", (*cluster.Node)(n).App().PeerName(van.WorkerID(0)))
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

// TestTwoBatchesTwoCallers: if two rounds of batches have arrived before a caller woke, the first caller that takes a
// round wakes the second.
func TestTwoBatchesTwoCallers(t *testing.T) {
	worker, server := sessions(t)
	q := server.queue
	for i := range 2 {
		if _, err := worker.PushPull(af.DefaultStream, nil, []af.KeyTensor{{Key: uint64(i), Val: tensor(t, make([]byte, 8))}}, nil); err != nil {
			t.Fatal(err)
		}
	}
	awaitBatches(t, q, 2)
	for i := range 2 {
		select { // as a caller that sleeps
		case <-q.changed:
		case <-time.After(20 * time.Second):
			t.Fatalf("caller %d sleeps though a batch is there", i)
		}
		items, ok, err := q.take(nil, eachOne)
		if !ok || err != nil || len(items) != 1 {
			t.Fatalf("caller %d got %d batches, %v", i, len(items), err)
		}
		items[0].Release()
	}
}

// TestManyWorkers: get_batch waits for each of 40 workers, and returns their batches in the order of ranks. C++
// StepMesh keeps the workers in a mask of 32 bits.
func TestManyWorkers(t *testing.T) {
	const workers = 40
	c := testcluster.Start(t, testcluster.Options{Workers: workers})
	opened := make([]*Session, workers)
	server := newSession(c.Servers[0])
	var opening sync.WaitGroup
	for i, n := range c.Workers {
		opened[i] = newSession(n)
		opening.Go(func() {
			if err := opened[i].open(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	opening.Go(func() {
		if err := server.open(t.Context()); err != nil {
			t.Error(err)
		}
	})
	opening.Wait()
	push := func(rank int) {
		t.Helper()
		if _, err := opened[rank].PushPull(af.DefaultStream, nil, []af.KeyTensor{{Key: 1, Val: tensor(t, []byte{byte(rank)})}}, nil); err != nil {
			t.Fatal(err)
		}
	}
	const last = 33 // not a rank at an end, and bit 1 of the mask
	for rank := workers - 1; rank >= 0; rank-- {
		if rank != last {
			push(rank)
		}
	}
	vantest.Eventually(t, 20*time.Second, "all but one have pushed", func() bool {
		return slices.Equal(server.queue.missing(), []string{(*cluster.Node)(c.Servers[0]).App().PeerName(van.WorkerID(last))})
	})
	_, err := server.GetBatch(nil, time.Millisecond)
	vantest.Fails(t, err, ErrPending)
	push(last)
	var items []Item
	if err := later(t, func(slice time.Duration) (err error) {
		items, err = server.GetBatch(nil, slice)
		return err
	}); err != nil || len(items) != workers {
		t.Fatalf("%d batches, %v; want %d", len(items), err, workers)
	}
	for rank, it := range items {
		if it.Worker() != rank || it.Pushes()[0].Val.Bytes()[0] != byte(rank) {
			t.Errorf("batch %d is of worker %d", rank, it.Worker())
		}
		it.Release()
	}
}

// awaitBatches waits until n batches of worker 0 are queued.
func awaitBatches(t *testing.T, q *queue, n int) {
	t.Helper()
	vantest.Eventually(t, 20*time.Second, "the batches are queued", func() bool {
		q.mu.Lock()
		defer q.mu.Unlock()
		return q.workers[0].Len() == n
	})
}

// TestCloseWithBatches: a node that leaves the cluster releases the batches that have not been taken.
func TestCloseWithBatches(t *testing.T) {
	worker, server := sessions(t)
	q := server.queue
	for i := range 3 {
		if _, err := worker.PushPull(af.DefaultStream, nil, []af.KeyTensor{{Key: uint64(i), Val: tensor(t, make([]byte, 8))}}, nil); err != nil {
			t.Fatal(err)
		}
	}
	awaitBatches(t, q, 3)
	taken, _, err := q.take(nil, eachOne)
	if err != nil {
		t.Fatal(err)
	}
	left := q.workers[0].All()[0].Batch
	server.Close()
	if n, b := q.workers[0].Len(), q.bytes[0]; n != 0 || b != 0 || q.filled != 0 {
		t.Errorf("%d batches of %d bytes are kept, of %d workers", n, b, q.filled)
	}
	if left.Pushes()[0].Val.Len() != 0 {
		t.Error("a batch that nobody has taken is held")
	}
	if taken[0].Pushes()[0].Val.Len() != 8 {
		t.Error("a batch that was taken is gone")
	}
	taken[0].Release()
}

// TestGetAnyTakesTurns: a worker with many batches does not delay the others, whose batches are among the next that are handed out.
func TestGetAnyTakesTurns(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{Workers: 3})
	workers, server := openAll(t, c)
	for i := range byte(20) {
		workers[0].ask(t, i, 64)
	}
	await(t, "flood", func() bool { n, _ := server.queued(0); return n == 20 })
	workers[1].ask(t, 101, 64)
	workers[2].ask(t, 102, 64)
	workers[2].ask(t, 103, 64)
	await(t, "batch of worker 1", func() bool { n, _ := server.queued(1); return n == 1 })
	await(t, "batches of worker 2", func() bool { n, _ := server.queued(2); return n == 2 })
	for _, want := range [][]byte{{0, 101}, {1, 102}, {2, 103}, {3, 4, 5}} { // with at most as many
		items, err := server.GetAny(nil, len(want), 20*time.Second)
		if got := numbers(items); err != nil || !slices.Equal(slices.Sorted(slices.Values(got)), want) {
			t.Errorf("batches %d, %v, want %d", got, err, want)
		}
		if !slices.IsSortedFunc(items, func(a, b Item) int { return int(a.ID) - int(b.ID) }) {
			t.Errorf("batches %d are not oldest first", numbers(items))
		}
		server.answer(t, items)
	}
	items, err := server.GetAny(nil, 0, 20*time.Second)
	if got := numbers(items); err != nil || len(got) != 14 || !slices.IsSorted(got) {
		t.Errorf("batches %d, %v, want 14 in order", got, err)
	}
	server.answer(t, items)
}

// TestGetAny: queued batches of all workers are handed out, oldest first. A lost worker is an error only if no other
// worker is left.
func TestGetAny(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{Workers: 3, Set: func(c *postoffice.Config) { c.ReplaceTimeout = 0 }})
	server := newSession(c.Servers[0])
	var all sync.WaitGroup
	open := func(s *Session) {
		all.Go(func() {
			if err := s.open(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	open(server)
	workers := make([]*Session, 3)
	for i := range workers {
		workers[i] = newSession(c.Workers[i])
		open(workers[i])
	}
	all.Wait()
	_, err := server.GetAny(nil, 0, time.Millisecond)
	vantest.Fails(t, err, ErrPending)
	sent := 0
	send := func(rank int) {
		t.Helper()
		sent++
		if _, err := workers[rank].PushPull(af.DefaultStream, nil, []af.KeyTensor{{Key: uint64(sent), Val: tensor(t, make([]byte, 8))}}, nil); err != nil {
			t.Fatal(err)
		}
		for end := time.Now().Add(20 * time.Second); ; {
			server.queue.mu.Lock()
			n := int(server.queue.next)
			server.queue.mu.Unlock()
			if n == sent {
				return
			}
			if time.Now().After(end) {
				t.Fatal("the batch does not come")
			}
		}
	}
	take := func(most int, want ...uint64) {
		t.Helper()
		items, err := server.GetAny(nil, most, 20*time.Second)
		var got []uint64
		for _, it := range items {
			got = append(got, it.Pushes()[0].Key)
			if err := server.Respond(af.Complete, it.ID, nil); err != nil {
				t.Error(err)
			}
			it.Release()
		}
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("batches %v and %v, want %v", got, err, want)
		}
	}
	for _, rank := range []int{2, 0, 2, 2, 0} {
		send(rank)
	}
	take(2, 1, 2)
	take(0, 3, 4, 5)
	waits := make(chan error, 1)
	go func() {
		items, err := server.GetAny(nil, 1, 20*time.Second)
		for _, it := range items {
			it.Release()
		}
		waits <- err
	}()
	send(1)
	if err := <-waits; err != nil {
		t.Error(err)
	}
	for rank := range workers {
		down := make(chan struct{})
		unwatch := c.Servers[0].OnPeer(func(id postoffice.NodeID, up bool, _ error) {
			if id == postoffice.WorkerID(rank) && !up {
				close(down)
			}
		})
		c.Workers[rank].Close()
		<-down
		unwatch()
		_, err := server.GetAny(nil, 0, time.Millisecond)
		if rank < 2 {
			vantest.Fails(t, err, ErrPending)
		} else {
			vantest.Fails(t, err, van.ErrPeerLost, "get_batch")
		}
	}
}

// TestAscending: servers in any order are sorted together with the parts of their pulls.
func TestAscending(t *testing.T) {
	pull := make([]af.KeyTensor, 6)
	for i := range pull {
		pull[i].Key = uint64(i)
	}
	to, parts := ascending([]int{2, 0, 1}, pull)
	var keys []uint64
	for _, p := range parts {
		keys = append(keys, p.Key)
	}
	if !slices.Equal(to, []int{0, 1, 2}) || !slices.Equal(keys, []uint64{2, 3, 4, 5, 0, 1}) {
		t.Errorf("servers %v, parts %v", to, keys)
	}
	if to, parts := ascending([]int{1, 0}, pull[:3]); !slices.Equal(to, []int{1, 0}) || len(parts) != 3 {
		t.Errorf("lists that do not fit: %v, %d parts", to, len(parts))
	}
	if to, _ := ascending([]int{}, nil); len(to) != 0 {
		t.Errorf("no servers: %v", to)
	}
}

// TestFullWhilePolling: a caller of GetBatch receives a batch itself, of a worker whose budget another goroutine has
// used up since the caller checked it. The caller does not wait for the budget that only its own take can free.
func TestFullWhilePolling(t *testing.T) {
	worker, server := sessions(t)
	q := server.queue
	looks := q.poll
	for range 20 { // the engine's loop may be faster than the Poll
		used, calls := 0, 0
		var h int32
		q.poll = func() bool {
			if calls++; calls != 3 { // calls: in receive, in Poll, and in Poll while it owns the source
				return calls > 3 && looks()
			}
			used = q.budget()
			q.mu.Lock()
			q.charge(0, used)
			q.mu.Unlock()
			var err error
			if h, err = worker.PushPull(af.DefaultStream, nil, nil, []af.KeyTensor{{Key: 2, Val: tensor(t, make([]byte, 64))}}); err != nil {
				t.Error(err)
			}
			return false
		}
		got := make(chan []Item, 1)
		go func() {
			items, _ := server.GetBatch(nil, 50*time.Millisecond)
			got <- items
		}()
		var items []Item
		select {
		case items = <-got:
		case <-time.After(5 * time.Second):
			t.Fatal("GetBatch waits for itself")
		}
		q.poll = looks
		q.mu.Lock()
		q.charge(0, -used)
		q.mu.Unlock()
		polled := len(items) > 0
		if used > 0 && !polled { // the engine's loop has the batch
			items = server.row(t)
		}
		for _, it := range items {
			if err := server.Respond(af.DefaultStream, it.ID, []af.KeyTensor{{Val: tensor(t, make([]byte, 64))}}); err != nil {
				t.Error(err)
			}
			it.Release()
			if err := worker.waitFor(h); err != nil {
				t.Error(err)
			}
		}
		if polled {
			return
		}
	}
	t.Log("no Poll was quick enough")
}

// slowDevice is a device whose events end canceled waits as late as the test wants.
type slowDevice struct {
	*pretended
	canceled, release chan struct{}
}

func (d *slowDevice) NewEvent() (backend.Event, error) {
	e, err := d.pretended.NewEvent()
	return &slowEvent{e, d}, err
}

type slowEvent struct {
	backend.Event
	of *slowDevice
}

func (e *slowEvent) Sync(ctx context.Context) error {
	<-ctx.Done()
	close(e.of.canceled)
	<-e.of.release
	return ctx.Err()
}

// TestTakenWhileClosing: while answers wait for the device and the server closes, a batch that needs no answer keeps
// its memory until its caller releases it.
func TestTakenWhileClosing(t *testing.T) {
	hook := &hooks.Van{}
	dev := &slowDevice{simgpu.New(0), make(chan struct{}), make(chan struct{})}
	c := testcluster.Start(t, testcluster.Options{Wrap: hook.Wrap("server", 0), Backend: func(role string, _ int) backend.Backend {
		return map[string]backend.Backend{"server": dev}[role]
	}})
	worker, server := open2(t, c)
	ask := func(push, pull []af.KeyTensor) {
		t.Helper()
		if _, err := worker.PushPull(af.DefaultStream, nil, push, pull); err != nil {
			t.Fatal(err)
		}
	}
	get := func(items []Item, err error) Item {
		t.Helper()
		if err != nil || len(items) != 1 {
			t.Fatalf("%d batches, %v", len(items), err)
		}
		return items[0]
	}
	ask(nil, []af.KeyTensor{{Key: 1, Val: tensor(t, make([]byte, 64))}})
	first := get(server.GetBatch(nil, 20*time.Second))
	dev.Queue(3, func() { <-dev.release })
	if err := server.Respond(3, first.ID, []af.KeyTensor{{Val: deviceTensor(t, dev.pretended, make([]byte, 64))}}); err != nil {
		t.Fatal(err)
	}
	first.Release()
	ask([]af.KeyTensor{{Key: 1, Val: tensor(t, make([]byte, 64))}, {Key: 2, Val: tensor(t, make([]byte, 64))}}, nil)
	q := server.queue
	vantest.Eventually(t, 20*time.Second, "the second batch", func() bool { return arrived(q) == 2 })
	held := hook.Held()
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		server.server.Close()
	}()
	<-dev.canceled
	items, _, err := q.take(nil, eachOne)
	second := get(items, err)
	q.clear() // as at the exit of the node
	if n := hook.Held(); n != held {
		t.Errorf("%d messages are held while the second batch is used, want %d", n, held)
	}
	second.Release()
	close(dev.release)
	<-closed
	vantest.Eventually(t, 20*time.Second, "no message is held", func() bool { return hook.Held() == 0 })
}
