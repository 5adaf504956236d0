package core

// Communicators, windows and prepared GPU exchanges as Python uses them.

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/simgpu"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// workerSessions opens the sessions of n workers, with a device each if devices is not nil.
func workerSessions(t *testing.T, n int, devices []*simgpu.Device) []*Session {
	t.Helper()
	o := testcluster.Options{Workers: n}
	if devices != nil {
		t.Cleanup(func() { // runs after the nodes are closed
			for _, d := range devices {
				d.NothingLent(t)
				if err := d.Close(); err != nil {
					t.Error(err)
				}
			}
		})
		o.Backend = func(role string, rank int) backend.Backend {
			if role != "worker" {
				return nil
			}
			return devices[rank]
		}
	}
	c := testcluster.Start(t, o)
	all := make([]*Session, n)
	for i, node := range c.Workers {
		all[i] = newSession(node)
	}
	return all
}

// together runs f for all ranks at the same time, and ends the test with their errors.
func together(t *testing.T, n int, f func(r int) error) {
	t.Helper()
	errs := make([]error, n)
	var all sync.WaitGroup
	for r := range n {
		all.Go(func() { errs[r] = f(r) })
	}
	all.Wait()
	for r, err := range errs {
		if err != nil {
			t.Fatalf("rank %d: %v", r, err)
		}
	}
}

// pending waits in slices for the end of an operation.
func pending(x Awaited) error {
	for end := time.Now().Add(20 * time.Second); ; {
		if err := x.Wait(10 * time.Millisecond); err != ErrPending || time.Now().After(end) {
			return err
		}
	}
}

// newComms creates a communicator of all sessions.
func newComms(t *testing.T, all []*Session, id int, limit time.Duration) []*Comm {
	t.Helper()
	l := make([]*Comm, len(all))
	ranks := make([]int, len(all))
	for r := range ranks {
		ranks[r] = r
	}
	together(t, len(all), func(r int) error {
		c, made := all[r].Comms().New(id, ranks, limit)
		l[r] = c
		return pending(made)
	})
	return l
}

