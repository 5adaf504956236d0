package streams

// State of an end of an exchange by hosts: its flags in shared host memory, the flags of its peers, and the stream of
// its copies.

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/internal/gpusync"
	"github.com/stepaf/stepaf-go/internal/memfd"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// Flags of an end are a block of flagStride bytes in a file of flagPageLen bytes: two 4-byte flags, and a token. Only
// the owner writes them; other processes map them for reading.
const (
	flagPageLen = 64 << 10
	flagStride  = 128
	goingAt     = 4 // 1; 0 when the exchange is over
	tokenAt     = 16
)

// flagPage is a file of flags, and the offset of its free part.
type flagPage struct {
	fd   int
	page *memfd.Page
	mem  backend.Mem // the page as the device addresses it
	next int         // offset of the next free block
}

// hostFlags is the block of flags of one end.
type hostFlags struct {
	page *memfd.Page
	at   int
}

func (l hostFlags) flag(at int) *atomic.Uint32 {
	return (*atomic.Uint32)(unsafe.Pointer(&l.page.Mem[l.at+at]))
}

// sent returns how many rounds the end has sent.
func (l hostFlags) sent() uint32 { return l.flag(0).Load() }

// over reports whether the end is over.
func (l hostFlags) over() bool { return l.flag(goingAt).Load() == 0 }

// host is the state of an end of an exchange by hosts. Once the exchange is prepared, only Send and Receive use its
// variable fields, under queueing.
type host struct {
	own    hostFlags
	flag   backend.Mem  // the flag with the number of rounds sent, as the device addresses it
	remote []hostFlags  // by peer
	copies []hostCopies // by peer

	round   uint32  // of the next Receive
	since   uint64  // clock.Now of the last Send
	arrived []bool  // by peer: the peer has sent this round, and its copies are queued
	left    int     // number of peers that have not sent
	wait    waiting // of the current Receive
}

// hostCopies are the copies of a peer's data. Those of several peers run at the same time. The first also has the copies of this end's
// private tensors; copyFrom records the event behind both.
type hostCopies struct {
	stream uintptr
	event  backend.Event
	queued bool // copies are in the stream; event marks their end
}

// makeHost initializes h for the given number of peers, and returns the location of its flags for the peers.
func (m *memory) makeHost(b backend.Backend, h *host, peers int) (name flagsName, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.open(b); err != nil {
		return name, err
	}
	h.remote, h.arrived, h.left, h.round = make([]hostFlags, peers), make([]bool, peers), peers, 1
	for range peers {
		var c hostCopies
		if c.event, err = m.dev.NewEvent(); err == nil {
			c.stream, err = m.dev.NewStream()
		}
		h.copies = append(h.copies, c)
		if err != nil {
			return name, err
		}
	}
	l := &m.flags
	if l.page == nil || l.next == flagPageLen {
		n, err := m.newFlagPage()
		if err != nil {
			return name, err
		}
		*l = n
	}
	h.own, h.flag = hostFlags{l.page, l.next}, l.mem.Sub(l.next, 4)
	l.next += flagStride
	name.token = gpusync.NewToken()
	copy(l.page.Mem[h.own.at+tokenAt:], name.token[:])
	h.own.flag(goingAt).Store(1)
	copy(name.file[:], memfd.Name(l.fd))
	name.at = uint32(h.own.at)
	return name, nil
}

// newFlagPage creates a file of flags. The file stays open, so that peers can map it, while its page is referenced.
func (m *memory) newFlagPage() (l flagPage, err error) {
	if l.fd, l.page, err = memfd.NewPage(flagPageLen); err != nil {
		return l, err
	}
	runtime.AddCleanup(l.page, func(fd int) { _ = unix.Close(fd) }, l.fd)
	l.mem, err = m.dev.RegisterHost(backend.Bytes(l.page.Mem).WithOwner(l.page))
	return l, err
}

// reach maps the flags of peer i.
func (h *host) reach(i int, n *flagsName) error {
	page, err := memfd.MapNamed(n.file[:], flagPageLen, false)
	if err != nil {
		return fmt.Errorf("map the peer's shared memory: %w", err)
	}
	if gpusync.Token(page.Mem[n.at+tokenAt:][:gpusync.TokenLen]) != n.token {
		return fmt.Errorf("%w: the shared memory mapped is not the peer's", van.ErrMalformed)
	}
	h.remote[i] = hostFlags{page, int(n.at)}
	return nil
}

