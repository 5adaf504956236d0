package local

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/tests/inproc"
	"github.com/stepaf/stepaf-go/tests/simgpu"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/engine"
	"github.com/stepaf/stepaf-go/van/links"
)

// linked makes worker 9 and server 8 on these devices, linked both ways.
func linked(t testing.TB, wdev, sdev backend.Backend, set func(*Van)) (worker, server *node) {
	n := inproc.NewNetwork()
	with := func(b backend.Backend) func(*Van) {
		return func(v *Van) {
			v.backend = b
			if set != nil {
				set(v)
			}
		}
	}
	worker, server = newNode(t, n, 9, with(wdev)), newNode(t, n, 8, with(sdev))
	worker.start()
	server.start()
	worker.connect(server)
	server.connect(worker)
	return worker, server
}

// TestPollGivenUp: a Poll that leaves the receiving to another one may be the one because
// of which the loop went to sleep, after that other Poll has ended.
func TestPollGivenUp(t *testing.T) {
	x := newNode(t, inproc.NewNetwork(), 9, nil)
	x.rx.feed.Lock() // as another Poll does that ends at this moment
	before := x.own.bell.bell.count(loopWaiter)
	if x.rx.feed.Claim() {
		t.Fatal("a Poll has what another one holds")
	}
	if x.own.bell.bell.count(loopWaiter) == before {
		t.Error("the loop sleeps on, though nobody polls and it has not armed the bell")
	}
	x.rx.feed.Unlock()
}

// TestPollClosing: Polls while a van ends, for longer than they wait for their turn, do
// not touch what is freed there.
func TestPollClosing(t *testing.T) {
	worker, server, wdev, sdev := devicePair(t)
	open := block(sdev, server.feedOf())
	worker.must(value(wdev, 8, 1, pattern(1, 5000)))
	eventually(t, "the copy is queued", func() bool { return server.copies.running.Load() == 1 })
	stop := make(chan struct{})
	var polls sync.WaitGroup
	for range 3 {
		polls.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
					server.beginPollOnce()
				}
			}
		})
	}
	time.AfterFunc(20*time.Millisecond, open)
	if err := server.Close(t.Context()); err != nil {
		t.Error(err)
	}
	close(stop)
	polls.Wait()
	close(server.in)
	for m := range server.in { // the copy may have ended in time
		m.Release()
	}
}

// beginPollOnce is a Poll that has just found the van open.
func (x *node) beginPollOnce() {
	if x.rx.feed.Claim() {
		x.rx.feed.Release(false, false)
	}
}

// TestAnswerElsewhere: an answer that arrives by another path than expected ends its expectation: the memory is
// the caller's then.
func TestAnswerElsewhere(t *testing.T) {
	worker, server, wdev, sdev := devicePair(t)
	expected := worker.dests.Expected
	into := wdev.Mem(make([]byte, 3000))
	for i, answer := range []*van.Message{data(9, 0, pattern(1, 3000)), data(9, 1, nil), data(9, 2, pattern(1, streamFrom))} {
		worker.must(pullInto(8, i, into))
		server.next().Release()
		server.must(asAnswer(answer))
		worker.next().Release()
		if n := expected(); n != 0 {
			t.Errorf("answer %d: %d answers are expected", i, n)
		}
		server.must(asAnswer(value(sdev, 9, i, pattern(2, 3000))))
		m := worker.next()
		if m.Placed {
			t.Errorf("answer %d: a second answer went into memory that is the caller's again", i)
		}
		m.Release()
	}
	// Over the van inside, since the peer could not make a link.
	if err := server.inner.Connect(t.Context(), 9, worker.self); err != nil {
		t.Fatal(err)
	}
	worker.must(pullInto(8, 9, into))
	server.next().Release()
	if err := server.inner.Send(asAnswer(data(9, 9, pattern(1, 3000)))); err != nil {
		t.Fatal(err)
	}
	worker.next().Release()
	if n := expected(); n != 0 {
		t.Errorf("over the van inside: %d answers are expected", n)
	}
}

// TestAnswerRead: an answer of which all is read from the sender, its head, too, ends the expectation of it: a second
// answer does not go into memory that is the caller's again.
func TestAnswerRead(t *testing.T) {
	worker, server := pair(t)
	into := make([]byte, streamFrom)
	worker.must(pull(8, 1, into))
	server.next().Release()
	m := asAnswer(data(9, 1, pattern(1, streamFrom)))
	m.Body = make([]byte, streamFrom)
	l := server.peers.link(9)
	l.mu.Lock()
	var r record
	size := r.plan(m, partPinned)
	head := make([]byte, r.parts[0].n)
	err := errors.Join(m.EncodeTo(head), r.put(l.seg.at(l.tail), size, m, head, nil))
	if err == nil {
		l.publish(&r, size, pinOf(&r, m, head, 0))
		l.bell.ring()
	}
	l.mu.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	worker.next().Release()
	server.must(asAnswer(data(9, 1, pattern(2, streamFrom))))
	again := worker.next()
	defer again.Release()
	if again.Placed || !bytes.Equal(into, make([]byte, streamFrom)) {
		t.Error("a second answer went into memory that is the caller's again")
	}
}

