package backend

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"testing"

	"github.com/stepaf/stepaf-go/internal/clock"
)

func TestPinned(t *testing.T) {
	f := newFake(1)
	g := open(t, f)
	m, err := g.AllocPinned(5000)
	if err != nil {
		t.Fatal(err)
	}
	if !m.OnHost() || len(m.Host()) != 5000 || m.Addr()%4096 != 0 {
		t.Errorf("%d bytes at %#x on %s", m.Len(), m.Addr(), m.Device())
	}
	m.Retain()
	wantError(t, g.FreePinned(m), ErrInUse)
	m.Release()
	wantError(t, g.UnregisterHost(m), nil, "not what was given out")
	if err := g.FreePinned(m); err != nil {
		t.Error(err)
	}
	wantError(t, g.FreePinned(m), nil, "given back before")
	_, err = g.AllocPinned(-1)
	wantError(t, err, nil, "AllocPinned(-1)")
	f.fail("hostRegister", codeOutOfMemory)
	_, err = g.AllocPinned(8)
	wantError(t, err, ErrNoMemory, "AllocPinned of 8 bytes")
	f.fail("hostRegister", 0)
	f.fail("hostDeviceAddr", 999)
	_, err = g.AllocPinned(8)
	wantError(t, err, nil, "hostDeviceAddr")
	f.fail("hostDeviceAddr", 0)
	if _, err := g.AllocPinned(8); err != nil { // left for Close
		t.Error(err)
	}
}

// TestPinnedMemoryOutlivesItsBackend: memory that was allocated before Close can be read afterwards. It is unmapped with its last Mem.
func TestPinnedMemoryOutlivesItsBackend(t *testing.T) {
	f := newFake(1)
	g := open(t, f)
	m, err := g.AllocPinned(100)
	if err != nil {
		t.Fatal(err)
	}
	m.Host()[99] = 7
	at := m.Addr()
	if !mapped(t, at) {
		t.Fatalf("nothing is mapped at %#x", at)
	}
	if err := g.Close(); err != nil {
		t.Fatal(err)
	}
	if l := f.leaks(); len(l) > 0 {
		t.Errorf("left behind: %v", l)
	}
	if got := m.Host()[99]; got != 7 {
		t.Errorf("%d in the last byte, want 7", got)
	}
	runtime.KeepAlive(m.owner)
	m = Mem{}
	for n := 0; mapped(t, at); n++ {
		if runtime.GC(); n == 1000 {
			t.Fatal("the memory is still mapped")
		}
	}
}

// mapped reports whether shared memory without a file is mapped at addr.
func mapped(t *testing.T, addr uint64) bool {
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(maps)) {
		if strings.HasPrefix(line, fmt.Sprintf("%x-", addr)) {
			return strings.Contains(line, "/dev/zero")
		}
	}
	return false
}

type counter struct{ n int }

func (c *counter) Retain()  { c.n++ }
func (c *counter) Release() { c.n-- }

func TestRegisterHost(t *testing.T) {
	f := newFake(1)
	g := open(t, f)
	owner := &counter{}
	shared := Bytes(mmap(4096)).WithOwner(owner)
	m, err := g.RegisterHost(shared)
	if err != nil {
		t.Fatal(err)
	}
	page, err := g.AllocPinned(8)
	if err != nil {
		t.Fatal(err)
	}
	if !g.Pinned(m.Sub(8, 8)) || !g.Pinned(page) || g.Pinned(shared) || g.Pinned(Bytes(make([]byte, 8))) {
		t.Error("Pinned does not know what is pinned")
	}
	m.Retain()
	if owner.n != 1 {
		t.Errorf("the owner is held %d times, want 1", owner.n)
	}
	wantError(t, g.UnregisterHost(m), ErrInUse)
	m.Release()
	if err := g.UnregisterHost(m); err != nil || owner.n != 0 {
		t.Errorf("%v, held %d times", err, owner.n)
	}
	_, err = g.RegisterHost(At(nil, 8, Device{GPU, 0}, nil))
	wantError(t, err, nil, "want host memory")
	f.fail("hostRegister", 712)
	_, err = g.RegisterHost(shared)
	wantError(t, err, nil, "RegisterHost of 4096 bytes", "FAKE_712")
}

