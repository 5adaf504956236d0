package backend

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"
)

// kinds runs a test with both kinds of event.
func kinds(t *testing.T, test func(t *testing.T, f *fakeDriver, g *gpu, e Event, s uintptr)) {
	for name, o := range map[string]Options{
		"flag":         {},
		"flag spin":    {Spin: time.Millisecond},
		"driver":       {DriverEvents: true},
		"driver spin":  {DriverEvents: true, Spin: time.Millisecond},
		"flag forever": {Spin: -1},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFake(1)
			g := open(t, f)
			g.Configure(o)
			e, err := g.NewEvent()
			if err != nil {
				t.Fatal(err)
			}
			if _, isFlag := e.(*flagEvent); isFlag == o.DriverEvents {
				t.Errorf("got a %T", e)
			}
			s, err := g.NewStream()
			if err != nil {
				t.Fatal(err)
			}
			test(t, f, g, e, s)
			if err := e.Close(); err != nil {
				t.Error(err)
			}
			if err := e.Close(); err != nil {
				t.Errorf("Close again: %v", err)
			}
			_, err = e.Query()
			wantError(t, err, ErrClosed, "event closed")
			wantError(t, e.Record(s), ErrClosed, "event closed")
		})
	}
}

func query(t *testing.T, e Event, want bool) {
	t.Helper()
	if done, err := e.Query(); err != nil || done != want {
		t.Errorf("Query: %t, %v, want %t", done, err, want)
	}
}

func TestEvent(t *testing.T) {
	kinds(t, func(t *testing.T, f *fakeDriver, g *gpu, e Event, s uintptr) {
		query(t, e, true) // never recorded
		for range 5 {
			release := f.hold(s)
			if err := e.Record(s); err != nil {
				t.Fatal(err)
			}
			query(t, e, false)
			time.AfterFunc(2*time.Millisecond, release)
			if err := e.Sync(t.Context()); err != nil {
				t.Fatal(err)
			}
			query(t, e, true)
		}
		wantError(t, e.Record(4711), nil, "gpu:0: Record: ", "FAKE_400")
		query(t, e, true)
	})
}

func TestEventOrdersACopy(t *testing.T) {
	kinds(t, func(t *testing.T, f *fakeDriver, g *gpu, e Event, s uintptr) {
		a, _ := g.Alloc(1 << 16)
		pinned, err := g.AllocPinned(1 << 16)
		if err != nil {
			t.Fatal(err)
		}
		got := make([]byte, 1<<16)
		for round := range byte(10) {
			for i := range pinned.Host() {
				pinned.Host()[i] = round
			}
			release := f.hold(s)
			if err := errors.Join(g.CopyAsync(a, pinned, s), e.Record(s)); err != nil {
				t.Fatal(err)
			}
			time.AfterFunc(time.Millisecond, release)
			if err := errors.Join(e.Sync(t.Context()), g.Copy(Bytes(got), a)); err != nil {
				t.Fatal(err)
			}
			if got[0] != round || got[len(got)-1] != round {
				t.Errorf("round %d: the copy came before the event", round)
			}
		}
	})
}

// TestCopyRecord: the event is done after the copy, of any memory, also if it was recorded before and that record
// is pending. A failure is an error, and the event can be used again.
func TestCopyRecord(t *testing.T) {
	kinds(t, func(t *testing.T, f *fakeDriver, g *gpu, e Event, s uintptr) {
		const n = 1 << 16
		a, _ := g.Alloc(n)
		b, _ := g.Alloc(n)
		pinned, err := g.AllocPinned(n)
		if err != nil {
			t.Fatal(err)
		}
		got := make([]byte, n)
		for round := range byte(12) {
			for i := range pinned.Host() {
				pinned.Host()[i] = round
			}
			from := pinned
			if round%3 > 0 { // from device to device
				if err := g.Copy(b, pinned); err != nil {
					t.Fatal(err)
				}
				from = b
			}
			release := f.hold(s)
			if round%4 == 3 { // it is recorded, and that record is done late
				if err := e.Record(s); err != nil {
					t.Fatal(err)
				}
			}
			if err := g.CopyRecord(a, from, s, e); err != nil {
				t.Fatal(err)
			}
			query(t, e, false)
			time.AfterFunc(time.Millisecond, release)
			if err := errors.Join(e.Sync(t.Context()), g.Copy(Bytes(got), a)); err != nil {
				t.Fatal(err)
			}
			if got[0] != round || got[len(got)-1] != round {
				t.Errorf("round %d: the copy came before the event", round)
			}
		}
		f.fail("copyAsync", codeLaunchFailed)
		wantError(t, g.CopyRecord(a, b, s, e), ErrDeviceLost, "of 65536 bytes")
		f.fail("copyAsync", 0)
		wantError(t, g.CopyRecord(a, b.Sub(0, 1), s, e), nil, "of 1 bytes into 65536")
		if err := errors.Join(g.CopyRecord(a, b, s, e), e.Sync(t.Context())); err != nil {
			t.Error(err)
		}
		if _, flag := e.(*flagEvent); flag {
			f.captured.Store(f.stream(s))
			wantError(t, g.CopyRecord(a, b, s, e), ErrUnsupported, "being captured into a graph")
			f.captured.Store(nil)
			settle(t, g, s)
		}
	})
}

