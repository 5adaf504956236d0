package core

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/tests/simgpu"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/van/backend"
)

// later calls f until it does not return ErrPending.
func later(t *testing.T, f func(time.Duration) error) error {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); ; {
		if err := f(5 * time.Millisecond); !errors.Is(err, ErrPending) {
			return err
		}
		if time.Now().After(end) {
			t.Fatal("still pending")
		}
	}
}

// TestNotify: a stream waits for a request on the worker, and for a batch on the server; the threads do not wait.
func TestNotify(t *testing.T) {
	wdev, sdev := simgpu.New(0), simgpu.New(0)
	c := testcluster.Start(t, testcluster.Options{Backend: func(role string, _ int) backend.Backend {
		return map[string]backend.Backend{"worker": wdev, "server": sdev}[role]
	}})
	t.Cleanup(func() {
		if err := errors.Join(wdev.Close(), sdev.Close()); err != nil {
			t.Error(err)
		}
	})
	worker, server := open2(t, c)
	atWorker, err := worker.NewNotify()
	if err != nil {
		t.Fatal(err)
	}
	atServer, err := server.NewNotify()
	if err != nil {
		t.Fatal(err)
	}
	pull := make([]byte, 5000)
	for round := range byte(5) {
		seen := make(chan byte, 1)
		if err := atServer.BlockAndGetBatch(3); err != nil {
			t.Fatal(err)
		}
		came := make(chan struct{})
		sdev.Queue(3, func() { close(came) })
		if err := atServer.BlockAndGetBatch(3); !errors.Is(err, ErrMisuse) {
			t.Errorf("twice: %v", err)
		}
		if _, err := atServer.Batch(time.Millisecond); !errors.Is(err, ErrPending) {
			t.Errorf("a batch before there is one: %v", err)
		}
		select {
		case <-came:
			t.Error("the server's stream did not wait")
		default:
		}
		h, err := worker.PushPull(af.Complete, nil, nil, []af.KeyTensor{{Key: 1, Val: deviceTensor(t, wdev, pull)}})
		if err != nil {
			t.Fatal(err)
		}
		if err := atWorker.StreamWait(4, int64(h)); err != nil {
			t.Fatal(err)
		}
		wdev.Queue(4, func() { seen <- pull[4999] })
		<-came
		var items []Item
		if err := later(t, func(slice time.Duration) (err error) {
			items, err = atServer.Batch(slice)
			return err
		}); err != nil || len(items) != 1 {
			t.Fatalf("%d items, %v", len(items), err)
		}
		out := make([]byte, 5000)
		sdev.Queue(3, func() { out[4999] = round + 1 })
		if err := server.Respond(3, items[0].ID, []af.KeyTensor{{Val: deviceTensor(t, sdev, out)}}); err != nil {
			t.Fatal(err)
		}
		items[0].Release()
		if v := <-seen; v != round+1 {
			t.Errorf("the worker's stream saw %d, want %d", v, round+1)
		}
		if err := later(t, atWorker.Done); err != nil {
			t.Error(err)
		}
	}
	if _, err := atServer.Batch(time.Millisecond); !errors.Is(err, ErrMisuse) {
		t.Errorf("a result twice: %v", err)
	}
	if err := atWorker.BlockAndGetBatch(3); !errors.Is(err, ErrMisuse) {
		t.Errorf("a worker's get_batch: %v", err)
	}
	// After an error the stream continues, and Done returns the error.
	if err := atWorker.StreamWait(4, 1<<40); err != nil {
		t.Fatal(err)
	}
	on := make(chan struct{})
	wdev.Queue(4, func() { close(on) })
	<-on
	if err := later(t, atWorker.Done); !errors.Is(err, ErrMisuse) {
		t.Errorf("an unknown handler: %v", err)
	}
	if err := atWorker.Done(0); err != nil {
		t.Errorf("nothing under way: %v", err)
	}
}

func deviceTensor(t *testing.T, d *simgpu.Device, b []byte) af.Tensor {
	t.Helper()
	x, err := af.NewTensor(d.Mem(b), af.Uint8, int64(len(b)))
	if err != nil {
		t.Fatal(err)
	}
	return x
}

func TestNotifyNeedsGPU(t *testing.T) {
	worker, _ := sessions(t)
	if _, err := worker.NewNotify(); !errors.Is(err, backend.ErrUnavailable) {
		t.Errorf("on the CPU: %v", err)
	}
}

// TestNotifyBeforeInit: programs written for C++ StepMesh create their object before they set their role.
func TestNotifyBeforeInit(t *testing.T) {
	wdev := simgpu.New(0)
	c := testcluster.Start(t, testcluster.Options{Backend: func(role string, _ int) backend.Backend {
		if role == "worker" {
			return wdev
		}
		return nil
	}})
	t.Cleanup(func() {
		if err := wdev.Close(); err != nil {
			t.Error(err)
		}
	})
	worker, server := open2(t, c)
	p := &Process{open: func(context.Context) (*Session, error) { return worker, nil }}
	n, err := p.NewNotify()
	if err != nil {
		t.Fatal(err)
	}
	dropped, err := p.NewNotify()
	if err != nil {
		t.Fatal(err)
	}
	for _, err := range []error{n.StreamWait(4, 0), n.Block(4), n.BlockAndGetBatch(4)} {
		if !errors.Is(err, errNotStarted) {
			t.Errorf("a stream before Init: %v", err)
		}
	}
	if err := n.Done(0); err != nil {
		t.Errorf("nothing under way: %v", err)
	}
	dropped.Drop()
	if err := p.Init(-1, nil, nil); err != nil {
		t.Fatal(err)
	}
	if err := later(t, p.Wait); err != nil {
		t.Fatal(err)
	}
	if err := dropped.Block(4); !errors.Is(err, errDropped) {
		t.Errorf("after Drop: %v", err)
	}
	h, err := worker.PushPull(af.Complete, nil, nil, []af.KeyTensor{{Key: 1, Val: deviceTensor(t, wdev, make([]byte, 8))}})
	if err != nil {
		t.Fatal(err)
	}
	if err := n.StreamWait(4, int64(h)); err != nil {
		t.Fatal(err)
	}
	var items []Item
	if err := later(t, func(slice time.Duration) (err error) {
		items, err = server.GetBatch(nil, slice)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	if err := server.Respond(af.Complete, items[0].ID, []af.KeyTensor{{Val: tensor(t, make([]byte, 8))}}); err != nil {
		t.Fatal(err)
	}
	items[0].Release()
	if err := later(t, n.Done); err != nil {
		t.Error(err)
	}

	// Without a GPU the first use returns the error.
	cpu := &Process{open: func(context.Context) (*Session, error) { return server, nil }}
	n, err = cpu.NewNotify()
	if err != nil {
		t.Fatal(err)
	}
	cpu.session.Store(server)
	if err := n.BlockAndGetBatch(3); !errors.Is(err, backend.ErrUnavailable) {
		t.Errorf("on the CPU: %v", err)
	}
	cpu.session.Store(nil)
	cpu.ended.Store(true)
	if _, err := cpu.NewNotify(); !errors.Is(err, errEnded) {
		t.Errorf("after Stop: %v", err)
	}
}
