package collective

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/testcluster"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/vantest"
)

// onDevices is comms of nodes with a pretended device each.
func onDevices(t *testing.T, o testcluster.Options, n int) ([]*Comm, []memory) {
	t.Helper()
	at := make([]memory, n)
	for r := range at {
		at[r].dev = vantest.NewDevice(0)
	}
	t.Cleanup(func() { // after the nodes are closed
		for _, m := range at {
			m.dev.Leaks(t)
			if err := m.dev.Close(); err != nil {
				t.Error(err)
			}
		}
	})
	o.Backend = func(role string, r int) backend.Backend {
		if role != "worker" {
			return nil
		}
		return at[r].dev
	}
	all, _ := comms(t, o, n)
	return all, at
}

// TestDevice compares every call with what it should give, where streams make the tensors
// on devices meanwhile.
func TestDevice(t *testing.T) {
	testcluster.Over(t, func(t *testing.T, o testcluster.Options) {
		for _, n := range []int{1, 3} {
			t.Run(fmt.Sprint(n), func(t *testing.T) {
				all, at := onDevices(t, o, n)
				for round, size := range []int{1, 1000, 0, 300_001, 3} {
					onAll(t, n, func(r int) error { return calls(all[r], at[r], size, uint64(round)) })
				}
				for _, m := range at {
					if open, made := m.dev.Events(); open > 4 || made > 4 {
						t.Errorf("%d events, %d made: they are not used again", open, made)
					}
				}
				// Some on the host, some on the device, and without an order of streams.
				onAll(t, n, func(r int) error {
					if r == 0 {
						return calls(all[r], memory{}, 1000, 1)
					}
					return calls(all[r], at[r], 1000, 1)
				})
			})
		}
	}, testcluster.InProc, testcluster.TCP, testcluster.SHM)
}

// TestDeviceComplete: a call with tensors that are complete waits for no stream.
func TestDeviceComplete(t *testing.T) {
	all, at := onDevices(t, testcluster.Options{}, 2)
	hold := make(chan struct{})
	for _, m := range at {
		m.dev.Queue(onStream, func() { <-hold })
		m.dev.Queue(uintptr(af.DefaultStream), func() { <-hold })
	}
	onAll(t, 2, func(r int) error {
		in, out := at[r].zeros(100), at[r].zeros(200)
		copy(vantest.Raw(in.Mem()), fmt.Sprint("rank ", r))
		if err := wait(all[r].AllGather(out, in, af.Complete)); err != nil {
			return err
		}
		if b := vantest.Raw(out.Mem()); string(b[:6]) != "rank 0" || string(b[100:106]) != "rank 1" {
			return fmt.Errorf("got %q", b)
		}
		return nil
	})
	close(hold)
}

// TestDeviceLate: a call whose stream does not come to it ends by its limit, on all ranks, and one that
// comes too late moves nothing.
func TestDeviceLate(t *testing.T) {
	all, at := onDevices(t, testcluster.Options{}, 2)
	hold := make(chan struct{})
	at[1].dev.Queue(onStream, func() { <-hold })
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	outs := []af.Tensor{at[0].zeros(200), at[1].zeros(200)}
	errs := every(2, func(r int) error {
		op, err := all[r].AllGather(outs[r], at[r].in(filled(100, 1)), onStream)
		if err != nil {
			return err
		}
		if r == 0 {
			return op.Wait(ctx)
		}
		return op.Wait(t.Context())
	})
	vantest.Fails(t, errs[0], van.ErrTimeout, "AllGather", "nothing has come from rank 1")
	if errs[1] == nil {
		t.Error("the other rank's call went well")
	}
	close(hold)
	onAll(t, 2, func(r int) error { return all[r].Rebuild(t.Context()) })
	onAll(t, 2, func(r int) error { return calls(all[r], at[r], 1000, 1) })
	for r, b := range vantest.Raw(outs[0].Mem())[100:] {
		if b != 0 {
			t.Fatalf("byte %d of the failed call's result has come", r)
		}
	}
}