// unlessIdle returns stream, or af.Complete if it has done all its work.
func (w *exchangeMemory) unlessIdle(stream af.Stream) (af.Stream, error) {
	if stream == af.Complete {
		return stream, nil
	}
	if idle, err := w.m.dev.Idle(uintptr(stream)); idle || err != nil {
		return af.Complete, err
	}
	captures, err := w.m.dev.Capturing(uintptr(stream))
	if captures {
		err = fmt.Errorf("%w: the stream is being captured; exchanges in streams can be", backend.ErrUnsupported)
	}
	return stream, err
}

// sendByHost makes round n sent when stream has reached this point.
func (w *exchangeMemory) sendByHost(h *host, stream af.Stream, n uint32) error {
	if stream == af.Complete {
		if len(w.copied) == 0 {
			memfd.Wrote()
			h.own.flag(0).Store(n)
			return nil
		}
		c := &h.copies[0]
		stream, c.queued = af.Stream(c.stream), true
	}
	if err := w.copyPrivate(uintptr(stream)); err != nil {
		return err
	}
	return w.m.dev.WriteFlag(uintptr(stream), h.flag, n)
}

// copyFrom queues the copies of peer i's data, and the event of their end.
func (w *exchangeMemory) copyFrom(h *host, i int) error {
	l, c := &w.peers[i], &h.copies[i]
	last := len(l.to) - 1
	c.queued = c.queued || last >= 0
	for k, m := range l.to {
		if k == last {
			return w.m.dev.CopyRecord(m, l.from[k], c.stream, c.event)
		}
		if err := w.m.dev.CopyAsync(m, l.from[k], c.stream); err != nil {
			return err
		}
	}
	if c.queued { // sendByHost has queued copies without an event
		return c.event.Record(c.stream)
	}
	return nil
}

// settle waits until no copy writes to tensors of this end, and returns true. If the device does not answer within
// silence, it returns false. queueing is held.
func (h *host) settle() bool {
	if h == nil {
		return true
	}
	ctx, cancel := context.WithTimeout(context.Background(), silence)
	defer cancel()
	settled := true
	for i := range h.copies {
		c := &h.copies[i]
		if c.queued && c.event.Record(c.stream) == nil {
			c.queued = c.event.Sync(ctx) != nil
		}
		settled = settled && !c.queued
	}
	return settled
}

// end marks all sends of this end as invalid.
func (h *host) end() {
	if h.own.page != nil {
		h.own.flag(goingAt).Store(0)
	}
}

// free releases the device resources of h. No copy may be under way.
func (h *host) free(m *memory) (err error) {
	for _, c := range h.copies {
		if c.event != nil {
			err = errors.Join(err, c.event.Close())
		}
		if c.stream != 0 {
			err = errors.Join(err, m.dev.FreeStream(c.stream))
		}
	}
	return err
}

// Constants of a wait:
//   - pollsEach: polls between two checks of errors and limits.
//   - minPause, maxPause: pauses of a sleeping wait during the first second; longPause: afterwards.
//   - healthCheck: interval between checks of the device.
const (
	pollsEach   = 128
	minPause    = 20 * time.Microsecond
	maxPause    = 200 * time.Microsecond
	longPause   = time.Millisecond
	healthCheck = 10 * time.Millisecond
)

// waiting is the state of a wait in Receive; it survives a Receive that returned because ctx ended.
type waiting struct {
	begun   uint64 // clock.Now; 0: not begun
	healthy uint64 // clock.Now of the last check of the device
	polls   int
	pause   time.Duration // 0: the wait does not sleep yet
}

// pass is called between two polls; it may sleep. It reports whether errors and limits are to be checked.
func (w *waiting) pass(x *Exchange) bool {
	if w.polls++; w.polls%pollsEach != 0 && w.pause == 0 {
		return false
	}
	now := clock.Now()
	if w.begun == 0 {
		w.begun, w.healthy = now, now
	}
	switch took := time.Duration(now - w.begun); {
	case x.spin >= 0 && took >= x.spin:
		w.pause = min(max(2*w.pause, minPause), maxPause)
		if took > time.Second {
			w.pause = longPause
		}
		clock.Sleep(w.pause)
	case x.crowded:
		runtime.Gosched()
	}
	return true
}

// health returns the error of a device that has failed.
func (w *waiting) health(x *Exchange) error {
	h, is := x.mem.m.dev.(backend.HealthChecker)
	if now := clock.Now(); is && time.Duration(now-w.healthy) >= healthCheck {
		w.healthy = now
		return h.Health()
	}
	return nil
}
