package tcp

import (
	"bytes"
	"slices"
	"sync/atomic"
	"testing"
	"unsafe"

	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/env"
)

// holder counts the users of memory.
type holder struct{ n atomic.Int32 }

func (h *holder) Retain()  { h.n.Add(1) }
func (h *holder) Release() { h.n.Add(-1) }

// batch makes a batch for node to: a push of each value, or an answer with all of them. h may be nil.
func batch(to, ts int, request bool, h *holder, vals ...[]byte) *van.Message {
	m := &van.Message{}
	m.Reset()
	m.Receiver, m.Timestamp, m.Request, m.Push, m.AppID, m.CustomerID = to, int32(ts), request, request, 0, 0
	for i, v := range vals {
		p := van.Part{Key: uint64(i), Push: request, Len: len(v), Device: backend.Host, Dtype: 1, Vals: backend.Bytes(v)}
		if h != nil && len(v) > 0 {
			p.Vals = backend.At(unsafe.Pointer(&v[0]), len(v), backend.Host, h)
		}
		m.Parts = append(m.Parts, p)
	}
	m.WriteDirectory()
	return m
}

// values are one for each length.
func values(lens ...int) (all [][]byte) {
	for i, n := range lens {
		all = append(all, pattern(n, i))
	}
	return all
}

// TestCancelBatchAnywhere: a batch is canceled after each number of its bytes was written. If no byte was written, none is sent; otherwise
// the rest is sent from a copy. The batch after it follows intact, Done is called once, and no memory stays retained.
func TestCancelBatchAnywhere(t *testing.T) {
	const at = lendFrom
	for _, lens := range [][]int{{at}, {3, at, 5}, {at, at}, {at, 0, 3, 0, at, 0}, {0, at, 7, 8, at, 9}, {at + 1, at + 2, 0, at + 3, 100}} {
		queue := func(messages ...*van.Message) *outConn {
			c := newOutConn(&common{cfg: env.Default()}, &new(peer).Peer, -1, nil)
			c.blocked = true // the test takes the bytes in place of the socket
			for _, m := range messages {
				if err := c.send(m); err != nil {
					t.Fatal(err)
				}
			}
			return c
		}
		next := batch(8, 20, true, nil, values(100, at, 1, at)...)
		rest, whole := unwritten(queue(next)), unwritten(queue(batch(8, 1, true, nil, values(lens...)...), next))
		length := len(whole) - len(rest)
		var cuts []int
		for n := 0; n < length; n++ {
			if n < 4*headLen || n%701 == 0 || n > length-50 {
				cuts = append(cuts, n)
			}
		}
		for sum, i := length, len(lens)-1; i >= 0; i-- { // the ends of the values
			cuts, sum = append(cuts, sum-1, min(sum, length-1), min(sum+1, length-1)), sum-lens[i]
		}
		for _, n := range cuts {
			vals, done, h := values(lens...), atomic.Int32{}, &holder{}
			m := batch(8, 1, true, h, vals...)
			m.Done = counter{&done}
			c := queue(m, next)
			c.written(n / 2)
			c.written(n - n/2)
			for range 2 {
				c.cancel(&van.Requests{First: 1, Count: 10})
			}
			if done.Load() != 1 || h.n.Load() != 0 {
				t.Errorf("%v canceled after %d bytes: given back %d times, %d users are left", lens, n, done.Load(), h.n.Load())
			}
			for _, v := range vals {
				clear(v)
			}
			want := whole[n:]
			if n == 0 {
				want = rest
			}
			var got []byte
			for len(c.queue) > 0 { // in pieces
				b := unwritten(c)
				b = b[:min(len(b), 5000)]
				got = append(got, b...)
				c.written(len(b))
			}
			if !bytes.Equal(got, want) {
				t.Errorf("%v canceled after %d bytes of %d: %d bytes follow, want %d, or other bytes", lens, n, length, len(got), len(want))
			}
			if c.unsent() != 0 {
				t.Errorf("%v canceled after %d bytes: %d bytes count as unsent at the end", lens, n, c.unsent())
			}
		}
	}
}

// TestManyRuns: a batch of more values than one system call takes arrives, and gives its memory back.
func TestManyRuns(t *testing.T) { both(t, manyRuns) }

func manyRuns(t *testing.T, options func(*van.Options)) {
	worker, server, open := stuck(t, options)
	lens := append(slices.Repeat([]int{lendFrom, 1}, 1200), slices.Repeat([]int{lendFrom}, 1200)...)
	vals, done, h := values(lens...), atomic.Int32{}, &holder{}
	for i := range 3 {
		m := batch(8, 10000*i, true, h, vals...)
		m.Done = counter{&done}
		worker.must(m)
	}
	open()
	for range 3 {
		m := server.next()
		if err := vantest.SameParts(m, vals); err != nil {
			t.Error(err)
		}
		m.Release()
	}
	vantest.Eventually(t, limit, "all is given back", func() bool { return done.Load() == 3 && h.n.Load() == 0 })
}

// TestCutBatch: batches on a connection that breaks give their memory back, once.
func TestCutBatch(t *testing.T) { both(t, cutBatch) }