// TestComms calls each collective by its number and compares its result.
func TestComms(t *testing.T) {
	all := workerSessions(t, 2, nil)
	comms := newComms(t, all, 3, 20*time.Second)
	for r, c := range comms {
		if c.Rank() != r || c.Size() != 2 || c.OnDevice() {
			t.Errorf("rank %d of %d, on a device: %t", c.Rank(), c.Size(), c.OnDevice())
		}
	}
	for name, x := range map[string]struct {
		kind      Collective
		root      int
		reduction string
		out, in   [2][]string // by rank
		want      [2][]string
	}{
		"AllGather":     {AllGather, 0, "", [2][]string{{"...."}, {"...."}}, [2][]string{{"ab"}, {"cd"}}, [2][]string{{"abcd"}, {"abcd"}}},
		"AllGatherV":    {AllGatherV, 0, "", [2][]string{{".", "..."}, {".", "..."}}, [2][]string{{"a"}, {"bcd"}}, [2][]string{{"a", "bcd"}, {"a", "bcd"}}},
		"AllToAll":      {AllToAll, 0, "", [2][]string{{".", "."}, {"..", "."}}, [2][]string{{"a", "bc"}, {"d", "e"}}, [2][]string{{"a", "d"}, {"bc", "e"}}},
		"Broadcast":     {Broadcast, 1, "", [2][]string{{"..."}, {"abc"}}, [2][]string{}, [2][]string{{"abc"}, {"abc"}}},
		"Gather":        {Gather, 1, "", [2][]string{nil, {"...."}}, [2][]string{{"ab"}, {"cd"}}, [2][]string{nil, {"abcd"}}},
		"Scatter":       {Scatter, 1, "", [2][]string{{".."}, {".."}}, [2][]string{nil, {"abcd"}}, [2][]string{{"ab"}, {"cd"}}},
		"ReduceScatter": {ReduceScatter, 0, "max", [2][]string{{".."}, {".."}}, [2][]string{{"aXcX"}, {"XbXd"}}, [2][]string{{"ab"}, {"cd"}}},
		"AllReduce":     {AllReduce, 0, "min", [2][]string{{"...."}, {"...."}}, [2][]string{{"aXcX"}, {"XbXd"}}, [2][]string{{"XXXX"}, {"XXXX"}}},
		"sum":           {AllReduce, 0, "sum", [2][]string{{"."}, {"."}}, [2][]string{{"\x01"}, {"\x05"}}, [2][]string{{"\x06"}, {"\x06"}}},
		"product":       {AllReduce, 0, "product", [2][]string{{"."}, {"."}}, [2][]string{{"\x03"}, {"\x05"}}, [2][]string{{"\x0f"}, {"\x0f"}}},
	} {
		together(t, 2, func(r int) error {
			list := func(l []string) (tensors []af.Tensor) {
				for _, s := range l {
					tensors = append(tensors, tensor(t, []byte(s)))
				}
				return tensors
			}
			out, in := list(x.out[r]), list(x.in[r])
			p, err := comms[r].Call(af.DefaultStream, x.kind, out, in, x.root, x.reduction)
			if err == nil {
				err = pending(p)
			}
			if err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			if err := p.Wait(0); err != nil { // Wait may be called again
				return fmt.Errorf("%s, again: %w", name, err)
			}
			for i := range out {
				if string(out[i].Bytes()) != x.want[r][i] {
					return fmt.Errorf("%s: result %d is %q, want %q", name, i, out[i].Bytes(), x.want[r][i])
				}
			}
			return nil
		})
	}
	one := []af.Tensor{tensor(t, make([]byte, 2))}
	for _, kind := range []Collective{ReduceScatter, AllReduce} {
		_, err := comms[0].Call(af.DefaultStream, kind, one, one, 0, "mean")
		vantest.Fails(t, err, van.ErrInvalid, `"mean"`)
	}
	if _, err := comms[0].Call(af.DefaultStream, AllReduce+1, one, one, 0, ""); err == nil {
		t.Error("a collective that there is not")
	}
	if _, err := comms[0].Call(af.DefaultStream, AllGather, one, one, 0, ""); !errors.Is(err, van.ErrInvalid) {
		t.Errorf("an AllGather of 2 bytes to 2 bytes: %v", err)
	}
	together(t, 2, func(r int) error { return pending(comms[r].Barrier(-1)) })
	together(t, 2, func(r int) error { return pending(comms[r].Rebuild(20 * time.Second)) })
	together(t, 2, func(r int) error { return pending(comms[r].Barrier(20 * time.Second)) })
	together(t, 2, func(r int) error { return pending(comms[r].Close(-1)) })
	vantest.Fails(t, pending(comms[0].Barrier(-1)), van.ErrClosed)
}

// TestCommLimits: a limit of 0 means the default, a negative limit means none. The limit of a task is independent of
// the communicator's limit.
func TestCommLimits(t *testing.T) {
	all := workerSessions(t, 2, nil)
	for limit, want := range map[time.Duration]time.Duration{0: postoffice.DefaultTimeout, time.Hour: time.Hour, -1: -1} {
		c, made := all[0].Comms().New(3, []int{0}, limit)
		if err := pending(made); err != nil || c.limit != want {
			t.Errorf("limit %d: %v, %s, want %s", limit, err, c.limit, want)
		}
		if err := pending(c.Close(-1)); err != nil {
			t.Error(err)
		}
	}
	_, made := all[0].Comms().begin(3, []int{0, 1}, -1, time.Millisecond)
	vantest.Fails(t, pending(made), van.ErrTimeout, "worker 1")
	_, made = all[0].Comms().New(3, []int{0, 1}, time.Millisecond)
	vantest.Fails(t, pending(made), van.ErrTimeout, "worker 1")
	alone, made := all[0].Comms().New(3, []int{0, 1}, -1)
	if err := made.Wait(time.Millisecond); err != ErrPending || alone.failed() {
		t.Errorf("while it is made: %v, failed %t", err, alone.failed())
	}
	made.Cancel()
	vantest.Fails(t, pending(made), van.ErrTimeout)
	if !alone.failed() {
		t.Error("it could not be made, and has not failed")
	}
}