// TestDropBounded: a device on which copies do not end keeps the node from receiving for
// a while, not for a while for each of them.
func TestDropBounded(t *testing.T) {
	wdev, sdev := simgpu.New(1), simgpu.New(2)
	t.Cleanup(func() { _, _ = wdev.Close(), sdev.Close() }) // closed with the memory that the copies may write to
	worker, server := linked(t, wdev, sdev, nil)
	server.rx.feed.Lock()
	server.rx.dropTime = 300 * time.Millisecond
	server.rx.feed.Unlock()
	open := block(sdev, server.feedOf())
	const n = 60 // half of their time is longer than any pause of this machine
	for i := range n {
		worker.must(value(wdev, 8, i, pattern(i, 5000)))
	}
	eventually(t, "the copies are queued", func() bool { return server.copies.running.Load() == n })
	begun := time.Now()
	l := worker.peers.link(8)
	l.mu.Lock()
	l.write(pattern(3, 4096)) // ends the link
	l.mu.Unlock()
	eventually(t, "the link is given up", func() bool { return server.copies.running.Load() == 0 })
	if d := time.Since(begun); d > n*server.rx.dropTime/2 {
		t.Errorf("given up after %s, want about %s", d, server.rx.dropTime)
	}
	open()
}

// TestRevokeBounded: if a device's copy to invalidated memory does not end, Invalidate returns after a bounded
// time, and the log says that the memory is not safe.
func TestRevokeBounded(t *testing.T) {
	wdev, sdev := simgpu.New(1), simgpu.New(2)
	t.Cleanup(func() { _, _ = wdev.Close(), sdev.Close() })
	var log vantest.Log
	worker, server := linked(t, wdev, sdev, func(v *Van) {
		v.rx.dropTime = 100 * time.Millisecond
		v.logTo(log.Logger())
	})
	into := wdev.Mem(make([]byte, 3000))
	worker.must(pullInto(8, 1, into))
	server.next().Release()
	open := block(wdev, worker.feedOf())
	server.must(asAnswer(value(sdev, 9, 1, pattern(1, 3000))))
	eventually(t, "the copy is queued", func() bool { return worker.copies.running.Load() == 1 })
	worker.Invalidate(into)
	if want := "a copy to memory that is taken back does not end"; !strings.Contains(log.String(), want) {
		t.Errorf("the log has no line %q", want)
	}
	open()
}

// TestStrandedCopy: if a copy to the memory of a pull has not ended when the peer's link is closed, it may write
// there at any time. Invalidate waits for it, and logs if it does not end.
func TestStrandedCopy(t *testing.T) {
	for _, recorded := range []bool{true, false} {
		t.Run(fmt.Sprintf("recorded=%t", recorded), func(t *testing.T) {
			wdev, sdev := &unrecordable{pretended: simgpu.New(1)}, simgpu.New(2)
			t.Cleanup(func() { _, _ = wdev.Close(), sdev.Close() })
			var log vantest.Log
			worker, server := linked(t, wdev, sdev, func(v *Van) {
				v.rx.dropTime = 100 * time.Millisecond
				v.logTo(log.Logger())
			})
			into := wdev.Mem(make([]byte, 3000))
			worker.must(pullInto(8, 1, into))
			server.next().Release()
			open := block(wdev.pretended, worker.feedOf())
			wdev.failing.Store(!recorded) // then the link ends by itself
			server.must(asAnswer(value(sdev, 9, 1, pattern(1, 3000))))
			if recorded {
				eventually(t, "the copy is queued", func() bool { return worker.copies.running.Load() == 1 })
				l := server.peers.link(9)
				l.mu.Lock()
				l.write(pattern(3, 4096)) // ends the link
				l.mu.Unlock()
			}
			worker.event(8, false)
			const line = "a copy to memory that is taken back does not end"
			for i := range 2 {
				worker.Invalidate(into)
				if n := strings.Count(log.String(), line); n != i+1 {
					t.Errorf("%d lines %q, want %d", n, line, i+1)
				}
			}
			if n := worker.copies.running.Load(); n != 0 {
				t.Errorf("%d copies keep the receiver awake", n)
			}
			if wdev.Imports() == 0 {
				t.Error("what the copy reads is not mapped any more")
			}
			open()
			worker.Invalidate(into)
			if n := strings.Count(log.String(), line); n != 2 {
				t.Errorf("the copy has ended, but the log has %d lines %q, want 2", n, line)
			}
			clear(simgpu.Raw(into)) // the race detector sees a copy that still runs
		})
	}
}

