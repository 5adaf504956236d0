package cluster_test

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/postoffice/membership"
	"github.com/stepaf/stepaf-go/tests/hooks"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// collector is an application that records messages.
type collector struct {
	mu   sync.Mutex
	seen []int32
}

func (c *collector) take(m *van.Message) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.seen = append(c.seen, m.Timestamp)
}

func (c *collector) all() []int32 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.seen)
}

// rawRequest is a push for an application of the first server.
func rawRequest(app int32, ts int32, size int) *van.Message {
	m := &van.Message{}
	m.Reset()
	m.Receiver, m.Request, m.Push, m.Timestamp, m.AppID, m.CustomerID = van.ServerID(0), true, true, ts, app, app
	m.Frames, m.Keys, m.Vals = 2, backend.Bytes(make([]byte, 8)), backend.Bytes(make([]byte, size))
	m.DataTypes = []van.DataType{van.TypeUint64, van.TypeOther}
	return m
}

// TestMessagesOfOtherProcesses: data of a process that the table does not have, or for an earlier process here, does
// not reach an application. Data of a process that is admitted a moment later does, in order.
func TestMessagesOfOtherProcesses(t *testing.T) {
	testcluster.Over(t, func(t *testing.T, o testcluster.Options) {
		c := testcluster.Start(t, o)
		w, s := c.Workers[0], c.Servers[0]
		var app collector
		if _, err := core(s).App().AddCustomer(7, 7, app.take); err != nil {
			t.Fatal(err)
		}
		ts := int32(0)
		send := func(from, to uint32) int32 {
			t.Helper()
			ts++
			m := &van.Message{}
			m.Reset()
			m.Receiver, m.Request, m.Timestamp, m.AppID, m.CustomerID = van.ServerID(0), true, ts, 7, 7
			m.SetIncarnations(from, to)
			if err := core(w).Van().Send(m); err != nil {
				t.Fatal(err)
			}
			return ts
		}
		mine, its, next := core(w).Incarnation(), core(s).Incarnation(), core(w).Incarnation()^0x5555
		want := []int32{send(mine, its)}
		send(mine, its^1) // for the earlier server process
		send(mine, 0)
		send(0, its)
		early := []int32{send(next, its), send(next, its)} // of the replacement process of this worker
		send(next^0x3333, its)                             // of a process that is never admitted
		want = append(want, send(mine, its))
		until(t, "what is right comes", func() bool { return len(app.all()) >= 2 })
		if got := app.all(); !slices.Equal(got, want) {
			t.Fatalf("the application has %v, want %v", got, want)
		}
		testcluster.Counted(t, s, postoffice.Stats{FencedMessages: 3})
		epoch := core(s).Epoch(van.WorkerID(0))
		record := van.Node{Role: van.Worker, ID: van.WorkerID(0), Endpoint: (&van.NodeExtension{Incarnation: next}).Encode()}
		core(s).SetProcess(van.WorkerID(0), &record)
		late := send(next, its)
		send(mine, its) // too late
		want = append(append(want, early...), late)
		until(t, "what waited comes", func() bool { return len(app.all()) >= len(want) })
		if got := app.all(); !slices.Equal(got, want) {
			t.Errorf("the application has %v, want %v", got, want)
		}
		if e := core(s).Epoch(van.WorkerID(0)); e != epoch+1 {
			t.Errorf("epoch %d, want %d", e, epoch+1)
		}
	}, testcluster.InProc)
}

