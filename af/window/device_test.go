package window

// Windows on pretended devices, whose streams are queues of functions.

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
	"github.com/stepaf/stepaf-go/af/collective"
	"github.com/stepaf/stepaf-go/tests/simgpu"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// deviceRig is a rig with devices.
type deviceRig struct {
	*rig
	devices []*simgpu.Device
}

// devicesFor gives workers devices.
func devicesFor(t *testing.T, o *testcluster.Options, n int) (l []*simgpu.Device) {
	for i := range n {
		l = append(l, simgpu.New(i))
	}
	o.Backend = func(role string, rank int) backend.Backend {
		if role != "worker" {
			return nil
		}
		return l[rank]
	}
	t.Cleanup(func() { // after the nodes are closed
		for i, d := range l {
			d.NothingLent(t)
			if n, _ := d.Events(); n > 0 || d.Streams() > 0 {
				t.Errorf("rank %d: %d events and %d streams are left", i, n, d.Streams())
			}
			if err := d.Close(); err != nil {
				t.Error(err)
			}
		}
	})
	return l
}

func newDeviceRig(t *testing.T, n int, of Options) *deviceRig {
	t.Helper()
	var o testcluster.Options
	l := devicesFor(t, &o, n)
	of.Device = true
	return &deviceRig{newRig(t, o, n, of), l}
}

// tensor is b on the device of a rank.
func (r *deviceRig) tensor(rank int, b []byte) af.Tensor {
	t, err := af.NewTensor(r.devices[rank].Mem(b), af.Uint8, int64(len(b)))
	if err != nil {
		r.Fatal(err)
	}
	return t
}

// memory is the window's on a rank.
func (r *deviceRig) memory(rank int) []byte {
	t := r.windows[rank].Tensor()
	return simgpu.Raw(t.Mem())
}

// settle waits until stream s of a rank has done what was queued.
func (r *deviceRig) settle(rank int, s af.Stream) {
	r.Helper()
	r.devices[rank].Settle(r, uintptr(s))
}

// must ends the test with an error.
func (r *deviceRig) must(errs ...error) {
	r.Helper()
	if err := errors.Join(errs...); err != nil {
		r.Fatal(err)
	}
}

// shortLaps makes words take turns often.
func shortLaps(t *testing.T, n uint64) {
	was := lap
	lap = n
	t.Cleanup(func() { lap = was })
}

const stream = af.Stream(5)

// TestDeviceRing: rounds in which each rank puts its received value, plus one, to the next rank, using its stream
// only. The data is complete when the stream goes on, also after flags have wrapped around.
func TestDeviceRing(t *testing.T) {
	shortLaps(t, 8)
	const n, size, rounds = 3, 1000, 100
	r := newDeviceRig(t, n, Options{Size: 2 * size, Signals: 2})
	bufs := make([][]byte, n)
	for i := range n {
		bufs[i] = make([]byte, size)
	}
	wrong := make([]int, n)
	r.all(func(i int) error {
		w, d, src := r.windows[i], r.devices[i], r.tensor(i, bufs[i])
		next, before := (i+1)%n, (i+n-1)%n
		got := r.memory(i)[size:]
		for round := range rounds {
			s := stream + af.Stream(round%3) // puts keep their order all the same, and waits are in it
			if err := errors.Join(w.Flush(t.Context(), next, s)); err != nil {
				return err
			}
			if round > 0 {
				if err := w.WaitSignal(t.Context(), next, 1, s); err != nil { // it has read the last one
					return err
				}
			}
			v := byte(round + i)
			d.Queue(uintptr(s), func() {
				for k := range bufs[i] {
					bufs[i][k] = v
				}
			})
			if err := errors.Join(w.PutSignal(t.Context(), next, size, src, 0, s), w.WaitSignal(t.Context(), before, 0, s)); err != nil {
				return err
			}
			want := byte(round + before)
			d.Queue(uintptr(s), func() {
				if !bytes.Equal(got, bytes.Repeat([]byte{want}, size)) {
					wrong[i]++
				}
			})
			if err := w.Signal(t.Context(), before, 1, s); err != nil {
				return err
			}
		}
		for k := range 3 {
			r.settle(i, stream+af.Stream(k))
		}
		return errors.Join(w.Check(), r.comms[i].Barrier(t.Context()))
	})
	for i, k := range wrong {
		if k > 0 {
			t.Errorf("rank %d: %d of %d rounds were wrong", i, k, rounds)
		}
	}
	r.all(func(i int) error { return r.windows[i].Close() })
}

