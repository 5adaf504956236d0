package kv_test

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/kv"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/hooks"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/van"
)

// TestOnSentOfARefusedAnswer: OnSent's function is not called for an answer that the transport has refused:
// Respond has returned the error. The worker's call fails with it at once.
func TestOnSentOfARefusedAnswer(t *testing.T) {
	vans(t, func(t *testing.T, o testcluster.Options) {
		hook := &hooks.Van{}
		o.Wrap = hook.Wrap("server", 0)
		c := testcluster.Start(t, o)
		var sent counter
		answered := make(chan error, 1)
		serve(t, c.Servers[0], func(r kv.Request[float32]) {
			keys := r.Keys // with the request's own keys the answer holds its message
			if r.Cmd == 1 {
				keys = append([]kv.Key(nil), keys...)
			}
			answered <- r.Respond(kv.Pairs[float32]{Keys: keys, Vals: make([]float32, len(keys))}, kv.OnSent(&sent))
		})
		hook.OnSend(func(m *van.Message) hooks.Verdict {
			if m.Frames > 0 {
				return hooks.Refuse(van.ErrQueueFull)
			}
			return hooks.Pass
		})
		w := newWorker[float32](t, c.Workers[0])
		for cmd := range int32(2) {
			var got []float32
			done := make(chan error, 1)
			if _, err := w.Pull(make64(), &got, kv.Cmd(cmd), kv.Done(func(err error) { done <- err })); err != nil {
				t.Fatal(err)
			}
			fails(t, <-answered, van.ErrQueueFull)
			fails(t, <-done, van.ErrQueueFull, "request refused", "server 0 (id 8)")
			eventually(t, "end of the request", func() bool { return hook.Held() == 0 })
			if n := sent.n.Load(); n != 0 {
				t.Errorf("command %d: told %d times that the answer has left", cmd, n)
			}
		}
	})
}

// TestAnswerWithKeysAsValues: the values of an answer may be the request's keys, which stay valid until the answer has left.
func TestAnswerWithKeysAsValues(t *testing.T) {
	hook := &hooks.Van{}
	c := testcluster.Start(t, testcluster.Options{Wrap: hook.Wrap("server", 0)})
	serve(t, c.Servers[0], func(r kv.Request[uint64]) {
		if err := r.Respond(kv.Pairs[uint64]{Keys: append([]kv.Key(nil), r.Keys...), Vals: r.Keys}); err != nil {
			t.Error(err)
		}
	})
	w := newWorker[uint64](t, c.Workers[0])
	hook.OnSend(func(*van.Message) hooks.Verdict { return hooks.Keep })
	var got []uint64
	call, err := w.Pull([]kv.Key{5, 7}, &got)
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the answer", func() bool { return len(hook.Kept()) == 1 })
	if hook.Kept()[0].Done == nil {
		t.Error("the answer does not hold the request's message")
	}
	hook.OnSend(nil)
	if err := cmp.Or(hook.SendKept(), call.Wait(t.Context())); err != nil || !slices.Equal(got, []uint64{5, 7}) {
		t.Errorf("%v, values are %d, want 5 and 7", err, got)
	}
	eventually(t, "end of the request", func() bool { return hook.Held() == 0 })
}

// TestPushNotAnswered: if the transport refuses the answer to a push, the worker's call fails at once. Its error differs from those of a push
// that was not processed: the worker would repeat the push.
func TestPushNotAnswered(t *testing.T) {
	vans(t, func(t *testing.T, o testcluster.Options) {
		hook := &hooks.Van{}
		o.Wrap = hook.Wrap("server", 0)
		c := testcluster.Start(t, o)
		answered := make(chan error, 1)
		serve(t, c.Servers[0], func(r kv.Request[float32]) { answered <- r.Respond(kv.Pairs[float32]{}) })
		w := newWorker[float32](t, c.Workers[0])
		for _, why := range []error{van.ErrQueueFull, van.ErrPeerLost} {
			hook.OnSend(func(*van.Message) hooks.Verdict { return hooks.Refuse(why) })
			push, err := w.Push([]kv.Key{7}, []float32{1})
			err = cmp.Or(err, push.Wait(t.Context()))
			if err == nil || !strings.Contains(err.Error(), "the request was processed, but its answer was not sent: "+why.Error()) {
				t.Errorf("the push fails with %v, want the reason of the missing answer", err)
			}
			for _, not := range []error{postoffice.ErrFinished, postoffice.ErrRequestRefused, postoffice.ErrQueueFull} {
				if errors.Is(err, not) {
					t.Errorf("%v matches %v", err, not)
				}
			}
			fails(t, <-answered, why)
		}
	})
}