type pretended = simgpu.Device

// unrecordable is a device whose events fail when they are recorded.
type unrecordable struct {
	*pretended
	failing atomic.Bool
}

type unrecorded struct {
	backend.Event
	d *unrecordable
}

func (d *unrecordable) NewEvent() (backend.Event, error) {
	e, err := d.pretended.NewEvent()
	return unrecorded{e, d}, err
}

var errRecord = errors.New("no flag for the event")

func (e unrecorded) Record(s uintptr) error {
	if e.d.failing.Load() {
		return errRecord
	}
	return e.Event.Record(s)
}

// TestDeviceUnrecorded: a copy whose event cannot be recorded is over before its memory is reused.
func TestDeviceUnrecorded(t *testing.T) {
	wdev, sdev := &unrecordable{pretended: simgpu.New(1)}, simgpu.New(2)
	t.Cleanup(func() { _, _ = wdev.Close(), sdev.Close() })
	worker, server := linked(t, wdev, sdev, nil)
	into := wdev.Mem(make([]byte, 3000))
	worker.must(pullInto(8, 1, into))
	server.next().Release()
	open := block(wdev.pretended, worker.feedOf())
	wdev.failing.Store(true)
	server.must(asAnswer(value(sdev, 9, 1, pattern(1, 3000))))
	select {
	case e := <-worker.events:
		t.Errorf("given up because of %v while the copy is under way", e.cause)
	case <-time.After(200 * time.Millisecond):
	}
	open()
	if e := worker.event(8, false); !errors.Is(e.cause, errRecord) {
		t.Errorf("lost because of %v", e.cause)
	}
	worker.Invalidate(into)
	clear(simgpu.Raw(into)) // the race detector sees a copy that still runs
}

// TestTidy: a node that receives nothing closes unused mappings, whether it sleeps or always spins.
func TestTidy(t *testing.T) {
	for _, c := range []struct {
		name string
		spin time.Duration
	}{{"sleeps", 0}, {"spins for ever", -1}} {
		t.Run(c.name, func(t *testing.T) {
			wdev, sdev := simgpu.New(1), simgpu.New(2)
			t.Cleanup(func() { _, _ = wdev.Close(), sdev.Close() })
			worker, server := linked(t, wdev, sdev, func(v *Van) {
				v.receiveWith(engine.New(c.spin))
				v.receiver.maxSleep = maxSleep
			})
			worker.must(value(wdev, 8, 1, pattern(1, 100)))
			server.next().Release()
			s := server.feedOf()
			server.rx.feed.Lock()
			for _, m := range s.maps {
				m.used -= uint64(mapTime)
			}
			server.receiver.tidied = 0
			server.rx.feed.Unlock()
			eventually(t, "the mapping is gone", func() bool { return sdev.Imports() == 0 })
		})
	}
}

// TestRecordChanges: a record that the sender changes between two reads is refused.
func TestRecordChanges(t *testing.T) {
	worker, server := pair(t)
	_ = worker
	b := valid(t)
	b[4] = kindRest // it was kindMessage
	server.rx.feed.Lock()
	defer server.rx.feed.Unlock()
	if p, err := server.peers.Ins()[0].message(b); !errors.Is(err, van.ErrMalformed) {
		t.Errorf("%v, %v", p, err)
	}
}

// TestDeviceLinkGone: a value that was given to a link to a device that is not there any
// more can be sent in another way.
func TestDeviceLinkGone(t *testing.T) {
	worker, server, wdev, _ := devicePair(t)
	_ = server
	l := worker.peers.link(8)
	l.device = false
	err := worker.Send(value(wdev, 8, 1, pattern(1, 100)))
	l.device = true
	if !errors.Is(err, backend.ErrNotExportable) {
		t.Errorf("a link without a device: %v", err)
	}
	n := worker.peers.Of(8)
	worker.peers.Set(n, links.Unlinked, errLinkBroke)
	if err := worker.Send(value(wdev, 8, 1, pattern(1, 100))); !errors.Is(err, backend.ErrNotExportable) {
		t.Errorf("no link: %v", err)
	}
	if err := worker.peers.Install(n, l); err != nil {
		t.Fatal(err)
	}
}

// waiting is a device with a stream that waits for a message. Until that stream's work has ended, calls that free
// or unmap memory block.
type waiting struct {
	*pretended
	waits atomic.Bool
	t     *testing.T
}

func (d *waiting) MayBlock() bool { return d.waits.Load() }

func (d *waiting) Free(m backend.Mem) error {
	d.ends("Free")
	return d.pretended.Free(m)
}

