package local

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/internal/memfd"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// message makes a data message with frames of these lengths.
func message(lens ...int) *van.Message {
	m := &van.Message{}
	m.Reset()
	m.Request, m.Push, m.Timestamp, m.Frames = true, true, 7, len(lens)
	for i, n := range lens {
		m.SetFrame(i, backend.Bytes(bytes.Repeat([]byte{byte(i + 1)}, n)))
		m.DataTypes = append(m.DataTypes, van.TypeOther)
	}
	m.DataSize = int32(m.PayloadLen())
	return m
}

func TestRecordRoundTrip(t *testing.T) {
	for _, lens := range [][]int{{}, {0, 0}, {8, 100}, {8, streamFrom - 1}, {8, streamFrom}, {streamFrom, 1 << 20, 8}, {8, 0, 4},
		{streamFrom - 1, streamFrom - 1, streamFrom - 1}} {
		for _, large := range []uint32{partPinned, partStream, partMapped, partInReceiver} {
			m := message(lens...)
			var r, got record
			r.receiverAddr, r.receiverInode = 1<<40, 77
			mixed := large >= partMapped && len(lens) > 0 && lens[0] >= streamFrom // then all long parts are streamed
			size := r.plan(m, large)
			if size > maxRecord || size%recordAlign != 0 {
				t.Fatalf("%v: a record of %d bytes, want at most %d in steps of %d", lens, size, maxRecord, recordAlign)
			}
			b := bytes.Repeat([]byte{0xee}, size)
			r.slot, r.gen = 5, 9
			if err := r.put(b, size, m, nil, nil); err != nil {
				t.Fatal(err)
			}
			n, kind, err := peek(b, size)
			if err != nil || n != size || kind != kindMessage {
				t.Fatalf("%v: peek: %d %d %v", lens, n, kind, err)
			}
			if err := got.parse(b); err != nil {
				t.Fatalf("%v: %v", lens, err)
			}
			if got.frames != len(lens) || got.slot != 5 || got.gen != 9 {
				t.Errorf("%v: %+v", lens, got)
			}
			for i, n := range lens {
				p, want := got.parts[i+1], m.Frame(i)
				form := large
				if mixed || large >= partMapped && i+1 != partVals {
					form = partStream
				}
				switch {
				case p.n != n:
					t.Errorf("%v: frame %d has %d bytes", lens, i, p.n)
				case n < streamFrom && !bytes.Equal(b[p.off:p.off+p.n], want.Host()):
					t.Errorf("%v: frame %d has other bytes", lens, i)
				case n >= streamFrom && p.form != form:
					t.Errorf("%v: frame %d has form %d, want %d", lens, i, p.form, form)
				case p.form == partInReceiver && (got.receiverAddr != 1<<40 || got.receiverInode != 77):
					t.Errorf("%v: placed at %#x in %d", lens, got.receiverAddr, got.receiverInode)
				case p.hasAddress() && p.addr != want.Addr():
					t.Errorf("%v: frame %d is at %#x, want %#x", lens, i, p.addr, want.Addr())
				}
			}
			var meta van.Meta
			p := got.parts[0]
			if err := van.DecodeMeta(b[p.off:p.off+p.n], &meta); err != nil || meta.Timestamp != 7 {
				t.Errorf("%v: meta %v %v", lens, &meta, err)
			}
		}
	}
}

// valid is the record of a message with a value of its own.
func valid(t testing.TB) []byte {
	m := message(8, 100)
	var r record
	b := make([]byte, r.plan(m, partPinned))
	if err := r.put(b, len(b), m, nil, nil); err != nil {
		t.Fatal(err)
	}
	return b
}

func TestParseRefuses(t *testing.T) {
	put := func(off int, v uint32) func(b []byte) {
		return func(b []byte) { binary.LittleEndian.PutUint32(b[off:], v) }
	}
	for _, c := range []struct {
		name   string
		change func(b []byte)
	}{
		{"a chunk", func(b []byte) { b[4] = kindChunk }},
		{"an unknown kind", func(b []byte) { b[4] = 77 }},
		{"one frame", func(b []byte) { b[5] = 1 }},
		{"four frames", func(b []byte) { b[5] = 4 }},
		{"no meta", put(16+8, 0)},
		{"a meta longer than the record", put(16+8, 1000)},
		{"a frame longer than the record", put(16+2*partHead+8, 4096)},
		{"a frame of 4 GiB", put(16+2*partHead+8, 1<<32-1)},
		{"an unknown form", put(16+2*partHead+12, 9)},
		{"a device's memory", put(16+2*partHead+12, partDevice)},
		{"a pinned part without a slot", put(16+2*partHead+12, partPinned)},
	} {
		b := valid(t)
		c.change(b)
		var r record
		if err := r.parse(b); !errors.Is(err, van.ErrMalformed) {
			t.Errorf("%s: %v, want %v", c.name, err, van.ErrMalformed)
		}
	}
	var r record
	for _, n := range []int{0, 1, recordHead - 1} {
		if err := r.parse(make([]byte, n)); !errors.Is(err, van.ErrMalformed) {
			t.Errorf("%d bytes: %v, want %v", n, err, van.ErrMalformed)
		}
	}
}