func TestStreamFlags(t *testing.T) {
	f := newFake(1)
	g := open(t, f)
	s, _ := g.NewStream()
	waiter, _ := g.NewStream()
	e, _ := g.NewEvent()
	page, err := g.RegisterHost(Bytes(mmap(4096)))
	if err != nil {
		t.Fatal(err)
	}
	flag := page.Sub(128, 4)
	if g.MayBlock() {
		t.Error("streams may wait for the CPU before one was told to")
	}
	if err := errors.Join(g.WaitFlag(waiter, flag, 7), e.Record(waiter)); err != nil {
		t.Fatal(err)
	}
	query(t, e, false)
	if !g.MayBlock() {
		t.Error("a stream waits for the CPU, and it is not known")
	}
	if err := errors.Join(g.WriteFlag(s, flag, 7), e.Sync(t.Context())); err != nil {
		t.Fatal(err)
	}
	if v := Slice([]uint32{7}).Host(); string(flag.Host()) != string(v) {
		t.Errorf("the word is %v", flag.Host())
	}
	dev, _ := g.Alloc(64)
	if err := errors.Join(g.WriteFlag(s, dev, 1), e.Record(s), e.Sync(t.Context()), e.Close()); err != nil {
		t.Error(err)
	}
	for _, without := range []bool{false, true} { // batches
		f.noBatches = without
		clear(page.Host())
		var l []FlagWrite
		for i := range 6 {
			l = append(l, FlagWrite{page.Sub(64*i, 4), uint32(i + 1)})
		}
		if err := g.WriteFlags(s, append(l, FlagWrite{page, 9})); err != nil { // the first one again
			t.Fatal(err)
		}
		settle(t, g, s)
		for i := range l {
			if v := word(uintptr(l[i].Word.Ptr())).Load(); v != l[i].V && i > 0 || i == 0 && v != 9 {
				t.Errorf("without batches: %t: word %d is %d", without, i, v)
			}
		}
	}
	wantError(t, g.WriteFlags(s, []FlagWrite{{page, 1}, {page.Sub(2, 4), 1}}), nil, "aligned to 4")
	from, _ := g.Alloc(64)
	pinned, err := g.AllocPinned(64)
	if err != nil {
		t.Fatal(err)
	}
	for _, src := range []Mem{from, pinned} {
		for _, without := range []bool{false, true} {
			f.noBatches = without
			clear(page.Host())
			l := []FlagWrite{{page, 1}, {page.Sub(64, 4), 2}, {page.Sub(128, 4), 3}}
			release := f.hold(s)
			if err := g.CopyFlags(dev, src, s, l); err != nil {
				t.Fatal(err)
			}
			if v := word(uintptr(page.Ptr())).Load(); v != 0 {
				t.Error("a word was written before the copy")
			}
			release()
			settle(t, g, s)
			for i := range l {
				if v := word(uintptr(l[i].Word.Ptr())).Load(); v != l[i].V {
					t.Errorf("without batches: %t: word %d is %d", without, i, v)
				}
			}
			var many []FlagWrite // more than can be written with the copy
			for i := range len(wordWrites{}.addrs) + 1 {
				many = append(many, FlagWrite{page.Sub(4*i, 4), uint32(10 + i)})
			}
			if err := g.CopyFlags(dev, src, s, many); err != nil {
				t.Fatal(err)
			}
			settle(t, g, s)
			for i := range many {
				if v := word(uintptr(many[i].Word.Ptr())).Load(); v != many[i].V {
					t.Errorf("without batches: %t: of %d words word %d is %d", without, len(many), i, v)
				}
			}
		}
		f.captured.Store(f.stream(s))
		wantError(t, g.CopyFlags(dev, src, s, []FlagWrite{{page, 1}}), ErrUnsupported, "captured into a graph")
		f.captured.Store(nil)
	}
	clear(page.Host())
	f.fail("copyAsync", codeNotSupported) // not the writes
	wantError(t, g.CopyFlags(dev, from, s, []FlagWrite{{page, 1}, {page.Sub(64, 4), 2}}), ErrUnsupported, "copyAsync")
	f.fail("copyAsync", 0)
	if settle(t, g, s); word(uintptr(page.Ptr())).Load() != 0 {
		t.Error("a word was written behind a copy that has failed")
	}
	wantError(t, g.CopyFlags(dev, from, s, []FlagWrite{{page.Sub(2, 4), 1}}), nil, "aligned to 4")
	wantError(t, g.CopyFlags(dev, from.Sub(0, 3), s, []FlagWrite{{page, 1}}), nil, "of 3 bytes into 64")
	wantError(t, g.WriteFlag(s, page.Sub(2, 4), 1), nil, "aligned to 4")
	wantError(t, g.WriteFlag(s, page.Sub(0, 2), 1), nil, "2 bytes")
	wantError(t, g.WaitFlag(s, Slice(make([]uint64, 1)), 1), ErrWrongDevice, "neither pinned nor registered")
}

