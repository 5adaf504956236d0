package kv_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/internal/datamsg"
	"github.com/stepaf/stepaf-go/kv"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// vans runs a test over every transport that needs no device.
func vans(t *testing.T, f func(t *testing.T, o testcluster.Options)) {
	t.Helper()
	testcluster.Over(t, f, testcluster.InProc, testcluster.TCP, testcluster.SHM)
}

func newWorker[V kv.Value](t testing.TB, n *postoffice.Node) *kv.Worker[V] {
	t.Helper()
	w, err := kv.NewWorker[V](n, kv.WorkerOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return w
}

func serve[V kv.Value](t testing.TB, n *postoffice.Node, h kv.Handler[V]) *kv.Server[V] {
	t.Helper()
	s, err := kv.NewServer[V](n, kv.ServerOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Handle(h); err != nil {
		t.Fatal(err)
	}
	return s
}

// sums makes all servers of the cluster sum.
func sums[V kv.Value](t testing.TB, c *testcluster.Cluster) []*kv.SummingHandler[V] {
	t.Helper()
	var hs []*kv.SummingHandler[V]
	for _, n := range c.Servers {
		h := &kv.SummingHandler[V]{}
		serve(t, n, h.Handle)
		hs = append(hs, h)
	}
	return hs
}

// do waits for a request just made.
func do[V kv.Value](t testing.TB, w *kv.Worker[V]) func(call kv.Call, err error) {
	return func(call kv.Call, err error) {
		t.Helper()
		if err == nil {
			err = call.Wait(context.Background())
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// fails checks that err wraps want and contains all texts.
func fails(t testing.TB, err, want error, texts ...string) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("error %v, want one that wraps %q", err, want)
		return
	}
	for _, s := range texts {
		if !strings.Contains(err.Error(), s) {
			t.Errorf("error %q, want it to name %q", err, s)
		}
	}
}

// eventually waits until ok is true.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	vantest.Eventually(t, 10*time.Second, what, ok)
}

// rawServer answers requests as a script says, without any check.
type rawServer struct {
	n *postoffice.Node
}

// raw serves application 0 of n with script.
func raw(t testing.TB, n *postoffice.Node, script func(s *rawServer, req *van.Message)) {
	t.Helper()
	s := &rawServer{n}
	if _, err := (*cluster.Node)(n).App().AddCustomer(0, 0, func(m *van.Message) { script(s, m) }); err != nil {
		t.Fatal(err)
	}
}

// answer sends the answer to req after change has spoilt it.
func (s *rawServer) answer(t testing.TB, req *van.Message, keys []kv.Key, vals, lens any, change func(m *van.Message)) {
	m := &van.Message{}
	r := datamsg.ReplyTo(req)
	r.Fill(m)
	if keys != nil {
		datamsg.SetData(m, backend.Slice(keys), mem(vals), mem(lens), van.TypeFloat)
	}
	if change != nil {
		change(m)
	}
	if err := (*cluster.Node)(s.n).App().Send(m); err != nil {
		t.Errorf("raw answer: %v", err)
	}
}

func mem(x any) backend.Mem {
	switch x := x.(type) {
	case []float32:
		return backend.Slice(x)
	case []int32:
		return backend.Slice(x)
	case []byte:
		return backend.Bytes(x)
	}
	return backend.Mem{}
}
