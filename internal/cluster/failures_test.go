package cluster

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stepaf/stepaf-go/van"
)

// TestFailuresModel compares failed requests of random lengths in random order, also where timestamps continue from
// 0, with a map. Known results are right, and no failed request is taken for answered.
func TestFailuresModel(t *testing.T) {
	for seed := range uint64(40) {
		rng := rand.New(rand.NewPCG(seed, 7))
		next := int32(rng.IntN(1000))
		if seed%2 == 1 {
			next = math.MaxInt32 - int32(rng.IntN(40000))
		}
		f := failures{forgotten: -1}
		model := map[int32]error{}
		var given []int32
		type request struct {
			first, n int32
			err      error
		}
		var flying []request
		end := func() {
			k := rng.IntN(len(flying))
			r := flying[k]
			flying[k] = flying[len(flying)-1]
			flying = flying[:len(flying)-1]
			if r.err == nil {
				return
			}
			f.add(r.first, r.n, r.err, next)
			for ts := r.first; ts < r.first+r.n; ts++ {
				model[ts] = r.err
			}
		}
		for range 20000 {
			n := int32(1 + rng.IntN(3))
			if next > math.MaxInt32-n {
				next = 0
			}
			r := request{first: next, n: n}
			if rng.IntN(2) == 0 {
				r.err = fmt.Errorf("of %d", next)
			}
			next += n
			for ts := r.first; ts < r.first+n; ts++ {
				given = append(given, ts)
			}
			if flying = append(flying, r); len(flying) > 1+rng.IntN(64) {
				end()
			}
		}
		for len(flying) > 0 {
			end()
		}
		if len(f.list) > maxFailures {
			t.Fatalf("seed %d: %d stretches are kept, want at most %d", seed, len(f.list), maxFailures)
		}
		right, unknown := 0, 0
		for i, ts := range given {
			err, known := f.find(ts, next)
			switch want := model[ts]; {
			case !known:
				unknown++
			case (err == nil) != (want == nil):
				t.Fatalf("seed %d: timestamp %d, given out as number %d: %v, want %v", seed, ts, i, err, want)
			default:
				right++
			}
		}
		if right < 2*maxFailures || unknown == 0 {
			t.Errorf("seed %d: %d timestamps are known, %d are not", seed, right, unknown)
		}
		ts := given[len(given)-1]
		f.clearReused(ts, 1)
		if err, known := f.find(ts, next); err != nil || !known {
			t.Errorf("seed %d: timestamp %d is given out again: %v, known %t", seed, ts, err, known)
		}
	}
}

// TestFailuresTouch: of consecutive requests that failed, in any order, any number is remembered, each with an error
// of its kind.
func TestFailuresTouch(t *testing.T) {
	f := failures{forgotten: -1}
	why := [2]error{fmt.Errorf("one: %w", van.ErrTimeout), fmt.Errorf("other: %w", van.ErrPeerLost)}
	const n = 2 * maxFailures
	for _, k := range rand.New(rand.NewPCG(1, 1)).Perm(n) {
		f.add(int32(2*k), 2, why[2*k/n], 2*n)
	}
	for ts := range int32(2 * n) {
		if err, known := f.find(ts, 2*n); !known || err != why[ts/n] {
			t.Fatalf("timestamp %d: %v, known %t", ts, err, known)
		}
	}
	if len(f.list) > maxFailures {
		t.Errorf("%d are kept", len(f.list))
	}

	// Timestamps that are issued again are forgotten, the rest of a range is not.
	f = failures{list: []failedRange{{0, 5, why[0]}, {10, 10, why[1]}, {30, 1, why[0]}}, forgotten: -1}
	for ts := int32(0); ts < 15; ts += 3 {
		f.clearReused(ts, 3)
	}
	if len(f.list) != 2 || f.list[0] != (failedRange{15, 5, why[1]}) || f.list[1].first != 30 {
		t.Errorf("after 15 timestamps %v is left", f.list)
	}
}
