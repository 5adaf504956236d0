package kv

import (
	"slices"
	"sync"
)

// store is a sorted map from keys to k values each, for batches of ascending keys.
// Keys lie in blocks; a batch is merged with the blocks that its keys fall into,
// run by run, so that the cost of a key is that of its values.
//
// Adding to keys that are there and reading hold mu for reading and the lock of
// one block at a time; a batch is therefore not atomic, each key is.
type store[V Value] struct {
	k   int // values of each key
	max int // keys of a block

	mu     sync.RWMutex
	firsts []Key // ascending from 0: firsts[i] bounds the keys of blocks[i] from below
	blocks []*block[V]
	shape  uint64 // counts changes of the set of keys
}

type block[V Value] struct {
	mu   sync.Mutex
	keys []Key // ascending
	vals []V
}

// Bounds of a block. Few bytes make inserting cheap, many make runs long.
const (
	blockBytes   = 64 << 10
	minBlockKeys = 64
	maxBlockKeys = 4096
)

func newStore[V Value](k int) *store[V] {
	size := max(k*sizeOf[V](), 1)
	return &store[V]{k: k, max: min(max(blockBytes/size, minBlockKeys), maxBlockKeys)}
}

// find is the index of the block that key belongs to. There is at least one block.
func (s *store[V]) find(key Key) int {
	i, found := slices.BinarySearch(s.firsts, key)
	if found {
		return i
	}
	return i - 1 // firsts begins with 0
}

// end is the number of leading keys that belong to block i.
func (s *store[V]) end(keys []Key, i int) int {
	if i+1 >= len(s.firsts) {
		return len(keys)
	}
	return seek(keys, s.firsts[i+1], 0)
}

// add adds vals to the values of keys. Keys that are not there begin at 0.
func (s *store[V]) add(keys []Key, vals []V) {
	m := &missing[V]{k: s.k}
	s.mu.RLock()
	shape := s.shape
	s.join(keys, vals, m)
	s.mu.RUnlock()
	if len(m.keys) == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.shape != shape {
		rest := &missing[V]{k: s.k}
		s.join(m.keys, m.vals, rest)
		m = rest
	}
	if len(m.keys) > 0 {
		s.shape++
		s.insert(m.keys, m.vals)
	}
}

// missing collects the pairs that a store does not have. As long as they are one
// piece of the batch they are views on it.
type missing[V Value] struct {
	k     int
	keys  []Key
	vals  []V
	end   int // of the piece, in the batch
	owned bool
}

// add appends keys[a:b] of the batch.
func (m *missing[V]) add(keys []Key, vals []V, a, b int) {
	switch {
	case a == b:
		return
	case len(m.keys) == 0:
		m.keys, m.vals = keys[a:b:b], vals[a*m.k:b*m.k:b*m.k]
	case !m.owned && a == m.end:
		n := len(m.keys)
		m.keys, m.vals = keys[a-n:b:b], vals[(a-n)*m.k:b*m.k:b*m.k]
	default:
		m.owned = true // the views have no capacity left, so that append copies
		m.keys, m.vals = append(m.keys, keys[a:b]...), append(m.vals, vals[a*m.k:b*m.k]...)
	}
	m.end = b
}

// join adds to the keys that are there and tells m the others. s.mu is held, for
// reading at least.
func (s *store[V]) join(keys []Key, vals []V, m *missing[V]) {
	if len(s.blocks) == 0 {
		m.add(keys, vals, 0, len(keys))
		return
	}
	for from := 0; from < len(keys); {
		i := s.find(keys[from])
		to := from + s.end(keys[from:], i)
		b := s.blocks[i]
		b.mu.Lock()
		for a, p := from, 0; a < to; {
			r := match(b.keys, keys[a:to], p)
			m.add(keys, vals, a, a+r.skip)
			a += r.skip
			sum(b.vals[r.at*s.k:(r.at+r.n)*s.k], vals[a*s.k:(a+r.n)*s.k])
			a, p = a+r.n, r.at+r.n
		}
		b.mu.Unlock()
		from = to
	}
}

// get copies the values of keys to out; keys that are not there have zeros.
func (s *store[V]) get(keys []Key, out []V) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if len(s.blocks) == 0 {
		clear(out)
		return
	}
	for from := 0; from < len(keys); {
		i := s.find(keys[from])
		to := from + s.end(keys[from:], i)
		b := s.blocks[i]
		b.mu.Lock()
		for a, p := from, 0; a < to; {
			r := match(b.keys, keys[a:to], p)
			clear(out[a*s.k : (a+r.skip)*s.k])
			a += r.skip
			copy(out[a*s.k:(a+r.n)*s.k], b.vals[r.at*s.k:(r.at+r.n)*s.k])
			a, p = a+r.n, r.at+r.n
		}
		b.mu.Unlock()
		from = to
	}
}

// run says that of the wanted keys skip are not there and the n after them are, at
// index at.
type run struct{ skip, at, n int }

// match finds the first run of want in have[p:]. want is not empty.
func match(have, want []Key, p int) run {
	r := run{at: p}
	for {
		r.at = seek(have, want[r.skip], r.at)
		if r.at == len(have) {
			return run{skip: len(want), at: r.at}
		}
		if have[r.at] == want[r.skip] {
			break
		}
		r.skip++
		for r.skip < len(want) && want[r.skip] < have[r.at] {
			r.skip++
		}
		if r.skip == len(want) {
			return r
		}
	}
	h, w := have[r.at:], want[r.skip:]
	n := min(len(h), len(w))
	h, w = h[:n], w[:n]
	i := 1
	for i+8 <= n && [8]Key(h[i:i+8]) == [8]Key(w[i:i+8]) {
		i += 8
	}
	for i < n && h[i] == w[i] {
		i++
	}
	r.n = i
	return r
}

