package session_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/kv/session"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
)

// results are those of "make" that are not closed, by rank.
type results struct {
	mu   sync.Mutex
	open []map[*result]bool
}

// result is a value that is closed once, when its handle is released.
type result struct {
	of   *results
	rank int
	v    int64
}

func (r *result) Close() error {
	r.of.mu.Lock()
	defer r.of.mu.Unlock()
	if !r.of.open[r.rank][r] {
		return errors.New("closed before")
	}
	delete(r.of.open[r.rank], r)
	return nil
}

func (r *result) Value() (any, error) { return r.v, nil }

// count is how many of a rank's are not closed.
func (r *results) count(rank int) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.open[rank])
}

// failedThere instead of a value: the call has failed on the rank; absent: it has never had one.
type (
	failedThere struct{}
	absent      struct{}
)

// had is a handle and its expected value.
type had struct {
	h      *session.Handle
	on     []any // by rank: a value, failedThere, or absent
	made   bool  // by "make"
	errors int   // ranks on which its call has failed
	waited bool
	dead   bool
}

// TestStories: any calls, copies, waits and kills, against a model of each rank's values, of the errors of each
// call, and of the errors of Sync. After each Sync nothing is under way, and the ranks have the handles that the
// controller names.
func TestStories(t *testing.T) {
	for seed := range uint64(6) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			const n = 3
			c := testcluster.Start(t, testcluster.Options{Servers: n, Over: over[seed%3]})
			made := &results{open: make([]map[*result]bool, n)}
			for r := range n {
				made.open[r] = map[*result]bool{}
			}
			ended := serve(t, c, func(rank int, r *session.Rank) {
				standard(t)(rank, r)
				register(t, r, "make", func(_ context.Context, args []any) (any, error) {
					x := &result{made, rank, args[0].(int64) + int64(rank)}
					made.mu.Lock()
					defer made.mu.Unlock()
					made.open[rank][x] = true
					return x, nil
				})
			})
			s, ctx := open(t, c), limit(t)
			rng := rand.New(rand.NewPCG(seed, 9))
			var all []*had
			pick := func() *had { // one in use
				for range 20 {
					if len(all) > 0 {
						if x := all[rng.IntN(len(all))]; !x.dead {
							return x
						}
					}
				}
				return nil
			}
			add := func(h *session.Handle, err error, on func(rank int) any) *had {
				t.Helper()
				if err != nil {
					t.Fatal(err)
				}
				x := &had{h: h}
				for r := range n {
					x.on = append(x.on, on(r))
					if (x.on[r] == failedThere{}) {
						x.errors++
					}
				}
				if len(all) > 0 && h.ID() <= all[len(all)-1].h.ID() {
					t.Fatalf("handle %d after %d", h.ID(), all[len(all)-1].h.ID())
				}
				all = append(all, x)
				return x
			}
			is := func(v any) bool { return v != failedThere{} && v != absent{} }
			ranksOf := func(err error) (l []int) { // on which err says that something has failed
				for r := range n {
					if err != nil && strings.Contains(err.Error(), fmt.Sprintf("rank %d (server %d", r, r)) {
						l = append(l, r)
					}
				}
				return l
			}
			failing := func(x *had) (l []int) {
				for r, v := range x.on {
					if (v == failedThere{}) {
						l = append(l, r)
					}
				}
				return l
			}
			owed := func() (l []*had) { // handles whose errors have not been returned by a wait
				for _, x := range all {
					if x.errors > 0 && !x.waited {
						l = append(l, x)
					}
				}
				return l
			}
			sync := func() {
				t.Helper()
				l := owed()
				err := s.Sync(ctx)
				if (err != nil) != (len(l) > 0) {
					t.Fatalf("Sync: %v, want the errors of %d calls", err, len(l))
				}
				for _, x := range l {
					if x.waited = true; !strings.Contains(err.Error(), fmt.Sprintf("call %d,", x.h.ID()-1)) {
						t.Fatalf("Sync: %v, want the error of call %d, too", err, x.h.ID()-1)
					}
				}
				vantest.Eventually(t, 20*time.Second, "nothing is left behind Sync", func() bool { return s.Left() == "" }) // calls go a little later than they end
				live := 0
				for _, x := range all {
					if !x.dead {
						live++
					}
				}
				if s.Live() != live {
					t.Fatalf("%d handles are in use, want %d", s.Live(), live)
				}
				for r := range n {
					var want []uint64
					open := 0
					for _, x := range all {
						if !x.dead && is(x.on[r]) {
							want = append(want, x.h.ID())
							if x.made {
								open++
							}
						}
					}
					if got := must[[]uint64](t)(s.Handles(ctx, r)); !slices.Equal(got, want) {
						t.Fatalf("rank %d has %d, want %d", r, got, want)
					}
					if got := made.count(r); got != open {
						t.Fatalf("rank %d has %d results that are not closed, want %d", r, got, open)
					}
				}
			}
			for range 400 {
				v := any(rng.Int64N(1000))
				switch rng.IntN(13) {
				case 0:
					x := pick()
					if x == nil || x.made { // two handles would close the same result
						break
					}
					h, err := s.Call(ctx, "same", x.h)
					add(h, err, func(r int) any {
						if is(x.on[r]) {
							return x.on[r]
						}
						return failedThere{}
					})
				case 1:
					h, err := s.Call(ctx, "same", v)
					add(h, err, func(int) any { return v })
				case 2:
					bad := rng.IntN(n + 1)
					h, err := s.Call(ctx, "fail on", bad)
					add(h, err, func(r int) any {
						if r == bad {
							return failedThere{}
						}
						return int64(1)
					})
				case 3:
					h, err := s.Call(ctx, "make", v)
					add(h, err, func(r int) any { return v.(int64) + int64(r) }).made = true
				case 4:
					h, err := s.CopyTo(ctx, v)
					add(h, err, func(r int) any {
						if r == 0 {
							return v
						}
						return absent{}
					})
				case 5:
					x := pick()
					if x == nil {
						break
					}
					h, err := s.Broadcast(ctx, x.h)
					if !is(x.on[0]) {
						if err == nil || !slices.Equal(ranksOf(err), []int{0}) {
							t.Fatalf("a broadcast of what rank 0 has not: %v", err)
						}
						break
					}
					add(h, err, func(int) any { return x.on[0] })
				case 6:
					x, r := pick(), rng.IntN(n)
					if x == nil || x.made {
						break
					}
					if err := s.Set(ctx, x.h, r, v); err != nil {
						t.Fatal(err)
					}
					x.on[r] = v
				case 7, 8:
					x, r := pick(), rng.IntN(n)
					if x == nil {
						break
					}
					got, err := s.Get(ctx, x.h, r)
					if is(x.on[r]) != (err == nil) || err == nil && !reflect.DeepEqual(got, x.on[r]) || err != nil && !slices.Equal(ranksOf(err), []int{r}) {
						t.Fatalf("rank %d has %v, %v, want %v", r, got, err, x.on[r])
					}
				case 9:
					x := pick()
					if x == nil {
						break
					}
					failed := failing(x)
					if len(failed) != x.errors { // a Set has put something there since
						break
					}
					err := x.h.Wait(ctx)
					if !slices.Equal(ranksOf(err), failed) {
						t.Fatalf("call %d: %v, want an error of ranks %d", x.h.ID()-1, err, failed)
					}
					x.waited = true
				case 10:
					if x := pick(); x != nil {
						s.Kill(x.h, nil, x.h)
						x.dead = true
						if _, err := s.Call(ctx, "same", x.h); !errors.Is(err, van.ErrInvalid) {
							t.Fatalf("a handle that was killed: %v", err)
						}
						if _, err := s.Get(ctx, x.h, 0); !errors.Is(err, van.ErrInvalid) {
							t.Fatalf("a handle that was killed: %v", err)
						}
					}
				case 11:
					ended, cancel := context.WithCancel(ctx)
					cancel()
					if x := pick(); x != nil && !x.waited {
						if err := x.h.Wait(ended); err == nil || !errors.Is(err, context.Canceled) {
							x.waited = true // it had ended before
						}
					}
				case 12:
					sync()
				}
				if len(owed()) > 12 {
					sync()
				}
			}
			sync()
			works(t, s, ended)
			for r := range n {
				for end := time.Now().Add(20 * time.Second); made.count(r) > 0; {
					if time.Now().After(end) {
						t.Fatalf("rank %d has %d results that are not closed behind the end", r, made.count(r))
					}
				}
			}
		})
	}
}
