package af_test

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/hooks"
	"github.com/stepaf/stepaf-go/tests/simgpu"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// devices are a cluster with a pretended device for each worker and server, and the
// objects on it.
type devices struct {
	*testcluster.Cluster
	wdev, sdev *simgpu.Device
	w          *af.Worker
	s          *af.Server
}

// startDevices starts a worker and a server.
func startDevices(t *testing.T, over testcluster.Transport) *devices {
	t.Helper()
	d := &devices{wdev: simgpu.New(0), sdev: simgpu.New(0)}
	t.Cleanup(func() { // after the nodes are closed
		for _, dev := range []*simgpu.Device{d.wdev, d.sdev} {
			dev.Leaks(t)
			if err := dev.Close(); err != nil {
				t.Error(err)
			}
		}
	})
	d.Cluster = testcluster.Start(t, testcluster.Options{Over: over, Backend: func(role string, _ int) backend.Backend {
		return map[string]backend.Backend{"worker": d.wdev, "server": d.sdev}[role]
	}})
	var err error
	if d.w, err = af.NewWorker(d.Workers[0], af.WorkerOptions{}); err != nil {
		t.Fatal(err)
	}
	if d.s, err = af.NewServer(d.Servers[0], af.ServerOptions{}); err != nil {
		t.Fatal(err)
	}
	return d
}

func deviceTensor(t testing.TB, d *simgpu.Device, b []byte) af.Tensor {
	t.Helper()
	x, err := af.NewTensor(d.Mem(b), af.Uint8, int64(len(b)))
	if err != nil {
		t.Fatal(err)
	}
	return x
}

func hostTensor(t testing.TB, b []byte) af.Tensor {
	t.Helper()
	x, err := af.FromBytes(b, af.Uint8, int64(len(b)))
	if err != nil {
		t.Fatal(err)
	}
	return x
}

func fill(b []byte, v byte) {
	for i := range b {
		b[i] = v
	}
}

// TestDeviceTensors: tensors on a device that a stream is still making, at both ends,
// arrive whole on the other device.
func TestDeviceTensors(t *testing.T) {
	for _, over := range all {
		t.Run(over.String(), func(t *testing.T) {
			d := startDevices(t, over)
			if err := d.s.Handle(func(b af.Batch) {
				in := b.Retain().Pushes()[0].Val
				if in.Device() != d.sdev.Device() {
					t.Errorf("a push of %d bytes lies on %s", in.Len(), in.Device())
				}
				out := make([]byte, in.Len())
				d.sdev.Queue(7, func() {
					for i, v := range simgpu.Raw(in.Mem()) {
						out[i] = v + 1
					}
					b.Release()
				})
				if err := b.Respond([]af.KeyTensor{{Key: 2, Val: deviceTensor(t, d.sdev, out)}}, af.ByKey, af.Stream(7)); err != nil {
					t.Error(err)
				}
			}); err != nil {
				t.Fatal(err)
			}
			for _, n := range []int{40, 5000, 300_000} {
				deviceRounds(t, d, n)
			}
			if open, made := d.wdev.Events(); open > 2 || made > 2 {
				t.Errorf("%d events, %d made: they are not used again", open, made)
			}
			d.Finalize(t)
		})
	}
}

func deviceRounds(t *testing.T, d *devices, n int) {
	push, pull := make([]byte, n), make([]byte, n)
	for r := range 20 {
		d.wdev.Queue(5, func() { fill(push, byte(r)) })
		h, err := d.w.PushPull([]af.KeyTensor{{Key: 1, Val: deviceTensor(t, d.wdev, push)}},
			[][]af.KeyTensor{{{Key: 2, Val: deviceTensor(t, d.wdev, pull)}}}, af.Stream(5))
		if err != nil {
			t.Fatal(err)
		}
		if err := h.Wait(t.Context()); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(pull, bytes.Repeat([]byte{byte(r + 1)}, n)) {
			t.Fatalf("round %d of %d bytes: got %d, want %d", r, n, pull[0], r+1)
		}
	}
}