// TestDeviceFails: work of the device that fails is told on all ranks.
func TestDeviceFails(t *testing.T) {
	all, at := onDevices(t, testcluster.Options{}, 2)
	broken := fmt.Errorf("the test's device: %w", backend.ErrDeviceLost)
	hold := make(chan struct{})
	at[1].dev.Queue(onStream, func() { <-hold })
	var ops [2]Op
	onAll(t, 2, func(r int) (err error) {
		ops[r], err = all[r].AllGather(at[r].zeros(200), at[r].zeros(100), onStream)
		return err
	})
	at[1].dev.Fail(broken)
	close(hold)
	errs := every(2, func(r int) error { return ops[r].Wait(t.Context()) })
	vantest.Fails(t, errs[1], backend.ErrDeviceLost, "AllGather", "wait for the work that makes the tensors")
	vantest.Fails(t, errs[0], ErrAborted, "worker 1", "device failed")
	if _, err := all[1].AllGather(at[1].zeros(200), at[1].zeros(100), onStream); err == nil {
		t.Error("a call on a device that has failed is made")
	}
	at[1].dev.Fail(nil)
}

// TestDeviceMisuse: what cannot be is refused, before anything is sent.
func TestDeviceMisuse(t *testing.T) {
	all, at := onDevices(t, testcluster.Options{}, 2)
	c, m := all[0], at[0]
	other := must(af.New(vantest.NewDevice(3).Mem(make([]byte, 100)), af.Uint8, 100))
	host := zeros(100)
	outs := func(x af.Tensor) []af.Tensor { return []af.Tensor{x, m.zeros(100)} }
	for name, x := range map[string]struct {
		call func() (Op, error)
		want string
	}{
		"other device":              {func() (Op, error) { return c.AllGather(m.zeros(200), other) }, "gpu:3"},
		"host and device":           {func() (Op, error) { return c.AllGather(m.zeros(200), host) }, "all tensors of a call in host memory, or all on the device"},
		"host and device in a list": {func() (Op, error) { return c.AllGatherV(outs(host), m.zeros(100)) }, "all tensors of a call"},
		"to all":                    {func() (Op, error) { return c.AllToAll(outs(m.zeros(100)), outs(host)) }, "all tensors of a call"},
		"root":                      {func() (Op, error) { return c.Gather(zeros(200), m.zeros(100), 0) }, "all tensors of a call"},
		"scatter":                   {func() (Op, error) { return c.Scatter(m.zeros(100), zeros(200), 0) }, "all tensors of a call"},
		"shared memory": {func() (Op, error) {
			out := m.zeros(200)
			return c.AllGather(out, must(af.New(out.Mem().Sub(50, 100), af.Uint8, 100)))
		}, "shares memory"},
		"AllReduce":     {func() (Op, error) { return c.AllReduce(m.zeros(100), m.zeros(100), Sum) }, "NCCL"},
		"ReduceScatter": {func() (Op, error) { return c.ReduceScatter(m.zeros(100), m.zeros(200), Sum) }, "NCCL"},
	} {
		if _, err := x.call(); err == nil {
			t.Errorf("%s: it is made", name)
		} else {
			vantest.Fails(t, err, van.ErrInvalid, x.want)
		}
	}
	if err := errors.Join(all[0].Close(t.Context()), all[1].Close(t.Context())); err != nil {
		t.Error(err)
	}
	if _, err := c.AllGather(m.zeros(200), m.zeros(100)); !errors.Is(err, van.ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
}

// TestDeviceCloses: a communicator that is closed, and a node that leaves, end calls that wait for a stream.
func TestDeviceCloses(t *testing.T) {
	for name, end := range map[string]func(*Comm) error{
		"communicator": func(c *Comm) error { return c.Close(context.Background()) },
		"node":         func(c *Comm) error { c.node.Close(); return nil },
	} {
		t.Run(name, func(t *testing.T) {
			all, at := onDevices(t, testcluster.Options{}, 2)
			hold := make(chan struct{})
			for _, m := range at {
				m.dev.Queue(onStream, func() { <-hold })
			}
			var ops [2]Op
			onAll(t, 2, func(r int) (err error) {
				ops[r], err = all[r].AllGather(at[r].zeros(200), at[r].zeros(100), onStream)
				return err
			})
			if err := end(all[0]); err != nil {
				t.Error(err)
			}
			for r, err := range every(2, func(r int) error { return ops[r].Wait(t.Context()) }) {
				if err == nil {
					t.Errorf("rank %d: the call ended well", r)
				}
			}
			close(hold)
		})
	}
}
