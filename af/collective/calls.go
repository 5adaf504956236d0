package collective

// The calls of a communicator: which parts of which tensors they request and send.

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// AllGather writes the tensors in of all ranks to out, in rank order. All in have the same size, and out has Size
// times that. in may be this rank's part of out.
func (c *Comm) AllGather(out, in af.Tensor, on ...af.StreamOption) (Op, error) {
	k := call{kind: allGather, dtype: in.Dtype(), root: -1, bytes: uint64(in.Len())}
	n := in.Len()
	device, err := c.b.home([]af.Tensor{out, in})
	if err := c.b.check(k, err, same(&out, &in), size(&out, "out", n*c.Size())); err != nil {
		return Op{}, err
	}
	own := out.Mem().Sub(c.b.self*n, n)
	if err := c.b.check(k, apart("out", out.Mem(), "in", in.Mem(), own)); err != nil {
		return Op{}, err
	}
	return c.start(&plan{call: k, ask: share{mem: out.Mem(), by: 1, of: everybody}, give: share{mem: in.Mem(), of: everybody},
		result: result{own, in.Mem()}, device: device}, on)
}

// AllGatherV writes the tensor in of rank r to out[r], for all ranks. Sizes may differ from rank to rank and be 0;
// out[r] has the size of the tensor in of rank r.
func (c *Comm) AllGatherV(out []af.Tensor, in af.Tensor, on ...af.StreamOption) (Op, error) {
	k := call{kind: allGatherV, dtype: dtypeOf([]af.Tensor{in}, out), root: -1}
	device, err := c.b.home(out, []af.Tensor{in})
	if err := c.b.check(k, err, each(c.Size(), out, "out", k.dtype), each(1, []af.Tensor{in}, "in", k.dtype), size(&in, "in", lenAt(out, c.b.self))); err != nil {
		return Op{}, err
	}
	if err := c.b.check(k, c.b.apartFrom(out, []af.Tensor{in}, 0)); err != nil {
		return Op{}, err
	}
	return c.start(&plan{call: k, ask: share{list: out, of: everybody}, give: share{mem: in.Mem(), of: everybody},
		result: result{out[c.b.self].Mem(), in.Mem()}, device: device}, on)
}

// AllToAll sends in[r] to rank r, and writes the tensor that rank r sends to this rank to out[r], for all ranks.
// Sizes may differ and be 0. No in[r] may share memory with any out, except that in and out of this rank itself may
// be the same.
func (c *Comm) AllToAll(out, in []af.Tensor, on ...af.StreamOption) (Op, error) {
	k := call{kind: allToAll, dtype: dtypeOf(in, out), root: -1}
	device, err := c.b.home(out, in)
	if err := c.b.check(k, err, each(c.Size(), in, "in", k.dtype), each(c.Size(), out, "out", k.dtype)); err != nil {
		return Op{}, err
	}
	if n, own := in[c.b.self].Len(), out[c.b.self].Len(); n != own {
		return Op{}, c.b.check(k, fmt.Errorf("%w: this rank sends itself %d bytes and receives %d", van.ErrInvalid, n, own))
	}
	if err := c.b.check(k, c.b.apartFrom(out, in, c.b.self)); err != nil {
		return Op{}, err
	}
	return c.start(&plan{call: k, ask: share{list: out, of: everybody}, give: share{list: in, of: everybody},
		result: result{out[c.b.self].Mem(), in[c.b.self].Mem()}, device: device}, on)
}

// Broadcast copies t of rank root to t on all ranks.
func (c *Comm) Broadcast(t af.Tensor, root int, on ...af.StreamOption) (Op, error) {
	k := call{kind: broadcast, dtype: t.Dtype(), root: int32(root), bytes: uint64(t.Len())}
	device, err := c.b.home([]af.Tensor{t})
	if err := c.b.check(k, c.b.rooted(root), err); err != nil {
		return Op{}, err
	}
	return c.start(&plan{call: k, ask: share{mem: t.Mem(), of: root}, give: share{mem: t.Mem(), of: c.b.ifRoot(root)}, device: device}, on)
}

// Gather writes the tensors in of all ranks to out on rank root, in rank order. Other ranks pass an empty out.
func (c *Comm) Gather(out, in af.Tensor, root int, on ...af.StreamOption) (Op, error) {
	return c.parts(gather, out, in, root, on)
}

