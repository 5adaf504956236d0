package cluster_test

import (
	"context"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/postoffice/membership"
	"github.com/stepaf/stepaf-go/tests/hooks"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
)

// TestReplacedWithoutLoss: when the scheduler announces a replacement without an earlier loss, the requests to the
// old process fail at once, and only those.
func TestReplacedWithoutLoss(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{Servers: 2})
	n := c.Workers[0]
	x := customer(t, c)
	var rs [2]*request
	for i := range rs {
		rs[i] = newRequest()
		if err := x.Open(&rs[i].Request, "test", rs[i], 2, []int{van.ServerID(i)}); err != nil {
			t.Fatal(err)
		}
	}
	events := make(chan bool, 4)
	defer n.OnPeer(func(id postoffice.NodeID, up bool, _ error) {
		if id == postoffice.ServerID(0) {
			events <- up
		}
	})()
	core(n).CarryOut(membership.PeerReplaced{ID: van.ServerID(0), Node: van.Node{ID: van.ServerID(0), Role: van.Server}})
	began := time.Now()
	vantest.Fails(t, x.Wait(t.Context(), rs[0].First(), 20*time.Second), van.ErrPeerLost, "server 0 (id 8)", "taken its place")
	if d := time.Since(began); d > 10*time.Second {
		t.Errorf("Wait has returned after %s", d)
	}
	if down, up := <-events, <-events; down || !up {
		t.Errorf("the peer is told to be up %t, then %t; want down, then up", down, up)
	}
	if err := core(n).Lost(van.ServerID(0)); err != nil {
		t.Errorf("the one in its place is lost as well: %v", err)
	}
	vantest.Fails(t, x.Wait(t.Context(), rs[1].First(), time.Millisecond), van.ErrTimeout)
}

// TestLateLoss: a loss that is performed after the peer is back fails the requests from before the loss only.
func TestLateLoss(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	n, x := core(c.Workers[0]), customer(t, c)
	id := van.ServerID(0)
	var rs [2]*request
	for i := range rs {
		rs[i] = newRequest()
		if err := x.Open(&rs[i].Request, "test", rs[i], 1, []int{id}); err != nil {
			t.Fatal(err)
		}
		if i == 0 {
			n.SetLost(id, van.ErrPeerLost)
			n.SetLost(id, nil)
		}
	}
	n.CarryOut(membership.PeerDead{ID: id, Cause: van.ErrPeerLost})
	vantest.Fails(t, x.Wait(t.Context(), rs[0].First(), 20*time.Second), van.ErrPeerLost, "server 0 (id 8)")
	if !rs[1].Pending() {
		t.Errorf("a request that was opened after the loss has failed: %v", x.Wait(t.Context(), rs[1].First(), 20*time.Second))
	}
}

// TestLateLossEndsContexts: a loss that is performed after the peer is back ends the contexts of the requests that were accepted before
// the loss, and no others.
func TestLateLossEndsContexts(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	n, in := core(c.Servers[0]), cluster.NewInbound()
	if _, err := n.App().AddServer(7, 7, in, func(*van.Message) {}); err != nil {
		t.Fatal(err)
	}
	id := van.WorkerID(0)
	var rs [2]cluster.Accepted
	var ctxs [2]context.Context
	for i := range rs {
		if err := in.Accept(&rs[i], id, n.Epoch(id), 7, int32(i)); err != nil {
			t.Fatal(err)
		}
		ctxs[i] = in.Context(&rs[i], id, func() bool { return true })
		if i == 0 {
			n.SetLost(id, van.ErrPeerLost)
			n.SetLost(id, nil)
		}
	}
	n.CarryOut(membership.PeerDead{ID: id, Cause: van.ErrPeerLost})
	vantest.Fails(t, context.Cause(ctxs[0]), van.ErrPeerLost)
	if err := ctxs[1].Err(); err != nil {
		t.Errorf("the context of a request that was accepted after the loss has ended: %v", context.Cause(ctxs[1]))
	}
}

// TestFinishedTooLate: a late report of the end of a request that is in use again does not end the next use.
func TestFinishedTooLate(t *testing.T) {
	x := customer(t, testcluster.Start(t, testcluster.Options{}))
	r := newRequest()
	if err := x.Open(&r.Request, "test", r, 1, nil); err != nil {
		t.Fatal(err)
	}
	use := r.Use()
	if err := x.Wait(t.Context(), r.First(), time.Second); err != nil {
		t.Fatal(err)
	}
	<-r.finished
	<-r.recycled
	if err := x.Open(&r.Request, "test", r, 1, []int{van.ServerID(0)}); err != nil {
		t.Fatal(err)
	}
	x.Completed(&r.Request, use)
	if r.Kept() {
		t.Error("a request in flight is kept as one that is finished")
	}
	x.Completed(&r.Request, r.Use())
	if !r.Kept() {
		t.Error("a request of which the end is noted in time is not kept")
	}
}