// TestDeviceOrder: batches are sent in the order of the calls, whether they wait for a
// stream, have nothing to wait for, or lie on the host.
func TestDeviceOrder(t *testing.T) {
	d := startDevices(t, testcluster.InProc)
	got := make(chan uint64, 100)
	if err := d.s.Handle(func(b af.Batch) {
		got <- b.Pushes()[0].Key
		if err := b.Respond(nil); err != nil {
			t.Error(err)
		}
	}); err != nil {
		t.Fatal(err)
	}
	on := func(stream af.Stream, key uint64, v af.Tensor) af.Call {
		t.Helper()
		h, err := d.w.PushPull([]af.KeyTensor{{Key: key, Val: v}}, nil, stream)
		if err != nil {
			t.Fatal(err)
		}
		return h
	}
	mem := make([]byte, 100)
	for r := range uint64(20) {
		gate := make(chan struct{})
		d.wdev.Queue(3, func() { <-gate })
		hs := []af.Call{
			on(3, 5*r, deviceTensor(t, d.wdev, mem)),
			on(af.DefaultStream, 5*r+1, hostTensor(t, mem)),
			on(af.Complete, 5*r+2, deviceTensor(t, d.wdev, mem)),
			on(4, 5*r+3, deviceTensor(t, d.wdev, mem)),
		}
		select {
		case k := <-got:
			t.Fatalf("push %d was sent before its stream was done", k)
		default:
		}
		close(gate)
		hs = append(hs, on(af.DefaultStream, 5*r+4, hostTensor(t, mem)))
		for i, h := range hs {
			if err := h.Wait(t.Context()); err != nil {
				t.Fatal(err)
			}
			if k := <-got; k != 5*r+uint64(i) {
				t.Fatalf("push %d came in place of %d", k, 5*r+uint64(i))
			}
		}
	}
	d.Finalize(t)
}

// TestAnswerOrder: so are answers.
func TestAnswerOrder(t *testing.T) {
	d := startDevices(t, testcluster.InProc)
	batches := make(chan af.Batch, 10)
	if err := d.s.Handle(func(b af.Batch) { batches <- b }); err != nil {
		t.Fatal(err)
	}
	var pulls [3][]byte
	var hs [3]af.Call
	for i := range pulls {
		pulls[i] = make([]byte, 50)
		var err error
		if hs[i], err = d.w.PushPull(nil, [][]af.KeyTensor{{{Key: 1, Val: hostTensor(t, pulls[i])}}}); err != nil {
			t.Fatal(err)
		}
	}
	gate := make(chan struct{})
	out := make([]byte, 50)
	d.sdev.Queue(3, func() { <-gate; fill(out, 9) })
	var left counter
	for i, v := range []af.Tensor{deviceTensor(t, d.sdev, out), hostTensor(t, bytes.Repeat([]byte{8}, 50)), deviceTensor(t, d.sdev, make([]byte, 50))} {
		b := <-batches
		stream := []af.Stream{3, af.DefaultStream, af.Complete}[i]
		if err := b.Respond([]af.KeyTensor{{Val: v}}, stream, af.OnSent(&left)); err != nil {
			t.Fatal(err)
		}
		if err := b.Respond([]af.KeyTensor{{Val: v}}, stream); !errors.Is(err, postoffice.ErrAnswered) {
			t.Errorf("answered again: %v", err)
		}
	}
	if err := cluster.Call(hs[2]).Customer().WaitSlice(t.Context(), hs[2].Timestamp(), 20*time.Second, time.Millisecond); !errors.Is(err, postoffice.ErrPending) {
		t.Fatalf("an answer overtook the first one: %v", err)
	}
	close(gate)
	for i, h := range hs {
		if err := h.Wait(t.Context()); err != nil {
			t.Fatal(err)
		}
		if want := []byte{9, 8, 0}[i]; pulls[i][49] != want {
			t.Errorf("answer %d: %d, want %d", i, pulls[i][49], want)
		}
	}
	d.Finalize(t)
	if n := left.n.Load(); n != 3 {
		t.Errorf("%d answers are told to have left, want 3", n)
	}
}

type counter struct{ n atomic.Int32 }

func (c *counter) Sent() { c.n.Add(1) }

