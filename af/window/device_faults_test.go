package window

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/gpusync"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/simgpu"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/env"
)

// TestDeviceSpins: a wait that never sleeps polls the device, too, because the sender may have no page to write
// to.
func TestDeviceSpins(t *testing.T) {
	o := testcluster.Options{Set: func(c *postoffice.Config) { c.BusyPoll = env.SpinForever }}
	l := devicesFor(t, &o, 2)
	r := &deviceRig{newRig(t, o, 2, Options{Size: 64, Signals: 1, Device: true}), l}
	a, b := r.windows[0], r.windows[1]
	unmap(a)
	r.must(a.Signal(t.Context(), 1, 0), a.Flush(t.Context(), 1))
	ctx, cancel := context.WithTimeout(t.Context(), testTime)
	defer cancel()
	if err := b.WaitSignal(ctx, 0, 0); err != nil {
		t.Errorf("the signal has come: %v", err)
	}
}

// TestDeviceSpinsLost: a wait that never sleeps notices that its device is lost.
func TestDeviceSpinsLost(t *testing.T) {
	o := testcluster.Options{Set: func(c *postoffice.Config) { c.BusyPoll = env.SpinForever }}
	l := devicesFor(t, &o, 2)
	r := &deviceRig{newRig(t, o, 2, Options{Size: 64, Signals: 1, Device: true}), nil}
	ctx, cancel := context.WithTimeout(t.Context(), testTime)
	defer cancel()
	lost := errors.New("lost")
	l[1].Fail(lost)
	defer l[1].Fail(nil)
	if err := r.windows[1].WaitSignal(ctx, 0, 0); !errors.Is(err, lost) {
		t.Errorf("the device is lost: %v", err)
	}
}

// TestDeviceNoTime: a wait without any time left finds signals that have arrived.
func TestDeviceNoTime(t *testing.T) {
	r := newDeviceRig(t, 2, Options{Size: 64, Signals: 1})
	a, b := r.windows[0], r.windows[1]
	unmap(a)
	r.must(a.Signal(t.Context(), 1, 0), a.Flush(t.Context(), 1))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := b.WaitSignal(ctx, 0, 0); err != nil {
		t.Errorf("the signal has come: %v", err)
	}
}

// unmap takes from a what it has mapped of the other rank, as where that is in another PID namespace.
func unmap(a *Window) { a.dev.memory.host.far[1] = backend.Mem{} }

// TestDeviceDiedBetween: a rank dies after its signal is in the page but not in the device, on which streams wait.
// The streams do not wait forever.
func TestDeviceDiedBetween(t *testing.T) {
	r := newDeviceRig(t, 2, Options{Size: 64, Signals: 1})
	b := r.windows[1]
	h := &b.dev.memory.host
	(*atomic.Uint32)(unsafe.Pointer(&h.own.Mem[h.at(0, 0)])).Store(1) // the first of the two writes
	r.c.Workers[0].Close()
	_ = r.over(1)
	<-b.dev.freed
	err := b.WaitSignal(t.Context(), 0, 0, stream)
	t.Logf("WaitSignal in a stream: %v", err)
	done := make(chan struct{})
	r.devices[1].Queue(uintptr(stream), func() { close(done) })
	select {
	case <-done:
	case <-time.After(testTime):
		t.Error("the stream waits for ever")
	}
	t.Logf("Close: %v", b.Close())
	select {
	case <-done:
	case <-time.After(testTime):
		t.Error("and after Close, too")
		atomic.StoreUint32((*uint32)(b.dev.memory.word(b.dev.memory.whole, 0, 0, 0).Sub(4, 4).Ptr()), 1)
		<-done
	}
}

// TestDeviceClosedBetween: the same when the window is closed while a stream waits.
func TestDeviceClosedBetween(t *testing.T) {
	r := newDeviceRig(t, 2, Options{Size: 64, Signals: 1})
	b := r.windows[1]
	r.must(b.WaitSignal(t.Context(), 0, 0, stream))
	h := &b.dev.memory.host
	(*atomic.Uint32)(unsafe.Pointer(&h.own.Mem[h.at(0, 0)])).Store(1)
	t.Logf("Close: %v, Check: %v", b.Close(), b.Check())
	r.c.Workers[0].Close()
	done := make(chan struct{})
	r.devices[1].Queue(uintptr(stream), func() { close(done) })
	select {
	case <-done:
	case <-time.After(testTime):
		t.Error("the stream waits for ever")
		atomic.StoreUint32((*uint32)(b.dev.memory.word(b.dev.memory.whole, 0, 0, 0).Sub(4, 4).Ptr()), 1)
		<-done
	}
}

