//go:build cuda

package backend

import (
	"bytes"
	"debug/elf"
	"encoding/json"
	"errors"
	goflag "flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/internal/clock"
)

// ipcChild makes this test program the other process of TestCUDAIPC.
var ipcChild = goflag.Int("ipc-child", -1, "internal: import on this device what standard input describes")

func TestMain(m *testing.M) {
	goflag.Parse()
	if *ipcChild >= 0 {
		if err := childImport(*ipcChild); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// openGPU opens device id, or skips the test and says why.
func openGPU(t testing.TB, id int) *gpu {
	t.Helper()
	b, err := New("GPU", id)
	if errors.Is(err, ErrUnavailable) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	})
	return b.(*gpu)
}

func must[T any](t testing.TB) func(T, error) T {
	return func(v T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

// A program with CUDA starts without a GPU, and says what is missing.
func TestCUDAOpensOrSaysWhy(t *testing.T) {
	all, err := GPUs()
	if err != nil {
		says := "cuInit: CUDA_ERROR_"
		if strings.Contains(err.Error(), "dlopen") {
			says = "libcuda.so.1"
		}
		wantError(t, err, ErrUnavailable, says)
		_, err = New("GPU", 0)
		wantError(t, err, ErrUnavailable, "backend GPU", says)
		return
	}
	_, err = New("GPU", len(all))
	wantError(t, err, ErrUnavailable, fmt.Sprintf("sees %d", len(all)))
	for _, i := range all {
		t.Logf("%+v", i)
		if i.Name == "" || i.PCIBusID == "" || i.Memory == 0 || i.ComputeMajor == 0 {
			t.Errorf("not all is known of %+v", i)
		}
	}
}

// See gpu_cuda_load.c.
func TestCUDANeedsNoLibrary(t *testing.T) {
	f, err := elf.Open(os.Args[0])
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	libs, err := f.ImportedLibraries()
	if err != nil {
		t.Fatal(err)
	}
	symbols, err := f.ImportedSymbols()
	if err != nil {
		t.Fatal(err)
	}
	var missing []string
	for _, s := range symbols {
		if len(s.Name) > 2 && s.Name[:2] == "cu" && s.Name[2] >= 'A' && s.Name[2] <= 'Z' {
			missing = append(missing, s.Name)
		}
	}
	if len(missing) > 0 || slices.ContainsFunc(libs, func(l string) bool { return strings.HasPrefix(l, "libcuda") }) {
		t.Errorf("the program needs %v; FUNCTIONS in gpu_cuda_load.c lacks %v", libs, missing)
	}
}

func TestCUDACopy(t *testing.T) {
	g := openGPU(t, 0)
	info, free, err := g.Describe()
	t.Logf("%+v, %d bytes free, %v", info, free, err)
	for _, n := range []int{1, 4, 255, 4096, 65_537, 917_504, 16 << 20} {
		want, got := make([]byte, n), make([]byte, n)
		for i := range want {
			want[i] = byte(rand.Uint32())
		}
		a, b := must[Mem](t)(g.Alloc(n)), must[Mem](t)(g.Alloc(n))
		if a.Addr()%deviceAlign != 0 {
			t.Errorf("%d bytes at %#x", n, a.Addr())
		}
		pinned := must[Mem](t)(g.AllocPinned(n))
		if err := errors.Join(g.Copy(a, Bytes(want)), g.Copy(b, a), g.Copy(pinned, b), g.Copy(Bytes(got), b)); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) || !bytes.Equal(pinned.Host(), want) {
			t.Errorf("%d bytes: others came back", n)
		}
		if err := errors.Join(g.Free(a), g.Free(b), g.FreePinned(pinned)); err != nil {
			t.Error(err)
		}
	}
	_, err = g.Alloc(1 << 50)
	wantError(t, err, ErrNoMemory, "gpu:0: Alloc of 1125899906842624 bytes: cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY (2)", "are free")
}

// A stream is held by a word that it waits for, so that an event is pending for as
// long as a test likes.
func TestCUDAEvents(t *testing.T) {
	for name, o := range map[string]Options{"flag": {Spin: time.Millisecond}, "driver": {DriverEvents: true}, "flag, sleeping": {}} {
		t.Run(name, func(t *testing.T) {
			g := openGPU(t, 0)
			if !g.info.StreamFlags {
				t.Skip("streams of this driver cannot write words")
			}
			g.Configure(o)
			s := must[uintptr](t)(g.NewStream())
			gate := must[Mem](t)(g.AllocPinned(64))
			clear(gate.Host())
			dev := must[Mem](t)(g.Alloc(1 << 20))
			src := must[Mem](t)(g.AllocPinned(1 << 20))
			e := must[Event](t)(g.NewEvent())
			defer e.Close()
			for round := range uint32(20) {
				for i := range src.Host() {
					src.Host()[i] = byte(round)
				}
				if err := errors.Join(g.WaitFlag(s, gate, round+1), g.CopyAsync(dev, src, s), e.Record(s)); err != nil {
					t.Fatal(err)
				}
				query(t, e, false)
				time.AfterFunc(time.Millisecond, func() {
					if err := g.WriteFlag(0, gate, round+1); err != nil {
						t.Error(err)
					}
				})
				if err := e.Sync(t.Context()); err != nil {
					t.Fatal(err)
				}
				query(t, e, true)
				got := make([]byte, 1<<20)
				if err := g.Copy(Bytes(got), dev); err != nil {
					t.Fatal(err)
				}
				if got[0] != byte(round) || got[len(got)-1] != byte(round) {
					t.Fatalf("round %d: the event was done before the copy", round)
				}
			}
		})
	}
}

func TestCUDARegister(t *testing.T) {
	g := openGPU(t, 0)
	page := mmap(1 << 16)
	defer unix.Munmap(page)
	m := must[Mem](t)(g.RegisterHost(Bytes(page)))
	word := m.Sub(4096, 4)
	s := must[uintptr](t)(g.NewStream())
	e := must[Event](t)(g.NewEvent())
	if g.info.StreamFlags {
		if err := errors.Join(g.WriteFlag(s, word, 0x01020304), e.Record(s), e.Sync(t.Context())); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(page[4096:4100], []byte{4, 3, 2, 1}) {
			t.Errorf("the word is % x", page[4096:4100])
		}
		device := must[Mem](t)(g.Alloc(64))
		l := []FlagWrite{{word, 1}, {device, 2}, {m.Sub(0, 4), 3}, {m.Sub(64, 4), 4}, {word, 5}}
		if err := errors.Join(g.WriteFlags(s, l), e.Record(s), e.Sync(t.Context())); err != nil {
			t.Fatal(err)
		}
		got := make([]byte, 4)
		if err := g.Copy(Bytes(got), device.Sub(0, 4)); err != nil {
			t.Fatal(err)
		}
		if page[4096] != 5 || got[0] != 2 || page[0] != 3 || page[64] != 4 {
			t.Errorf("the words are %d, %d, %d, %d, want 5, 2, 3, 4", page[4096], got[0], page[0], page[64])
		}
	}
	_, err := g.RegisterHost(Bytes(page))
	wantError(t, err, nil, "cuMemHostRegister: CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED")
	if err := errors.Join(e.Close(), g.UnregisterHost(m)); err != nil {
		t.Error(err)
	}
}

// The context that a thread has, such as PyTorch's for another device, stays as it was.
func TestCUDALeavesThreadsAlone(t *testing.T) {
	g := openGPU(t, 0)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	before, err := cuda{}.enter(g.ctx)
	if err != nil {
		t.Fatal(err)
	}
	if err := g.Copy(must[Mem](t)(g.Alloc(64)), Bytes(make([]byte, 64))); err != nil {
		t.Error(err)
	}
	again, err := cuda{}.enter(g.ctx)
	if err != nil || again.pushed || again.mode != 2 {
		t.Errorf("the context is no longer current: %+v, %v", again, err)
	}
	if err := errors.Join(cuda{}.leave(again), cuda{}.leave(before)); err != nil {
		t.Error(err)
	}
}

func TestCUDAManyGoroutines(t *testing.T) {
	devices, err := GPUs()
	if err != nil {
		t.Skip(err)
	}
	var wg sync.WaitGroup
	for id := range devices {
		g := openGPU(t, id)
		for i := range 8 {
			wg.Go(func() {
				want := bytes.Repeat([]byte{byte(i + 1)}, 1<<16)
				got := make([]byte, len(want))
				for range 50 {
					m, err := g.Alloc(len(want))
					if err != nil {
						t.Error(err)
						return
					}
					if err := errors.Join(g.Copy(m, Bytes(want)), g.Copy(Bytes(got), m), g.Free(m)); err != nil || !bytes.Equal(got, want) {
						t.Errorf("wrong bytes, or %v", err)
					}
				}
			})
		}
	}
	wg.Wait()
}

func TestCUDADMABuf(t *testing.T) {
	g := openGPU(t, 0)
	m := must[Mem](t)(g.Alloc(4 << 20))
	fd, off, err := g.ExportDMABuf(m.Sub(100, 1<<20))
	if errors.Is(err, ErrUnsupported) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	if off != int(m.Addr()+100)%os.Getpagesize() {
		t.Errorf("offset %d", off)
	}
	if err := unix.Close(fd); err != nil {
		t.Error(err)
	}
}

// Another process writes into this one's memory, on every device that there is.
func TestCUDAIPC(t *testing.T) {
	devices, err := GPUs()
	if err != nil {
		t.Skip(err)
	}
	g := openGPU(t, 0)
	m := must[Mem](t)(g.Alloc(1 << 20))
	part := m.Sub(512, 4096)
	e, err := g.Export(part)
	if errors.Is(err, ErrUnsupported) || errors.Is(err, ErrNotExportable) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	if e.Offset%512 != 0 || e.Base+uint64(e.Offset) != part.Addr() || e.Size < e.Offset+4096 {
		t.Errorf("%+v for %#x", e, part.Addr())
	}
	_, err = g.Import(e)
	wantError(t, err, ErrNotExportable, "Import of") // one's own memory
	in, _ := json.Marshal(e)
	for id := range devices {
		if err := g.Copy(part, Bytes(make([]byte, 4096))); err != nil {
			t.Fatal(err)
		}
		c := exec.Command(os.Args[0], "-ipc-child", fmt.Sprint(id))
		c.Stdin = bytes.NewReader(in)
		if out, err := c.CombinedOutput(); err != nil {
			t.Errorf("gpu:%d: %v: %s", id, err, out)
			continue
		}
		got := make([]byte, 4096)
		if err := g.Copy(Bytes(got), part); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, bytes.Repeat([]byte{byte(id + 1)}, 4096)) {
			t.Errorf("gpu:%d: wrong bytes", id)
		}
	}
}

