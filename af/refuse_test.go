package af_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
)

// TestRefuse: a server refuses a batch, and the worker's call fails at once with the server's words.
func TestRefuse(t *testing.T) {
	testcluster.Over(t, func(t *testing.T, o testcluster.Options) {
		o.Servers = 2
		c := testcluster.Start(t, o)
		refuse := true
		got := make(chan error, 4)
		for i, n := range c.Servers {
			s, err := af.NewServer(n, af.ServerOptions{})
			if err == nil {
				err = s.Handle(func(b af.Batch) {
					if i == 0 || !refuse {
						if err := echo(b); err != nil {
							t.Error(err)
						}
						return
					}
					got <- b.Refuse(nil)
					got <- b.Refuse(fmt.Errorf("%w: expert %d is not here", van.ErrInvalid, b.Pushes()[0].Key))
					got <- b.Refuse(errors.New("again"))
					got <- b.Respond(nil)
				})
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		w, err := af.NewWorker(c.Workers[0], af.WorkerOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for range 3 {
			call, _ := ask(t, w, 2, "text")
			err := call.Wait(t.Context())
			vantest.Fails(t, err, van.ErrRequestRefused, "server 1 (id 10)", "request refused: expert 1 is not here")
			vantest.Fails(t, err, van.ErrInvalid)
			vantest.Fails(t, <-got, van.ErrInvalid, "no reason")
			if err := <-got; err != nil {
				t.Error(err)
			}
			vantest.Fails(t, <-got, postoffice.ErrAnswered)
			vantest.Fails(t, <-got, postoffice.ErrAnswered)
		}
		// Respond acknowledges a single push. Several pushes without a pull are acknowledged as they arrive.
		one := []af.KeyTensor{{Key: 1, Val: bytesOf(t, []byte("text"))}}
		call, err := w.PushPull(one, nil)
		if err == nil {
			err = call.Wait(t.Context())
		}
		for range 4 {
			<-got
		}
		vantest.Fails(t, err, van.ErrRequestRefused)
		two := append(one, af.KeyTensor{Key: 2, Val: bytesOf(t, []byte("text"))})
		if call, err = w.PushPull(two, nil); err == nil {
			err = call.Wait(t.Context())
		}
		if err != nil {
			t.Error(err)
		}
		<-got
		vantest.Fails(t, <-got, postoffice.ErrAnswered, "acknowledged as they arrive")
		<-got
		<-got
		refuse = false
		works(t, w, 2)
	}, testcluster.InProc, testcluster.TCP, testcluster.SHM)
}
