package local

import (
	"bytes"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/tests/inproc"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// TestNoWakeUpIsLost: a message that arrives just when a node goes to sleep wakes it. This does not depend on the
// sleep's bound, which is there for peers that write nonsense.
func TestNoWakeUpIsLost(t *testing.T) {
	n := inproc.NewNetwork()
	worker := newNode(t, n, 9, nil)
	var late atomic.Pointer[func()]
	server := newNode(t, n, 8, func(v *Van) {
		v.receiver.maxSleep = time.Hour
		v.receiver.polled = func() {
			if f := late.Swap(nil); f != nil {
				(*f)()
			}
		}
	})
	worker.start()
	server.start()
	worker.connect(server)
	server.connect(worker)
	for i := range 20 {
		send := func() { worker.must(data(8, i, pattern(i, 100))) }
		late.Store(&send)
		server.own.bell.bell.wake(loopWaiter) // it finds nothing, and goes to sleep again
		m := server.next()
		if int(m.Timestamp) != i {
			t.Fatalf("message %d came when %d was due", m.Timestamp, i)
		}
		m.Release()
	}
}

// TestStreamOfASleeper: a value longer than the ring, whose rest the peer may not read, arrives though its sender
// has just gone to sleep, and does nothing more.
func TestStreamOfASleeper(t *testing.T) {
	n := inproc.NewNetwork()
	var late atomic.Pointer[func()]
	worker := newNode(t, n, 9, func(v *Van) {
		v.receiver.polled = func() {
			if f := late.Swap(nil); f != nil {
				(*f)()
			}
		}
	})
	server := newNode(t, n, 8, func(v *Van) { v.acceptor.streamOnly = true })
	worker.start()
	server.start()
	worker.connect(server)
	server.connect(worker)
	vals := pattern(1, 5<<20)
	send := func() { worker.must(data(8, 1, vals)) }
	late.Store(&send)
	worker.own.bell.bell.wake(loopWaiter) // it finds nothing, and goes to sleep again
	m := server.next()
	if !bytes.Equal(m.Vals.Host(), vals) {
		t.Error("the values differ")
	}
	m.Release()
}

// TestRestOfManyParts: a stream of several large parts that its receiver does not take is
// pinned from where it was, each part from its beginning or from where that was.
func TestRestOfManyParts(t *testing.T) {
	n := inproc.NewNetwork()
	worker, server := newNode(t, n, 9, nil), newNode(t, n, 8, nil)
	worker.start()
	worker.connect(server)
	server.connect(worker)
	keys := make([]uint64, 400_000) // more than the ring
	for i := range keys {
		keys[i] = uint64(i) * 3
	}
	vals := pattern(1, 300_000)
	lens := make([]int32, 100_000)
	for i := range lens {
		lens[i] = int32(i)
	}
	m := data(8, 1, vals)
	m.Frames, m.Keys, m.Lens = 3, backend.Slice(keys), backend.Slice(lens)
	m.DataTypes = append(m.DataTypes, van.TypeInt32)
	m.DataSize = int32(m.PayloadLen())
	worker.must(m)
	if n := worker.Stats().LentValues; n != 1 {
		t.Fatalf("%d values are pinned, want one", n)
	}
	server.start()
	got := server.next()
	if !bytes.Equal(got.Keys.Host(), m.Keys.Host()) || !bytes.Equal(got.Vals.Host(), vals) || !bytes.Equal(got.Lens.Host(), m.Lens.Host()) {
		t.Errorf("what came differs: keys %t, values %t, lengths %t", bytes.Equal(got.Keys.Host(), m.Keys.Host()),
			bytes.Equal(got.Vals.Host(), vals), bytes.Equal(got.Lens.Host(), m.Lens.Host()))
	}
	got.Release()
}

// TestTakenBack: a value that was pinned and taken back before it was read, and may be
// something else by then, is not handed up.
func TestTakenBack(t *testing.T) {
	n := inproc.NewNetwork()
	worker, server := newNode(t, n, 9, nil), newNode(t, n, 8, nil)
	worker.start()
	entered, release := make(chan struct{}), make(chan struct{})
	server.Start(func(m *van.Message) {
		if m.Timestamp == 0 {
			close(entered)
			<-release
		}
		server.in <- m.Retain()
	})
	worker.connect(server)
	server.connect(worker)
	worker.must(data(8, 0, nil))
	select {
	case <-entered:
	case <-time.After(limit):
		t.Fatal("nothing came")
	}
	value := pattern(1, 6<<20)
	server.rx.feed.Lock() // so that the rest of the value is pinned
	worker.must(data(8, 1, value))
	server.rx.feed.Unlock()
	if n := worker.Stats().LentValues; n != 1 {
		t.Fatalf("%d values are pinned, want one", n)
	}
	eventually(t, "the value waits behind the first message", func() bool { return server.rx.feed.Loop.Budget.Used() > 0 })
	worker.peers.link(8).close(false)
	copy(value, pattern(2, len(value)))
	close(release)
	server.next().Release()
	eventually(t, "the second message is gone", func() bool {
		return server.rx.feed.Loop.Budget.Used() == 0 && len(server.peers.Ins()) > 0 && server.peers.Ins()[0].from.inHand.Load() == 0
	})
	select {
	case m := <-server.in:
		t.Errorf("message %d was handed up, of which the sender had taken back the value", m.Timestamp)
	default:
	}
}

// TestLostPeerOwesNothing: requests to a lost peer are removed with it, and leave nothing that waits for answers.
func TestLostPeerOwesNothing(t *testing.T) {
	worker, server := pair(t)
	for i := range 3 {
		worker.must(pull(8, i, make([]byte, 1<<20)))
		server.next().Release()
	}
	if n := asked(worker); n != 3 {
		t.Fatalf("%d answers are expected, want 3", n)
	}
	server.breakIn()
	worker.event(8, false)
	if n := asked(worker); n != 0 {
		t.Errorf("%d answers of the lost peer are still expected", n)
	}
}

// asked is how many answers a van expects in memory that pull requests have named.
func asked(x *node) int { return x.dests.Expected() }