// TestPending: one caller waits for a call in slices; a second one waits at the same time; no one waits for a dropped
// call; a canceled call ends.
func TestPending(t *testing.T) {
	comms := newComms(t, workerSessions(t, 2, nil), 3, 20*time.Second)
	call := func(r int) *Pending {
		t.Helper()
		p, err := comms[r].Call(af.DefaultStream, AllGather, []af.Tensor{tensor(t, make([]byte, 2))}, []af.Tensor{tensor(t, []byte{byte(r)})}, 0, "")
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	p := call(0)
	for range 3 {
		if err := p.Wait(time.Millisecond); err != ErrPending {
			t.Fatalf("nobody else has called: %v", err)
		}
	}
	<-p.turn // as a second waiting caller does
	if err := p.Wait(time.Millisecond); err != ErrPending {
		t.Fatalf("beside another one that waits: %v", err)
	}
	p.turn <- struct{}{}
	both := make(chan error, 2)
	for range 2 {
		go func() { both <- pending(p) }()
	}
	if err := pending(call(1)); err != nil {
		t.Error(err)
	}
	for range 2 {
		if err := <-both; err != nil {
			t.Error(err)
		}
	}
	if p.ctx.Err() == nil {
		t.Error("the context of a call that has ended goes on")
	}
	p.Drop()

	p = call(0)
	p.Drop() // the call continues without a Wait
	if err := pending(call(1)); err != nil {
		t.Error(err)
	}
	select {
	case <-p.ctx.Done():
	case <-time.After(20 * time.Second):
		t.Error("a call that nobody waits for does not end")
	}

	p = call(0)
	p.Cancel()
	vantest.Fails(t, pending(p), van.ErrTimeout, "rank 1")
	vantest.Fails(t, pending(p), van.ErrTimeout, "rank 1")
	for _, c := range comms {
		c.Drop()
	}
}

// TestInterrupted: after an interrupted call, this rank's later calls and the other ranks get an error that says so,
// and not a timeout.
func TestInterrupted(t *testing.T) {
	all := workerSessions(t, 2, nil)
	interrupted := func(what string, err error) {
		t.Helper()
		if err == nil || !strings.Contains(err.Error(), "interrupted by the caller") || errors.Is(err, van.ErrTimeout) {
			t.Errorf("%s: %v, want that it was interrupted, and no timeout", what, err)
		}
	}
	for id, begin := range map[int]func(*Comm) Awaited{
		1: func(c *Comm) Awaited { return c.Barrier(-1) },
		2: func(c *Comm) Awaited {
			_, made := c.OpenHostWindow(af.Tensor{}, 8, 2, -1)
			return made
		},
		3: func(c *Comm) Awaited {
			p, err := c.Call(af.DefaultStream, AllGather, []af.Tensor{tensor(t, make([]byte, 2))}, []af.Tensor{tensor(t, []byte{1})}, 0, "")
			if err != nil {
				t.Fatal(err)
			}
			return p
		},
	} {
		comms := newComms(t, all, id, 20*time.Second)
		call := begin(comms[0])
		if err := call.Wait(time.Millisecond); err != ErrPending {
			t.Fatalf("nobody else has called: %v", err)
		}
		call.Interrupt()
		interrupted("the call", pending(call))
		interrupted("a later call", pending(comms[0].Barrier(-1)))
		if id == 1 { // the same call, since a different call would not match before the rank receives the end
			interrupted("the other rank's call", pending(comms[1].Barrier(-1)))
		}
		together(t, 2, func(r int) error { return pending(comms[r].Rebuild(20 * time.Second)) })
		together(t, 2, func(r int) error { return pending(comms[r].Close(-1)) })
	}
	_, made := all[0].Comms().New(4, []int{0, 1}, -1)
	made.Interrupt()
	interrupted("the making", pending(made))
}

// TestGroup: the first call creates the group's communicator; if that fails, the next call creates it again. Rebuild
// creates it if it does not exist.
func TestGroup(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{Group: 2})
	all := []*Session{newSession(c.Workers[0]), newSession(c.Workers[1])}
	first, made := all[0].Comms().Group()
	if same, again := all[0].Comms().Group(); same != first || again != made {
		t.Error("while it is made another one is")
	}
	made.Cancel()
	vantest.Fails(t, pending(made), van.ErrTimeout)
	rebuilt := all[0].Comms().RebuildGroup(20 * time.Second) // creates it
	second, made := all[0].Comms().Group()
	if second == first || made != rebuilt {
		t.Error("one that could not be made is used again, or Rebuild does not make one")
	}
	other, others := all[1].Comms().Group()
	for _, task := range []*Task{made, others} {
		if err := pending(task); err != nil {
			t.Fatal(err)
		}
	}
	if second.id != 0 || other.Rank() != 1 || other.Size() != 2 {
		t.Errorf("ID %d, rank %d of %d", second.id, other.Rank(), other.Size())
	}
	together(t, 2, func(r int) error { return pending(all[r].Comms().RebuildGroup(20 * time.Second)) })
	if same, _ := all[0].Comms().Group(); same != second {
		t.Error("behind Rebuild it is another one")
	}
	together(t, 2, func(r int) error { return pending([]*Comm{second, other}[r].Barrier(-1)) })
	short := all[0].Comms().RebuildGroup(time.Millisecond)
	vantest.Fails(t, pending(short), van.ErrTimeout)
	_ = pending(second.Close(-1))
	_ = pending(other.Close(-1))
}