// TestDeviceHost: calls without a stream: puts of host memory and to this rank itself, waits on the host, signals
// that had arrived before, and a flush.
func TestDeviceHost(t *testing.T) {
	shortLaps(t, 4)
	r := newDeviceRig(t, 2, Options{Size: 64, Signals: 3})
	a, b := r.windows[0], r.windows[1]
	ctx := t.Context()
	for i := range byte(20) {
		src := bytes.Repeat([]byte{i}, 10)
		hold := make(chan struct{})
		r.devices[0].Queue(0, func() { <-hold }) // the default stream, which is waited for
		r.must(a.PutSignal(ctx, 1, 54, r.tensor(0, src), 2))
		short, cancel := context.WithTimeout(ctx, 10*time.Millisecond)
		if err := b.WaitSignal(short, 0, 2); !errors.Is(err, van.ErrTimeout) || !strings.Contains(err.Error(), "signal 2 has not arrived") {
			t.Errorf("a wait for what waits for its stream: %v", err)
		}
		if err := a.Flush(short, 1); !errors.Is(err, van.ErrTimeout) || !strings.Contains(err.Error(), "the stream has not reached this work") {
			t.Errorf("a flush of what waits for its stream: %v", err)
		}
		cancel()
		close(hold)
		r.must(b.WaitSignal(ctx, 0, 2), a.Flush(ctx, 1))
		if got := r.memory(1)[54:]; !bytes.Equal(got, src) {
			t.Fatalf("got %v, want %v", got, src)
		}
	}
	pinned, err := r.devices[0].AllocPinned(3)
	r.must(err)
	copy(pinned.Host(), []byte{1, 2, 3})
	host, err := af.NewTensor(pinned, af.Uint8, 3)
	r.must(err, a.PutSignal(ctx, 0, 1, host, 0, af.Complete), a.Signal(ctx, 0, 0, af.Complete), a.WaitSignal(ctx, 0, 0), a.WaitSignal(ctx, 0, 0))
	if got := r.memory(0)[:5]; !bytes.Equal(got, []byte{0, 1, 2, 3, 0}) {
		t.Errorf("a put to this rank itself: %v", got)
	}
	if a.Bytes() != nil {
		t.Error("Bytes of a window on a device")
	}
}

// over waits until the window of a rank is over.
func (r *deviceRig) over(rank int) error {
	r.Helper()
	for end := time.Now().Add(testTime); time.Now().Before(end); r.windows[rank].base.app.Poll(func() bool { return r.windows[rank].Check() != nil }) {
		if err := r.windows[rank].Check(); err != nil {
			return err
		}
	}
	r.Fatalf("the window of rank %d is not over", rank)
	return nil
}

