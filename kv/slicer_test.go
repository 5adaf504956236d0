package kv

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stepaf/stepaf-go/postoffice"
)

// rangesOf are the ranges of the original for n servers.
func rangesOf(n int) []postoffice.KeyRange {
	var rs []postoffice.KeyRange
	for i := range uint64(n) {
		rs = append(rs, postoffice.KeyRange{Begin: MaxKey / uint64(n) * i, End: MaxKey / uint64(n) * (i + 1)})
	}
	return rs
}

// TestSliceByRange compares with the original's rule: server i gets the keys in its
// range. What is above the last range, where the original aborts, is the last one's.
func TestSliceByRange(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 5))
	for range 3000 {
		n := 1 + r.IntN(9)
		ranges := rangesOf(n)
		keys := batch(r, r.IntN(30), MaxKey)
		for range r.IntN(6) { // next to the bounds
			b := ranges[r.IntN(n)]
			keys = append(keys, b.Begin, b.End, b.Begin+r.Uint64N(3), b.End-r.Uint64N(3))
		}
		if r.IntN(2) == 0 {
			keys = append(keys, 0, MaxKey)
		}
		slices.Sort(keys)
		keys = slices.Compact(keys)

		got := make([]Slice, n)
		sliceByRange(keys, ranges, got)
		for i, k := range keys {
			owner := n - 1
			for s, b := range ranges {
				if b.Begin <= k && k < b.End {
					owner = s
					break
				}
			}
			for s, c := range got {
				if in := c.Begin <= i && i < c.End; in != (s == owner) {
					t.Fatalf("%d servers, key %d (index %d) in slice %v of server %d: %t, want its owner %d", n, k, i, c, s, in, owner)
				}
			}
		}
		if _, err := checkSlices(got, len(keys), nil); err != nil {
			t.Fatal(err)
		}
	}
}