// TestDroppedComm: the ID of a dropped communicator is free after that is closed. A caller whose limit passes earlier
// gets an error.
func TestDroppedComm(t *testing.T) {
	all := workerSessions(t, 1, nil)
	l := all[0].Comms()
	for range 3 {
		c, made := l.New(5, []int{0}, 0)
		if err := pending(made); err != nil {
			t.Fatal(err)
		}
		c.Drop()
	}
	if err := l.dropped(t.Context(), 5); err != nil {
		t.Error(err)
	}
	vantest.Eventually(t, 20*time.Second, "all are closed", func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return len(l.closing) == 0
	})
	l.mu.Lock()
	l.closing[5] = make(chan struct{})
	l.mu.Unlock()
	_, made := l.begin(5, []int{0}, 0, time.Millisecond)
	vantest.Fails(t, pending(made), van.ErrTimeout, "ID 5", "not closed yet")
}

// TestHostWindow: a window in host memory. Its calls wait in slices, until their limit.
func TestHostWindow(t *testing.T) {
	comms := newComms(t, workerSessions(t, 2, nil), 3, 20*time.Second)
	owner := &simgpu.Holds{}
	memory, err := af.NewTensor(owner.Bytes(make([]byte, 8)), af.Uint8, 8)
	if err != nil {
		t.Fatal(err)
	}
	var w [2]*Window
	together(t, 2, func(r int) error {
		of := []af.Tensor{memory, {}}[r]
		var made *Task
		w[r], made = comms[r].OpenHostWindow(of, 8, 2, -1)
		return pending(made)
	})
	if n := owner.N(); n != 1 {
		t.Errorf("the memory of a window is held %d times, want once", n)
	}
	ctx := t.Context()
	begun := time.Now()
	call := func(ctx context.Context) error { return w[0].WaitSignal(ctx, 1, 1, af.Complete) }
	if err := w[0].InSlice(time.Millisecond, -1, begun, call); err != ErrPending {
		t.Errorf("a signal that has not come: %v", err)
	}
	if err := w[0].InSlice(time.Millisecond, time.Hour, begun, call); err != ErrPending {
		t.Errorf("a signal that has not come, with a limit: %v", err)
	}
	for _, limit := range []time.Duration{5 * time.Millisecond, 0} {
		err = w[0].InSlice(time.Hour, limit, begun, call)
		vantest.Fails(t, err, van.ErrTimeout, "signal 1", "worker 1")
		if e, is := errors.AsType[*van.Error](err); !is || e.Limit != limit || e.Elapsed < limit {
			t.Errorf("limit %s: %v, want that in it, and how long it took from the beginning", limit, err)
		}
	}
	w[0].limit = 3 * time.Millisecond // the limit of the communicator
	vantest.Fails(t, w[0].InSlice(time.Hour, -1, begun, call), van.ErrTimeout, "signal 1")
	w[0].limit = -1
	if err := w[0].InSlice(time.Millisecond, -1, begun.Add(-time.Hour), call); err != ErrPending {
		t.Errorf("without a limit: %v", err)
	}
	if err := errors.Join(w[1].Put(ctx, 0, 1, tensor(t, []byte("ab")), NoSignal, af.Complete), w[1].Put(ctx, 0, 5, tensor(t, []byte("c")), 0, af.Complete),
		w[1].Signal(ctx, 0, 1, af.Complete), w[1].Flush(ctx, 0, af.Complete), w[0].WaitSignal(ctx, 1, 0, af.Complete), w[0].InSlice(time.Second, -1, begun, call)); err != nil {
		t.Error(err)
	}
	if got := w[0].Tensor(); !bytes.Equal(got.Bytes(), []byte("\x00ab\x00\x00c\x00\x00")) {
		t.Errorf("the window is %q", got.Bytes())
	}
	if got := w[1].Tensor(); got.Len() != 8 {
		t.Errorf("a window that Open makes has %d bytes, want 8", got.Len())
	}
	if err := w[0].Check(); err != nil {
		t.Error(err)
	}
	together(t, 2, func(r int) error { return pending(w[r].Close()) })
	if n := owner.N(); n != 0 {
		t.Errorf("the memory of a closed window is held %d times", n)
	}
	vantest.Fails(t, w[0].InSlice(time.Second, -1, begun, call), van.ErrClosed)
	vantest.Fails(t, w[0].Check(), van.ErrClosed)

	// A window dropped during its creation, a window dropped later, and a window whose creation fails.
	dropped, made := comms[0].OpenHostWindow(memory, 0, 1, -1)
	dropped.Drop()
	vantest.Fails(t, pending(made), van.ErrTimeout)
	for _, c := range comms {
		c.Drop()
	}
	if err := comms[0].of.dropped(t.Context(), 3); err != nil {
		t.Error(err)
	}
	if n := owner.N(); n != 0 {
		t.Errorf("the memory of a window that was not made is held %d times", n)
	}
}