// TestAnswerOfAClosedServer: an answer on a busy stream that is refused, since the server is closed, retains
// nothing: its tensors, the event and the batch's memory are released, and OnSent is called for all answers.
func TestAnswerOfAClosedServer(t *testing.T) {
	d := startDevices(t, testcluster.InProc)
	batches := make(chan af.Batch, 1)
	if err := d.s.Handle(func(b af.Batch) { batches <- b }); err != nil {
		t.Fatal(err)
	}
	pulls := []af.KeyTensor{{Key: 1, Val: hostTensor(t, make([]byte, 8))}, {Key: 2, Val: hostTensor(t, make([]byte, 8))}}
	if _, err := d.w.PushPull([]af.KeyTensor{{Key: 3, Val: hostTensor(t, make([]byte, 8))}}, [][]af.KeyTensor{pulls}); err != nil {
		t.Fatal(err)
	}
	b := <-batches
	gate := make(chan struct{})
	defer close(gate)
	d.sdev.Queue(3, func() { <-gate })
	d.s.Close()
	before, _ := d.sdev.Events()
	var o owner
	var left counter
	own := owned(t, d.sdev, make([]byte, 8), &o)
	held := o.n.Load()
	err := b.Respond([]af.KeyTensor{{Key: 1, Val: own}, {Key: 2, Val: own}}, af.Stream(3), af.OnSent(&left))
	vantest.Fails(t, err, van.ErrClosed, "respond")
	if n := o.n.Load(); n != held {
		t.Errorf("the tensor is held %d times, want %d", n, held)
	}
	if n, _ := d.sdev.Events(); n != before {
		t.Errorf("%d events, want %d as before", n, before)
	}
	if n := left.n.Load(); n != 2 {
		t.Errorf("%d answers are told to have left, want 2", n)
	}
}

// TestWrongDevice: tensors of a device that the node does not own are refused before anything is sent.
func TestWrongDevice(t *testing.T) {
	d := startDevices(t, testcluster.InProc)
	batches := make(chan af.Batch, 1)
	if err := d.s.Handle(func(b af.Batch) { batches <- b }); err != nil {
		t.Fatal(err)
	}
	other := deviceTensor(t, simgpu.New(3), make([]byte, 8))
	own := []af.KeyTensor{{Key: 1, Val: hostTensor(t, make([]byte, 8))}}
	wrong := []af.KeyTensor{{Key: 2, Val: other}}
	refused := func(what string, err error) {
		t.Helper()
		if !errors.Is(err, van.ErrInvalid) || !errors.Is(err, backend.ErrWrongDevice) || !bytes.Contains([]byte(err.Error()), []byte("tensor on gpu:3 but this node owns gpu:0")) {
			t.Errorf("%s: %v", what, err)
		}
	}
	_, err := d.w.PushPull(wrong, nil)
	refused("push", err)
	_, err = d.w.PushPull(own, [][]af.KeyTensor{wrong})
	refused("pull", err)
	refused("register", d.s.RegisterRecvTensor(other, []int{0}, []uint64{5}))
	pull := make([]byte, 8)
	h, err := d.w.PushPull(own, [][]af.KeyTensor{{{Key: 2, Val: hostTensor(t, pull)}}})
	if err != nil {
		t.Fatal(err)
	}
	b := <-batches
	refused("answer", b.Respond(wrong, af.ByKey))
	if err := b.Respond([]af.KeyTensor{{Key: 2, Val: hostTensor(t, []byte("12345678"))}}, af.ByKey); err != nil {
		t.Fatal(err)
	}
	if err := h.Wait(t.Context()); err != nil || string(pull) != "12345678" {
		t.Errorf("%q, %v", pull, err)
	}
	boom := errors.New("the device is gone")
	d.wdev.Fail(boom)
	if _, err := d.w.PushPull([]af.KeyTensor{{Key: 1, Val: deviceTensor(t, d.wdev, make([]byte, 8))}}, nil); !errors.Is(err, boom) {
		t.Errorf("on a failed device: %v", err)
	}
	d.wdev.Fail(nil)
	d.Finalize(t)
}

// TestRefusedOnAStream: a push_pull on a busy stream that is refused, since its worker is closed, leaves no
// event behind.
func TestRefusedOnAStream(t *testing.T) {
	d := startDevices(t, testcluster.InProc)
	gate := make(chan struct{})
	defer close(gate)
	d.wdev.Queue(3, func() { <-gate })
	d.w.Close()
	before, _ := d.wdev.Events()
	_, err := d.w.PushPull([]af.KeyTensor{{Key: 1, Val: deviceTensor(t, d.wdev, make([]byte, 8))}}, nil, af.Stream(3))
	vantest.Fails(t, err, van.ErrClosed, "push_pull")
	if n, _ := d.wdev.Events(); n != before {
		t.Errorf("%d events, want %d as before", n, before)
	}
}

// owner counts the holds on a tensor.
type owner struct{ n atomic.Int32 }

func (o *owner) Retain()  { o.n.Add(1) }
func (o *owner) Release() { o.n.Add(-1) }

