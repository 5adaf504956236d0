package tcp

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/engine"
	"github.com/stepaf/stepaf-go/van/landing"
	"github.com/stepaf/stepaf-go/van/links"
)

// sender is the order of one peer's messages, over whichever connection they arrive.
type sender struct {
	id          int
	queue       engine.PeerQueue[*inbound]
	undelivered atomic.Int32 // messages that the loop has received and not delivered
	blame       engine.SlowDetector
	known       bool // a connection of the peer was read; peers.Mu
}

// inbound is a received message with its memory.
type inbound struct {
	msg   van.Message
	conn  *inConn
	front []byte           // meta, keys, lengths, and short values
	mems  [][]byte         // long values without a place of their own
	kept  int              // bytes of the values of a request with parts that have no place of their own
	spots []*landing.Place // places of this message's values; those from len to cap are for later messages
}

// spot returns an unused place for a value of p.
func (p *inbound) spot() *landing.Place {
	n := len(p.spots)
	if n < cap(p.spots) {
		p.spots = p.spots[:n+1]
	} else {
		p.spots = append(p.spots, nil)
	}
	if p.spots[n] == nil {
		p.spots[n] = new(landing.Place)
	}
	return p.spots[n]
}

// messageBytes is about what a received message itself takes.
const messageBytes = 1 << 10

// weight is the memory of this node that p takes while it waits.
func (p *inbound) weight() int {
	n := messageBytes + cap(p.front) + len(p.msg.Parts)*van.PartBytes
	for _, m := range p.mems {
		n += cap(m)
	}
	return n
}

// inConn is the receiver's end of a connection. The holder of the feed uses its fields, unless they say otherwise.
type inConn struct {
	links.Inbound
	n    *common
	from *sender
	fd   int
	tls  *encrypted // nil without STEPAF_TLS

	buf       []byte
	r, w      int            // buf[r:w] is received and not parsed
	cur       *inbound       // the message whose values are being read
	part      int            // the part of cur, a batch, whose value is being read
	place     *landing.Place // of the value that is being read, or nil
	rest      []byte         // memory for the rest of that value, or for a part of it
	later     int            // bytes of that value that have no memory yet
	discard   int            // bytes of it that are read and dropped
	got       int            // bytes that the last call of read has received
	ready     bool           // it is in source.ready
	empty     bool           // the socket had nothing more when it was read last
	hangup    bool           // the peer has closed the connection: it is read to its end
	malformed error          // the error of a malformed message; the connection ends with it

	mu            sync.Mutex // held while bytes are read
	fenced        bool       // no further message is delivered: another process has the sender's id, or a later connection has replaced this one; mu, peers.Mu
	again         bool       // an earlier connection of the process broke, and the watcher has not been notified; peers.Mu
	awaitsWatcher bool       // not read before the watcher was called for a loss; peers.Mu
}

// bufLen is the length of the buffer of a connection. The values of messages longer than half of it are read straight to
// where they are wanted.
const bufLen = 64 << 10

// keepLen is the maximum length of a buffer that a connection keeps after it has grown for long keys or metas.
const keepLen = 4 << 20

// readLimit bounds what one connection is read of before others have their turn.
const readLimit = 1 << 20

// The results of read.
type outcome int

const (
	drained  outcome = iota // the socket has nothing more
	progress                // there may be more
	message                 // a message is complete
	ended                   // the connection has ended
)

// read reads until a message is complete, the socket has nothing more, or others have their turn.
func (c *inConn) read() (*inbound, outcome) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.fenced {
		return nil, ended
	}
	for c.got = 0; ; {
		p, err := c.parse()
		switch {
		case err != nil:
			c.malformed = err
			return nil, ended
		case p != nil:
			return p, message
		case c.got >= readLimit:
			return nil, progress
		}
		if c.empty && !c.hangup {
			return nil, drained
		}
		n, err := c.receive()
		switch {
		case err == unix.EAGAIN:
			c.empty = true
			return nil, drained
		case err == unix.EINTR:
			continue
		case err != nil, n == 0:
			return nil, ended
		}
		raceReceived()
		c.got += n
	}
}

