package collective

// Stories of many calls against a model: each rank's inputs and results are computed from the seed, and all
// accounts are checked after each chapter.

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/simgpu"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/van"
)

// planned is one call of a story, the same on all ranks.
type planned struct {
	kind      kind
	root      int
	reduction Reduction
	dtype     af.Dtype
	counts    [][]int // elements that rank i gives rank j, by [i][j]; one number where all are equal
	inPlace   bool
	seed      uint64
}

// storyTypes are the element types of stories: of 1, 4 and 8 bytes.
var storyTypes = []af.Dtype{af.Uint8, af.Int32, af.Int64}

func plannedCall(rng *rand.Rand, n int) planned {
	p := planned{kind: kind(1 + rng.IntN(int(lastKind))), root: rng.IntN(n), reduction: Reduction(1 + rng.IntN(int(lastReduction))),
		dtype: storyTypes[rng.IntN(3)], inPlace: rng.IntN(3) == 0, seed: rng.Uint64()}
	sizes := []int{0, 1, 2, 7, 100, 4097, 20_000}
	one := sizes[rng.IntN(len(sizes))]
	if p.kind == allReduce && rng.IntN(2) == 0 {
		one = 70_000 + rng.IntN(8) // in parts
	}
	for i := range n {
		p.counts = append(p.counts, make([]int, n))
		each := sizes[rng.IntN(len(sizes)-1)]
		for j := range n {
			switch p.counts[i][j] = one; p.kind {
			case allGatherV:
				p.counts[i][j] = each
			case allToAll:
				p.counts[i][j] = sizes[rng.IntN(len(sizes)-1)]
			}
		}
	}
	return p
}

// element is what rank gives at index i, for rank to where it gives each its own.
func (p *planned) element(rank, to, i int) uint64 {
	x := p.seed + uint64(rank)*0x9E3779B97F4A7C15 + uint64(to)*0xBF58476D1CE4E5B9 + uint64(i)*0x94D049BB133111EB
	x ^= x >> 29
	return x * 0xD6E8FEB86659FD93 >> 40
}

// given is what rank gives to, or all ranks: count elements from index from on.
func (p *planned) given(rank, to, from, count int) []byte {
	size := p.dtype.Size()
	b := make([]byte, count*size)
	for i := range count {
		p.put(b[i*size:], p.element(rank, to, from+i))
	}
	return b
}

func (p *planned) put(b []byte, v uint64) {
	for k := range p.dtype.Size() {
		b[k] = byte(v >> (8 * k))
	}
}

// reduced is the reduction of the inputs of all n ranks: count elements, starting at index from.
func (p *planned) reduced(n, from, count int) []byte {
	size := p.dtype.Size()
	b := make([]byte, count*size)
	for i := range count {
		v := int64(p.narrow(p.element(0, 0, from+i)))
		for r := 1; r < n; r++ {
			w := int64(p.narrow(p.element(r, 0, from+i)))
			switch p.reduction {
			case Sum:
				v += w
			case Product:
				v *= w
			case Min:
				v = min(v, w)
			case Max:
				v = max(v, w)
			}
			v = int64(p.narrow(uint64(v)))
		}
		p.put(b[i*size:], uint64(v))
	}
	return b
}

// narrow is v as the element type has it; no element is negative but by overflow.
func (p *planned) narrow(v uint64) uint64 {
	switch p.dtype {
	case af.Uint8:
		return uint64(uint8(v))
	case af.Int32:
		return uint64(int64(int32(v)))
	}
	return v
}

// tensor is b as one of the call, in m.
func (p *planned) tensor(m memory, b []byte) af.Tensor {
	t := p.empty(m, len(b)/p.dtype.Size())
	fill(m, t, b)
	return t
}

func (p *planned) empty(m memory, count int) af.Tensor {
	b := make([]byte, count*p.dtype.Size())
	mem := lent.Bytes(b)
	if m.dev != nil {
		mem = m.dev.Mem(b)
	}
	return must(af.NewTensor(mem, p.dtype, int64(count)))
}

// fill sets t, in m, to the bytes b. On a device, the stream does it.
func fill(m memory, t af.Tensor, b []byte) {
	if m.dev == nil {
		copy(t.Bytes(), b)
		return
	}
	m.dev.Queue(uintptr(onStream), func() { copy(simgpu.Raw(t.Mem()), b) })
}

// made is a call in flight: its operation, its results and their expected contents.
type made struct {
	op   Op
	outs []af.Tensor
	want [][]byte
}