// implicit is a device whose legacy stream cannot be used while another stream is captured, as cuStreamIsCapturing says.
type implicit struct {
	backend.StreamDevice
	on      atomic.Bool
	written atomic.Int32
}

var errImplicit = errors.New("cuStreamIsCapturing: CUDA_ERROR_STREAM_CAPTURE_IMPLICIT (906)")

func (d *implicit) bad(s uintptr) error {
	if s == 0 && d.on.Load() {
		return errImplicit
	}
	return nil
}
func (d *implicit) Capturing(s uintptr) (bool, error) {
	if err := d.bad(s); err != nil {
		return false, err
	}
	return d.StreamDevice.Capturing(s)
}
func (d *implicit) CopyFlags(dst, src backend.Mem, s uintptr, l []backend.FlagWrite) error {
	if err := d.bad(s); err != nil {
		return err // as copyIn: nothing is queued
	}
	return d.StreamDevice.CopyFlags(dst, src, s, l)
}
func (d *implicit) CopyAsync(dst, src backend.Mem, s uintptr) error {
	if err := d.bad(s); err != nil {
		d.written.Add(1)
		return err
	}
	return d.StreamDevice.CopyAsync(dst, src, s)
}
func (d *implicit) WriteFlags(s uintptr, l []backend.FlagWrite) error {
	if err := d.bad(s); err != nil {
		d.written.Add(1) // this invalidates the other stream's capture
		return err
	}
	return d.StreamDevice.WriteFlags(s, l)
}

// TestDeviceStreamNotAsked: a stream that cannot be asked whether it is captured, as the default one while another one is, is not written to, and the window goes on.
func TestDeviceStreamNotAsked(t *testing.T) {
	r := newDeviceRig(t, 2, Options{Size: 64, Signals: 1})
	a, b := r.windows[0], r.windows[1]
	d := &implicit{StreamDevice: a.dev.memory.d}
	a.dev.memory.d = d
	src := r.tensor(0, []byte{7})
	d.on.Store(true)
	err := a.PutSignal(t.Context(), 1, 0, src, 0, af.Stream(0))
	if !errors.Is(err, errImplicit) {
		t.Fatal(err)
	}
	d.on.Store(false)
	if n := d.written.Load(); n > 0 {
		t.Errorf("%d writes into a stream that is not to be used: they invalidate the capture of the other one", n)
	}
	if err := a.PutSignal(t.Context(), 1, 0, src, 0, af.Stream(0)); err != nil {
		t.Errorf("the window cannot be used any more: %v", err)
	} else {
		r.must(b.WaitSignal(t.Context(), 0, 0))
	}
}

// 5: wrongSource refuses a source that was imported by another backend, as the GPU's CopyFlags does, before it
// checks whether the stream is captured.
type wrongSource struct{ backend.StreamDevice }

func (wrongSource) CopyFlags(dst, src backend.Mem, s uintptr, l []backend.FlagWrite) error {
	return fmt.Errorf("imported by another backend: %w", backend.ErrWrongDevice)
}
func (d wrongSource) CopyAsync(dst, src backend.Mem, s uintptr) error {
	return fmt.Errorf("imported by another backend: %w", backend.ErrWrongDevice)
}

// TestDeviceNothingInGraph: a put that is refused puts nothing into the graph of its stream.
func TestDeviceNothingInGraph(t *testing.T) {
	r := newDeviceRig(t, 2, Options{Size: 64, Signals: 1})
	a := r.windows[0]
	was := a.dev.memory.d
	src := r.tensor(0, []byte{7})
	g := r.devices[0].Capture(9)
	a.dev.memory.d = wrongSource{was}
	t.Log(a.PutSignal(t.Context(), 1, 0, src, 0, af.Stream(9)))
	a.dev.memory.d = was
	if n := g.Len(); n > 0 {
		t.Errorf("the graph has %d nodes that its owner knows nothing of", n)
	}
	g.End()
	ctx, cancel := context.WithTimeout(t.Context(), testTime)
	defer cancel()
	if err := a.Flush(ctx, 1); err != nil {
		t.Errorf("flush: %v", err)
	}
	r.must(a.PutSignal(t.Context(), 1, 0, src, 0, af.Stream(10))) // in another stream
	done := make(chan struct{})
	r.devices[0].Queue(10, func() { close(done) })
	select {
	case <-done:
	case <-time.After(testTime):
		t.Error("stream 10 waits for ever for what is in the graph")
		g.Replay(9)
		<-done
	}
}