// receive makes one system call. A short read does not mean that the socket is empty: a signal may have ended it early.
func (c *inConn) receive() (n int, err error) {
	if c.r == c.w {
		c.r, c.w = 0, 0
		if c.buf == nil || len(c.buf) > keepLen {
			c.buf = make([]byte, bufLen)
		}
	}
	if len(c.rest) > 0 { // the buffer is empty
		var iov [2]unix.Iovec
		iov[0].Base = unsafe.SliceData(c.rest)
		iov[0].SetLen(len(c.rest))
		parts := 1
		if len(c.rest) < lendFrom || !c.hasNextValue() { // otherwise the next value is read straight to its place, too
			iov[1].Base = unsafe.SliceData(c.buf)
			iov[1].SetLen(len(c.buf))
			parts = 2
		}
		read := func() error {
			if c.tls != nil {
				n, err = c.tls.read(c.rest)
				return err
			}
			r, _, e := unix.Syscall(unix.SYS_READV, uintptr(c.fd), uintptr(unsafe.Pointer(&iov[0])), uintptr(parts))
			if e != 0 {
				return e
			}
			n = int(r)
			return nil
		}
		if c.place != nil {
			if err = c.place.Write(read); errors.Is(err, landing.ErrInvalidated) {
				c.discard, c.rest = len(c.rest), nil
				return c.receive()
			}
		} else {
			err = read()
		}
		if err != nil {
			return 0, err
		}
		k := min(n, len(c.rest))
		c.rest, c.w = c.rest[k:], n-k
		return n, nil
	}
	if c.w == len(c.buf) {
		if c.r > 0 {
			c.w = copy(c.buf, c.buf[c.r:c.w])
			c.r = 0
		} else { // a front that is longer than the buffer
			c.buf = append(make([]byte, 0, 2*len(c.buf)), c.buf...)
			c.buf = c.buf[:cap(c.buf)]
		}
	}
	if c.tls != nil {
		n, err = c.tls.read(c.buf[c.w:])
	} else {
		n, err = unix.Read(c.fd, c.buf[c.w:])
	}
	if err != nil || n <= 0 {
		return 0, err
	}
	c.w += n
	return n, nil
}

// parse takes the next message from the buffer, nil if it is not complete.
func (c *inConn) parse() (*inbound, error) {
	if c.cur != nil {
		return c.fillValues(), nil
	}
	if c.w-c.r < headLen {
		return nil, nil
	}
	h, err := parseHead(c.buf[c.r:])
	if err != nil {
		return nil, err
	}
	direct := h.front()+h.vals > bufLen/2
	need := h.front()
	if !direct {
		need += h.vals
	}
	if c.w-c.r < need {
		if need > len(c.buf)-c.r { // move it to the start
			c.w = copy(c.buf, c.buf[c.r:c.w])
			c.r = 0
		}
		return nil, nil
	}
	p := c.n.get()
	p.conn = c
	if n := need - headLen; n > keepFront {
		p.front = c.n.memory(n, n)
	} else {
		p.front = slices.Grow(p.front[:0], n)
	}
	p.front = append(p.front[:0], c.buf[c.r+headLen:c.r+h.front()]...)
	c.r += h.front()
	m := &p.msg
	if err := van.DecodeMeta(p.front[:h.meta:h.meta], &m.Meta); err != nil {
		c.n.release(p)
		return nil, err
	}
	if m.IsControl() {
		c.n.release(p)
		return nil, &van.FieldError{Field: "control.cmd", Value: m.Control.Cmd, Want: "a data message"}
	}
	m.Sender, m.Frames = c.from.id, h.frames
	if m.IsBatch() != (h.frames == batchFrames) {
		c.n.release(p)
		return nil, &van.FieldError{Field: "data frames", Value: h.frames, Want: "4 for a batch and no other message"}
	}
	if h.frames == batchFrames {
		m.Frames = 0
		n, err := m.ReadDirectory()
		if err == nil && n != h.vals {
			err = &van.FieldError{Field: "length of the values", Value: h.vals, Want: fmt.Sprintf("%d, as the directory says", n)}
		}
		if err != nil {
			c.n.release(p)
			return nil, err
		}
	}
	rest := p.front[h.meta:]
	if m.Frames > 0 {
		m.Keys = backend.Bytes(rest[:h.keys:h.keys])
		rest = rest[h.keys:]
	}
	if m.Frames == van.MaxFrames {
		m.Lens = backend.Bytes(rest[:h.lens:h.lens])
	}
	c.cur, c.part = p, -1
	if len(m.Parts) == 0 && h.vals > 0 {
		m.Vals, m.Placed = c.memory(m.Request && m.Push, h.vals)
	} else if len(m.Parts) == 0 || !c.nextValue() {
		c.finish()
		return p, nil
	}
	return c.fillValues(), nil
}