func childImport(id int) error {
	var e Export
	if err := json.NewDecoder(os.Stdin).Decode(&e); err != nil {
		return err
	}
	b, err := New("GPU", id)
	if err != nil {
		return err
	}
	g := b.(*gpu)
	m, err := g.Import(e)
	if err != nil {
		return err
	}
	if m.Len() != e.Size || m.Device() != g.Device() {
		return fmt.Errorf("imported %d bytes on %s", m.Len(), m.Device())
	}
	local, err := g.Alloc(4096)
	if err != nil {
		return err
	}
	return errors.Join(g.Copy(local, Bytes(bytes.Repeat([]byte{byte(id + 1)}, 4096))),
		g.Copy(m.Sub(e.Offset, 4096), local), g.CloseImport(m), g.Close())
}

func BenchmarkCUDARecordSync(b *testing.B) {
	for name, o := range map[string]Options{"flag": {Spin: -1}, "driver": {DriverEvents: true, Spin: -1}} {
		b.Run(name, func(b *testing.B) {
			g := openGPU(b, 0)
			g.Configure(o)
			s, e := must[uintptr](b)(g.NewStream()), must[Event](b)(g.NewEvent())
			defer e.Close()
			b.ReportAllocs()
			for b.Loop() {
				if err := e.Record(s); err != nil {
					b.Fatal(err)
				}
				if err := e.Sync(b.Context()); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkCUDACalls is what is called for each value between processes of one host.
func BenchmarkCUDACalls(b *testing.B) {
	g := openGPU(b, 0)
	s, d, e := must[uintptr](b)(g.NewStream()), must[Mem](b)(g.Alloc(4096)), must[Event](b)(g.NewEvent())
	defer e.Close()
	d2 := must[Mem](b)(g.Alloc(4096))
	for _, c := range []struct {
		name string
		call func() error
	}{
		{"enter and leave", func() error { return g.enter(func() error { return nil }) }},
		{"Idle of the default stream", func() error { _, err := g.Idle(0); return err }},
		{"Idle", func() error { _, err := g.Idle(s); return err }},
		{"Export", func() error { _, err := g.Export(d); return err }},
		{"CopyAsync", func() error { return g.CopyAsync(d2, d, s) }},
		{"Record", func() error { return e.Record(s) }},
		{"Query", func() error { _, err := e.Query(); return err }},
	} {
		b.Run(c.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if err := c.call(); err != nil {
					b.Fatal(err)
				}
			}
			settle(b, g, s)
		})
	}
}

func BenchmarkCUDACopy(b *testing.B) {
	g := openGPU(b, 0)
	for _, n := range []int{1 << 10, 917_504, 16 << 20} {
		d := must[Mem](b)(g.Alloc(n))
		d2 := must[Mem](b)(g.Alloc(n))
		p := must[Mem](b)(g.AllocPinned(n))
		for name, c := range map[string][2]Mem{"to device": {d, p}, "to host": {p, d}, "within": {d2, d}, "from heap": {d, Bytes(make([]byte, n))}} {
			b.Run(fmt.Sprintf("%s/%d", name, n), func(b *testing.B) {
				b.SetBytes(int64(n))
				b.ReportAllocs()
				for b.Loop() {
					if err := g.Copy(c[0], c[1]); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}

// TestCUDAMayBlock: backends get the mark of their device, which is the process's.
func TestCUDAMayBlock(t *testing.T) {
	a, b, other := cuda{}.mayBlock(-1), cuda{}.mayBlock(-1), cuda{}.mayBlock(-2)
	a.Store(true)
	if !b.Load() || other.Load() {
		t.Errorf("the device's mark is %t, another one's %t", b.Load(), other.Load())
	}
}

// TestCUDACloseWhileAStreamWaits: Close ends, though to free anything would not.
func TestCUDACloseWhileAStreamWaits(t *testing.T) {
	other := openGPU(t, 0)
	if !other.info.StreamFlags {
		t.Skip("streams cannot wait for words")
	}
	b, err := newGPU(cuda{}, 0)
	if err != nil {
		t.Fatal(err)
	}
	g := b.(*gpu)
	must[Mem](t)(g.Alloc(5000))
	kept := must[Mem](t)(g.AllocPinned(5000))
	stream := must[uintptr](t)(other.NewStream())
	page := must[Mem](t)(other.AllocPinned(8))
	clear(page.Host())
	word := (*atomic.Uint32)(page.Ptr())
	if err := other.WaitFlag(stream, page, 1); err != nil {
		t.Fatal(err)
	}
	rescue := time.AfterFunc(10*time.Second, func() { word.Store(1) })
	wantError(t, g.Close(), ErrInUse, "5000 bytes of the device")
	if !rescue.Stop() {
		t.Error("Close waited for the stream")
	}
	word.Store(1)
	settle(t, other, stream)
	if err := g.Close(); err != nil {
		t.Error(err)
	}
	kept.Host()[4999] = 1 // a Mem stays readable and writable
}

func TestCUDACopiesGated(t *testing.T) { testCopiesGated(t, openGPU(t, 0)) }

// TestCUDASignals: the kernels hand over between a stream and the CPU.
func TestCUDASignals(t *testing.T) {
	g := openGPU(t, 0)
	stream := must[uintptr](t)(g.NewStream())
	page := must[Mem](t)(g.AllocPinned(16))
	clear(page.Host())
	mapped := must[Mem](t)(g.MapHost(page))
	seq := must[Mem](t)(g.Alloc(8))
	zero := make([]byte, 8)
	if err := g.Copy(seq, Bytes(zero)); err != nil {
		t.Fatal(err)
	}
	there, back := counterAt(uintptr(page.Ptr())), counterAt(uintptr(page.Ptr())+8)
	for round := int64(1); round <= 100; round++ {
		for _, err := range []error{g.AddSeq(stream, seq), g.WriteSeq(stream, mapped.Sub(0, 8), seq), g.WaitSeq(stream, mapped.Sub(8, 8), seq)} {
			if err != nil {
				t.Fatal(err)
			}
		}
		for there.Load() < round {
			clock.Sleep(minPause)
		}
		back.Store(round)
		settle(t, g, stream)
	}
}