// TestProcessesAroundAnOriginal: a C++ StepMesh process replaces one of this library, and another one of this library
// replaces the C++ process. C++ messages have no incarnations. Data of the first process does not count as the
// second's, and data of the last one waits for its record.
func TestProcessesAroundAnOriginal(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	w, s := c.Workers[0], c.Servers[0]
	var mu sync.Mutex
	var got [][2]uint32
	if _, err := core(s).App().AddCustomer(7, 7, func(m *van.Message) {
		mu.Lock()
		defer mu.Unlock()
		got = append(got, [2]uint32{uint32(m.Timestamp), m.ProcessEpoch})
	}); err != nil {
		t.Fatal(err)
	}
	id, mine, its, next := van.WorkerID(0), core(w).Incarnation(), core(s).Incarnation(), core(w).Incarnation()^0x5555
	send := func(ts int32, from, to uint32) {
		t.Helper()
		m := rawRequest(7, ts, 8)
		m.SetIncarnations(from, to)
		if err := core(w).Van().Send(m); err != nil {
			t.Fatal(err)
		}
	}
	giveUp := func(first string) {
		t.Helper()
		m := &van.Message{}
		m.Reset()
		m.Sender, m.Receiver, m.Control.Cmd, m.Timestamp, m.Body = id, int(s.ID()), van.Heartbeat, 1, []byte("stepaf/1 given-up 7 7 "+first+" 1")
		m.SetIncarnations(next, its)
		if err := core(w).Van().Send(m); err != nil {
			t.Fatal(err)
		}
	}
	epoch := core(s).Epoch(id)
	core(s).SetProcess(id, &van.Node{Role: van.Worker, ID: id})
	send(1, mine, its)
	send(2, 0, 0)
	send(3, next, its)
	send(4, next, its)
	giveUp("4")
	send(5, 0, 0)
	all := func() [][2]uint32 {
		mu.Lock()
		defer mu.Unlock()
		return slices.Clone(got)
	}
	until(t, "two wait and one came too late, one is given up, and the others are there", func() bool {
		return core(s).PendingMessages() == 3 && core(s).PendingCancels() == 1 && len(all()) == 2
	})
	core(s).SetProcess(id, &van.Node{Role: van.Worker, ID: id, Endpoint: (&van.NodeExtension{Incarnation: next}).Encode()})
	send(6, next, its)
	want := [][2]uint32{{2, epoch + 1}, {5, epoch + 1}, {3, epoch + 2}, {6, epoch + 2}}
	until(t, "the last one comes", func() bool { return slices.ContainsFunc(all(), func(x [2]uint32) bool { return x[0] == 6 }) })
	if got := all(); !slices.Equal(got, want) {
		t.Errorf("the application has %v (timestamp, epoch), want %v", got, want)
	}
}

// TestCancellationsOfTwoCustomers: with PS_RESEND a server receives the cancellations of every application,
// independent of the timestamps of the others.
func TestCancellationsOfTwoCustomers(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{Over: testcluster.TCP, Set: func(c *postoffice.Config) { c.Resend = true }})
	heard := make(chan cluster.Canceled, 1)
	for _, app := range []int{7, 8} {
		x, err := core(c.Servers[0]).App().AddCustomer(app, app, func(*van.Message) {})
		if err != nil {
			t.Fatal(err)
		}
		x.OnCanceled(func(w cluster.Canceled) { heard <- w })
	}
	for _, w := range []cluster.Canceled{{First: 900_000_000, Count: 1}, {First: 100_000_000, Count: 2}, {First: 100_000_005, Count: 1}} {
		app := 7 + int(w.Count)%2
		w.Customer = int32(app)
		core(c.Workers[0]).CancelAt(van.ServerID(0), app, w)
		select {
		case got := <-heard:
			if w.Sender = van.WorkerID(0); got != w {
				t.Errorf("the server hears of %+v, want %+v", got, w)
			}
		case <-time.After(20 * time.Second):
			t.Fatalf("the server does not hear of %+v", w)
		}
	}
}

// TestCanceledByAPendingProcess: requests that a process cancels before this node knows it do not reach an application,
// whether they are queued here or arrive later, as from a transport that queued them.
func TestCanceledByAPendingProcess(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	w, s := c.Workers[0], c.Servers[0]
	var app collector
	if _, err := core(s).App().AddCustomer(7, 7, app.take); err != nil {
		t.Fatal(err)
	}
	id, next := van.WorkerID(0), core(w).Incarnation()^0x5555
	send := func(m *van.Message) {
		t.Helper()
		m.Sender, m.Receiver = id, int(s.ID())
		m.SetIncarnations(next, core(s).Incarnation())
		if err := core(w).Van().Send(m); err != nil {
			t.Fatal(err)
		}
	}
	request := func(ts int32) {
		t.Helper()
		send(rawRequest(7, ts, 8))
	}
	giveUp := func(body string) {
		t.Helper()
		m := &van.Message{}
		m.Reset()
		m.Control.Cmd, m.Timestamp, m.Body = van.Heartbeat, 1, []byte("stepaf/1 given-up "+body)
		send(m)
	}
	request(1)
	request(2)
	giveUp("7 7 1 1")
	giveUp("7 7 3 1")
	request(4)
	until(t, "they and the cancellations are queued", func() bool {
		return core(s).PendingMessages() == 3 && core(s).PendingCancels() == 2 // control messages do not wait for data
	})
	record := van.Node{Role: van.Worker, ID: id, Endpoint: (&van.NodeExtension{Incarnation: next}).Encode()}
	core(s).SetProcess(id, &record)
	request(3)
	request(5)
	until(t, "the last one comes", func() bool { return slices.Contains(app.all(), 5) })
	if got, want := app.all(), []int32{2, 4, 5}; !slices.Equal(got, want) {
		t.Errorf("the application has %v, want %v", got, want)
	}
}

