package backend

import (
	"bytes"
	"os"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

const page = 4096

// expanded returns memory that is mapped from allocations of these lengths, and unmaps it
// at the end of the test.
func expanded(t *testing.T, f *fakeDriver, g *gpu, sizes ...int) Mem {
	t.Helper()
	base, total := f.expand(sizes...), 0
	for _, n := range sizes {
		at := base + uintptr(total)
		t.Cleanup(func() { // before open's
			if _, ok := f.seg.mapped[at]; ok {
				f.unmap(at)
			}
		})
		total += n
	}
	return At(pointer(base), total, g.Device(), nil)
}

func share(t *testing.T, g *gpu, m Mem) *Shared {
	t.Helper()
	s := &Shared{}
	if err := g.Share(s, m); err != nil {
		t.Fatal(err)
	}
	return s
}

// imports maps all segments of s in g.
func imports(t *testing.T, from, g *gpu, s *Shared) (all []Mem) {
	t.Helper()
	for _, x := range s.Segments {
		fd, err := from.SegmentFile(x)
		if err != nil {
			t.Fatal(err)
		}
		m, err := g.ImportSegment(fd, x.Size)
		_ = unix.Close(fd)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, m)
	}
	return all
}

// TestShareSegments: memory that is mapped from several allocations is a list, with which
// another process reads it; nothing is left open.
func TestShareSegments(t *testing.T) {
	files := descriptors(t)
	t.Cleanup(func() { // last
		if n := descriptors(t); n != files {
			t.Errorf("%d files are open, %d were before", n, files)
		}
	})
	here, there := newFake(1), newFake(2)
	a, b := open(t, here), open(t, there)
	m := expanded(t, here, a, 2*page, page, 3*page)
	want := bytesAt(uintptr(m.Ptr()), m.Len())
	for i := range want {
		want[i] = byte(i * 7 / 5)
	}
	for _, c := range []struct {
		from, n int
		parts   [][2]int // offset and length in each allocation
	}{
		{0, 100, [][2]int{{0, 100}}},
		{2*page - 1, 2, [][2]int{{2*page - 1, 1}, {0, 1}}},
		{100, 5 * page, [][2]int{{100, 2*page - 100}, {0, page}, {0, 2*page + 100}}},
		{3 * page, 3 * page, [][2]int{{0, 3 * page}}},
	} {
		s := share(t, a, m.Sub(c.from, c.n))
		if len(s.Segments) != len(c.parts) || s.Size != 0 {
			t.Fatalf("%d bytes at %d: %+v", c.n, c.from, s)
		}
		far := imports(t, a, b, s)
		var got []byte
		for i, x := range s.Segments {
			if [2]int{x.Offset, x.Len} != c.parts[i] {
				t.Errorf("%d bytes at %d: part %d is %+v, want %v", c.n, c.from, i, x, c.parts[i])
			}
			p := make([]byte, x.Len)
			if err := b.Copy(Bytes(p), far[i].Sub(x.Offset, x.Len)); err != nil {
				t.Fatal(err)
			}
			got = append(got, p...)
		}
		if !bytes.Equal(got, want[c.from:c.from+c.n]) {
			t.Errorf("%d bytes at %d: other values", c.n, c.from)
		}
		for _, x := range far[1:] { // the first is left to Close
			if err := b.CloseImport(x); err != nil {
				t.Error(err)
			}
			wantError(t, b.CloseImport(x), nil, "closed before")
		}
		wantError(t, b.Share(&Shared{}, far[0]), ErrNotExportable, "another process's memory")
	}
	if there.seg.access != 0 {
		t.Errorf("access was given to device %d", there.seg.access)
	}
}