func owned(t *testing.T, d *simgpu.Device, b []byte, o *owner) af.Tensor {
	t.Helper()
	x, err := af.FromPointer(unsafe.Pointer(unsafe.SliceData(b)), d.Device(), o, af.Uint8, int64(len(b)))
	if err != nil {
		t.Fatal(err)
	}
	return x
}

// TestDeviceEnds: if a batch ends while it still waits for its stream, for any reason, Wait returns, no memory is
// held, and the next batch is sent.
func TestDeviceEnds(t *testing.T) {
	for name, end := range map[string]struct {
		do   func(d *devices)
		want error
		over bool // the worker cannot go on
	}{
		"timeout":      {func(*devices) {}, van.ErrTimeout, false},
		"device fails": {func(d *devices) { d.wdev.Fail(errBoom) }, errBoom, false},
		"peer lost":    {func(d *devices) { d.Servers[0].Close() }, van.ErrPeerLost, true},
		"close":        {func(d *devices) { d.w.Close() }, van.ErrClosed, true},
		"node closed":  {func(d *devices) { d.Workers[0].Close() }, van.ErrClosed, true},
	} {
		t.Run(name, func(t *testing.T) {
			d := startDevices(t, testcluster.InProc)
			if err := d.s.Handle(func(b af.Batch) {
				err := b.Respond(nil)
				if gone := errors.Is(err, van.ErrClosed) || errors.Is(err, van.ErrPeerLost); err != nil && !(end.over && gone) {
					t.Error(err)
				}
			}); err != nil {
				t.Fatal(err)
			}
			gate := make(chan struct{})
			open := sync.OnceFunc(func() { close(gate) })
			t.Cleanup(open) // before the device's
			d.wdev.Queue(3, func() { <-gate })
			var o owner
			mem := make([]byte, 64)
			h, err := d.w.PushPull([]af.KeyTensor{{Key: 1, Val: owned(t, d.wdev, mem, &o)}}, nil, af.Stream(3))
			if err != nil {
				t.Fatal(err)
			}
			next, err := d.w.PushPull([]af.KeyTensor{{Key: 2, Val: owned(t, d.wdev, mem, &o)}}, nil, af.Stream(4))
			if err != nil {
				t.Fatal(err)
			}
			if o.n.Load() != 2 {
				t.Errorf("%d holds, want 2", o.n.Load())
			}
			end.do(d)
			if errors.Is(end.want, errBoom) {
				open()
			}
			limit := 20 * time.Second
			if name == "timeout" {
				limit = 300 * time.Millisecond
			}
			if err := cluster.Call(h).Customer().Wait(t.Context(), h.Timestamp(), limit); !errors.Is(err, end.want) {
				t.Errorf("got %v, want %v", err, end.want)
			}
			d.wdev.Fail(nil)
			err = cluster.Call(next).Customer().Wait(t.Context(), next.Timestamp(), 20*time.Second)
			if ok := err == nil; !end.over && !errors.Is(end.want, errBoom) && !ok {
				t.Errorf("the next batch: %v", err)
			}
			if n := o.n.Load(); n != 0 {
				t.Errorf("%d holds at the end", n)
			}
			if !end.over {
				d.w.Close()
			}
		})
	}
}

var errBoom = errors.New("boom")

// TestAnswersAtTheEnd: answers that wait for a stream when the server leaves are released, and OnSent is called
// for them.
func TestAnswersAtTheEnd(t *testing.T) {
	d := startDevices(t, testcluster.InProc)
	batches := make(chan af.Batch, 1)
	if err := d.s.Handle(func(b af.Batch) { batches <- b }); err != nil {
		t.Fatal(err)
	}
	h, err := d.w.PushPull(nil, [][]af.KeyTensor{{{Key: 1, Val: hostTensor(t, make([]byte, 64))}}})
	if err != nil {
		t.Fatal(err)
	}
	gate := make(chan struct{})
	t.Cleanup(func() { close(gate) })
	d.sdev.Queue(3, func() { <-gate })
	var o owner
	var left counter
	if err := (<-batches).Respond([]af.KeyTensor{{Val: owned(t, d.sdev, make([]byte, 64), &o)}}, af.Stream(3), af.OnSent(&left)); err != nil {
		t.Fatal(err)
	}
	if o.n.Load() != 1 {
		t.Errorf("%d holds, want 1", o.n.Load())
	}
	d.Servers[0].Close()
	if o.n.Load() != 0 || left.n.Load() != 1 {
		t.Errorf("%d holds, %d told", o.n.Load(), left.n.Load())
	}
	if err := h.Wait(t.Context()); !errors.Is(err, van.ErrPeerLost) {
		t.Errorf("the worker: %v", err)
	}
}