// TestCanceledDuringDelivery: the cancellation of a request has effect while the request's handler runs in the delivery of pending
// messages. A canceled request that is still pending does not reach the application.
func TestCanceledDuringDelivery(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	w, s := core(c.Workers[0]), core(c.Servers[0])
	entered, canceled, leave := make(chan int32, 8), make(chan cluster.Canceled, 2), make(chan struct{})
	x, err := s.App().AddCustomer(7, 7, func(m *van.Message) {
		entered <- m.Timestamp
		<-leave
	})
	if err != nil {
		t.Fatal(err)
	}
	x.OnCanceled(func(w cluster.Canceled) { canceled <- w })
	id, next := van.WorkerID(0), w.Incarnation()^0x5555
	receive := func(m *van.Message) {
		m.Sender = id
		m.SetIncarnations(next, s.Incarnation())
		s.Receive(m)
	}
	for ts := range int32(3) {
		receive(rawRequest(7, ts, 8))
	}
	s.SetProcess(id, &van.Node{Role: van.Worker, ID: id, Endpoint: (&van.NodeExtension{Incarnation: next}).Encode()})
	<-entered
	for ts := range int32(2) {
		m := &van.Message{}
		m.Reset()
		m.Control.Cmd, m.Body = van.Heartbeat, fmt.Appendf(nil, "stepaf/1 given-up 7 7 %d 1", ts)
		receive(m)
		select {
		case got := <-canceled:
			if want := (cluster.Canceled{Sender: id, Customer: 7, First: ts, Count: 1}); got != want {
				t.Errorf("canceled is %+v, want %+v", got, want)
			}
		default:
			t.Errorf("the cancellation of request %d has no effect while a handler runs", ts)
		}
	}
	close(leave)
	if ts := <-entered; ts != 2 {
		t.Errorf("request %d is delivered after request 0, want 2", ts)
	}
}

