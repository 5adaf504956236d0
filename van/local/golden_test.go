package local

import (
	"encoding/binary"
	"fmt"
	"io"
	"math/rand/v2"
	"testing"

	"github.com/stepaf/stepaf-go/internal/memfd"
	"github.com/stepaf/stepaf-go/tests/golden"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// TestParsersGolden: results of parsing arbitrary records, exports, tokens and lengths.
func TestParsersGolden(t *testing.T) {
	golden.Check(t, "parsers", 40, func(rng *rand.Rand, w io.Writer) {
		var lens []int
		for range []int{0, 2, 3}[rng.IntN(3)] {
			lens = append(lens, []int{0, 8, 64, 100, 5000, streamFrom - 1, streamFrom, 1 << 20}[rng.IntN(8)])
		}
		m := message(lens...)
		large := []uint32{partPinned, partStream}[rng.IntN(2)]
		var r record
		x := &backend.Shared{Export: backend.Export{Allocation: 7, Base: 4096, Size: 1 << 20, Offset: 512}}
		for i := range rng.IntN(4) {
			x.Segments = append(x.Segments, backend.Segment{ID: uint64(i), Size: 4096, Offset: i, Len: 100})
		}
		r.segments = len(x.Segments)
		size := r.plan(m, large)
		fmt.Fprintln(w, size, r.frames, r.forms, r.pins(), r.streams(), r.inline())
		good := make([]byte, size)
		r.slot, r.gen = uint32(rng.IntN(slotCount)), 9
		for i := range r.parts {
			if p := &r.parts[i]; p.form == partPinned {
				p.addr = 0
			}
		}
		if err := r.put(good, size, m, nil, nil); err != nil {
			t.Fatal(err)
		}
		for i := range r.parts { // addresses differ from run to run
			binary.LittleEndian.PutUint64(good[16+partHead*i:], uint64(i)*1<<20)
		}
		if rng.IntN(4) == 0 {
			good[4] = kindRest
		}
		if rng.IntN(3) == 0 && len(good) >= 16+3*partHead { // values on the device
			binary.LittleEndian.PutUint32(good[16+partVals*partHead+12:], partDevice)
			named := make([]byte, exportSize(len(x.Segments)))
			putShared(named, x)
			fmt.Fprintf(w, "%x\n", named)
			good = append(good, named...)
		}
		for range 60 {
			b := golden.Mangle(rng, good)
			var got record
			err := got.parse(b)
			fmt.Fprintln(w, golden.Err(err))
			if err == nil {
				fmt.Fprintln(w, got)
			}
			if len(b) >= 8 {
				size, kind, err := peek(b, len(b)-rng.IntN(3)*32)
				fmt.Fprintln(w, size, kind, golden.Err(err))
			}
			e := make([]byte, van.ExportLen)
			van.PutExport(e, &x.Export)
			e = golden.Mangle(rng, e)
			if len(e) >= van.ExportLen {
				got, err := van.ParseExport(e, int(int32(golden.Edge(rng, 1<<20-512))))
				fmt.Fprintln(w, got.Allocation, got.Base, got.Size, got.Offset, golden.Err(err))
			}
			n, err := segmentsIn(e)
			fmt.Fprintln(w, n, golden.Err(err))
			own := token{uid: 5, host: [8]byte{1}, space: [8]byte{2}, name: [16]byte{3}}
			other, ok := parseToken(golden.Mangle(rng, own.encode()))
			fmt.Fprintln(w, other, ok, own.reach(&other) == "", own.reach(&token{host: own.host, space: own.space, uid: uint32(rng.IntN(7))}) == "")
			at := int(golden.Edge(rng, minBlock) & (1<<31 - 1))
			fmt.Fprintln(w, blockLen(at), align(at), stallFor(at))
			long := make([]byte, rng.IntN(maxChunk))
			c := make([]byte, chunkHead+align(len(long)))
			fmt.Fprintln(w, putChunk(c, long), c[4], binary.LittleEndian.Uint32(c[8:]))
		}
	})
}

// TestPinsModel: the pinned, queued and counted values of requests, against lists.
func TestPinsModel(t *testing.T) {
	worker, _ := pair(t)
	fd, err := memfd.New(segmentLen)
	if err != nil {
		t.Fatal(err)
	}
	defer closeAll([]int{fd})
	for seed := range uint64(8) {
		seg, err := mapSegment(fd)
		if err != nil {
			t.Fatal(err)
		}
		rng := rand.New(rand.NewPCG(seed, 3))
		var p pins
		p.init(seg, &worker.tx)
		seg.acked().Store(0)
		var q sendQueue
		before := worker.stats.pinned.Load()
		type entry struct {
			of    request
			bytes int64
			sent  *counted
			slot  uint32
			back  bool // released
			pins  bool
		}
		var pinned, queue []*entry
		acked := uint32(0)
		make1 := func() (*entry, pin) {
			e := &entry{of: request{true, 1, int32(rng.IntN(2)), int32(rng.IntN(6))}, bytes: int64(1 + rng.IntN(1000)), sent: &counted{}}
			if rng.IntN(5) == 0 {
				e.of = request{}
			}
			return e, pin{of: e.of, bytes: e.bytes, done: e.sent, device: rng.IntN(3) == 0, seq: uint64(rng.IntN(3))}
		}
		check := func(what string) {
			t.Helper()
			sum, busy, busyBytes := int64(0), 0, int64(0)
			for _, e := range queue {
				sum += e.bytes
			}
			for _, e := range pinned {
				busy++
				if !e.back {
					busyBytes += e.bytes
				}
			}
			if p.bytes != busyBytes || len(p.free) != slotCount-busy || p.idle() != (busy == 0) || worker.stats.pinned.Load()-before != int64(busy) {
				t.Fatalf("seed %d, %s: %d bytes pinned in %d slots, %d counted, want %d in %d", seed, what, p.bytes, slotCount-len(p.free), worker.stats.pinned.Load()-before, busyBytes, busy)
			}
			if len(q.list) != len(queue) || q.bytes != sum {
				t.Fatalf("seed %d, %s: %d queued of %d bytes, want %d of %d", seed, what, len(q.list), q.bytes, len(queue), sum)
			}
			n := 0
			for r, k := range q.requests {
				if r.is {
					n += k
				}
			}
			want := 0
			for _, e := range queue {
				if e.pins && e.of.is {
					want++
				}
			}
			if n != want {
				t.Fatalf("seed %d, %s: %d requests counted, want %d", seed, what, n, want)
			}
		}
		for range 400 {
			switch rng.IntN(7) {
			case 0, 1:
				if len(p.free) == 0 {
					break
				}
				e, a := make1()
				b := make([]byte, recordHead)
				exported := worker.copies.exported.Load()
				if a.device {
					worker.copies.exported.Add(1)
				}
				p.add(b, a)
				e.slot = binary.LittleEndian.Uint32(b[8:])
				if gen := binary.LittleEndian.Uint32(b[12:]); gen == 0 || seg.gen(e.slot).Load() != gen {
					t.Fatalf("generation %d, and %d in the slot", gen, seg.gen(e.slot).Load())
				}
				if a.device != (worker.copies.exported.Load() == exported+1) {
					t.Fatal("the count of exported values has changed")
				}
				pinned = append(pinned, e)
				check("pin")
			case 2: // the peer acknowledges some
				for range rng.IntN(4) {
					if len(pinned) == 0 {
						break
					}
					i := rng.IntN(len(pinned))
					seg.ack(acked).Store(pinned[i].slot)
					acked++
					pinned[i].back = true
					pinned[i].sent.want = 1
					pinned = append(pinned[:i], pinned[i+1:]...)
				}
				seg.acked().Store(acked)
				if err := p.collect(); err != nil {
					t.Fatal(err)
				}
				check("acknowledge")
			case 3: // canceled
				r := van.Requests{App: 1, Customer: int32(rng.IntN(2)), First: int32(rng.IntN(6)), Count: int32(rng.IntN(4))}
				p.recall(&r)
				for _, e := range pinned {
					if e.of.in(&r) && !e.back {
						e.back, e.sent.want = true, 1
						if seg.gen(e.slot).Load() != 0 {
							t.Fatal("memory is given back that may still be read")
						}
					}
				}
				q.recall(&r)
				rest := queue[:0]
				for _, e := range queue {
					if e.pins && e.of.in(&r) {
						e.sent.want = 1
					} else {
						rest = append(rest, e)
					}
				}
				queue = rest
				check("recall")
			case 4, 5:
				e, a := make1()
				x := &queued{bytes: make([]byte, rng.IntN(50)), pin: a}
				if e.pins = rng.IntN(3) > 0; e.pins {
					x.rec.forms = 1 << []int{partPinned, partStream, partDevice}[rng.IntN(3)]
					e.bytes += int64(len(x.bytes))
				} else {
					e.bytes, e.sent.want = int64(len(x.bytes)), 1 // it has been copied
				}
				q.put(x)
				queue = append(queue, e)
				check("queue")
			case 6:
				if len(queue) > 0 {
					if q.list[0].pin.done != nil {
						q.list[0].pin.done = nil
					}
					q.take()
					queue = queue[1:]
					check("take")
				}
			}
			for _, l := range [][]*entry{pinned, queue} {
				for _, e := range l {
					if e.sent.n != e.sent.want {
						t.Fatalf("seed %d: Done was called %d times, want %d", seed, e.sent.n, e.sent.want)
					}
				}
			}
			first := uint64(100)
			for _, s := range p.slots {
				if s.busy && s.seq > 0 {
					first = min(first, s.seq)
				}
			}
			if got := p.since(100); got != first {
				t.Fatalf("since %d, want %d", got, first)
			}
		}
		if n := p.close(); n != len(pinned) {
			t.Errorf("%d were pinned at the end, want %d", n, len(pinned))
		}
		if n := q.close(); n != len(queue) {
			t.Errorf("%d were queued at the end, want %d", n, len(queue))
		}
		for _, e := range pinned {
			if e.sent.n != 1 {
				t.Errorf("Done was called %d times at the end", e.sent.n)
			}
		}
		if worker.stats.pinned.Load() != before || p.bytes != 0 || q.bytes != 0 || worker.copies.exported.Load() != 0 {
			t.Errorf("%d pinned, %d and %d bytes, %d exported at the end", worker.stats.pinned.Load()-before, p.bytes, q.bytes, worker.copies.exported.Load())
		}
		seg.unmap()
	}
}

// counted is a van.Completion of one goroutine.
type counted struct{ n, want int }

func (c *counted) Sent() { c.n++ }
