package local

import (
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/tests/inproc"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/engine"
	"github.com/stepaf/stepaf-go/van/env"
	"github.com/stepaf/stepaf-go/van/links"
)

// echoing makes x answer every push with one of the same values.
func (x *node) echoing() {
	x.Start(func(m *van.Message) {
		a := data(m.Sender, int(m.Timestamp), m.Vals.Host())
		a.Request = false
		if err := x.Send(a); err != nil && !errors.Is(err, van.ErrClosed) {
			x.t.Errorf("answer: %v", err)
		}
	})
}

// TestPoll: a waiting caller receives messages itself, whether it has to sleep or not. Messages that arrive
// without a Poll are received, too.
func TestPoll(t *testing.T) {
	for _, c := range []struct {
		name string
		spin time.Duration
	}{
		{"spins", env.SpinThenBlock.Spin()},
		{"sleeps at once", 1},
		{"never spins", 0},
		{"spins for ever", -1},
	} {
		t.Run(c.name, func(t *testing.T) {
			n := inproc.NewNetwork()
			set := func(v *Van) { v.receiveWith(engine.New(c.spin)) }
			worker, server := newNode(t, n, 9, set), newNode(t, n, 8, set)
			var got atomic.Int64
			signal := make(chan struct{}, 1)
			worker.Start(func(m *van.Message) {
				if m.Timestamp != int32(got.Load()) {
					t.Errorf("answer %d came when %d was due", m.Timestamp, got.Load())
				}
				got.Add(1)
				select {
				case signal <- struct{}{}:
				default:
				}
			})
			server.echoing()
			worker.connect(server)
			server.connect(worker)
			for i := range 2000 {
				worker.must(data(8, i, []byte("x")))
				done := func() bool { return got.Load() > int64(i) }
				if i%3 != 0 {
					worker.tx.engine.Poll(done)
				}
				for end := time.After(limit); !done(); {
					select {
					case <-signal:
					case <-end:
						t.Fatalf("no answer %d", i)
					}
				}
			}
		})
	}
}

// TestPollsAtOnce: many callers wait at the same time; each gets its answer soon,
// though only one of them polls.
func TestPollsAtOnce(t *testing.T) {
	n := inproc.NewNetwork()
	worker, server := newNode(t, n, 9, nil), newNode(t, n, 8, nil)
	const callers, each = 4, 300
	var answers [callers]chan int32
	for i := range answers {
		answers[i] = make(chan int32, 1)
	}
	worker.Start(func(m *van.Message) { answers[m.Timestamp%callers] <- m.Timestamp })
	server.echoing()
	worker.connect(server)
	server.connect(worker)
	errs := make(chan error, callers)
	for c := range callers {
		go func() {
			for i := range each {
				ts := i*callers + c
				if err := worker.Send(data(8, ts, []byte("x"))); err != nil {
					errs <- err
					return
				}
				worker.tx.engine.Poll(func() bool { return len(answers[c]) > 0 })
				select {
				case got := <-answers[c]:
					if int(got) != ts {
						errs <- fmt.Errorf("caller %d: answer %d, want %d", c, got, ts)
						return
					}
				case <-time.After(limit):
					errs <- fmt.Errorf("caller %d: no answer %d", c, ts)
					return
				}
			}
			errs <- nil
		}()
	}
	for range callers {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
}

// TestMixed: a worker polls for peers of both kinds.
func TestMixed(t *testing.T) {
	n := inproc.NewNetwork()
	worker, near, far := newNode(t, n, 9, nil), newNode(t, n, 8, nil), newNode(t, n, 10, nil)
	worker.start()
	near.echoing()
	far.echoing()
	far.self.Endpoint = nil
	worker.connect(near)
	near.connect(worker)
	for _, c := range []struct{ a, b *node }{{worker, far}, {far, worker}} {
		self := c.b.self
		self.Endpoint = nil
		if err := c.a.Connect(t.Context(), self.ID, self); err != nil {
			t.Fatal(err)
		}
	}
	if worker.Linked(10) {
		t.Fatal("linked to a node that does not offer it")
	}
	for i := range 500 {
		for _, id := range []int{8, 10} {
			worker.must(data(id, i, []byte("x")))
			worker.tx.engine.Poll(func() bool { return len(worker.in) > 0 })
			m := worker.next()
			if m.Sender != id || int(m.Timestamp) != i {
				t.Fatalf("answer %d of %d, want %d of %d", m.Timestamp, m.Sender, i, id)
			}
			m.Release()
		}
	}
}

// TestReplaced: messages of a replacement process are not delivered before this node knows of it. Events of the
// former process's link then have no effect.
func TestReplaced(t *testing.T) {
	worker, first := pair(t)
	worker.must(data(8, 1, []byte("x")))
	first.next().Release()
	first.must(data(9, 1, []byte("of the first")))
	worker.next().Release()

	second := newNode(t, inproc.NewNetwork(), 8, nil)
	second.start()
	second.connect(worker)
	second.must(data(9, 2, []byte("of the second")))
	if err := first.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	for !errors.Is(worker.event(8, false).cause, errLinkBroke) { // otherwise the loss may be reported while the second is connected
	}
	eventually(t, "the loss of the first is noticed", func() bool { return !worker.Linked(8) })
	for len(worker.events) > 0 {
		<-worker.events
	}
	if err := worker.Connect(t.Context(), 8, second.self); err != nil {
		t.Fatal(err)
	}
	worker.peers.Mu.Lock()
	var held int
	for _, l := range worker.peers.Ins() {
		if l.Held.Load() {
			held++
		}
	}
	worker.peers.Mu.Unlock()
	if held > 1 {
		t.Errorf("%d links are held, want at most that of the second", held)
	}
	worker.Admit(8)
	if m := worker.next(); string(m.Vals.Host()) != "of the second" {
		t.Errorf("received %q", m.Vals.Host())
	}
	for len(worker.events) > 0 {
		if e := <-worker.events; errors.Is(e.cause, errLinkBroke) && worker.Linked(8) {
			t.Errorf("told of %+v when the second was there", e)
		}
	}
}

// TestStranger: messages of an unknown peer are delivered after a while.
func TestStranger(t *testing.T) {
	n := inproc.NewNetwork()
	worker, server := newNode(t, n, 9, nil), newNode(t, n, 8, func(v *Van) { v.peers.O.HoldTime = links.HoldTime })
	worker.start()
	server.start()
	begun := time.Now()
	worker.connect(server)
	worker.must(data(8, 1, []byte("x")))
	server.next().Release()
	if d := time.Since(begun); d < links.HoldTime/2 {
		t.Errorf("heard after %s, want about %s", d, links.HoldTime)
	}
}
