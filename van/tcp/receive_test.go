package tcp

// Receiving: destinations of values, invalidation, memory, and malformed bytes.

import (
	"bytes"
	"context"
	"io"
	"math"
	"net"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/engine"
	"github.com/stepaf/stepaf-go/van/env"
	"github.com/stepaf/stepaf-go/van/landing"
	"github.com/stepaf/stepaf-go/van/zmq"
)

// TestInvalidate: when Invalidate has returned, an answer that arrives, whole or in parts, is not written to the memory.
func TestInvalidate(t *testing.T) { both(t, invalidate) }

func invalidate(t *testing.T, options func(*van.Options)) {
	worker, server := pair(t, options)
	const size = 1 << 20
	into := make([]byte, size)
	for _, early := range []bool{false, true} {
		pull := dataMessage(8, 1, true, false, nil)
		pull.Into = backend.Bytes(into)
		worker.must(pull)
		server.next().Release()
		if early {
			worker.Invalidate(backend.Bytes(into))
			server.must(dataMessage(9, 1, false, false, pattern(size, 3)))
			if m := worker.next(); m.Placed {
				t.Error("an answer is in memory that was taken back")
			}
		} else { // in the middle of the value
			raw := rawAnswer(t, server, worker, 1, pattern(size, 3))
			raw.write(size / 2)
			vantest.Eventually(t, limit, "the first half arrives", func() bool { return worker.lacks(size / 2) })
			worker.Invalidate(backend.Bytes(into))
			clear(into)
			raw.write(size)
			_ = raw.c.Close() // until then, the process's next connection is not read
			server.must(dataMessage(9, 2, false, false, []byte("next")))
			if m := worker.next(); m.Timestamp != 2 {
				t.Errorf("message %d arrived, want that of the canceled request dropped", m.Timestamp)
			}
			if n := worker.Stats().LateAnswers; n != 1 {
				t.Errorf("%d late answers are counted, want 1", n)
			}
		}
		if !bytes.Equal(into, make([]byte, size)) {
			t.Error("memory that was taken back was written to")
		}
	}
}

// TestAnsweredElsewhere: an answer that does not fit the memory of its pull arrives elsewhere, and nothing is expected there any more.
func TestAnsweredElsewhere(t *testing.T) {
	worker, server := pair(t, nil)
	for i, n := range []int{0, 5, placeFrom + 1} {
		pull := dataMessage(8, 1, true, false, nil)
		answer := dataMessage(9, 1, false, false, pattern(n, i))
		pull.Into = backend.Bytes(make([]byte, placeFrom))
		pulls, answers := batch(8, 2, false, nil, values(placeFrom, placeFrom)...), batch(9, 2, false, nil, values(n, n)...)
		pulls.Request = true
		for k := range pulls.Parts {
			pulls.Parts[k].Vals, pulls.Parts[k].Into = backend.Mem{}, backend.Bytes(make([]byte, placeFrom))
		}
		pulls.WriteDirectory()
		for _, x := range [][2]*van.Message{{pull, answer}, {pulls, answers}} {
			worker.must(x[0])
			server.next().Release()
			if worker.own.places.Expected() == 0 {
				t.Fatal("no answer is expected")
			}
			server.must(x[1])
			m := worker.next()
			if m.Placed || m.PayloadLen() != x[1].PayloadLen() {
				t.Errorf("an answer of %d bytes arrived as %d, placed: %t", x[1].PayloadLen(), m.PayloadLen(), m.Placed)
			}
			if m.Release(); worker.own.places.Expected() != 0 {
				t.Errorf("%d answers are expected after an answer of %d bytes", worker.own.places.Expected(), n)
			}
		}
	}
}

