package sim

import "time"

// seed is the source of a random decision: a hash of its subject.
type seed uint64

// mix is the finalizer of SplitMix64.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// of is the seed of a part of the subject of s.
func (s seed) of(part string) seed {
	h := uint64(s)
	for _, c := range []byte(part) {
		h = (h ^ uint64(c)) * 0x100000001b3
	}
	return seed(mix(h))
}

// at is the seed of number n of it.
func (s seed) at(n uint64) seed { return seed(mix(uint64(s) ^ mix(n))) }

// share is in [0, 1).
func (s seed) share() float64 { return float64(uint64(s)>>11) / (1 << 53) }

// chance is true with probability p.
func (s seed) chance(p float64) bool { return s.share() < p }

// upTo is a time below d.
func (s seed) upTo(d time.Duration) time.Duration { return time.Duration(s.share() * float64(d)) }

// stream is a row of numbers.
type stream struct {
	s seed
	n uint64
}

func (r *stream) next() seed {
	r.n++
	return r.s.at(r.n)
}
