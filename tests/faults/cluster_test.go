package faults

import (
	"bytes"
	"context"
	"fmt"
	"sync"
	"testing"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/tests/internal/nodetest"
	"github.com/stepaf/stepaf-go/tests/testcluster"
)

// request pushes x under key 1 and pulls as much from each server under key 2.
func request(w *af.Worker, servers int, x []byte, opts ...af.CallOption) (call af.Call, pulls [][]byte, err error) {
	push, err := af.FromSlice(x)
	if err != nil {
		return call, nil, err
	}
	pull := make([]af.KeyTensor, servers)
	pulls = make([][]byte, servers)
	for s := range pull {
		pulls[s] = make([]byte, len(x))
		pull[s].Key = 2
		if pull[s].Val, err = af.FromSlice(pulls[s]); err != nil {
			return call, nil, err
		}
	}
	call, err = w.PushPull([]af.KeyTensor{{Key: 1, Val: push}}, testcluster.PerServer(pull, servers), opts...)
	return call, pulls, err
}

// roundTrip makes a request of servers that echo, and compares.
func roundTrip(ctx context.Context, w *af.Worker, servers int, x []byte) error {
	h, pulls, err := request(w, servers, x)
	if err != nil {
		return err
	}
	if err := h.Wait(ctx); err != nil {
		return err
	}
	for s := range pulls {
		if !bytes.Equal(pulls[s], x) {
			return fmt.Errorf("server %d returned %q, want %q", s, pulls[s], x)
		}
	}
	return nil
}

// serveAll makes all servers of this process echo.
func serveAll(t testing.TB, c *testcluster.Cluster) {
	t.Helper()
	for _, n := range c.Servers {
		if n != nil {
			nodetest.Server(t, n, nodetest.Echoes(t))
		}
	}
}

// work checks that requests of all of ws are answered.
func work(t testing.TB, servers int, ws ...*af.Worker) {
	t.Helper()
	var wg sync.WaitGroup
	for i, w := range ws {
		wg.Go(func() {
			for k := range 5 {
				if err := roundTrip(t.Context(), w, servers, fmt.Appendf(nil, "worker %d round %d", i, k)); err != nil {
					t.Errorf("worker %d: %v", i, err)
				}
			}
		})
	}
	wg.Wait()
	if t.Failed() {
		t.FailNow()
	}
}
