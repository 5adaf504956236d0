package collective

import (
	"cmp"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/commlayer"
	"github.com/stepaf/stepaf-go/tests/golden"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// TestGolden: results of parsing arbitrary bodies, of dividing parts among ranks, of the checks for shared memory,
// and of sums of half-precision numbers.
func TestGolden(t *testing.T) {
	scratch := make([]byte, 4096) // addresses are printed relative to its beginning
	all := backend.Bytes(scratch)
	golden.Check(t, "wire", 30, func(rng *rand.Rand, w io.Writer) {
		k := call{kind: kind(1 + rng.IntN(int(lastKind))), reduction: Reduction(rng.IntN(int(lastReduction) + 1)), dtype: af.Dtype(rng.IntN(50)), root: int32(rng.IntN(5) - 1), bytes: golden.Edge(rng, 64)}
		h := hello{golden.Edge(rng, 5), 6, 7, 3}
		why := []error{ErrMismatch, van.ErrPeerLost, van.ErrTimeout, van.ErrClosed, errRebuild, errMisfit, ErrAborted}[rng.IntN(7)]
		for range 60 {
			if k.dtype.Valid() {
				fmt.Fprintln(w, len(k.String()) > 0)
			}
			c, epoch, err := parseAsk(golden.Mangle(rng, k.appendAsk(nil, 77)), 1+rng.IntN(5))
			fmt.Fprintln(w, c.kind, c.reduction, int32(c.dtype), c.root, c.bytes, epoch, golden.Err(err))
			got, err := parseHello(golden.Mangle(rng, h.append(nil)))
			fmt.Fprintln(w, got, golden.Err(err))
			b := appendReason(nil, verbAbort, 9, fmt.Errorf("%s: %w", strings.Repeat("x", []int{0, 10, maxText - 20, maxText + 5}[rng.IntN(4)]), why))
			round, cause, err := parseReason(golden.Mangle(rng, b))
			fmt.Fprintln(w, round, len(b), golden.Err(err), golden.Err(cause))
			v, err := verbOf(golden.Mangle(rng, b))
			fmt.Fprintln(w, v, golden.Err(err))
			seq, rank := parseKey(partKey(uint32(golden.Edge(rng, 70)), int(golden.Edge(rng, 3))))
			fmt.Fprintln(w, seq, rank)
			id := int(int32(golden.Edge(rng, maxID)))
			app, err := commlayer.AppOf(id)
			fmt.Fprintln(w, app, golden.Err(err))
			fmt.Fprintln(w, fmt.Sprint(commlayer.IDOf(appBase+id)))

			mem := func() backend.Mem {
				from := rng.IntN(200)
				return all.Sub(from, rng.IntN(40))
			}
			s := share{mem: mem(), by: rng.IntN(5), of: rng.IntN(6) - 2}
			n := 1 + rng.IntN(5)
			m, any := s.part(rng.IntN(n), n)
			if any && m.Len() > 0 {
				fmt.Fprintln(w, m.Addr()-all.Addr(), m.Len())
			}
			fmt.Fprintln(w, any, m.Len())
			a, x, may := mem(), mem(), mem()
			if rng.IntN(2) == 0 {
				may = x
			}
			fmt.Fprintln(w, apart("a", a, "b", x, may) == nil)
			var l, in []af.Tensor
			for range n {
				for _, of := range []*[]af.Tensor{&l, &in} {
					m := mem()
					if rng.IntN(3) > 0 { // apart, mostly
						m = all.Sub(300+40*len(*of), m.Len())
					}
					if of == &in && rng.IntN(2) == 0 {
						m = all.Sub(1000+40*len(*of), m.Len())
					}
					x, err := af.NewTensor(m, af.Uint8, int64(m.Len()))
					if err != nil {
						t.Fatal(err)
					}
					*of = append(*of, x)
				}
			}
			comm := &base{ids: make([]int, n), self: rng.IntN(n)}
			fmt.Fprintln(w, disjoint(l) == nil, comm.apartFrom(l, in, rng.IntN(n)) == nil, comm.apartFrom(l, l, comm.self) == nil)
			fmt.Fprintln(w, each(n, l, "x", dtypeOf(l)) == nil, each(n+1, l, "x", af.Uint8) == nil, lenAt(l, n), lenAt(l, n-1), (&result{l[0].Mem(), in[0].Mem()}).toCopy(), (&result{l[0].Mem(), l[0].Mem()}).toCopy())

			f := math.Float32frombits(rng.Uint32())
			if rng.IntN(2) == 0 {
				f = float32(rng.NormFloat64() * math.Pow(2, float64(rng.IntN(60)-40)))
			}
			fmt.Fprintln(w, toHalf(f), toBrain(f), fromHalf(uint16(rng.Uint32())), roundTo(rng.Uint32N(1<<24), uint(1+rng.IntN(23))))
			fmt.Fprintln(w, comm.rooted(rng.IntN(n+2)-1) == nil)
		}
	})
}

// TestFoldModel: a reduction combines all ranks' elements in rank order, in place or not, for any number of ranks.
func TestFoldModel(t *testing.T) {
	for seed := range uint64(400) {
		rng := rand.New(rand.NewPCG(seed, 2))
		ranks, n := 1+rng.IntN(6), rng.IntN(9)
		r := Reduction(1 + rng.IntN(int(lastReduction)))
		f, err := folderFor(af.Int32, r)
		if err != nil {
			t.Fatal(err)
		}
		self, o := rng.IntN(ranks), &reduction{by: f, scratch: make([]uint64, (ranks*n*4+7)/8)}
		parts := make([][]int32, ranks)
		for i := range parts {
			for range n {
				parts[i] = append(parts[i], int32(rng.IntN(100)-50))
			}
		}
		scratch := elements[int32](backend.Slice(o.scratch).Sub(0, ranks*n*4))
		for i := range parts {
			if i != self {
				copy(scratch[i*n:], parts[i])
			}
		}
		own, out := append([]int32(nil), parts[self]...), make([]int32, n)
		to := &result{backend.Slice(out), backend.Slice(own)}
		if rng.IntN(2) == 0 {
			out, to.out = own, to.own
		}
		o.make(to, self, ranks)
		for i := range n {
			want := parts[0][i]
			for _, p := range parts[1:] {
				switch r {
				case Sum:
					want += p[i]
				case Product:
					want *= p[i]
				case Min:
					want = min(want, p[i])
				case Max:
					want = max(want, p[i])
				}
			}
			if out[i] != want {
				t.Fatalf("seed %d: %s of element %d of %d ranks at rank %d is %d, want %d", seed, r, i, ranks, self, out[i], want)
			}
		}
	}
}

// TestRoomModel: memory for reductions is used again, the largest two pieces are kept, and none is given out twice.
func TestRoomModel(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	var c scratchPool
	out := map[*uint64]bool{}
	var l [][]uint64
	for range 2000 {
		if rng.IntN(2) == 0 {
			n := rng.IntN(200)
			had := len(c)
			fits := false
			for _, x := range c {
				fits = fits || cap(x) >= (n+7)/8
			}
			scratch := c.take(n)
			if len(scratch) != (n+7)/8 {
				t.Fatalf("%d words for %d bytes", len(scratch), n)
			}
			if fits != (len(c) == had-1) {
				t.Fatalf("memory that fits %t, %d kept before and %d now", fits, had, len(c))
			}
			if cap(scratch) > 0 {
				if first := &scratch[:1][0]; out[first] {
					t.Fatal("memory is given out twice")
				} else {
					out[first] = true
				}
				l = append(l, scratch)
			}
		} else if len(l) > 0 {
			i := rng.IntN(len(l))
			delete(out, &l[i][:1][0])
			want := []int{cap(l[i])} // the largest of all
			for _, x := range c {
				want = append(want, cap(x))
			}
			slices.SortFunc(want, func(a, b int) int { return cmp.Compare(b, a) })
			want = want[:min(len(want), maxScratch)]
			c.give(l[i])
			l = append(l[:i], l[i+1:]...)
			if len(c) > maxScratch {
				t.Fatalf("%d are kept", len(c))
			}
			var kept []int
			for _, x := range c {
				kept = append(kept, cap(x))
			}
			slices.SortFunc(kept, func(a, b int) int { return cmp.Compare(b, a) })
			if !slices.Equal(kept, want) {
				t.Fatalf("memory of %d words is kept, want %d", kept, want)
			}
		}
	}
	c.give(nil)
}