// Scatter sends each rank its part of the tensor in of rank root, and writes it to out. in has Size times the size of
// out. Other ranks pass an empty in.
func (c *Comm) Scatter(out, in af.Tensor, root int, on ...af.StreamOption) (Op, error) {
	return c.parts(scatter, in, out, root, on)
}

// parts implements Gather and Scatter: whole, which only rank root has, contains a part for each rank.
func (c *Comm) parts(kind kind, whole, part af.Tensor, root int, on []af.StreamOption) (Op, error) {
	k := call{kind: kind, dtype: part.Dtype(), root: int32(root), bytes: uint64(part.Len())}
	n := part.Len()
	both := []af.Tensor{part, whole}
	if c.b.self != root {
		both = both[:1]
	}
	device, err := c.b.home(both)
	checks, name, other := []error{c.b.rooted(root), err}, "out", "in"
	if kind == scatter {
		name, other = other, name
	}
	if c.b.self == root {
		checks = append(checks, same(&whole, &part), size(&whole, name, n*c.Size()))
	}
	if err := c.b.check(k, checks...); err != nil {
		return Op{}, err
	}
	p := plan{call: k, ask: share{mem: whole.Mem(), by: 1, of: c.b.ifRoot(root)}, give: share{mem: part.Mem(), of: root}, device: device}
	if c.b.self == root {
		p.result = result{whole.Mem().Sub(c.b.self*n, n), part.Mem()}
		if err := c.b.check(k, apart(name, whole.Mem(), other, part.Mem(), p.result.out)); err != nil {
			return Op{}, err
		}
	}
	if kind == scatter {
		p.ask, p.give, p.result = p.give, p.ask, result{p.result.own, p.result.out}
	}
	return c.start(&p, on)
}

// Barrier waits until all ranks have called it.
func (c *Comm) Barrier(ctx context.Context) error {
	k := call{kind: barrier, root: -1}
	op, err := c.start(&plan{call: k, ask: share{of: everybody}, give: share{of: everybody}}, nil)
	if err != nil {
		return err
	}
	return op.Wait(ctx)
}

// ReduceScatter writes the reduction of this rank's part of the tensors in of all ranks to out. in has Size times the
// size of out. Elements are reduced in rank order, so all runs give the same result.
func (c *Comm) ReduceScatter(out, in af.Tensor, r Reduction) (Op, error) {
	k := call{kind: reduceScatter, reduction: r, dtype: out.Dtype(), root: -1, bytes: uint64(out.Len())}
	f, err := folderFor(out.Dtype(), r)
	n := out.Len()
	if err := c.b.check(k, onHost(&out), onHost(&in), err, same(&out, &in), size(&in, "in", n*c.Size()), aligned(&out), aligned(&in)); err != nil {
		return Op{}, err
	}
	give := share{mem: in.Mem(), by: k.dtype.Size(), of: everybody}
	own, _ := give.part(c.b.self, c.Size())
	if err := c.b.check(k, apart("in", in.Mem(), "out", out.Mem(), own)); err != nil {
		return Op{}, err
	}
	return c.start(&plan{call: k, give: give, fold: f, result: result{out.Mem(), own}}, nil)
}

// reduceWhole is the size in bytes below which AllReduce moves whole tensors: one exchange instead of two.
const reduceWhole = 64 << 10

// AllReduce writes the reduction of the tensors in of all ranks to out, element by element, in rank order. All
// tensors have the same size; out may be in.
func (c *Comm) AllReduce(out, in af.Tensor, r Reduction) (Op, error) {
	k := call{kind: allReduce, reduction: r, dtype: out.Dtype(), root: -1, bytes: uint64(out.Len())}
	f, err := folderFor(out.Dtype(), r)
	if err := c.b.check(k, onHost(&out), onHost(&in), err, same(&out, &in), size(&in, "in", out.Len()), aligned(&out), aligned(&in), apart("in", in.Mem(), "out", out.Mem(), in.Mem())); err != nil {
		return Op{}, err
	}
	if in.Len() < reduceWhole {
		return c.start(&plan{call: k, give: share{mem: in.Mem(), of: everybody}, fold: f, result: result{out.Mem(), in.Mem()}}, nil)
	}
	return c.reduceInParts(k, f, out, in)
}

