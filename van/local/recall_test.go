package local

import (
	"bytes"
	"testing"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/inproc"
)

// TestRecall: what is put into the memory of requests that were given up, which the
// receiver has not taken yet, is seen by nobody; their memory is given back at once, and
// other requests arrive, also from the same memory.
func TestRecall(t *testing.T) {
	sizes := []int{100, 5000, 100_000, 3 << 20}
	for _, mode := range readModes {
		t.Run(mode.name, func(t *testing.T) {
			n := inproc.NewNetwork()
			worker, server := newNode(t, n, 9, nil), newNode(t, n, 8, mode.set)
			worker.start()
			worker.connect(server)
			const sent = 120
			vals, dones := make([][]byte, sent), make([]done, sent)
			recalled := func(i int) bool { return i >= 10 && i < sent-10 || i == 3 }
			for i := range sent {
				vals[i] = pattern(i, sizes[i%4])
				m := data(8, i, vals[i])
				m.Done = &dones[i]
				worker.must(m)
			}
			shared := data(8, 5000, vals[51])
			worker.must(shared)
			answer := data(8, 52, pattern(52, 100_000)) // of a request of the peer's: it is not one of ours
			answer.Request = false
			worker.must(answer)
			worker.Recall(van.Requests{First: 10, Count: sent - 20})
			worker.Recall(van.Requests{First: 3, Count: 1})
			worker.Recall(van.Requests{First: 20, Count: 4, Customer: 1})
			worker.Recall(van.Requests{First: 3, Count: 1})
			for i := range sent {
				if recalled(i) && dones[i].count() != 1 {
					t.Errorf("message %d: told %d times that its memory is free, want once", i, dones[i].count())
				}
				if recalled(i) && i != 51 {
					copy(vals[i], bytes.Repeat([]byte{0xee}, len(vals[i])))
				}
			}
			worker.must(data(8, 9000, pattern(1, 3<<20)))
			server.start()
			came := map[int]bool{}
			for last := 0; last != 9000; {
				m := server.next()
				last = int(m.Timestamp)
				want := pattern(last, len(m.Vals.Host()))
				switch last {
				case 5000:
					want = pattern(51, 3<<20)
				case 9000:
					want = pattern(1, 3<<20)
				}
				if !bytes.Equal(m.Vals.Host(), want) {
					t.Errorf("message %d came with other bytes than it was sent with", last)
				}
				if came[last] && last != 52 {
					t.Errorf("message %d came twice", last)
				}
				came[last] = true
				m.Release()
			}
			for i := range sent {
				if !came[i] && !recalled(i) {
					t.Errorf("message %d, which was not given up, did not come", i)
				}
			}
			if !came[5000] || !came[52] {
				t.Error("a message that was not given up did not come")
			}
			eventually(t, "everything pinned is given back", func() bool { return worker.Stats().Pinned == 0 })
			l := (*worker.peers.outs.Load())[0]
			l.mu.Lock()
			defer l.mu.Unlock()
			if l.unsent() != 0 || len(l.queue.requests) != 0 {
				t.Errorf("%d bytes and %d requests are still counted", l.unsent(), len(l.queue.requests))
			}
		})
	}
}
