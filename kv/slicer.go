package kv

import (
	"fmt"
	"slices"

	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van"
)

// Slice is the part keys[Begin:End] of a request's keys.
type Slice struct{ Begin, End int }

// Slicer divides the keys of a request among the servers: it sets out[s] to the
// slice for server s, whose range of keys is ranges[s]. out begins empty. Every
// key must be in exactly one slice; servers with an empty one get no message.
// A slicer may run on several goroutines at once and must not keep its arguments.
type Slicer func(keys []Key, ranges []postoffice.KeyRange, out []Slice)

// sliceByRange gives every server the keys of its range.
func sliceByRange(keys []Key, ranges []postoffice.KeyRange, out []Slice) {
	begin := 0
	for s := range ranges {
		end := len(keys)
		if s < len(ranges)-1 {
			n, _ := slices.BinarySearch(keys[begin:], ranges[s].End)
			end = begin + n
		}
		out[s] = Slice{begin, end}
		begin = end
	}
}

// checkSlices refuses slices that do not divide n keys. It sets order to the
// servers with keys, by first key.
func checkSlices(out []Slice, n int, order []int) ([]int, error) {
	order = order[:0]
	sorted := true
	for s, c := range out {
		if c.Begin < 0 || c.End < c.Begin || c.End > n {
			return order, fmt.Errorf("%w: slice [%d:%d] for server %d of %d keys", van.ErrInvalid, c.Begin, c.End, s, n)
		}
		if c.Begin == c.End {
			continue
		}
		sorted = sorted && (len(order) == 0 || out[order[len(order)-1]].Begin <= c.Begin)
		order = append(order, s)
	}
	if !sorted {
		slices.SortFunc(order, func(a, b int) int { return out[a].Begin - out[b].Begin })
	}
	next := 0
	for _, s := range order {
		if out[s].Begin != next {
			return order, fmt.Errorf("%w: slice [%d:%d] for server %d, want it to begin at %d: every key once", van.ErrInvalid,
				out[s].Begin, out[s].End, s, next)
		}
		next = out[s].End
	}
	if next != n {
		return order, fmt.Errorf("%w: slices end at key %d of %d", van.ErrInvalid, next, n)
	}
	return order, nil
}
