package backend

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"
)

// gpu is made of parts: none of its abilities got lost between them.
var _ interface {
	Backend
	Tunable
	AsyncCopier
	StreamIdler
	HealthChecker
	HostPinner
	PinTeller
	GraphFlagger
	Signaller
	StreamBlocker
	Sharer
	DMABufExporter
	Describer
} = (*gpu)(nil)

// open opens device 0 of a fake with two, and checks at the end of the test that
// Close has given everything back.
func open(t *testing.T, f *fakeDriver) *gpu {
	t.Helper()
	b, err := newGPU(f, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
		if l := f.leaks(); len(l) > 0 {
			t.Errorf("after Close: %s", strings.Join(l, "; "))
		}
	})
	return b.(*gpu)
}

func wantError(t *testing.T, err, kind error, parts ...string) {
	t.Helper()
	if err == nil {
		t.Fatalf("no error, want one with %q", parts)
	}
	if kind != nil && !errors.Is(err, kind) {
		t.Errorf("error %q is not %q", err, kind)
	}
	for _, p := range parts {
		if !strings.Contains(err.Error(), p) {
			t.Errorf("error %q does not say %q", err, p)
		}
	}
}

func TestGPUIsBackend(t *testing.T) {
	var b Backend = open(t, newFake(2))
	if b.Name() != "GPU" || b.Device() != (Device{GPU, 0}) {
		t.Errorf("it is %s on %s", b.Name(), b.Device())
	}
	for what, ok := range map[string]bool{
		"Tunable": is[Tunable](b), "AsyncCopier": is[AsyncCopier](b), "HostPinner": is[HostPinner](b), "StreamFlagger": is[StreamFlagger](b),
		"Exporter": is[Exporter](b), "DMABufExporter": is[DMABufExporter](b), "Describer": is[Describer](b),
	} {
		if !ok {
			t.Errorf("it is no %s", what)
		}
	}
}

func is[T any](b Backend) bool {
	_, ok := b.(T)
	return ok
}

func TestOpenErrors(t *testing.T) {
	for _, c := range []struct {
		call string
		code int
		id   int
		kind error
		says string
	}{
		{"start", codeNoDevice, 0, ErrUnavailable, "CUDA_VISIBLE_DEVICES"},
		{"start", -1, 0, ErrUnavailable, "no driver of NVIDIA"},
		{"start", 999, 0, ErrUnavailable, "start: FAKE_999"},
		{"count", 3, 0, ErrUnavailable, "count: FAKE_3"},
		{"", 0, 2, ErrUnavailable, "device 2 (STEPMESH_GPU): this process sees 2"},
		{"", 0, -1, ErrUnavailable, "want 0 to 1"},
		{"device", 101, 1, ErrUnavailable, "gpu:1: open"},
		{"name", 999, 0, ErrUnavailable, "gpu:0: describe: name"},
		{"uuid", 999, 0, ErrUnavailable, "uuid"},
		{"version", 999, 0, ErrUnavailable, "version"},
		{"canAccessPeer", 999, 0, ErrUnavailable, "canAccessPeer"},
		{"retain", codeOutOfMemory, 0, ErrNoMemory, "primary context: retain: FAKE_2 (2)"},
		{"streamCreate", 999, 0, nil, "streamCreate"},
		{"hostRegister", codeOutOfMemory, 0, ErrNoMemory, "hostRegister"},
		{"hostDeviceAddr", 999, 0, nil, "hostDeviceAddr"},
		{"enter", 999, 0, nil, "enter"},
	} {
		t.Run(c.call, func(t *testing.T) {
			f := newFake(2)
			f.fail(c.call, c.code)
			b, err := newGPU(f, c.id)
			wantError(t, err, c.kind, c.says)
			if b != nil {
				t.Errorf("a backend came with the error")
			}
			if l := f.leaks(); len(l) > 0 {
				t.Errorf("left behind: %v", l)
			}
		})
	}
}