// TestDeviceLost: streams that wait for a lost rank go on, on all ranks, and Check says why.
func TestDeviceLost(t *testing.T) {
	r := newDeviceRig(t, 3, Options{Size: 64, Signals: 1})
	for i := range 2 {
		r.must(r.windows[i].WaitSignal(t.Context(), 2, 0, stream))
		passed := make(chan error, 1)
		r.devices[i].Queue(uintptr(stream), func() { passed <- r.windows[i].Check() })
		t.Cleanup(func() {
			if err := <-passed; err == nil {
				t.Errorf("the stream of rank %d went on, and Check said nothing", i)
			}
		})
	}
	r.c.Workers[2].Close()
	for i := range 2 {
		if err := r.over(i); !errors.Is(err, van.ErrPeerLost) && !errors.Is(err, van.ErrClosed) || !strings.Contains(err.Error(), "worker 2") && i == 0 && errors.Is(err, van.ErrPeerLost) {
			t.Errorf("rank %d: %v", i, err)
		}
		r.settle(i, stream)
		if err := r.windows[i].Put(t.Context(), 1-i, 0, r.tensor(i, make([]byte, 4)), stream); err == nil {
			t.Errorf("rank %d: a put into a window that is over", i)
		}
		if err := r.windows[i].WaitSignal(t.Context(), 1-i, 0, stream); err == nil {
			t.Errorf("rank %d: a wait in a window that is over", i)
		}
		r.must(r.windows[i].Close())
	}
}

// TestDeviceGoOnTogether: streams wait until the window is over for all ranks, and no rank takes their later
// writes as valid.
func TestDeviceGoOnTogether(t *testing.T) {
	r := newDeviceRig(t, 2, Options{Size: 64, Signals: 1})
	r.must(r.windows[0].WaitSignal(t.Context(), 1, 0, stream))
	p := r.windows[1].peers[0]
	p.in.mu.Lock() // rank 1 neither receives nor sends
	gone := make(chan struct{})
	r.devices[0].Queue(uintptr(stream), func() { close(gone) })
	r.windows[0].base.layer.Fail(errors.New("a test"))
	_ = r.over(0)
	select {
	case <-gone:
		t.Error("the stream of rank 0 has gone on before the window was over for rank 1")
	case <-time.After(100 * time.Millisecond): // it is about what does not happen
	}
	p.in.mu.Unlock()
	<-gone
	if err := r.windows[1].Check(); err == nil {
		t.Error("the stream of rank 0 has gone on, and the window of rank 1 is not over")
	}
}

// TestDeviceClose: if a rank closes after its signal, the waits for that signal succeed. If it closes while
// another rank or its own stream still waits, the window ends.
func TestDeviceClose(t *testing.T) {
	t.Run("signalled", func(t *testing.T) {
		r := newDeviceRig(t, 3, Options{Size: 64, Signals: 1})
		r.must(r.windows[1].WaitSignal(t.Context(), 0, 0, stream), r.windows[0].PutSignal(t.Context(), 1, 0, r.tensor(0, []byte{7}), 0, stream))
		r.must(r.windows[0].Signal(t.Context(), 1, 0, stream)) // no rank waits yet
		r.must(r.windows[0].Close())
		r.settle(1, stream)
		b := r.windows[1]
		for end := time.Now().Add(testTime); b.peers[0].gone.Load() == nil && time.Now().Before(end); {
			b.base.app.Poll(func() bool { return b.peers[0].gone.Load() != nil })
		}
		r.must(b.WaitSignal(t.Context(), 0, 0, stream))
		r.settle(1, stream)
		if err := b.WaitSignal(t.Context(), 0, 0, stream); !errors.Is(err, van.ErrClosed) {
			t.Errorf("a wait for a third signal: %v", err)
		}
		if err := b.Put(t.Context(), 0, 0, r.tensor(1, []byte{7}), stream); !errors.Is(err, van.ErrClosed) {
			t.Errorf("a put to who has closed: %v", err)
		}
		if r.memory(1)[0] != 7 {
			t.Errorf("got %d, want 7", r.memory(1)[0])
		}
		r.must(b.Signal(t.Context(), 2, 0, stream), r.windows[2].WaitSignal(t.Context(), 1, 0), b.Check(), r.windows[2].Check())
	})
	t.Run("waited for", func(t *testing.T) {
		r := newDeviceRig(t, 3, Options{Size: 64, Signals: 1})
		r.must(r.windows[1].WaitSignal(t.Context(), 0, 0, stream), r.windows[0].Close())
		if err := r.over(1); !errors.Is(err, van.ErrClosed) || !strings.Contains(err.Error(), "worker 0") {
			t.Errorf("%v", err)
		}
		if err := r.over(2); !errors.Is(err, van.ErrClosed) {
			t.Errorf("%v", err)
		}
		r.settle(1, stream)
	})
	t.Run("waiting", func(t *testing.T) {
		r := newDeviceRig(t, 2, Options{Size: 64, Signals: 1})
		r.must(r.windows[1].WaitSignal(t.Context(), 0, 0, stream), r.windows[1].Close())
		if err := r.over(0); !errors.Is(err, van.ErrClosed) {
			t.Errorf("%v", err)
		}
		r.settle(1, stream)
	})
}

