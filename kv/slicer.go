package kv

import (
	"fmt"
	"slices"
	"sync/atomic"

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

// SpreadKey is a key for k whose server is any with the same probability. The servers own ranges of keys: without it all
// small numbers, such as 0, 1, 2, belong to the first server. Different numbers have different keys, and
// SpreadKey(0) is 0; all nodes must use it, or none. A request's keys must ascend after SpreadKey: slices.Sort.
func SpreadKey(k uint64) Key {
	// The finalizer of SplitMix64: each step can be undone, so no two numbers get one key.
	k = (k ^ k>>30) * 0xbf58476d1ce4e5b9
	k = (k ^ k>>27) * 0x94d049bb133111eb
	return k ^ k>>31
}

// skew finds out whether one server owns all keys of a worker's first requests.
type skew struct {
	left atomic.Int32 // requests still to examine
	only atomic.Int64 // 1 + the server that had all keys so far, -1 if there are several
}

// skewRequests is the number of requests of a worker that skew examines.
const skewRequests = 1000

// note examines the cuts of one request. It does not count requests without keys. After the last request it returns the server
// that owned all keys of all requests, if there is one, else -1.
func (s *skew) note(cuts []Slice) int {
	if s.left.Load() <= 0 || s.only.Load() < 0 {
		return -1
	}
	empty := true
	for i, c := range cuts {
		if c.Begin == c.End {
			continue
		}
		empty = false
		if !s.only.CompareAndSwap(0, int64(i+1)) && s.only.Load() != int64(i+1) {
			s.only.Store(-1)
			return -1
		}
	}
	if empty || s.left.Add(-1) != 0 {
		return -1
	}
	return int(s.only.Load()) - 1
}

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
