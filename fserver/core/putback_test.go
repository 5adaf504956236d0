package core

import (
	"bytes"
	"errors"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/tests/vantest"
)

// TestRetake: batches of which all tensors but one were returned go back to the queue, in their order, and can be taken
// and answered as before.
func TestRetake(t *testing.T) {
	worker, server := sessions(t)
	var handlers []int32
	pulls := make([][]byte, 4)
	for i := range byte(4) {
		kt := func(key uint64, b []byte) []af.KeyTensor { return []af.KeyTensor{{Key: key, Val: tensor(t, b)}} }
		push := kt(1, bytes.Repeat([]byte{i}, 64))
		pulls[i] = make([]byte, 64)
		pull := kt(2, pulls[i])
		switch i {
		case 1: // needs no answer
			push, pull = append(push, kt(3, []byte{i})...), nil
		case 2: // has no tensor
			push = nil
		case 3: // waits for an empty answer
			pull = nil
		}
		h, err := worker.PushPull(af.DefaultStream, nil, push, pull)
		if err != nil {
			t.Fatal(err)
		}
		handlers = append(handlers, h)
	}
	for end := time.Now().Add(20 * time.Second); arrived(server.queue) < 4; {
		if time.Now().After(end) {
			t.Fatal("the batches do not come")
		}
	}
	get := func() (it Item) {
		t.Helper()
		var items []Item
		if err := later(t, func(slice time.Duration) (err error) {
			items, err = server.GetBatch(nil, slice)
			return err
		}); err != nil || len(items) != 1 {
			t.Fatalf("%d batches, %v", len(items), err)
		}
		return items[0]
	}
	for i := range 4 {
		var id uint64
		for range 3 {
			it := get()
			held := &it.Batch
			if len(it.Pushes()) == 0 {
				held = nil
				it.Release()
			}
			back, ok := server.Retake(it.ID, held)
			if !ok {
				t.Fatalf("batch %d is not taken back", i)
			}
			if held != nil {
				it.Release()
			}
			before := queued(server.queue)
			server.GiveBack([]Item{back})
			if n := queued(server.queue) - before; n != weight(&back.Batch) {
				t.Errorf("batch %d, given back, counts %d bytes, want %d", i, n, weight(&back.Batch))
			}
			id = it.ID
			if err := server.Respond(af.DefaultStream, id, nil); !errors.Is(err, ErrMisuse) {
				t.Errorf("an answer to batch %d, which is in the queue again: %v", i, err)
			}
		}
		it := get()
		if it.ID != id || it.ID != uint64(i) {
			t.Fatalf("batch %d came as number %d, before as %d", i, it.ID, id)
		}
		var answer []af.KeyTensor
		if len(it.Pulls()) > 0 {
			answer = []af.KeyTensor{{Val: tensor(t, bytes.Repeat([]byte{byte(i + 10)}, 64))}}
		}
		if len(it.Pushes()) > 0 && !bytes.Equal(it.Pushes()[0].Val.Mem().Host(), bytes.Repeat([]byte{byte(i)}, 64)) {
			t.Errorf("batch %d has other values than were sent", i)
		}
		if err := server.Respond(af.DefaultStream, it.ID, answer); err != nil {
			t.Errorf("batch %d: %v", i, err)
		}
		if _, ok := server.Retake(it.ID, &it.Batch); ok {
			t.Errorf("batch %d was answered, and is taken back", i)
		}
		it.Release()
		if err := worker.waitFor(handlers[i]); err != nil {
			t.Error(err)
		}
		if answer != nil && pulls[i][63] != byte(i+10) {
			t.Errorf("batch %d pulled %d", i, pulls[i][63])
		}
	}
}

// TestWakes: callers of GetAny and GetBatch are woken by batches that another caller has left or given back, and by the loss of a worker.
func TestWakes(t *testing.T) {
	worker, server := sessions(t)
	q := server.queue
	if _, err := server.GetAny(nil, 0, time.Millisecond); !errors.Is(err, ErrPending) {
		t.Fatalf("a batch from nowhere: %v", err)
	}
	for range 2 {
		if _, err := worker.PushPull(af.DefaultStream, nil, []af.KeyTensor{{Key: 1, Val: tensor(t, make([]byte, 64))}}, nil); err != nil {
			t.Fatal(err)
		}
	}
	vantest.Eventually(t, 20*time.Second, "two batches", func() bool { return arrived(q) == 2 })
	callers := map[string]chan struct{}{"GetAny": q.anyReady, "GetBatch": q.changed}
	sleep := func() { // as a caller that finds no batch does
		for _, woken := range callers {
			select {
			case <-woken:
			default:
			}
		}
	}
	wake := func(what string, names ...string) {
		t.Helper()
		for _, name := range names {
			vantest.Eventually(t, 20*time.Second, name+" is woken by "+what, func() bool { return len(callers[name]) == 1 })
		}
		sleep()
	}
	sleep()
	one, err := server.GetAny(nil, 1, 20*time.Second)
	if err != nil || len(one) != 1 {
		t.Fatalf("%d batches, %v", len(one), err)
	}
	wake("a batch that is left", "GetAny")
	rest, err := server.GetBatch(nil, 20*time.Second)
	if err != nil || len(rest) != 1 {
		t.Fatalf("%d batches, %v", len(rest), err)
	}
	sleep()
	server.GiveBack(append(one, rest...))
	wake("batches that are given back", "GetAny", "GetBatch")
	worker.Close()
	wake("a loss", "GetAny", "GetBatch")
}

// queued returns the number of queued bytes of the first worker.
func queued(q *queue) int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.bytes[0]
}

// arrived returns the number of batches that have arrived.
func arrived(q *queue) uint64 {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.next
}