// TestCutWhileReceiving: a message whose connection breaks in the middle of a value gives back what it has, also the place of an answer.
func TestCutWhileReceiving(t *testing.T) {
	const size = 1 << 20
	worker, server := pair(t, nil)
	pull := dataMessage(8, 1, true, false, nil)
	pull.Into = backend.Bytes(make([]byte, size))
	worker.must(pull)
	server.next().Release()
	for _, ts := range []int{1, 2} { // the second answer has no place
		raw := rawAnswer(t, server, worker, ts, pattern(size, 3))
		raw.write(size / 2)
		vantest.Eventually(t, limit, "the first half arrives", func() bool { return worker.lacks(size / 2) })
		_ = raw.c.Close()
		vantest.Eventually(t, limit, "the message is given back", func() bool {
			n := &worker.own
			n.mu.Lock()
			defer n.mu.Unlock()
			return len(n.free) == 1 && len(n.free[0].spots) == 0 && (ts == 1 || n.kept >= size)
		})
	}
}

// TestInvalidatedOnArrival: memory is taken back between the arrival of an answer's head and the copy of those bytes of the value that arrived with
// it. These bytes and the rest of the value are dropped, and the next message arrives intact.
func TestInvalidatedOnArrival(t *testing.T) {
	const size, early = 2 * bufLen, 1000
	v := start(t, 9, nil)
	into := make([]byte, size)
	pull := dataMessage(8, 1, true, false, nil)
	pull.Into = backend.Bytes(into)
	if !v.own.places.Expect(pull) {
		t.Fatal("the answer has no place")
	}
	p := v.own.get()
	answer := dataMessage(9, 1, false, false, nil)
	answer.Sender = 8
	dst, placed := v.own.places.Find(answer, 0, size, p.spot(), false)
	if !placed {
		t.Fatal("the answer's place is not found")
	}
	v.Invalidate(backend.Bytes(into))
	c := &inConn{n: &v.own, from: &sender{id: 8}, buf: make([]byte, bufLen), w: early, cur: p, place: p.spots[0], rest: dst.Host()}
	copy(c.buf, pattern(early, 1))
	if c.fillValues() != nil || c.r != c.w || c.discard != size-early {
		t.Errorf("%d of %d bytes were taken, %d more are to be dropped, want %d", c.r, c.w, c.discard, size-early)
	}
	c.discard, c.r, c.w = early, 0, early+headLen
	if c.fillValues() != p || c.r != early {
		t.Errorf("the next message begins at byte %d, want %d", c.r, early)
	}
	if !bytes.Equal(into, make([]byte, size)) {
		t.Error("memory that was taken back was written to")
	}
}

// lacks reports whether the message that e is receiving lacks n bytes of its value.
func (e *end) lacks(n int) bool {
	e.peers.Mu.Lock()
	defer e.peers.Mu.Unlock()
	return slices.ContainsFunc(e.peers.Ins(), func(c *inConn) bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.cur != nil && len(c.rest) == n
	})
}

// raw writes the bytes of a message over a connection of its own.
type raw struct {
	t     *testing.T
	c     net.Conn
	bytes []byte
	done  int
}

// rawAnswer makes a connection in the name of from, which sends an answer.
func rawAnswer(t *testing.T, from, to *end, ts int, value []byte) *raw {
	t.Helper()
	c := dialRaw(t, from, to)
	m := dataMessage(to.self.ID, ts, false, false, nil)
	meta, err := m.AppendTo(nil)
	if err != nil {
		t.Fatal(err)
	}
	h := head{meta: len(meta), keys: 8, frames: 2, vals: len(value)}
	b := append(h.append(nil), meta...)
	b = append(b, m.Keys.Host()...)
	return &raw{t: t, c: c, bytes: append(b, value...)}
}

func dialRaw(t *testing.T, from, to *end) net.Conn {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	who, _ := to.self.Extension()
	c, err := from.own.meet(ctx, &callee{addr: dataAddr(to), incarnation: who.Incarnation, name: "the test's peer"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(limit))
	return c
}

func dataAddr(e *end) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(e.DataPort())) }

// write writes the bytes up to value byte n.
func (r *raw) write(n int) {
	r.t.Helper()
	end := min(len(r.bytes), len(r.bytes)-1<<20+n)
	if _, err := r.c.Write(r.bytes[r.done:end]); err != nil {
		r.t.Fatal(err)
	}
	r.done = end
}

