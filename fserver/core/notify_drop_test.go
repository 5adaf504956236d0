package core

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/tests/simgpu"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/van/backend"
)

type pretended = simgpu.Device

// fullDevice is a device whose launch queue can be full: WaitFlag blocks then.
type fullDevice struct {
	*pretended
	full    chan struct{} // nil, or closed when there is room again
	in      chan struct{} // has a token for each WaitFlag that blocks
	refuses error         // of WaitFlag
}

func (d *fullDevice) WaitFlag(s uintptr, word backend.Mem, v uint32) error {
	if d.full != nil {
		d.in <- struct{}{}
		<-d.full
	}
	if d.refuses != nil {
		return d.refuses
	}
	return d.pretended.WaitFlag(s, word, v)
}

// notifying opens a worker and a server with simulated devices.
func notifying(t *testing.T) (worker, server *Session, wdev, sdev *fullDevice) {
	t.Helper()
	wdev, sdev = &fullDevice{pretended: simgpu.New(0)}, &fullDevice{pretended: simgpu.New(0)}
	c := testcluster.Start(t, testcluster.Options{Backend: func(role string, _ int) backend.Backend {
		switch role {
		case "worker":
			return wdev
		case "server":
			return sdev
		}
		return nil
	}})
	t.Cleanup(func() {
		if err := errors.Join(wdev.Close(), sdev.Close()); err != nil {
			t.Error(err)
		}
	})
	worker, server = open2(t, c)
	return worker, server, wdev, sdev
}

