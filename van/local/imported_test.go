package local

import (
	"encoding/binary"
	"errors"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/internal/memfd"
	"github.com/stepaf/stepaf-go/tests/inproc"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/hostmem"
)

// mapsPeer makes a link whose peer is this process.
func mapsPeer(t *testing.T) *inLink {
	t.Helper()
	v := newNode(t, inproc.NewNetwork(), 8, nil)
	v.rx.mapsMemory = true
	source, err := openRemote(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(source.close)
	l := &inLink{c: &v.rx, from: &inPeer{id: 9}}
	l.source = source
	t.Cleanup(func() { l.imported.close() })
	return l
}

// described is the record of an allocation.
func described(addr, size, name uint64, fd int) []byte {
	b := make([]byte, allocationLen)
	for i, n := range []uint64{addr, size, name, uint64(fd)} {
		binary.LittleEndian.PutUint64(b[recordHead+8*i:], n)
	}
	return b
}

// TestDescribedMemory: a peer's allocation is mapped if it is the file that the record names, sealed and of that length. Memory
// that is not mapped is no error: its values are copied.
func TestDescribedMemory(t *testing.T) {
	mem, err := hostmem.Alloc(1 << 16)
	if err != nil {
		t.Fatal(err)
	}
	defer hostmem.Free(mem)
	file := mem.Owner().(*hostmem.Allocation).Export(true)
	unsealed, err := unix.MemfdCreate("unsealed", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(unsealed)
	if err := unix.Ftruncate(unsealed, 1<<16); err != nil {
		t.Fatal(err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(unsealed, &st); err != nil {
		t.Fatal(err)
	}
	sparse, err := unix.MemfdCreate("sparse", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(sparse)
	if err := unix.Ftruncate(sparse, 1<<16); err != nil {
		t.Fatal(err)
	}
	if _, err := unix.FcntlInt(uintptr(sparse), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK); err != nil {
		t.Fatal(err)
	}
	var holes unix.Stat_t
	if err := unix.Fstat(sparse, &holes); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name   string
		record []byte
		want   bool // it is mapped
		bad    bool // the peer violates the protocol
	}{
		{"an allocation", described(mem.Addr(), 1<<16, file.Inode, file.FD), true, false},
		{"another length", described(mem.Addr(), 1<<17, file.Inode, file.FD), false, false},
		{"another file", described(mem.Addr(), 1<<16, file.Inode+1, file.FD), false, false},
		{"no file", described(mem.Addr(), 1<<16, file.Inode, 1<<20), false, false},
		{"a file that can shrink", described(mem.Addr(), 1<<16, st.Ino, unsealed), false, false},
		{"a file without memory", described(mem.Addr(), 1<<16, holes.Ino, sparse), false, false},
		{"address 0", described(0, 1<<16, file.Inode, file.FD), false, true},
		{"too long", described(mem.Addr(), 1<<60, file.Inode, file.FD), false, true},
		{"no descriptor", described(mem.Addr(), 1<<16, file.Inode, -1), false, true},
		{"a short record", described(mem.Addr(), 1<<16, file.Inode, file.FD)[:recordHead], false, true},
	} {
		l := mapsPeer(t)
		err := l.recvAllocation(c.record)
		if got := l.imported.find(mem.Addr(), 100) != nil; got != c.want || (err != nil) != c.bad || err != nil && !errors.Is(err, van.ErrMalformed) {
			t.Errorf("%s: mapped %t, %v; want %t, and an error %t", c.name, got, err, c.want, c.bad)
		}
	}
	l := mapsPeer(t)
	for range 2 {
		if err := l.recvAllocation(described(mem.Addr(), 1<<16, file.Inode, file.FD)); err != nil || len(l.imported.list) != 1 {
			t.Errorf("%d allocations, %v; want 1", len(l.imported.list), err)
		}
	}
	for _, c := range []struct {
		addr uint64
		n    int
		want bool
	}{{mem.Addr(), 1 << 16, true}, {mem.Addr() + 1<<16 - 1, 1, true}, {mem.Addr() + 1<<16 - 1, 2, false}, {mem.Addr() - 1, 1, false}, {1<<64 - 1, 1, false}, {mem.Addr(), 1 << 20, false}} {
		if got := l.imported.find(c.addr, c.n) != nil; got != c.want {
			t.Errorf("%d bytes at %#x are mapped: %t, want %t", c.n, c.addr, got, c.want)
		}
	}
	if err := l.recvAllocation(described(mem.Addr(), 0, 0, 0)); err != nil || len(l.imported.list) != 0 {
		t.Errorf("freed: %d allocations, %v", len(l.imported.list), err)
	}
	half := described(mem.Addr()+1<<15, 1<<16, file.Inode, file.FD) // other memory, which overlaps the former one
	for _, b := range [][]byte{described(mem.Addr(), 1<<16, file.Inode, file.FD), half} {
		if err := l.recvAllocation(b); err != nil {
			t.Fatal(err)
		}
	}
	if a := l.imported.find(mem.Addr()+1<<15, 1); len(l.imported.list) != 1 || a == nil || a.addr != mem.Addr()+1<<15 {
		t.Errorf("%d allocations, want the last one only", len(l.imported.list))
	}
	empty := &inbound{in: l}
	empty.rec.parts[partVals] = part{form: partMapped, addr: mem.Addr() + 1<<15 + 1<<16}
	if l.imported.findMapped(empty); len(empty.uses) > 0 {
		t.Error("a value of length 0 uses memory")
	}
	l.c.mapsMemory = false
	if err := l.recvAllocation(described(mem.Addr(), 1<<16, file.Inode, file.FD)); !errors.Is(err, van.ErrMalformed) {
		t.Errorf("without STEPAF_SHM_MAP: %v", err)
	}
}

// TestFullList: a peer with a full list learns of no further allocation, and uses none of which it knows a former file.
func TestFullList(t *testing.T) {
	mem, err := hostmem.Alloc(1 << 16)
	if err != nil {
		t.Fatal(err)
	}
	defer hostmem.Free(mem)
	a := mem.Owner().(*hostmem.Allocation)
	l := &outLink{}
	l.queue.put(&queued{}) // later records wait
	s := exportedAllocations{l: l, inodes: map[uint64]uint64{}}
	for i := range uint64(maxImportedFiles) {
		s.inodes[i] = i
	}
	if s.has(mem) || s.export(a, false) {
		t.Error("one more allocation is described")
	}
	delete(s.inodes, 0)
	s.inodes[mem.Addr()] = a.Export(false).Inode + 1 // of a former allocation
	if s.has(mem) {
		t.Error("the peer uses the former file")
	}
}

// TestNamedMemory: memory for answers belongs to the pulls of the next request, if it is mapped and has the length of the pull.
func TestNamedMemory(t *testing.T) {
	fd, err := memfd.New(1 << 16)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		t.Fatal(err)
	}
	const addr = 1 << 40
	named := func(ts int32, count uint32, entries ...uint64) []byte {
		le := binary.LittleEndian
		b := make([]byte, recordHead)
		b = le.AppendUint32(b, 3)
		b = le.AppendUint32(b, 4)
		b = le.AppendUint32(b, uint32(ts))
		b = le.AppendUint32(b, count)
		for i := 0; i < len(entries); i += 3 {
			b = le.AppendUint32(b, uint32(entries[i]))
			b = le.AppendUint32(b, uint32(entries[i+1]))
			b = le.AppendUint64(b, entries[i+2])
		}
		return b
	}
	for _, c := range []struct {
		name   string
		record []byte
		want   int    // bytes of memory for the answer
		bad    string // in the error
	}{
		{"the pull", named(7, 1, 1, 500, addr+100), 500, ""},
		{"the push", named(7, 1, 0, 500, addr), 0, ""},
		{"no part", named(7, 1, 1<<20, 500, addr), 0, ""},
		{"another request", named(8, 1, 1, 500, addr), 0, ""},
		{"another length", named(7, 1, 1, 400, addr), 0, ""},
		{"not mapped", named(7, 1, 1, 500, addr+1<<16-499), 0, ""},
		{"no bytes", named(7, 1, 1, 0, addr), 0, ""},
		{"too many entries for the record", named(7, 2, 1, 500, addr), 0, "record.entries"},
		{"too many entries", named(7, maxPullMemory+1), 0, "record.entries"},
		{"negative", named(7, 1<<32-1), 0, "record.entries"},
		{"too short", make([]byte, recordHead), 0, "record.length"},
	} {
		l := mapsPeer(t)
		if err := l.recvAllocation(described(addr, 1<<16, st.Ino, fd)); err != nil || len(l.imported.list) != 1 {
			t.Fatal(err, len(l.imported.list))
		}
		err := l.recvPullMemory(c.record)
		if c.bad == "" && err != nil || c.bad != "" && (err == nil || !strings.Contains(err.Error(), c.bad)) {
			t.Errorf("%s: %v, want %q", c.name, err, c.bad)
		}
		p := &inbound{in: l, from: l.from}
		p.msg.AppID, p.msg.CustomerID, p.msg.Timestamp, p.msg.Request = 3, 4, 7, true
		p.msg.Parts = []van.Part{{Push: true, Len: 500}, {Len: 500}}
		l.imported.setPullMemory(p)
		if got := p.msg.Parts[1].Into.Len(); got != c.want || p.msg.Parts[0].Into.Len() > 0 || len(l.imported.pulls) > 0 {
			t.Errorf("%s: %d bytes, want %d", c.name, got, c.want)
		}
		if used := len(p.uses) > 0; used != (c.want > 0) || l.imported.list[0].users.Load() != 1+int32(len(p.uses)) {
			t.Errorf("%s: %d users of the memory, the message uses it %d times", c.name, l.imported.list[0].users.Load(), len(p.uses))
		}
		for _, m := range p.uses {
			m.Release()
		}
	}
}