// TestAnsweredWhenReplaced: messages that a replacement process has sent before its record arrived are delivered when
// they can be answered, not before.
func TestAnsweredWhenReplaced(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	w, s := c.Workers[0], c.Servers[0]
	id, next := van.WorkerID(0), core(w).Incarnation()^0x5555
	lost := make(chan error, 1)
	if _, err := core(s).App().AddCustomer(7, 7, func(*van.Message) { lost <- core(s).Lost(id) }); err != nil {
		t.Fatal(err)
	}
	core(s).SetLost(id, van.ErrPeerLost)
	m := &van.Message{}
	m.Reset()
	m.Receiver, m.Request, m.Timestamp, m.AppID, m.CustomerID = van.ServerID(0), true, 1, 7, 7
	m.SetIncarnations(next, core(s).Incarnation())
	if err := core(w).Van().Send(m); err != nil {
		t.Fatal(err)
	}
	until(t, "it waits", func() bool { return core(s).PendingMessages() == 1 })
	record := van.Node{Role: van.Worker, ID: id, Endpoint: (&van.NodeExtension{Incarnation: next}).Encode()}
	core(s).AddProcess(id, &record)
	select {
	case err := <-lost:
		t.Fatalf("delivered before its sender can be answered: %v", err)
	case <-time.After(100 * time.Millisecond): // in which it would have arrived
	}
	core(s).CarryOut(membership.PeerAlive{ID: id}) // the process before it was back for a moment
	select {
	case <-lost:
		t.Fatal("delivered when its predecessor was back, before this node has connected to it")
	case <-time.After(100 * time.Millisecond): // in which it would have arrived
	}
	// This node has connected to a process in between, which was replaced meanwhile: answers would go there.
	between := van.Node{Role: van.Worker, ID: id, Endpoint: (&van.NodeExtension{Incarnation: next + 1}).Encode()}
	core(s).CarryOut(membership.PeerReplaced{ID: id, Node: between})
	if core(s).Lost(id) == nil {
		t.Error("a process counts as alive before this node has connected to it")
	}
	core(s).CarryOut(membership.PeerReplaced{ID: id, Node: record})
	select {
	case err := <-lost:
		if err != nil {
			t.Errorf("its sender is still lost: %v", err)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("it is not delivered")
	}
}

// TestPendingMessagesHaveABudget: the messages of processes that the table does not have are bounded in bytes; dropped ones
// are counted.
func TestPendingMessagesHaveABudget(t *testing.T) {
	const size, budget = 100 << 10, 1 << 20
	hook := &hooks.Van{}
	var logged vantest.Log
	c := testcluster.Start(t, testcluster.Options{Wrap: hook.Wrap("server", 0), Log: logged.Logger(),
		Set: func(c *postoffice.Config) { c.StrangerBudget = budget }})
	w, s := c.Workers[0], c.Servers[0]
	var app collector
	if _, err := core(s).App().AddCustomer(7, 7, app.take); err != nil {
		t.Fatal(err)
	}
	for ts := range int32(30) {
		m := rawRequest(7, ts, size)
		m.SetIncarnations(core(w).Incarnation()^1, core(s).Incarnation())
		if err := core(w).Van().Send(m); err != nil {
			t.Fatal(err)
		}
	}
	m := rawRequest(7, 1000, 0)
	if err := core(w).App().Send(m); err != nil {
		t.Fatal(err)
	}
	until(t, "the worker's own comes", func() bool { return len(app.all()) > 0 })
	if n := hook.Held(); n*size > budget || n < budget/size-2 {
		t.Errorf("%d messages of %d bytes are kept, the budget is %d", n, size, budget)
	}
	if !strings.Contains(logged.String(), "STEPAF_STRANGER_BUDGET") {
		t.Error("the log does not name the budget")
	}
	gone := uint64(30 - hook.Held())
	testcluster.Counted(t, s, postoffice.Stats{StrangerMessages: gone, StrangerBytes: gone * (size + 8 + 512)})
	// Delivered messages no longer count.
	record := van.Node{Role: van.Worker, ID: van.WorkerID(0), Endpoint: (&van.NodeExtension{Incarnation: core(w).Incarnation() ^ 1}).Encode()}
	core(s).SetProcess(van.WorkerID(0), &record)
	until(t, "what was kept is delivered", func() bool { return hook.Held() == 0 })
	for ts := range int32(30) {
		m := rawRequest(7, ts, size)
		m.SetIncarnations(core(w).Incarnation()^3, core(s).Incarnation())
		if err := core(w).Van().Send(m); err != nil {
			t.Fatal(err)
		}
	}
	until(t, "a stranger's messages are kept again", func() bool { return hook.Held() >= budget/size-2 })
	s.Close()
	if n := hook.Held(); n != 0 {
		t.Errorf("%d messages are held after Close", n)
	}
}

// TestPendingMessagesOfTwoProcesses: the budget for unknown processes holds for messages under the id of a member that has
// queued messages of its own, before and while these are delivered.
func TestPendingMessagesOfTwoProcesses(t *testing.T) {
	const size, budget = 100 << 10, 1 << 20
	hook := &hooks.Van{}
	c := testcluster.Start(t, testcluster.Options{Wrap: hook.Wrap("server", 0), Set: func(c *postoffice.Config) { c.StrangerBudget = budget }})
	w, s := core(c.Workers[0]), core(c.Servers[0])
	entered, leave := make(chan struct{}), make(chan struct{})
	if _, err := s.App().AddCustomer(7, 7, func(*van.Message) {
		entered <- struct{}{}
		<-leave
	}); err != nil {
		t.Fatal(err)
	}
	id, next := van.WorkerID(0), w.Incarnation()^0x5555
	send := func(incarnation uint32, from, to int32) {
		t.Helper()
		for ts := from; ts < to; ts++ {
			m := rawRequest(7, ts, size)
			m.Sender = id
			m.SetIncarnations(incarnation, s.Incarnation())
			if err := w.Van().Send(m); err != nil {
				t.Fatal(err)
			}
		}
	}
	check := func(when string, sent uint64, pending int) {
		t.Helper()
		until(t, when+", all have arrived", func() bool {
			return uint64(hook.Held())+s.Stats().StrangerMessages >= sent
		})
		if n := hook.Held(); n*size > budget+2*size {
			t.Errorf("%s, %d messages of %d bytes are queued, the budget is %d", when, n, size, budget)
		}
		if got := s.Stats().PendingMessages; got != pending {
			t.Errorf("%s, Stats has %d pending messages and refusals, want %d", when, got, pending)
		}
	}
	s.SetLost(id, van.ErrPeerLost)
	s.SetProcess(id, &van.Node{Role: van.Worker, ID: id, Endpoint: (&van.NodeExtension{Incarnation: next}).Encode()})
	send(next, 0, 1)
	send(next^1, 0, 30)
	send(next, 1, 2)
	check("before the member can be answered", 32, 32)
	s.CarryOut(membership.PeerReplaced{ID: id, Node: van.Node{Role: van.Worker, ID: id}})
	<-entered
	leave <- struct{}{}
	<-entered // the delivery has passed the messages of the unknown process
	send(next^1, 30, 60)
	check("while the member's messages are delivered", 61, 60)
	close(leave)
}

// TestOrderOfPassedMessages: messages of a process that becomes the member while the delivery of its predecessor's messages has
// passed some of them are delivered in order.
func TestOrderOfPassedMessages(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	w, s := core(c.Workers[0]), core(c.Servers[0])
	entered, leave := make(chan int32, 8), make(chan struct{})
	if _, err := s.App().AddCustomer(7, 7, func(m *van.Message) {
		entered <- m.Timestamp
		<-leave
	}); err != nil {
		t.Fatal(err)
	}
	id, first := van.WorkerID(0), w.Incarnation()^0x5555
	second := first ^ 1
	send := func(incarnation uint32, ts int32) {
		m := rawRequest(7, ts, 8)
		m.Sender = id
		m.SetIncarnations(incarnation, s.Incarnation())
		s.Receive(m)
	}
	become := func(incarnation uint32) { // without a connection
		s.SetLost(id, van.ErrPeerLost)
		s.SetProcess(id, &van.Node{Role: van.Worker, ID: id, Endpoint: (&van.NodeExtension{Incarnation: incarnation}).Encode()})
	}
	connected := func() { s.CarryOut(membership.PeerReplaced{ID: id, Node: van.Node{Role: van.Worker, ID: id}}) }
	become(first)
	send(second, 1)
	send(first, 2)
	connected()
	<-entered // the delivery has passed message 1
	send(second, 3)
	become(second)
	leave <- struct{}{}
	until(t, "both messages are queued", func() bool { return s.PendingMessages() == 2 })
	close(leave)
	connected()
	if got := []int32{<-entered, <-entered}; !slices.Equal(got, []int32{1, 3}) {
		t.Errorf("messages %v are delivered, want 1 and 3", got)
	}
}

// TestQueuedRequestsExpire: requests for an application that is not made are dropped after STEPAF_START_TIMEOUT, with
// a line that names it; those of a lost worker are dropped at once.
func TestQueuedRequestsExpire(t *testing.T) {
	hook := &hooks.Van{}
	var logged vantest.Log
	c := testcluster.Start(t, testcluster.Options{Workers: 2, Wrap: hook.Wrap("server", 0), Log: logged.Logger()})
	core(c.Servers[0]).SetStartTimeout(200 * time.Millisecond)
	ask(t, c, 7, 1, 100)
	until(t, "the request is given up", func() bool {
		return hook.Held() == 0 && strings.Contains(logged.String(), "dropped requests for an application that was not made")
	})
	if !strings.Contains(logged.String(), "app=7") {
		t.Error("the log does not name the application")
	}
	core(c.Servers[0]).SetStartTimeout(time.Hour)
	ask(t, c, 8, 1, 100)
	until(t, "the request is kept", func() bool { return hook.Held() == 1 })
	c.Workers[0].Close()
	until(t, "it is forgotten", func() bool { return hook.Held() == 0 })
	testcluster.Counted(t, c.Servers[0], postoffice.Stats{EarlyRequests: 1, EarlyBytes: 100 + 8 + 512}) // of the live worker
}

// TestImpossibleSendersLeaveNothing: messages under an id that no member can have are dropped, and no state remains for the
// id.
func TestImpossibleSendersLeaveNothing(t *testing.T) {
	var logged vantest.Log
	c := testcluster.Start(t, testcluster.Options{Log: logged.Logger()})
	w, s := c.Workers[0], c.Servers[0]
	const ids = 50
	for i := range ids {
		m := rawRequest(7, 1, 0)
		m.Sender = van.WorkerID(100 + i)
		m.SetIncarnations(core(w).Incarnation()^1, core(s).Incarnation())
		core(s).Receive(m)
	}
	if n := core(s).PendingQueues(); n != 0 {
		t.Errorf("%d ids are kept of %d that cannot be members", n, ids)
	}
	if !strings.Contains(logged.String(), "dropped a message of a process that this node does not know") {
		t.Error("the log does not say what was dropped")
	}
	testcluster.Counted(t, s, postoffice.Stats{StrangerMessages: ids, StrangerBytes: ids * (8 + 512)})
}
