package rdma

import (
	"runtime"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/van"
)

// While a handler is slow for one peer, those who poll cannot deliver; the loop does,
// and at once.
func TestPollBesideSlowHandler(t *testing.T) {
	p := newPair(t, nil)
	second := p.node(11, van.Worker, p.atWorker, nil)
	defer func() {
		if err := second.Close(t.Context()); err != nil {
			t.Error(err)
		}
	}()
	block, entered, got := make(chan struct{}), make(chan struct{}), make(chan struct{}, 1)
	p.server.recv = func(m *van.Message) {
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
				p.server.Poll(func() bool { return false })
			}
		}
	}()
	const count = 500
	began := time.Now()
	for i := range count {
		send(second, i)
		<-got
	}
	if each := time.Since(began) / count; each > 10*time.Millisecond {
		t.Errorf("a message takes %s, want some microseconds, or a millisecond where processors are emulated", each)
	}
	close(stop)
	<-ended
	close(block)
}

// Who has polled and stops leaves what comes then to the loop, however long it was left
// alone.
func TestLoopAfterPoll(t *testing.T) {
	p := newPair(t, nil)
	p.both()
	p.until("the worker has a device", func() bool { return len(*p.worker.devices.Load()) > 0 })
	d := (*p.worker.devices.Load())[0]
	for i := range 5 {
		// As if one Poll followed the other, and had found its answer.
		for began := time.Now(); !d.idlesLong.Load() || time.Since(began) < 2*maxIdleWait; {
			p.worker.Poll(func() bool { return true }) // wakes the loop
			p.worker.polling.endedAt.Store(clock.Now())
			if time.Since(began) > testTime {
				t.Fatal("the loop polls beside a Poll")
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

// While others wait beside one who polls, the loop looks for what comes to them.
func TestLoopBesidePoll(t *testing.T) {
	p := newPair(t, nil)
	p.both()
	p.worker.polling.busy.Store(true) // as if somebody polled, but does not get to it
	for i := range 20 {
		if err := p.server.Send(tensor(workerID, i, 1, false, true, nil)); err != nil {
			t.Fatal(err)
		}
		p.until("the message has come", func() bool {
			p.worker.polling.endedAt.Store(clock.Now())
			p.worker.Poll(func() bool { return false })
			return len(p.atWorker) > 0
		})
		if m := p.next(p.atWorker); int(m.Timestamp) != i {
			t.Errorf("message %d has come, want %d", m.Timestamp, i)
		}
	}
	p.worker.polling.busy.Store(false)
}

// A Poll that has nothing to wait for looks at nothing, and so does not keep the loop
// from it.
func TestPollOfWhatIsDone(t *testing.T) {
	p := newPair(t, nil)
	p.both()
	for range 100 {
		p.worker.Poll(func() bool { return true })
	}
	if at := p.worker.polling.endedAt.Load(); at != 0 {
		t.Errorf("the last Poll was at %d, want none", at)
	}
}

// A Poll that returns at once because much has been moved leaves what comes to the loop,
// which does not expect the next Poll first.
func TestPollOfMuch(t *testing.T) {
	p := newPair(t, nil)
	p.both()
	p.worker.polling.endedAt.Store(clock.Now()) // as if one had found its answer just now
	p.worker.stats.sentB.Add(pollBulk + 1)
	p.worker.Poll(func() bool { t.Error("it looks for an answer"); return true })
	if at := p.worker.polling.endedAt.Load(); at != 0 {
		t.Errorf("the last Poll was at %d, want none: the loop waits for the next", at)
	}
}