// TestBusyPeer: a peer whose socket is never empty does not delay the messages of another peer, whether its messages are short or long.
func TestBusyPeer(t *testing.T) {
	for _, c := range []struct{ size, count, most int }{{1000, 900, 300}, {300 << 10, 40, 20}} {
		server, busy, other := start(t, 8, nil), start(t, 9, nil), start(t, 11, nil)
		for _, e := range []*end{busy, other} {
			e.connect(server)
			server.connect(e)
			e.must(dataMessage(8, 0, true, true, []byte("first")))
			server.next().Release()
		}
		s := &server.source
		s.feed.Lock()
		for i := range c.count {
			busy.must(dataMessage(8, i, true, true, pattern(c.size, i)))
		}
		take := func() (sender int) {
			vantest.Eventually(t, limit, "a message", func() bool {
				p, _, found := s.Take(0, false)
				if found == engine.Message {
					sender = p.msg.Sender
					s.Discard(p)
				}
				return found == engine.Message
			})
			return sender
		}
		take()
		other.must(dataMessage(8, 1, true, true, []byte("second")))
		before := 0
		for before < c.most && take() == 9 {
			before++
		}
		s.feed.Unlock()
		if before == c.most {
			t.Errorf("%d messages of %d bytes of the busy peer arrived before that of the other one", before, c.size)
		}
	}
}

// TestLongMeta: the body of a simple message may be as long as over the other transports.
func TestLongMeta(t *testing.T) {
	worker, server := pair(t, nil)
	m := dataMessage(8, 1, true, false, nil)
	m.Frames, m.SimpleApp, m.Body = 0, true, bytes.Repeat([]byte("body"), 65<<18) // 65 MiB
	worker.must(m)
	worker.must(dataMessage(8, 2, true, true, []byte("next")))
	if got := server.next(); got.Timestamp != 1 || !bytes.Equal(got.Body, m.Body) {
		t.Errorf("message %d arrived with a body of %d bytes, want %d", got.Timestamp, len(got.Body), len(m.Body))
	}
	server.next().Release()
	server.source.feed.Lock()
	defer server.source.feed.Unlock()
	if n := len(server.peers.Ins()[0].buf); n > keepLen {
		t.Errorf("the connection keeps a buffer of %d bytes, want at most %d", n, keepLen)
	}
}

// TestMemoryIsUsedAgain: the memory of a received value, and of encoded messages, is used again, and an idle van and connection keep no
// more of it than their limits.
func TestMemoryIsUsedAgain(t *testing.T) {
	n := &common{cfg: env.Default(), places: landing.New(placeFrom, false)}
	const size, class = 3 << 10, 4 << 10
	for range 3 {
		p := n.get()
		b := n.memory(size, size)
		if p.mems = append(p.mems, b); len(b) != size || cap(b) != class || n.kept != 0 {
			t.Fatalf("%d of %d bytes, while %d are kept", len(b), cap(b), n.kept)
		}
		if n.release(p); n.kept != class || len(n.mem[sizeClass(size)]) != 1 {
			t.Fatalf("%d bytes are kept in %d pieces, want %d in one", n.kept, len(n.mem[sizeClass(size)]), class)
		}
	}
	n.kept = keepMemory - class + 1
	if n.release(&inbound{mems: [][]byte{make([]byte, class)}}); len(n.mem[sizeClass(size)]) != 1 {
		t.Errorf("more than %d bytes are kept", keepMemory)
	}
	for _, count := range []int{1, keepBuf/lendFrom + 1, 2 * keepBuf / lendFrom} {
		c := newOutConn(n, &new(peer).Peer, -1, nil)
		c.blocked = true
		for i := range count {
			if err := c.send(dataMessage(8, i, true, true, pattern(lendFrom-1, i))); err != nil {
				t.Fatal(err)
			}
		}
		grown := cap(c.buf)
		if c.written(c.unsent()); len(c.queue) != 0 || (cap(c.buf) > 0) != (grown <= keepBuf) {
			t.Errorf("a connection keeps %d of %d bytes, want up to %d", cap(c.buf), grown, keepBuf)
		}
	}
}

// TestMalformed: a member's connection with bytes that are no message ends, is counted, and the log says what was wrong.
func TestMalformed(t *testing.T) { both(t, malformed) }

