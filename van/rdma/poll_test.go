package rdma

import (
	"runtime"
	"runtime/debug"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/engine"
)

// While a handler is slow for one peer, polling goroutines cannot deliver; the loop does, and at once.
func TestPollBesideSlowHandler(t *testing.T) {
	p := newPair(t, nil)
	second := p.node(11, van.Worker, p.atWorker, nil)
	defer func() {
		if err := second.Close(t.Context()); err != nil {
			t.Error(err)
		}
	}()
	block, entered, got := make(chan struct{}), make(chan struct{}), make(chan struct{}, 1)
	p.server.delivery.recv = func(m *van.Message) {
		if m.Sender == workerID {
			close(entered)
			<-block
			return
		}
		got <- struct{}{}
	}
	p.connect(p.worker, serverID, p.server)
	p.connect(second, serverID, p.server)
	send := func(v *rvan, ts int) {
		if err := v.Send(tensor(serverID, ts, 1, true, true, make([]byte, 100))); err != nil {
			t.Error(err)
		}
	}
	send(p.worker, 1)
	<-entered
	stop, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for {
			select {
			case <-stop:
				return
			default:
				p.server.delivery.engine.Poll(func() bool { return false })
			}
		}
	}()
	if each := quickest(500, func(i int) {
		send(second, i)
		<-got
	}); each > 10*time.Millisecond {
		t.Errorf("a message takes %s, want some microseconds, or a millisecond where processors are emulated", each)
	}
	close(stop)
	<-ended
	close(block)
}

// quickest returns the duration of one call in the fastest tenth of count calls of f. On a paused or busy machine, some calls are slow, but with a slow
// loop all are.
func quickest(count int, f func(i int)) time.Duration {
	least := time.Hour
	for i := 0; i < count; {
		began := time.Now()
		for range count / 10 {
			f(i)
			i++
		}
		least = min(least, time.Since(began)/time.Duration(count/10))
	}
	return least
}

// After the last Poll, the loop takes over, however long it has not polled.
func TestLoopAfterPoll(t *testing.T) {
	p := newPair(t, nil)
	p.both()
	p.until("the worker has a device", func() bool { return len(*p.worker.tables.devices.Load()) > 0 })
	d := (*p.worker.tables.devices.Load())[0]
	for i := range 5 {
		// As if Polls followed each other, and the last one had found its answer.
		for began := time.Now(); d.sleeping.Load() || time.Since(began) < 4*time.Millisecond; {
			looks := 0
			p.worker.delivery.engine.Poll(func() bool { looks++; return looks > 2 })
			if time.Since(began) > testTime {
				t.Fatal("the loop sleeps on the device beside a Poll")
			}
			runtime.Gosched()
		}
		if err := p.server.Send(tensor(workerID, i, 1, false, true, nil)); err != nil {
			t.Fatal(err)
		}
		if m := p.next(p.atWorker); int(m.Timestamp) != i {
			t.Errorf("message %d has come, want %d", m.Timestamp, i)
		}
	}
}

// While one goroutine polls, messages of other waiting goroutines are delivered, also if these try to poll.
func TestOthersBesidePoll(t *testing.T) {
	p := newPair(t, nil)
	p.both()
	var stop atomic.Bool
	var polls sync.WaitGroup
	polls.Go(func() {
		for !stop.Load() {
			p.worker.delivery.engine.Poll(stop.Load)
		}
	})
	for i := range 20 {
		if err := p.server.Send(tensor(workerID, i, 1, false, true, nil)); err != nil {
			t.Fatal(err)
		}
		p.until("the message has come", func() bool {
			p.worker.delivery.engine.Poll(func() bool { return len(p.atWorker) > 0 })
			return len(p.atWorker) > 0
		})
		if m := p.next(p.atWorker); int(m.Timestamp) != i {
			t.Errorf("message %d has come, want %d", m.Timestamp, i)
		}
	}
	stop.Store(true)
	polls.Wait()
}

