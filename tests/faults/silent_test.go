package faults

import (
	"bytes"
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/internal/nodetest"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
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
		for _, name := range []string{"Within", "Timeout", "deadline"} {
			for limit := time.Second; !noAnswer(t, c, w, late, name, limit) && !t.Failed(); limit *= 4 {
				if limit > 10*time.Second {
					t.Fatalf("%s: the error names a server that has answered, or the other one has not got the request", name)
				}
			}
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

// noAnswer makes a request to which server 1 does not answer within limit. It is false when this machine was too
// slow for server 0 to answer, or for server 1 to get the request, within it.
func noAnswer(t *testing.T, c *testcluster.Cluster, w *af.Worker, late <-chan af.Batch, name string, limit time.Duration) bool {
	t.Helper()
	ctx, asks, sentinel, text := t.Context(), w, van.ErrTimeout, fmt.Sprintf("(limit %s)", limit)
	var opts []af.CallOption
	switch name {
	case "Within":
		opts = append(opts, af.Within(limit))
	case "Timeout":
		var err error
		if asks, err = af.NewWorker(c.Workers[0], af.WorkerOptions{CustomerID: 1, Timeout: limit}); err != nil {
			t.Fatal(err)
		}
		defer asks.Close()
	default:
		ctx, sentinel, text = nodetest.Within(t, limit), context.DeadlineExceeded, van.ErrTimeout.Error()
	}
	h, pulls, err := request(asks, 2, []byte("never"), opts...)
	if err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	err = h.Wait(ctx)
	if d := time.Since(began); d > limit+soon {
		t.Errorf("%s: waited %s", name, d)
	}
	vantest.Fails(t, err, sentinel, text, "worker 0 (id 9): push_pull", fmt.Sprintf("handler %d: no answer from ", h.Timestamp()), "server 1 (id 10) at 127.0.0.1:",
		"of 2 answers missing)", "after ")
	vantest.Fails(t, err, van.ErrTimeout)
	copy(pulls[1], "mine!")
	select {
	case b := <-late:
		if err := nodetest.Echo(b); err != nil {
			t.Error(err)
		}
	case <-time.After(20 * time.Second):
		return false // it may have been canceled before server 1 had it
	}
	work(t, 2, w) // comes after the late answer on the same connection
	if string(pulls[1]) != "mine!" {
		t.Errorf("%s: a late answer has written %q to a tensor that is the caller's again", name, pulls[1])
	}
	vantest.Fails(t, h.Wait(t.Context()), postoffice.ErrUnknownHandler)
	return err == nil || !strings.Contains(err.Error(), "server 0")
}
