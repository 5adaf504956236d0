package cluster_test

import (
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
)

// taker records the answers that it receives.
type taker struct {
	request
	took [][2]int
	err  error // of the next answer
}

func (r *taker) Answer(i, from int, _ *van.Message) error {
	r.took = append(r.took, [2]int{i, from})
	return r.err
}

// TestRequestModel sends answers, losses and invalid messages to requests of many sizes, and compares them with a
// table of owed answers: the accepted answers and their kinds, the end of the request and its error, and the
// requests in flight before and after.
func TestRequestModel(t *testing.T) {
	x := customer(t, testcluster.Start(t, testcluster.Options{}))
	rng := rand.New(rand.NewPCG(10, 4))
	lost, wrong := errors.New("it is lost"), errors.New("it makes no sense")
	r := &taker{request: *newRequest()}
	for round := range 400 {
		n := 1 + rng.IntN(5)
		var ids []int
		for k := range 1 + rng.IntN(3) + rng.IntN(2)*rng.IntN(130) {
			ids = append(ids, 1008+2*k)
		}
		type debt struct {
			i  int
			id int
		}
		owed := map[debt]bool{}
		for i := range n {
			for _, id := range ids {
				owed[debt{i, id}] = true
			}
		}
		shuffled := slices.Clone(ids)
		rng.Shuffle(len(ids), func(i, k int) { shuffled[i], shuffled[k] = shuffled[k], shuffled[i] })
		if err := x.Open(&r.Request, "test", r, n, shuffled); err != nil {
			t.Fatal(err)
		}
		r.took, r.err = r.took[:0], nil
		first := r.First()
		if ts, requests, places := x.InUse(); ts != n || requests != 1 || places != n {
			t.Fatalf("round %d: %d timestamps of %d requests in %d places are in flight, want %d of 1", round, ts, requests, places, n)
		}
		var ended bool
		var want error
		answer := func(i, id int) {
			t.Helper()
			before := len(r.took)
			err := x.Answer(id, first+int32(i))
			k, known := slices.BinarySearch(ids, id)
			switch {
			case ended || i < 0 || i >= n:
				if !errors.Is(err, cluster.ErrLate) {
					t.Errorf("round %d: answer %d of %d, which is late: %v", round, i, id, err)
				}
			case !known || !owed[debt{i, id}]:
				if !errors.Is(err, van.ErrMalformed) {
					t.Errorf("round %d: answer %d of %d, which does not owe it: %v", round, i, id, err)
				}
			case err != nil || len(r.took) != before+1 || r.took[before] != [2]int{i, k}:
				t.Errorf("round %d: answer %d of receiver %d: %v, taken as %v", round, i, k, err, r.took[before:])
			default:
				delete(owed, debt{i, id})
				if ended = len(owed) == 0 || r.err != nil; ended {
					want = r.err
				}
				return
			}
			if len(r.took) != before {
				t.Errorf("round %d: answer %d of %d was taken", round, i, id)
			}
		}
		failing := rng.IntN(3) == 0
		for !ended && !t.Failed() {
			i, id := rng.IntN(n), ids[rng.IntN(len(ids))]
			switch rng.IntN(12) {
			case 0:
				answer([]int{-1, n, n + 1}[rng.IntN(3)], id)
			case 1:
				answer(i, id+1) // that node was not asked
			case 2:
				if failing && rng.IntN(4) == 0 {
					r.err = wrong
				}
				answer(i, id)
			case 3:
				owes := false
				for i := range n {
					owes = owes || owed[debt{i, id}]
				}
				if !owes || failing {
					x.FailPeer(id, first, lost)
					if ended = owes; owes {
						want = lost
					}
				}
				x.FailPeer(id+1, first, lost)
			default: // the remaining ones, too
				for d := range owed {
					i, id = d.i, d.id
					break
				}
				answer(i, id)
			}
			select {
			case err := <-r.finished:
				if !ended || !errors.Is(err, want) || (err == nil) != (want == nil) {
					t.Errorf("round %d: finished with %v; ended %t, want %v", round, err, ended, want)
				}
			default:
				if ended {
					t.Errorf("round %d: it has not finished", round)
				}
			}
		}
		answer(0, ids[0])
		x.FailPeer(ids[0], first, errors.New("another loss, too late"))
		err := x.Wait(t.Context(), first, time.Second)
		if !errors.Is(err, want) || (err == nil) != (want == nil) {
			t.Errorf("round %d: Wait: %v, want %v", round, err, want)
		}
		<-r.recycled
		if ts, requests, places := x.InUse(); ts != 0 || requests != 0 || places != 0 {
			t.Fatalf("round %d: %d timestamps of %d requests in %d places stay in flight", round, ts, requests, places)
		}
		if t.Failed() {
			t.Fatalf("%d timestamps, %d receivers", n, len(ids))
		}
	}
}

// slowEnd is a Request whose Finished takes as long as the test wants.
type slowEnd struct {
	*request
	entered, release chan struct{}
}

func (r slowEnd) Finished(error) {
	close(r.entered)
	<-r.release
}

// TestDisplacedAfterItsEnd: a request is not recycled before Finished has returned, even if a WaitSlice ends
// meanwhile and 4096 others finish.
func TestDisplacedAfterItsEnd(t *testing.T) {
	x := customer(t, testcluster.Start(t, testcluster.Options{}))
	r := slowEnd{newRequest(), make(chan struct{}), make(chan struct{})}
	if err := x.Open(&r.Request, "test", r, 1, []int{van.ServerID(0)}); err != nil {
		t.Fatal(err)
	}
	var answer sync.WaitGroup
	answer.Go(func() {
		if err := x.Answer(van.ServerID(0), r.First()); err != nil {
			t.Error(err)
		}
	})
	<-r.entered
	vantest.Fails(t, x.WaitSlice(t.Context(), r.First(), 0, time.Nanosecond), cluster.ErrPending)
	for range 4096 {
		o := newRequest()
		if err := x.Open(&o.Request, "test", o, 1, nil); err != nil {
			t.Fatal(err)
		}
	}
	if len(r.recycled) > 0 {
		t.Error("recycled before Finished has returned")
	}
	close(r.release)
	answer.Wait()
	if err := x.Wait(t.Context(), r.First(), time.Minute); err != nil {
		t.Error(err)
	}
}