// TestReleaseOnStream: the memory of a push is not used again while a stream reads it, also when
// the server has been closed, and another one receives on its node.
func TestReleaseOnStream(t *testing.T) {
	for name, closes := range map[string]bool{"open": false, "closed": true} {
		t.Run(name, func(t *testing.T) { releaseOn(t, closes) })
	}
}

func releaseOn(t *testing.T, closes bool) {
	d := startDevices(t, testcluster.InProc)
	batches := make(chan af.Batch, 1)
	serve := func() {
		if err := d.s.Handle(func(b af.Batch) { batches <- b.Retain() }); err != nil {
			t.Fatal(err)
		}
	}
	serve()
	push := func(v byte) af.Batch {
		t.Helper()
		// The tensor without data, which lies on no device, is the last one.
		h, err := d.w.PushPull([]af.KeyTensor{{Key: 1, Val: deviceTensor(t, d.wdev, bytes.Repeat([]byte{v}, 9000))}, {Key: 3, Val: bytesOf(t, nil)}},
			nil, af.Complete)
		if err != nil {
			t.Fatal(err)
		}
		b := <-batches
		if err := b.Respond(nil); err != nil {
			t.Fatal(err)
		}
		if err := h.Wait(t.Context()); err != nil {
			t.Fatal(err)
		}
		return b
	}
	first := push(1)
	mem := first.Pushes()[0].Val.Mem()
	gate, read := make(chan struct{}), make(chan byte, 1)
	d.sdev.Queue(3, func() { <-gate; read <- simgpu.Raw(mem)[8999] })
	first.Release(af.Stream(3))
	if closes {
		d.s.Close()
		var err error
		if d.s, err = af.NewServer(d.Servers[0], af.ServerOptions{}); err != nil {
			t.Fatal(err)
		}
		serve()
	}
	second := push(2)
	if second.Pushes()[0].Val.Mem().Ptr() == mem.Ptr() {
		t.Error("the memory is used again while a stream reads it")
	}
	second.Release(af.Stream(4))
	close(gate)
	if v := <-read; v != 1 {
		t.Errorf("read %d, want 1", v)
	}
	d.Finalize(t)
}

// TestReleaseAfterLeaving: a batch that is released on a busy stream when its node has left is given
// back at once, since the device's memory is freed after that work.
func TestReleaseAfterLeaving(t *testing.T) {
	hook := &hooks.Van{}
	wdev, sdev := simgpu.New(0), simgpu.New(0)
	t.Cleanup(func() { _ = errors.Join(wdev.Close(), sdev.Close()) })
	c := testcluster.Start(t, testcluster.Options{Wrap: hook.Wrap("server", 0), Backend: func(role string, _ int) backend.Backend {
		return map[string]backend.Backend{"worker": wdev, "server": sdev}[role]
	}})
	kept := make(chan af.Batch, 1)
	serve(t, c.Servers[0], func(b af.Batch) {
		kept <- b.Retain()
		if err := b.Respond(nil); err != nil {
			t.Error(err)
		}
	})
	h, err := newWorker(t, c.Workers[0]).PushPull([]af.KeyTensor{{Key: 1, Val: deviceTensor(t, wdev, make([]byte, 9000))}}, nil, af.Complete)
	if err != nil {
		t.Fatal(err)
	}
	if err := h.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	b := <-kept
	if b.Pushes()[0].Val.Mem().OnHost() {
		t.Fatal("the push is not on the server's device")
	}
	c.Finalize(t)
	gate := make(chan struct{})
	defer close(gate)
	sdev.Queue(3, func() { <-gate })
	b.Release(af.Stream(3))
	if n := hook.Held(); n != 0 {
		t.Errorf("%d messages are held, want none", n)
	}
}

type pretended = simgpu.Device

// faultyEvents is a device whose events fail, with record when they are recorded, or with sync when they are awaited.
type faultyEvents struct {
	*pretended
	record, sync error
}

func (d *faultyEvents) NewEvent() (backend.Event, error) {
	e, err := d.pretended.NewEvent()
	return &faultyEvent{e, d}, err
}

type faultyEvent struct {
	backend.Event
	d *faultyEvents
}

func (e *faultyEvent) Record(s uintptr) error { return cmp.Or(e.d.record, e.Event.Record(s)) }

