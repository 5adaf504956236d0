package kv_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sort"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/kv"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/hooks"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
)

func simple(t testing.TB, n *postoffice.Node, h kv.SimpleHandler) *kv.SimpleApp {
	t.Helper()
	a, err := kv.NewSimpleApp(n, kv.SimpleOptions{AppID: 7, CustomerID: 7, Handler: h})
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// target is the node or the group with that number.
func target(to int) postoffice.Target {
	if to > van.AllNodes {
		return postoffice.NodeID(to)
	}
	return postoffice.Group(to)
}

func TestSimpleApp(t *testing.T) {
	vans(t, func(t *testing.T, o testcluster.Options) {
		o.Workers, o.Servers, o.Group = 1, 2, 2
		c := testcluster.Start(t, o)
		apps := map[int]*kv.SimpleApp{}
		for _, n := range c.Nodes() {
			apps[int(n.ID())] = simple(t, n, func(d kv.SimpleMessage) {
				if err := d.Respond(fmt.Appendf(nil, "%s from %d", d.Body, n.ID())); err != nil {
					t.Error(err)
				}
			})
		}
		servers, workers := []int{8, 10, 12, 14}, []int{9, 11}
		for _, x := range []struct {
			from, to int
			want     []int
		}{
			{9, van.ServerGroup, servers}, {9, 12, []int{12}}, {9, van.SchedulerID, []int{1}}, {9, 9, []int{9}},
			{9, van.ServerGroup | van.SchedulerID, append([]int{1}, servers...)},
			{10, van.WorkerGroup, workers}, {10, 11, []int{11}}, {10, 10, []int{10}},
			{1, van.AllNodes, append([]int{1, 9, 11}, servers...)}, {1, van.SchedulerID, []int{1}}, {1, van.WorkerGroup, workers},
		} {
			var mu sync.Mutex
			var got []int
			a := apps[x.from]
			body := fmt.Sprintf("from %d to %d", x.from, x.to)
			a.OnAnswer(func(d kv.SimpleMessage) {
				if want := fmt.Sprintf("%s from %d", body, d.Sender); d.Head != -42 || string(d.Body) != want || d.CustomerID != 7 {
					t.Errorf("answer %+v, want head -42 and body %q", d, want)
				}
				mu.Lock()
				got = append(got, int(d.Sender))
				mu.Unlock()
			})
			ts, err := a.Request(-42, []byte(body), target(x.to))
			if err == nil {
				err = ts.Wait(t.Context())
			}
			if err != nil {
				t.Fatalf("%s: %v", body, err)
			}
			sort.Ints(got)
			slices.Sort(x.want)
			if !slices.Equal(got, x.want) {
				t.Errorf("%s: answers of %v, want %v", body, got, x.want)
			}
		}
		for _, x := range []struct {
			from, to int
			names    string
		}{
			{9, 0, "0"}, {9, -3, "-3"}, {9, 16, "16"}, {9, 13, "13"}, {9, van.WorkerGroup, "worker 1 (id 11)"}, {10, 8, "server 0 (id 8)"},
		} {
			_, err := apps[x.from].Request(1, nil, target(x.to))
			fails(t, err, van.ErrInvalid, x.names)
		}
		c.Finalize(t)
	})
}

func TestSimpleAppDefaults(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	a, b := simple(t, c.Workers[0], nil), simple(t, c.Servers[0], nil)
	got := make(chan kv.SimpleMessage, 1)
	a.OnAnswer(func(d kv.SimpleMessage) { got <- d })
	ts, err := a.Request(5, []byte("x"), postoffice.ServerGroup)
	if err == nil {
		err = ts.Wait(t.Context())
	}
	if d := <-got; err != nil || d.Head != 5 || len(d.Body) != 0 || d.Sender != 8 {
		t.Errorf("%+v, %v: want an empty answer", d, err)
	}
	// A node that does not answer.
	b.Handle(func(kv.SimpleMessage) {})
	if ts, err = a.Request(5, nil, postoffice.ServerGroup); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	fails(t, ts.Wait(ctx), van.ErrTimeout, "server 0")
	// A node that has left.
	if ts, err = a.Request(5, nil, postoffice.NodeID(8)); err != nil {
		t.Fatal(err)
	}
	c.Servers[0].Close()
	fails(t, ts.Wait(t.Context()), van.ErrPeerLost, "server 0")
	a.Close()
	_, err = kv.NewSimpleApp(c.Workers[0], kv.SimpleOptions{AppID: 7, CustomerID: 7})
	if err != nil {
		t.Errorf("new application after Close: %v", err)
	}
}

// TestSimpleOfKV exchanges small messages under the ids of a key-value
// application.
func TestSimpleOfKV(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	var h kv.SummingHandler[int32]
	s, err := kv.NewServer[int32](c.Servers[0], kv.ServerOptions{})
	if err != nil {
		t.Fatal(err)
	}
	_, err = s.SimpleApp().Request(1, nil, postoffice.WorkerGroup)
	fails(t, err, van.ErrInvalid, "call its Handle first")
	s.SimpleApp().Handle(func(d kv.SimpleMessage) {
		if err := d.Respond([]byte("ok")); err != nil {
			t.Error(err)
		}
	})
	if err := s.Handle(h.Handle); err != nil {
		t.Fatal(err)
	}
	w := newWorker[int32](t, c.Workers[0])
	var body string
	w.SimpleApp().OnAnswer(func(d kv.SimpleMessage) { body = string(d.Body) })
	for range 3 {
		do(t, w)(w.Push([]kv.Key{1}, []int32{1}))
		do(t, w)(w.SimpleApp().Request(3, []byte("?"), postoffice.ServerGroup))
	}
	if body != "ok" {
		t.Errorf("answer %q", body)
	}
	ts, err := s.SimpleApp().Request(4, nil, postoffice.NodeID(9))
	if err == nil {
		err = ts.Wait(t.Context())
	}
	if err != nil {
		t.Error(err)
	}
	c.Finalize(t)
}

// TestSimpleStaleAnswer: the requesting process was replaced before the answer. The replacement process does not
// get the answer, and Respond returns an error.
func TestSimpleStaleAnswer(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{Workers: 1, Servers: 1})
	asked := make(chan kv.SimpleMessage, 1)
	simple(t, c.Servers[0], func(d kv.SimpleMessage) { asked <- d })
	heard := make(chan bool, 4)
	c.Servers[0].OnPeer(func(_ postoffice.NodeID, up bool, _ error) { heard <- up })
	if _, err := simple(t, c.Workers[0], nil).Request(1, []byte("of the first process"), postoffice.ServerID(0)); err != nil {
		t.Fatal(err)
	}
	old := <-asked
	c.Workers[0].Close()
	if up := <-heard; up {
		t.Fatal("the server hears that the worker is back, want that it is lost")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	testcluster.Lost(t, c.Scheduler, van.WorkerID(0))
	if _, err := c.Join(ctx, "worker", 0, nil); err != nil {
		t.Fatal(err)
	}
	if up := <-heard; !up {
		t.Fatal("the server hears that the worker is lost again, want that it is back")
	}
	vantest.Fails(t, old.Respond([]byte("too late")), van.ErrPeerLost, van.NodeName(van.WorkerID(0)), "the process that sent the request has been replaced")
}

// TestSimpleEdges: notifications of the end of a request, answers of another kind, requests that the transport
// refuses, and messages for no application.
func TestSimpleEdges(t *testing.T) {
	hook := &hooks.Van{}
	c := testcluster.Start(t, testcluster.Options{Servers: 2, Wrap: hook.Wrap("worker", 0)})
	asked := make(chan kv.SimpleMessage, 2)
	for _, n := range c.Servers {
		simple(t, n, func(d kv.SimpleMessage) { asked <- d })
	}
	w := simple(t, c.Workers[0], nil)
	ended := make(chan error, 1)
	answers := 0
	w.OnAnswer(func(kv.SimpleMessage) { answers++ })
	request := func(to int) kv.Call {
		t.Helper()
		call, err := w.Request(3, []byte("body"), target(to), kv.Done(func(err error) { ended <- err }))
		if err != nil {
			t.Fatal(err)
		}
		return call
	}
	for k := range 3 {
		if k == 2 {
			w.OnAnswer(nil)
		}
		call := request(van.ServerID(0))
		if d := <-asked; !d.Wanted() {
			t.Error("the answer is not wanted")
		} else if err := d.Respond(nil); err != nil {
			t.Error(err)
		}
		if err := <-ended; err != nil {
			t.Error(err)
		}
		if err := call.Wait(t.Context()); err != nil || answers != min(k+1, 2) {
			t.Errorf("request %d: %v, %d answers were handed over", k, err, answers)
		}
	}

	call := request(van.ServerID(1)) // which answers with pairs
	d := <-asked
	m := &van.Message{}
	m.Reset()
	m.Receiver, m.Timestamp, m.AppID, m.CustomerID = int(d.Sender), d.Timestamp, 7, 7
	if err := (*cluster.Node)(c.Servers[1]).App().Send(m); err != nil {
		t.Fatal(err)
	}
	vantest.Fails(t, <-ended, van.ErrMalformed, "not one of a simple application")
	vantest.Fails(t, call.Wait(t.Context()), van.ErrMalformed)

	for nth := range 2 { // of a request to both servers
		sends := 0
		hook.OnSend(func(m *van.Message) hooks.Verdict {
			if !m.SimpleApp {
				return hooks.Pass
			}
			if sends++; sends == nth+1 {
				return hooks.Refuse(van.ErrQueueFull)
			}
			return hooks.Pass
		})
		call := request(van.ServerGroup)
		vantest.Fails(t, <-ended, van.ErrQueueFull)
		vantest.Fails(t, call.Wait(t.Context()), van.ErrQueueFull)
		if sends != nth+1 {
			t.Errorf("%d messages were sent, want %d: none behind one that was refused", sends, nth+1)
		}
		for range nth {
			<-asked
		}
		hook.OnSend(nil)
	}

	vantest.Fails(t, kv.SimpleMessage{}.Respond(nil), van.ErrInvalid, "no SimpleApp has received this message")
	if (kv.SimpleMessage{}).Wanted() {
		t.Error("a message that has not come is wanted")
	}
	if _, err := kv.NewSimpleApp(c.Workers[0], kv.SimpleOptions{AppID: 7, CustomerID: 7}); err == nil {
		t.Error("two applications have one id")
	}
	s, err := kv.NewServer[float32](c.Servers[0], kv.ServerOptions{})
	if err != nil {
		t.Fatal(err)
	}
	vantest.Fails(t, s.Handle(nil), van.ErrInvalid, "no handler")
	if err := s.Handle(func(kv.Request[float32]) {}); err != nil {
		t.Errorf("a handler behind one that was refused: %v", err)
	}
	vantest.Fails(t, s.Handle(func(kv.Request[float32]) {}), van.ErrInvalid, "this server has one")
}

// TestAnswerOfAnAnswer: only requests can be answered or refused. The node that has sent an answer waits for nothing.
func TestAnswerOfAnAnswer(t *testing.T) {
	hook := &hooks.Van{}
	c := testcluster.Start(t, testcluster.Options{Wrap: hook.Wrap("worker", 0)})
	simple(t, c.Servers[0], nil)
	w := simple(t, c.Workers[0], nil)
	answers := make(chan kv.SimpleMessage, 1)
	w.OnAnswer(func(d kv.SimpleMessage) { answers <- d })
	call, err := w.Request(0, nil, target(van.ServerID(0)))
	if err == nil {
		err = call.Wait(t.Context())
	}
	if err != nil {
		t.Fatal(err)
	}
	answer := <-answers
	hook.OnSend(func(m *van.Message) hooks.Verdict {
		if m.SimpleApp {
			t.Errorf("a message was sent: %v", &m.Meta)
		}
		return hooks.Pass
	})
	vantest.Fails(t, answer.Respond([]byte("again")), van.ErrInvalid, "the message is an answer, want a request", "worker 0", "server 0 (id 8) at ")
	vantest.Fails(t, answer.Refuse(errors.New("no")), van.ErrInvalid, "the message is an answer, want a request", "worker 0", "server 0 (id 8) at ")
}

// TestSimpleToLostMember: a request to a group with a lost member fails, and no member receives it. A member that did would act on a
// request that has failed, and would get no notice that the sender no longer waits.
func TestSimpleToLostMember(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{Servers: 3})
	var all [3]atomic.Int32 // requests to all servers
	for i, n := range c.Servers {
		simple(t, n, func(d kv.SimpleMessage) {
			if d.Head == 1 {
				all[i].Add(1)
			}
			if i == 1 {
				return // never answers
			}
			if err := d.Respond(nil); err != nil {
				t.Error(err)
			}
		})
	}
	w := simple(t, c.Workers[0], nil)
	request := func(head int32, to int) error {
		call, err := w.Request(head, nil, target(to))
		if err != nil {
			t.Fatal(err)
		}
		return call.Wait(t.Context())
	}
	c.Servers[1].Close()
	vantest.Fails(t, request(0, van.ServerID(1)), van.ErrPeerLost, "server 1")
	vantest.Fails(t, request(1, van.ServerGroup), van.ErrPeerLost, "server 1")
	for _, rank := range []int{0, 2} { // this request follows the one to all
		if err := request(0, van.ServerID(rank)); err != nil {
			t.Error(err)
		}
		if n := all[rank].Load(); n != 0 {
			t.Errorf("server %d has received %d requests to all, want none", rank, n)
		}
	}
}

