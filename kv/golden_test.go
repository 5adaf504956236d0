package kv

import (
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/golden"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// TestChecksGolden: the errors of the checks of arbitrary frames, keys, lengths and slices.
func TestChecksGolden(t *testing.T) {
	golden.Check(t, "checks", 20, func(rng *rand.Rand, w io.Writer) {
		for range 200 {
			var keys []Key
			for range rng.IntN(6) {
				keys = append(keys, golden.Edge(rng, 3))
			}
			if rng.IntN(2) == 0 {
				slices.Sort(keys)
				keys = slices.Compact(keys)
			}
			var lens []int32
			total := 0
			for range []int{0, len(keys), len(keys), rng.IntN(6)}[rng.IntN(4)] {
				lens = append(lens, int32(rng.IntN(5)-rng.IntN(8)/7))
				total += int(lens[len(lens)-1])
			}
			n := []int{total, len(keys) * rng.IntN(4), rng.IntN(9)}[rng.IntN(3)]
			n = max(n, 0)
			fmt.Fprintln(w, golden.Err(checkKeys(van.ErrInvalid, keys)), golden.Err(checkShape(van.ErrInvalid, keys, n, lens)))
			m := &van.Message{}
			m.Frames, m.Push, m.Request = rng.IntN(4), rng.IntN(2) == 0, rng.IntN(2) == 0
			m.DataTypes = []van.DataType{van.TypeUint64, []van.DataType{van.TypeInt16, van.TypeOther, van.TypeChar, van.TypeFloat}[rng.IntN(4)], van.TypeInt32, 0}[:max(m.Frames-rng.IntN(9)/8, 0)]
			m.Keys, m.Vals, m.Lens = backend.Slice(keys), backend.Bytes(make([]byte, 2*n+rng.IntN(7)/6)), backend.Slice(lens)
			if rng.IntN(9) == 0 {
				m.Keys = backend.Bytes(make([]byte, rng.IntN(20)))
			}
			f, err := parse[int16](m)
			fmt.Fprintln(w, f.keys, len(f.vals), f.lens, golden.Err(err))
			servers := 1 + rng.IntN(4)
			ranges := postoffice.Topology{NumServers: servers, GroupSize: 1}.ServerKeyRanges()
			out := make([]Slice, servers)
			slices.Sort(keys)
			sliceByRange(keys, ranges, out)
			order, err := checkSlices(out, len(keys), nil)
			fmt.Fprintln(w, out, order, golden.Err(err))
			for i := range out { // of a slicer of a program's own
				out[i] = Slice{rng.IntN(7) - 1, rng.IntN(7)}
			}
			order, err = checkSlices(out, rng.IntN(7), nil)
			fmt.Fprintln(w, out, order, golden.Err(err))
			fmt.Fprintln(w, common(keys, lessOf(rng, keys)))
		}
	})
}

// lessOf is keys, with another one somewhere or cut.
func lessOf(rng *rand.Rand, keys []Key) []Key {
	k := slices.Clone(keys)
	if len(k) > 0 && rng.IntN(2) == 0 {
		k[rng.IntN(len(k))]++
	}
	return k[:rng.IntN(len(k)+1)]
}

// TestArrangeModel: a pull whose servers answer with other numbers of values than there is room for by
// equal shares gives all values in the order of keys.
func TestArrangeModel(t *testing.T) {
	for seed := range uint64(300) {
		rng := rand.New(rand.NewPCG(seed, 9))
		parts := 1 + rng.IntN(6)
		c := &call[int32]{sized: true}
		var want []int32
		var lens []int
		total, keys := 0, 0
		for range parts {
			n := 1 + rng.IntN(3)
			lens = append(lens, n)
			keys += n
		}
		each := 1 + rng.IntN(3)
		got := make([]int, parts)
		for i := range got {
			got[i] = rng.IntN(2 * each * lens[i])
			total += got[i]
		}
		c.vals = make([]int32, max(total, keys*each))
		var lensOut []int32
		c.outLens = &lensOut
		at := 0
		for i := range parts {
			p := part[int32]{k0: at, k1: at + lens[i], v0: at * each, v1: (at + lens[i]) * each, got: got[i]}
			var v []int32
			for j := range got[i] {
				v = append(v, int32(100*i+j))
			}
			want = append(want, v...)
			if got[i] == p.v1-p.v0 || got[i] < p.v1-p.v0 && rng.IntN(2) == 0 { // the transport has put them where equal shares would be
				copy(c.vals[p.v0:], v)
			} else {
				m := &van.Message{}
				m.Vals = backend.Slice(v)
				m.Adopt(nothing{}, nil)
				p.kept = m
			}
			c.parts = append(c.parts, p)
			c.order = append(c.order, i)
			at += lens[i]
		}
		if err := c.assemble(); err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(c.vals[:total], want) {
			t.Fatalf("seed %d: %v, want %v", seed, c.vals[:total], want)
		}
	}
}

type nothing struct{}

func (nothing) Free(*van.Message) {}