// reduceInParts is an AllReduce in which each rank reduces one part; an AllGather of the parts follows.
func (c *Comm) reduceInParts(k call, f folder, out, in af.Tensor) (Op, error) {
	whole := share{mem: in.Mem(), of: everybody}
	give, ask := whole, share{mem: out.Mem(), by: k.dtype.Size(), of: everybody}
	give.by = ask.by
	from, _ := give.part(c.b.self, c.Size())
	to, _ := ask.part(c.b.self, c.Size())
	o1, h, err := c.reserveTwo(&plan{call: k, give: give, fold: f, result: result{to, from}},
		&plan{call: k, ask: ask, give: share{mem: to, of: everybody}})
	if err != nil {
		return Op{}, c.b.failIfLeft(err)
	}
	o1.begin()
	c.calls.unref(o1)
	return h, nil
}

// reserveTwo reserves two consecutive calls. The first one is returned with a reference.
func (c *Comm) reserveTwo(a, b *plan) (*op, Op, error) {
	c.pair.Lock()
	defer c.pair.Unlock()
	c.b.mu.Lock()
	full := c.calls.window[(c.calls.next+1)%maxInFlight] != nil
	c.b.mu.Unlock()
	if full {
		return nil, Op{}, c.calls.full(kinds[a.call.kind])
	}
	o1, err := c.calls.reserve(a)
	if err != nil {
		return nil, Op{}, err
	}
	o2, err := c.calls.reserve(b)
	if err != nil { // the communicator has failed meanwhile, or a rank has left
		c.b.fail(err) // also ends o1
		return nil, Op{}, err
	}
	c.b.mu.Lock()
	defer c.b.mu.Unlock()
	o1.refs++
	h := Op{o2, o2.gen}
	if o1.ended { // o2 has ended as well, and is never begun
		return o1, h, nil
	}
	o1.reduction.next = o2
	o2.refs++
	return o1, h, nil
}

// start makes one call. With device tensors, the call begins when the device has done the work that the stream
// contains now.
func (c *Comm) start(p *plan, on []af.StreamOption) (Op, error) {
	if p.device {
		return c.startBehind(p, on)
	}
	if p.fold == nil && p.result.toCopy() {
		if err := c.b.check(p.call, c.b.node.Backend().Copy(p.result.out, p.result.own)); err != nil {
			return Op{}, err
		}
	}
	c.pair.Lock()
	o, err := c.calls.reserve(p)
	c.pair.Unlock()
	if err != nil {
		return Op{}, c.b.failIfLeft(err)
	}
	h := Op{o, o.gen}
	o.begin()
	return h, nil
}

// ifRoot returns everybody on the root, and nobody on other ranks.
func (b *base) ifRoot(root int) int {
	if b.self == root {
		return everybody
	}
	return nobody
}

func (b *base) rooted(root int) error {
	if root < 0 || root >= len(b.ids) {
		return fmt.Errorf("%w: root %d, want 0 to %d", van.ErrInvalid, root, len(b.ids)-1)
	}
	return nil
}

// aligned returns an error for a tensor whose address is not a multiple of its element size.
func aligned(t *af.Tensor) error {
	if size := t.Dtype().Size(); t.Len() > 0 && t.Mem().Addr()%uint64(size) != 0 {
		return fmt.Errorf("%w: %s at address %#x, want a multiple of %d", van.ErrInvalid, nameOf(t), t.Mem().Addr(), size)
	}
	return nil
}

// nameOf describes a tensor in errors. It copies t, so that tensors of valid calls are not moved to the heap.
func nameOf(t *af.Tensor) string {
	c := *t
	return c.String()
}

// apart returns an error if memory b shares bytes with a and is not exactly may: one of the two is written while the
// other is read.
func apart(aName string, a backend.Mem, bName string, b, may backend.Mem) error {
	if !a.Overlaps(b) || may.Len() == b.Len() && may.Addr() == b.Addr() {
		return nil
	}
	return fmt.Errorf("%w: %s shares memory with %s", van.ErrInvalid, bName, aName)
}