// TestShareKeepsNames: an allocation keeps its name, also for several goroutines, and an allocation at the same
// address after it has another.
func TestShareKeepsNames(t *testing.T) {
	f := newFake(1)
	g := open(t, f)
	m := expanded(t, f, g, page, page)
	first := *share(t, g, m)
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			s := &Shared{}
			for range 50 {
				if err := g.Share(s, m); err != nil || s.Segments[0].ID != first.Segments[0].ID || s.Segments[1].ID != first.Segments[1].ID {
					t.Errorf("%+v, %v", s, err)
				}
			}
		})
	}
	all.Wait()
	second := uintptr(m.Ptr()) + page
	f.unmap(second)
	f.remap(second, page)
	again := share(t, g, m)
	if again.Segments[0] != first.Segments[0] || again.Segments[1].ID == first.Segments[1].ID {
		t.Errorf("%+v was mapped anew, and is %+v", first, again)
	}
	if g.HasSegment(first.Segments[1]) || !g.HasSegment(again.Segments[1]) {
		t.Error("the old allocation is known, or the new one is not")
	}
	_, err := g.SegmentFile(first.Segments[1])
	wantError(t, err, ErrNotExportable, "it was unmapped")

	f.unmap(second)
	if err := g.TidySegments(); err != nil {
		t.Fatal(err)
	}
	if g.HasSegment(again.Segments[1]) || !g.HasSegment(again.Segments[0]) {
		t.Error("after it was unmapped: known, or its neighbour is not")
	}
	f.mu.Lock()
	n := len(f.seg.handles)
	f.mu.Unlock()
	if n != 1 {
		t.Errorf("%d allocations are held, want the one that is mapped", n)
	}
	wantError(t, g.Share(&Shared{}, m), nil, "addressRange") // of the second
}

// TestShareOrdinary: memory of cuMemAlloc is shared as Export does, also where mapped memory
// was before.
func TestShareOrdinary(t *testing.T) {
	f := newFake(1)
	g := open(t, f)
	m, err := g.Alloc(2 * page)
	if err != nil {
		t.Fatal(err)
	}
	e, err := g.Export(m.Sub(8, 8))
	if err != nil {
		t.Fatal(err)
	}
	if s := share(t, g, m.Sub(8, 8)); s.Export != e || len(s.Segments) != 0 {
		t.Errorf("%+v, want %+v", s, e)
	}
	x := expanded(t, f, g, page)
	old := share(t, g, x)
	f.unmap(uintptr(x.Ptr()))
	f.mu.Lock()
	f.mem[uintptr(x.Ptr())] = bytesAt(uintptr(x.Ptr()), page)
	f.mu.Unlock()
	if s := share(t, g, x); len(s.Segments) != 0 || s.Base != x.Addr() {
		t.Errorf("%+v has become %+v", old, s)
	}
	f.mu.Lock()
	delete(f.mem, uintptr(x.Ptr()))
	f.mu.Unlock()
	if n := testing.AllocsPerRun(100, func() { _ = g.Share(old, m) }); n > 0 {
		t.Errorf("%v allocations", n)
	}
}

// TestShareRefuses: for memory with neither a handle nor a descriptor, the error names the setting to change.
func TestShareRefuses(t *testing.T) {
	f := newFake(1)
	g := open(t, f)
	m := expanded(t, f, g, page, page)
	wantError(t, g.Share(&Shared{}, Bytes(make([]byte, 4))), ErrWrongDevice)
	wantError(t, g.Share(&Shared{}, At(m.Ptr(), 0, g.Device(), nil)), ErrWrongDevice)
	f.mu.Lock()
	for _, h := range f.seg.handles {
		h.private = true
	}
	f.mu.Unlock()
	wantError(t, g.Share(&Shared{}, m), ErrNotExportable, "without a file descriptor", "PYTORCH_CUDA_ALLOC_CONF=backend:native")
	pool, _ := g.Alloc(page)
	f.fail("ipcExport", codeInvalidValue)
	wantError(t, g.Share(&Shared{}, pool), ErrNotExportable, "ipcExport", "PYTORCH_CUDA_ALLOC_CONF=backend:native", "cudaMallocAsync")
	f.mu.Lock()
	for _, h := range f.seg.handles {
		h.private = false
	}
	f.mu.Unlock()
	for _, name := range []string{"handleAt", "handleShareable"} {
		f.fail(name, 999)
		wantError(t, g.Share(&Shared{}, m), ErrNotExportable, "Export of 8192 bytes")
		f.fail(name, 0)
	}
	s := share(t, g, m)
	f.fail("handleExport", codeNotSupported)
	_, err := g.SegmentFile(s.Segments[0])
	wantError(t, err, ErrUnsupported, "SegmentFile of 4096 bytes")
}