// TestDeviceMisuse: impossible requests are errors with a reason, on all ranks if they concern all.
func TestDeviceMisuse(t *testing.T) {
	r := newDeviceRig(t, 2, Options{Size: 64, Signals: 1})
	w := r.windows[0]
	other := r.tensor(1, make([]byte, 4))
	mine := r.tensor(0, make([]byte, 4))
	g := r.devices[0].Capture(9)
	for what, c := range map[string]struct {
		err  error
		is   error
		want string
	}{
		"a nil option":           {w.Put(t.Context(), 1, 0, mine, af.Stream(1), nil), van.ErrInvalid, "option 1 is nil"},
		"another device":         {w.Put(t.Context(), 1, 0, other, af.Stream(1)), backend.ErrWrongDevice, "gpu:1"},
		"beyond the end":         {w.Put(t.Context(), 1, 61, mine, af.Stream(1)), van.ErrInvalid, "beyond the 64"},
		"no such signal":         {w.PutSignal(t.Context(), 1, 0, mine, 1, af.Stream(1)), van.ErrInvalid, "signal 1"},
		"a put in a graph":       {w.Put(t.Context(), 1, 0, mine, af.Stream(9)), backend.ErrUnsupported, "being captured"},
		"a wait in a graph":      {w.WaitSignal(t.Context(), 1, 0, af.Stream(9)), backend.ErrUnsupported, "being captured"},
		"no such rank":           {w.Flush(t.Context(), 2, af.Stream(1)), van.ErrInvalid, "rank 2"},
		"a wait for no rank":     {w.WaitSignal(t.Context(), -1, 0, af.Stream(1)), van.ErrInvalid, "rank -1"},
		"a wait for no signal":   {w.WaitSignal(t.Context(), 1, 5, af.Stream(1)), van.ErrInvalid, "signal 5"},
		"a nil option of a wait": {w.WaitSignal(t.Context(), 1, 0, af.Stream(1), nil), van.ErrInvalid, "option 1 is nil"},
	} {
		if !errors.Is(c.err, c.is) || !strings.Contains(c.err.Error(), c.want) {
			t.Errorf("%s: %v, want %v with %q", what, c.err, c.is, c.want)
		}
	}
	g.End()
	open := func(of ...Options) []error {
		return every(2, func(i int) error {
			w, err := Open(t.Context(), r.comms[i], of[i%len(of)])
			if err == nil {
				_ = w.Close()
			}
			return err
		})
	}
	wants := func(what string, errs []error, is error, words ...string) {
		t.Helper()
		for i, err := range errs {
			if !errors.Is(err, is) && !errors.Is(err, collective.ErrMismatch) || !strings.Contains(fmt.Sprint(err), words[i%len(words)]) {
				t.Errorf("%s: rank %d: %v, want %v with %q", what, i, err, is, words[i%len(words)])
			}
		}
	}
	wants("memory", open(Options{Memory: mine, Device: true}), van.ErrInvalid, "want Size")
	wants("memory of the device", open(Options{Memory: mine}), van.ErrInvalid, "Options.Device")
	wants("one on the host", open(Options{Size: 8}, Options{Size: 8, Device: true}), collective.ErrMismatch, "8 bytes on the device and 0 signals at")
	r.devices[1].Private(true)
	errs := open(Options{Size: 8, Device: true})
	wants("memory that cannot be shared", errs[:1], backend.ErrUnavailable, "not available at rank 1 (worker 1")
	wants("memory that cannot be shared", errs[1:], backend.ErrNotExportable, "export of ")
	r.devices[1].Private(false)
	if errs = open(Options{Size: 8, Device: true}); errs[0] != nil || errs[1] != nil {
		t.Errorf("after all that: %v", errs)
	}
	if err := w.Check(); err != nil {
		t.Errorf("the first window: %v", err)
	}
}

