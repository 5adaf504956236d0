package tcp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/links"
)

// outConn is the sender's end of a connection.
type outConn struct {
	n          *common
	peer       *links.Peer
	fd         int
	tls        *encrypted   // nil without STEPAF_TLS; mu
	remove     func(fd int) // makes the source leave it alone
	afterMarks bool         // marks were sent over the van inside before it was installed
	made       time.Time

	mu      sync.Mutex
	gone    bool   // closed: fd is not used any more
	cause   error  // why the connection broke; nil if this node has closed it
	buf     []byte // encoded parts that are not written yet
	read    int    // of buf, written already
	queue   []outEntry
	partial bool // the first entry of the queue has been written in part
	lent    int  // bytes of values in the queue that are not written
	blocked bool // the socket accepts no more for now; the source calls resume later
	iov     [maxParts]unix.Iovec
	broken  chan struct{} // closed when the connection has ended
}

// outEntry is a message that is not written completely, or a piece of one: encoded bytes, and after them one lent value. Long keys
// and lengths are lent like values.
type outEntry struct {
	front     int         // bytes of buf that are not written
	vals      []byte      // the rest of a lent value
	mem       backend.Mem // memory of the value, retained until end
	request   van.Requests
	done      van.Completion
	continues bool // the entry before this one belongs to the same message
	dropped   bool // canceled before any byte was written: front is skipped
}

// end releases the memory of a lent value. For the last entry of a message it also notifies the sender.
func (m *outEntry) end() {
	mem, done := m.mem, m.done
	m.mem, m.done = backend.Mem{}, nil
	mem.Release()
	if done != nil {
		done.Sent()
	}
}

const (
	// lendFrom is the length of values that are written from where they lie. To copy shorter ones takes less than an entry in the list of parts.
	lendFrom = 8 << 10
	// maxParts bounds one system call.
	maxParts = 64
	// maxQueue bounds the entries that wait for one peer, besides STEPAF_SEND_BUDGET.
	maxQueue = 65536
	// keepBuf is the capacity of buf that an idle connection keeps. If buf has more, the queue is not kept either.
	keepBuf = 64 << 10
)

var errGone = errors.New("the connection has ended")

func newOutConn(n *common, peer *links.Peer, fd int, remove func(fd int)) *outConn {
	return &outConn{n: n, peer: peer, fd: fd, remove: remove, broken: make(chan struct{})}
}

// mayWait reports whether the receiver of c may not have begun to read it, because marks have not arrived. Marks also precede the
// connections after c then: if c breaks, data sent before it over the van inside may still be on its way.
func (c *outConn) mayWait() bool { return c.afterMarks && time.Since(c.made) < 2*links.MarkTime }

// insideLost ends c if it may wait for marks.
func (c *outConn) insideLost(cause error) {
	if c.mayWait() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.fail(fmt.Errorf("the connection that carried the data before has broken: %w", cause))
	}
}

// unsent is the number of bytes that wait. c.mu is held.
func (c *outConn) unsent() int { return len(c.buf) - c.read + c.lent + c.tls.pending() }

// send queues msg and writes what the socket accepts. It returns errGone if the connection has ended.
func (c *outConn) send(msg *van.Message) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.gone {
		return errGone
	}
	if c.full() {
		c.flush()
		switch {
		case c.gone:
			return errGone
		case c.full():
			return c.refuse()
		}
	}
	h := head{meta: msg.EncodedLen(), frames: msg.Frames}
	switch {
	case msg.IsBatch():
		h.frames, h.vals = batchFrames, msg.PayloadLen()
	case msg.Frames > 0:
		h.keys, h.vals = msg.Keys.Len(), msg.Vals.Len()
	}
	if msg.Frames == van.MaxFrames {
		h.lens = msg.Lens.Len()
	}
	if bad := h.check(); bad != nil {
		return fmt.Errorf("%w: %s = %v, want %s", van.ErrInvalid, bad.Field, bad.Value, bad.Want)
	}
	start := len(c.buf)
	c.buf = h.append(c.buf)
	at := len(c.buf)
	c.buf = grow(c.buf, h.meta)
	if err := msg.EncodeTo(c.buf[at:]); err != nil {
		c.buf = c.buf[:start]
		return err
	}
	c.put(msg, start)
	if !c.blocked {
		c.flush()
	}
	return nil
}