func malformed(t *testing.T, options func(*van.Options)) {
	meta, err := dataMessage(8, 1, true, true, nil).AppendTo(nil)
	if err != nil {
		t.Fatal(err)
	}
	directory, err := batch(8, 1, true, nil, values(3, 5)...).AppendTo(nil)
	if err != nil {
		t.Fatal(err)
	}
	frame := func(h head, rest ...byte) []byte { return append(h.append(nil), rest...) }
	for name, c := range map[string]struct {
		bytes []byte
		says  string
	}{
		"long meta":       {frame(head{meta: 1 << 31}), "length of the meta"},
		"long values":     {frame(head{meta: len(meta), frames: 2, vals: 1 << 40}), "length of the values"},
		"one frame":       {frame(head{meta: len(meta), frames: 1}), "data frames"},
		"keys no frames":  {frame(head{meta: len(meta), keys: 8}), "data frames"},
		"no meta":         {frame(head{}), "meta length"},
		"short batch":     {frame(head{meta: len(directory), frames: batchFrames, vals: 7}, append(directory, "1234567"...)...), "length of the values = 7, want 8"},
		"long batch":      {frame(head{meta: len(directory), frames: batchFrames, vals: 9}, append(directory, "123456789"...)...), "length of the values = 9, want 8"},
		"batch in frames": {frame(head{meta: len(directory), frames: 2, vals: 8}, append(directory, "12345678"...)...), "data frames = 2, want 4"},
		"no batch":        {frame(head{meta: len(meta), frames: batchFrames}, meta...), "data frames = 4"},
		"wrong meta":      {frame(head{meta: len(meta)}, bytes.Repeat([]byte{0xff}, len(meta))...), "body_size"},
	} {
		t.Run(name, func(t *testing.T) {
			worker, server := pair(t, options)
			conn := dialRaw(t, worker, server)
			if _, err := conn.Write(c.bytes); err != nil {
				t.Fatal(err)
			}
			if _, err := conn.Read(make([]byte, 1)); err == nil {
				t.Error("the connection has not ended")
			}
			vantest.Eventually(t, limit, "it is counted", func() bool { return server.Stats().Malformed == 1 })
			if !strings.Contains(server.log.String(), c.says) {
				t.Errorf("the log does not say %q:\n%s", c.says, server.log.String())
			}
			worker.must(dataMessage(8, 1, true, true, []byte("member")))
			server.next().Release()
		})
	}
}

// TestMalformedFewLines: a peer cannot invent causes of log lines with texts in malformed messages.
func TestMalformedFewLines(t *testing.T) {
	worker, server := pair(t, nil)
	const tries = 40
	for i := range tries {
		m := van.Message{}
		m.Reset()
		host := strings.Repeat(string('a'+rune(i%26))+string('a'+rune(i/26)), van.MaxHostnameLen/2)
		m.Control = van.Control{Cmd: van.AddNode, Nodes: []van.Node{{Hostname: host}}}
		meta, err := m.AppendTo(nil)
		if err != nil {
			t.Fatal(err)
		}
		for at := bytes.Index(meta, []byte(host)) + len(host); meta[at] == 0 && at < len(meta)-1; at++ {
			meta[at] = 'x'
		}
		conn := dialRaw(t, worker, server)
		if _, err := conn.Write(append((&head{meta: len(meta)}).append(nil), meta...)); err != nil {
			t.Fatal(err)
		}
		_, _ = io.Copy(io.Discard, conn) // until the server ends it
	}
	vantest.Eventually(t, limit, "all are counted", func() bool { return server.Stats().Malformed == tries })
	if n := strings.Count(server.log.String(), "a connection for data ends"); n < 1 || n > 6 {
		t.Errorf("%d lines of %d tries, want those of the 1st, 2nd, 4th, ...:\n%s", n, tries, server.log.String())
	}
}

// TestAnnouncedLength: a peer that announces a long value and sends little of it makes the receiver reserve little. A value that arrives
// gets memory as it arrives.
func TestAnnouncedLength(t *testing.T) { both(t, announcedLength) }

