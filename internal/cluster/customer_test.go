package cluster_test

import (
	"context"
	"errors"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/env"
)

// request is a Request that ignores its answers.
type request struct {
	cluster.Request
	finished, recycled chan error
}

func newRequest() *request {
	return &request{finished: make(chan error, 1), recycled: make(chan error, 1)}
}

func (r *request) Answer(int, int, *van.Message) error { return nil }
func (r *request) Finished(err error)                  { r.finished <- err }
func (r *request) Recycle()                            { r.recycled <- nil }

// opened opens a request of x to the first server.
func opened(t testing.TB, x *cluster.Customer) *request {
	t.Helper()
	r := newRequest()
	if err := x.Open(&r.Request, "test", r, 1, []int{van.ServerID(0)}); err != nil {
		t.Fatal(err)
	}
	return r
}

// customer makes a customer on the first worker of c.
func customer(t testing.TB, c *testcluster.Cluster) *cluster.Customer {
	t.Helper()
	x, err := core(c.Workers[0]).App().AddCustomer(5, 0, func(*van.Message) {})
	if err != nil {
		t.Fatal(err)
	}
	return x
}

// TestTimestampsWrap: after the largest timestamp the small ones follow, and those of one request stay together.
func TestTimestampsWrap(t *testing.T) {
	x := customer(t, testcluster.Start(t, testcluster.Options{}))
	x.SetNext(math.MaxInt32 - 5)
	var firsts []int32
	for range 4 {
		r := newRequest()
		if err := x.Open(&r.Request, "test", r, 3, nil); err != nil {
			t.Fatal(err)
		}
		firsts = append(firsts, r.First())
		if err := x.Wait(t.Context(), r.First(), time.Second); err != nil {
			t.Fatal(err)
		}
	}
	if want := []int32{math.MaxInt32 - 5, 0, 3, 6}; [4]int32(firsts) != [4]int32(want) {
		t.Errorf("first timestamps are %v, want %v", firsts, want)
	}
}

// TestTwoWaits: of two concurrent waits for one request one is refused, and the other one gets its result.
func TestTwoWaits(t *testing.T) {
	x := customer(t, testcluster.Start(t, testcluster.Options{}))
	r := opened(t, x)
	results := make(chan error, 2)
	for range cap(results) {
		go func() { results <- x.Wait(t.Context(), r.First(), 20*time.Second) }()
	}
	vantest.Fails(t, <-results, cluster.ErrOtherWaits, "another goroutine waits for it already")
	x.Abort(&r.Request, van.ErrQueueFull)
	vantest.Fails(t, <-results, van.ErrQueueFull)
}

// TestTimestampsInFlight: 4,194,304 timestamps may be in flight, one more is refused until some have ended.
func TestTimestampsInFlight(t *testing.T) {
	const most = 1 << 22
	x := customer(t, testcluster.Start(t, testcluster.Options{}))
	open := func(n int) (*request, error) {
		r := newRequest()
		return r, x.Open(&r.Request, "test", r, n, []int{van.ServerID(0)})
	}
	all, err := open(most)
	if err != nil {
		t.Fatal(err)
	}
	_, err = open(1)
	vantest.Fails(t, err, van.ErrQueueFull, "4194304 timestamps in flight", "want at most 4194304")
	x.Abort(&all.Request, van.ErrClosed)
	vantest.Fails(t, x.Wait(t.Context(), all.First(), 20*time.Second), van.ErrClosed)
	if _, err := open(1); err != nil {
		t.Error(err)
	}
}

// TestCustomerOfANodeThatHasLeft: a node that has left refuses customers.
func TestCustomerOfANodeThatHasLeft(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	c.Finalize(t)
	for _, n := range append(c.Workers, c.Servers...) {
		_, err := core(n).App().AddCustomer(5, 0, func(*van.Message) {})
		vantest.Fails(t, err, van.ErrClosed, "add customer")
	}
}

