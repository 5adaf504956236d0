package nodetest

import (
	"testing"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/postoffice"
)

// Serve makes n a tensor server.
func Serve(n *postoffice.Node, h af.Handler) error {
	s, err := af.NewTensorServer(n, af.Options{})
	if err != nil {
		return err
	}
	return s.SetRequestHandle(h)
}

// Worker makes n a tensor worker, or ends the test.
func Worker(t testing.TB, n *postoffice.Node) *af.TensorWorker {
	t.Helper()
	w, err := af.NewTensorWorker(n, af.Options{})
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
	return b.Response(out, nil)
}
