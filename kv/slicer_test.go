package kv

import (
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stepaf/stepaf-go/postoffice"
)

const maxKey Key = math.MaxUint64

// rangesOf are the ranges of the original for n servers.
func rangesOf(n int) []postoffice.KeyRange {
	var rs []postoffice.KeyRange
	for i := range uint64(n) {
		rs = append(rs, postoffice.KeyRange{Begin: maxKey / uint64(n) * i, End: maxKey / uint64(n) * (i + 1)})
	}
	return rs
}

// TestSliceByRange compares with the original's rule: server i gets the keys in its range. The last server also
// gets the keys above the last range, where the original aborts.
func TestSliceByRange(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 5))
	for range 3000 {
		n := 1 + r.IntN(9)
		ranges := rangesOf(n)
		keys := batch(r, r.IntN(30), maxKey)
		for range r.IntN(6) { // next to the bounds
			b := ranges[r.IntN(n)]
			keys = append(keys, b.Begin, b.End, b.Begin+r.Uint64N(3), b.End-r.Uint64N(3))
		}
		if r.IntN(2) == 0 {
			keys = append(keys, 0, maxKey)
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

// TestSpreadKey: the keys of small numbers, and of numbers at a fixed distance, spread over all servers. No two numbers have one key.
func TestSpreadKey(t *testing.T) {
	for _, servers := range []int{2, 3, 4, 8} {
		for _, step := range []uint64{1, 2, 64, 1 << 20, 1 << 32, maxKey / 1024} {
			keys := make([]Key, 1000)
			for i := range keys {
				keys[i] = SpreadKey(uint64(i) * step)
			}
			slices.Sort(keys)
			if err := checkKeys(errors.New("twice"), keys); err != nil {
				t.Fatalf("step %d: %v", step, err)
			}
			cuts := make([]Slice, servers)
			sliceByRange(keys, rangesOf(servers), cuts)
			for s, c := range cuts {
				if n, fair := c.End-c.Begin, len(keys)/servers; n < fair*7/10 || n > fair*13/10 {
					t.Errorf("step %d: server %d of %d has %d of %d keys", step, s, servers, n, len(keys))
				}
			}
		}
	}
}

// TestSkew: if one server owns all keys of the first requests, note returns it once. A request without keys does not count: the
// log line names a key of the request at which note returns the server.
func TestSkew(t *testing.T) {
	one, other, both, none := []Slice{{}, {0, 3}}, []Slice{{0, 3}, {}}, []Slice{{0, 1}, {1, 3}}, []Slice{{}, {}}
	for name, x := range map[string]struct {
		at   map[int][]Slice // by request: cuts that differ from one
		want int
	}{
		"one": {nil, 1}, "both": {map[int][]Slice{7: both}, -1}, "another": {map[int][]Slice{skewRequests - 1: other}, -1}, "later": {map[int][]Slice{skewRequests: other}, 1},
		"no keys": {map[int][]Slice{3: none}, 1}, "no keys at the end": {map[int][]Slice{skewRequests - 1: none}, 1},
	} {
		var s skew
		s.left.Store(skewRequests)
		found, counted := -1, 0
		for i := range 3 * skewRequests {
			cuts := x.at[i]
			if cuts == nil {
				cuts = one
			}
			if cuts[0] != cuts[1] { // the request has keys
				counted++
			}
			if got := s.note(cuts); got >= 0 {
				if found >= 0 || counted != skewRequests || cuts[0] == cuts[1] {
					t.Errorf("%s: found at request %d", name, i)
				}
				found = got
			}
		}
		if found != x.want {
			t.Errorf("%s: server %d, want %d", name, found, x.want)
		}
	}
	var single skew // of a cluster with one server
	for range 2 * skewRequests {
		if single.note(one) >= 0 {
			t.Fatal("found with one server")
		}
	}
}
