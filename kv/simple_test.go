package kv_test

import (
	"context"
	"fmt"
	"slices"
	"sort"
	"sync"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/internal/testcluster"
	"github.com/stepaf/stepaf-go/kv"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van"
)

func simple(t testing.TB, n *postoffice.Node, h kv.SimpleHandler) *kv.SimpleApp {
	t.Helper()
	a, err := kv.NewSimpleApp(n, 7, 7, h)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func TestSimpleApp(t *testing.T) {
	vans(t, func(t *testing.T, o testcluster.Options) {
		o.Workers, o.Servers, o.Group = 1, 2, 2
		c := testcluster.Start(t, o)
		apps := map[int]*kv.SimpleApp{}
		for _, n := range c.Nodes() {
			apps[n.ID()] = simple(t, n, func(d kv.SimpleData, a *kv.SimpleApp) {
				if err := a.Response(d, fmt.Appendf(nil, "%s from %d", d.Body, n.ID())); err != nil {
					t.Error(err)
				}
			})
		}
		servers, workers := []int{8, 10, 12, 14}, []int{9, 11}
		for _, x := range []struct {
			from, to int
			want     []int
		}{
			{9, van.ServerGroup, servers}, {9, 12, []int{12}}, {9, van.SchedulerID, []int{1}}, {9, 9, []int{9}},
			{9, van.ServerGroup | van.SchedulerID, append([]int{1}, servers...)},
			{10, van.WorkerGroup, workers}, {10, 11, []int{11}}, {10, 10, []int{10}},
			{1, van.AllNodes, append([]int{1, 9, 11}, servers...)}, {1, van.SchedulerID, []int{1}}, {1, van.WorkerGroup, workers},
		} {
			var mu sync.Mutex
			var got []int
			a := apps[x.from]
			body := fmt.Sprintf("from %d to %d", x.from, x.to)
			a.SetResponseHandle(func(d kv.SimpleData, _ *kv.SimpleApp) {
				if want := fmt.Sprintf("%s from %d", body, d.Sender); d.Head != -42 || string(d.Body) != want || d.CustomerID != 7 {
					t.Errorf("answer %+v, want head -42 and body %q", d, want)
				}
				mu.Lock()
				got = append(got, d.Sender)
				mu.Unlock()
			})
			ts, err := a.Request(-42, []byte(body), x.to)
			if err == nil {
				err = a.Wait(t.Context(), ts)
			}
			if err != nil {
				t.Fatalf("%s: %v", body, err)
			}
			sort.Ints(got)
			slices.Sort(x.want)
			if !slices.Equal(got, x.want) {
				t.Errorf("%s: answers of %v, want %v", body, got, x.want)
			}
		}
		for _, x := range []struct {
			from, to int
			names    string
		}{
			{9, 0, "0"}, {9, -3, "-3"}, {9, 16, "16"}, {9, 13, "13"}, {9, van.WorkerGroup, "worker 1 (id 11)"}, {10, 8, "server 0 (id 8)"},
		} {
			_, err := apps[x.from].Request(1, nil, x.to)
			fails(t, err, van.ErrInvalid, x.names)
		}
		c.Finalize(t)
	})
}

func TestSimpleAppDefaults(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	a, b := simple(t, c.Workers[0], nil), simple(t, c.Servers[0], nil)
	got := make(chan kv.SimpleData, 1)
	a.SetResponseHandle(func(d kv.SimpleData, _ *kv.SimpleApp) { got <- d })
	ts, err := a.Request(5, []byte("x"), van.ServerGroup)
	if err == nil {
		err = a.Wait(t.Context(), ts)
	}
	if d := <-got; err != nil || d.Head != 5 || len(d.Body) != 0 || d.Sender != 8 {
		t.Errorf("%+v, %v: want an empty answer", d, err)
	}
	// One that does not answer.
	b.SetRequestHandle(func(kv.SimpleData, *kv.SimpleApp) {})
	if ts, err = a.Request(5, nil, van.ServerGroup); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	fails(t, a.Wait(ctx, ts), van.ErrTimeout, "server 0")
	// One that is gone.
	if ts, err = a.Request(5, nil, 8); err != nil {
		t.Fatal(err)
	}
	c.Servers[0].Close()
	fails(t, a.Wait(t.Context(), ts), van.ErrPeerLost, "server 0")
	a.Close()
	_, err = kv.NewSimpleApp(c.Workers[0], 7, 7, nil)
	if err != nil {
		t.Errorf("new application after Close: %v", err)
	}
}

// TestSimpleOfKV exchanges small messages under the ids of a key-value
// application.
func TestSimpleOfKV(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	var h kv.SummingHandler[int32]
	s, err := kv.NewServer[int32](c.Servers[0], 0)
	if err != nil {
		t.Fatal(err)
	}
	_, err = s.SimpleApp().Request(1, nil, van.WorkerGroup)
	fails(t, err, van.ErrInvalid, "request handle")
	s.SimpleApp().SetRequestHandle(func(d kv.SimpleData, a *kv.SimpleApp) {
		if err := a.Response(d, []byte("ok")); err != nil {
			t.Error(err)
		}
	})
	if err := s.SetRequestHandle(h.Handle); err != nil {
		t.Fatal(err)
	}
	w := newWorker[int32](t, c.Workers[0])
	var body string
	w.SimpleApp().SetResponseHandle(func(d kv.SimpleData, _ *kv.SimpleApp) { body = string(d.Body) })
	for range 3 {
		do(t, w)(w.Push([]kv.Key{1}, []int32{1}))
		do(t, w)(w.SimpleApp().Request(3, []byte("?"), van.ServerGroup))
	}
	if body != "ok" {
		t.Errorf("answer %q", body)
	}
	ts, err := s.SimpleApp().Request(4, nil, 9)
	if err == nil {
		err = s.SimpleApp().Wait(t.Context(), ts)
	}
	if err != nil {
		t.Error(err)
	}
	c.Finalize(t)
}