// make makes the call on a rank, with tensors in at.
func (p *planned) make(c *Comm, at memory) (m made, err error) {
	n, self := c.Size(), c.Rank()
	if p.kind == reduceScatter || p.kind == allReduce {
		at = memory{}
	}
	count, on := p.counts[0][0], at.on()
	in, size := p.tensor(at, p.given(self, 0, 0, count)), p.dtype.Size()
	result := func(t af.Tensor, want []byte) { m.outs, m.want = append(m.outs, t), append(m.want, want) }
	all := func(part func(r int) []byte) (b []byte) {
		for r := range n {
			b = append(b, part(r)...)
		}
		return b
	}
	of := func(r int) []byte { return p.given(r, 0, 0, count) }
	part := func(t af.Tensor, r int) af.Tensor {
		return must(af.NewTensor(t.Mem().Sub(r*count*size, count*size), p.dtype, int64(count)))
	}
	switch p.kind {
	case allGather, gather:
		out := p.empty(at, n*count)
		if p.inPlace && (p.kind == allGather || self == p.root) {
			own := part(out, self)
			fill(at, own, of(self))
			in = own
		}
		switch {
		case p.kind == allGather:
			m.op, err = c.AllGather(out, in, on...)
		case self == p.root:
			m.op, err = c.Gather(out, in, p.root, on...)
		default:
			m.op, err = c.Gather(zeros(3), in, p.root, on...) // a tensor that is not a result is not checked
			return m, err
		}
		result(out, all(of))
	case allGatherV:
		outs := make([]af.Tensor, n)
		for r := range n {
			outs[r] = p.empty(at, p.counts[r][0])
			result(outs[r], p.given(r, 0, 0, p.counts[r][0]))
		}
		in = p.tensor(at, p.given(self, 0, 0, p.counts[self][0]))
		if p.inPlace {
			fill(at, outs[self], p.given(self, 0, 0, p.counts[self][0]))
			in = outs[self]
		}
		m.op, err = c.AllGatherV(outs, in, on...)
	case allToAll:
		outs, ins := make([]af.Tensor, n), make([]af.Tensor, n)
		for r := range n {
			outs[r] = p.empty(at, p.counts[r][self])
			ins[r] = p.tensor(at, p.given(self, r, 0, p.counts[self][r]))
			result(outs[r], p.given(r, self, 0, p.counts[r][self]))
		}
		if p.inPlace {
			fill(at, outs[self], p.given(self, self, 0, p.counts[self][self]))
			ins[self] = outs[self]
		}
		m.op, err = c.AllToAll(outs, ins, on...)
	case broadcast:
		t := p.empty(at, count)
		if self == p.root {
			fill(at, t, of(p.root))
		}
		m.op, err = c.Broadcast(t, p.root, on...)
		result(t, of(p.root))
	case scatter:
		whole, out := zeros(3), p.empty(at, count)
		if self == p.root {
			whole = p.tensor(at, all(func(r int) []byte { return p.given(p.root, r, 0, count) }))
			if p.inPlace {
				out = part(whole, self)
			}
		}
		m.op, err = c.Scatter(out, whole, p.root, on...)
		result(out, p.given(p.root, self, 0, count))
	case reduceScatter:
		whole, out := p.tensor(at, p.given(self, 0, 0, n*count)), p.empty(at, count)
		if p.inPlace {
			out = part(whole, self)
		}
		m.op, err = c.ReduceScatter(out, whole, p.reduction)
		result(out, p.reduced(n, self*count, count))
	case allReduce:
		out := in
		if !p.inPlace {
			out = p.empty(at, count)
		}
		m.op, err = c.AllReduce(out, in, p.reduction)
		result(out, p.reduced(n, 0, count))
	case barrier:
		k := call{kind: barrier, root: -1}
		m.op, err = c.start(&plan{call: k, ask: share{of: everybody}, give: share{of: everybody}}, nil)
	}
	return m, err
}

// wait waits for the call in one of the ways that there are, and compares its results.
func (m *made) wait(ctx context.Context, rng *rand.Rand) error {
	limited, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	if rng.IntN(2) == 0 {
		limited = ctx // the communicator's limit
	}
	err := postoffice.ErrPending
	for slice := time.Duration(rng.IntN(2)) * time.Millisecond; err == postoffice.ErrPending; {
		err = m.op.WaitSlice(limited, slice)
	}
	if err != nil {
		return err
	}
	for i := range m.outs {
		if !bytes.Equal(simgpu.Raw(m.outs[i].Mem()), m.want[i]) {
			return fmt.Errorf("result %d of %s of %d bytes is wrong", i, kinds[m.op.o.call.kind], len(m.want[i]))
		}
	}
	return nil
}

