package fifo

import (
	"math/rand/v2"
	"slices"
	"testing"

	_ "github.com/stepaf/stepaf-go/tests/testlimit"
)

// TestQueue: elements come out in the order of Put, for any length of the queue, and a queue that never becomes
// empty does not grow.
func TestQueue(t *testing.T) {
	for _, most := range []int{1, 2, 7, 4 * keep} {
		var q Queue[*int]
		r := rand.New(rand.NewPCG(1, uint64(most)))
		var in, out int
		for range 20 * keep {
			for n := r.IntN(most + 1); n > 0 && q.Len() < most; n-- {
				v := in
				q.Put(&v)
				in++
			}
			for n := r.IntN(most + 1); n > 0 && q.Len() > min(1, most-1); n-- {
				if front, v := q.Front(), q.Take(); *v != out || front != v {
					t.Fatalf("at most %d: %d came out, and %d before it stood in front, want %d", most, *v, *front, out)
				}
				out++
			}
			if q.Len() != in-out || len(q.All()) != q.Len() {
				t.Fatalf("at most %d: length %d, and of all %d, want %d", most, q.Len(), len(q.All()), in-out)
			}
			for i, v := range q.All() {
				if *v != out+i {
					t.Fatalf("at most %d: element %d is %d, want %d", most, i, *v, out+i)
				}
			}
			// The queue does not refer to elements that were taken.
			if slices.ContainsFunc(q.items[:q.head], func(v *int) bool { return v != nil }) {
				t.Fatalf("at most %d: it holds elements that were taken", most)
			}
		}
		if limit := max(4*most, 8); cap(q.items) > limit {
			t.Errorf("at most %d: room for %d, want at most %d", most, cap(q.items), limit)
		}
		for q.Len() > 0 {
			q.Take()
		}
		if cap(q.items) > keep {
			t.Errorf("at most %d: empty, it keeps room for %d, want at most %d", most, cap(q.items), keep)
		}
	}
}

// TestReuse: neither a queue that becomes empty each time nor one that never does allocates memory for the next
// element.
func TestReuse(t *testing.T) {
	for _, before := range []int{0, 1, 100} {
		var q Queue[int]
		for i := range before {
			q.Put(i)
		}
		for range 3 * (before + 1) {
			q.Put(0)
			q.Take()
		}
		if n := testing.AllocsPerRun(1000, func() {
			q.Put(0)
			q.Take()
		}); n > 0 {
			t.Errorf("with %d in the queue: %v allocations for one more, want none", before, n)
		}
	}
}

// TestPutFront: Take returns an element of PutFront next, also from a queue that was empty or from which nothing
// was taken.
func TestPutFront(t *testing.T) {
	for _, taken := range []int{0, 1, 5, 8} {
		var q Queue[int]
		for i := range 8 {
			q.Put(i)
		}
		for range taken {
			q.Take()
		}
		for i := range 4 {
			q.PutFront(-i)
		}
		q.Put(8)
		want := []int{-3, -2, -1, 0}
		for i := taken; i < 9; i++ {
			want = append(want, i)
		}
		if !slices.Equal(q.All(), want) {
			t.Errorf("with %d of 8 taken: %v, want %v", taken, q.All(), want)
		}
		for _, v := range want {
			if got := q.Take(); got != v {
				t.Errorf("with %d of 8 taken: %d came out, want %d", taken, got, v)
			}
		}
	}
}
