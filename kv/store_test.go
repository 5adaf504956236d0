package kv

import (
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
)

// model is the store that is easily seen to be right.
type model map[Key][]int64

func (m model) add(keys []Key, vals []int64, k int) {
	for i, key := range keys {
		if m[key] == nil {
			m[key] = make([]int64, k)
		}
		for j := range k {
			m[key][j] += vals[i*k+j]
		}
	}
}

// batch makes n ascending keys below limit.
func batch(r *rand.Rand, n int, limit Key) []Key {
	set := map[Key]bool{}
	for range n {
		set[r.Uint64N(limit)] = true
	}
	keys := make([]Key, 0, n)
	for k := range set {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

func (s *store[V]) checkInvariants(t *testing.T) {
	t.Helper()
	row := 0
	for i, c := range s.chunks {
		if full := i < len(s.chunks)-1; len(c.keys) == 0 || len(c.keys) > s.max || full && len(c.keys) != s.max || len(c.vals) != len(c.keys)*s.k {
			t.Fatalf("chunk %d: %d keys, %d values", i, len(c.keys), len(c.vals))
		}
		for _, key := range c.keys {
			if at, ok := s.rows[key]; !ok || at != row {
				t.Fatalf("key %d is in row %d (%t), want %d", key, at, ok, row)
			}
			row++
		}
	}
	if row != len(s.rows) {
		t.Fatalf("%d keys in chunks, %d in the map", row, len(s.rows))
	}
}

func TestStoreLikeMap(t *testing.T) {
	for seed := range uint64(12) {
		r := rand.New(rand.NewPCG(seed, 1))
		k := []int{1, 3, 8, 17}[seed%4]
		s, m := newStore[int64](k), model{}
		s.max = 4 + int(seed)*5 // many chunks
		limit := []Key{300, 3000, maxKey}[seed%3]
		for round := range 150 {
			n := []int{1, 5, 300}[round%3]
			keys := batch(r, n, limit)
			if round%10 == 9 { // a dense run
				keys = keys[:0]
				for i, from := Key(0), r.Uint64N(limit-200); i < 200; i++ {
					keys = append(keys, from+i)
				}
			}
			if round == 77 {
				keys = []Key{0, maxKey - 1, maxKey}
			}
			vals := make([]int64, len(keys)*k)
			for i := range vals {
				vals[i] = r.Int64N(1000)
			}
			s.add(keys, vals)
			m.add(keys, vals, k)
			s.checkInvariants(t)

			ask := batch(r, 200, limit)
			if round%2 == 0 {
				ask = keys
			}
			out := make([]int64, len(ask)*k)
			for i := range out {
				out[i] = -1
			}
			s.get(ask, out)
			for i, key := range ask {
				want := m[key]
				if want == nil {
					want = make([]int64, k)
				}
				if got := out[i*k : (i+1)*k]; !slices.Equal(got, want) {
					t.Fatalf("seed %d round %d key %d: got %v, want %v", seed, round, key, got, want)
				}
			}
		}
		if s.len() != len(m) {
			t.Errorf("seed %d: %d keys, want %d", seed, s.len(), len(m))
		}
	}
}

// TestStoreConcurrent adds the same and different keys from several goroutines.
func TestStoreConcurrent(t *testing.T) {
	const adders, rounds = 4, 60
	s := newStore[int64](2)
	s.max = 16
	done := make(chan model)
	for a := range adders {
		go func() {
			r := rand.New(rand.NewPCG(uint64(a), 2))
			m := model{}
			for range rounds {
				keys := batch(r, 50, 500)
				vals := make([]int64, 2*len(keys))
				for i := range vals {
					vals[i] = 1
				}
				s.add(keys, vals)
				m.add(keys, vals, 2)
				out := make([]int64, len(vals))
				s.get(keys, out)
				for i, v := range out {
					if v < m[keys[i/2]][i%2] || out[i] != out[i^1] {
						t.Errorf("key %d has %v after %d own additions", keys[i/2], out[i&^1:i|1+1], m[keys[i/2]][0])
						break
					}
				}
			}
			done <- m
		}()
	}
	want := map[Key]int64{}
	for range adders {
		for k, v := range <-done {
			want[k] += v[0]
		}
	}
	s.checkInvariants(t)
	for k, v := range want {
		var out [2]int64
		s.get([]Key{k}, out[:])
		if out != [2]int64{v, v} {
			t.Errorf("key %d: %v, want %d twice", k, out, v)
		}
	}
	if s.len() != len(want) {
		t.Errorf("%d keys, want %d", s.len(), len(want))
	}
}

// TestStoreNewKeysAtOnce: keys that several goroutines add before any of them is there have the sum of all.
func TestStoreNewKeysAtOnce(t *testing.T) {
	const adders, rounds, n = 4, 20, 2000
	s := newStore[int64](1)
	ones := slices.Repeat([]int64{1}, n)
	for round := range rounds {
		keys := ascending(n, 1)
		for i := range keys {
			keys[i] += Key(round * n)
		}
		var all sync.WaitGroup
		begin := make(chan struct{})
		for range adders {
			all.Go(func() {
				<-begin
				s.add(keys, ones)
			})
		}
		close(begin)
		all.Wait()
		out := make([]int64, n)
		s.get(keys, out)
		if i := slices.IndexFunc(out, func(v int64) bool { return v != adders }); i >= 0 {
			t.Fatalf("round %d: key %d has %d, want %d", round, keys[i], out[i], adders)
		}
	}
}

func ascending(n int, step Key) []Key {
	keys := make([]Key, n)
	for i := range keys {
		keys[i] = Key(i) * step
	}
	return keys
}

func BenchmarkSumming(b *testing.B) {
	const n, k, per = 1 << 20, 16, 1 << 16
	keys, vals := ascending(n, 7), make([]float32, n*k)
	out := make([]float32, per*k)
	load := func(h *SummingHandler[float32]) {
		for i := 0; i < n; i += per {
			if err := h.Add(keys[i:i+per], vals[i*k:(i+per)*k], nil); err != nil {
				b.Fatal(err)
			}
		}
	}
	report := func(b *testing.B) {
		b.SetBytes(n * (8 + 4*k))
		b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/n, "ns/key")
	}
	b.Run("first-push", func(b *testing.B) {
		for b.Loop() {
			load(&SummingHandler[float32]{})
		}
		report(b)
	})
	var h SummingHandler[float32]
	load(&h)
	b.Run("push", func(b *testing.B) {
		for b.Loop() {
			load(&h)
		}
		report(b)
	})
	b.Run("pull", func(b *testing.B) {
		for b.Loop() {
			for i := 0; i < n; i += per {
				h.Get(keys[i:i+per], out)
			}
		}
		report(b)
	})
	b.Run("sparse-push", func(b *testing.B) { // every 10th key
		few := make([]Key, 0, n/10)
		for i := 0; i < n; i += 10 {
			few = append(few, keys[i])
		}
		for b.Loop() {
			if err := h.Add(few, vals[:len(few)*k], nil); err != nil {
				b.Fatal(err)
			}
		}
		b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(len(few)), "ns/key")
	})
	b.Run("random-insert-one", func(b *testing.B) {
		var h SummingHandler[float32]
		r := rand.New(rand.NewPCG(1, 1))
		for b.Loop() {
			if err := h.Add([]Key{r.Uint64()}, vals[:k], nil); err != nil {
				b.Fatal(err)
			}
		}
	})
}