// TestDefaultAnswerRefused: the calls of a worker fail at once if the summing handler, or an application without a handler, cannot answer
// since its queue is full.
func TestDefaultAnswerRefused(t *testing.T) {
	hook := &hooks.Van{}
	c := testcluster.Start(t, testcluster.Options{Wrap: hook.Wrap("server", 0)})
	sums[float32](t, c)
	w := newWorker[float32](t, c.Workers[0])
	hook.OnSend(func(*van.Message) hooks.Verdict { return hooks.Refuse(van.ErrQueueFull) })
	var got []float32
	push, err := w.Push([]kv.Key{7}, []float32{1})
	if err = cmp.Or(err, push.Wait(t.Context())); err == nil || errors.Is(err, van.ErrQueueFull) {
		t.Errorf("the push, which was added, fails with %v; want an error that does not match van.ErrQueueFull", err)
	}
	for _, request := range []func() (kv.Call, error){
		func() (kv.Call, error) { return w.Pull([]kv.Key{7}, &got) },
		func() (kv.Call, error) { return w.SimpleApp().Request(1, nil, c.Servers[0].ID()) },
	} {
		call, err := request()
		fails(t, cmp.Or(err, call.Wait(t.Context())), van.ErrQueueFull)
	}
}

// TestRefusedIsOver: after the first part that the transport refuses the others are not sent: the request has failed.
func TestRefusedIsOver(t *testing.T) {
	hook := &hooks.Van{}
	c := testcluster.Start(t, testcluster.Options{Servers: 3, Wrap: hook.Wrap("worker", 0)})
	var all []kv.Key
	for _, n := range c.Servers {
		serve(t, n, func(r kv.Request[float32]) { t.Errorf("a request for the keys %v came", r.Keys) })
	}
	for _, r := range c.Workers[0].Topology().ServerKeyRanges() {
		all = append(all, kv.Key(r.Begin))
	}
	hook.OnSend(func(m *van.Message) hooks.Verdict { return hooks.Refuse(van.ErrQueueFull) })
	w := newWorker[float32](t, c.Workers[0])
	before := hook.Sends()
	call, err := w.Push(all, make([]float32, len(all)))
	if err == nil {
		err = call.Wait(t.Context())
	}
	fails(t, err, van.ErrQueueFull)
	if n := hook.Sends() - before; n != 1 {
		t.Errorf("%d messages were to be sent, want 1", n)
	}
}

// TestNotTaken: a request that the server cannot take fails its worker's call at once, with the reason.
func TestNotTaken(t *testing.T) {
	vans(t, func(t *testing.T, o testcluster.Options) {
		o.Workers = 2
		c := testcluster.Start(t, o)
		s, err := kv.NewServer[float32](c.Servers[0], kv.ServerOptions{})
		if err == nil {
			err = s.RegisterRecvBuffer(0, 10, make([]float32, 2))
		}
		if err == nil {
			err = s.Handle(func(r kv.Request[float32]) {
				if err := r.Respond(kv.Pairs[float32]{}); err != nil {
					t.Error(err)
				}
			})
		}
		if err != nil {
			t.Fatal(err)
		}
		w := newWorker[float32](t, c.Workers[0])
		call, err := w.Push([]kv.Key{10}, make([]float32, 3))
		fails(t, cmp.Or(err, call.Wait(t.Context())), van.ErrInvalid, "refused there: worker 0 (id 9) pushed 12 bytes under key 10, the registered receive buffer has 8")
		do(t, w)(w.Push([]kv.Key{10}, make([]float32, 2)))
		other := newWorker[int32](t, c.Workers[1])
		call, err = other.Push([]kv.Key{10}, make([]int32, 2))
		fails(t, cmp.Or(err, call.Wait(t.Context())), van.ErrInvalid, "refused there: values of data type int32, want float32")
		testcluster.Counted(t, c.Servers[0], postoffice.Stats{InvalidRequests: 2})
	})
}

