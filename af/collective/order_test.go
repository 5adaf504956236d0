package collective

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	core "github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/internal/commlayer"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/van"
)

// asked notes whom each node asks, by its role and rank.
type asked struct {
	sync.Mutex
	of map[string][]int
}

// askedVan is a van around another one that notes the requests of a communicator.
type askedVan struct {
	van.Van
	who string
	all *asked
}

func (v *askedVan) Unwrap() van.Van { return v.Van }

func (v *askedVan) Send(m *van.Message) error {
	if !m.IsControl() && m.Request {
		v.all.Lock()
		v.all.of[v.who] = append(v.all.of[v.who], m.Receiver)
		v.all.Unlock()
	}
	return v.Van.Send(m)
}

// TestOrderPolicy: a policy changes in which order ranks are asked from the next call on, on the
// ranks that have it, and no result.
func TestOrderPolicy(t *testing.T) {
	const n = 4
	seen := &asked{of: map[string][]int{}}
	all, cluster := comms(t, testcluster.Options{Over: testcluster.TCP, Wrap: func(role string, rank int, f van.Factory) van.Factory {
		return func(o van.Options) (van.Van, error) {
			v, err := f(o)
			return &askedVan{v, fmt.Sprint(role, rank), seen}, err
		}
	}}, n)
	order := func(want map[int][]int) {
		t.Helper()
		seen.Lock()
		clear(seen.of)
		seen.Unlock()
		onAll(t, n, func(r int) error { return calls(all[r], memory{}, 1000, 1) })
		seen.Lock()
		clear(seen.of)
		seen.Unlock()
		onAll(t, n, func(r int) error {
			_, err := all[r].AllGather(zeros(400), filled(100, uint64(r)))
			return err
		})
		onAll(t, n, func(r int) error { return all[r].Barrier(t.Context()) })
		for r, w := range want {
			seen.Lock()
			got := slices.Clone(seen.of[fmt.Sprint("worker", r)])
			seen.Unlock()
			if len(got) < n-1 || !slices.Equal(got[:n-1], w) {
				t.Errorf("rank %d asks %v, want %v first", r, got, w)
			}
		}
	}
	order(map[int][]int{0: {11, 13, 15}, 1: {9, 13, 15}, 3: {9, 11, 13}})
	cfg := *cluster.Workers[0].Config()
	app, err := commlayer.AppOf(0)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if _, err := core.AskScheduler(ctx, &cfg, nil, fmt.Sprintf("set app=%d,order=ring", app)); err != nil {
		t.Fatal(err)
	}
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for r := range n {
		for all[r].b.node.Order(app) != "ring" {
			select {
			case <-tick.C:
			case <-ctx.Done():
				t.Fatalf("rank %d has no order", r)
			}
		}
	}
	order(map[int][]int{0: {11, 13, 15}, 1: {13, 15, 9}, 2: {15, 9, 11}, 3: {9, 11, 13}})
}
