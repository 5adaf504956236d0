package collective

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/tests/simgpu"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// onDevices is comms of nodes with a pretended device each.
func onDevices(t *testing.T, o testcluster.Options, n int) ([]*Comm, []memory) {
	t.Helper()
	return onDevicesOf(t, o, n, func(d *simgpu.Device) backend.Backend { return d })
}

// onDevicesOf does the same with the backends that the function of makes of the devices.
func onDevicesOf(t *testing.T, o testcluster.Options, n int, of func(*simgpu.Device) backend.Backend) ([]*Comm, []memory) {
	t.Helper()
	at := make([]memory, n)
	for r := range at {
		at[r].dev = simgpu.New(0)
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
		return of(at[r].dev)
	}
	all, _ := comms(t, o, n)
	return all, at
}

// stuck keeps the stream of a device busy until free is called, at the latest when the test ends.
func stuck(t *testing.T, at ...memory) (free func()) {
	hold := make(chan struct{})
	free = sync.OnceFunc(func() { close(hold) })
	t.Cleanup(free)
	for _, m := range at {
		m.dev.Queue(uintptr(onStream), func() { <-hold })
	}
	return free
}

// TestDevice compares the result of every call with the expected one while streams compute the tensors on devices.
func TestDevice(t *testing.T) {
	testcluster.Over(t, func(t *testing.T, o testcluster.Options) {
		for _, n := range []int{1, 2, 3} {
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
	stuck(t, at...)
	hold := make(chan struct{})
	t.Cleanup(func() { close(hold) })
	for _, m := range at {
		m.dev.Queue(uintptr(af.DefaultStream), func() { <-hold })
	}
	onAll(t, 2, func(r int) error {
		in, out := at[r].zeros(100), at[r].zeros(200)
		copy(simgpu.Raw(in.Mem()), fmt.Sprint("rank ", r))
		if err := wait(all[r].AllGather(out, in, af.Complete)); err != nil {
			return err
		}
		if b := simgpu.Raw(out.Mem()); string(b[:6]) != "rank 0" || string(b[100:106]) != "rank 1" {
			return fmt.Errorf("got %q", b)
		}
		return nil
	})
}

// TestDeviceLate: a call that its stream does not reach ends by its limit, on all ranks. A call that is reached
// too late writes nothing, not even its rank's own part.
func TestDeviceLate(t *testing.T) {
	for first, want := range []string{"nothing has arrived from rank 1", "the work before it in this rank's stream"} {
		t.Run(fmt.Sprint("rank ", first), func(t *testing.T) {
			all, at := onDevices(t, testcluster.Options{}, 2)
			free := stuck(t, at[1])
			outs := []af.Tensor{at[0].zeros(200), at[1].zeros(200)}
			errs := every(2, func(r int) error {
				op, err := all[r].AllGather(outs[r], at[r].in(filled(100, 1)), onStream)
				if err != nil {
					return err
				}
				ctx, cancel := t.Context(), context.CancelFunc(func() {})
				if r == first {
					ctx, cancel = context.WithTimeout(ctx, 300*time.Millisecond)
				}
				defer cancel()
				return op.Wait(ctx)
			})
			vantest.Fails(t, errs[first], van.ErrTimeout, "AllGather", want)
			if errs[1-first] == nil {
				t.Error("the other rank's call went well")
			}
			free()
			onAll(t, 2, func(r int) error { return all[r].Rebuild(t.Context()) })
			onAll(t, 2, func(r int) error { return calls(all[r], at[r], 1000, 1) })
			if !bytes.Equal(simgpu.Raw(outs[0].Mem())[100:], make([]byte, 100)) || !bytes.Equal(simgpu.Raw(outs[1].Mem()), make([]byte, 200)) {
				t.Error("something of the failed call has come")
			}
		})
	}
}

// poor is a device that copies only while its caller waits, and tells nothing of its streams.
type poor struct{ backend.Backend }

// noCopies is a device whose copies in streams fail.
type noCopies struct{ *device }

// device is embedded under this name, since Device is a method.
type device = simgpu.Device

func (noCopies) CopyRecord(_, _ backend.Mem, _ uintptr, _ backend.Event) error { return errNoCopies }

var errNoCopies = errors.New("the test's device does not copy")

// TestPoorDevice: a device without streams of its own gives the same results.
func TestPoorDevice(t *testing.T) {
	for _, n := range []int{1, 3} {
		all, at := onDevicesOf(t, testcluster.Options{}, n, func(d *simgpu.Device) backend.Backend { return poor{d} })
		for round, size := range []int{1, 3000} {
			onAll(t, n, func(r int) error { return calls(all[r], at[r], size, uint64(round)) })
		}
	}
}

// TestDeviceCopyFails: the copy of a rank's own part that fails is the call's error, also when the others have
// long done theirs.
func TestDeviceCopyFails(t *testing.T) {
	for _, n := range []int{1, 2} {
		all, at := onDevicesOf(t, testcluster.Options{}, n, func(d *simgpu.Device) backend.Backend { return noCopies{d} })
		for r, err := range every(n, func(r int) error { return wait(all[r].AllGather(at[r].zeros(n*10), at[r].zeros(10), af.Complete)) }) {
			if !errors.Is(err, errNoCopies) && !errors.Is(err, ErrAborted) {
				t.Errorf("rank %d of %d: %v, want the error of the copy", r, n, err)
			}
		}
	}
}

// TestDeviceFails: if work of the device fails, all ranks receive the error.
func TestDeviceFails(t *testing.T) {
	all, at := onDevices(t, testcluster.Options{}, 2)
	broken := fmt.Errorf("the test's device: %w", backend.ErrDeviceLost)
	free := stuck(t, at[1])
	var ops [2]Op
	onAll(t, 2, func(r int) (err error) {
		ops[r], err = all[r].AllGather(at[r].zeros(200), at[r].zeros(100), onStream)
		return err
	})
	at[1].dev.Fail(broken)
	free()
	errs := every(2, func(r int) error { return ops[r].Wait(t.Context()) })
	vantest.Fails(t, errs[1], backend.ErrDeviceLost, "AllGather", "wait for the work that makes the tensors")
	vantest.Fails(t, errs[0], ErrAborted, "worker 1", "device failed")
	if _, err := all[1].AllGather(at[1].zeros(200), at[1].zeros(100), onStream); err == nil {
		t.Error("a call on a device that has failed is made")
	}
	at[1].dev.Fail(nil)
}

// TestDeviceMisuse: impossible calls are refused before anything is sent.
func TestDeviceMisuse(t *testing.T) {
	all, at := onDevices(t, testcluster.Options{}, 2)
	c, m := all[0], at[0]
	other := must(af.NewTensor(simgpu.New(3).Mem(make([]byte, 100)), af.Uint8, 100))
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
			return c.AllGather(out, must(af.NewTensor(out.Mem().Sub(50, 100), af.Uint8, 100)))
		}, "shares memory"},
		"option":        {func() (Op, error) { return c.AllGather(m.zeros(200), m.zeros(100), af.Stream(5), nil) }, "option 1 is nil"},
		"AllReduce":     {func() (Op, error) { return c.AllReduce(m.zeros(100), m.zeros(100), Sum) }, "NCCL"},
		"ReduceScatter": {func() (Op, error) { return c.ReduceScatter(m.zeros(100), m.zeros(200), Sum) }, "NCCL"},
	} {
		if _, err := x.call(); err == nil {
			t.Errorf("%s: it is made", name)
		} else {
			vantest.Fails(t, err, van.ErrInvalid, x.want)
		}
	}
	if err := errors.Join(all[0].Close(), all[1].Close()); err != nil {
		t.Error(err)
	}
	if _, err := c.AllGather(m.zeros(200), m.zeros(100)); !errors.Is(err, van.ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
}

// TestNoCopyBehindClose: a call that is concurrent with Close uses no stream that Close has freed, and makes no
// other one.
func TestNoCopyBehindClose(t *testing.T) {
	all, at := onDevices(t, testcluster.Options{}, 2)
	onAll(t, 2, func(r int) error { return wait(all[r].AllGather(at[r].zeros(200), at[r].zeros(100))) })
	for _, c := range all {
		c.calls.copies.close()
	}
	for r, err := range every(2, func(r int) error { return wait(all[r].AllGather(at[r].zeros(200), at[r].zeros(100), af.Complete)) }) {
		if err == nil {
			t.Errorf("rank %d: the call went well", r)
		}
		if n := at[r].dev.Streams(); n > 0 {
			t.Errorf("rank %d: %d streams are left", r, n)
		}
	}
}

// TestDeviceCloses: a communicator that is closed, and a node that leaves, end calls that wait for a stream.
func TestDeviceCloses(t *testing.T) {
	for name, end := range map[string]func(*Comm) error{
		"communicator": func(c *Comm) error { return c.Close() },
		"node":         func(c *Comm) error { c.b.node.Close(); return nil },
	} {
		t.Run(name, func(t *testing.T) {
			all, at := onDevices(t, testcluster.Options{}, 2)
			stuck(t, at...)
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
		})
	}
}
