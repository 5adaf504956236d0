package nodetest

import (
	"testing"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/postoffice"
)

// Serve makes n a tensor server.
func Serve(n *postoffice.Node, h af.Handler) error {
	s, err := af.NewServer(n, af.ServerOptions{})
	if err != nil {
		return err
	}
	return s.Handle(h)
}

// Server makes n a tensor server, or ends the test.
func Server(t testing.TB, n *postoffice.Node, h af.Handler) {
	t.Helper()
	if err := Serve(n, h); err != nil {
		t.Fatal(err)
	}
}

// Worker makes n a tensor worker, or ends the test.
func Worker(t testing.TB, n *postoffice.Node) *af.Worker {
	t.Helper()
	w, err := af.NewWorker(n, af.WorkerOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return w
}

// Echo answers each pull of a batch with its first push.
func Echo(b af.Batch) error {
	out := make([]af.KeyTensor, len(b.Pulls()))
	for i, p := range b.Pulls() {
		out[i] = af.KeyTensor{Key: p.Key, Val: b.Pushes()[0].Val}
	}
	return b.Respond(out, af.ByKey)
}

// Echoes is Echo as a handler, whose errors fail the test.
func Echoes(t testing.TB) af.Handler {
	return func(b af.Batch) {
		if err := Echo(b); err != nil {
			t.Error(err)
		}
	}
}
