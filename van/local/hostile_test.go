package local

import (
	"bytes"
	"encoding/binary"
	"slices"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/internal/memfd"
	"github.com/stepaf/stepaf-go/tests/inproc"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// write puts any bytes b into the ring as the sender would.
func (l *outLink) write(b []byte) {
	copy(l.seg.at(l.tail), b)
	l.tail += uint64(len(b))
	l.seg.tail().Store(l.tail)
	l.bell.ring()
}

// writeRecord puts the record of m, whose values export names, into the ring as change leaves it.
// l.mu is held.
func (l *outLink) writeRecord(t *testing.T, m *van.Message, export *backend.Shared, change func([]byte)) {
	t.Helper()
	r := record{segments: len(export.Segments)}
	b := make([]byte, r.plan(m, partStream))
	if err := r.put(b, len(b), m, nil, export); err != nil {
		t.Fatal(err)
	}
	setSlot(b, 0, 1)
	change(b)
	l.write(b)
}

// TestHostileSender: nonsense in the ring ends that link, is counted, and does
// nothing else: the two begin anew.
func TestHostileSender(t *testing.T) {
	for _, c := range []struct {
		name string
		do   func(l *outLink)
	}{
		{"a tail beyond the ring", func(l *outLink) { l.seg.tail().Store(l.tail + ringLen + recordAlign) }},
		{"a message, and a tail beyond the ring", func(l *outLink) {
			b := valid(t)
			copy(l.seg.at(l.tail), b)
			l.seg.tail().Store(l.tail + ringLen + uint64(len(b)))
		}},
		{"a tail that goes back", func(l *outLink) { l.seg.tail().Store(l.tail - recordAlign) }},
		{"a tail that is not aligned", func(l *outLink) { l.seg.tail().Store(l.tail + 1) }},
		{"an empty record", func(l *outLink) { l.write(make([]byte, 128)) }},
		{"a record longer than what is written", func(l *outLink) { l.write(valid(t)[:256]) }},
		{"an unknown kind", func(l *outLink) { b := valid(t); b[4] = 9; l.write(b) }},
		{"garbage", func(l *outLink) { l.write(pattern(3, 4096)) }},
		{"a chunk without a stream", func(l *outLink) {
			b := make([]byte, 128)
			putChunk(b, make([]byte, 64))
			l.write(b)
		}},
		{"a rest without a stream", func(l *outLink) { b := valid(t)[:recordHead]; b[4] = kindRest; l.write(rested(b)) }},
		{"a message within a stream", func(l *outLink) { l.write(streamed(t)); l.write(valid(t)) }},
		{"a chunk longer than its part", func(l *outLink) {
			l.write(streamed(t))
			b := make([]byte, chunkHead+maxChunk)
			putChunk(b, make([]byte, maxChunk))
			l.write(b)
		}},
		{"a chunk longer than what is left of its part", func(l *outLink) {
			l.write(streamed(t))
			b := make([]byte, chunkHead+streamFrom)
			putChunk(b, make([]byte, streamFrom/2))
			l.write(b[:chunkHead+streamFrom/2])
			putChunk(b, make([]byte, streamFrom))
			l.write(b)
		}},
		{"a chunk that says more than it has", func(l *outLink) {
			l.write(streamed(t))
			b := make([]byte, 128)
			putChunk(b, make([]byte, 64))
			binary.LittleEndian.PutUint32(b[8:], 65)
			l.write(b)
		}},
		{"a rest of another length", func(l *outLink) {
			l.write(streamed(t))
			b := valid(t)[:recordHead]
			b[4] = kindRest
			l.write(rested(b))
		}},
		{"a meta that is none", func(l *outLink) { b := valid(t); copy(b[recordHead:], pattern(1, 288)); l.write(b) }},
		{"a control message", func(l *outLink) {
			m := message()
			m.Control.Cmd = van.Terminate
			var r record
			b := make([]byte, r.plan(m, partStream))
			if err := r.put(b, len(b), m, nil, nil); err != nil {
				t.Error(err)
			}
			l.write(b)
		}},
		{"a value longer than its part", func(l *outLink) {
			l.write(records(t, []byte("first"), []byte("second"))[0])
			l.write(records(t, []byte("first"), []byte("third, longer"))[1])
		}},
		{"a value of a batch that is complete", func(l *outLink) {
			all := records(t, []byte("first"))
			b := bytes.Clone(all[0])
			binary.LittleEndian.PutUint64(b[16:], 1<<16|1)
			l.write(b)
		}},
		{"the batch of a message that is none", func(l *outLink) {
			b := valid(t)
			binary.LittleEndian.PutUint64(b[16:], 1<<16)
			l.write(b)
		}},
		{"a rest of the directory of a batch", func(l *outLink) {
			vals := make([][]byte, streamFrom/24)
			vals[0] = []byte("first")
			b := records(t, vals...)[0]
			l.write(b)
			n := binary.LittleEndian.Uint32(b[16+8:])
			b = rested(b[:recordHead])
			b[4], b[5] = kindRest, van.MaxFrames
			binary.LittleEndian.PutUint32(b[16+8:], n)
			binary.LittleEndian.PutUint32(b[16+12:], partPinned)
			setSlot(b, 0, 1)
			l.write(b)
		}},
		{"memory that is not there", func(l *outLink) {
			b := streamed(t)
			h := b[16+2*partHead:]
			binary.LittleEndian.PutUint64(h, 0x1000)
			binary.LittleEndian.PutUint32(h[12:], partPinned)
			l.seg.gen(0).Store(1)
			setSlot(b, 0, 1)
			l.write(b)
		}},
		{"memory at the end of all", func(l *outLink) {
			b := streamed(t)
			h := b[16+2*partHead:]
			binary.LittleEndian.PutUint64(h, 1<<64-4096)
			binary.LittleEndian.PutUint32(h[12:], partPinned)
			l.seg.gen(0).Store(1)
			setSlot(b, 0, 1)
			l.write(b)
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			worker, server := pair(t)
			worker.must(data(8, 0, []byte("before")))
			server.next().Release()

			l := worker.peers.link(8)
			l.mu.Lock()
			c.do(l)
			l.mu.Unlock()
			server.own.bell.wakeAll()

			if e := server.event(9, false); e.cause == nil {
				t.Error("the server was not told why")
			}
			worker.event(8, false)
			worker.event(8, true)
			if n := server.Stats().Malformed; n != 1 {
				t.Errorf("%d malformed, want 1", n)
			}
			worker.resend(data(8, 1, []byte("after")))
			m := server.next()
			if m.Timestamp != 1 || string(m.Vals.Host()) != "after" {
				t.Errorf("received %v with %q", &m.Meta, m.Vals.Host())
			}
			m.Release()
			if !worker.Linked(8) {
				t.Error("the link was not made again")
			}
		})
	}
}

// streamed is the record of a message whose values of 32 KiB are streamed.
func streamed(t testing.TB) []byte {
	m := message(8, streamFrom)
	var r record
	b := make([]byte, r.plan(m, partStream))
	if err := r.put(b, len(b), m, nil, nil); err != nil {
		t.Fatal(err)
	}
	return b
}

// rested makes b a record with the right length for a rest.
func rested(b []byte) []byte {
	b = bytes.Clone(b)
	binary.LittleEndian.PutUint32(b, recordHead)
	for i := range partCount {
		h := b[16+partHead*i:]
		binary.LittleEndian.PutUint64(h, 0)
		binary.LittleEndian.PutUint32(h[8:], 0)
		binary.LittleEndian.PutUint32(h[12:], partInline)
	}
	return b
}

// TestHostileReceiver: a receiver that writes nonsense loses the link.
func TestHostileReceiver(t *testing.T) {
	for _, c := range []struct {
		name string
		do   func(s *segment)
	}{
		{"a head beyond the tail", func(s *segment) { s.head().Store(s.tail().Load() + recordAlign) }},
		{"a head from long ago", func(s *segment) { s.head().Store(s.tail().Load() - ringLen - recordAlign) }},
		{"too many acknowledgements", func(s *segment) { s.acked().Store(slotCount + 1) }},
		{"a slot that is not there", func(s *segment) { s.ack(0).Store(slotCount); s.acked().Store(1) }},
		{"a slot that is not pinned", func(s *segment) { s.ack(0).Store(3); s.acked().Store(1) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			worker, server := pair(t)
			worker.must(data(8, 0, []byte("before")))
			server.next().Release()
			server.rx.feed.Lock()
			c.do(server.peers.Ins()[0].seg)
			server.rx.feed.Unlock()
			// Send checks the ring.
			if err := worker.Send(data(8, 1, []byte("x"))); err == nil {
				t.Error("Send over a link whose receiver has gone mad succeeded")
			}
			worker.event(8, false)
			worker.event(8, true)
			worker.resend(data(8, 2, []byte("after")))
			for m := server.next(); m.Timestamp != 2; m = server.next() {
				m.Release()
			}
		})
	}
}

// FuzzRing: for any bytes in a peer's ring, the receiver neither panics nor does harm.
func FuzzRing(f *testing.F) {
	f.Add(valid(f), uint64(0))
	f.Add(append(streamed(f), valid(f)...), uint64(0))
	f.Add(make([]byte, 128), uint64(1<<63))
	parts := records(f, []byte("first"), []byte("second"), []byte("third"))
	f.Add(slices.Concat(parts...), uint64(0))
	f.Add(slices.Concat(parts[0], parts[2], valid(f), parts[1]), uint64(0))
	f.Add(slices.Concat(parts[0], parts[1], parts[0], parts[1], parts[2]), uint64(0))
	n := inproc.NewNetwork()
	v := newNode(f, n, 8, nil)
	fd, err := memfd.New(segmentLen)
	if err != nil {
		f.Fatal(err)
	}
	bell, err := mapBell(v.own.bell.fd)
	if err != nil {
		f.Fatal(err)
	}
	seg, err := mapSegment(fd)
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, b []byte, tail uint64) {
		conn := looseEnd(t)
		l := newInLink(&v.rx, &inPeer{id: 9}, conn, 0, seg, bell)
		l.refs.Store(2) // the segment serves the next round
		copy(seg.ring, b[:min(len(b), ringLen)])
		if tail == 0 {
			tail = uint64(align(len(b)))
		}
		seg.head().Store(0)
		seg.tail().Store(tail)
		for end := time.Now().Add(limit); ; {
			p := l.next()
			if p == nil && (l.failed() || l.head == tail) {
				break
			}
			if p == nil {
				continue
			}
			if err := l.fetch(p); err == nil && (p.msg.Frames > van.MaxFrames || p.msg.IsControl()) {
				t.Errorf("received %v", &p.msg.Meta)
			} else if err == nil {
				for i := range p.msg.Parts {
					if x := &p.msg.Parts[i]; p.msg.HasValue(i) && x.Vals.Len() != x.Len {
						t.Errorf("part %d of %d has %d bytes, want %d", i, len(p.msg.Parts), x.Vals.Len(), x.Len)
					}
				}
			}
			v.rx.release(p)
			if time.Now().After(end) {
				t.Fatal("it never ends")
			}
		}
		if l.stream.msg != nil {
			v.rx.release(l.stream.msg)
		}
		if l.batch.joined != nil {
			v.rx.release(l.batch.joined)
		}
		if !l.failed() && l.head != tail {
			t.Errorf("stopped at %d of %d", l.head, tail)
		}
	})
}