// TestSimpleCanceled: each server that has not answered is notified that a request is canceled.
func TestSimpleCanceled(t *testing.T) {
	vans(t, func(t *testing.T, o testcluster.Options) {
		o.Servers = 3
		c := testcluster.Start(t, o)
		asked := make(chan kv.SimpleMessage, o.Servers)
		for _, n := range c.Servers {
			simple(t, n, func(d kv.SimpleMessage) { asked <- d })
		}
		call, err := simple(t, c.Workers[0], nil).Request(3, nil, postoffice.ServerGroup)
		if err != nil {
			t.Fatal(err)
		}
		var waiting []kv.SimpleMessage
		for range o.Servers {
			waiting = append(waiting, <-asked)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		fails(t, call.Wait(ctx), context.Canceled)
		for _, d := range waiting {
			select {
			case <-d.Context().Done():
			case <-time.After(20 * time.Second):
				t.Fatal("a server has not received the cancellation")
			}
			eventually(t, "the end of the request", func() bool { return !d.Wanted() })
		}
	})
}

// TestSimpleDoneOnce: a request without Done calls no function, though its reused object had one before.
func TestSimpleDoneOnce(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	simple(t, c.Servers[0], func(d kv.SimpleMessage) {
		if err := d.Respond(nil); err != nil {
			t.Error(err)
		}
	})
	w := simple(t, c.Workers[0], nil)
	var called atomic.Int32
	for i := range 20 {
		var opts []kv.SimpleOption
		if i%2 == 0 {
			opts = append(opts, kv.Done(func(error) { called.Add(1) }))
		}
		call, err := w.Request(3, []byte("body"), postoffice.ServerID(0), opts...)
		if err == nil {
			err = call.Wait(t.Context())
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	c.Finalize(t)
	if n := called.Load(); n != 10 {
		t.Errorf("Done was called %d times for 10 requests", n)
	}
}
