package window

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/internal/commlayer"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/hooks"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
)

// TestOneClosesFirst: a rank that closes its window before the others gives it up when they have closed
// theirs, too: more windows than there are application ids can be opened one after the other.
func TestOneClosesFirst(t *testing.T) {
	of := Options{Signals: 1}
	r := newRig(t, testcluster.Options{}, 2, of)
	for range windowsEach + 44 {
		if err := r.windows[0].Close(); err != nil {
			t.Fatal(err)
		}
		if err := r.windows[1].WaitSignal(t.Context(), 0, 0); !errors.Is(err, van.ErrClosed) {
			t.Fatalf("who waits for the closed window: %v", err)
		}
		if err := r.windows[1].Close(); err != nil {
			t.Fatal(err)
		}
		r.all(func(i int) error {
			r.free(r.windows[i])
			w, err := Open(t.Context(), r.comms[i], of)
			if err == nil {
				r.windows[i] = w
			}
			return err
		})
	}
}

// free waits until the application id of a window is free.
func (r *rig) free(w *Window) {
	for end := time.Now().Add(testTime); ; runtime.Gosched() {
		c, err := w.base.app.AddCustomer(w.base.id, w.base.id, func(*van.Message) {})
		if err == nil {
			c.Close()
			return
		}
		if time.Now().After(end) {
			r.Errorf("%v of rank %d: %v", w, w.base.self, err)
			return
		}
	}
}