// TestStories: any calls, of any sizes and types, in place or not, of which several are in flight and each rank waits in
// an order and a way of its own. Some chapters end with a failure: a rank makes another call, none at all, or fails by
// itself. Then no rank's call may end well that needs it, and all go on after Rebuild.
func TestStories(t *testing.T) {
	for seed := range uint64(12) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 3))
			n := 1 + int(seed)%4
			o := testcluster.Options{Over: []testcluster.Transport{testcluster.InProc, testcluster.TCP, testcluster.SHM}[seed%3]}
			at := make([]memory, n)
			var all []*Comm
			if seed%5 < 3 {
				all, _ = comms(t, o, n)
			} else {
				all, at = onDevices(t, o, n)
			}
			for chapter := range 8 {
				calls := make([]planned, 1+rng.IntN(12))
				for i := range calls {
					calls[i] = plannedCall(rng, n)
				}
				chance := rng.Uint64()
				onAll(t, n, func(r int) error {
					own := rand.New(rand.NewPCG(chance, uint64(r)))
					flying := make([]made, len(calls))
					for i := range calls {
						var err error
						if flying[i], err = calls[i].make(all[r], at[r]); err != nil {
							return fmt.Errorf("call %d: %w", i, err)
						}
					}
					for _, i := range own.Perm(len(calls)) {
						if err := flying[i].wait(t.Context(), own); err != nil {
							return fmt.Errorf("chapter %d, call %d: %w", chapter, i, err)
						}
					}
					return nil
				})
				for _, c := range all {
					atRest(t, c)
				}
				if n > 1 && rng.IntN(2) == 0 {
					failure(t, all, at, rng)
				}
			}
		})
	}
}

// failure makes one rank, bad, make another call than the other ranks, which all make the same one.
func failure(t *testing.T, all []*Comm, at []memory, rng *rand.Rand) {
	t.Helper()
	n := len(all)
	bad, what := rng.IntN(n), rng.IntN(4)
	good := plannedCall(rng, n)
	for good.kind == barrier || good.kind == broadcast || good.kind == gather || good.kind == scatter {
		good = plannedCall(rng, n) // in which each rank needs each other one
	}
	other := good
	boom := errors.New("boom")
	var want error
	switch what {
	case 0:
		other.kind, want = barrier, ErrMismatch
	case 1:
		if other.dtype, want = af.Int32, ErrMismatch; good.dtype == af.Int32 {
			other.dtype = af.Uint8
		}
		if good.kind == allToAll { // of which pieces without bytes have no type
			for i := range n {
				for j := range n {
					good.counts[i][j], other.counts[i][j] = 5, 5
				}
			}
		}
		if good.counts[0][0] == 0 {
			other.kind, other.counts = barrier, good.counts
		}
	case 2:
		want = ErrAborted
	case 3:
		want = van.ErrTimeout
	}
	errs := every(n, func(r int) error {
		switch {
		case r != bad:
			m, err := good.make(all[r], at[r])
			if err == nil {
				err = m.op.Wait(t.Context())
			}
			return err
		case what < 2:
			m, err := other.make(all[r], at[r])
			if err == nil {
				err = m.op.Wait(t.Context())
			}
			return err
		case what == 2:
			all[r].fail(boom)
			return boom
		}
		ctx, cancel := context.WithTimeoutCause(t.Context(), time.Millisecond, van.ErrTimeout)
		defer cancel()
		c := all[r]
		op, err := c.start(&plan{call: call{kind: broadcast, root: int32((bad + 1) % n)}, ask: share{of: (bad + 1) % n}, give: share{of: nobody}}, nil)
		if err == nil {
			err = op.Wait(ctx)
		}
		return err
	})
	for r, err := range errs {
		if err == nil {
			t.Errorf("rank %d: a call that rank %d has not made ended well", r, bad)
		} else if r != bad && what != 3 && !errors.Is(err, want) || r == bad && what == 2 && err != boom {
			t.Errorf("rank %d: %v, want %v", r, err, want)
		} else if !strings.Contains(err.Error(), "worker") && err != boom {
			t.Errorf("rank %d: %v, which names no node", r, err)
		}
		if _, again := all[r].AllGather(zeros(n), zeros(1)); again == nil || !strings.Contains(again.Error(), "Rebuild") {
			t.Errorf("rank %d: a call after that: %v", r, again)
		}
	}
	onAll(t, n, func(r int) error {
		err := all[r].Rebuild(t.Context())
		return cmp.Or(err, all[r].Barrier(t.Context()))
	})
	for _, c := range all {
		atRest(t, c)
	}
}