// TestCopyRecordAfterClose: the words of events are freed then.
func TestCopyRecordAfterClose(t *testing.T) {
	f := newFake(1)
	b, err := newGPU(f, 0)
	if err != nil {
		t.Fatal(err)
	}
	g := b.(*gpu)
	x, _ := g.Alloc(64)
	y, _ := g.Alloc(64)
	s, _ := g.NewStream()
	e, _ := g.NewEvent()
	if err := errors.Join(e.Record(s), g.Close()); err != nil { // without a query whether it is done
		t.Fatal(err)
	}
	wantError(t, g.CopyRecord(x, y, s, e), ErrClosed, "closed")
}

// notLeft is a driver that cannot leave the context, once.
type notLeft struct {
	*fakeDriver
	once bool
}

func (d *notLeft) copyIn(ctx, dst, src uintptr, n int, s uintptr, w wordWrites) (bool, error) {
	captured, err := d.fakeDriver.copyIn(ctx, dst, src, n, s, w)
	if d.once && err == nil {
		d.once = false
		return captured, d.err(callLeave, 201)
	}
	return captured, err
}

// TestCopyRecordNotLeft: a write that was queued in spite of an error is not taken for the next recorded one.
func TestCopyRecordNotLeft(t *testing.T) {
	f := &notLeft{fakeDriver: newFake(1)}
	b, err := newGPU(f, 0)
	if err != nil {
		t.Fatal(err)
	}
	g := b.(*gpu)
	x, _ := g.Alloc(64)
	y, _ := g.Alloc(64)
	first, _ := g.NewStream()
	second, _ := g.NewStream()
	e, _ := g.NewEvent()
	if err := errors.Join(e.Record(first), e.Sync(t.Context())); err != nil {
		t.Fatal(err)
	}
	release := f.hold(first)
	f.once = true
	wantError(t, g.CopyRecord(x, y, first, e), nil, callLeave)
	later := f.hold(second)
	if err := g.CopyRecord(x, y, second, e); err != nil {
		t.Fatal(err)
	}
	release()
	settle(t, g, first)
	query(t, e, false)
	later()
	settle(t, g, second)
	if err := errors.Join(e.Sync(t.Context()), g.Close()); err != nil {
		t.Error(err)
	}
}