func (e *faultyEvent) Sync(ctx context.Context) error {
	if e.d.sync != nil {
		return e.d.sync
	}
	return e.Event.Sync(ctx)
}

// TestReleaseOnFaultyStream: after an error that leaves open whether the stream still reads the tensors, their memory
// is not reused.
func TestReleaseOnFaultyStream(t *testing.T) {
	unknown := errors.New("of no known kind")
	lost, closed := fmt.Errorf("%w: test", backend.ErrDeviceLost), fmt.Errorf("%w: test", backend.ErrClosed)
	for name, tt := range map[string]struct {
		record, sync error
		held         int
	}{
		"record": {unknown, nil, 1}, "record in a graph": {backend.ErrUnsupported, nil, 1}, "record, device lost": {lost, nil, 0}, "record, closed": {closed, nil, 0},
		"wait": {nil, unknown, 1}, "wait, device lost": {nil, lost, 0}, "wait, closed": {nil, closed, 0},
	} {
		t.Run(name, func(t *testing.T) {
			hook := &hooks.Van{}
			wdev, sdev := simgpu.New(0), &faultyEvents{simgpu.New(0), tt.record, tt.sync}
			t.Cleanup(func() { _ = errors.Join(wdev.Close(), sdev.Close()) })
			c := testcluster.Start(t, testcluster.Options{Wrap: hook.Wrap("server", 0), Backend: func(role string, _ int) backend.Backend {
				return map[string]backend.Backend{"worker": wdev, "server": sdev}[role]
			}})
			kept := make(chan af.Batch, 1)
			s := serve(t, c.Servers[0], func(b af.Batch) { kept <- b.Retain() })
			h, err := newWorker(t, c.Workers[0]).PushPull([]af.KeyTensor{{Key: 1, Val: deviceTensor(t, wdev, make([]byte, 9000))}}, nil, af.Complete)
			if err != nil {
				t.Fatal(err)
			}
			b := <-kept
			if err := errors.Join(b.Respond(nil), h.Wait(t.Context())); err != nil {
				t.Fatal(err)
			}
			gate := make(chan struct{})
			open := sync.OnceFunc(func() { close(gate) })
			t.Cleanup(open)
			sdev.Queue(3, func() { <-gate })
			b.Release(af.Stream(3))
			vantest.Eventually(t, 20*time.Second, "the queue is empty", func() bool { return !s.Late() })
			if n := hook.Held(); n != tt.held {
				t.Errorf("%d messages are held, want %d", n, tt.held)
			}
			open()
			c.Finalize(t)
		})
	}
}

// TestNextAfterGivenUp: a batch after one that was canceled before its stream was done waits for its own stream,
// and is then sent.
func TestNextAfterGivenUp(t *testing.T) {
	d := startDevices(t, testcluster.InProc)
	if err := d.s.Handle(func(b af.Batch) {
		if err := b.Respond(nil); err != nil {
			t.Error(err)
		}
	}); err != nil {
		t.Fatal(err)
	}
	var gates [2]chan struct{}
	for i := range gates {
		gates[i] = make(chan struct{})
		d.wdev.Queue(uintptr(3+i), func() { <-gates[i] })
	}
	first, second := sync.OnceFunc(func() { close(gates[0]) }), sync.OnceFunc(func() { close(gates[1]) })
	t.Cleanup(first)
	t.Cleanup(second)
	h, err := d.w.PushPull([]af.KeyTensor{{Key: 1, Val: deviceTensor(t, d.wdev, make([]byte, 64))}}, nil, af.Stream(3))
	if err != nil {
		t.Fatal(err)
	}
	next, err := d.w.PushPull([]af.KeyTensor{{Key: 2, Val: deviceTensor(t, d.wdev, make([]byte, 64))}}, nil, af.Stream(4))
	if err != nil {
		t.Fatal(err)
	}
	if err := cluster.Call(h).Customer().Wait(t.Context(), h.Timestamp(), 50*time.Millisecond); !errors.Is(err, van.ErrTimeout) {
		t.Errorf("got %v, want %v", err, van.ErrTimeout)
	}
	time.AfterFunc(150*time.Millisecond, second) // by then it is the first in the queue
	if err := cluster.Call(next).Customer().Wait(t.Context(), next.Timestamp(), 20*time.Second); err != nil {
		t.Errorf("the next batch: %v", err)
	}
	first()
	d.w.Close()
}