func announcedLength(t *testing.T, options func(*van.Options)) {
	worker, server := pair(t, options)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	m := dataMessage(8, 1, true, true, nil)
	meta, err := m.AppendTo(nil)
	if err != nil {
		t.Fatal(err)
	}
	conn := dialRaw(t, worker, server)
	h := head{meta: len(meta), keys: 8, frames: 2, vals: math.MaxInt32}
	if _, err := conn.Write(append(append(append(h.append(nil), meta...), m.Keys.Host()...), make([]byte, 100)...)); err != nil {
		t.Fatal(err)
	}
	vantest.Eventually(t, limit, "the value begins", func() bool {
		server.source.feed.Lock()
		defer server.source.feed.Unlock()
		server.peers.Mu.Lock()
		defer server.peers.Mu.Unlock()
		return len(server.peers.Ins()) > 0 && server.peers.Ins()[0].cur != nil
	})
	runtime.ReadMemStats(&after)
	if n := after.TotalAlloc - before.TotalAlloc; n > 8*startMemory {
		t.Errorf("the node has allocated %d KiB for a value of which 100 bytes have arrived", n>>10)
	}
	if err := conn.Close(); err != nil {
		t.Fatal(err)
	}
	for i, n := range []int{startMemory, startMemory + 1, growMemory*startMemory + 3, 33 << 20} {
		worker.must(dataMessage(8, 2+i, true, true, pattern(n, i)))
		push := server.next()
		if got := push.Vals.Host(); !bytes.Equal(got, pattern(n, i)) {
			t.Errorf("a push of %d bytes arrived as %d bytes, not as it was sent", n, len(got))
		}
		push.Release()
	}
}

// FuzzParse: any bytes, in any pieces, are messages or an error, and take no more memory than they have bytes.
func FuzzParse(f *testing.F) {
	meta, err := dataMessage(8, 1, true, true, nil).AppendTo(nil)
	if err != nil {
		f.Fatal(err)
	}
	h := head{meta: len(meta), keys: 8, frames: 2, vals: 3}
	one := append(append(h.append(nil), meta...), 1, 0, 0, 0, 0, 0, 0, 0, 'a', 'b', 'c')
	f.Add(one, 7)
	f.Add(append(append([]byte{}, one...), one...), 1)
	f.Add((&head{meta: 5, frames: 3, lens: 9}).append(nil), 100)
	for _, request := range []bool{true, false} {
		m := batch(9, 1, request, nil, []byte("first"), nil, []byte("second"))
		meta, err := m.AppendTo(nil)
		if err != nil {
			f.Fatal(err)
		}
		h := head{meta: len(meta), frames: batchFrames, vals: m.PayloadLen()}
		f.Add(append(append(h.append(nil), meta...), "firstsecond"...), 9)
	}
	in, err := zmq.New(van.Options{Config: env.Default()})
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { _ = in.Close(context.Background()) })
	v := New(in, van.Options{Config: env.Default()})
	f.Fuzz(func(t *testing.T, text []byte, piece int) {
		if len(text) > bufLen {
			return
		}
		c := &inConn{n: &v.own, from: &sender{id: 9}, buf: make([]byte, bufLen)}
		left := text
		for len(left) > 0 {
			if c.r == c.w {
				c.r, c.w = 0, 0
			}
			n := copy(c.buf[c.w:], left[:min(len(left), max(piece, 1))])
			if n == 0 {
				break // a message that is longer than the buffer
			}
			c.w += n
			left = left[n:]
			for {
				p, err := c.parse()
				if err != nil {
					return
				}
				if c.cur != nil && c.cur.weight()-messageBytes > startMemory+2*growMemory*len(text)+2*bufLen {
					t.Fatalf("%d bytes of memory for a message of which %d bytes have arrived", c.cur.weight(), len(text))
				}
				if p == nil {
					break
				}
				if p.msg.PayloadLen() > len(text) {
					t.Fatalf("a message of %d bytes out of %d", p.msg.PayloadLen(), len(text))
				}
				for i := range p.msg.Parts {
					if x := &p.msg.Parts[i]; p.msg.HasValue(i) && x.Vals.Len() != x.Len {
						t.Fatalf("part %d of %d has %d bytes, want %d", i, len(p.msg.Parts), x.Vals.Len(), x.Len)
					}
				}
				v.own.release(p)
			}
		}
	})
}
