package streams

// What an end of an exchange by hosts has: its line in shared host memory, its peers' lines, and the stream that copies what they have sent.

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/internal/memfd"
	"github.com/stepaf/stepaf-go/internal/random"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// Lines lie in files of linesLen bytes, each line in one of lineLen bytes: two words, and a token. Only their owner writes
// there, others have mapped them to be read.
const (
	linesLen = 64 << 10
	lineLen  = 128
	goingAt  = 4 // 1, and 0 when the exchange is over
	tokenAt  = 16
)

// lines are a file of lines, and what is left of it.
type lines struct {
	fd   int
	page *memfd.Page
	mem  backend.Mem // the same, as the device knows it
	next int         // where the next line begins
}

// lineName is what peers find a line by.
type lineName struct {
	file  [memfd.NameLen]byte
	at    uint32
	token [tokenLen]byte
}

// line is that of an end.
type line struct {
	page *memfd.Page
	at   int
}

func (l line) word(at int) *atomic.Uint32 {
	return (*atomic.Uint32)(unsafe.Pointer(&l.page.Mem[l.at+at]))
}

// sent is how many rounds the line's end has sent.
func (l line) sent() uint32 { return l.word(0).Load() }

// over tells whether the end is over.
func (l line) over() bool { return l.word(goingAt).Load() == 0 }

// host is what an end has of an exchange by hosts. Once met, only Send and Receive use what can change, under queueing.
type host struct {
	own    line
	word   backend.Mem // the number of rounds sent in it, as the device knows it
	far    []line      // by peer
	stream uintptr     // of copies; 0: none
	event  backend.Event

	round   uint32  // that the next Receive is of
	since   uint64  // clock.Now of the last Send
	came    []bool  // by peer: it has sent this round, and copies are queued
	left    int     // peers that have not
	copying bool    // copies are queued that event says the end of
	wait    waiting // of the Receive that goes on
}

// makeHost makes what an end of so many peers has, and says what these are to know of it.
func (m *memory) makeHost(b backend.Backend, h *host, peers int) (name lineName, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.open(b); err != nil {
		return name, err
	}
	h.far, h.came, h.left, h.round = make([]line, peers), make([]bool, peers), peers, 1
	if h.event, err = m.dev.NewEvent(); err != nil {
		return name, err
	}
	if h.stream, err = m.dev.NewStream(); err != nil {
		return name, err
	}
	l := &m.lines
	if l.page == nil || l.next == linesLen {
		n, err := m.newLines()
		if err != nil {
			return name, err
		}
		*l = n
	}
	h.own, h.word = line{l.page, l.next}, l.mem.Sub(l.next, 4)
	l.next += lineLen
	token := l.page.Mem[h.own.at+tokenAt:][:tokenLen]
	binary.NativeEndian.PutUint64(token, random.Uint64())
	binary.NativeEndian.PutUint64(token[8:], random.Uint64())
	h.own.word(goingAt).Store(1)
	copy(name.file[:], memfd.Name(l.fd))
	name.at = uint32(h.own.at)
	copy(name.token[:], token)
	return name, nil
}

// newLines makes a file, which is open, and so may be mapped by others, for as long as somebody here refers to its page.
func (m *memory) newLines() (l lines, err error) {
	if l.fd, err = memfd.New(linesLen); err != nil {
		return l, err
	}
	if l.page, err = memfd.Map(l.fd, linesLen); err != nil {
		return l, errors.Join(err, unix.Close(l.fd))
	}
	runtime.AddCleanup(l.page, func(fd int) { _ = unix.Close(fd) }, l.fd)
	l.mem, err = m.dev.RegisterHost(backend.Bytes(l.page.Mem).WithOwner(l.page))
	return l, err
}