// put queues msg. buf already has its head and meta, from start on.
func (c *outConn) put(msg *van.Message, start int) {
	first := len(c.queue)
	piece := outEntry{}
	if msg.Request { // answers are not canceled
		piece.request = van.Requests{App: msg.AppID, Customer: msg.CustomerID, First: msg.Timestamp, Count: 1}
	}
	add := func(v *backend.Mem) {
		if v.Len() < lendFrom {
			c.buf = append(c.buf, v.Host()...)
			return
		}
		m := piece
		m.front, m.vals, m.mem = len(c.buf)-start, v.Host(), *v
		v.Retain()
		c.lent += v.Len()
		c.queue = append(c.queue, m)
		start, piece.continues = len(c.buf), true
	}
	if msg.Frames > 0 {
		add(&msg.Keys)
		if msg.Frames == van.MaxFrames {
			add(&msg.Lens)
		}
		add(&msg.Vals)
	}
	for i := range msg.Parts {
		add(&msg.Parts[i].Vals)
	}
	if start < len(c.buf) {
		piece.front = len(c.buf) - start
		c.queue = append(c.queue, piece)
	}
	last := &c.queue[len(c.queue)-1]
	if last == &c.queue[first] && last.mem.Len() == 0 { // all is copied
		last.request.Count = 0
		if msg.Done != nil {
			msg.Done.Sent()
		}
		return
	}
	last.done = msg.Done
}

func grow(b []byte, n int) []byte {
	if cap(b)-len(b) < n {
		b = append(make([]byte, 0, max(2*cap(b), len(b)+n, 4096)), b...)
	}
	return b[: len(b)+n : cap(b)]
}

// full reports whether no message is accepted for now. c.mu is held.
func (c *outConn) full() bool {
	budget := c.n.cfg.SendBudget
	return budget > 0 && c.unsent() >= budget || len(c.queue) >= maxQueue
}

// refuse counts and logs a message that is not accepted. c.mu is held.
func (c *outConn) refuse() error {
	budget := c.n.cfg.SendBudget
	c.n.stats.refused.Add(1)
	c.n.rarely("refused").Warn("a message is refused: its receiver does not take what was sent before", "peer", c.peer.Name(),
		"bytes unsent", c.unsent(), "messages", len(c.queue), "STEPAF_SEND_BUDGET", budget)
	return fmt.Errorf("%w: %d bytes and %d messages are unsent, want less than %d bytes (STEPAF_SEND_BUDGET) and %d messages",
		van.ErrQueueFull, c.unsent(), len(c.queue), budget, maxQueue)
}

// resume continues to write when the socket accepts more. The holder of the feed calls it.
func (c *outConn) resume() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.blocked && !c.gone {
		c.blocked = false
		c.flush()
	}
}

// flush writes until nothing is left or the socket takes no more. c.mu is held.
func (c *outConn) flush() {
	for len(c.queue) > 0 || c.tls.pending() > 0 {
		n := c.parts()
		if n == 0 && c.tls.pending() == 0 {
			c.written(0)
			continue
		}
		wrote, err := c.write(n)
		switch {
		case err == unix.EAGAIN:
			c.blocked = true
			return
		case err == unix.EINTR:
			continue
		case err != nil:
			c.fail(err)
			return
		}
		c.written(wrote)
	}
}

// parts lists what is to be written next, and returns how many parts that are. c.mu is held.
func (c *outConn) parts() int {
	n, at := 0, c.read
	add := func(b []byte) {
		c.iov[n].Base = unsafe.SliceData(b)
		c.iov[n].SetLen(len(b))
		n++
	}
	from := at // of a run of encoded parts without a lent value between them
	for i := range c.queue {
		m := &c.queue[i]
		if m.dropped || len(m.vals) > 0 {
			end := at
			if !m.dropped {
				end += m.front
			}
			if end > from {
				add(c.buf[from:end])
			}
			from = at + m.front
		}
		at += m.front
		if len(m.vals) > 0 && !m.dropped {
			add(m.vals)
		}
		if n >= maxParts-2 {
			return n
		}
	}
	if at > from {
		add(c.buf[from:at])
	}
	return n
}