func TestAlloc(t *testing.T) {
	f := newFake(2)
	g := open(t, f)
	m, err := g.Alloc(1000)
	if err != nil {
		t.Fatal(err)
	}
	if m.Len() != 1000 || m.Device() != g.Device() || m.OnHost() || m.Addr()%deviceAlign != 0 {
		t.Errorf("got %d bytes at %#x on %s", m.Len(), m.Addr(), m.Device())
	}
	m.Retain()
	wantError(t, g.Free(m), ErrInUse, "gpu:0", "1000 bytes")
	m.Release()
	for _, other := range []Mem{m.Sub(8, 8), m.Sub(0, 8), At(m.Ptr(), m.Len(), Device{GPU, 1}, m.Owner())} {
		wantError(t, g.Free(other), nil, "not what Alloc returned")
	}
	if err := g.Free(m); err != nil {
		t.Error(err)
	}
	wantError(t, g.Free(m), nil, "freed before")
	empty, err := g.Alloc(0)
	if err != nil || empty.Len() != 0 || empty.Device() != g.Device() || g.Free(empty) != nil {
		t.Errorf("Alloc(0): %d bytes on %s, %v", empty.Len(), empty.Device(), err)
	}
	empty, err = g.AllocPinned(0)
	if err != nil || empty.Len() != 0 || empty.Device() != Host || g.FreePinned(empty) != nil {
		t.Errorf("AllocPinned(0): %d bytes on %s, %v", empty.Len(), empty.Device(), err)
	}
	_, err = g.Alloc(-1)
	wantError(t, err, nil, "Alloc(-1)")

	f.fail("memAlloc", codeOutOfMemory)
	_, err = g.Alloc(4096)
	wantError(t, err, ErrNoMemory, "gpu:0: Alloc of 4096 bytes: memAlloc: FAKE_2 (2)", "1048576 of 1073741824 bytes are free")
	var de *DeviceError
	if !errors.As(err, &de) || de.Code != codeOutOfMemory || de.Call != "memAlloc" || de.Device != g.Device() {
		t.Errorf("the error is %#v", de)
	}
	f.fail("memAlloc", 0)
	if _, err := g.Alloc(64); err != nil { // left for Close to free
		t.Error(err)
	}
}