// TestCanceled: a cancellation covers its own timestamps, and no others.
func TestCanceled(t *testing.T) {
	w := cluster.Canceled{Sender: van.WorkerID(0), Customer: 3, First: 100, Count: 2}
	for _, x := range []struct {
		customer, ts int32
		want         bool
	}{{3, 99, false}, {3, 100, true}, {3, 101, true}, {3, 102, false}, {2, 100, false}, {3, -100, false}} {
		if got := w.Has(x.customer, x.ts); got != x.want {
			t.Errorf("customer %d, timestamp %d: %t, want %t", x.customer, x.ts, got, x.want)
		}
	}
	last := cluster.Canceled{First: math.MaxInt32, Count: 1}
	if !last.Has(0, math.MaxInt32) || last.Has(0, 0) || last.Has(0, math.MaxInt32-1) {
		t.Error("the largest timestamp is not the only one of its request")
	}
}

// TestCancellationsFromTheNetwork: notices of canceled requests are checked. Log lines report the first invalid one, and other
// control messages that cannot be valid.
func TestCancellationsFromTheNetwork(t *testing.T) {
	var logged vantest.Log
	c := testcluster.Start(t, testcluster.Options{Log: logged.Logger()})
	w, s := c.Workers[0], c.Servers[0]
	served, err := core(s).App().AddCustomer(7, 7, func(*van.Message) {})
	if err != nil {
		t.Fatal(err)
	}
	told := make(chan cluster.Canceled, 16)
	served.OnCanceled(func(w cluster.Canceled) { told <- w })
	say := func(body string, from, to uint32) {
		t.Helper()
		m := &van.Message{}
		m.Reset()
		m.Sender, m.Receiver, m.Control.Cmd, m.Timestamp, m.Body = int(w.ID()), int(s.ID()), van.Heartbeat, 1, []byte(body)
		m.SetIncarnations(from, to)
		if err := core(w).Van().Send(m); err != nil {
			t.Fatal(err)
		}
	}
	mine, its := core(w).Incarnation(), core(s).Incarnation()
	unknown := &van.Message{}
	unknown.Reset()
	unknown.Sender, unknown.Receiver, unknown.Control.Cmd = int(w.ID()), int(s.ID()), van.Ack
	unknown.SetIncarnations(mine, its)
	if err := core(w).Van().Send(unknown); err != nil {
		t.Fatal(err)
	}
	for _, body := range []string{"7 0 x 1", "7 0 -5 10", "7 0 5 0", "7 0 5 -1", "7 0 5", "", "99999999999999 0 5 1", "7 0 5 99999999999", "8 0 5 1"} {
		say("stepaf/1 given-up "+body, mine, its)
	}
	say("stepaf/1 given-up 7 0 6 1", mine^1, its)
	say("stepaf/1 given-up 7 0 7 1", mine, its^1)
	say("stepaf/1 given-up 7 2 40 3", mine, its)
	want := cluster.Canceled{Sender: int(w.ID()), Customer: 2, First: 40, Count: 3}
	select {
	case got := <-told:
		if got != want {
			t.Errorf("told of %+v, want only %+v", got, want)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("not told of what was given up")
	}
	for _, text := range []string{"7 0 x 1", "want ADD_NODE, BARRIER, INSTANCE_BARRIER or HEARTBEAT"} {
		if !slices.ContainsFunc(strings.Split(logged.String(), "\n"), func(line string) bool {
			return strings.Contains(line, "dropped a control message") && strings.Contains(line, text)
		}) {
			t.Errorf("the log does not say that a control message was dropped, %s", text)
		}
	}
	epoch := core(s).Epoch(int(w.ID()))
	for _, x := range []struct {
		customer, ts int32
		epoch        uint32
		want         bool
	}{{2, 39, epoch, true}, {2, 40, epoch, false}, {2, 42, epoch, false}, {2, 43, epoch, true}, {1, 41, epoch, true}, {0, 5, epoch, true}, {0, 6, epoch, true}, {0, 7, epoch, true}, {2, 39, epoch + 1, false}} {
		if got := served.IsAwaited(int(w.ID()), x.epoch, x.customer, x.ts); got != x.want {
			t.Errorf("customer %d, timestamp %d, epoch %d: wanted %t, want %t", x.customer, x.ts, x.epoch, got, x.want)
		}
	}
}

// TestAwaitedInPlaceOfALostOne: while the loss of a process stands, requests of its replacement process are awaited,
// and its own are not.
func TestAwaitedInPlaceOfALostOne(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	w, s := c.Workers[0], c.Servers[0]
	served, err := core(s).App().AddCustomer(7, 7, func(*van.Message) {})
	if err != nil {
		t.Fatal(err)
	}
	id, former := int(w.ID()), core(s).Epoch(int(w.ID()))
	core(s).SetLost(id, van.ErrPeerLost)
	if served.IsAwaited(id, former, 0, 1) {
		t.Error("a request of the lost process is wanted")
	}
	core(s).SetProcess(id, &van.Node{Role: van.Worker, ID: id, Endpoint: (&van.NodeExtension{Incarnation: core(w).Incarnation() ^ 1}).Encode()})
	next := core(s).Epoch(id)
	if next == former {
		t.Fatal("the one in its place has its epoch")
	}
	if served.IsAwaited(id, former, 0, 1) || !served.IsAwaited(id, next, 0, 1) {
		t.Errorf("wanted of the lost process: %t, of the one in its place: %t, want false and true",
			served.IsAwaited(id, former, 0, 1), served.IsAwaited(id, next, 0, 1))
	}
}

// TestCanceledWhileLost: a server that is considered lost receives the cancellations of that time when it is back;
// it may not have noticed the loss.
func TestCanceledWhileLost(t *testing.T) {
	var logged vantest.Log
	c := testcluster.Start(t, testcluster.Options{Log: logged.Logger()})
	w, s := c.Workers[0], c.Servers[0]
	served, err := core(s).App().AddCustomer(7, 7, func(*van.Message) {})
	if err != nil {
		t.Fatal(err)
	}
	told := make(chan cluster.Canceled, 16)
	served.OnCanceled(func(w cluster.Canceled) { told <- w })
	core(w).PeerChanged(int(s.ID()), false, van.ErrPeerLost)
	core(w).CancelAt(int(s.ID()), 7, cluster.Canceled{Customer: 2, First: 40, Count: 3})
	core(w).PeerChanged(int(s.ID()), true, nil)
	select {
	case got := <-told:
		if want := (cluster.Canceled{Sender: int(w.ID()), Customer: 2, First: 40, Count: 3}); got != want {
			t.Errorf("told of %+v, want %+v", got, want)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("not told of what was given up")
	}
	until(t, "a line tells that the server is back", func() bool { return strings.Contains(logged.String(), "peer is back") })
}

// TestEpochs: each process that has an id has a number of its own, also a C++ process that replaces another one; a
// repeated record changes nothing.
func TestEpochs(t *testing.T) {
	n := testcluster.Start(t, testcluster.Options{}).Servers[0]
	id := van.WorkerID(0)
	record := func(incarnation uint32) van.Node {
		r := van.Node{Role: van.Worker, ID: id, Hostname: "h", Port: 1, Ports: []int32{1}}
		if incarnation != 0 {
			r.Endpoint = (&van.NodeExtension{Incarnation: incarnation}).Encode()
		}
		return r
	}
	last := core(n).Epoch(id)
	for i, x := range []struct {
		what  membership.Output
		newer bool
	}{
		{membership.PeerReplaced{ID: id, Node: record(5)}, true},
		{membership.Connect{ID: id, Node: record(5)}, false},
		{membership.PeerReplaced{ID: id, Node: record(6)}, true},
		{membership.PeerReplaced{ID: id, Node: record(6)}, false},
		{membership.PeerReplaced{ID: id, Node: record(0)}, true}, // of the original
		{membership.Connect{ID: id, Node: record(0)}, false},
		{membership.PeerReplaced{ID: id, Node: record(0)}, true},
	} {
		core(n).NoteProcesses(x.what)
		if now := core(n).Epoch(id); now > last != x.newer || now < last {
			t.Errorf("step %d: epoch %d after %d, want a new one: %t", i, now, last, x.newer)
		}
		last = core(n).Epoch(id)
	}
}

// TestMessageForAnEarlierProcess: a message for an earlier process of this node's id is dropped at once: no later record makes
// it valid.
func TestMessageForAnEarlierProcess(t *testing.T) {
	hook := &hooks.Van{}
	var logged vantest.Log
	c := testcluster.Start(t, testcluster.Options{Wrap: hook.Wrap("server", 0), Log: logged.Logger()})
	w, s := c.Workers[0], c.Servers[0]
	came := make(chan int32, 16)
	if _, err := core(s).App().AddCustomer(7, 7, func(m *van.Message) { came <- m.Timestamp }); err != nil {
		t.Fatal(err)
	}
	for ts, to := range []uint32{core(s).Incarnation() ^ 1, core(s).Incarnation()} {
		m := &van.Message{}
		m.Reset()
		m.Sender, m.Receiver, m.Request, m.Push, m.Timestamp, m.AppID, m.CustomerID = int(w.ID()), int(s.ID()), true, true, int32(ts), 7, 7
		m.SetIncarnations(core(w).Incarnation(), to)
		if err := core(w).Van().Send(m); err != nil {
			t.Fatal(err)
		}
	}
	select {
	case ts := <-came:
		if ts != 1 {
			t.Errorf("message %d was handed over, want only 1", ts)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("nothing comes")
	}
	until(t, "nothing is held", func() bool { return hook.Held() == 0 })
	if !strings.Contains(logged.String(), "dropped a message from or for a process that was replaced") {
		t.Error("the log does not say what was dropped")
	}
}
