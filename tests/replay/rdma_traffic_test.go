package replay

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// Places in a packed meta.
const (
	offKey     = 80
	offValLen  = 96
	offOption  = 100
	offCounter = 264
	offSlaves  = 280
)

// cppSlot is a place that the node has given to a peer.
type cppSlot struct {
	end     *cppEnd
	meta    *cppMem
	data    []byte
	metaLen int
	lens    []uint64
}

// cppSlots is how many there can be. The original does not take one back.
const cppSlots = 10240

// cppPlace is a place that a peer has given to the node, with the buffer that the
// original sends to it from.
type cppPlace struct {
	meta, data       uint64
	metaKey, dataKey uint32
	index            uint32
	buf              *cppSending
}

// cppSending is a message on its way out.
type cppSending struct {
	end     *cppEnd
	to      int
	meta    *cppMem
	data    [][]byte
	source  *cppMem // of a push: where the first push of the key had its value
	parsed  van.Meta
	control bool
}

// send sends a message: its packed meta, and its arrays. A pull request names with into
// where its answer belongs.
func (n *cppNode) send(to int, packed []byte, into []byte, data ...[]byte) {
	n.t.Helper()
	n.mu.Lock()
	e := n.active[to]
	n.mu.Unlock()
	if e == nil {
		n.t.Fatalf("%s %d is not connected to %d", n.role, n.id, to)
	}
	select {
	case <-e.up:
	case <-time.After(patience):
		n.t.Fatalf("%s %d: no connection to %d", n.role, n.id, to)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	packed = slices.Clone(packed)
	s := &cppSending{end: e, to: to, data: data}
	n.ok(van.DecodeMeta(packed, &s.parsed))
	m := &s.parsed
	s.control = m.IsControl() || m.SimpleApp
	if s.control {
		n.ask(s, packed)
		return
	}
	if m.Request {
		m.Key = le.Uint64(data[0])
		le.PutUint64(packed[offKey:], m.Key)
		if !m.Push {
			mr := n.register(into)
			le.PutUint64(packed[offAddr:], mr.addr())
			le.PutUint32(packed[offOption:], mr.mr.RKey())
		}
	}
	p := n.places[cppTriple{m.Key, m.Push, to}]
	if p == nil {
		if m.Request && m.Push {
			s.source = n.register(data[1])
		}
		n.ask(s, packed)
		return
	}
	if len(packed) != len(p.buf.meta.b) {
		n.abort("meta of %d bytes, the first one of key %d had %d", len(packed), m.Key, len(p.buf.meta.b))
		return
	}
	copy(p.buf.meta.b, packed)
	p.buf.data, p.buf.parsed = data, *m
	n.ok(van.DecodeMeta(packed, &p.buf.parsed))
	n.write(p)
}

// ask sends a rendezvous start.
func (n *cppNode) ask(s *cppSending, packed []byte) {
	s.meta = n.alloc(len(packed))
	copy(s.meta.b, packed)
	n.serial++
	origin := n.serial<<16 | 0x5a5a
	n.asked[origin] = s
	b := n.alloc(64)
	le.PutUint64(b.b, uint64(len(packed)))
	le.PutUint64(b.b[8:], uint64(len(s.data)))
	for i := range 4 { // those of arrays that there are not are left over from others
		le.PutUint64(b.b[16+8*i:], 0xdead)
	}
	for i, d := range s.data {
		le.PutUint64(b.b[16+8*i:], uint64(len(d)))
	}
	le.PutUint64(b.b[48:], origin)
	if !s.control {
		le.PutUint64(b.b[56:], s.parsed.Key)
	}
	n.post(s.end, 0, verbs.SendWR{Op: verbs.OpSendImm, Flags: verbs.Signaled, LKey: b.mr.LKey(), LocalAddr: b.addr(), Len: 64},
		func() { n.free(b) })
}

// post posts one work request. done is called when it has completed. n.mu is held.
func (n *cppNode) post(e *cppEnd, q int, wr verbs.SendWR, done func()) {
	n.chain(e, q, done, wr)
}

// chain posts work requests as one list, the last of which gives a completion.
func (n *cppNode) chain(e *cppEnd, q int, done func(), wrs ...verbs.SendWR) {
	n.serial++
	n.posted[n.serial] = done
	for i := range wrs {
		wrs[i].QP, wrs[i].ID = e.qps[q].Handle(), n.serial
	}
	if _, err := n.dev.Post(wrs); err != nil && !n.dying {
		n.abort("post: %v", err)
	}
}

// write sends a message to its place.
func (n *cppNode) write(p *cppPlace) {
	s := p.buf
	e, m := s.end, &s.parsed
	meta := verbs.SendWR{Op: verbs.OpWriteImm, Flags: verbs.Signaled, Imm: p.index, RemoteAddr: p.meta, RKey: p.metaKey,
		LocalAddr: s.meta.addr(), Len: uint32(len(s.meta.b)), LKey: s.meta.mr.LKey()}
	if s.control {
		n.post(e, 0, meta, func() { n.free(s.meta) }) // the original never frees it
		return
	}
	if len(s.meta.b) <= e.qps[0].MaxInline() { // the original does not check this, and aborts
		meta.Flags |= verbs.Inline
	}
	value := verbs.SendWR{Op: verbs.OpWrite}
	switch {
	case m.Request && m.Push:
		if len(s.data[1]) > len(s.source.b) {
			n.abort("a push of %d bytes, the first one of key %d had %d", len(s.data[1]), m.Key, len(s.source.b))
			return
		}
		value.RemoteAddr, value.RKey = p.data, p.dataKey
		value.LocalAddr, value.LKey, value.Len = s.source.addr(), s.source.mr.LKey(), uint32(len(s.data[1]))
	case !m.Request && !m.Push:
		if int(m.ValLen) != len(s.data[1]) {
			n.abort("an answer of %d bytes, asked for were %d", len(s.data[1]), m.ValLen)
			return
		}
		src := n.register(s.data[1])
		value.RemoteAddr, value.RKey = m.Addr, uint32(m.Option)
		value.LocalAddr, value.LKey, value.Len = src.addr(), src.mr.LKey(), uint32(m.ValLen)
	default:
		n.post(e, 0, meta, nil)
		return
	}
	if !n.split {
		if m.Request {
			n.chain(e, 0, nil, value, meta)
		} else {
			n.post(e, 0, value, nil)
			n.post(e, 0, meta, nil)
		}
		return
	}
	all := value.Len
	part := all / qpCount
	value.Len = part + all%qpCount
	e.slaves++
	le.PutUint32(s.meta.b[offSlaves:], qpCount-1)
	for i := range qpCount {
		le.PutUint64(s.meta.b[offCounter+8*i:], e.slaves)
	}
	n.post(e, 0, value, nil)
	n.post(e, 0, meta, nil)
	for q := 1; q < qpCount; q++ {
		value.LocalAddr += uint64(value.Len)
		value.RemoteAddr += uint64(value.Len)
		value.Op, value.Flags, value.Imm, value.Len = verbs.OpWriteImm, verbs.Signaled, p.index|0x8000, part
		n.post(e, q, value, nil)
	}
}

// poll takes completions as long as the node lives.
func (n *cppNode) poll() {
	wcs := make([]verbs.Completion, 64)
	for {
		k, err := n.dev.Poll(wcs, 0, time.Second)
		n.mu.Lock()
		if n.closed || n.dying && errors.Is(err, verbs.ErrClosed) {
			n.mu.Unlock()
			return
		}
		if err != nil {
			n.abort("poll: %v", err)
		}
		for i := range wcs[:k] {
			n.completed(&wcs[i])
		}
		n.mu.Unlock()
	}
}

func (n *cppNode) completed(c *verbs.Completion) {
	if c.Status != verbs.StatusOK {
		if !n.dying {
			n.abort("failed status %s", c.Status)
		}
		return
	}
	if c.Type == verbs.SendDone {
		if done := n.posted[c.ID]; done != nil {
			done()
		}
		delete(n.posted, c.ID)
		return
	}
	e := n.ends[c.Cookie>>8-1]
	switch {
	case c.Type == verbs.RecvSend && c.Imm == 0:
		n.reply(e, c.Data[:c.Len])
	case c.Type == verbs.RecvSend && c.Imm == 1:
		n.replied(e, c.Data[:c.Len])
	case c.Type == verbs.RecvSend:
		n.abort("SEND with immediate %d", c.Imm)
	default:
		for q, id := range e.ids {
			if id == nil {
				n.abort("queue pair %d is not known", q)
			}
		}
		if c.Imm&0x8000 != 0 {
			e.slaves++
		} else {
			n.notified(e, c)
		}
		n.pump()
	}
}

// reply answers a rendezvous start.
func (n *cppNode) reply(e *cppEnd, b []byte) {
	n.starts++
	if len(b) != 64 {
		n.abort("rendezvous start of %d bytes", len(b))
		return
	}
	s := &cppSlot{end: e, metaLen: int(le.Uint64(b))}
	num, key := le.Uint64(b[8:]), le.Uint64(b[56:])
	if num > 4 {
		n.abort("%d arrays", num)
		return
	}
	sum := uint64(0)
	for i := range num {
		s.lens = append(s.lens, le.Uint64(b[16+8*i:]))
		sum += s.lens[i]
	}
	s.meta = n.alloc((s.metaLen + 4095) &^ 4095)
	r := n.alloc(48)
	if n.role == van.Server && sum > 0 {
		data := n.place(e, key, int(s.lens[1]))
		if data == nil {
			return
		}
		s.data = data.b
		le.PutUint64(r.b[16:], data.addr())
		le.PutUint32(r.b[24:], data.mr.RKey())
	}
	if len(n.slots) == cppSlots {
		n.abort("all %d slots are used", cppSlots)
		return
	}
	le.PutUint64(r.b, s.meta.addr())
	le.PutUint32(r.b[8:], s.meta.mr.RKey())
	copy(r.b[32:40], b[48:56])
	le.PutUint32(r.b[40:], uint32(len(n.slots)))
	n.slots = append(n.slots, s)
	n.post(e, 0, verbs.SendWR{Op: verbs.OpSendImm, Flags: verbs.Signaled, Imm: 1, LKey: r.mr.LKey(), LocalAddr: r.addr(), Len: 48},
		func() { n.free(r) })
}

// place finds memory for the value of a key.
func (n *cppNode) place(e *cppEnd, key uint64, size int) *cppMem {
	if b := n.buffers[cppBuffer{key, e.node}]; b != nil {
		if len(b) < size {
			n.abort("%d bytes for key %d, the registered buffer has %d", size, key, len(b))
			return nil
		}
		return n.register(b)
	}
	if m := e.data[key]; m != nil {
		if len(m.b) < size {
			n.abort("%d bytes for key %d, whose buffer has %d", size, key, len(m.b))
			return nil
		}
		return m
	}
	if size == 0 {
		n.abort("no buffer of 0 bytes can be registered, for key %d", key)
		return nil
	}
	e.data[key] = n.alloc(size)
	return e.data[key]
}

// replied takes the answer to a rendezvous start.
func (n *cppNode) replied(e *cppEnd, b []byte) {
	if len(b) != 48 {
		n.abort("rendezvous reply of %d bytes", len(b))
		return
	}
	origin := le.Uint64(b[32:])
	s := n.asked[origin]
	if s == nil || s.end != e {
		n.abort("rendezvous reply with the origin %#x", origin)
		return
	}
	delete(n.asked, origin)
	defer func() {
		select {
		case n.answers <- struct{}{}:
		default:
		}
	}()
	p := &cppPlace{meta: le.Uint64(b), metaKey: le.Uint32(b[8:]), data: le.Uint64(b[16:]), dataKey: le.Uint32(b[24:]),
		index: le.Uint32(b[40:]), buf: s}
	if p.index >= 0x8000 {
		n.abort("index %d", p.index)
		return
	}
	if !s.control {
		n.places[cppTriple{s.parsed.Key, s.parsed.Push, s.to}] = p
	}
	n.write(p)
}

// settled waits until each rendezvous start has been answered.
func (n *cppNode) settled() {
	n.t.Helper()
	for {
		n.mu.Lock()
		open := len(n.asked)
		n.mu.Unlock()
		if open == 0 {
			return
		}
		select {
		case <-n.answers:
		case <-time.After(patience):
			n.t.Fatalf("%d questions are not answered", open)
		}
	}
}

// notified takes the notification of a message.
func (n *cppNode) notified(e *cppEnd, c *verbs.Completion) {
	if int(c.Imm) >= len(n.slots) || n.slots[c.Imm].end != e {
		n.abort("notification of slot %d", c.Imm)
		return
	}
	s := n.slots[c.Imm]
	if int(c.Len) != s.metaLen {
		n.t.Errorf("%s %d: a meta of %d bytes has come, asked for were %d", n.role, n.id, c.Len, s.metaLen)
	}
	m := &cppMessage{end: e, from: e.node, packed: slices.Clone(s.meta.b[:s.metaLen]), slot: s, number: int(c.Imm)}
	if err := van.DecodeMeta(m.packed, &m.meta); err != nil {
		n.t.Errorf("%s %d: %v", n.role, n.id, err)
		return
	}
	n.queue = append(n.queue, m)
}

// pump hands up messages whose parts have all come.
func (n *cppNode) pump() {
	for len(n.queue) > 0 {
		m := n.queue[0]
		if m.meta.SlaveQPNum > 0 && m.meta.SlaveQPCounter[1] > m.end.slaves {
			return
		}
		n.queue = n.queue[1:]
		if err := n.arrays(m); err != nil {
			n.abort("%s: %v", m.meta.String(), err)
			continue
		}
		select {
		case n.msgs <- m:
		default:
			n.t.Errorf("%s %d: nobody takes its messages", n.role, n.id)
		}
	}
}

// arrays makes the arrays of a message, which are not sent.
func (n *cppNode) arrays(m *cppMessage) error {
	meta := &m.meta
	if meta.IsControl() || meta.SimpleApp {
		return nil
	}
	if meta.Push && !meta.Request {
		if len(m.slot.lens) != 0 {
			return fmt.Errorf("a push response with %d arrays", len(m.slot.lens))
		}
		return nil
	}
	m.key = le.AppendUint64(nil, meta.Key)
	switch {
	case meta.Push:
		if n.role != van.Server || len(m.slot.lens) < 2 || int(meta.ValLen) > len(m.slot.data) {
			return fmt.Errorf("a push of %d bytes at a %s, asked for were %d", meta.ValLen, n.role, m.slot.lens)
		}
		m.value = slices.Clone(m.slot.data[:meta.ValLen])
	case !meta.Request:
		into := n.regions[meta.Addr]
		if into == nil || len(into.b) < int(meta.ValLen) {
			return fmt.Errorf("%d bytes for %#x, which is no tensor", meta.ValLen, meta.Addr)
		}
		m.value = slices.Clone(into.b[:meta.ValLen])
	}
	return nil
}
