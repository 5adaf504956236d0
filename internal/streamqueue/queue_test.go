package streamqueue

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stepaf/stepaf-go/tests/golden"
	_ "github.com/stepaf/stepaf-go/tests/testlimit"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/env"
)

// device is a device whose streams' work takes time.
type device struct {
	backend.Backend // nil, so that an unexpected call panics
	mu              sync.Mutex
	free            map[uintptr]time.Time // when the work in a stream is done
	open, made      int                   // events
	refuse          error
}

// idling is a device that can report whether a stream is idle.
type idling struct{ *device }

func (d idling) Idle(stream uintptr) (bool, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return !time.Now().Before(d.free[stream]), d.refuse
}

func (d *device) NewEvent() (backend.Event, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.refuse != nil {
		return nil, d.refuse
	}
	d.open++
	d.made++
	return &event{d: d}, nil
}

type event struct {
	d      *device
	at     time.Time
	fails  error
	closed bool
}

func (e *event) Record(stream uintptr) error {
	e.d.mu.Lock()
	defer e.d.mu.Unlock()
	e.at, e.fails = e.d.free[stream], nil
	if stream == 3 {
		e.fails = errBroken
	}
	return e.d.refuse
}

var errBroken = errors.New("the device is broken")

func (e *event) Query() (bool, error) { return !time.Now().Before(e.at), e.fails }

func (e *event) Sync(ctx context.Context) error {
	if e.closed {
		return errors.New("closed")
	}
	t := time.NewTimer(time.Until(e.at))
	defer t.Stop()
	select {
	case <-t.C:
		return e.fails
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (e *event) Close() error {
	e.d.mu.Lock()
	defer e.d.mu.Unlock()
	if e.closed {
		panic("closed twice")
	}
	e.closed = true
	e.d.open--
	return nil
}

// entryOf is an entry of a test.
type entryOf struct {
	q    *world
	n    int
	mu   sync.Mutex
	dead bool
	told int
}

type world struct {
	mu    sync.Mutex
	begun time.Time
	came  []string
	last  int
	order bool
}

func (x *entryOf) Canceled() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.dead
}

func (x *entryOf) SendNow(err error) {
	x.mu.Lock()
	x.told++
	x.mu.Unlock()
	x.q.mu.Lock()
	defer x.q.mu.Unlock()
	x.q.order = x.q.order && x.n > x.q.last
	x.q.last = x.n
	x.q.came = append(x.q.came, fmt.Sprint(x.n, " ", time.Since(x.q.begun).Milliseconds(), " ", errors.Is(err, van.ErrClosed), errors.Is(err, errBroken), errors.Is(err, context.Canceled), err != nil))
}

// TestStories: the times at which entries are sent, after streams whose work takes long or fails, and of canceled
// entries. Every added entry is sent or gets an error, once and in order, and no event is left.
func TestStories(t *testing.T) {
	golden.Check(t, "stories", 80, func(rng *rand.Rand, w io.Writer) {
		synctest.Test(t, func(t *testing.T) {
			d := &device{free: map[uintptr]time.Time{}}
			var back backend.Backend = d
			if rng.IntN(2) == 0 {
				back = idling{d}
			}
			q := New(back, env.AlwaysBlock) // a polling goroutine would stop virtual time
			world := &world{begun: time.Now(), last: -1, order: true}
			var all []*entryOf
			closed := false
			for n := range 60 {
				switch k := rng.IntN(12); {
				case k < 6:
					stream := []uintptr{1, 2, 3, Complete}[rng.IntN(4)]
					e, err := q.RecordEvent(stream)
					fmt.Fprintln(w, "mark", stream, e != nil, golden.Err(err))
					if err != nil {
						break
					}
					if rng.IntN(8) == 0 {
						q.ReturnEvent(e)
						break
					}
					x := &entryOf{q: world, n: n}
					taken := q.Add(x, e)
					if taken {
						all = append(all, x)
					}
					if taken == closed {
						t.Errorf("added %t, closed %t", taken, closed)
					}
					fmt.Fprintln(w, "add", taken)
				case k < 9:
					d.mu.Lock()
					d.free[uintptr(1+rng.IntN(3))] = time.Now().Add(time.Duration(rng.IntN(100)) * time.Millisecond)
					d.mu.Unlock()
				case k == 9:
					time.Sleep(time.Duration(1+rng.IntN(80)) * time.Millisecond)
				case k == 10 && len(all) > 0: // cancels one
					x := all[rng.IntN(len(all))]
					x.mu.Lock()
					x.dead = true
					x.mu.Unlock()
					q.Cancel(x)
				case k == 11 && rng.IntN(6) == 0:
					q.Close()
					closed = true
				case k == 11 && rng.IntN(6) == 0:
					d.mu.Lock()
					d.refuse = []error{nil, errBroken}[rng.IntN(2)]
					d.mu.Unlock()
				}
				synctest.Wait()
				world.mu.Lock()
				fmt.Fprintln(w, world.came, q.Busy(), d.made)
				world.came = nil
				world.mu.Unlock()
			}
			waits := 0
			for _, x := range all {
				x.mu.Lock()
				waits += 1 - x.told
				x.mu.Unlock()
			}
			if int(q.waiting.Load()) != waits || q.Busy() != (waits > 0) {
				t.Errorf("%d are counted, %d wait", q.waiting.Load(), waits)
			}
			if rng.IntN(2) == 0 {
				time.Sleep(time.Second)
				synctest.Wait()
				if q.Busy() {
					t.Error("all streams are idle, and something waits")
				}
			}
			q.Close()
			fmt.Fprintln(w, world.came)
			for _, x := range all {
				if x.told != 1 {
					t.Errorf("entry %d was told %d times", x.n, x.told)
				}
			}
			if !world.order {
				t.Error("out of order")
			}
			if d.open != 0 {
				t.Errorf("%d events are left", d.open)
			}
			if q.Add(&entryOf{q: world}, nil) {
				t.Error("added to what is closed")
			}
		})
	})
}

// TestKeepsFewEvents: of many returned events only some are kept.
func TestKeepsFewEvents(t *testing.T) {
	d := &device{free: map[uintptr]time.Time{1: time.Now().Add(time.Hour)}}
	q := New(d, env.AlwaysBlock)
	var l []backend.Event
	for range keepEvents + 10 {
		e, err := q.RecordEvent(1)
		if err != nil {
			t.Fatal(err)
		}
		l = append(l, e)
	}
	for _, e := range l {
		q.ReturnEvent(e)
	}
	if d.open != keepEvents {
		t.Errorf("%d events are kept, want %d", d.open, keepEvents)
	}
	q.Close()
	if d.open != 0 {
		t.Errorf("%d events are left", d.open)
	}
}
