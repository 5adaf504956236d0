package af_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/kv"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/hooks"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
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

// noCopies is a backend whose copies fail.
type noCopies struct{ backend.Backend }

func (noCopies) Copy(backend.Mem, backend.Mem) error { return errors.New("the device is gone") }

// TestRefuseUnusable: a server that cannot use a batch refuses it, and the worker's call fails at once.
func TestRefuseUnusable(t *testing.T) {
	hook := &hooks.Van{}
	c := testcluster.Start(t, testcluster.Options{
		Wrap: hook.Wrap("server", 0),
		Backend: func(role string, _ int) backend.Backend {
			if role == "server" {
				return noCopies{backend.NewCPU()}
			}
			return nil
		},
	})
	s := serve(t, c.Servers[0], func(b af.Batch) { _ = b.Respond(nil) })
	if err := s.RegisterRecvTensor(bytesOf(t, make([]byte, 4)), []int{0}, []uint64{1}); err != nil {
		t.Fatal(err)
	}
	w := newWorker(t, c.Workers[0])
	fails := func(text string, keys ...uint64) {
		t.Helper()
		var push []af.KeyTensor
		for _, k := range keys {
			push = append(push, af.KeyTensor{Key: k, Val: bytesOf(t, []byte("abcd"))})
		}
		h, err := w.PushPull(push, nil, af.Within(10*time.Second))
		if err == nil {
			err = h.Wait(t.Context())
		}
		vantest.Fails(t, err, van.ErrInvalid, "refused there: "+text)
	}
	fails("the device is gone", 1)
	fails("the device is gone", 2, 1)
	wrong := func(m *van.Message) hooks.Verdict {
		if len(m.Parts) > 0 {
			m.Parts[0].Shape[0]++
		} else {
			m.Shape[0]++
		}
		return hooks.Pass
	}
	hook.OnReceive(wrong)
	fails("push of key 2", 2)
	fails("push of key 2", 2, 3)
	hook.OnReceive(nil)
	push(t, w, 2, "abcd")
}

// TestRefuseWrongKind: a request for an application of another kind is refused.
func TestRefuseWrongKind(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	serve(t, c.Servers[0], func(b af.Batch) { _ = b.Respond(nil) })
	newWorker(t, c.Workers[0])
	asks := func(a *kv.SimpleApp, to *postoffice.Node, text string) {
		t.Helper()
		call, err := a.Request(3, nil, postoffice.NodeID(to.ID()))
		if err == nil {
			err = call.Wait(t.Context())
		}
		vantest.Fails(t, err, van.ErrInvalid, "refused there: "+text)
	}
	app := func(n *postoffice.Node, customer int) *kv.SimpleApp {
		a, err := kv.NewSimpleApp(n, kv.SimpleOptions{CustomerID: customer, Timeout: 10 * time.Second})
		if err != nil {
			t.Fatal(err)
		}
		return a
	}
	asks(app(c.Workers[0], 1), c.Servers[0], "tensor request")
	scheduler := app(c.Scheduler, 0)
	asks(scheduler, c.Servers[0], "data request from ")
	asks(scheduler, c.Workers[0], "a tensor worker serves no requests")
}
