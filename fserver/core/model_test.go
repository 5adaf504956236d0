package core

import (
	"context"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/testcluster"
)

// TestQueueModel puts batches of two workers into the queue, takes some of each worker or of any, returns some, and has
// workers cancel some. It compares the queue's contents, order, accounts and descriptors with plain lists.
func TestQueueModel(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{Workers: 2, Set: func(c *postoffice.Config) { c.RecvBudgetPeer = 1 << 30 }})
	n := c.Servers[0]
	srv, err := af.NewServer(n, af.ServerOptions{})
	if err != nil {
		t.Fatal(err)
	}
	came := make(chan af.Batch, 1000)
	if err := srv.Handle(func(b af.Batch) { came <- b.Retain() }); err != nil {
		t.Fatal(err)
	}
	workers := make([]*af.Worker, 2)
	for i := range workers {
		if workers[i], err = af.NewWorker(c.Workers[i], af.WorkerOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	type batch struct {
		af.Batch
		call   postoffice.Call
		worker int
		bytes  int
		gone   bool
	}
	rng := rand.New(rand.NewPCG(4, 4))
	next := func() *batch {
		t.Helper()
		w := rng.IntN(2)
		var push, pull []af.KeyTensor
		for k := range 1 + rng.IntN(2) {
			push = append(push, af.KeyTensor{Key: uint64(k), Val: tensor(t, make([]byte, 8*(1+rng.IntN(9))))})
		}
		if rng.IntN(3) > 0 {
			pull = append(pull, af.KeyTensor{Key: 9, Val: tensor(t, make([]byte, 8))})
		}
		call, err := workers[w].PushPull(push, [][]af.KeyTensor{pull})
		if err != nil {
			t.Fatal(err)
		}
		select {
		case b := <-came:
			x := &batch{Batch: b, call: call, worker: w, bytes: 512}
			for _, p := range b.Pushes() {
				x.bytes += p.Val.Len()
			}
			return x
		case <-time.After(20 * time.Second):
			t.Fatal("no batch has come")
			return nil
		}
	}
	for range 20 {
		q := newQueue(n)
		var queued [2][]uint64
		batches := map[uint64]*batch{}
		var out []Item
		id, turn := uint64(0), 0
		var shown [2]int // descriptors
		for i := range shown {
			if shown[i], err = openBatches(q, i == 1); err != nil {
				t.Fatal(err)
			}
		}
		check := func(what string) {
			t.Helper()
			filled := 0
			for w := range queued {
				bytes := 0
				var ids []uint64
				for _, it := range q.workers[w].All() {
					ids = append(ids, it.ID)
				}
				for _, id := range queued[w] {
					bytes += batches[id].bytes
				}
				if !slices.Equal(ids, queued[w]) || q.bytes[w] != bytes {
					t.Fatalf("%s: worker %d has %d with %d bytes, want %d with %d", what, w, ids, q.bytes[w], queued[w], bytes)
				}
				if len(ids) > 0 {
					filled++
				}
			}
			if q.filled != filled || q.full != 0 || q.next != id {
				t.Fatalf("%s: %d filled, %d full, next %d, want %d, 0, %d", what, q.filled, q.full, q.next, filled, id)
			}
			if q.ready(eachOne) != (filled == 2) || q.ready(0) != (filled > 0) || len(q.missing()) != 2-filled {
				t.Fatalf("%s: ready %t and %t, %q are missing", what, q.ready(eachOne), q.ready(0), q.missing())
			}
			if readable(t, shown[0]) != (filled == 2) || readable(t, shown[1]) != (filled > 0) {
				t.Fatalf("%s: the descriptors are readable: %t and %t, with batches of %d workers", what, readable(t, shown[0]), readable(t, shown[1]), filled)
			}
			if len(q.out)+len(q.acked.of) != len(out) || q.acked.order.Len() < len(q.acked.of) {
				t.Fatalf("%s: %d and %d handed out, want %d", what, len(q.out), len(q.acked.of), len(out))
			}
		}
		for range 60 {
			if rng.IntN(4) == 0 { // a program may read the descriptors
				for i := range shown {
					_, _ = unix.Read(shown[i], make([]byte, 8))
				}
				q.wakeAll()
				check("read")
			}
			switch rng.IntN(8) {
			case 0, 1, 2:
				b := next()
				batches[id] = b
				queued[b.worker] = append(queued[b.worker], id)
				id++
				b.Retain() // the queue's reference
				b.Release()
				q.put(b.Batch)
				check("put")
			case 3:
				items, ok, err := q.take(nil, eachOne)
				if ok != (len(queued[0]) > 0 && len(queued[1]) > 0) || err != nil || ok && (len(items) != 2 || items[0].ID != queued[0][0] || items[1].ID != queued[1][0]) {
					t.Fatalf("one of each: %v, %t, %v of %v", items, ok, err, queued)
				}
				if ok {
					queued[0], queued[1] = queued[0][1:], queued[1][1:]
				}
				out = append(out, items...)
				check("take")
			case 4:
				most := rng.IntN(4)
				items, ok, err := q.take(nil, most)
				var want []uint64
				for (most == 0 || len(want) < most) && len(queued[0])+len(queued[1]) > 0 {
					if len(queued[turn]) > 0 {
						want = append(want, queued[turn][0])
						queued[turn] = queued[turn][1:]
					}
					turn = 1 - turn
				}
				slices.Sort(want)
				var got []uint64
				for _, it := range items {
					got = append(got, it.ID)
				}
				if ok != (len(want) > 0) || err != nil || !slices.Equal(got, want) {
					t.Fatalf("at most %d of any: %d, %t, %v, want %d", most, got, ok, err, want)
				}
				out = append(out, items...)
				check("take any")
			case 5: // returns some
				k := rng.IntN(len(out) + 1)
				rng.Shuffle(len(out), func(i, j int) { out[i], out[j] = out[j], out[i] })
				back := out[:k]
				for _, it := range back {
					b := batches[it.ID]
					if !b.gone {
						queued[b.worker] = append(queued[b.worker], it.ID)
						slices.Sort(queued[b.worker])
					}
				}
				q.giveBack(back)
				out = slices.Clone(out[k:])
				check("give back")
			case 6: // a worker cancels one
				w := rng.IntN(2)
				if len(queued[w]) == 0 {
					break
				}
				i := rng.IntN(len(queued[w]))
				b := batches[queued[w][i]]
				if len(b.Pulls()) == 0 {
					break // it may have been answered
				}
				ctx, cancel := context.WithCancel(t.Context())
				cancel()
				if b.call.Wait(ctx) == nil {
					t.Fatal("nobody has answered, and Wait says so")
				}
				b.gone = true
				for end := time.After(20 * time.Second); b.Wanted(); {
					select {
					case <-end:
						t.Fatal("the server does not receive the cancellation of a batch")
					case <-time.After(time.Millisecond):
					}
				}
				queued[w] = slices.Delete(queued[w], i, i+1)
				q.onCanceled(postoffice.WorkerID(w))
				check("canceled")
			case 7:
				if len(out) > 0 && q.isQueued(out[0].ID) {
					t.Fatal("what is handed out waits")
				}
				for w := range queued {
					for _, id := range queued[w] {
						if !q.isQueued(id) {
							t.Fatalf("%d does not wait", id)
						}
					}
				}
			}
		}
	}
}
