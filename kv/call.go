package kv

import (
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/internal/datamsg"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// call is one push or pull in flight. It is used again.
type call[V Value] struct {
	cluster.Request
	w     *Worker[V]
	op    string
	push  bool
	sized bool // a pull whose values have their place from the start
	cmd   int32
	done  func(error)

	keys    []Key
	vals    []V     // a push's values, or a pull's place for them
	lens    []int32 // a push's lengths, or a pull's place for them
	out     *[]V
	outLens *[]int32
	own     *copied[V]

	parts []part[V] // by server rank, without servers that own no key
	ids   []int     // their node ids
	order []int     // indices of parts by first key
	cuts  []Slice   // scratch, by server rank
	index []int     // scratch: of parts, by server rank

	asked   atomic.Int32 // parts being or been sent
	missing atomic.Int32 // answers to a pull
	holds   atomic.Int32 // the sender's and the customer's
	msg     van.Message
}

// part is what one server is asked.
type part[V Value] struct {
	k0, k1 int // of keys
	v0, v1 int // of vals; empty when not known beforehand

	// The answer to a pull: got values, which lie in kept when that is not nil,
	// and otherwise at v0.
	got  int
	at   int // where they belong
	kept *van.Message
}

// copied is the library's copy of a request's data.
type copied[V Value] struct {
	keys []Key
	vals []V
	lens []int32
}

func (w *Worker[V]) take() *call[V] {
	c, _ := w.calls.Get().(*call[V])
	if c == nil {
		c = &call[V]{w: w}
	}
	c.asked.Store(0)
	c.holds.Store(2)
	return c
}

// Recycle drops the customer's reference.
func (c *call[V]) Recycle() { c.unhold() }

func (c *call[V]) unhold() {
	if c.holds.Add(-1) == 0 {
		c.w.calls.Put(c)
	}
}

// discard puts back a call that was not opened.
func (c *call[V]) discard() {
	c.release(nil)
	c.w.calls.Put(c)
}

// cut divides the request among the servers. vals is the number of values, of
// which each key has its length, or the same number.
func (c *call[V]) cut(vals int) error {
	w := c.w
	n := len(w.servers)
	c.cuts = slices.Grow(c.cuts[:0], n)[:n]
	clear(c.cuts)
	if w.o.Slicer != nil {
		w.o.Slicer(c.keys, w.ranges, c.cuts)
	} else {
		sliceByRange(c.keys, w.ranges, c.cuts)
	}
	var err error
	if c.order, err = checkSlices(c.cuts, len(c.keys), c.order); err != nil {
		return err
	}
	if s := w.skew.note(c.cuts); s >= 0 {
		w.node.Log().Warn("one server owns all keys of the first requests; kv.SpreadKey makes keys that spread over the servers",
			"server", van.NodeName(w.servers[s]), "requests", skewRequests, "servers", n, "a key", c.keys[0])
	}
	c.parts, c.ids = c.parts[:0], c.ids[:0]
	c.index = slices.Grow(c.index[:0], n)[:n]
	size, each := sizeOf[V](), 0
	if len(c.keys) > 0 && vals%len(c.keys) == 0 {
		each = vals / len(c.keys)
	}
	for s, cut := range c.cuts {
		if cut.Begin == cut.End {
			continue
		}
		c.index[s] = len(c.parts)
		c.parts = append(c.parts, part[V]{k0: cut.Begin, k1: cut.End, v0: cut.Begin * each, v1: cut.End * each})
		c.ids = append(c.ids, w.servers[s])
	}
	for i, s := range c.order {
		c.order[i] = c.index[s]
	}
	lens := 0
	if c.push && len(c.lens) > 0 {
		lens = 4
		next := 0
		for _, i := range c.order {
			p := &c.parts[i]
			p.v0 = next
			for _, l := range c.lens[p.k0:p.k1] {
				next += int(l)
			}
			p.v1 = next
		}
	}
	for i := range c.parts {
		p := &c.parts[i]
		if bytes := (p.k1-p.k0)*(8+lens) + (p.v1-p.v0)*size; bytes > maxPayload {
			return fmt.Errorf("%w: keys[%d:%d] for %s make a message of %d bytes, want at most %d", van.ErrInvalid,
				p.k0, p.k1, van.NodeName(c.ids[i]), bytes, maxPayload)
		}
	}
	c.missing.Store(int32(len(c.parts)))
	return nil
}

func (c *call[V]) copyKeys() {
	c.own, _ = c.w.copies.Get().(*copied[V])
	if c.own == nil {
		c.own = &copied[V]{}
	}
	c.own.keys = append(c.own.keys[:0], c.keys...)
	c.keys = c.own.keys
}

func (c *call[V]) copyData() {
	c.copyKeys()
	c.own.vals = append(c.own.vals[:0], c.vals...)
	c.own.lens = append(c.own.lens[:0], c.lens...)
	c.vals, c.lens = c.own.vals, c.own.lens
}

// send sends part i.
func (c *call[V]) send(ts int32, i int, keys []Key, vals []V, lens []int32) error {
	p, m := &c.parts[i], &c.msg
	m.Reset()
	m.Receiver = c.ids[i]
	m.Request, m.Push, m.Head, m.Timestamp = true, c.push, c.cmd, ts
	m.AppID, m.CustomerID = int32(c.w.customer.AppID()), int32(c.w.customer.ID())
	v := backend.Slice(vals[p.v0:p.v1])
	m.Addr, m.ValLen = v.Addr(), int32(p.v1-p.v0)
	if v.Len() == 0 {
		m.Addr = 0
	}
	var l backend.Mem
	if !c.push {
		// For RDMA, ValLen is a number of bytes. If it were equal to the length of Into, RDMA would register the memory, which a
		// late answer could overwrite.
		if sizeOf[V]() > 1 {
			m.Into = v
		}
		v = backend.Mem{}
	} else if len(lens) > 0 {
		l = backend.Slice(lens[p.k0:p.k1])
	}
	datamsg.SetData(m, backend.Slice(keys[p.k0:p.k1]), v, l, typeOf[V]())
	return c.w.node.Send(m)
}

// Answer takes the answer of the server of part from.
func (c *call[V]) Answer(_, from int, msg *van.Message) error {
	switch {
	case msg.SimpleApp || msg.Push != c.push:
		return fmt.Errorf("%w: answer to timestamp %d: push=%t simple=%t, want push=%t", van.ErrMalformed, msg.Timestamp, msg.Push, msg.SimpleApp, c.push)
	case from >= int(c.asked.Load()):
		return fmt.Errorf("%w: answer to timestamp %d before its request was sent", van.ErrMalformed, msg.Timestamp)
	case c.push:
		return nil
	}
	p := &c.parts[from]
	if err := c.takePart(p, msg); err != nil {
		return fmt.Errorf("pull of keys[%d:%d] (%d to %d): %w", p.k0, p.k1, c.keys[p.k0], c.keys[p.k1-1], err)
	}
	if c.missing.Add(-1) > 0 {
		return nil
	}
	if err := c.assemble(); err != nil {
		return fmt.Errorf("pull of %d keys (%d to %d), the last server to answer: %w", len(c.keys), c.keys[0], c.keys[len(c.keys)-1], err)
	}
	return nil
}

// takePart checks an answer to a pull and copies its values to their destination, or keeps the message if the
// destination depends on the other servers' answers.
func (c *call[V]) takePart(p *part[V], msg *van.Message) error {
	f, err := parse[V](msg)
	if err != nil {
		return err
	}
	if !keysEqual(msg.Keys, c.keys[p.k0:p.k1]) {
		if len(f.keys) != p.k1-p.k0 {
			return fmt.Errorf("%w: the answer has %d keys, want %d", van.ErrMalformed, len(f.keys), p.k1-p.k0)
		}
		for i, k := range f.keys {
			if want := c.keys[p.k0+i]; k != want {
				return fmt.Errorf("%w: the answer's key %d is %d, want %d", van.ErrMalformed, i, k, want)
			}
		}
	}
	p.got = len(f.vals)
	want := p.v1 - p.v0
	if p.got != want && c.sized && c.outLens == nil && f.lens == nil {
		return fmt.Errorf("%w: %d values received, the buffer holds %d (%d for each key)", van.ErrInvalid, p.got, want, want/(p.k1-p.k0))
	}
	switch {
	case msg.Placed && p.got > want:
		return fmt.Errorf("%w: %d values were placed in room for %d", van.ErrMalformed, p.got, want)
	case msg.Placed:
	case c.sized && p.got == want:
		copy(c.vals[p.v0:p.v1], f.vals)
	default:
		p.kept = msg.Retain()
	}
	if c.outLens == nil {
		return nil
	}
	if f.lens != nil {
		copy(c.lens[p.k0:p.k1], f.lens)
		return nil
	}
	for i := p.k0; i < p.k1; i++ {
		c.lens[i] = int32(p.got / (p.k1 - p.k0))
	}
	return nil
}

// assemble completes a pull when all answers are in.
func (c *call[V]) assemble() error {
	total, regular := 0, c.sized
	for _, i := range c.order {
		p := &c.parts[i]
		p.at = total
		total += p.got
		regular = regular && p.got == p.v1-p.v0
	}
	switch {
	case !c.sized:
		*c.out = slices.Grow((*c.out)[:0], total)[:total]
		c.vals = *c.out
	case total > len(c.vals):
		return fmt.Errorf("%w: %d values received from all servers, the buffer holds %d", van.ErrInvalid, total, len(c.vals))
	case total < len(c.vals) && c.outLens == nil:
		return fmt.Errorf("%w: %d values received from all servers, want %d, or the option LensInto", van.ErrInvalid, total, len(c.vals))
	}
	if !regular {
		c.arrange()
	}
	if c.outLens != nil {
		*c.outLens = c.lens
	}
	return nil
}

// arrange moves values that were put where equal lengths would have them to their
// real place, and adds those that were kept. Places keep the order of the keys, so
// that moving those that go left from the left, then the others from the right,
// overwrites nothing.
func (c *call[V]) arrange() {
	for _, i := range c.order {
		if p := &c.parts[i]; p.kept == nil && p.at < p.v0 {
			copy(c.vals[p.at:], c.vals[p.v0:p.v0+p.got])
		}
	}
	for _, i := range slices.Backward(c.order) {
		if p := &c.parts[i]; p.kept == nil && p.at > p.v0 {
			copy(c.vals[p.at:], c.vals[p.v0:p.v0+p.got])
		}
	}
	for _, i := range c.order {
		if p := &c.parts[i]; p.kept != nil {
			copy(c.vals[p.at:], view[V](p.kept.Vals))
		}
	}
}

// Finished releases everything that is not the call's own and calls the caller's function.
func (c *call[V]) Finished(err error) {
	done := c.done
	c.release(err)
	if done != nil {
		done(err)
	}
}

// release releases the messages and buffers of the call. When it returns, no peer writes to the memory of a pull. After a
// failure the transport may still be sending the library's copies, which are therefore not reused.
func (c *call[V]) release(err error) {
	if r := c.w.invalidator; r != nil && err != nil && c.sized && !c.push {
		r.Invalidate(backend.Slice(c.vals)) // a late answer must not be written there
	}
	for i := range c.parts {
		if m := c.parts[i].kept; m != nil {
			c.parts[i].kept = nil
			m.Release()
		}
	}
	if c.own != nil && err == nil {
		c.w.copies.Put(c.own)
	}
	c.own, c.done = nil, nil
	c.keys, c.vals, c.lens, c.out, c.outLens = nil, nil, nil, nil, nil
}
