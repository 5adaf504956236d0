package rdma

import (
	"testing"
	"time"

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