// TestDroppedWindow: a dropped window is closed, and the other ranks receive the close.
func TestDroppedWindow(t *testing.T) {
	comms := newComms(t, workerSessions(t, 2, nil), 3, 20*time.Second)
	var w [2]*Window
	together(t, 2, func(r int) error {
		var made *Task
		w[r], made = comms[r].OpenHostWindow(af.Tensor{}, 8, 1, 20*time.Second)
		return pending(made)
	})
	w[0].Drop()
	vantest.Fails(t, w[1].WaitSignal(t.Context(), 0, 0, af.Complete), van.ErrClosed, "worker 0")
	if err := w[1].Check(); err != nil { // the close alone does not end the window
		t.Error(err)
	}
	_ = pending(w[1].Close())
	for _, c := range comms {
		c.Drop()
	}
}

// TestDeviceWindow: a window on devices. Its calls are queued to streams.
func TestDeviceWindow(t *testing.T) {
	devices := []*simgpu.Device{simgpu.New(0), simgpu.New(1)}
	comms := newComms(t, workerSessions(t, 2, devices), 3, 20*time.Second)
	if !comms[0].OnDevice() {
		t.Error("tensors of a node with a device do not lie there")
	}
	var w [2]*Window
	together(t, 2, func(r int) error {
		var made *Task
		w[r], made = comms[r].OpenWindow(8, 2, 20*time.Second)
		return pending(made)
	})
	x := deviceTensor(t, devices[1], []byte("ab"))
	ctx := t.Context()
	if err := errors.Join(w[0].WaitSignal(ctx, 1, 1, af.Stream(4)), w[1].Put(ctx, 0, 1, x, NoSignal, 5), w[1].Put(ctx, 0, 5, x, 1, 5), w[1].Signal(ctx, 0, 0, af.Stream(5)),
		w[1].Flush(ctx, 0, af.Stream(6)), w[0].WaitSignal(ctx, 1, 0, af.Stream(4))); err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	devices[0].Queue(4, func() { close(done) })
	<-done
	if got := w[0].Tensor(); string(simgpu.Raw(got.Mem())) != "\x00ab\x00\x00ab\x00" {
		t.Errorf("the window is %q", simgpu.Raw(got.Mem()))
	}
	together(t, 2, func(r int) error { return pending(w[r].Close()) })
	for _, c := range comms {
		c.Drop()
	}
}

