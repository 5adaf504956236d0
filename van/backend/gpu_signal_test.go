package backend

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"github.com/stepaf/stepaf-go/internal/clock"
)

// TestSignals: a stream and the CPU hand over by counters, as the Python functions
// write_flag, wait_flag and seq_add_one let them.
func TestSignals(t *testing.T) {
	f := newFake(1)
	g := open(t, f)
	stream, err := g.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	page, err := g.AllocPinned(16)
	if err != nil {
		t.Fatal(err)
	}
	mapped, err := g.MapHost(page.WithOwner("its owner"))
	if err != nil || mapped.Device() != g.Device() || mapped.Len() != 16 || mapped.Owner() != "its owner" {
		t.Fatalf("%v, %d bytes on %s", err, mapped.Len(), mapped.Device())
	}
	seq, err := g.Alloc(8)
	if err != nil {
		t.Fatal(err)
	}
	toCPU, toGPU := mapped.Sub(0, 8), mapped.Sub(8, 8)
	there, back := counterAt(uintptr(page.Ptr())), counterAt(uintptr(page.Ptr())+8)
	counterAt(uintptr(seq.Ptr())).Store(0)
	for round := int64(1); round <= 3; round++ {
		for _, err := range []error{g.AddSeq(stream, seq), g.WriteSeq(stream, toCPU, seq), g.WaitSeq(stream, toGPU, seq)} {
			if err != nil {
				t.Fatal(err)
			}
		}
		if !g.MayBlock() {
			t.Error("a stream waits for the CPU, and it is not known")
		}
		for there.Load() < round {
			clock.Sleep(minPause)
		}
		if err := f.streamQueryIn(g, stream); !notReady(err) {
			t.Errorf("round %d: the stream does not wait: %v", round, err)
		}
		back.Store(round)
		settle(t, g, stream)
	}
	if n := f.times("moduleLoad"); n != 1 {
		t.Errorf("the kernels were loaded %d times", n)
	}
	wantError(t, g.AddSeq(stream, page.Sub(0, 8)), ErrWrongDevice, "MapHost")
	wantError(t, g.WriteSeq(stream, toCPU.Sub(0, 4), seq), nil, "want 8")
	wantError(t, g.WaitSeq(stream, mapped.Sub(4, 8), seq), nil, "aligned")
	_, err = g.MapHost(seq)
	wantError(t, err, nil, "want pinned host memory")
	f.fail("hostDeviceAddr", codeInvalidValue)
	_, err = g.MapHost(page)
	wantError(t, err, nil, "is the memory pinned?")
	f.fail("hostDeviceAddr", 0)
	f.fail("launch", codeLaunchFailed)
	wantError(t, g.AddSeq(stream, seq), ErrDeviceLost, "AddSeq", "launch")
	f.fail("launch", 0)
}

// TestMayBlockIsTheDevices: the driver's frees wait for the streams of all that use the
// device in this process, so each of its backends knows.
func TestMayBlockIsTheDevices(t *testing.T) {
	for name, wait := range map[string]func(g *gpu, stream uintptr, word Mem) error{
		"WaitSeq":  func(g *gpu, stream uintptr, word Mem) error { return g.WaitSeq(stream, word, word) },
		"WaitFlag": func(g *gpu, stream uintptr, word Mem) error { return g.WaitFlag(stream, word, 0) },
		"WaitBits": func(g *gpu, stream uintptr, word Mem) error {
			counterAt(uintptr(word.Ptr())).Store(1)
			return g.WaitBits(stream, word, 1)
		},
		"WaitCount": func(g *gpu, stream uintptr, word Mem) error {
			counterAt(uintptr(word.Ptr())).Store(1)
			return g.WaitCount(stream, word, 1)
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFake(2)
			var b [3]*gpu // of devices 0, 0 and 1
			for i := range b {
				made, err := newGPU(f, i/2)
				if err != nil {
					t.Fatal(err)
				}
				defer made.Close()
				b[i] = made.(*gpu)
			}
			stream, err := b[0].NewStream()
			if err != nil {
				t.Fatal(err)
			}
			word, err := b[0].Alloc(8)
			if err != nil {
				t.Fatal(err)
			}
			if err := wait(b[0], stream, word); err != nil {
				t.Fatal(err)
			}
			late, err := newGPU(f, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer late.Close()
			if !b[0].MayBlock() || !b[1].MayBlock() || !late.(*gpu).MayBlock() {
				t.Error("another backend of the device does not know that its streams may wait")
			}
			if b[2].MayBlock() {
				t.Error("another device is said to wait")
			}
			settle(t, b[0], stream)
		})
	}
}

// streamQueryIn is streamQuery in g's context.
func (f *fakeDriver) streamQueryIn(g *gpu, s uintptr) error {
	return g.enter(func() error { return f.streamQuery(s) })
}