// TestWaitBits: a stream goes on when one of the bits is there, whichever half of the word it
// is in, and WriteFlag changes one half only.
func TestWaitBits(t *testing.T) {
	f := newFake(1)
	g := open(t, f)
	s, err := g.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	page, err := g.AllocPinned(16)
	if err != nil {
		t.Fatal(err)
	}
	word := counterAt(uintptr(page.Ptr()))
	for _, bit := range []int64{1, 1 << 32} {
		word.Store(2)
		if err := g.WaitBits(s, page, 1<<32|1); err != nil {
			t.Fatal(err)
		}
		if !g.MayBlock() {
			t.Error("a stream waits for the CPU, and it is not known")
		}
		for f.waits.Load() == 0 {
			clock.Sleep(minPause)
		}
		if err := f.streamQueryIn(g, s); !notReady(err) {
			t.Errorf("the stream does not wait: %v", err)
		}
		word.Store(2 | bit)
		settle(t, g, s)
	}
	if err := g.WriteFlag(s, page, 6); err != nil {
		t.Fatal(err)
	}
	settle(t, g, s)
	if v := word.Load(); v != 1<<32|6 {
		t.Errorf("the word is %#x", v)
	}
	for _, c := range []bool{false, true} {
		if c {
			f.captured.Store(f.stream(s))
		}
		if yes, err := g.Capturing(s); yes != c || err != nil {
			t.Errorf("capturing: %t, %v, want %t", yes, err, c)
		}
	}
	f.captured.Store(nil)
	wantError(t, g.WaitBits(s, page.Sub(4, 8), 1), nil, "aligned to 8")
	wantError(t, g.WaitBits(s, page.Sub(0, 4), 1), nil, "want 8 bytes")
	wantError(t, g.WaitBits(s, Slice([]uint64{0}), 1), ErrWrongDevice, "neither pinned nor registered")
}

func TestExportImport(t *testing.T) {
	here, there := newFake(1), newFake(2)
	there.exported = here
	a, b := open(t, here), open(t, there)
	m, _ := a.Alloc(8192)
	e, err := a.Export(m.Sub(100, 200))
	if err != nil {
		t.Fatal(err)
	}
	if e.Base != m.Addr() || e.Size != 8192 || e.Offset != 100 || e.Allocation == 0 {
		t.Errorf("%+v", e)
	}
	if err := a.Copy(m.Sub(100, 5), Bytes([]byte("hello"))); err != nil {
		t.Fatal(err)
	}
	far, err := b.Import(e)
	if err != nil {
		t.Fatal(err)
	}
	again, err := b.Import(e)
	if err != nil || again.Ptr() != far.Ptr() {
		t.Fatalf("the second import: %v", err)
	}
	if far.Device() != b.Device() || far.Len() != 8192 {
		t.Errorf("%d bytes on %s", far.Len(), far.Device())
	}
	got := make([]byte, 5)
	if err := b.Copy(Bytes(got), far.Sub(e.Offset, 5)); err != nil || string(got) != "hello" {
		t.Errorf("%q, %v", got, err)
	}
	wantError(t, a.Copy(Bytes(got), far.Sub(0, 5)), ErrWrongDevice) // mapped into the other one
	if err := errors.Join(b.CloseImport(again), b.CloseImport(far)); err != nil {
		t.Error(err)
	}
	wantError(t, b.CloseImport(far), nil, "closed before")
	wantError(t, b.CloseImport(m), nil, "not what Import returned")

	big := e
	big.Size = 1 << 20
	_, err = b.Import(big)
	wantError(t, err, ErrNotExportable, "the peer says 1048576 bytes, the allocation has 8192")
	if err := a.Free(m); err != nil {
		t.Error(err)
	}
	_, err = b.Import(e)
	wantError(t, err, ErrNotExportable, "the handle is stale")
	_, err = b.Import(Export{})
	wantError(t, err, nil, "Import of 0 bytes")
	_, err = a.Export(At(pointer(1<<20), 8, a.Device(), nil))
	wantError(t, err, nil, "freed memory", "addressRange")
}