// overSoon waits until an exchange has ended.
func overSoon(t *testing.T, x *StreamExchange) {
	t.Helper()
	vantest.Eventually(t, 20*time.Second, "the exchange is over", func() bool { return x.Check() != nil })
}

// TestStreamExchange: a prepared GPU exchange, an exchange that is dropped while it waits for its peers, an
// exchange that is dropped later, and a failed creation. Tensors are retained as long as the exchange uses them.
func TestStreamExchange(t *testing.T) {
	devices := map[string]*simgpu.Device{"worker": simgpu.New(0), "server": simgpu.New(1)}
	t.Cleanup(func() {
		for _, d := range devices {
			d.NothingLent(t)
			if err := d.Close(); err != nil {
				t.Error(err)
			}
		}
	})
	c := testcluster.Start(t, testcluster.Options{Backend: func(role string, _ int) backend.Backend {
		if d := devices[role]; d != nil {
			return d
		}
		return nil
	}})
	worker, server := newSession(c.Workers[0]).Streams(), newSession(c.Servers[0]).Streams()
	if _, _, err := newSession(c.Scheduler).Streams().Prepare(nil, nil, nil, -1, 0, false); !errors.Is(err, van.ErrInvalid) {
		t.Errorf("on a scheduler: %v", err)
	}
	list := func(role string, key uint64, b []byte) []af.KeyTensor {
		return []af.KeyTensor{{Key: key, Val: deviceTensor(t, devices[role], b)}}
	}
	question, answer, got, out := []byte("question"), []byte("......"), []byte("........"), []byte("answer")
	prepare := func(limit time.Duration) (x, y *StreamExchange) {
		t.Helper()
		x, xMade, err := worker.Prepare(nil, list("worker", 1, question), list("worker", 2, answer), limit, time.Minute, false)
		if err != nil {
			t.Fatal(err)
		}
		y, yMade, err := server.Prepare([]int{0}, list("server", 1, got), list("server", 2, out), limit, 0, false)
		if err != nil {
			t.Fatal(err)
		}
		for _, made := range []*Task{xMade, yMade} {
			if err := pending(made); err != nil {
				t.Fatal(err)
			}
		}
		return x, y
	}
	for _, limit := range []time.Duration{-1, 20 * time.Second} {
		x, y := prepare(limit)
		for _, err := range []error{x.Queue(true, 4), x.Queue(false, 4), y.Queue(false, 4), y.Queue(true, 4)} {
			if err != nil {
				t.Fatal(err)
			}
		}
		vantest.Fails(t, x.Queue(false, 4), af.ErrStarted) // sends and receives alternate
		done := make(chan struct{})
		devices["worker"].Queue(4, func() { close(done) })
		<-done
		if string(got) != "question" || string(answer) != "answer" || x.Check() != nil || y.Check() != nil {
			t.Errorf("%q and %q, %v, %v", got, answer, x.Check(), y.Check())
		}
		if err := x.Close(); err != nil {
			t.Error(err)
		}
		y.Drop()
		overSoon(t, y)
	}
	_, made, err := worker.Prepare(nil, list("worker", 1, question), nil, 5*time.Millisecond, 0, false)
	if err == nil {
		err = pending(made)
	}
	vantest.Fails(t, err, van.ErrTimeout, "server 0")
	x, made, err := worker.Prepare(nil, list("worker", 1, question), nil, -1, 0, false)
	if err != nil {
		t.Fatal(err)
	}
	x.Drop()
	vantest.Fails(t, pending(made), van.ErrTimeout)
	x, y := prepare(-1)
	x.Drop()
	overSoon(t, y)
	vantest.Fails(t, y.Check(), van.ErrClosed, "worker 0")
	_ = y.Close()
}