// TestRefuse: a handler refuses a request, and the worker's call fails at once with the handler's words. A request
// is answered or refused once.
func TestRefuse(t *testing.T) {
	vans(t, func(t *testing.T, o testcluster.Options) {
		c := testcluster.Start(t, o)
		got := make(chan error, 4)
		serve(t, c.Servers[0], func(r kv.Request[float32]) {
			res := kv.Pairs[float32]{}
			if !r.Push {
				res = kv.Pairs[float32]{Keys: r.Keys, Vals: make([]float32, len(r.Keys))}
			}
			switch r.Cmd {
			case 0:
				got <- r.Respond(res)
				got <- r.Refuse(errors.New("too late"))
			case 1:
				got <- r.Refuse(nil)
				got <- r.Refuse(errors.New("key 7 is locked\nuntil noon"))
				got <- r.Refuse(errors.New("again"))
				got <- r.Respond(res)
			case 2: // later, from another goroutine
				go func() { got <- r.Refuse(fmt.Errorf("%w: key 7", van.ErrInvalid)) }()
			}
		})
		w := newWorker[float32](t, c.Workers[0])
		var vals []float32
		call := func(cmd int32, push bool) error {
			var x kv.Call
			var err error
			if push {
				x, err = w.Push([]kv.Key{7}, []float32{1}, kv.Cmd(cmd))
			} else {
				x, err = w.Pull([]kv.Key{7}, &vals, kv.Cmd(cmd))
			}
			return cmp.Or(err, x.Wait(t.Context()))
		}
		for _, push := range []bool{true, false} {
			if err := call(0, push); err != nil {
				t.Error(err)
			}
			if err := <-got; err != nil {
				t.Error(err)
			}
			fails(t, <-got, postoffice.ErrAnswered)

			err := call(1, push)
			fails(t, err, van.ErrRequestRefused, "server 0 (id 8)", "request refused: key 7 is locked until noon")
			if errors.Is(err, van.ErrInvalid) {
				t.Errorf("%v, which does not match van.ErrInvalid", err)
			}
			fails(t, <-got, van.ErrInvalid, "no reason")
			if err := <-got; err != nil {
				t.Error(err)
			}
			fails(t, <-got, postoffice.ErrAnswered)
			fails(t, <-got, postoffice.ErrAnswered)

			err = call(2, push)
			fails(t, err, van.ErrRequestRefused, "request refused: key 7")
			fails(t, err, van.ErrInvalid)
			if err := <-got; err != nil {
				t.Error(err)
			}
		}
		if err := call(0, true); err != nil { // and serves on
			t.Error(err)
		}
	})
}

// TestOneOfThreeRefuses: a call to three servers fails when one refuses its part. The other servers are notified that the call is over.
func TestOneOfThreeRefuses(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{Servers: 3})
	var all []kv.Key
	held := make(chan kv.Request[float32], 2)
	for i, n := range c.Servers {
		serve(t, n, func(r kv.Request[float32]) {
			if i == 1 {
				if err := r.Refuse(errors.New("not here")); err != nil {
					t.Error(err)
				}
				return
			}
			held <- r
		})
	}
	for _, r := range c.Workers[0].Topology().ServerKeyRanges() {
		all = append(all, kv.Key(r.Begin))
	}
	w := newWorker[float32](t, c.Workers[0])
	var told counter
	call, err := w.Push(all, make([]float32, 3), kv.Done(func(error) { told.Sent() }))
	fails(t, cmp.Or(err, call.Wait(t.Context())), van.ErrRequestRefused, "server 1 (id 10)", "not here")
	if n := told.n.Load(); n != 1 {
		t.Errorf("Done's function was called %d times", n)
	}
	for range 2 { // an answer to a call that has failed does no harm
		r := <-held
		if err := r.Respond(kv.Pairs[float32]{}); err != nil {
			t.Error(err)
		}
	}
	if n := testcluster.InFlight(c.Workers[0]); n != 0 {
		t.Errorf("%d requests are in flight", n)
	}
}

// TestNeitherAnsweredNorRefused: if the handler neither answers nor refuses a request, the call ends at its limit.
func TestNeitherAnsweredNorRefused(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	serve(t, c.Servers[0], func(kv.Request[float32]) {})
	w := newWorker[float32](t, c.Workers[0])
	call, err := w.Push([]kv.Key{1}, []float32{1}, kv.Within(50*time.Millisecond))
	fails(t, cmp.Or(err, call.Wait(t.Context())), van.ErrTimeout, "no answer from server 0 (id 8)")
}