// placeFrom is the length of answers that are written to the memory that the pull request has named.
const placeFrom = 4 << 10

// memory returns memory for the next value of cur, of n bytes, and makes it c.rest. A value of a request gets none, and is dropped, if the batch
// exceeds the receive budget with it.
func (c *inConn) memory(push bool, n int) (mem backend.Mem, placed bool) {
	p := c.cur
	c.place = nil
	if push || n >= placeFrom && !p.msg.Request && !p.msg.Push {
		spot := p.spot()
		if mem, placed = c.n.places.Find(&p.msg, max(c.part, 0), n, spot, false); spot.Used() {
			c.place = spot
		} else {
			p.spots = p.spots[:len(p.spots)-1]
		}
	}
	if !placed && p.msg.Request && len(p.msg.Parts) > 0 {
		if p.kept += n; p.kept > c.n.most() {
			c.discard, c.rest = n, nil
			return backend.Mem{}, false
		}
	}
	if !placed {
		var b []byte
		if at := len(p.front); cap(p.front)-at >= n { // in place, since other frames lie there
			p.front = p.front[:at+n]
			b = p.front[at : at+n : at+n]
		} else {
			b = c.n.memory(n, 0)
			p.mems, c.later = append(p.mems, b), n-len(b)
		}
		mem = backend.Bytes(b)
	}
	c.rest = mem.Host()
	return mem, placed
}

// nextValue goes to the next part of cur that has a value. It returns false if there is none.
func (c *inConn) nextValue() bool {
	m := &c.cur.msg
	for c.part++; c.part < len(m.Parts); c.part++ {
		if p := &m.Parts[c.part]; m.HasValue(c.part) && p.Len > 0 {
			p.Vals, p.Placed = c.memory(p.Push, p.Len)
			return true
		}
	}
	return false
}

// hasNextValue reports whether cur has a value after the one that is being read.
func (c *inConn) hasNextValue() bool {
	m := &c.cur.msg
	for i := c.part + 1; i < len(m.Parts); i++ {
		if m.HasValue(i) && m.Parts[i].Len > 0 {
			return true
		}
	}
	return false
}

// finish ends the reading of cur, whose values are complete.
func (c *inConn) finish() {
	m := &c.cur.msg
	if !m.Request && !m.Push {
		c.n.places.Answered(m)
	}
	c.cur, c.rest, c.later, c.place = nil, nil, 0, nil
}

// fillValues moves received bytes to the values of the current message. It returns the message when it is complete, otherwise nil.
func (c *inConn) fillValues() *inbound {
	for {
		if c.discard > 0 {
			k := min(c.discard, c.w-c.r)
			c.discard, c.r = c.discard-k, c.r+k
			if c.discard > 0 {
				return nil
			}
		}
		if n := min(len(c.rest), c.w-c.r); n > 0 {
			write := func() error {
				copy(c.rest, c.buf[c.r:c.r+n])
				return nil
			}
			var err error
			if c.place != nil {
				err = c.place.Write(write)
			} else {
				err = write()
			}
			c.r += n
			c.rest = c.rest[n:]
			if err != nil {
				c.discard, c.rest = len(c.rest), nil
				continue
			}
		}
		if len(c.rest) == 0 && c.later > 0 {
			c.grow()
			continue
		}
		if len(c.rest) > 0 {
			return nil
		}
		if len(c.cur.msg.Parts) > 0 && c.nextValue() {
			continue
		}
		p := c.cur
		c.finish()
		return p
	}
}

// grow gives the value that is being read, whose memory is full, more memory.
func (c *inConn) grow() {
	p := c.cur
	last := &p.mems[len(p.mems)-1]
	full := *last
	*last = c.n.memory(len(full)+c.later, len(full))
	c.later -= len(*last) - len(full)
	c.rest = (*last)[copy(*last, full):]
	if mem := backend.Bytes(*last); len(p.msg.Parts) > 0 {
		p.msg.Parts[c.part].Vals = mem
	} else {
		p.msg.Vals = mem
	}
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	c.n.keep(full)
}