// TestSignalsFail: kernels that cannot be loaded are tried again.
func TestSignalsFail(t *testing.T) {
	f := newFake(1)
	g := open(t, f)
	seq, err := g.Alloc(8)
	if err != nil {
		t.Fatal(err)
	}
	stream, err := g.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	for _, call := range []string{"moduleLoad", "moduleFunction"} {
		f.fail(call, codeInvalidValue)
		wantError(t, g.AddSeq(stream, seq), nil, call)
		f.fail(call, 0)
	}
	if err := g.AddSeq(stream, seq); err != nil {
		t.Error(err)
	}
	settle(t, g, stream)
}

// TestCopyGated: a copy by the kernel waits for its gate, and memory that it cannot use is refused.
func TestCopyGated(t *testing.T) {
	g := open(t, newFake(1))
	stream, err := g.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	all, err := g.Alloc(3 * 8)
	if err != nil {
		t.Fatal(err)
	}
	dst, src, gate := all.Sub(0, 8), all.Sub(8, 8), all.Sub(16, 8)
	to, from, open := counterAt(uintptr(dst.Ptr())), counterAt(uintptr(src.Ptr())), counterAt(uintptr(gate.Ptr()))
	to.Store(0)
	from.Store(7)
	open.Store(0)
	if err := g.CopyGated([]GatedCopy{{dst, src, gate}}, stream); err != nil {
		t.Fatal(err)
	}
	if idle, err := g.Idle(stream); idle || err != nil || to.Load() != 0 {
		t.Errorf("idle %t, %v, copied %d, while the gate is closed", idle, err, to.Load())
	}
	open.Store(1)
	settle(t, g, stream)
	if to.Load() != 7 {
		t.Errorf("copied %d, want 7", to.Load())
	}
	wantError(t, g.CopyGated([]GatedCopy{{dst, src.Sub(0, 4), gate}}, stream), nil, "4 bytes to 8")
	wantError(t, g.CopyGated([]GatedCopy{{dst, src, gate.Sub(0, 4)}}, stream), nil, "gate of 4 bytes")
	wantError(t, g.CopyGated([]GatedCopy{{dst, Bytes(make([]byte, 8)), gate}}, stream), ErrWrongDevice, "CopyGated")
}

func TestCopiesGated(t *testing.T) { testCopiesGated(t, open(t, newFake(1))) }

// testCopiesGated makes more copies than one launch of the kernel, of several lengths and alignments. If the upper half of the gate is
// set, nothing is copied.
func testCopiesGated(t *testing.T, g *gpu) {
	for _, gate := range [][]byte{{1, 0, 0, 0, 0, 0, 0, 0}, {1, 0, 0, 0, 1, 0, 0, 0}, {0, 0, 0, 0, 1, 0, 0, 0}} {
		copyGated(t, g, gate)
	}
}

func copyGated(t *testing.T, g *gpu, gate []byte) {
	t.Helper()
	const n, room = 37, 1 << 18
	stream, err := g.NewStream()
	all, err2 := g.Alloc(2*n*room + 8)
	if err := errors.Join(err, err2); err != nil {
		t.Fatal(err)
	}
	want := make([]byte, all.Len())
	for i := range want {
		want[i] = byte(i * 7 >> 3)
	}
	copy(want[2*n*room:], gate)
	if err := g.Copy(all, Bytes(want)); err != nil {
		t.Fatal(err)
	}
	var copies []GatedCopy
	for i := range n {
		size, from, to := []int{0, 1, 15, 16, 4096, 65537, 200_000}[i%7], 2*i*room+i%3*16, (2*i+1)*room+i%5
		copies = append(copies, GatedCopy{all.Sub(to, size), all.Sub(from, size), all.Sub(2*n*room, 8)})
		if gate[4] == 0 {
			copy(want[to:to+size], want[from:from+size])
		}
	}
	if err := g.CopyGated(copies, stream); err != nil {
		t.Fatal(err)
	}
	settle(t, g, stream)
	got := make([]byte, all.Len())
	if err := g.Copy(Bytes(got), all); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("gate %d: the copies differ from what was to be copied", gate)
	}
	if err := errors.Join(g.Free(all), g.FreeStream(stream)); err != nil && !errors.Is(err, ErrInUse) {
		t.Error(err)
	}
}

// settle waits for all that is queued in stream.
func settle(t testing.TB, g *gpu, stream uintptr) {
	t.Helper()
	e, err := g.NewEvent()
	if err == nil {
		err = e.Record(stream)
	}
	if err == nil {
		err = e.Sync(t.Context())
	}
	if err == nil {
		err = e.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
}

// TestSignalsText: each kernel is in the text that the driver translates.
func TestSignalsText(t *testing.T) {
	for _, name := range fakeFunctions {
		if !strings.Contains(signalText, ".entry "+name+"(") {
			t.Errorf("no %s in gpu_signal.ptx", name)
		}
	}
}