// write writes the first n parts of c.iov and returns the number of bytes taken. With TLS, write may take only some of the bytes although
// the socket accepts more.
func (c *outConn) write(n int) (int, error) {
	var wrote uintptr
	var e syscall.Errno
	raceSent()
	if c.tls != nil {
		took, err := c.tls.write(c.iov[:n])
		clear(c.iov[:n])
		return took, err
	}
	if n == 1 {
		wrote, _, e = syscall.Syscall6(unix.SYS_SENDTO, uintptr(c.fd), uintptr(unsafe.Pointer(c.iov[0].Base)), uintptr(c.iov[0].Len), unix.MSG_NOSIGNAL, 0, 0)
	} else {
		h := unix.Msghdr{Iov: &c.iov[0]}
		h.SetIovlen(n)
		wrote, _, e = syscall.Syscall(unix.SYS_SENDMSG, uintptr(c.fd), uintptr(unsafe.Pointer(&h)), unix.MSG_NOSIGNAL)
		runtime.KeepAlive(&h)
	}
	runtime.KeepAlive(c)
	clear(c.iov[:n])
	if e != 0 {
		return 0, e
	}
	return int(wrote), nil
}

// written removes n bytes from the queue. c.mu is held.
func (c *outConn) written(n int) {
	c.n.stats.sentBytes.Add(uint64(n))
	i := 0
	for ; i < len(c.queue); i++ {
		m := &c.queue[i]
		if m.dropped {
			c.read += m.front
			continue
		}
		k := min(n, m.front)
		n, m.front, c.read = n-k, m.front-k, c.read+k
		c.partial = c.partial || k > 0
		if m.front > 0 {
			break
		}
		k = min(n, len(m.vals))
		n, m.vals, c.lent = n-k, m.vals[k:], c.lent-k
		if len(m.vals) > 0 {
			break
		}
		c.partial = false
		m.end()
	}
	if i == len(c.queue) {
		clear(c.queue)
		c.queue, c.read = c.queue[:0], 0
		if c.buf = c.buf[:0]; cap(c.buf) > keepBuf {
			c.buf, c.queue = nil, nil
		}
		return
	}
	if i > 0 {
		k := copy(c.queue, c.queue[i:])
		clear(c.queue[k:])
		c.queue = c.queue[:k]
	}
	if c.read > keepBuf && c.read > len(c.buf)/2 {
		c.buf = c.buf[:copy(c.buf, c.buf[c.read:])]
		c.read = 0
	}
}

// cancel gives the memory of canceled requests back. It drops a message of which no byte was written, and replaces the unwritten rest of
// another one by a copy.
func (c *outConn) cancel(q *van.Requests) {
	c.mu.Lock()
	defer c.mu.Unlock()
	begun := false // bytes of the message have been written
	for i := range c.queue {
		m := &c.queue[i]
		if !m.continues || i == 0 {
			begun = i == 0 && (c.partial || m.continues)
		}
		r := &m.request
		if r.Count == 0 || r.App != q.App || r.Customer != q.Customer || r.First < q.First || r.First-q.First >= q.Count {
			continue
		}
		if begun {
			m.vals = bytes.Clone(m.vals)
		} else {
			c.lent -= len(m.vals)
			m.vals, m.dropped = nil, true
		}
		m.end()
	}
}

// fail ends a connection that has broken. c.mu is held.
func (c *outConn) fail(err error) {
	if c.gone {
		return
	}
	c.cause = err
	c.end()
}

// end frees what the connection has. c.mu is held.
func (c *outConn) end() {
	c.gone = true
	for i := range c.queue {
		c.queue[i].end()
	}
	c.queue, c.buf, c.lent, c.read = nil, nil, 0, 0
	c.remove(c.fd)
	_ = unix.Close(c.fd)
	close(c.broken)
}

// broke ends a connection that the peer has closed. It checks the socket first: the event may belong to an earlier connection
// that had the same descriptor.
func (c *outConn) broke() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.gone {
		return
	}
	var b [1]byte
	_, _, err := unix.Recvfrom(c.fd, b[:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
	switch err {
	case unix.EAGAIN, unix.EINTR:
		return
	case nil: // the end, or bytes, which a listener does not send
		err = unix.ECONNRESET
	}
	c.fail(err)
}

// Linger waits until everything has been written, until ctx ends at most.
func (c *outConn) Linger(ctx context.Context) {
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		c.mu.Lock()
		if !c.gone {
			c.blocked = false
			c.flush()
		}
		over := c.gone || len(c.queue) == 0 && c.tls.pending() == 0
		c.mu.Unlock()
		if over {
			return
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// Close ends the connection and returns how many messages were not written.
func (c *outConn) Close() (lost int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.gone {
		return 0
	}
	for i := range c.queue {
		if i == 0 || !c.queue[i].continues {
			lost++
		}
	}
	lost = max(lost, min(c.tls.pending(), 1)) // an encrypted message has left the queue
	c.end()
	return lost
}

// why is the reason for which the connection has ended.
func (c *outConn) why() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.cause == nil {
		return errGone
	}
	return c.cause
}
