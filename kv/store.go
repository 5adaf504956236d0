package kv

import (
	"slices"
	"sync"
)

// store holds k values for each key, in the order in which keys arrived first. A batch
// whose keys arrived in the same order is worked off run by run, and costs little more than
// the memory traffic of its values; other keys cost a map lookup.
//
// Adding to keys that are there and reading hold mu for reading and the lock of one
// chunk at a time; a batch is therefore not atomic, each key is.
type store[V Value] struct {
	k   int // values of each key
	max int // keys of a chunk

	mu     sync.RWMutex
	rows   map[Key]int // where a key is, counted through all chunks
	chunks []*chunk[V] // all full but the last
}

// chunk is a piece of a store. Its keys change under store.mu only.
type chunk[V Value] struct {
	keys []Key
	mu   sync.Mutex
	vals []V
}

// Bounds of a chunk: long runs, and little memory that is not used yet.
const (
	chunkBytes   = 64 << 10
	minChunkKeys = 64
	maxChunkKeys = 4096
)

func newStore[V Value](k int) *store[V] {
	size := max(k*sizeOf[V](), 1)
	return &store[V]{k: k, max: min(max(chunkBytes/size, minChunkKeys), maxChunkKeys), rows: map[Key]int{}}
}

// find returns where keys[0] is and how many keys follow each other there as they do in
// keys: none when it is not there. It looks first behind the row that a previous call
// ended with, where the next key of an ascending batch often is. mu is held, for reading
// at least.
func (s *store[V]) find(keys []Key, behind int) (row, n int) {
	if c, at := s.at(behind); c != nil {
		if i, found := slices.BinarySearch(c.keys[at:], keys[0]); found {
			return behind + i, common(c.keys[at+i:], keys)
		}
	}
	row, ok := s.rows[keys[0]]
	if !ok {
		return behind, 0
	}
	c, at := s.at(row)
	return row, common(c.keys[at:], keys)
}

// at is the chunk of a row, nil for the row behind the last, and where it is there.
func (s *store[V]) at(row int) (*chunk[V], int) {
	if row >= len(s.rows) {
		return nil, 0
	}
	return s.chunks[row/s.max], row % s.max
}

// common is the number of leading elements that a and b have in common.
func common(a, b []Key) int {
	n, i := min(len(a), len(b)), 0
	for i+8 <= n && [8]Key(a[i:]) == [8]Key(b[i:]) {
		i += 8
	}
	for i < n && a[i] == b[i] {
		i++
	}
	return i
}

// add adds vals to the values of keys. Keys that are not there begin at 0.
func (s *store[V]) add(keys []Key, vals []V) {
	var missing []int
	s.mu.RLock()
	for i, row, n := 0, 0, 0; i < len(keys); i, row = i+max(n, 1), row+n {
		if row, n = s.addRun(keys[i:], vals[i*s.k:], row); n == 0 {
			missing = append(missing, i)
		}
	}
	s.mu.RUnlock()
	if len(missing) == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, i := range missing {
		key, v := keys[i:i+1], vals[i*s.k:(i+1)*s.k]
		if _, n := s.addRun(key, v, len(s.rows)); n == 0 { // not added by another request meanwhile
			s.put(key[0], v)
		}
	}
}

// addRun adds to the first keys, as far as they are found as one run: n of them, from
// row on. behind is as for find.
func (s *store[V]) addRun(keys []Key, vals []V, behind int) (row, n int) {
	if row, n = s.find(keys, behind); n > 0 {
		c, at := s.at(row)
		c.mu.Lock()
		sum(c.vals[at*s.k:(at+n)*s.k], vals[:n*s.k])
		c.mu.Unlock()
	}
	return row, n
}

// put appends a key that is not there. mu is held.
func (s *store[V]) put(key Key, vals []V) {
	if len(s.rows) == len(s.chunks)*s.max {
		s.chunks = append(s.chunks, &chunk[V]{})
	}
	c := s.chunks[len(s.chunks)-1]
	s.rows[key] = len(s.rows)
	c.keys, c.vals = append(c.keys, key), append(c.vals, vals...)
}

// get copies the values of keys to out; keys that are not there have zeros.
func (s *store[V]) get(keys []Key, out []V) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	for i, row, n := 0, 0, 0; i < len(keys); i, row = i+max(n, 1), row+n {
		if row, n = s.find(keys[i:], row); n == 0 {
			clear(out[i*s.k : (i+1)*s.k])
			continue
		}
		c, at := s.at(row)
		c.mu.Lock()
		copy(out[i*s.k:], c.vals[at*s.k:(at+n)*s.k])
		c.mu.Unlock()
	}
}

// len is the number of keys.
func (s *store[V]) len() int {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return len(s.rows)
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