// apartFrom returns an error if tensors of out overlap, or a tensor of in overlaps one of out. in[own] may be this
// rank's tensor of out.
func (b *base) apartFrom(out, in []af.Tensor, own int) error {
	if err := disjoint(out); err != nil {
		return err
	}
	x, y := bounds(out), bounds(in)
	if x[1] <= y[0] || y[1] <= x[0] {
		return nil // two separate buffers, as in most calls
	}
	for i := range in {
		may := backend.Mem{}
		if i == own {
			may = out[b.self].Mem()
		}
		for r := range out {
			if err := apart("a part of out", out[r].Mem(), "in", in[i].Mem(), may); err != nil {
				return err
			}
		}
	}
	return nil
}

// disjoint returns an error if tensors of out share bytes.
func disjoint(out []af.Tensor) error {
	type piece struct {
		from, to uint64
		rank     int
	}
	var few [16]piece // up to 16 need no heap memory
	l := few[:0]
	for r := range out {
		if m := out[r].Mem(); m.Len() > 0 {
			l = append(l, piece{m.Addr(), m.Addr() + uint64(m.Len()), r})
		}
	}
	slices.SortFunc(l, func(a, b piece) int { return cmp.Compare(a.from, b.from) })
	for i := 1; i < len(l); i++ {
		if l[i].from < l[i-1].to {
			return fmt.Errorf("%w: out for rank %d shares memory with out for rank %d", van.ErrInvalid, l[i].rank, l[i-1].rank)
		}
	}
	return nil
}

// bounds returns the lowest address of the tensors and the end of the highest one.
func bounds(l []af.Tensor) [2]uint64 {
	b := [2]uint64{math.MaxUint64, 0}
	for i := range l {
		if m := l[i].Mem(); m.Len() > 0 {
			b = [2]uint64{min(b[0], m.Addr()), max(b[1], m.Addr()+uint64(m.Len()))}
		}
	}
	return b
}

// home reports whether the tensors of a call are in device memory. All must be, or none; tensors without bytes do not
// count.
func (b *base) home(lists ...[]af.Tensor) (device bool, err error) {
	var first *af.Tensor
	for _, l := range lists {
		for i := range l {
			t := &l[i]
			m := t.Mem()
			if t.Len() == 0 {
				continue
			}
			if err := backend.CheckDevice(b.node.Backend(), m); err != nil {
				return false, fmt.Errorf("%w: %w", van.ErrInvalid, err)
			}
			if first == nil {
				first, device = t, !m.OnHost()
			}
			if device == m.OnHost() {
				return false, fmt.Errorf("%w: %s and %s, want all tensors of a call in host memory, or all on the device", van.ErrInvalid, nameOf(first), nameOf(t))
			}
		}
	}
	return device, nil
}

// onHost returns an error for a device tensor: this library does not compute on devices.
func onHost(t *af.Tensor) error {
	if m := t.Mem(); t.Len() > 0 && !m.OnHost() {
		return fmt.Errorf("%w: %s, want host memory: reductions on a device are NCCL's work", van.ErrInvalid, nameOf(t))
	}
	return nil
}

// same returns an error for tensors of different types.
func same(a, b *af.Tensor) error {
	if a.Dtype() != b.Dtype() {
		return fmt.Errorf("%w: out and in of different types: %s and %s", van.ErrInvalid, nameOf(a), nameOf(b))
	}
	return nil
}

func size(t *af.Tensor, name string, want int) error {
	if t.Len() != want {
		return fmt.Errorf("%w: %s is %s, of %d bytes, want %d", van.ErrInvalid, name, nameOf(t), t.Len(), want)
	}
	return nil
}

// dtypeOf returns the type of the first tensor that is not empty.
func dtypeOf(lists ...[]af.Tensor) af.Dtype {
	for _, l := range lists {
		for i := range l {
			if l[i].Len() > 0 {
				return l[i].Dtype()
			}
		}
	}
	return af.Uint8
}

// each returns an error if l is not a list of n tensors, one for each rank, of type d or empty.
func each(n int, l []af.Tensor, name string, d af.Dtype) error {
	if len(l) != n {
		return fmt.Errorf("%w: %d tensors %s, want one for each of %d ranks", van.ErrInvalid, len(l), name, n)
	}
	for r := range l {
		if l[r].Len() > 0 && l[r].Dtype() != d {
			return fmt.Errorf("%w: %s for rank %d is %s, want %s as others", van.ErrInvalid, name, r, nameOf(&l[r]), d)
		}
	}
	return nil
}

func lenAt(l []af.Tensor, i int) int {
	if i < len(l) {
		return l[i].Len()
	}
	return 0
}
