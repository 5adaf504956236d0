package streams

// Exchanges that the processors of the ends make, see ByHost: lines in shared host memory by which an end says how many rounds it
// has sent, and copies that the receiver has its device make when it sees that.

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
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

// ByHost is the option with which the processors of the ends make the rounds instead of streams: Send and Receive take the place of QueueSend and
// QueueReceive. All ends of an exchange must have it. A round takes less time then, and both processors.
type ByHost struct{}

func (ByHost) apply(x *Exchange) { x.host = &host{} }

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

// Send tells the peers that the tensors for them are ready once stream has come to this point, af.Complete if they are.
// It does not wait. A worker sends first, a server receives first, and then both take turns.
func (x *Exchange) Send(stream af.Stream) error {
	if err := x.begin("send", true); err != nil {
		return err
	}
	defer x.queueing.Unlock()
	h := x.host
	n := h.round
	if !x.first {
		n-- // that which was received
	}
	if err := x.words.sendByHost(h, stream, n); err != nil {
		if !errors.Is(err, backend.ErrUnsupported) {
			x.fail(err) // a part may be in the stream
		}
		return x.wrong("send", err)
	}
	h.since, x.sendNext = clock.Now(), false
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
		stream = af.Stream(h.stream)
	}
	if err := w.copyPrivate(uintptr(stream)); err != nil {
		return err
	}
	return w.m.dev.WriteFlag(uintptr(stream), h.word, n)
}

// Receive waits until all peers have sent, and copies what they have into the tensors of this end, which hold it when Receive
// returns nil. It waits for as long as ctx lasts, a worker for its Limit at most, from Send: then the exchange is over. When ctx
// has ended tensors may still change, until a later Receive goes on and returns nil, or Close.
func (x *Exchange) Receive(ctx context.Context) error {
	if err := x.begin("receive", false); err != nil {
		return err
	}
	defer x.queueing.Unlock()
	err := x.arrive(ctx)
	if err == nil {
		err = x.finish(ctx)
	}
	if err != nil {
		return err
	}
	h := x.host
	clear(h.came)
	h.left, x.sendNext = len(h.far), true
	h.round++
	h.wait = waiting{}
	return nil
}

// begin takes queueing for a Send or a Receive, or says why that is not the caller's to do now: two at once are a mistake, and the second one could wait
// for as long as the first.
func (x *Exchange) begin(op string, send bool) error {
	if !x.queueing.TryLock() {
		if err := x.Check(); err != nil {
			return err
		}
		return x.wrong(op, fmt.Errorf("%w: another Send or Receive is under way", af.ErrStarted))
	}
	err := x.turn(op, send, true)
	if err != nil {
		x.queueing.Unlock()
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

// arrive waits until all peers have sent the round. What has come is queued to be copied.
func (x *Exchange) arrive(ctx context.Context) error {
	h := x.host
	for all := false; ; all = h.wait.pass(x) {
		for i := range h.far {
			if h.came[i] || h.far[i].sent() != h.round {
				continue
			}
			memfd.Read()
			h.came[i] = true
			h.left--
			if err := x.words.copyFrom(h, i); err != nil {
				x.fail(err)
				return x.ended()
			}
		}
		if h.left == 0 {
			return nil
		}
		if all || x.failed.Load() != nil {
			if err := x.cannotCome(ctx); err != nil {
				return err
			}
		}
	}
}

// cannotCome is why Receive returns without what is awaited.
func (x *Exchange) cannotCome(ctx context.Context) error {
	h := x.host
	if x.failed.Load() != nil {
		return x.ended()
	}
	for i, l := range h.far {
		if l.over() {
			return x.endedThere(i)
		}
		if n := l.sent(); !h.came[i] && n != h.round && n != h.round-1 {
			x.fail(&van.Error{Op: "exchange", Peer: x.dir.node.PeerName(x.peers[i].id), Err: fmt.Errorf("%w: it says that it has sent round %d in round %d", van.ErrMalformed, n, h.round)})
			return x.ended()
		}
	}
	if took := time.Duration(clock.Now() - h.since); x.first && x.timing.limit > 0 && took >= x.timing.limit {
		x.fail(x.late(took, x.missing()))
		return x.ended()
	}
	if ctx.Err() != nil {
		return &van.Error{Op: "receive", Node: x.dir.node.Name(), Peer: x.missing(), Detail: x.String() + ": round " + fmt.Sprint(h.round), Err: van.TimedOut(context.Cause(ctx))}
	}
	return nil
}

// missing names the peers that have not sent.
func (x *Exchange) missing() string {
	var names []string
	for i, p := range x.peers {
		if !x.host.came[i] {
			names = append(names, x.dir.node.PeerName(p.id))
		}
	}
	return strings.Join(names, ", ")
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

// finish waits until the copies of the round are done, and tells whether they are of what was sent: a peer whose end is over may have changed that.
func (x *Exchange) finish(ctx context.Context) error {
	h := x.host
	h.wait = waiting{}
	for all := false; h.copying; all = h.wait.pass(x) {
		done, err := h.event.Query()
		if all && !done && err == nil {
			if ctx.Err() != nil {
				return &van.Error{Op: "receive", Node: x.dir.node.Name(), Detail: x.String() + ": copies of the device", Err: van.TimedOut(context.Cause(ctx))}
			}
			err = h.wait.health(x)
		}
		if err != nil {
			x.fail(err)
			return x.ended()
		}
		h.copying = !done
	}
	if i := slices.IndexFunc(h.far, line.over); i >= 0 {
		return x.endedThere(i)
	}
	if x.failed.Load() != nil {
		return x.ended()
	}
	return nil
}

// endedThere ends the exchange as peer i has ended it. What the peer says of it comes as a message.
func (x *Exchange) endedThere(i int) error {
	for begun := clock.Now(); x.failed.Load() == nil && time.Duration(clock.Now()-begun) < silence; {
		clock.Sleep(maxPause)
	}
	x.left(x.peers[i].id, "its end is over")
	return x.ended()
}

// ended is why the exchange is over, when nothing is copied to tensors of this end any more.
func (x *Exchange) ended() error {
	x.settle()
	return x.Check()
}

// settle waits until nothing is copied to tensors of this end, but not for a device that does not answer. It tells whether that is so. queueing is held.
func (x *Exchange) settle() bool {
	h := x.host
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
