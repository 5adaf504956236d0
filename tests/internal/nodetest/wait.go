package nodetest

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/postoffice"
)

// Within is a context of the test that ends after d.
func Within(t testing.TB, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

// GoesOn waits until ok reports true. It ends the test when the counter that sign returns
// has not changed for d.
func GoesOn(t testing.TB, d time.Duration, what string, sign func() uint64, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	last, at := sign(), time.Now()
	for !ok() {
		<-tick.C
		if now := sign(); now != last {
			last, at = now, time.Now()
		} else if time.Since(at) > d {
			t.Fatalf("%s: not yet, and nothing has changed for %s", what, d)
		}
	}
}

// Returns waits until peer id of all nodes is there again, after join has made it
// come.
func Returns[ID ~int](t testing.TB, nodes []*postoffice.Node, id ID, join func()) {
	t.Helper()
	var waits []chan struct{}
	for _, n := range nodes {
		back := make(chan struct{}, 16)
		defer n.OnPeer(func(i postoffice.NodeID, up bool, _ error) {
			if int(i) == int(id) && up {
				back <- struct{}{}
			}
		})()
		waits = append(waits, back)
	}
	join()
	limit := time.After(patience)
	for i, back := range waits {
		select {
		case <-back:
		case <-limit:
			t.Fatalf("%s: node %d did not come back", nodes[i].Name(), id)
		}
	}
}

// Together calls f concurrently for all nodes (or other values with a node's name), and
// ends the test if a call fails.
func Together[T interface{ Name() string }](t testing.TB, all []T, f func(x T) error) {
	t.Helper()
	var wg sync.WaitGroup
	for _, x := range all {
		wg.Go(func() {
			if err := f(x); err != nil {
				t.Errorf("%s: %v", x.Name(), err)
			}
		})
	}
	wg.Wait()
	if t.Failed() {
		t.FailNow()
	}
}

// Repeat calls f with 0, 1, 2 and so on in a goroutine, until stop is called,
// which waits for the last call, or the test ends. An error of f fails the test.
func Repeat(t testing.TB, name string, f func(i int) error) (stop func()) {
	over := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-over:
				return
			default:
			}
			if err := f(i); err != nil {
				t.Errorf("%s, round %d: %v", name, i, err)
				return
			}
		}
	})
	stop = sync.OnceFunc(func() {
		close(over)
		wg.Wait()
	})
	t.Cleanup(stop)
	return stop
}