// TestImportSegmentRefuses: a file that is of no device memory, or of less than the peer
// says, is not mapped, and nothing stays behind.
func TestImportSegmentRefuses(t *testing.T) {
	f := newFake(1)
	g := open(t, f)
	h := f.create(page)
	f.mu.Lock()
	fd := f.seg.handles[h].fd
	f.mu.Unlock()
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name, fails string
		fd, size    int
	}{
		{"no bytes", "", fd, 0},
		{"less than none", "", fd, -1},
		{"of no device memory", "", int(null.Fd()), page},
		{"more than there is", "", fd, 2 * page},
		{"no address space", "addressReserve", fd, page},
		{"not mapped", "memMap", fd, page},
		{"out of reach", "memAccess", fd, page},
		{"unknown", "addressRange", fd, page},
		{"not released", "handleRelease", fd, page},
	} {
		if c.fails != "" {
			f.fail(c.fails, 999)
		}
		_, err := g.ImportSegment(c.fd, c.size)
		wantError(t, err, nil, "ImportSegment of ")
		f.fail(c.fails, 0)
		f.mu.Lock()
		left := f.seg.left()
		if c.fails == "handleRelease" { // which nothing can be done about
			f.seg.drop(h + 1)
		} else if left["allocations"] != 1 {
			t.Errorf("%s: %v are left", c.name, left)
		}
		if left["mappings"] != 0 || left["reservations"] != 0 {
			t.Errorf("%s: %v are left", c.name, left)
		}
		f.mu.Unlock()
	}
	f.mu.Lock()
	f.seg.drop(h)
	f.mu.Unlock()
	_ = null.Close()
}

// TestSegmentsWhileAStreamWaits: nothing is unmapped or released while a stream may wait for
// a message; Close does it.
func TestSegmentsWhileAStreamWaits(t *testing.T) {
	f := newFake(1)
	g := open(t, f)
	m := expanded(t, f, g, page)
	s := share(t, g, m)
	g.blocking.Store(true)
	f.unmap(uintptr(m.Ptr()))
	before := f.times("handleRelease")
	if err := g.TidySegments(); err != nil || g.HasSegment(s.Segments[0]) {
		t.Errorf("%v, or it is still known", err)
	}
	if n := f.times("handleRelease") - before; n != 0 {
		t.Errorf("%d handles were released", n)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.seg.handles) != 1 {
		t.Errorf("%d allocations are held, want 1 until Close", len(f.seg.handles))
	}
}

// TestSharedSegmentsAreBounded: beyond the limit memory is staged, until some is unmapped.
func TestSharedSegmentsAreBounded(t *testing.T) {
	f := newFake(1)
	g := open(t, f)
	m := expanded(t, f, g, page, page)
	share(t, g, m.Sub(0, page))
	full := map[uintptr]*segment{}
	for base, s := range *g.known.Load() {
		full[base] = s
	}
	for i := range maxSegments - 1 {
		full[uintptr(i+1)] = full[uintptr(m.Ptr())]
	}
	g.known.Store(&full)
	f.mu.Lock()
	f.seg.handles[full[1].handle].refs += maxSegments - 1
	f.mu.Unlock()
	if s := share(t, g, m); len(s.Segments) != 2 {
		t.Errorf("%+v", s)
	}
	if n := len(*g.known.Load()); n != 2 {
		t.Errorf("%d are known, want those that are mapped", n)
	}
}