// TestCloseBehindOthers: a rank's notice that it has closed its window counts after all its earlier messages, also
// while this rank is closing its own, and is not lost if these never arrive. Close releases the messages that wait
// for it.
func TestCloseBehindOthers(t *testing.T) {
	hook := &hooks.Van{}
	r := newRig(t, testcluster.Options{Wrap: hook.Wrap("worker", 1)}, 2, Options{Size: 8, Signals: 1})
	w, p := r.windows[1], r.windows[1].peers[0]
	say := func(verb verb, seq uint64, signal uint16) {
		n := note{verb: verb, seq: seq, signal: signal, window: w.base.child.Number, epoch: w.base.child.Epoch}
		r.lie(n.append(nil), make([]byte, 8), int32(2*seq))
	}
	is := func(i uint64) bool {
		p.in.mu.Lock()
		defer p.in.mu.Unlock()
		return p.in.early[i] != nil
	}
	early := func(i uint64) {
		t.Helper()
		for end := time.Now().Add(testTime); !is(i); runtime.Gosched() {
			if p.gone.Load() != nil || time.Now().After(end) {
				w.base.closed.Store(false)
				t.Fatal("what was sent before has been overtaken")
			}
		}
	}
	w.base.closed.Store(true) // as while Close flushes
	say(verbClose, 1, noSignal)
	early(1)
	say(verbPut, 0, 0)
	if err := w.WaitSignal(t.Context(), 0, 0); err != nil {
		t.Fatal(err)
	}
	w.base.closed.Store(false)
	if err := w.WaitSignal(t.Context(), 0, 0); !errors.Is(err, van.ErrClosed) {
		t.Fatalf("behind its end: %v", err)
	}
	p.gone.Store(nil)
	say(verbClose, 3, noSignal)
	early(3)
	say(verbPut, 4, 0)
	early(4)
	if hook.Held() < 2 {
		t.Fatalf("%d messages are held, want the two that wait", hook.Held())
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	vantest.Eventually(t, testTime, "all messages are given back", func() bool { return hook.Held() == 0 })
	if p.gone.Load() == nil {
		t.Error("that the rank has closed was thrown away")
	}
}

// TestCloseIsNotCanceled: the notice that a window was closed stays when Close cancels a put to another rank: they have different
// timestamps.
func TestCloseIsNotCanceled(t *testing.T) {
	hook := &hooks.Van{}
	r := newRig(t, testcluster.Options{Wrap: hook.Wrap("worker", 0)}, 3, Options{Size: 8})
	hook.OnSend(func(*van.Message) hooks.Verdict { return hooks.Keep })
	w := r.windows[0]
	if err := w.Put(t.Context(), 1, 0, tensor(make([]byte, 8))); err != nil {
		t.Fatal(err)
	}
	w.peers[2].out.sayClosed()
	kept := hook.Kept()
	if len(kept) != 2 {
		t.Fatalf("%d messages are kept, want a put and a notice", len(kept))
	}
	put, notice := kept[0], kept[1]
	if q := (van.Requests{App: put.AppID, Customer: put.CustomerID, First: put.Timestamp, Count: 1}); !q.Has(&put.Meta) || q.Has(&notice.Meta) {
		t.Errorf("the put has timestamp %d, the notice %d", put.Timestamp, notice.Timestamp)
	}
	hook.OnSend(nil)
	if err := hook.SendKept(); err != nil {
		t.Error(err)
	}
}

// TestSameIDWithResend: a window with the application id of an earlier one is not taken for it,
// though PS_RESEND remembers that one's messages.
func TestSameIDWithResend(t *testing.T) {
	of := Options{Signals: 1}
	r := newRig(t, testcluster.Options{Over: testcluster.TCP, Set: func(c *postoffice.Config) { c.Resend = true }}, 2, of)
	exchange := func(i int) error {
		w := r.windows[i]
		for range 5 {
			if err := w.Signal(t.Context(), 1-i, 0); err != nil {
				return err
			}
			if err := w.WaitSignal(t.Context(), 1-i, 0); err != nil {
				return err
			}
			if err := w.Flush(t.Context(), 1-i); err != nil {
				return err
			}
		}
		return nil
	}
	for range 3 {
		r.all(exchange)
		r.all(func(i int) error {
			old := r.windows[i]
			err := r.comms[i].Rebuild(t.Context())
			_ = old.Close()
			r.free(old)
			for l := commlayer.Of(r.comms[i]); err == nil; {
				child, e := l.Enter("try", func(int, error) {})
				if err = e; err == nil {
					child.Leave()
					if appOf(child.Epoch, child.Number+1, l.ID()) == old.base.id {
						break
					}
				}
			}
			if err != nil {
				return err
			}
			w, err := Open(t.Context(), r.comms[i], of)
			if err == nil {
				r.windows[i] = w
			}
			return err
		})
	}
}

// TestFlushToWhoHasClosed: messages that a rank received before it closed its end count as arrived, though the
// transport releases their memory later.
func TestFlushToWhoHasClosed(t *testing.T) {
	for range 4 {
		r := newRig(t, testcluster.Options{Over: testcluster.TCP, Set: func(c *postoffice.Config) {
			c.Resend, c.ResendTimeout, c.DropMsg = true, 200*time.Millisecond, 10
		}}, 2, Options{Size: 1 << 20, Signals: 1})
		var other sync.WaitGroup
		other.Go(func() {
			for range 20 {
				if err := r.windows[1].WaitSignal(t.Context(), 0, 0); err != nil {
					t.Error(err)
				}
			}
			_ = r.windows[1].Close()
		})
		for range 20 {
			if err := r.windows[0].PutSignal(t.Context(), 1, 0, filled(50000, 1), 0); err != nil {
				t.Error(err)
			}
		}
		if err := r.windows[0].Flush(t.Context(), 1); err != nil {
			t.Error(err)
		}
		other.Wait()
		if err := r.windows[0].Close(); err != nil {
			t.Error(err)
		}
	}
}

// TestRefusedPut: a put that the transport refuses counts for nothing: the next one arrives, and is flushed.
func TestRefusedPut(t *testing.T) {
	hook := &hooks.Van{}
	r := newRig(t, testcluster.Options{Wrap: hook.Wrap("worker", 0)}, 2, Options{Size: 1 << 16, Signals: 1})
	w, data := r.windows[0], filled(1<<16, 2)
	hook.OnSend(func(*van.Message) hooks.Verdict { return hooks.Refuse(van.ErrQueueFull) })
	bad := filled(1<<16, 1)
	ctx, cancel := context.WithTimeout(t.Context(), testTime)
	defer cancel()
	for sent := 0; sent <= 2*maxBytes; sent += 1 << 16 { // none of it is under way
		if err := w.PutSignal(ctx, 1, 0, bad, 0); !errors.Is(err, van.ErrQueueFull) {
			t.Fatalf("behind %d bytes: got %v, want ErrQueueFull", sent, err)
		}
	}
	hook.OnSend(nil)
	if err := w.PutSignal(t.Context(), 1, 0, data, 0); err != nil {
		t.Fatal(err)
	}
	if err := r.windows[1].WaitSignal(t.Context(), 0, 0); err != nil || !bytes.Equal(r.windows[1].Bytes(), data.Bytes()) {
		t.Errorf("the next put: %v", err)
	}
	if err := w.Flush(t.Context(), 1); err != nil {
		t.Error(err)
	}
}

// later is a Completion that is notified when free is closed.
type later struct {
	van.Completion
	free chan struct{}
}

func (l later) Sent() {
	go func() {
		<-l.free
		l.Completion.Sent()
	}()
}

// TestFlushWaitsForTheTransport: a put is not flushed while the transport may still read its memory, though the
// rank has taken the data.
func TestFlushWaitsForTheTransport(t *testing.T) {
	hook := &hooks.Van{}
	r := newRig(t, testcluster.Options{Wrap: hook.Wrap("worker", 0)}, 2, Options{Size: 1 << 16, Signals: 1})
	free := make(chan struct{})
	hook.OnSend(func(m *van.Message) hooks.Verdict {
		if m.Done != nil {
			m.Done = later{m.Done, free}
		}
		return hooks.Pass
	})
	if err := r.windows[0].PutSignal(t.Context(), 1, 0, filled(1<<16, 1), 0); err != nil {
		t.Fatal(err)
	}
	flushed := make(chan error, 1)
	go func() { flushed <- r.windows[0].Flush(t.Context(), 1) }()
	p := r.windows[0].peers[1]
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for end := time.After(testTime); p.out.placed.Load() == 0; {
		select {
		case <-tick.C:
		case <-end:
			t.Fatal("the rank does not say that it has taken the put")
		}
	}
	if p.out.flushed(1) || len(flushed) > 0 {
		t.Error("it is flushed, and its memory is lent to the transport")
	}
	close(free)
	if err := <-flushed; err != nil {
		t.Error(err)
	}
}

// TestRefusedMessage: the error of a call whose message the transport does not take names the window, the rank and the call; nothing
// has been put then, and the same works later.
func TestRefusedMessage(t *testing.T) {
	hook := &hooks.Van{}
	r := newRig(t, testcluster.Options{Wrap: hook.Wrap("worker", 0)}, 2, Options{Size: 8, Signals: 1})
	w, ctx := r.windows[0], t.Context()
	refuse := func(of verb) {
		hook.OnSend(func(m *van.Message) hooks.Verdict {
			if n, err := parse(m.Body); err == nil && n.verb == of {
				return hooks.Refuse(van.ErrQueueFull)
			}
			return hooks.Pass
		})
	}
	src := tensor(bytes.Repeat([]byte{7}, 8))
	refuse(verbPut)
	vantest.Fails(t, w.PutSignal(ctx, 1, 0, src, 0), van.ErrQueueFull, "put and signal", "window 0 of communicator 0", "rank 1 (worker 1")
	refuse(verbAsk)
	if err := w.PutSignal(ctx, 1, 0, src, 0); err != nil {
		t.Fatal(err)
	}
	vantest.Fails(t, w.Flush(ctx, 1), van.ErrQueueFull, "flush", "window 0 of communicator 0", "rank 1 (worker 1")
	hook.OnSend(nil)
	if err := w.Flush(ctx, 1); err != nil {
		t.Error(err)
	}
	if err := r.windows[1].WaitSignal(ctx, 0, 0); err != nil || !bytes.Equal(r.windows[1].Bytes(), src.Bytes()) {
		t.Errorf("the other rank: %v, with %v", err, r.windows[1].Bytes())
	}
}

// TestOneStaysOpen: while one window stays open, perhaps on one rank only, more windows than there are application
// ids can be opened and closed. If all ids are in use, the error says so on all ranks; closing a window frees one.
func TestOneStaysOpen(t *testing.T) {
	of := Options{Signals: 1}
	r := newRig(t, testcluster.Options{}, 2, of)
	open := func() ([]*Window, []error) {
		l := make([]*Window, 2)
		return l, every(2, func(i int) (err error) {
			l[i], err = Open(t.Context(), r.comms[i], of)
			return err
		})
	}
	must := func(n int) []*Window {
		t.Helper()
		l, errs := open()
		for i, err := range errs {
			if err != nil {
				t.Fatalf("window %d, rank %d: %v", n, i, err)
			}
		}
		return l
	}
	shut := func(l []*Window) {
		t.Helper()
		r.all(func(i int) error { return l[i].Close() })
		r.all(func(i int) error { r.free(l[i]); return nil })
	}
	for n := range windowsEach + 44 {
		shut(must(n))
	}
	if err := r.windows[0].Close(); err != nil { // which only rank 1 has then
		t.Fatal(err)
	}
	for n := range windowsEach + 44 {
		shut(must(n))
	}
	var many [][]*Window
	for n := range windowsEach - 1 {
		many = append(many, must(n))
	}
	_, errs := open()
	for i, err := range errs {
		if !errors.Is(err, van.ErrInvalid) || !strings.Contains(err.Error(), "an earlier window that is not closed uses its number, of 256") {
			t.Errorf("rank %d: got %v, want that all are in use", i, err)
		}
	}
	shut(many[100])
	many[100] = must(100)
	for _, l := range many {
		r.all(func(i int) error { return l[i].Signal(t.Context(), 1-i, 0) })
		r.all(func(i int) error { return l[i].WaitSignal(t.Context(), 1-i, 0) })
		r.all(func(i int) error { return l[i].Close() })
	}
}

// TestOrderlyClose: ranks that close a window after all messages arrived get no errors of messages in flight.
func TestOrderlyClose(t *testing.T) {
	of := Options{Signals: 1}
	r := newRig(t, testcluster.Options{}, 2, of)
	refused := uint64(0)
	for range 300 {
		l := make([]*Window, 2)
		r.all(func(i int) (err error) {
			l[i], err = Open(t.Context(), r.comms[i], of)
			if err == nil {
				err = l[i].Signal(t.Context(), 1-i, 0)
			}
			if err == nil {
				err = l[i].WaitSignal(t.Context(), 1-i, 0)
			}
			if err == nil {
				err = l[i].Close()
			}
			return err
		})
		r.all(func(i int) error { r.free(l[i]); return nil })
		refused += l[0].Refused() + l[1].Refused()
	}
	if refused > 0 {
		t.Errorf("%d messages were refused", refused)
	}
}

// TestFailureForAnotherWindow: a window of a communicator that has failed because another window was closed is removed from its node by
// Close.
func TestFailureForAnotherWindow(t *testing.T) {
	r := newRig(t, testcluster.Options{}, 2, Options{Signals: 1})
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(fmt.Errorf("the other window: %w", errClosed))
	vantest.Fails(t, r.comms[0].Barrier(ctx), van.ErrClosed, "the other window")
	if err := r.windows[0].Close(); err != nil {
		t.Error(err)
	}
	r.free(r.windows[0])
}
