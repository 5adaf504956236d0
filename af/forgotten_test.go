package af_test

import (
	"runtime"
	"testing"
	"time"
	"weak"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
)

// TestClosedIsForgotten: a node that lives on keeps nothing of a worker or server that was closed.
func TestClosedIsForgotten(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	use := func() (weak.Pointer[af.Worker], weak.Pointer[af.Server]) {
		s, err := af.NewServer(c.Servers[0], af.ServerOptions{})
		if err == nil {
			err = s.Handle(echoes(t))
		}
		if err != nil {
			t.Fatal(err)
		}
		w, err := af.NewWorker(c.Workers[0], af.WorkerOptions{})
		if err != nil {
			t.Fatal(err)
		}
		works(t, w, 1)
		w.Close()
		s.Close()
		return weak.Make(w), weak.Make(s)
	}
	w, s := use()
	use() // a node may remember something of the last call
	vantest.Eventually(t, 5*time.Second, "a worker and a server that are closed leave the memory", func() bool {
		runtime.GC()
		return w.Value() == nil && s.Value() == nil
	})
}