// TestDeviceWithout: ranks without devices get an error with advice, and so does a call with a stream for a window
// on the host.
func TestDeviceWithout(t *testing.T) {
	r := newRig(t, testcluster.Options{}, 2, Options{Size: 8, Signals: 1})
	errs := every(2, func(i int) error {
		_, err := Open(t.Context(), r.comms[i], Options{Size: 8, Device: true})
		return err
	})
	for _, err := range errs {
		if !errors.Is(err, backend.ErrUnavailable) || !strings.Contains(err.Error(), "STEPMESH_BAKCEND") {
			t.Errorf("%v, want %v", err, backend.ErrUnavailable)
		}
	}
	w := r.windows[0]
	for _, err := range []error{w.Put(t.Context(), 1, 0, tensor(make([]byte, 4)), stream), w.Signal(t.Context(), 1, 0, stream),
		w.WaitSignal(t.Context(), 1, 0, stream), w.Flush(t.Context(), 1, stream)} {
		if !errors.Is(err, van.ErrInvalid) || !strings.Contains(err.Error(), "Options.Device") {
			t.Errorf("%v, want %v", err, van.ErrInvalid)
		}
	}
	if err := w.PutSignal(t.Context(), 1, 0, tensor(make([]byte, 4)), 0, af.Complete); err != nil {
		t.Error(err)
	}
	if err := w.Check(); err != nil {
		t.Error(err)
	}
	got := w.Tensor()
	if got.Len() != 8 || len(got.Bytes()) != 8 {
		t.Errorf("the tensor of the window has %d bytes", got.Len())
	}
}

// TestDeviceAnew: after a rank was lost and replaced windows are opened anew, in other memory.
func TestDeviceAnew(t *testing.T) {
	r := newDeviceRig(t, 2, Options{Size: 64, Signals: 1})
	old := r.memory(0)
	r.must(r.windows[0].WaitSignal(t.Context(), 1, 0, stream))
	r.c.Workers[1].Close()
	_ = r.over(0)
	r.settle(0, stream)
	r.must(r.windows[0].Close(), r.windows[1].Close())
	testcluster.Lost(t, r.c.Scheduler, van.WorkerID(1))
	ctx, cancel := context.WithTimeout(t.Context(), testTime)
	defer cancel()
	n, err := r.c.Join(ctx, "worker", 1, nil)
	if err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	var errs [2]error
	all.Go(func() {
		if errs[0] = r.comms[0].Rebuild(ctx); errs[0] == nil {
			r.windows[0], errs[0] = Open(ctx, r.comms[0], Options{Size: 64, Signals: 1, Device: true})
		}
	})
	all.Go(func() {
		if r.comms[1], errs[1] = collective.New(ctx, n, collective.Options{Ranks: ranks(2), Timeout: testTime}); errs[1] == nil {
			r.windows[1], errs[1] = Open(ctx, r.comms[1], Options{Size: 64, Signals: 1, Device: true})
		}
	})
	all.Wait()
	r.must(errs[:]...)
	r.must(r.windows[1].PutSignal(ctx, 0, 0, r.tensor(1, []byte{9}), 0, stream), r.windows[0].WaitSignal(ctx, 1, 0, stream))
	r.settle(0, stream)
	if got := r.memory(0); got[0] != 9 || &got[0] == &old[0] || old[0] != 0 {
		t.Errorf("got %d, in the memory of before: %t", got[0], &got[0] == &old[0])
	}
}