// TestDevicePageThatBlocks: a page announced by a rank is not opened if opening it may block.
func TestDevicePageThatBlocks(t *testing.T) {
	r := newDeviceRig(t, 2, Options{Size: 64, Signals: 1})
	m := &r.windows[0].dev.memory
	fd, err := unix.Open(filepath.Join(t.TempDir(), "file"), unix.O_RDWR|unix.O_CREAT|unix.O_CLOEXEC, 0o600)
	r.must(err)
	defer unix.Close(fd)
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_SETLEASE, unix.F_WRLCK); err != nil {
		t.Skip(err)
	}
	name := binary.NativeEndian.AppendUint32(binary.NativeEndian.AppendUint64(nil, uint64(os.Getpid())), uint32(fd))
	done := make(chan error, 1)
	go func() { done <- m.host.reach(m.d, 1, name, gpusync.Token{}) }()
	select {
	case err := <-done:
		t.Log(err)
	case <-time.After(testTime):
		t.Error("Open hangs in open(2) of what a rank has named, for /proc/sys/fs/lease-break-time, of 45 s")
		_, _ = unix.FcntlInt(uintptr(fd), unix.F_SETLEASE, unix.F_UNLCK)
		<-done
	}
}

// TestDeviceWaitAfterClose: a window that is closed here gives no signals any more.
func TestDeviceWaitAfterClose(t *testing.T) {
	r := newDeviceRig(t, 2, Options{Size: 64, Signals: 1})
	a, b := r.windows[0], r.windows[1]
	r.must(a.Signal(t.Context(), 1, 0), a.Signal(t.Context(), 1, 0), a.Flush(t.Context(), 1), b.Close())
	if err := b.WaitSignal(t.Context(), 0, 0, stream); !errors.Is(err, van.ErrClosed) {
		t.Errorf("in a stream: %v", err)
	}
	if err := b.WaitSignal(t.Context(), 0, 0); !errors.Is(err, van.ErrClosed) {
		t.Errorf("on the host: %v", err)
	}
}

// unsupported queues the copy, and then the driver says that it does not support the writes.
type unsupported struct{ backend.StreamDevice }

func (d unsupported) CopyFlags(dst, src backend.Mem, s uintptr, l []backend.FlagWrite) error {
	return errors.Join(d.StreamDevice.CopyAsync(dst, src, s), fmt.Errorf("cuStreamWriteValue32_v2 (801): %w", backend.ErrUnsupported))
}

// TestDeviceSourceHeld: the source of a put that fails is held while its copy may be under way.
func TestDeviceSourceHeld(t *testing.T) {
	r := newDeviceRig(t, 2, Options{Size: 64, Signals: 1})
	a, d := r.windows[0], r.devices[0]
	owner := &simgpu.Holds{}
	m, err := d.RegisterHost(owner.Bytes([]byte{1, 2, 3}))
	r.must(err)
	src, err := af.NewTensor(m, af.Uint8, 3)
	r.must(err)
	was := a.dev.memory.d
	a.dev.memory.d = unsupported{was}
	letGo := r.hold(0, stream)
	if err := a.PutSignal(t.Context(), 1, 0, src, 0, stream); !errors.Is(err, backend.ErrUnsupported) {
		t.Error(err)
	}
	a.dev.memory.d = was
	if owner.N() == 0 {
		t.Error("a copy of the source is queued, and nobody holds it")
	}
	letGo()
	r.settle(0, stream)
}

func (unsupported) Pinned(backend.Mem) bool { return true }

// TestDeviceClosedBehindPage: a window that is closed when a wait on the host has taken a signal that is not in the device yet is not one in which a
// stream waits.
func TestDeviceClosedBehindPage(t *testing.T) {
	r := newDeviceRig(t, 2, Options{Size: 64, Signals: 1})
	a, b := r.windows[0], r.windows[1]
	h := &b.dev.memory.host
	(*atomic.Uint32)(unsafe.Pointer(&h.own.Mem[h.at(0, 0)])).Store(1)
	r.must(b.WaitSignal(t.Context(), 0, 0))
	if rank := b.dev.awaited(); rank >= 0 {
		t.Errorf("a stream is said to wait for rank %d", rank)
	}
	r.must(b.Close(), a.Check())
}