// TestDoneAtTheLimit: a request with Done and without a Wait ends at its limit, and its servers are notified.
func TestDoneAtTheLimit(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	requests := make(chan kv.Request[float32], 2)
	s := serve(t, c.Servers[0], func(r kv.Request[float32]) { requests <- r })
	simple := make(chan kv.SimpleMessage, 1)
	s.SimpleApp().Handle(func(m kv.SimpleMessage) { simple <- m })
	w, err := kv.NewWorker[float32](c.Workers[0], kv.WorkerOptions{Timeout: 2 * time.Second}) // the requests must arrive before
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 3)
	done := kv.Done(func(err error) { ended <- err })
	var got []float32
	for _, request := range []func() (kv.Call, error){
		func() (kv.Call, error) { return w.Push([]kv.Key{1}, []float32{1}, done) },
		func() (kv.Call, error) { return w.Pull([]kv.Key{1}, &got, done, kv.Within(2100*time.Millisecond)) },
		func() (kv.Call, error) { return w.SimpleApp().Request(1, nil, c.Servers[0].ID(), done) },
	} {
		if _, err := request(); err != nil {
			t.Fatal(err)
		}
	}
	for range cap(ended) {
		fails(t, <-ended, van.ErrTimeout, "no answer from server 0 (id 8)")
	}
	for range cap(requests) {
		<-(<-requests).Context().Done()
	}
	<-(<-simple).Context().Done()
	if _, err := w.Push([]kv.Key{1}, []float32{1}, done, kv.Within(-1)); err != nil {
		t.Fatal(err)
	}
	if err := (<-requests).Respond(kv.Pairs[float32]{}); err != nil {
		t.Error(err)
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// TestSimpleRefuse: a receiver of any role may refuse a simple request. A request to a group fails when one member refuses it.
func TestSimpleRefuse(t *testing.T) {
	vans(t, func(t *testing.T, o testcluster.Options) {
		o.Servers = 2
		c := testcluster.Start(t, o)
		var apps []*kv.SimpleApp
		nodes := c.Nodes()
		for i, n := range nodes {
			a, err := kv.NewSimpleApp(n, kv.SimpleOptions{AppID: 3, CustomerID: 3, Handler: func(m kv.SimpleMessage) {
				if int(n.ID()) == int(m.Head) {
					if err := m.Refuse(fmt.Errorf("%s says no", n.Name())); err != nil {
						t.Error(err)
					}
					fails(t, m.Refuse(nil), van.ErrInvalid)
					select {
					case <-m.Context().Done():
					default:
						t.Error("the context of a refused request has not ended")
					}
					return
				}
				if err := m.Respond(nil); err != nil {
					t.Error(err)
				}
			}})
			if err != nil {
				t.Fatal(i, err)
			}
			apps = append(apps, a)
		}
		for i, a := range apps {
			for _, n := range nodes {
				if n.Role() == nodes[i].Role() {
					continue
				}
				call, err := a.Request(int32(n.ID()), nil, n.ID())
				fails(t, cmp.Or(err, call.Wait(t.Context())), van.ErrRequestRefused, n.Name()+" says no")
			}
			if nodes[i].Role() == van.Worker {
				call, err := a.Request(10, nil, postoffice.ServerGroup)
				fails(t, cmp.Or(err, call.Wait(t.Context())), van.ErrRequestRefused, "server 1 (id 10) says no")
				call, err = a.Request(0, nil, postoffice.ServerGroup)
				if err := cmp.Or(err, call.Wait(t.Context())); err != nil {
					t.Error(err)
				}
			}
		}
		fails(t, kv.SimpleMessage{}.Refuse(errors.New("x")), van.ErrInvalid)
	})
}

func make64() []kv.Key {
	keys := make([]kv.Key, 64)
	for i := range keys {
		keys[i] = kv.Key(i)
	}
	return keys
}

// TestRefuseWrongKind: a request for an application of another kind is refused.
func TestRefuseWrongKind(t *testing.T) {
	hook := &hooks.Van{}
	c := testcluster.Start(t, testcluster.Options{Wrap: hook.Wrap("worker", 0)})
	a, err := kv.NewSimpleApp(c.Servers[0], kv.SimpleOptions{Timeout: 10 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	w := newWorker[float32](t, c.Workers[0])
	call, err := w.Push([]kv.Key{7}, []float32{1}, kv.Within(10*time.Second))
	fails(t, cmp.Or(err, call.Wait(t.Context())), van.ErrInvalid, "refused there: this application serves simple requests only")
	hook.OnReceive(func(m *van.Message) hooks.Verdict {
		m.SimpleApp = m.SimpleApp && !m.Request
		return hooks.Pass
	})
	call, err = a.Request(1, nil, c.Workers[0].ID())
	fails(t, cmp.Or(err, call.Wait(t.Context())), van.ErrInvalid, "refused there: a key-value worker serves simple requests only")
}
