package vantest

// Tests of batches, and of frames around CopyBelow.

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"runtime"
	"slices"
	"time"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
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
				frames, sent = append(frames, Pattern(10*i+k, n)), append(sent, Pattern(10*i+k, n))
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

// tensors makes the parts of a batch with values of these lengths. Request parts of negative length are pulls.
func tensors(seed int, lens ...int) (parts []van.Part) {
	for i, n := range lens {
		p := van.Part{Key: uint64(1000*seed + i), Push: n >= 0, Len: max(n, -n), Device: backend.Host, Dtype: 1, Dim: 1}
		if p.Shape[0] = int64(p.Len); p.Push {
			p.Vals = backend.Bytes(Pattern(seed+i, n))
		} else {
			p.Into = backend.Bytes(make([]byte, -n))
			p.Addr = p.Into.Addr()
		}
		parts = append(parts, p)
	}
	return parts
}

// batchOf makes a batch.
func batchOf(receiver, ts int, request bool, parts []van.Part) *van.Message {
	m := data(receiver, ts, request)
	m.Push, m.Parts = false, parts
	m.WriteDirectory()
	return m
}

// parts receives n parts, in one batch or in as many messages, as a C++ node gets them.
func (n *node) parts(what string, count int) (all []part) {
	for len(all) < count {
		r := n.next()
		if len(r.parts) == 0 {
			p := van.PartOf(&r.meta)
			r.parts = []part{{p, r.data[1], r.placed}}
			if r.frames != 2 || len(r.data[0]) != 8 || binary.LittleEndian.Uint64(r.data[0]) != p.Key {
				n.w.Fatalf("%s: part %d came as a message of %d frames, keys %x, of key %d", what, len(all), r.frames, r.data[0], p.Key)
			}
		}
		all = append(all, r.parts...)
	}
	return all
}

// batches sends batches of many forms and answers them. All parts arrive in order and intact, and Done is called once for each batch,
// although no message follows.
func batches(w *world) {
	worker, server := w.pair()
	first := 0
	for i, lens := range [][]int{{0}, {8}, {-8}, {100, 0, 100, -100}, {4095, 4096, -4097, -1}, {8191, 8192, 8193, 10, 70000, -8192, -70000, -3},
		{1 << 20, 5, 3 << 20, -4 << 20, -5, -2 << 20}, slices.Repeat([]int{33}, 200), slices.Repeat([]int{-4096}, 40)} {
		what := fmt.Sprintf("batch %d", i)
		sent := tensors(i, lens...)
		c := newCompletion()
		m := batchOf(8, first, true, sent)
		m.Done = c
		worker.must(m)
		got := server.parts(what, len(lens))
		var answers []van.Part
		for k, g := range got {
			p := &sent[k]
			if g.Key != p.Key || g.Push != p.Push || g.Len != p.Len || g.Shape != p.Shape || int(g.Timestamp) != first+k || !bytes.Equal(g.vals, p.Vals.Host()) {
				w.Fatalf("%s: part %d came with key %d, push %t, %d bytes, shape %v, timestamp %d and %d bytes of values, want %d, %t, %d, %v, %d", what, k,
					g.Key, g.Push, g.Len, g.ShapeSlice(), g.Timestamp, len(g.vals), p.Key, p.Push, p.Len, p.ShapeSlice(), first+k)
			}
			if !p.Push {
				a := g.Part
				a.Vals, a.Into = backend.Bytes(Pattern(i*k, p.Len)), backend.Mem{}
				answers = append(answers, a)
			}
		}
		if len(answers) > 0 {
			c := newCompletion()
			a := batchOf(9, int(answers[0].Timestamp), false, answers)
			a.Done = c
			server.must(a)
			for k, g := range worker.parts("the answer to "+what, len(answers)) {
				p := &answers[k]
				if g.Key != p.Key || g.Timestamp != p.Timestamp || !bytes.Equal(g.vals, p.Vals.Host()) {
					w.Fatalf("%s: answer %d has key %d, timestamp %d, %d bytes, want %d, %d, %d, or other values", what, k, g.Key, g.Timestamp, len(g.vals), p.Key, p.Timestamp, p.Len)
				}
				if into := sent[len(sent)-len(answers)+k].Into; g.placed && !bytes.Equal(into.Host(), p.Vals.Host()) {
					w.Fatalf("%s: answer %d counts as placed, and is not in the memory that the request named", what, k)
				}
			}
			server.released("the answer to "+what, c)
		}
		worker.released(what, c) // a transport may use the memory for an answer until then
		first += len(lens)
	}
}

// SameParts returns an error that says how m differs from a batch with these values.
func SameParts(m *van.Message, values [][]byte) error {
	if len(m.Parts) != len(values) {
		return fmt.Errorf("%d parts, want %d", len(m.Parts), len(values))
	}
	for i := range m.Parts {
		if got := m.Parts[i].Vals; !bytes.Equal(got.Host(), values[i]) {
			return fmt.Errorf("part %d has %d bytes, want %d, or other values", i, got.Len(), len(values[i]))
		}
	}
	return nil
}