// TestHandleAgain: the driver may give a new allocation the handle of a freed one. A mapping of the freed one is
// not used for the new one: Import calls the driver.
func TestHandleAgain(t *testing.T) {
	here, there := newFake(1), newFake(2)
	there.exported = here
	a, b := open(t, here), open(t, there)
	m, _ := a.Alloc(8192)
	e, err := a.Export(m)
	if err != nil {
		t.Fatal(err)
	}
	far, err := b.Import(e)
	if err = errors.Join(err, a.Free(m)); err != nil {
		t.Fatal(err)
	}
	next := e
	next.Allocation++
	_, err = b.Import(next)
	wantError(t, err, ErrNotExportable, "the handle is stale")
	if err := b.CloseImport(far); err != nil {
		t.Error(err)
	}
}

func TestExportErrors(t *testing.T) {
	f := newFake(1)
	g := open(t, f)
	m, _ := g.Alloc(8192)
	_, err := g.Export(Bytes(make([]byte, 4)))
	wantError(t, err, ErrWrongDevice)
	_, err = g.Export(At(m.Ptr(), 8193, g.Device(), nil))
	wantError(t, err, ErrNotExportable, "reach beyond their allocation of 8192")
	f.fail("ipcExport", codeInvalidValue)
	_, err = g.Export(m)
	wantError(t, err, ErrNotExportable, "Export of 8192 bytes", "ipcExport")
	f.fail("ipcExport", codeNotSupported)
	_, err = g.Export(m)
	wantError(t, err, ErrUnsupported)
	f.fail("bufferID", 999)
	_, err = g.Export(m)
	wantError(t, err, nil, "bufferID")
}

func TestDMABuf(t *testing.T) {
	f := newFake(1)
	g := open(t, f)
	m, _ := g.Alloc(8192)
	fd, off, err := g.ExportDMABuf(m.Sub(4100, 8))
	if err != nil || fd != 99 || off != 4 {
		t.Errorf("fd %d, offset %d, %v", fd, off, err)
	}
	for _, c := range []struct{ off, n, want int }{{0, 4096, 4096}, {0, 4097, 8192}, {4095, 1, 4096}, {4095, 2, 8192}, {0, 8192, 8192}} {
		if _, _, err := g.ExportDMABuf(m.Sub(c.off, c.n)); err != nil || f.buffer != c.want {
			t.Errorf("%d bytes from %d are exported as %d, want %d; %v", c.n, c.off, f.buffer, c.want, err)
		}
	}
	f.fail("dmabuf", codeNotSupported)
	_, _, err = g.ExportDMABuf(m)
	wantError(t, err, ErrUnsupported, "dmabuf")
	f.fail("dmabuf", codeInvalidValue)
	_, _, err = g.ExportDMABuf(m)
	wantError(t, err, ErrNotExportable)
	_, _, err = g.ExportDMABuf(Bytes(make([]byte, 8)))
	wantError(t, err, ErrWrongDevice)
	g.info.DMABuf = false
	_, _, err = g.ExportDMABuf(m)
	wantError(t, err, ErrUnsupported, "open kernel modules")
}

// TestWaitCount: a stream goes on when the number is there, or the upper half of the word is not 0.
func TestWaitCount(t *testing.T) {
	f := newFake(1)
	g := open(t, f)
	s, err := g.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	page, err := g.AllocPinned(16)
	if err != nil {
		t.Fatal(err)
	}
	word := counterAt(uintptr(page.Ptr()))
	for _, v := range []int64{7, 8, 1 << 31, 1 << 32} {
		word.Store(6)
		if err := g.WaitCount(s, page, 7); err != nil {
			t.Fatal(err)
		}
		for f.waits.Load() == 0 {
			clock.Sleep(minPause)
		}
		if err := f.streamQueryIn(g, s); !notReady(err) {
			t.Errorf("the stream does not wait: %v", err)
		}
		word.Store(v)
		settle(t, g, s)
	}
	wantError(t, g.WaitCount(s, page.Sub(4, 8), 1), nil, "aligned to 8")
	wantError(t, g.WaitCount(s, Slice([]uint64{0}), 1), ErrWrongDevice, "neither pinned nor registered")
}