// TestOneRequestWithoutAnswer: a request that is never answered or waited for does not block later ones, however many
// follow.
func TestOneRequestWithoutAnswer(t *testing.T) {
	x := customer(t, testcluster.Start(t, testcluster.Options{}))
	x.SetNext(0) // the first timestamp is at random
	stuck := newRequest()
	if err := x.Open(&stuck.Request, "test", stuck, 2, []int{van.ServerID(0)}); err != nil {
		t.Fatal(err)
	}
	r := newRequest()
	for next := 1023; next > 0 && next < math.MaxInt32; next = 2*next + 1 { // each gets the slot of the unanswered one
		x.SetNext(int32(next))
		if err := x.Open(&r.Request, "test", r, 3, nil); err != nil {
			t.Fatalf("from timestamp %d: %v", next, err)
		}
		ts := r.First()
		if _, _, ok, _ := x.Batch(ts + 2); !ok {
			t.Errorf("timestamp %d is not in flight", ts+2)
		}
		if err := x.Wait(t.Context(), ts, time.Second); err != nil {
			t.Fatal(err)
		}
		<-r.finished
		<-r.recycled
	}
	if n := x.TableSize(); n > 4096 {
		t.Errorf("the table has %d places for 2 timestamps in flight", n)
	}
	if h, answered, ok, err := x.Batch(stuck.First() + 1); h != stuck.First() || answered || !ok || err != nil {
		t.Errorf("the stuck request is %d, answered %t, in flight %t, %v", h, answered, ok, err)
	}
}

// TestLimitCountsFromTheBegin: the limit of a request is not that of each wait for it.
func TestLimitCountsFromTheBegin(t *testing.T) {
	x := customer(t, testcluster.Start(t, testcluster.Options{}))
	r := opened(t, x)
	r.Age(time.Hour)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if err := x.Wait(ctx, r.First(), 30*time.Minute); !errors.Is(err, van.ErrTimeout) || ctx.Err() != nil {
		t.Errorf("a wait with a limit that has passed: %v (%v)", err, ctx.Err())
	}
}

// TestSlicesOfASpinningWait: a wait in slices ends with its slice, also when waits spin without limit.
func TestSlicesOfASpinningWait(t *testing.T) {
	x := customer(t, testcluster.Start(t, testcluster.Options{Over: testcluster.TCP, Set: func(c *postoffice.Config) { c.BusyPoll = env.SpinForever }}))
	r := opened(t, x)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	begun := time.Now()
	if err := x.WaitSlice(ctx, r.First(), 0, 10*time.Millisecond); !errors.Is(err, postoffice.ErrPending) {
		t.Errorf("a wait for 10 ms ends with %v, want %v", err, postoffice.ErrPending)
	}
	if d := time.Since(begun); d > 5*time.Second {
		t.Errorf("a wait for 10 ms takes %s", d)
	}
}