// reach maps the line of peer i.
func (h *host) reach(i int, n *lineName) error {
	page, err := memfd.MapNamed(n.file[:], linesLen, false)
	if err != nil {
		return fmt.Errorf("map the peer's shared memory: %w", err)
	}
	if string(page.Mem[n.at+tokenAt:][:tokenLen]) != string(n.token[:]) {
		return fmt.Errorf("%w: the shared memory mapped is not the peer's", van.ErrMalformed)
	}
	h.far[i] = line{page, int(n.at)}
	return nil
}

// sendByHost says that round n is sent when stream has come here.
func (w *words) sendByHost(h *host, stream af.Stream, n uint32) error {
	if stream != af.Complete {
		idle := false
		var err error
		if i, is := w.m.dev.(backend.StreamIdler); is {
			idle, err = i.Idle(uintptr(stream))
		}
		if !idle && err == nil {
			var captures bool
			if captures, err = w.m.dev.Capturing(uintptr(stream)); captures {
				err = fmt.Errorf("%w: the stream is being captured; exchanges in streams can be", backend.ErrUnsupported)
			}
		}
		if err != nil {
			return err
		}
		if idle {
			stream = af.Complete
		}
	}
	if stream == af.Complete {
		if len(w.copied) == 0 {
			memfd.Wrote()
			h.own.word(0).Store(n)
			return nil
		}
		stream, h.copying = af.Stream(h.stream), true
	}
	if err := w.copyPrivate(uintptr(stream)); err != nil {
		return err
	}
	return w.m.dev.WriteFlag(uintptr(stream), h.word, n)
}

// copyFrom queues the copies of what peer i has, and behind those of the last peer their event.
func (w *words) copyFrom(h *host, i int) error {
	l := &w.lines[i]
	last := len(l.to) - 1
	for k, m := range l.to {
		var err error
		if h.copying = true; k == last && h.left == 0 {
			return w.m.dev.CopyRecord(m, l.from[k], h.stream, h.event)
		} else if err = w.m.dev.CopyAsync(m, l.from[k], h.stream); err != nil {
			return err
		}
	}
	if h.copying && h.left == 0 {
		return h.event.Record(h.stream)
	}
	return nil
}

// settle waits until nothing is copied to tensors of this end, but not for a device that does not answer. It tells whether that is so. queueing is held.
func (h *host) settle() bool {
	if h == nil || !h.copying {
		return true
	}
	ctx, cancel := context.WithTimeout(context.Background(), silence)
	defer cancel()
	err := h.event.Record(h.stream)
	if err == nil {
		err = h.event.Sync(ctx)
	}
	h.copying = err != nil
	return err == nil
}

// end says that nothing of what this end has sent counts any more.
func (h *host) end() {
	if h.own.page != nil {
		h.own.word(goingAt).Store(0)
	}
}

// free gives back what the device has for it, when nothing is copied any more.
func (h *host) free(m *memory) (err error) {
	if h.event != nil {
		err = h.event.Close()
	}
	if h.stream != 0 {
		err = errors.Join(err, m.dev.FreeStream(h.stream))
	}
	return err
}

// The looks at what is awaited between two at all else, the pauses of a wait that sleeps, for most of the first second and then, and how often
// it asks whether the device works.
const (
	looksEach   = 128
	minPause    = 20 * time.Microsecond
	maxPause    = 200 * time.Microsecond
	longPause   = time.Millisecond
	healthCheck = 10 * time.Millisecond
)

// waiting is the wait of a Receive, also of one that goes on.
type waiting struct {
	begun   uint64 // clock.Now; 0: it has not
	healthy uint64 // clock.Now when the device was asked last
	looks   int
	pause   time.Duration // 0: it does not sleep yet
}

// pass passes a moment between two looks, and tells whether it is time to look at all else.
func (w *waiting) pass(x *Exchange) bool {
	if w.looks++; w.looks%looksEach != 0 && w.pause == 0 {
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

// health is why the device does nothing any more.
func (w *waiting) health(x *Exchange) error {
	h, is := x.words.m.dev.(backend.HealthChecker)
	if now := clock.Now(); is && time.Duration(now-w.healthy) >= healthCheck {
		w.healthy = now
		return h.Health()
	}
	return nil
}