func TestCopyEveryWay(t *testing.T) {
	g := open(t, newFake(2))
	want := make([]byte, 100_000)
	for i := range want {
		want[i] = byte(rand.Uint32())
	}
	a, _ := g.Alloc(len(want))
	b, err := g.Alloc(len(want))
	if err != nil {
		t.Fatal(err)
	}
	got := make([]byte, len(want))
	host := make([]byte, len(want))
	for _, step := range []struct{ dst, src Mem }{{Bytes(host), Bytes(want)}, {a, Bytes(host)}, {b, a}, {Bytes(got), b}} {
		if err := g.Copy(step.dst, step.src); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(got, want) {
		t.Error("other bytes came back")
	}
	if err := g.Copy(a.Sub(0, 0), Bytes(nil)); err != nil {
		t.Error(err)
	}
}

func TestCopyErrors(t *testing.T) {
	f := newFake(2)
	g := open(t, f)
	a, _ := g.Alloc(64)
	host := Bytes(make([]byte, 64))
	other := At(a.Ptr(), 64, Device{GPU, 3}, nil)
	wantError(t, g.Copy(a, host.Sub(0, 8)), nil, "Copy of 8 bytes into 64")
	wantError(t, g.Copy(other, host), ErrWrongDevice, "tensor on gpu:3 but this node owns gpu:0")
	wantError(t, g.Copy(host, other), ErrWrongDevice, "64 bytes from gpu:3 to cpu")
	wantError(t, g.CopyAsync(host, host, 0), nil, "host to host")
	wantError(t, g.CopyAsync(a, host, 12345), nil, "FAKE_400")

	for _, c := range []struct {
		call string
		code int
		kind error
	}{{"copyToDevice", 1, nil}, {"streamQuery", codeIllegalAddress, ErrDeviceLost}, {"enter", 4, ErrDeviceLost}} {
		f.fail(c.call, c.code)
		wantError(t, g.Copy(a, host), c.kind, "Copy of 64 bytes from cpu", "to gpu:0", c.call)
		f.fail(c.call, 0)
	}
	if err := g.Copy(a, host); err != nil {
		t.Errorf("afterwards: %v", err)
	}
}

func TestCopiesOverlap(t *testing.T) {
	f := newFake(1)
	g := open(t, f)
	a, _ := g.Alloc(64)
	before := f.times("streamCreate")
	s, err := g.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	release := f.hold(s)
	defer release()
	var wg sync.WaitGroup
	for range 8 { // while another stream is held
		wg.Go(func() {
			host := make([]byte, 64)
			for range 100 {
				if err := g.Copy(Bytes(host), a); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if n := f.times("streamCreate") - before; n > 9 {
		t.Errorf("%d streams were made for 8 copiers", n)
	}
	release()
	if err := g.FreeStream(s); err != nil {
		t.Error(err)
	}
	wantError(t, g.FreeStream(s), nil, "freed before")
}

// TestFreeStream: a released stream is used again when the work queued there is done. No stream is destroyed
// before Close, because the driver may not return from that call.
func TestFreeStream(t *testing.T) {
	f := newFake(1)
	g := open(t, f)
	first, _ := g.NewStream()
	made := f.times("streamCreate")
	release := f.hold(first)
	defer release()
	if err := g.FreeStream(first); err != nil {
		t.Fatal(err)
	}
	wantError(t, g.FreeStream(first), nil, "freed before")
	second, err := g.NewStream()
	if err != nil || second == first || f.times("streamCreate") != made+1 {
		t.Fatalf("NewStream while something is queued in the one given back: %v, the same: %t", err, second == first)
	}
	release()
	for end := time.Now().Add(20 * time.Second); f.stream(first).pending.Load() > 0; runtime.Gosched() {
		if time.Now().After(end) {
			t.Fatal("what is queued in the stream does not end")
		}
	}
	for range 100 {
		third, err := g.NewStream()
		if err != nil || third != first {
			t.Fatalf("NewStream afterwards: %v, the same: %t", err, third == first)
		}
		if err := g.FreeStream(third); err != nil {
			t.Fatal(err)
		}
	}
	if err := g.FreeStream(second); err != nil {
		t.Fatal(err)
	}
	if n := f.times("streamDestroy"); n != 0 {
		t.Errorf("%d streams were destroyed", n)
	}
	if err := g.Close(); err != nil {
		t.Error(err)
	}
	if l := f.leaks(); len(l) > 0 {
		t.Error(l)
	}
}

func TestClosed(t *testing.T) {
	f := newFake(1)
	b, err := newGPU(f, 0)
	if err != nil {
		t.Fatal(err)
	}
	g := b.(*gpu)
	m, _ := g.Alloc(64)
	flag, _ := g.NewEvent()
	if err := flag.Record(g.idle[0]); err != nil {
		t.Fatal(err)
	}
	g.Configure(Options{DriverEvents: true})
	ev, _ := g.NewEvent() // left for Close
	if err := g.Close(); err != nil {
		t.Fatal(err)
	}
	if err := g.Close(); err != nil {
		t.Errorf("Close again: %v", err)
	}
	_, allocErr := g.Alloc(1)
	_, pinErr := g.AllocPinned(1)
	_, eventErr := g.NewEvent()
	g.Configure(Options{})
	_, flagErr := g.NewEvent()
	_, queryErr := flag.Query()
	for _, err := range []error{allocErr, pinErr, eventErr, flagErr, queryErr, g.Free(m), g.Copy(m, m), flag.Record(0), ev.Record(0)} {
		wantError(t, err, ErrClosed, "gpu:0")
	}
	if err := errors.Join(flag.Close(), ev.Close()); err != nil {
		t.Errorf("Close of an event of a closed backend: %v", err)
	}
	if l := f.leaks(); len(l) > 0 {
		t.Error(l)
	}
}

func TestCloseTellsErrors(t *testing.T) {
	f := newFake(1)
	b, err := newGPU(f, 0)
	if err != nil {
		t.Fatal(err)
	}
	f.fail("streamDestroy", 999)
	f.fail("release", 201)
	wantError(t, b.Close(), nil, "streamDestroy: FAKE_999", "release: FAKE_201")
}

func TestDescribe(t *testing.T) {
	f := newFake(3)
	g := open(t, f)
	info, free, err := g.Describe()
	if err != nil || free != 1<<20 || info.Name != "Fake H200" || info.PCIBusID != "0000:18:00.0" || info.Driver != "CUDA 13.0" ||
		len(info.Peers) != 2 || !info.StreamFlags || !info.DMABuf || info.ComputeMajor != int(attrComputeMajor) {
		t.Errorf("%+v, %d free, %v", info, free, err)
	}
	all, err := describeAll(f)
	if err != nil || len(all) != 3 || all[2].Device.ID != 2 || len(all[2].Peers) != 2 || all[2].Peers[1] != 1 {
		t.Errorf("%+v, %v", all, err)
	}
	f.fail("start", codeNoDevice)
	_, err = describeAll(f)
	wantError(t, err, ErrUnavailable, "FAKE_100")
}

func TestCheckDevice(t *testing.T) {
	g := open(t, newFake(2))
	on := func(id int32) Mem { return At(nil, 8, Device{GPU, id}, nil) }
	if err := errors.Join(CheckDevice(g, on(0)), CheckDevice(g, Bytes(make([]byte, 4))), CheckDevice(g, Mem{}), CheckDevice(NewCPU(), Mem{})); err != nil {
		t.Error(err)
	}
	wantError(t, CheckDevice(g, on(1)), ErrWrongDevice, "tensor on gpu:1 but this node owns gpu:0")
	wantError(t, CheckDevice(NewCPU(), on(1)), ErrWrongDevice, "tensor on gpu:1 but this node's backend is CPU")
}

// Every goroutine on every thread works in the right context, and leaves the thread
// as it was; open checks that.
func TestManyGoroutines(t *testing.T) {
	f := newFake(2)
	g := open(t, f)
	b, err := newGPU(f, 1)
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	var wg sync.WaitGroup
	for i := range 16 {
		wg.Go(func() {
			g := []Backend{g, b}[i%2]
			for range 50 {
				m, err := g.Alloc(128)
				if err != nil {
					t.Error(err)
					return
				}
				want := bytes.Repeat([]byte{byte(i)}, 128)
				got := make([]byte, 128)
				e, _ := g.NewEvent()
				if err := errors.Join(g.Copy(m, Bytes(want)), e.Sync(t.Context()), g.Copy(Bytes(got), m), g.Free(m), e.Close()); err != nil {
					t.Error(err)
				}
				if !bytes.Equal(got, want) {
					t.Error("wrong bytes")
				}
			}
		})
	}
	wg.Wait()
}