func TestSyncEndsWithContext(t *testing.T) {
	kinds(t, func(t *testing.T, f *fakeDriver, g *gpu, e Event, s uintptr) {
		release := f.hold(s)
		defer release()
		if err := e.Record(s); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(3*time.Millisecond, cancel)
		wantError(t, e.Sync(ctx), context.Canceled, "gpu:0: wait for an event: not done after")
		late, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		wantError(t, e.Sync(late), context.DeadlineExceeded)
		release()
		if err := e.Sync(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// The flag of a failed device is never written; the wait ends nevertheless.
func TestSyncNoticesFailure(t *testing.T) {
	kinds(t, func(t *testing.T, f *fakeDriver, g *gpu, e Event, s uintptr) {
		release := f.hold(s)
		defer release()
		if err := e.Record(s); err != nil {
			t.Fatal(err)
		}
		f.fail("streamQuery", codeIllegalAddress)
		f.fail("eventQuery", codeIllegalAddress)
		wantError(t, e.Sync(t.Context()), ErrDeviceLost, "gpu:0", "FAKE_700 (700)")
		f.fail("streamQuery", 0)
		f.fail("eventQuery", 0)
		release()
		if err := e.Sync(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// An event that is recorded or closed before its flag is written must not be confused by the late write, nor may
// the flag's next user.
func TestLateFlags(t *testing.T) {
	f := newFake(1)
	g := open(t, f)
	g.Configure(Options{})
	slow, _ := g.NewStream()
	fast, _ := g.NewStream()
	release := f.hold(slow)
	e, _ := g.NewEvent()
	if err := errors.Join(e.Record(slow), e.Record(fast)); err != nil {
		t.Fatal(err)
	}
	if err := e.Sync(t.Context()); err != nil {
		t.Fatal(err)
	}
	closed, _ := g.NewEvent()
	if err := errors.Join(closed.Record(slow), closed.Close()); err != nil {
		t.Fatal(err)
	}
	if n := len(g.flags.pending); n != 2 {
		t.Errorf("%d flags rest, want 2", n)
	}
	var events []Event
	for range 200 { // more than the pool had
		n, _ := g.NewEvent()
		events = append(events, n)
		if err := n.Record(fast); err != nil {
			t.Fatal(err)
		}
	}
	pages := len(g.flags.pages)
	release()
	for _, n := range append(events, e) {
		if err := n.Sync(t.Context()); err != nil {
			t.Error(err)
		}
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	}
	last, _ := g.NewEvent()
	if err := errors.Join(last.Record(slow), last.Sync(t.Context()), last.Record(slow), last.Sync(t.Context()), last.Close()); err != nil {
		t.Error(err)
	}
	if n := len(g.flags.pending); n != 0 || len(g.flags.pages) != pages {
		t.Errorf("%d flags rest; %d pages, before %d", n, len(g.flags.pages), pages)
	}
	if total := len(g.flags.free); total != pages*flagPage/flagStride {
		t.Errorf("%d flags are free, of %d pages", total, pages)
	}
}

func TestRecordWhileCapturing(t *testing.T) {
	f := newFake(1)
	g := open(t, f)
	s, _ := g.NewStream()
	e, _ := g.NewEvent()
	f.captured.Store(f.stream(s))
	wantError(t, e.Record(s), ErrUnsupported, "captured into a graph")
	f.captured.Store(nil)
	if err := errors.Join(e.Record(s), e.Sync(t.Context()), e.Close()); err != nil {
		t.Error(err)
	}
	f.fail("streamCapturing", 999)
	e, _ = g.NewEvent()
	wantError(t, e.Record(s), nil, "FAKE_999")
}

// TestFollow: a stream that follows another one does what is queued later when that one has done its work. Events are used again.
func TestFollow(t *testing.T) {
	f := newFake(1)
	g := open(t, f)
	s, _ := g.NewStream()
	other, _ := g.NewStream()
	for range 3 {
		release := f.hold(other)
		e, _ := g.NewEvent()
		if err := errors.Join(g.Follow(s, other), e.Record(s)); err != nil {
			t.Fatal(err)
		}
		if done, err := e.Query(); done || err != nil {
			t.Errorf("the stream has not waited: %t, %v", done, err)
		}
		release()
		if err := errors.Join(e.Sync(t.Context()), e.Close()); err != nil {
			t.Error(err)
		}
	}
	if n := f.times("eventCreate"); n != 1 {
		t.Errorf("%d events for 3 calls, want 1", n)
	}
	f.fail("eventRecord", 999)
	wantError(t, g.Follow(s, other), nil, "FAKE_999")
}

// TestRewind: a captured stream has a point, and a stream continues only from points of its own capture.
func TestRewind(t *testing.T) {
	f := newFake(1)
	g := open(t, f)
	s, _ := g.NewStream()
	f.captured.Store(f.stream(s))
	at, err := g.Point(s)
	if err != nil || at[0] == 0 {
		t.Errorf("the point of a captured stream: %v, %v", at, err)
	}
	if err := g.Rewind(s, at); err != nil {
		t.Error(err)
	}
	at[0]++
	wantError(t, g.Rewind(s, at), nil, "in capture 7, to a point in capture 8")
	f.captured.Store(nil)
	if at, err := g.Point(s); err != nil || at[0] != 0 {
		t.Errorf("the point of a stream that is not captured: %v, %v", at, err)
	}
	wantError(t, g.Rewind(s, at), nil, "in capture 0")
}

// A driver whose streams cannot write words gets its own events.
func TestNoStreamFlags(t *testing.T) {
	f := newFake(1)
	f.noFlags = true
	g := open(t, f)
	e, err := g.NewEvent()
	if err != nil {
		t.Fatal(err)
	}
	if _, ok := e.(*driverEvent); !ok {
		t.Errorf("got a %T", e)
	}
	s, _ := g.NewStream()
	f.captured.Store(f.stream(s))
	wantError(t, e.Record(s), ErrUnsupported, "captured into a graph")
	f.captured.Store(nil)
	p, _ := g.AllocPinned(64)
	wantError(t, g.WriteFlag(0, p, 1), ErrUnsupported, "streams cannot write words")
	if err := e.Close(); err != nil {
		t.Error(err)
	}
}

func TestCloseWithPendingFlags(t *testing.T) {
	f := newFake(1)
	b, err := newGPU(f, 0)
	if err != nil {
		t.Fatal(err)
	}
	g := b.(*gpu)
	s, _ := g.NewStream()
	release := f.hold(s)
	e, _ := g.NewEvent()
	if err := errors.Join(e.Record(s), e.Close()); err != nil {
		t.Fatal(err)
	}
	st := f.stream(s)
	wantError(t, g.Close(), nil, "1 events are recorded on streams that have not come so far")
	release()
	<-st.done // the late write meets memory that is still there
}

func TestEventFromManyGoroutines(t *testing.T) {
	kinds(t, func(t *testing.T, f *fakeDriver, g *gpu, e Event, s uintptr) {
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				for range 20 {
					if err := errors.Join(e.Record(s), e.Sync(t.Context())); err != nil {
						t.Error(err)
					}
				}
			})
		}
		wg.Wait()
	})
}

func TestWaitsDoNotAllocate(t *testing.T) {
	g := open(t, newFake(1))
	s, _ := g.NewStream()
	e, _ := g.NewEvent()
	ctx := t.Context()
	defer e.Close()
	n := testing.AllocsPerRun(100, func() {
		if err := e.Record(s); err != nil {
			t.Error(err)
		}
		if err := e.Sync(ctx); err != nil {
			t.Error(err)
		}
	})
	if n > 2 { // the fake's own: the queued operation, and the growth of its thread table
		t.Errorf("%v allocations for Record and Sync", n)
	}
}