// A Poll delivers requests of other workers, as ranks of a communicator send them, and wakes no other thread.
func TestPollOfWorkers(t *testing.T) {
	p := newPair(t, nil)
	second := p.node(11, van.Worker, nil, nil)
	defer func() {
		if err := second.Close(t.Context()); err != nil {
			t.Error(err)
		}
	}()
	inPoll := make(chan bool, 1)
	p.worker.delivery.recv = func(*van.Message) { inPoll <- strings.Contains(string(debug.Stack()), "engine.(*Engine).Poll") }
	p.connect(second, workerID, p.worker)
	var stop atomic.Bool
	var polls sync.WaitGroup
	polls.Go(func() {
		for !stop.Load() {
			p.worker.delivery.engine.Poll(stop.Load)
		}
	})
	defer polls.Wait()
	defer stop.Store(true)
	began := time.Now()
	for i := 0; ; i++ { // the loop may be first, but not always
		if err := second.Send(tensor(workerID, i, 1, true, true, nil)); err != nil {
			t.Fatal(err)
		}
		select {
		case is := <-inPoll:
			if is {
				return
			}
		case <-time.After(testTime):
			t.Fatalf("request %d has not come", i)
		}
		if time.Since(began) > testTime {
			t.Fatalf("no Poll has delivered one of %d requests", i)
		}
	}
}

// A Poll leaves a message whose handler may take long to the loop, which delivers it at once: here, a server's request at a worker.
func TestPollLeavesToLoop(t *testing.T) {
	p := newPair(t, nil)
	p.both()
	turns := make(chan bool, 1)
	p.worker.delivery.recv = func(m *van.Message) { turns <- m.InPoll }
	var stop atomic.Bool
	var polls sync.WaitGroup
	polls.Go(func() {
		for !stop.Load() {
			p.worker.delivery.engine.Poll(stop.Load)
		}
	})
	if each := quickest(100, func(i int) {
		if err := p.server.Send(tensor(workerID, i, 1, true, true, nil)); err != nil {
			t.Fatal(err)
		}
		select {
		case <-turns:
		case <-time.After(testTime):
			t.Fatalf("request %d has not come", i)
		}
	}); each > 10*time.Millisecond {
		t.Errorf("a request takes %s beside a Poll, want some microseconds, or a millisecond where processors are emulated", each)
	}
	stop.Store(true)
	polls.Wait()
}

// A Poll that has nothing to wait for does not poll, and neither does one that returns at once because many bytes were moved: the loop sleeps on.
func TestPollOfNothing(t *testing.T) {
	p := newPair(t, nil)
	p.both()
	p.until("the worker has a device", func() bool { return len(*p.worker.tables.devices.Load()) > 0 })
	d := (*p.worker.tables.devices.Load())[0]
	for tries := 1; ; tries++ { // an unrelated event may have woken it
		p.until("the loop sleeps", func() bool { return d.sleeping.Load() && d.feed.Parked() })
		for range 100 {
			p.worker.delivery.engine.Poll(func() bool { return true })
		}
		p.worker.stats.sentB.Add(pollBulk + 1)
		looks := 0
		p.worker.delivery.engine.Poll(func() bool { looks++; return false })
		if looks > 2 {
			t.Errorf("%d looks for an answer though much has been moved", looks)
		}
		if d.feed.Parked() {
			return
		}
		if tries == 5 {
			t.Fatal("the loop was woken")
		}
	}
}

// TestPollYields: a Poll that finds the loop still asleep yields its processor, which the loop needs to end its sleep. The scheduler may give the
// processor back to the Poll once or twice, since it does not always choose the other goroutine first.
func TestPollYields(t *testing.T) {
	was := runtime.GOMAXPROCS(1)
	defer runtime.GOMAXPROCS(was)
	d := &device{spinner: engine.New(time.Second).Spinner()}
	d.polls.cq.Lock()
	var ran atomic.Bool
	go ran.Store(true)
	for looks := 0; !ran.Load(); looks++ {
		if d.complete(0) || looks == 10 {
			t.Fatal("a Poll beside a loop that sleeps has found something, or lets no other goroutine run")
		}
	}
}