// seek is the first index from p on whose key is not below key.
func seek(have []Key, key Key, p int) int {
	step := 1
	for p < len(have) && have[p] < key {
		if q := p + step; q < len(have) && have[q] < key {
			p, step = q, 2*step
			continue
		}
		n, _ := slices.BinarySearch(have[p+1:min(p+step, len(have))], key)
		return p + 1 + n
	}
	return p
}

// sum adds src to dst, which has the same length.
func sum[V Value](dst, src []V) {
	src = src[:len(dst)]
	for len(dst) >= 8 {
		d, s := (*[8]V)(dst), (*[8]V)(src)
		d[0] += s[0]
		d[1] += s[1]
		d[2] += s[2]
		d[3] += s[3]
		d[4] += s[4]
		d[5] += s[5]
		d[6] += s[6]
		d[7] += s[7]
		dst, src = dst[8:], src[8:]
	}
	for i := range dst {
		dst[i] += src[i]
	}
}

// insert adds keys of which none is there. s.mu is held.
func (s *store[V]) insert(keys []Key, vals []V) {
	if len(s.blocks) == 0 {
		s.firsts, s.blocks = s.appendBlocks(nil, nil, keys, vals)
		s.firsts[0] = 0 // smaller keys come to the first block as well
		return
	}
	// Blocks before next are in firsts and blocks if anything was split.
	var firsts []Key
	var blocks []*block[V]
	next := 0
	for len(keys) > 0 {
		i := s.find(keys[0])
		n := s.end(keys, i)
		b, ks, vs := s.blocks[i], keys[:n], vals[:n*s.k]
		keys, vals = keys[n:], vals[n*s.k:]
		if len(b.keys)+n <= s.max {
			b.merge(ks, vs, s.k)
			continue
		}
		firsts = append(firsts, s.firsts[next:i+1]...)
		blocks = append(blocks, s.blocks[next:i+1]...)
		next = i + 1
		if ks[0] < b.keys[len(b.keys)-1] {
			// One block is split into equal ones with room to grow.
			all := &block[V]{keys: b.keys, vals: b.vals}
			all.merge(ks, vs, s.k)
			parts := (len(all.keys)*4/3 + s.max) / s.max
			size := (len(all.keys) + parts - 1) / parts
			ks, vs = all.keys[size:], all.vals[size*s.k:]
			b.keys, b.vals = slices.Clone(all.keys[:size]), slices.Clone(all.vals[:size*s.k])
			for len(ks) > 0 {
				size := min(size, len(ks))
				firsts, blocks = s.appendBlock(firsts, blocks, ks[:size], vs[:size*s.k])
				ks, vs = ks[size:], vs[size*s.k:]
			}
			continue
		}
		room := max(s.max-len(b.keys), 0)
		b.merge(ks[:room], vs[:room*s.k], s.k)
		firsts, blocks = s.appendBlocks(firsts, blocks, ks[room:], vs[room*s.k:])
	}
	if next > 0 {
		s.firsts = append(firsts, s.firsts[next:]...)
		s.blocks = append(blocks, s.blocks[next:]...)
	}
}

// appendBlocks appends full blocks.
func (s *store[V]) appendBlocks(firsts []Key, blocks []*block[V], keys []Key, vals []V) ([]Key, []*block[V]) {
	for len(keys) > 0 {
		n := min(s.max, len(keys))
		firsts, blocks = s.appendBlock(firsts, blocks, keys[:n], vals[:n*s.k])
		keys, vals = keys[n:], vals[n*s.k:]
	}
	return firsts, blocks
}

func (s *store[V]) appendBlock(firsts []Key, blocks []*block[V], keys []Key, vals []V) ([]Key, []*block[V]) {
	return append(firsts, keys[0]), append(blocks, &block[V]{keys: slices.Clone(keys), vals: slices.Clone(vals)})
}

// merge adds keys of which none is there, from the back, so that everything moves
// at most once.
func (b *block[V]) merge(keys []Key, vals []V, k int) {
	old, n := len(b.keys), len(keys)
	b.keys = slices.Grow(b.keys, n)[:old+n]
	b.vals = slices.Grow(b.vals, n*k)[:(old+n)*k]
	for n > 0 {
		// What lies behind the last new key goes to its place, then that key and
		// those before it that nothing lies between.
		at, _ := slices.BinarySearch(b.keys[:old], keys[n-1])
		copy(b.keys[at+n:old+n], b.keys[at:old])
		copy(b.vals[(at+n)*k:(old+n)*k], b.vals[at*k:old*k])
		from := n - 1
		if at == 0 {
			from = 0
		}
		for from > 0 && b.keys[at-1] < keys[from-1] {
			from--
		}
		copy(b.keys[at+from:], keys[from:n])
		copy(b.vals[(at+from)*k:], vals[from*k:n*k])
		old, n = at, from
	}
}

// len is the number of keys.
func (s *store[V]) len() int {
	s.mu.RLock()
	defer s.mu.RUnlock()
	n := 0
	for _, b := range s.blocks {
		n += len(b.keys)
	}
	return n
}