func newNotify(t *testing.T, s *Session) *Notify {
	t.Helper()
	n, err := s.NewNotify()
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// passes waits until the stream has done what was queued so far.
func passes(t *testing.T, d *fullDevice, stream uintptr) {
	t.Helper()
	on := make(chan struct{})
	d.Queue(stream, func() { close(on) })
	select {
	case <-on:
	case <-time.After(20 * time.Second):
		t.Fatalf("stream %d still waits", stream)
	}
}

// request pushes tensors with that value, and pulls tensors.
func request(t *testing.T, s *Session, d *fullDevice, v byte, pushes, pulls int) int32 {
	t.Helper()
	var kts [2][]af.KeyTensor
	for k, n := range []int{pushes, pulls} {
		for i := range n {
			kts[k] = append(kts[k], af.KeyTensor{Key: uint64(i), Val: deviceTensor(t, d.pretended, []byte{v})})
		}
	}
	h, err := s.PushPull(af.Complete, nil, kts[0], kts[1])
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// one waits for the only item that f returns.
func one(t *testing.T, f func(slice time.Duration) ([]Item, error)) Item {
	t.Helper()
	var items []Item
	if err := later(t, func(slice time.Duration) (err error) {
		items, err = f(slice)
		return err
	}); err != nil || len(items) != 1 {
		t.Fatalf("%d items, %v", len(items), err)
	}
	return items[0]
}

// next returns the next batch of the only worker, whose value must be v.
func next(t *testing.T, s *Session, v byte) Item {
	t.Helper()
	it := one(t, func(slice time.Duration) ([]Item, error) { return s.GetBatch(nil, slice) })
	if mem := it.Pushes()[0].Val.Mem(); simgpu.Raw(mem)[0] != v {
		t.Errorf("the batch has value %d, want %d", simgpu.Raw(mem)[0], v)
	}
	return it
}

// answer answers a batch once. h is the worker's handler.
func answer(t *testing.T, worker, server *Session, it Item, h int32) {
	t.Helper()
	var out []af.KeyTensor
	for range it.Pulls() {
		out = append(out, it.Pushes()[0])
	}
	if err := server.Respond(af.DefaultStream, it.ID, out); err != nil {
		t.Error(err)
	}
	if err := server.Respond(af.DefaultStream, it.ID, out); !errors.Is(err, ErrMisuse) {
		t.Errorf("second answer: %v, want %v", err, ErrMisuse)
	}
	it.Release()
	if err := worker.waitFor(h); err != nil {
		t.Error(err)
	}
}

// TestDropBeforeBatch: an object that is dropped while it waits for a batch releases its stream, and takes no batch
// from callers of GetBatch.
func TestDropBeforeBatch(t *testing.T) {
	worker, server, wdev, sdev := notifying(t)
	for round := range byte(50) {
		n := newNotify(t, server)
		if err := n.BlockAndGetBatch(3); err != nil {
			t.Fatal(err)
		}
		var h int32
		if round%2 == 0 {
			h = request(t, worker, wdev, round, 1, 1) // the object may have taken it
			n.Drop()
		} else {
			n.Drop()
			h = request(t, worker, wdev, round, 1, 1)
		}
		passes(t, sdev, 3)
		answer(t, worker, server, next(t, server, round), h)
		n.Drop()
		for _, err := range []error{n.Block(3), n.BlockAndGetBatch(3)} {
			if !errors.Is(err, ErrMisuse) {
				t.Errorf("a stream waits for an object that was dropped: %v, want %v", err, ErrMisuse)
			}
		}
		if _, err := n.Batch(time.Millisecond); !errors.Is(err, ErrMisuse) {
			t.Errorf("the batch of an object that was dropped: %v, want %v", err, ErrMisuse)
		}
	}
}

// TestDropAfterBatch: a batch that has arrived and was not fetched goes back to the queue, before later batches, and
// can be answered.
func TestDropAfterBatch(t *testing.T) {
	worker, server, wdev, sdev := notifying(t)
	for _, tt := range []struct {
		name          string
		pushes, pulls int
	}{{"push and pull", 1, 1}, {"one push", 1, 0}, {"pushes", 2, 0}} {
		t.Run(tt.name, func(t *testing.T) {
			n, m := newNotify(t, server), newNotify(t, server)
			var hs [3]int32
			for i, x := range []*Notify{n, m} { // each has one batch
				if err := x.BlockAndGetBatch(3); err != nil {
					t.Fatal(err)
				}
				hs[i] = request(t, worker, wdev, byte(i), tt.pushes, tt.pulls)
				passes(t, sdev, 3)
			}
			hs[2] = request(t, worker, wdev, 2, tt.pushes, tt.pulls)
			n.Drop()
			if err := server.Respond(af.DefaultStream, 1<<40, nil); !errors.Is(err, ErrMisuse) {
				t.Errorf("an unknown handler: %v, want %v", err, ErrMisuse)
			}
			m.Drop()
			for i := range hs {
				answer(t, worker, server, next(t, server, byte(i)), hs[i])
			}
			if n := len(server.queue.out); n != 0 {
				t.Errorf("%d batches are kept as handed out, want none", n)
			}
		})
	}
}

// TestDropOthers: streams that wait for the next release of a dropped object continue; a stream that waits for a
// request keeps waiting for it.
func TestDropOthers(t *testing.T) {
	worker, server, wdev, _ := notifying(t)
	n := newNotify(t, worker)
	if err := n.Block(4); err != nil {
		t.Fatal(err)
	}
	n.Drop()
	passes(t, wdev, 4)

	n = newNotify(t, worker)
	h := request(t, worker, wdev, 7, 1, 1)
	if err := n.StreamWait(4, int64(h)); err != nil {
		t.Fatal(err)
	}
	n.Drop()
	went := make(chan struct{})
	wdev.Queue(4, func() { close(went) })
	it := next(t, server, 7)
	select {
	case <-went:
		t.Error("the stream went on before the answer")
	case <-time.After(2 * waitSlice):
	}
	if err := server.Respond(af.DefaultStream, it.ID, it.Pushes()[:1]); err != nil {
		t.Fatal(err)
	}
	it.Release()
	passes(t, wdev, 4)
}

// TestDoneLeavesBatch: Done is for requests; the batch that the object has received stays.
func TestDoneLeavesBatch(t *testing.T) {
	worker, server, wdev, sdev := notifying(t)
	n := newNotify(t, server)
	if err := n.BlockAndGetBatch(3); err != nil {
		t.Fatal(err)
	}
	if err := n.Done(time.Minute); err != nil {
		t.Errorf("before the batch: %v", err)
	}
	h := request(t, worker, wdev, 1, 1, 1)
	passes(t, sdev, 3)
	if err := n.Done(time.Minute); err != nil {
		t.Errorf("after the batch: %v", err)
	}
	answer(t, worker, server, one(t, n.Batch), h)
}

// TestFullLaunchQueue: while a call waits for space in a stream's launch queue, the result of another wait arrives,
// which may make the space. The object can be dropped at that time.
func TestFullLaunchQueue(t *testing.T) {
	worker, server, wdev, sdev := notifying(t)
	n, m := newNotify(t, server), newNotify(t, server)
	if err := n.BlockAndGetBatch(3); err != nil {
		t.Fatal(err)
	}
	sdev.full, sdev.in = make(chan struct{}), make(chan struct{})
	calls := make(chan error, 2)
	go func() { calls <- n.Block(4) }()
	<-sdev.in
	go func() { calls <- m.BlockAndGetBatch(5) }()
	<-sdev.in
	h := request(t, worker, wdev, 1, 1, 1)
	passes(t, sdev, 3)
	answer(t, worker, server, one(t, n.Batch), h)
	dropped := make(chan struct{})
	go func() {
		defer close(dropped)
		m.Drop()
		n.Drop()
	}()
	select {
	case <-dropped:
	case <-time.After(20 * time.Second):
		t.Fatal("Drop waits for room in a stream")
	}
	close(sdev.full)
	for range 2 {
		if err := <-calls; err != nil {
			t.Error(err)
		}
	}
	passes(t, sdev, 4)
	passes(t, sdev, 5)
	h = request(t, worker, wdev, 2, 1, 1)
	answer(t, worker, server, next(t, server, 2), h)
}

// TestNotifyAfterARefusal: after a wait that the device has refused, there is no result to fetch, and the next wait
// begins.
func TestNotifyAfterARefusal(t *testing.T) {
	worker, _, d, _ := notifying(t)
	n := newNotify(t, worker)
	h := int64(request(t, worker, d, 1, 2, 0))
	d.refuses = errors.New("no more of these")
	if err := n.StreamWait(3, h); !errors.Is(err, d.refuses) {
		t.Fatalf("got %v, want the device's error", err)
	}
	d.refuses = nil
	if err := n.StreamWait(3, h); err != nil {
		t.Fatal(err)
	}
	if err := later(t, n.Done); err != nil {
		t.Error(err)
	}
	passes(t, d, 3)
}

// TestNotifyOfAGraph: a stream that is being captured is refused, and the graph gets no work.
func TestNotifyOfAGraph(t *testing.T) {
	worker, server, wdev, sdev := notifying(t)
	h := request(t, worker, wdev, 1, 1, 0)
	atWorker, atServer := newNotify(t, worker), newNotify(t, server)
	waits := map[string]func() error{
		"stream_wait_event":              func() error { return atWorker.StreamWait(3, int64(h)) },
		"block_now_stream":               func() error { return atWorker.Block(3) },
		"block_now_stream_and_get_batch": func() error { return atServer.BlockAndGetBatch(3) },
	}
	graphs := []*simgpu.Graph{wdev.Capture(3), sdev.Capture(3)}
	for name, wait := range waits {
		if err := wait(); !errors.Is(err, backend.ErrUnsupported) || !strings.Contains(err.Error(), name+": ") {
			t.Errorf("%s in a graph: %v, want %v", name, err, backend.ErrUnsupported)
		}
	}
	for _, g := range graphs {
		if n := g.Len(); n > 0 {
			t.Errorf("the graph has %d pieces of work", n)
		}
		g.End()
	}
	for name, wait := range waits {
		if err := wait(); err != nil {
			t.Errorf("%s after the capture: %v", name, err)
		}
	}
	it := one(t, atServer.Batch)
	if err := server.Respond(af.DefaultStream, it.ID, nil); err != nil {
		t.Fatal(err)
	}
	it.Release()
	if err := later(t, atWorker.Done); err != nil {
		t.Error(err)
	}
	passes(t, wdev, 3)
	passes(t, sdev, 3)
}