func (d *waiting) CloseImport(m backend.Mem) error {
	d.ends("CloseImport")
	return d.pretended.CloseImport(m)
}

func (d *waiting) ends(what string) {
	if d.waits.Load() {
		d.t.Errorf("%s waits for a stream that waits for a message", what)
	}
}

// TestDeviceWaits: while a stream waits for a message, no memory is freed or unmapped, for any traffic. It is
// freed at the end, or, if the stream still waits then, left to the backend.
func TestDeviceWaits(t *testing.T) {
	t.Run("until the end", func(t *testing.T) { testDeviceWaits(t, false) })
	t.Run("beyond it", func(t *testing.T) { testDeviceWaits(t, true) })
}

func testDeviceWaits(t *testing.T, beyond bool) {
	wdev, sdev := simgpu.New(1), &waiting{pretended: simgpu.New(2), t: t}
	t.Cleanup(func() { // after the vans
		_, _ = wdev.Close(), sdev.Close()
		wdev.Leaks(t)
		if !beyond {
			sdev.Leaks(t)
		} else if sdev.Imports() == 0 {
			t.Error("nothing is left to the backend")
		}
	})
	worker, server := linked(t, wdev, sdev, nil)
	t.Cleanup(func() { sdev.waits.Store(beyond) }) // before them
	sdev.waits.Store(true)
	server.rx.feed.Lock()
	server.own.device.pool = backend.NewPool(24000, sdev.Alloc, sdev.Free).For(sdev)
	server.rx.feed.Unlock()
	for i, n := range []int{10000, 5000, 20000} { // there is no memory for the last one
		worker.must(value(wdev, 8, i, pattern(i, n)))
		dev := sdev.Device()
		if i == 2 {
			dev = backend.Host
		}
		wantValue(t, server.next(), i, dev, pattern(i, n))
	}
	s := server.feedOf()
	server.rx.feed.Lock()
	s.tidy(1 << 62)
	for _, m := range s.maps { // something else lies there now
		e, err := wdev.Export(wdev.Mem(make([]byte, 100)))
		if err != nil {
			t.Fatal(err)
		}
		e.Base = m.base
		if _, err := s.mapOf(&e); err != nil {
			t.Fatal(err)
		}
		break
	}
	server.rx.feed.Unlock()
	l := worker.peers.link(8)
	l.mu.Lock()
	l.write(pattern(3, 4096)) // ends the link, and they make another one
	l.mu.Unlock()
	server.event(9, false)
	worker.event(8, true)
	worker.must(value(wdev, 8, 9, pattern(9, 10000)))
	wantValue(t, server.next(), 9, sdev.Device(), pattern(9, 10000))
}

// TestPendingCopies: a long copy, of a peer that is lost, or of so many that no more are
// begun, does not keep the loop from sleeping.
func TestPendingCopies(t *testing.T) {
	worker, server, wdev, sdev := devicePair(t)
	s := server.feedOf()
	open := block(sdev, s)
	defer open()
	for i := range maxCopies + 1 {
		worker.must(value(wdev, 8, i, pattern(i, 100)))
	}
	pending := func() (full, lost, pending bool) {
		server.rx.feed.Lock()
		defer server.rx.feed.Unlock()
		return s.full(), server.peers.Ins()[0].lost.Load(), server.receiver.pending()
	}
	eventually(t, "no more is begun", func() bool { full, _, _ := pending(); return full })
	if _, _, p := pending(); p {
		t.Error("the loop looks for more without pause while it takes no more")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_ = worker.Close(ctx)
	eventually(t, "the loss is noticed", func() bool { _, lost, _ := pending(); return lost })
	if _, _, p := pending(); p {
		t.Error("the loop looks without pause for the end of copies from a lost peer")
	}
}

// TestCopyAfterPoll: if a Poll has begun a copy and ended before it, the loop polls for its end, although the loop
// slept when it began, and would sleep for an hour.
func TestCopyAfterPoll(t *testing.T) {
	worker, server, wdev, sdev := devicePair(t, func(v *Van) { v.receiver.maxSleep = time.Hour })
	s := server.feedOf()
	for i := range 6 {
		eventually(t, "the loop sleeps", server.rx.feed.Parked)
		open := block(sdev, s)
		polls, polled := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(polled)
			var once sync.Once
			for server.copies.running.Load() == 0 {
				server.tx.engine.Poll(func() bool {
					once.Do(func() { close(polls) })
					return server.copies.running.Load() > 0
				})
			}
		}()
		<-polls
		worker.must(value(wdev, 8, i, pattern(i, 100)))
		<-polled
		open()
		wantValue(t, server.next(), i, sdev.Device(), pattern(i, 100))
	}
}
