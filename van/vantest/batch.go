package vantest

// Tests of messages marked More, and of frames around CopyBelow.

import (
	"fmt"
	"runtime"
	"time"

	"github.com/stepaf/stepaf-go/van"
)

// released waits until all of dones were called once and the node's transport uses no
// values. No other message is sent meanwhile, since it could release earlier ones.
func (n *node) released(what string, dones ...*completion) {
	n.w.Helper()
	n.w.calledOnce(" of "+what, dones)
	m, ok := van.As[van.Meter](n.Van)
	if !ok {
		return
	}
	for end := time.Now().Add(Limit); m.Stats().LentValues > 0; runtime.Gosched() {
		if time.Now().After(end) {
			n.w.Fatalf("%s: %d values are still held after %s", what, m.Stats().LentValues, Limit)
		}
	}
}

// copyBelow sends frames around the length from which they are lent, each kind of
// frame and both ways. Every message is released without a later one.
func copyBelow(w *world) {
	worker, server := w.pair()
	const at = van.CopyBelow
	for i, shape := range [][]int{{8, at - 1}, {8, at}, {8, at + 1}, {at, 8}, {at, at}, {at - 1, at + 1}, {8, at, at}, {8, at + 1, at - 1}, {at + 1, 8, at}} {
		for _, x := range []struct {
			from, to *node
		}{{worker, server}, {server, worker}} {
			var frames, sent [][]byte
			for k, n := range shape {
				frames, sent = append(frames, pattern(10*i+k, n)), append(sent, pattern(10*i+k, n))
			}
			m := data(x.to.self.ID, i, x.from == worker, sent...)
			c := newCompletion()
			c.bytes = sent[len(sent)-1]
			m.Done = c
			x.from.must(m)
			what := fmt.Sprintf("frames of %v bytes from %s", shape, van.NodeName(x.from.self.ID))
			checkFrames(w, what, x.to.next(), frames)
			x.from.released(what, c)
		}
	}
}

// more sends batches of messages with More, which a transport may queue. They end with a
// message without More, or with Flush. All arrive, in order and intact, although
// no message follows.
func more(w *world) {
	worker, server := w.pair()
	for _, x := range []struct {
		from, to *node
	}{{worker, server}, {server, worker}} {
		first := 0 // timestamp of the batch
		flusher, _ := van.As[van.Flusher](x.from.Van)
		for _, count := range []int{1, 2, 15, 16, 17, 18, 40} {
			for _, flush := range []bool{false, true} {
				what := fmt.Sprintf("batch of %d from %s, flushed %t", count, van.NodeName(x.from.self.ID), flush)
				var dones []*completion
				for i := range count {
					m := data(x.to.self.ID, first+i, x.from == worker, pattern(-i, 8), pattern(i, 20+10*i))
					c := newCompletion()
					m.More, m.Done = flush || i < count-1, c
					dones = append(dones, c)
					x.from.must(m)
				}
				if flush && flusher != nil {
					flusher.Flush(x.to.self.ID)
				}
				for i := range count {
					r := x.to.next()
					if int(r.meta.Timestamp) != first+i {
						w.Fatalf("%s: message %d came when %d was due", what, int(r.meta.Timestamp)-first, i)
					}
					checkFrames(w, fmt.Sprintf("message %d of %s", i, what), r, [][]byte{pattern(-i, 8), pattern(i, 20+10*i)})
				}
				x.from.released(what, dones...)
				first += count
			}
		}
	}
}

// moreToSeveral queues messages for two peers at the same time. Flushing one does not
// affect the other.
func moreToSeveral(w *world) {
	server, first, second := w.node(8, nil), w.node(9, nil), w.node(11, nil)
	link(first, server)
	link(second, server)
	w.greet([]*node{first, second}, []*node{server})
	flusher, _ := van.As[van.Flusher](server.Van)
	const count = 5
	for i := range count {
		for _, to := range []*node{first, second} {
			m := data(to.self.ID, i, false, pattern(-i, 8), pattern(i, 100))
			m.More = true
			server.must(m)
		}
	}
	if flusher != nil {
		flusher.Flush(9)
		flusher.Flush(11)
	}
	first.expect(8, count)
	second.expect(8, count)
}
