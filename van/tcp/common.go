package tcp

import (
	"crypto/tls"
	"errors"
	"log/slog"
	"math/bits"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/internal/logx"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/auth"
	"github.com/stepaf/stepaf-go/van/env"
	"github.com/stepaf/stepaf-go/van/landing"
)

// common is what the connections of a node share.
type common struct {
	cfg         *env.Config
	log         *slog.Logger
	causes      logx.Causes
	stats       stats
	guard       auth.Guard
	tls         *tls.Config // nil without STEPAF_TLS
	places      *landing.Table
	id          atomic.Int32
	incarnation uint32
	classes     atomic.Pointer[map[int]int] // traffic classes by node id

	mu   sync.Mutex // guards what follows: messages and memory that are used again
	free []*inbound
	mem  [48][][]byte // by size class
	kept int          // bytes in mem
}

// stats counts without locks.
type stats struct {
	sentMessages, sentBytes, receivedMessages, receivedBytes atomic.Uint64
	malformed, refused, fenced, late                         atomic.Uint64
}

func (s *stats) received(bytes int) { s.receivedMessages.Add(1); s.receivedBytes.Add(uint64(bytes)) }

// rarely returns the log for messages that may be repeated often.
func (n *common) rarely(cause string) *slog.Logger { return n.causes.Log(n.log, cause) }

// classOf is the traffic class of data for peer id; 0 is the system's.
func (n *common) classOf(id int) int {
	if c := n.classes.Load(); c != nil {
		return (*c)[id]
	}
	return 0
}

// most is the largest number of bytes of a received batch that have no place of their own.
func (n *common) most() int {
	if n.cfg.RecvBudgetPeer <= 0 || n.cfg.RecvBudget <= 0 || failpoint.On("recv-budget") {
		return van.MaxValues
	}
	return max(n.cfg.RecvBudgetPeer, n.cfg.RecvBudget)
}

// tune sets the options of a connection.
func (n *common) tune(fd int) error {
	_, limit := n.cfg.Heartbeats()
	return errors.Join(unix.SetNonblock(fd, true), unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1), keepAlive(fd, limit))
}

// idleLimit is how long the host of an idle connection may be silent if PS_HEARTBEAT_TIMEOUT is no limit.
const idleLimit = 20 * time.Second

// maxKeepAlive is the longest interval of keep-alives that the kernel accepts, in seconds.
const maxKeepAlive = 32767

// keepAlive makes the kernel end a connection without unacknowledged bytes whose peer's host has answered nothing for limit and a fourth
// more, in whole seconds. If limit is 0, idleLimit applies. A stopped process does not matter: its host answers.
func keepAlive(fd int, limit time.Duration) error {
	if limit <= 0 {
		limit = idleLimit
	}
	every := min(max(int((limit/4+time.Second-1)/time.Second), 1), maxKeepAlive)
	count := max(int((limit+limit/4+time.Second-1)/time.Second)/every-1, 1)
	set := func(level, option, value int) error { return unix.SetsockoptInt(fd, level, option, value) }
	return errors.Join(set(unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, every), set(unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, every),
		set(unix.IPPROTO_TCP, unix.TCP_KEEPCNT, count), set(unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1))
}

// adopt makes p's message one that has been received.
func (n *common) adopt(p *inbound) {
	m := &p.msg
	m.Receiver = int(n.id.Load())
	m.Trace().PostRecv = clock.Now()
	m.Adopt(n, unsafe.Pointer(p))
}

// Free implements van.Owner.
func (n *common) Free(m *van.Message) { n.release((*inbound)(m.Native())) }

// maxFree bounds the messages that an idle van keeps, keepFront the memory of each, and keepValues the values for which it has lists.
const (
	maxFree    = 256
	keepFront  = bufLen
	keepValues = 256
)

// keepMemory bounds the memory for values that an idle van keeps. startMemory is the most that a value gets before its bytes arrive.
// growMemory is the factor by which its memory grows when it is full.
const (
	keepMemory  = 256 << 20
	startMemory = 1 << 20
	growMemory  = 4
)

// get returns a message for use.
func (n *common) get() *inbound {
	n.mu.Lock()
	defer n.mu.Unlock()
	if k := len(n.free); k > 0 {
		p := n.free[k-1]
		n.free = n.free[:k-1]
		return p
	}
	p := &inbound{}
	p.msg.Reset()
	return p
}

// sizeClass is the size class of n bytes: classes differ by the factor two.
func sizeClass(n int) int { return bits.Len(uint(n - 1)) }

// memory returns memory, with undefined contents, for a value of size bytes, of which arrived have been received. New memory for a long
// value is shorter than size: a peer that announces a long value and sends nothing reserves only startMemory.
func (n *common) memory(size, arrived int) []byte {
	k := sizeClass(size)
	n.mu.Lock()
	if l := n.mem[k]; len(l) > 0 {
		b := l[len(l)-1]
		n.mem[k] = l[:len(l)-1]
		n.kept -= cap(b)
		n.mu.Unlock()
		return b[:size]
	}
	n.mu.Unlock()
	size = min(size, max(startMemory, growMemory*arrived))
	return make([]byte, size, 1<<sizeClass(size))
}

// keep keeps b for use again. n.mu is held.
func (n *common) keep(b []byte) {
	if size := cap(b); size > 0 && n.kept+size <= keepMemory {
		k := bits.Len(uint(size)) - 1 // size is at least that of the class
		n.mem[k] = append(n.mem[k], b)
		n.kept += size
	}
}

// finishPlaces ends the use of the places of p's values. It returns an error if the memory of one was taken back meanwhile.
func (n *common) finishPlaces(p *inbound) (err error) {
	for _, x := range p.spots {
		if e := n.places.Finish(x); e != nil {
			err = e
		}
	}
	p.spots = p.spots[:0]
	return err
}

// release takes back a received message.
func (n *common) release(p *inbound) {
	_ = n.finishPlaces(p)
	p.conn, p.kept = nil, 0
	p.msg.Reset()
	if cap(p.spots) > keepValues {
		p.spots = nil
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if cap(p.front) > keepFront {
		n.keep(p.front)
		p.front = nil
	}
	for i, b := range p.mems {
		n.keep(b)
		p.mems[i] = nil
	}
	if p.mems = p.mems[:0]; cap(p.mems) > keepValues {
		p.mems = nil
	}
	if len(n.free) < maxFree {
		n.free = append(n.free, p)
	}
}