func cutBatch(t *testing.T, options func(*van.Options)) {
	worker, server, open := stuck(t, func(o *van.Options) { options(o); o.Config.RecvBudgetPeer = 1 << 20 })
	var done atomic.Int32
	h := &holder{}
	for i := range 6 {
		m := batch(8, 100*i, true, h, values(5, 4<<20, 0, 100, 4<<20, 0)...)
		m.Done = counter{&done}
		worker.must(m)
	}
	c := worker.peers.Of(8).Link()
	c.mu.Lock()
	c.fail(errGone)
	c.mu.Unlock()
	if done.Load() != 6 || h.n.Load() != 0 {
		t.Errorf("given back %d times, want 6; %d users are left", done.Load(), h.n.Load())
	}
	open()
	_ = server
}

// TestEmptyParts: a batch of the largest number of tensors without elements arrives, and counts for the budget with the memory of its parts.
func TestEmptyParts(t *testing.T) {
	worker, server := pair(t, nil)
	m := batch(8, 1, true, nil, make([][]byte, van.MaxParts)...)
	worker.must(m)
	got := server.next()
	if n := (*inbound)(got.Native()).weight(); len(got.Parts) != van.MaxParts || n < van.MaxParts*van.PartBytes {
		t.Errorf("%d parts count as %d bytes, want %d and %d or more", len(got.Parts), n, van.MaxParts, van.MaxParts*van.PartBytes)
	}
	got.Release()
	worker.must(batch(8, 1, true, nil, values(1)...))
	got = server.next()
	if err := vantest.SameParts(got, values(1)); err != nil {
		t.Error(err)
	}
	got.Release()
}

// TestBatchBeyondReceiveBudget: values of a request beyond the receive budget are dropped; those with registered memory are not. The
// message after it is intact.
func TestBatchBeyondReceiveBudget(t *testing.T) { both(t, batchBeyondReceiveBudget) }

func batchBeyondReceiveBudget(t *testing.T, options func(*van.Options)) {
	const most = 4 << 20
	worker, server := pair(t, func(o *van.Options) { options(o); o.Config.RecvBudgetPeer, o.Config.RecvBudget = most/2, most })
	place := make([]byte, most)
	if err := server.RegisterRecvBuffer(9, 1, backend.Bytes(place)); err != nil {
		t.Fatal(err)
	}
	vals := values(most/2, most, most/2, 1, 10<<20, 70_000)
	for range 3 {
		worker.must(batch(8, 1, true, nil, vals...))
		got := server.next()
		want := [][]byte{vals[0], vals[1], vals[2], nil, nil, nil}
		if err := vantest.SameParts(got, want); err != nil {
			t.Error(err)
		}
		got.Release()
		worker.must(batch(8, 100, true, nil, vals[:3]...))
		got = server.next()
		if err := vantest.SameParts(got, vals[:3]); err != nil {
			t.Error(err)
		}
		got.Release()
	}
}

// TestInvalidateBatch: memory is taken back when a later value of the same answer arrives. Nothing is written there, and the answer is
// not delivered.
func TestInvalidateBatch(t *testing.T) { both(t, invalidateBatch) }

func invalidateBatch(t *testing.T, options func(*van.Options)) {
	const size = 1 << 20
	vals := values(size, 100, size, size)
	for taken := range 4 { // 3: all
		worker, server := pair(t, options)
		pull := batch(8, 1, true, nil, vals...)
		var intos [][]byte
		for i := range pull.Parts {
			p := &pull.Parts[i]
			intos = append(intos, make([]byte, p.Len))
			p.Push, p.Vals, p.Into = false, backend.Mem{}, backend.Bytes(intos[i])
		}
		pull.Push = false
		pull.WriteDirectory()
		worker.must(pull)
		server.next().Release()
		a := batch(9, 1, false, nil, vals...)
		meta, err := a.AppendTo(nil)
		if err != nil {
			t.Fatal(err)
		}
		h := head{meta: len(meta), frames: batchFrames, vals: a.PayloadLen()}
		raw := &raw{t: t, c: dialRaw(t, server, worker), bytes: append(append(h.append(nil), meta...), bytes.Join(vals, nil)...)}
		raw.write(-size / 2) // half of the third value
		vantest.Eventually(t, limit, "a half of the third value arrives", func() bool { return worker.lacks(size / 2) })
		for i, k := range []int{0, 2, 3} {
			if taken == i || taken == 3 {
				worker.Invalidate(backend.Bytes(intos[k]))
				clear(intos[k])
			}
		}
		raw.write(size)
		_ = raw.c.Close()
		server.must(dataMessage(9, 2, false, false, []byte("next")))
		m := worker.next()
		if m.Timestamp != 2 && taken != 2 { // the last value had not begun: it was received elsewhere
			t.Errorf("%d: message %d arrived, want that of the canceled request dropped", taken, m.Timestamp)
		}
		if m.Timestamp == 1 {
			if m.Parts[3].Placed {
				t.Error("a value is in memory that was taken back")
			}
			m.Release()
			m = worker.next()
		}
		m.Release()
		for i, k := range []int{0, 2, 3} {
			if (taken == i || taken == 3) && !bytes.Equal(intos[k], make([]byte, size)) {
				t.Errorf("%d: memory %d that was taken back was written to", taken, k)
			}
		}
		if n := worker.own.places.Expected(); n != 0 {
			t.Errorf("%d answers are still expected", n)
		}
	}
}