// TestPollFor: a worker whose waits spin polls until its condition holds, the limit has passed, or its context has
// ended; other nodes poll once.
func TestPollFor(t *testing.T) {
	spins := testcluster.Start(t, testcluster.Options{Over: testcluster.TCP, Set: func(c *postoffice.Config) { c.BusyPoll = env.SpinForever }})
	sleeps := testcluster.Start(t, testcluster.Options{Over: testcluster.TCP})
	never := func() bool { return false }
	for _, limit := range []time.Duration{0, time.Hour} {
		looks := 0
		core(spins.Workers[0]).App().PollFor(t.Context(), limit, func() bool { looks++; return looks > 1000 })
		if looks <= 1000 {
			t.Errorf("limit %s: it ends after %d looks, and before what it waits for is there", limit, looks)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		core(spins.Workers[0]).App().PollFor(ctx, limit, never)
		if ctx.Err() == nil {
			t.Errorf("limit %s: it ends before its context", limit)
		}
		cancel()
	}
	begun := time.Now()
	core(spins.Workers[0]).App().PollFor(t.Context(), 20*time.Millisecond, never)
	if d := time.Since(begun); d < 20*time.Millisecond {
		t.Errorf("it ends after %s, before its limit of 20ms", d)
	}
	core(sleeps.Workers[0]).App().PollFor(t.Context(), 0, never) // returns
	core(spins.Servers[0]).App().PollFor(t.Context(), 0, func() bool { t.Error("a server polls, which would run handlers"); return true })
}

// TestCloseEndsFinalize: Close does not wait for a pending Finalize.
func TestCloseEndsFinalize(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	done := make(chan error, 1)
	began := make(chan struct{})
	go func() {
		close(began)
		done <- c.Servers[0].Shutdown(context.Background())
	}()
	<-began
	c.Servers[0].Close()
	select {
	case err := <-done:
		if err != nil && !errors.Is(err, van.ErrClosed) { // nil when Close was first
			t.Errorf("Finalize ends with %v, want %v", err, van.ErrClosed)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("Finalize still waits")
	}
}

// TestSlices: a wait in slices cancels its request at the limit only, however long the slice is. A request that ends
// between two slices is found by the next one.
func TestSlices(t *testing.T) {
	x := customer(t, testcluster.Start(t, testcluster.Options{}))
	open := func() *request { return opened(t, x) }
	wait := func(r *request, limit, slice time.Duration) error {
		return x.WaitSlice(t.Context(), r.First(), limit, slice)
	}
	r := open()
	for range 3 {
		if err := wait(r, 0, time.Millisecond); err != postoffice.ErrPending {
			t.Fatalf("the end of a slice: %v", err)
		}
		if err := wait(r, time.Hour, time.Millisecond); err != postoffice.ErrPending {
			t.Fatalf("the end of a slice, with a limit: %v", err)
		}
	}
	if err := x.Answer(van.ServerID(0), r.First()); err != nil {
		t.Fatal(err)
	}
	if err := wait(r, time.Hour, time.Millisecond); err != nil {
		t.Errorf("what was answered between two slices: %v", err)
	}
	vantest.Fails(t, wait(open(), time.Millisecond, time.Hour), van.ErrTimeout)
	if ts, requests, _ := x.InUse(); ts != 0 || requests != 0 {
		t.Errorf("%d timestamps of %d requests are in flight", ts, requests)
	}
}

// TestBegin: a request whose messages are still being sent does not finish, even if all answers arrive. Begin
// fails on a request that has ended.
func TestBegin(t *testing.T) {
	x := customer(t, testcluster.Start(t, testcluster.Options{}))
	for _, fail := range []bool{false, true} {
		r := opened(t, x)
		for n := 1; n <= 2; n++ {
			if !r.Begin() || r.Busy() != n {
				t.Fatalf("an open request is begun %d times, want %d", r.Busy(), n)
			}
		}
		if fail {
			x.Abort(&r.Request, van.ErrQueueFull)
		} else if err := x.Answer(van.ServerID(0), r.First()); err != nil {
			t.Fatal(err)
		}
		if fail && r.Begin() {
			t.Error("a request that has failed is begun")
		}
		r.End()
		select {
		case <-r.finished:
			t.Fatal("it has finished under way")
		default:
		}
		r.End()
		if err := <-r.finished; (err != nil) != fail {
			t.Errorf("finished: %v", err)
		}
		if r.Pending() || r.Begin() {
			t.Error("a request that has finished is begun")
		}
		if err := x.Wait(t.Context(), r.First(), time.Hour); (err != nil) != fail {
			t.Errorf("Wait: %v", err)
		}
	}
}

// TestOpenRefuses: no timestamps, a customer that is closed, and a peer that is lost.
func TestOpenRefuses(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	x := customer(t, c)
	r := newRequest()
	for _, n := range []int{0, -1} {
		vantest.Fails(t, x.Open(&r.Request, "test", r, n, []int{van.ServerID(0)}), van.ErrInvalid, "want at least 1")
	}
	_, err := core(c.Workers[0]).App().AddCustomer(5, 0, nil)
	vantest.Fails(t, err, van.ErrInvalid, "application 5, customer 0 exists")
	core(c.Workers[0]).SetLost(van.ServerID(0), van.ErrPeerLost)
	if err := x.Open(&r.Request, "test", r, 2, []int{van.ServerID(0)}); err != nil {
		t.Fatal(err)
	}
	vantest.Fails(t, x.Wait(t.Context(), r.First(), time.Hour), van.ErrPeerLost)
	x.Close()
	vantest.Fails(t, x.Open(&r.Request, "test", r, 1, nil), van.ErrClosed)
	if n := x.InFlight(); n != 0 {
		t.Errorf("%d requests are in flight", n)
	}
}

// TestLimitOfACall: a call has a default limit; a deadline of the context replaces it, and a call that failed cannot
// be waited for.
func TestLimitOfACall(t *testing.T) {
	x := customer(t, testcluster.Start(t, testcluster.Options{}))
	call := func(ctx context.Context, limit, age time.Duration) *van.Error {
		t.Helper()
		r := opened(t, x)
		r.Age(age)
		err := r.Call(limit).Wait(ctx)
		var e *van.Error
		if !errors.Is(err, van.ErrTimeout) || !errors.As(err, &e) {
			t.Fatalf("limit %s: %v", limit, err)
		}
		return e
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if e := call(context.WithoutCancel(ctx), 0, postoffice.DefaultTimeout); e.Limit != postoffice.DefaultTimeout {
		t.Errorf("the limit is %s, want %s", e.Limit, postoffice.DefaultTimeout)
	}
	if e := call(context.WithoutCancel(ctx), 9*time.Second, 9*time.Second); !strings.Contains(e.Hint, "found lost only after up to 15s") {
		t.Errorf("%v, which does not name the time after which a stopped peer is found lost", e)
	}
	if e := call(context.WithoutCancel(ctx), time.Second, time.Second); e.Hint != "" {
		t.Errorf("%v, which has a hint", e)
	}
	if e := call(context.WithoutCancel(ctx), time.Minute, time.Minute); e.Limit != time.Minute {
		t.Errorf("the limit is %s, want a minute", e.Limit)
	}
	ctx, cancel = context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	for _, limit := range []time.Duration{-1, 0, time.Second} {
		if e := call(ctx, limit, time.Hour); e.Limit != 0 {
			t.Errorf("%s: the limit is %s, want that of the context", limit, e.Limit)
		}
	}
	vantest.Fails(t, postoffice.Call{}.Wait(ctx), postoffice.ErrUnknownHandler, "never made")
}

// TestIssuedHandlers: the issued handlers, and the errors of handlers that cannot be waited for, also when timestamps
// continue from 0.
func TestIssuedHandlers(t *testing.T) {
	x := customer(t, testcluster.Start(t, testcluster.Options{}))
	x.BeginAt(math.MaxInt32 - 5)
	vantest.Fails(t, x.Wait(t.Context(), math.MaxInt32-5, time.Hour), postoffice.ErrUnknownHandler, "none has been issued")
	given := func(want ...int32) {
		t.Helper()
		for _, ts := range []int32{-1, 0, 2, 3, 4, math.MaxInt32 - 6, math.MaxInt32 - 5, math.MaxInt32 - 3, math.MaxInt32 - 2, math.MaxInt32} {
			if x.Given(ts) != slices.Contains(want, ts) {
				t.Errorf("handler %d is given out: %t", ts, x.Given(ts))
			}
		}
	}
	given()
	open := func() *request {
		r := newRequest()
		if err := x.Open(&r.Request, "test", r, 3, []int{van.ServerID(0)}); err != nil {
			t.Fatal(err)
		}
		return r
	}
	r := open()
	given(math.MaxInt32-5, math.MaxInt32-3)
	vantest.Fails(t, x.Wait(t.Context(), 7, time.Hour), postoffice.ErrUnknownHandler, "handlers from 2147483642 to 2147483644 have been issued")
	for _, ts := range []int32{r.First() + 1, r.First() + 2} {
		vantest.Fails(t, x.Wait(t.Context(), ts, time.Hour), postoffice.ErrUnknownHandler, "inside the batch of handler 2147483642")
		if h, answered, ok, err := x.Batch(ts); h != r.First() || answered || !ok || err != nil {
			t.Errorf("%d is of %d, answered %t, %t, %v", ts, h, answered, ok, err)
		}
		if x.Timestamps(ts) != 0 {
			t.Errorf("%d is taken for a handler", ts)
		}
	}
	if n := x.Timestamps(r.First()); n != 3 {
		t.Errorf("it has %d timestamps, want 3", n)
	}
	if err := x.Answer(van.ServerID(0), r.First()+1); err != nil {
		t.Fatal(err)
	}
	if _, answered, _, _ := x.Batch(r.First() + 1); !answered {
		t.Error("what was answered is not")
	}
	if _, answered, _, _ := x.Batch(r.First()); answered {
		t.Error("what was not answered is")
	}
	r.Age(time.Hour)
	for _, ts := range []int32{r.First(), r.First() + 2} {
		if d := x.Elapsed(ts); d < time.Hour || d > 2*time.Hour {
			t.Errorf("%d was opened %s ago", ts, d)
		}
	}
	for _, ts := range []int32{r.First() - 1, r.First() + 3, r.First() - 1024, r.First() + 1 - 1024, -1} {
		if h, _, ok, _ := x.Batch(ts); ok || x.Elapsed(ts) != 0 || x.Timestamps(ts) != 0 {
			t.Errorf("%d is of %d", ts, h)
		}
	}
	open()
	given(0, 2, math.MaxInt32-5, math.MaxInt32-3, math.MaxInt32-2, math.MaxInt32)
	if first := x.Skip(4); first != 3 {
		t.Errorf("skipped from %d, want 3", first)
	}
	if r := open(); r.First() != 7 {
		t.Errorf("after what was skipped comes %d, want 7", r.First())
	}
}

// TestOwingPeers: the error of a canceled request names eight peers that owe answers, and counts the others.
func TestOwingPeers(t *testing.T) {
	x := customer(t, testcluster.Start(t, testcluster.Options{}))
	var ids []int
	for k := range 11 {
		ids = append(ids, van.ServerID(k))
	}
	r := newRequest()
	if err := x.Open(&r.Request, "test", r, 2, ids); err != nil {
		t.Fatal(err)
	}
	for i := range int32(2) {
		if err := x.Answer(ids[1], r.First()+i); err != nil {
			t.Fatal(err)
		}
	}
	if err := x.Answer(ids[2], r.First()); err != nil {
		t.Fatal(err)
	}
	err := x.Wait(t.Context(), r.First(), time.Nanosecond)
	vantest.Fails(t, err, van.ErrTimeout, "server 0 (id 8)", "(2 of 2 answers missing)", "server 2 (id 12)", "(1 of 2 answers missing)", "server 8 (id 24)", ", and 2 more")
	if s := err.Error(); strings.Contains(s, "server 1 (id 10)") || strings.Contains(s, "server 9") {
		t.Error(s)
	}
}

// TestTraces: the traces of the latest answers are kept, under their own timestamps.
func TestTraces(t *testing.T) {
	x := customer(t, testcluster.Start(t, testcluster.Options{}))
	if _, ok := x.Trace(1); ok {
		t.Error("a trace, though none are kept")
	}
	x.KeepTraces()
	x.SetNext(4095)
	r := newRequest()
	if err := x.Open(&r.Request, "test", r, 2, []int{van.ServerID(0)}); err != nil {
		t.Fatal(err)
	}
	for ts := r.First(); ts < r.First()+2; ts++ {
		if _, ok := x.Trace(ts); ok {
			t.Errorf("a trace of %d before its answer", ts)
		}
		if err := x.Answer(van.ServerID(0), ts); err != nil {
			t.Fatal(err)
		}
	}
	for _, ts := range []int32{-1, 0, 4094, 4095, 4096, 4097, 8191, 8192} {
		if _, ok := x.Trace(ts); ok != (ts == 4095 || ts == 4096) {
			t.Errorf("a trace of %d: %t", ts, ok)
		}
	}
	if n := len(r.Call(0).Traces()); n != 2 {
		t.Errorf("%d traces, want 2", n)
	}
}

// TestManyProcesses: the processes of small ids stay known when large ids are added.
func TestManyProcesses(t *testing.T) {
	n := testcluster.Start(t, testcluster.Options{}).Workers[0]
	note := func(id int) {
		who := van.NodeExtension{Incarnation: uint32(id + 1000)}
		core(n).SetProcess(id, &van.Node{ID: id, Endpoint: who.Encode()})
	}
	ids := []int{8, 63, 64, 70, 300, 301, 5000, van.Empty - 1}
	for _, id := range ids {
		note(id)
	}
	note(van.Empty)
	note(-1)
	for _, id := range ids {
		if got := core(n).Process(id); got != uint32(id+1000) {
			t.Errorf("node %d is process %d", id, got)
		}
	}
	if core(n).Process(van.Empty) != 0 || core(n).Process(-1) != 0 {
		t.Error("an id that is none has a process")
	}
}

// TestWatchersLeave: a removed function is called no more, the others are.
func TestWatchersLeave(t *testing.T) {
	n := testcluster.Start(t, testcluster.Options{}).Workers[0]
	var told [3]int
	var stops [3]func()
	for i := range told {
		stops[i] = n.OnPeer(func(postoffice.NodeID, bool, error) { told[i]++ })
	}
	core(n).Notify(van.ServerID(0), false, van.ErrPeerLost)
	stops[1]()
	core(n).Notify(van.ServerID(0), true, nil)
	stops[1]()
	stops[0]()
	core(n).Notify(van.ServerID(0), true, nil)
	if told != [3]int{2, 1, 3} {
		t.Errorf("told %v times, want 2, 1 and 3", told)
	}
}

// TestMessageToItself: a message of a node to itself is delivered as a copy, with the node as its sender, and its
// memory is free at once.
func TestMessageToItself(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	n := c.Servers[0]
	got := make(chan *van.Message, 1)
	if _, err := core(n).App().AddCustomer(6, 6, func(m *van.Message) { got <- m.Retain() }); err != nil {
		t.Fatal(err)
	}
	sent := make(chan struct{}, 1)
	msg := &van.Message{}
	msg.Reset()
	msg.Done = sentTo(sent)
	msg.Receiver, msg.AppID, msg.CustomerID, msg.Request, msg.Timestamp = int(n.ID()), 6, 6, true, 77
	body, frame := []byte("body"), []byte("frame")
	msg.Body, msg.DataTypes, msg.Frames = body, []van.DataType{van.TypeInt8}, 2
	msg.SetFrame(0, backend.Bytes(frame))
	msg.SetFrame(1, backend.Bytes(nil))
	if err := core(n).App().Send(msg); err != nil {
		t.Fatal(err)
	}
	<-sent
	copy(body, "xxxx")
	copy(frame, "xxxxx")
	msg.DataTypes[0] = van.TypeInt16
	m := <-got
	defer m.Release()
	if m.Sender != int(n.ID()) || m.Timestamp != 77 || string(m.Body) != "body" || string(m.Frame(0).Host()) != "frame" || m.DataTypes[0] != van.TypeInt8 {
		t.Errorf("got %s with body %q and frame %q", m.Meta.String(), m.Body, m.Frame(0).Host())
	}
}

// sentTo receives an element when a message was sent.
type sentTo chan struct{}

func (s sentTo) Sent() { s <- struct{}{} }

// TestLatestNoticesAreKept: the latest cancellations are repeated to a peer that is back.
func TestLatestNoticesAreKept(t *testing.T) {
	n := testcluster.Start(t, testcluster.Options{}).Workers[0]
	for i := range int32(300) {
		core(n).CancelAt(van.ServerID(0), 5, cluster.Canceled{First: i, Count: 1})
	}
	firsts := core(n).NoticesFor(van.ServerID(0))
	if len(firsts) == 0 || len(firsts) == 300 {
		t.Fatalf("%d are kept", len(firsts))
	}
	for i, f := range firsts {
		if want := int32(300 - len(firsts) + i); f != want {
			t.Fatalf("kept are %v, want the latest", firsts)
		}
	}
}

// TestLimitOutlastsALoss: the default limit of a call is longer than the detection of a stopped process: the allowed
// silence, the time to the next heartbeat, and 2 s for the steps that follow.
func TestLimitOutlastsALoss(t *testing.T) {
	for _, x := range []struct{ interval, timeout, want time.Duration }{
		{-1, -1, postoffice.DefaultTimeout}, {1, -1, postoffice.DefaultTimeout}, {-1, 5, postoffice.DefaultTimeout},
		{10, -1, 43 * time.Second}, {2, 30, 35 * time.Second}, {-1, 60, 65 * time.Second},
		{0, 60, postoffice.DefaultTimeout}, {-1, 0, postoffice.DefaultTimeout}, {0, -1, postoffice.DefaultTimeout},
	} {
		c := testcluster.Start(t, testcluster.Options{Set: func(cfg *postoffice.Config) {
			cfg.HeartbeatInterval, cfg.HeartbeatTimeout = x.interval, x.timeout
			for _, d := range []*time.Duration{&cfg.HeartbeatInterval, &cfg.HeartbeatTimeout} {
				if *d > 0 {
					*d *= time.Second
				}
			}
		}})
		a := core(c.Workers[0]).App()
		if got := a.Limit(0); got != x.want {
			t.Errorf("interval %d, timeout %d: limit %s, want %s", x.interval, x.timeout, got, x.want)
		}
		if every, silence := a.Config().Heartbeats(); every > 0 && silence > 0 && a.Limit(0) < every+silence+2*time.Second {
			t.Errorf("interval %s, timeout %s: limit %s is too short", every, silence, a.Limit(0))
		}
		if a.Limit(-1) != -1 || a.Limit(time.Minute) != time.Minute {
			t.Error("a limit that was given is changed")
		}
		c.Finalize(t)
	}
}
