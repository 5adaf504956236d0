package window

// Tests of the waits of streams in a window on devices, and of the memory that the window retains.

import (
	"context"
	"encoding/binary"
	"errors"
	"math"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/commlayer"
	"github.com/stepaf/stepaf-go/internal/gpusync"
	"github.com/stepaf/stepaf-go/tests/simgpu"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// until polls for a condition that has no signal.
func (r *deviceRig) until(what string, is func() bool) {
	r.Helper()
	for end := time.Now().Add(testTime); !is(); runtime.Gosched() {
		if time.Now().After(end) {
			r.Fatal("in vain: ", what)
		}
	}
}

// hold keeps a stream of a rank until the function that it returns is called.
func (r *deviceRig) hold(rank int, s af.Stream) (letGo func()) {
	c := make(chan struct{})
	r.devices[rank].Queue(uintptr(s), func() { <-c })
	return func() { close(c) }
}

// TestDeviceBehindPut: a stream waits for the puts of another stream, and not for that stream's later work: a
// question and an answer in two streams do not wait for each other.
func TestDeviceBehindPut(t *testing.T) {
	r := newDeviceRig(t, 2, Options{Size: 64, Signals: 2})
	a, b := r.windows[0], r.windows[1]
	go1 := r.hold(0, stream)
	r.must(a.Put(t.Context(), 1, 0, r.tensor(0, []byte{7}), stream), a.WaitSignal(t.Context(), 1, 1, stream)) // for the answer
	r.must(a.PutSignal(t.Context(), 1, 8, r.tensor(0, []byte{8}), 0, stream+1))                               // the question
	others := []af.Stream{stream + 1, stream + 2, af.DefaultStream}
	for _, s := range others[1:] {
		r.must(a.Flush(t.Context(), 1, s))
	}
	r.must(b.WaitSignal(t.Context(), 0, 0, stream), b.Signal(t.Context(), 0, 1, stream))
	for _, s := range others {
		went := make(chan struct{})
		r.devices[0].Queue(uintptr(s), func() { close(went) })
		select {
		case <-went:
			t.Errorf("stream %d has overtaken the put in another one", s)
		case <-time.After(50 * time.Millisecond): // it is about what does not happen
		}
	}
	go1()
	for _, s := range append(others, stream) {
		r.settle(0, s)
	}
	r.settle(1, stream)
	if got := r.memory(1); got[0] != 7 || got[8] != 8 {
		t.Errorf("got %d and %d, want 7 and 8", got[0], got[8])
	}
	r.must(a.Check(), b.Check(), a.Flush(t.Context(), 1))
}

// TestDeviceBehindCapture: a stream in which something was put before is captured: puts in other streams, and calls that wait,
// put nothing into its graph, and get on.
func TestDeviceBehindCapture(t *testing.T) {
	r := newDeviceRig(t, 2, Options{Size: 64, Signals: 1})
	a, b := r.windows[0], r.windows[1]
	src := r.tensor(0, []byte{7})
	r.must(a.PutSignal(t.Context(), 1, 0, src, 0, af.Stream(9)))
	r.settle(0, 9)
	g := r.devices[0].Capture(9)
	r.must(a.PutSignal(t.Context(), 1, 1, src, 0, af.Stream(10)), a.Flush(t.Context(), 1, af.Stream(11)), a.Flush(t.Context(), 1), b.WaitSignal(t.Context(), 0, 0), b.WaitSignal(t.Context(), 0, 0))
	r.must(a.PutSignal(t.Context(), 1, 2, src, 0, af.Stream(10)), a.Close())
	g.End()
	if n := g.Len(); n > 0 {
		t.Errorf("the graph has %d nodes that its owner knows nothing of", n)
	}
}

// TestDeviceCloseWaiting: Close releases the streams that wait on this rank, and then waits for their puts.
func TestDeviceCloseWaiting(t *testing.T) {
	t.Run("after a put", func(t *testing.T) {
		r := newDeviceRig(t, 2, Options{Size: 64, Signals: 1})
		w := r.windows[1]
		r.must(w.Put(t.Context(), 0, 0, r.tensor(1, []byte{7}), stream))
		r.settle(1, stream)
		r.must(w.WaitSignal(t.Context(), 0, 0, stream), w.Close()) // all that was put is there
		r.settle(1, stream)
		if err := r.over(0); !errors.Is(err, van.ErrClosed) {
			t.Errorf("%v", err)
		}
	})
	t.Run("before a put", func(t *testing.T) {
		r := newDeviceRig(t, 2, Options{Size: 64, Signals: 1})
		w := r.windows[1]
		r.must(w.WaitSignal(t.Context(), 0, 0, stream), w.PutSignal(t.Context(), 0, 0, r.tensor(1, []byte{7}), 0, stream))
		begun := time.Now()
		if err := w.Close(); !errors.Is(err, van.ErrClosed) || !strings.Contains(err.Error(), "not whole") {
			t.Errorf("%v, want that the put is not whole", err)
		}
		if took := time.Since(begun); took > testTime/2 {
			t.Errorf("Close took %s", took)
		}
		if idle, _ := r.devices[1].Idle(uintptr(stream)); !idle {
			r.settle(1, stream)
		}
		if err := w.Check(); !errors.Is(err, van.ErrClosed) || !strings.Contains(err.Error(), "while a stream waited for a signal of rank 0") {
			t.Errorf("%v", err)
		}
		_ = r.over(0)
	})
	t.Run("beside a put that waits for room", func(t *testing.T) {
		r := newDeviceRig(t, 2, Options{Size: 64, Signals: 1})
		w := r.windows[1]
		r.must(w.WaitSignal(t.Context(), 0, 0, stream))
		for range 4096 { // the capacity of a stream
			r.devices[1].Queue(uintptr(stream), func() {})
		}
		put := make(chan error, 1)
		go func() { put <- w.Put(t.Context(), 0, 0, r.tensor(1, []byte{7}), stream) }()
		r.until("a put in a full stream", func() bool {
			if !w.peers[0].out.mu.TryLock() {
				return true
			}
			w.peers[0].out.mu.Unlock()
			return false
		})
		r.must(w.Close(), <-put)
		r.settle(1, stream)
	})
}

// TestDeviceFlushAfterClose: a closed window waits for nothing any more.
func TestDeviceFlushAfterClose(t *testing.T) {
	r := newDeviceRig(t, 2, Options{Size: 64, Signals: 1})
	w := r.windows[0]
	r.must(w.Put(t.Context(), 1, 0, r.tensor(0, []byte{7}), af.Complete))
	own := w.dev.memory.own
	r.must(w.Close())
	letGo := r.hold(0, af.Stream(own)) // it may have another user by now
	defer func() {
		letGo()
		r.settle(0, af.Stream(own))
	}()
	for _, err := range []error{w.Flush(t.Context(), 1, stream), w.Flush(t.Context(), 1), w.Flush(t.Context(), 0)} {
		if !errors.Is(err, van.ErrClosed) {
			t.Errorf("%v, want %v", err, van.ErrClosed)
		}
	}
	r.settle(0, stream)
}

type device = simgpu.Device // its name is that of a method, too

// failing is a device during whose Alloc the node's communicator fails.
type failing struct {
	*device
	at atomic.Pointer[func()]
}

func (d *failing) Alloc(n int) (backend.Mem, error) {
	if f := d.at.Swap(nil); f != nil {
		go (*f)()
	}
	return d.device.Alloc(n)
}

// TestDeviceFailsAtOpen: the communicator fails while a window is opened: Open fails, or, if the failure is later,
// the window is over. This is for the race detector.
func TestDeviceFailsAtOpen(t *testing.T) {
	d := &failing{device: simgpu.New(0)}
	var o testcluster.Options
	devicesFor(t, &o, 2)
	others := o.Backend
	o.Backend = func(role string, rank int) backend.Backend {
		if role == "worker" && rank == 0 {
			return d
		}
		return others(role, rank)
	}
	r := newRig(t, o, 2, Options{Size: 64, Signals: 1, Device: true})
	fail := func() { commlayer.Of(r.comms[0]).Fail(errors.New("a test")) }
	d.at.Store(&fail)
	r.all(func(i int) error {
		w, err := Open(t.Context(), r.comms[i], Options{Size: 1 << 20, Device: true})
		if err != nil {
			return nil
		}
		for end := time.Now().Add(testTime); w.Check() == nil; runtime.Gosched() {
			if time.Now().After(end) {
				return errors.New("it has opened a window of a communicator that has failed, which is not over")
			}
		}
		_ = w.Close() // it says why it is over
		return nil
	})
}

// keeping is a device whose driver frees nothing while streams wait.
type keeping struct{ *device }

func (keeping) MayBlock() bool { return true }

// TestDeviceOpenKeepsNothing: a failed Open releases all objects that no other rank knows of.
func TestDeviceOpenKeepsNothing(t *testing.T) {
	r := newDeviceRig(t, 2, Options{Size: 64, Signals: 1})
	refused := func(what string, of ...Options) {
		t.Helper()
		var held, streams [2]int
		for i, d := range r.devices {
			held[i], streams[i] = d.Held(), d.Streams()
		}
		for i, err := range every(2, func(i int) error {
			_, err := Open(t.Context(), r.comms[i], of[i%len(of)])
			return err
		}) {
			if err == nil {
				t.Errorf("%s: rank %d has a window", what, i)
			}
		}
		for i, d := range r.devices {
			if h, s := d.Held(), d.Streams(); h != held[i] || s != streams[i] {
				t.Errorf("%s: rank %d holds %d buffers and %d streams, before %d and %d", what, i, h, s, held[i], streams[i])
			}
		}
	}
	refused("sizes that differ", Options{Size: 8, Device: true}, Options{Size: 1 << 20, Device: true})
	refused("one on the host", Options{Size: 8}, Options{Size: 8, Device: true})
	r.devices[1].Private(true)
	refused("memory that cannot be shared", Options{Size: 8, Device: true})
	r.devices[1].Private(false)

	d := keeping{simgpu.New(0)}
	defer d.Close()
	s, err := backend.StreamDeviceOf(d)
	v := &memory{d: s}
	r.must(err)
	v.whole, err = d.Alloc(8)
	r.must(err, v.discard())
	if d.Held() != 1 {
		t.Error("memory was freed where that may wait for streams that wait")
	}
}

// TestDeviceSizes: sizes that cannot be are named.
func TestDeviceSizes(t *testing.T) {
	r := newDeviceRig(t, 2, Options{Size: 64, Signals: 1})
	for _, o := range []Options{{Size: math.MaxInt, Device: true}, {Size: math.MaxInt - 3<<20, Device: true}, {Size: af.MaxTensorBytes + 1, Device: true},
		{Size: math.MaxInt}, {Size: maxSize + 1}, {Size: -1, Device: true}} {
		for i, err := range every(2, func(i int) error {
			_, err := Open(t.Context(), r.comms[i], o)
			return err
		}) {
			if !errors.Is(err, van.ErrInvalid) || !strings.Contains(err.Error(), "size "+strconv.Itoa(o.Size)) {
				t.Errorf("%d: rank %d: %v", o.Size, i, err)
			}
		}
	}
}

// TestDeviceRefusedWait: a wait that is refused because the rank has closed its end is none that the rank ends the window for.
func TestDeviceRefusedWait(t *testing.T) {
	r := newDeviceRig(t, 3, Options{Size: 64, Signals: 1})
	b := r.windows[1]
	err := errRankClosed
	b.peers[0].gone.Store(&err) // as leave does, before it starts left
	b.dev.memory.reading.Lock() // it is not known yet whether the signal has arrived
	refused, left := make(chan error, 1), make(chan struct{})
	go func() { refused <- b.WaitSignal(t.Context(), 0, 0, stream) }()
	r.until("a wait that is being decided", func() bool {
		if !b.dev.ins[0].deciding.TryLock() {
			return true
		}
		b.dev.ins[0].deciding.Unlock()
		return false
	})
	go func() {
		b.dev.left(0, err)
		close(left)
	}()
	for range 100 {
		runtime.Gosched()
	}
	b.dev.memory.reading.Unlock()
	if err := <-refused; !errors.Is(err, van.ErrClosed) {
		t.Errorf("the wait: %v", err)
	}
	<-left
	if err := b.Check(); err != nil {
		t.Errorf("no stream waits, and the window is over: %v", err)
	}
}

// TestDeviceFreed: a stream goes on in whichever of its two flags it waits for a signal, and other signals stay
// unchanged.
func TestDeviceFreed(t *testing.T) {
	shortLaps(t, 4)
	r := newDeviceRig(t, 2, Options{Size: 64, Signals: 100})
	a, b := r.windows[0], r.windows[1]
	for range 3 {
		r.must(a.Signal(t.Context(), 1, 50, stream), b.WaitSignal(t.Context(), 0, 50, stream))
	}
	r.must(b.WaitSignal(t.Context(), 0, 50, stream), b.WaitSignal(t.Context(), 0, 50, stream+1), b.WaitSignal(t.Context(), 0, 70, stream+2))
	commlayer.Of(r.comms[1]).Fail(errors.New("a test"))
	for k := range 3 {
		r.settle(1, stream+af.Stream(k))
	}
	<-b.dev.freed
	r.settle(1, af.Stream(b.dev.memory.release))
	freed := 0
	for rank := range 2 {
		for signal := range 100 {
			for word := range 2 {
				if binary.NativeEndian.Uint32(simgpu.Raw(b.dev.memory.word(b.dev.memory.whole, rank, signal, word).Upper())) != 0 {
					freed++
				}
			}
		}
	}
	if freed != 3 {
		t.Errorf("%d words were written, want 3", freed)
	}
}

// TestDeviceToken: memory that is not what the rank has offered is noticed.
func TestDeviceToken(t *testing.T) {
	r := newDeviceRig(t, 2, Options{Size: 64, Signals: 1})
	v, of := &r.windows[0].dev.memory, &r.windows[1].dev.memory
	e, err := of.d.Export(of.whole)
	r.must(err)
	offer := make([]byte, van.ExportLen+gpusync.TokenLen)
	van.PutExport(offer, &e)
	copy(offer[van.ExportLen:], simgpu.Raw(of.whole))
	r.must(v.reach(1, offer))
	offer[len(offer)-1]++
	if err := v.reach(1, offer); !errors.Is(err, van.ErrMalformed) || !strings.Contains(err.Error(), "another host") {
		t.Errorf("another token: %v", err)
	}
	if err := v.reach(1, offer[1:]); !errors.Is(err, van.ErrMalformed) {
		t.Errorf("a short offer: %v", err)
	}
}

// TestDeviceExit: when a node ends its own streams go on, and Check says why.
func TestDeviceExit(t *testing.T) {
	r := newDeviceRig(t, 2, Options{Size: 64, Signals: 1})
	w := r.windows[0]
	r.must(w.WaitSignal(t.Context(), 1, 0, stream))
	r.c.Workers[0].Close()
	if err := w.Check(); err == nil {
		t.Error("the node has ended, and its window has not")
	}
	r.settle(0, stream)
}

// TestDeviceHostSource: pinned host memory is held until it has been read; other host memory is refused.
func TestDeviceHostSource(t *testing.T) {
	r := newDeviceRig(t, 2, Options{Size: 64, Signals: 1})
	w, d := r.windows[0], r.devices[0]
	if err := w.Put(t.Context(), 1, 0, tensor([]byte{1, 2, 3}), stream); !errors.Is(err, van.ErrInvalid) || !strings.Contains(err.Error(), "not pinned") {
		t.Errorf("a put of ordinary host memory: %v", err)
	}
	owner := &simgpu.Holds{}
	m, err := d.RegisterHost(owner.Bytes([]byte{1, 2, 3}))
	r.must(err)
	src, err := af.NewTensor(m, af.Uint8, 3)
	r.must(err)
	letGo := r.hold(0, stream)
	r.must(w.Put(t.Context(), 1, 1, src, stream), w.Put(t.Context(), 1, 5, src, stream))
	if n := owner.N(); n != 2 {
		t.Errorf("%d puts hold their source, want 2", n)
	}
	letGo()
	r.must(w.Flush(t.Context(), 1))
	if n := owner.N(); n != 0 {
		t.Errorf("behind a flush %d puts hold their source", n)
	}
	if got := r.memory(1)[:8]; string(got) != "\x00\x01\x02\x03\x00\x01\x02\x03" {
		t.Errorf("got %v", got)
	}
	r.must(w.PutSignal(t.Context(), 1, 1, src, 0, stream))
	r.settle(0, stream)
	r.must(w.Signal(t.Context(), 1, 0, stream)) // releases completed work
	if n := owner.N(); n != 0 {
		t.Errorf("%d puts that are done hold their source", n)
	}
	r.must(w.PutSignal(t.Context(), 1, 1, src, 0, stream), w.Close(), d.UnregisterHost(m))
	if n := owner.N(); n != 0 {
		t.Errorf("behind Close %d puts hold their source", n)
	}
}

// TestDeviceWaitOrder: a stream gets the signal before a call that began to wait earlier; the call gets the next one.
func TestDeviceWaitOrder(t *testing.T) {
	r := newDeviceRig(t, 2, Options{Size: 64, Signals: 1})
	a, b := r.windows[0], r.windows[1]
	asked := func() uint32 {
		b.dev.memory.reading.Lock()
		defer b.dev.memory.reading.Unlock()
		return b.dev.memory.asked
	}
	first := asked()
	call := make(chan error, 1)
	go func() { call <- b.WaitSignal(t.Context(), 0, 0) }()
	r.until("a call that waits", func() bool { return asked() > first+1 })
	r.must(b.WaitSignal(t.Context(), 0, 0, stream), a.Signal(t.Context(), 1, 0))
	r.settle(1, stream)
	short, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if err := b.WaitSignal(short, 0, 0); !errors.Is(err, van.ErrTimeout) {
		t.Errorf("another call has taken what the stream has: %v", err)
	}
	r.must(a.Signal(t.Context(), 1, 0), <-call)
}
