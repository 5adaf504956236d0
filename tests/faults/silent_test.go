package faults

import (
	"bytes"
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/testcluster"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/internal/nodetest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/vantest"
)

// vans runs test over every transport, plain and with PS_RESEND.
func vans(t *testing.T, test func(t *testing.T, o testcluster.Options)) {
	for _, over := range []testcluster.Transport{testcluster.InProc, testcluster.TCP, testcluster.SHM} {
		for _, resend := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s resend %t", over, resend), func(t *testing.T) {
				test(t, testcluster.Options{Over: over, Set: func(c *postoffice.Config) { c.Resend, c.ResendTimeout = resend, 100*time.Millisecond }})
			})
		}
	}
}

// TestNoAnswer: a server that does not answer in time is named in the error, with
// the time and the limit. From then on the tensors are the caller's: an answer
// that comes too late changes none of them.
func TestNoAnswer(t *testing.T) {
	vans(t, func(t *testing.T, o testcluster.Options) {
		t.Parallel()
		o.Servers = 2
		c := testcluster.Start(t, o)
		nodetest.Server(t, c.Servers[0], nodetest.Echoes(t))
		late := make(chan af.Batch, 1)
		nodetest.Server(t, c.Servers[1], func(b af.Batch) {
			if bytes.Equal(b.Pushes()[0].Val.Bytes(), []byte("never")) {
				late <- b
				return
			}
			nodetest.Echoes(t)(b)
		})
		w := nodetest.Worker(t, c.Workers[0])
		const limit = time.Second // in which server 0 answers
		hurried, err := af.NewWorker(c.Workers[0], af.WorkerOptions{CustomerID: 1, Timeout: limit})
		if err != nil {
			t.Fatal(err)
		}
		for _, x := range []struct {
			name     string
			w        *af.Worker
			opts     []af.CallOption
			ctx      context.Context
			sentinel error
			texts    []string
		}{
			{"Within", w, []af.CallOption{af.Within(limit)}, t.Context(), van.ErrTimeout, []string{"(limit 1s)"}},
			{"Timeout", hurried, nil, t.Context(), van.ErrTimeout, []string{"(limit 1s)"}},
			{"deadline", w, nil, nil, context.DeadlineExceeded, []string{van.ErrTimeout.Error()}},
		} {
			if x.ctx == nil {
				x.ctx = nodetest.Within(t, limit)
			}
			h, pulls, err := request(x.w, 2, []byte("never"), x.opts...)
			if err != nil {
				t.Fatal(err)
			}
			began := time.Now()
			err = h.Wait(x.ctx)
			if d := time.Since(began); d > soon {
				t.Errorf("%s: waited %s", x.name, d)
			}
			vantest.Fails(t, err, x.sentinel, append(x.texts, "worker 0 (id 9): push_pull", fmt.Sprintf("handler %d: no answer from server 1 (id 10) at 127.0.0.1:", h.Timestamp()),
				"of 2 answers missing)", "after ")...)
			vantest.Fails(t, err, van.ErrTimeout)
			if bytes.Contains([]byte(err.Error()), []byte("server 0")) {
				t.Errorf("%s: %q names a server that has answered", x.name, err)
			}
			copy(pulls[1], "mine!")
			select {
			case b := <-late:
				if err := nodetest.Echo(b); err != nil {
					t.Error(err)
				}
			case <-time.After(20 * time.Second):
				t.Fatalf("%s: server 1 has not got the request", x.name)
			}
			work(t, 2, w) // comes after the late answer on the same connection
			if string(pulls[1]) != "mine!" {
				t.Errorf("%s: a late answer has written %q to a tensor that is the caller's again", x.name, pulls[1])
			}
			vantest.Fails(t, h.Wait(t.Context()), postoffice.ErrUnknownHandler)
		}
		// A wait that the caller ends is no timeout.
		h, _, err := request(w, 2, []byte("never"))
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		go func() {
			b := <-late
			cancel()
			b.Release() // will never be answered
		}()
		vantest.Fails(t, h.Wait(ctx), context.Canceled, "no answer from ", "server 1 (id 10)")
		work(t, 2, w)
		c.Finalize(t)
	})
}