func TestPeekRefuses(t *testing.T) {
	for _, c := range []struct {
		name  string
		size  uint32
		kind  byte
		avail int
		ok    bool
	}{
		{"smallest message", recordHead, kindMessage, recordHead, true},
		{"largest message", maxRecord, kindMessage, ringLen, true},
		{"smallest chunk", chunkHead, kindChunk, ringLen, true},
		{"rest", recordHead, kindRest, ringLen, true},
		{"no length", 0, kindMessage, ringLen, false},
		{"half a head", recordAlign, kindMessage, ringLen, false},
		{"not aligned", recordHead + 1, kindMessage, ringLen, false},
		{"longer than what has been written", 256, kindMessage, 192, false},
		{"too long", maxRecord + recordAlign, kindMessage, ringLen, false},
		{"chunk too long", chunkHead + maxChunk + recordAlign, kindChunk, ringLen, false},
		{"rest too long", recordHead + recordAlign, kindRest, ringLen, false},
		{"negative", 1<<32 - 64, kindMessage, ringLen, false},
	} {
		b := make([]byte, 64)
		binary.LittleEndian.PutUint32(b, c.size)
		b[4] = c.kind
		if _, _, err := peek(b, c.avail); (err == nil) != c.ok {
			t.Errorf("%s: %v, want success %t", c.name, err, c.ok)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add(valid(f))
	f.Add(make([]byte, recordHead))
	f.Fuzz(func(t *testing.T, b []byte) {
		var r record
		if err := r.parse(b); err != nil {
			if !errors.Is(err, van.ErrMalformed) {
				t.Fatalf("%v, want %v", err, van.ErrMalformed)
			}
			return
		}
		for i := range present(r.frames) {
			if p := r.parts[i]; p.form == partInline && (p.off < recordHead && p.n > 0 || p.off > len(b) || p.n > len(b)-p.off) {
				t.Fatalf("part %d lies at %d to %d of %d bytes", i, p.off, p.off+p.n, len(b))
			}
		}
	})
}

// TestLayout: processes that share a segment may be of two builds, so each number in it stays where
// it is, whole and apart from the others.
func TestLayout(t *testing.T) {
	fd, err := memfd.New(segmentLen)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	s, err := mapSegment(fd)
	if err != nil {
		t.Fatal(err)
	}
	defer s.unmap()
	want := make([]byte, 8192)
	put64 := func(at int, x index64) {
		v := uint64(at)<<40 | 0xf0e0d0c0
		x.Store(v)
		binary.LittleEndian.PutUint64(want[at:], v)
	}
	put32 := func(at int, x index32) {
		v := uint32(at)<<16 | 0xabcd
		x.Store(v)
		binary.LittleEndian.PutUint32(want[at:], v)
	}
	put64(0, s.tail())
	put32(64, s.bye())
	put64(128, s.head())
	put32(192, s.acked())
	put32(256, s.wants())
	for i := range 512 {
		put32(320+4*i, s.ack(uint32(i)))
		put32(320+4*512+4*i, s.gen(uint32(i)))
	}
	for i, b := range s.mem[:8192] {
		if b != want[i] {
			t.Fatalf("byte %d of a segment is %#x, want %#x", i, b, want[i])
		}
	}
	copy(s.at(3), "ring")
	if got := string(s.mem[8192+3:][:4]); got != "ring" {
		t.Errorf("the ring begins with %q, want %q", got, "ring")
	}
}

// TestLongBody: a simple message's body may be as long as a value. A body that is too long with its head is
// refused.
func TestLongBody(t *testing.T) {
	for n, want := range map[uint64]bool{1<<30 + 100: true, math.MaxInt32: true, 0: false, math.MaxInt32 + 1: false} {
		b := make([]byte, recordHead)
		b[4] = kindMessage
		binary.LittleEndian.PutUint32(b[16+8:], uint32(n))
		binary.LittleEndian.PutUint32(b[16+12:], partStream)
		var r record
		if err := r.parse(b); (err == nil) != want || err != nil && !errors.Is(err, van.ErrMalformed) {
			t.Errorf("a message of %d bytes: %v, want it taken: %t", n, err, want)
		}
	}
	worker, _ := pair(t)
	m := &van.Message{}
	m.Reset()
	m.Receiver, m.SimpleApp, m.Request = 8, true, true
	m.Body = make([]byte, math.MaxInt32)
	if err := worker.Send(m); !errors.Is(err, van.ErrInvalid) {
		t.Errorf("error %v, want %v", err, van.ErrInvalid)
	}
}
