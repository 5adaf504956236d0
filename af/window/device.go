package window

// Windows on devices. Each rank has one allocation: a token, two words for each signal of each rank, and
// behind them the window's memory. All ranks map all of them at Open. A Put is a copy into the receiver's memory, by the
// stream that it names; a signal is a write, behind it in that stream, of how many there have been, into a
// word of the receiver. Who waits has its stream wait until the word says so many. There is no message and no
// kernel in it, and the CPU only queues.
//
// Who owns what: the allocation is this library's, and never used again, not even when the window is closed, so what a
// stale or lost rank may still write, or a copy that was queued long ago, is memory that nobody else has. This is why
// tensors of callers cannot be windows on devices. It is freed when the backend is closed, as the mappings are: the
// driver frees and unmaps nothing while streams may wait.
//
// The lower half of a word is its sender's. The upper half is its owner's, and makes all who wait go on.
// Streams of a window that is over go on only when all other ranks have said that it is over for them, too, or are lost (or
// have said nothing for partLimit): what they write then, from tensors that were never filled, is nothing that a rank takes for
// good, since its Check says why it is not. As for exchanges of af/streams, a node that ends waits for nobody.

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/af/collective"
	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/internal/random"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

const (
	// page is what drivers share at least.
	page     = 2 << 20
	tokenLen = 16
	headLen  = 128 // where words begin
	wordsLen = 16  // of one signal of one rank: two words, which take turns
	memAlign = 256

	hostStride = 64 // of the words in host memory: a cache line each
)

// lap is how many signals are counted in a word before the other one's turn. Who waits clears the other
// one in the middle: the driver compares signed numbers of 64 bits, so a word cannot begin anew by itself.
var lap = uint64(1) << 31

// place is the word of the n'th signal, from 1, and what it says then.
func (v *onDevice) place(n uint64) (word int, count uint64) {
	return int((n - 1) / v.lap % 2), (n-1)%v.lap + 1
}

// partLimit is how long streams of a window that is over wait for a rank to say that it is over there, and exitLimit the
// same when the node has ended.
const (
	partLimit = postoffice.DefaultTimeout
	exitLimit = time.Second
)

// onDevice is what a window on a device has.
type onDevice struct {
	w            *Window
	d            *backend.StreamDevice
	lap          uint64
	whole        backend.Mem // this rank's allocation
	words        backend.Mem // pinned host memory: what read needs, and for each rank link.mark
	offered      bool        // others may map whole
	at           int         // where the window's memory begins in all of them
	own, release uintptr     // the stream of calls with af.Complete; that which makes others go on
	links        []*link     // by rank
	unwatch      func()
	stopExit     func()

	mu      sync.Mutex
	ready   bool          // Open has returned it
	changed chan struct{} // closed when that, or what is known of a link, has changed

	reading sync.Mutex
	seen    backend.Mem // two words in host memory: one of the device, and how often that was asked for
	asked   uint32      // guarded by reading
	shut    bool        // likewise: the streams are given back

	ending sync.Once
	freed  chan struct{} // closed when streams that waited go on
}

// link is what it has for a rank, which may be this one.
type link struct {
	p    *peer
	far  backend.Mem // the rank's allocation
	over bool        // the window is over for it, or it is lost; guarded by onDevice.mu

	// mark is a word in host memory. Right behind each put and signal its stream writes the number of that there, so
	// others can wait for it without what was put into the stream since, and nothing is made or destroyed for it.
	mark backend.Mem
	done *atomic.Uint32 // the same
	puts atomic.Uint32  // the last number; changed with p.send held. Numbers go in a circle

	// Guarded by p.send.
	last   uintptr  // the stream of the last one
	sent   []uint64 // signals
	lent   []lent   // sources in use, in their order
	broken error    // a mark could not be written

	waiting  sync.Mutex      // held while a wait is put into a stream, which may wait for room there
	deciding sync.Mutex      // held while it is decided whether a wait may be; never for longer than silence
	taken    []atomic.Uint64 // signals that have come or that a stream waits for; changed with waiting or deciding held
}

// lent is a source that a stream reads until put number n is done.
type lent struct {
	mem backend.Mem
	n   uint32
}

// arrived tells whether put number n is done, and all before.
func (l *link) arrived(n uint32) bool { return int32(l.done.Load()-n) >= 0 }

// reap lets go of the sources of puts that are done. p.send is held.
func (l *link) reap() {
	k := 0
	for k < len(l.lent) && l.arrived(l.lent[k].n) {
		l.lent[k].mem.Release()
		k++
	}
	if k > 0 {
		l.lent = slices.Delete(l.lent, 0, k)
	}
}

// newOnDevice makes what needs no memory of the device.
func newOnDevice(w *Window) (*onDevice, error) {
	d, err := backend.StreamDeviceOf(w.app.Backend())
	if err != nil {
		return nil, err
	}
	v := &onDevice{w: w, d: d, lap: lap, changed: make(chan struct{}), freed: make(chan struct{})}
	v.at = (headLen + len(w.peers)*w.signals*wordsLen + memAlign - 1) / memAlign * memAlign
	for _, p := range w.peers {
		v.links = append(v.links, &link{p: p, sent: make([]uint64, w.signals), taken: make([]atomic.Uint64, w.signals)})
	}
	return v, nil
}

// allocate takes and clears this rank's memory of n bytes, and returns its name for others.
func (v *onDevice) allocate(n int) (offer []byte, err error) {
	d := v.d
	if v.whole, err = d.Alloc((v.at + n + page) / page * page); err != nil {
		return nil, err
	}
	v.w.mem = v.whole.Sub(v.at, n)
	v.w.mem.Retain()
	zero := make([]byte, min(v.whole.Len(), page))
	for at := 0; at < v.whole.Len() && err == nil; at += len(zero) {
		err = d.Copy(v.whole.Sub(at, len(zero)), backend.Bytes(zero))
	}
	token := binary.NativeEndian.AppendUint64(binary.NativeEndian.AppendUint64(nil, random.Uint64()), random.Uint64())
	if err == nil {
		err = d.Copy(v.whole.Sub(0, tokenLen), backend.Bytes(token))
	}
	if err != nil {
		return nil, err
	}
	if v.words, err = d.AllocPinned((1 + len(v.links)) * hostStride); err != nil {
		return nil, err
	}
	clear(v.words.Host())
	v.seen = v.words.Sub(0, 8)
	for r, l := range v.links {
		l.mark = v.words.Sub((1+r)*hostStride, 4)
		l.done = (*atomic.Uint32)(l.mark.Ptr())
	}
	v.links[v.w.self].far = v.whole
	if v.own, err = d.NewStream(); err != nil {
		return nil, err
	}
	if v.release, err = d.NewStream(); err != nil {
		return nil, err
	}
	e, err := d.Export(v.whole)
	if err != nil {
		return nil, err
	}
	offer = make([]byte, van.ExportLen, van.ExportLen+tokenLen)
	van.PutExport(offer, &e)
	return append(offer, token...), nil
}

// discard frees memory that no other rank knows of, unless the driver would wait for streams that wait.
func (v *onDevice) discard() error {
	if s, is := v.d.Backend.(backend.StreamBlocker); v.offered || is && s.MayBlock() {
		return nil
	}
	var err error
	if v.whole.Len() > 0 {
		err = v.d.Free(v.whole)
	}
	if v.words.Len() > 0 {
		err = errors.Join(err, v.d.FreePinned(v.words))
	}
	return err
}

// hint says what to do where ranks cannot map each other's memory.
const hint = "windows on devices are for GPUs of one host that reach each other (stepaf doctor); without Device all ranks have one on their hosts"

// meet takes memory of n bytes and maps that of all ranks, or fails on all. Nothing is offered before all ranks have theirs.
func (v *onDevice) meet(ctx context.Context, c *collective.Comm, n int) error {
	offer, bad := v.allocate(n)
	if err := v.hear(ctx, c, bad); err != nil {
		return err
	}
	v.offered = true
	all, err := Exchange(ctx, c, offer)
	if err != nil {
		return err
	}
	for r, b := range all {
		if r != v.w.self && bad == nil {
			bad = v.reach(r, b)
		}
	}
	return v.hear(ctx, c, bad)
}

// hear is bad, which all ranks are told of, or what another one says.
func (v *onDevice) hear(ctx context.Context, c *collective.Comm, bad error) error {
	why := ""
	if bad != nil {
		why = bad.Error()
	}
	said, err := Exchange(ctx, c, []byte(why[:min(len(why), 1000)]))
	if err = cmp.Or(bad, err); err != nil {
		return err
	}
	for r, text := range said {
		if len(text) > 0 {
			return fmt.Errorf("%w at %s: %s", backend.ErrUnavailable, v.w.layer.Name(r), text)
		}
	}
	return nil
}

// reach maps the memory that a rank has offered.
func (v *onDevice) reach(rank int, offer []byte) error {
	bad := func(err error) error {
		return &van.Error{Op: "map device memory", Peer: v.w.layer.Name(rank), Err: err, Hint: hint}
	}
	if len(offer) != van.ExportLen+tokenLen {
		return bad(fmt.Errorf("%w: an offer of %d bytes, want %d", van.ErrMalformed, len(offer), van.ExportLen+tokenLen))
	}
	e, err := van.ParseExport(offer, v.whole.Len())
	if err != nil {
		return bad(err)
	}
	m, err := van.MapExport(v.d, e, v.whole.Len())
	if err != nil {
		return bad(err)
	}
	var token [tokenLen]byte
	if err := v.d.Copy(backend.Bytes(token[:]), m.Sub(0, tokenLen)); err != nil {
		return bad(err)
	}
	if !bytes.Equal(token[:], offer[van.ExportLen:]) {
		return bad(fmt.Errorf("%w: the memory mapped is not the rank's; it may be on another host", van.ErrMalformed))
	}
	v.links[rank].far = m
	return nil
}

// begin lets the window be used.
func (v *onDevice) begin() error {
	app := v.w.app
	v.unwatch = app.OnPeer(v.peerChanged)
	v.stopExit = app.OnExit(func() {
		v.w.fail(cmp.Or(app.Alive(), van.ErrClosed))
		select {
		case <-v.freed:
		case <-time.After(exitLimit):
		}
	})
	v.mu.Lock()
	defer v.mu.Unlock()
	if err := v.w.over.Load(); err != nil { // meanwhile; nothing is in streams
		return *err
	}
	v.ready = true
	return nil
}

// isReady tells whether Open has returned the window, or is about to.
func (v *onDevice) isReady() bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.ready
}

// peerChanged is told that a node is lost, or there. It must not block.
func (v *onDevice) peerChanged(id int, up bool, _ error) {
	if r, is := slices.BinarySearch(v.w.layer.NodeIDs(), id); is && !up {
		v.over(r)
	}
}

// over notes that the window is over for a rank.
func (v *onDevice) over(rank int) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.links[rank].over = true
	v.wake()
}

// wake makes parted look again. v.mu is held.
func (v *onDevice) wake() {
	close(v.changed)
	v.changed = make(chan struct{})
}

// refuse is why nothing can be put into stream s.
func (v *onDevice) refuse(op string, s uintptr) error {
	captures, err := v.d.Capturing(s)
	if err == nil && captures {
		err = fmt.Errorf("%w: the stream is being captured, and a graph would count each signal once; exchanges of af/streams can be captured", backend.ErrUnsupported)
	}
	if err != nil {
		return v.w.bad(op, err)
	}
	return nil
}

// put puts the copy of src, and the signal if there is one, into a stream.
func (v *onDevice) put(op string, rank, offset int, src backend.Mem, signal uint16, s uintptr) error {
	if s == uintptr(af.Complete) {
		s = v.own
	}
	l := v.links[rank]
	p := l.p
	p.send.Lock()
	defer p.send.Unlock()
	if err := cmp.Or(p.unsendable(op), v.refuse(op, s)); err != nil {
		return err
	}
	err := v.readable(src)
	if err == nil {
		err = v.behind(l, s)
	}
	if err == nil {
		err = v.queue(l, offset, src, signal, s)
	}
	if err != nil {
		return l.wrong(op, err)
	}
	return nil
}

// readable is why streams cannot copy src. Copies of other host memory may wait for all that is in the stream, with a lock held.
func (v *onDevice) readable(src backend.Mem) error {
	if src.Len() > 0 && src.OnHost() {
		if p, is := v.d.Backend.(backend.PinTeller); !is || !p.Pinned(src) {
			return fmt.Errorf("%w: %d bytes of host memory that is not pinned, want memory of the device, or of AllocPinned or RegisterHost of the node's backend", van.ErrInvalid, src.Len())
		}
	}
	return backend.CheckDevice(v.d, src)
}

// queue puts a copy, a signal and the mark into stream s. p.send is held.
func (v *onDevice) queue(l *link, offset int, src backend.Mem, signal uint16, s uintptr) (err error) {
	l.reap()
	n := l.puts.Load() + 1
	if src.Len() > 0 {
		if err = v.d.CopyAsync(l.far.Sub(v.at+offset, src.Len()), src, s); err != nil {
			return err
		}
		if src.OnHost() || src.Owner() != nil {
			src.Retain()
			l.lent = append(l.lent, lent{src, n})
		}
	}
	if signal != noSignal {
		word, count := v.place(l.sent[signal] + 1)
		if err = v.d.WriteFlag(s, v.word(l.far, v.w.self, int(signal), word).Sub(0, 4), uint32(count)); err == nil {
			l.sent[signal]++
		}
	}
	if e := v.d.WriteFlag(s, l.mark, n); e != nil { // nobody will know when the copy is done
		l.broken = e
		return cmp.Or(err, e)
	}
	l.puts.Store(n)
	l.last = s
	return err
}

// word is one of the two of a signal of rank from, in the memory of its receiver.
func (v *onDevice) word(whole backend.Mem, from, signal, word int) backend.Mem {
	return whole.Sub(headLen+(from*v.w.signals+signal)*wordsLen+8*word, 8)
}

// behind makes stream s wait for what was put to the rank in another one, and for nothing that was put into that since.
// p.send is held.
func (v *onDevice) behind(l *link, s uintptr) error {
	n := l.puts.Load()
	if l.broken != nil || l.last == s || l.arrived(n) {
		return l.broken
	}
	return v.d.WaitFlag(s, l.mark, n)
}

// wait makes stream s wait for a signal of a rank.
func (v *onDevice) wait(op string, rank, signal int, s uintptr) error {
	l := v.links[rank]
	l.waiting.Lock()
	defer l.waiting.Unlock()
	if err := v.refuse(op, s); err != nil {
		return err
	}
	n, err := v.claim(op, rank, signal)
	if err != nil {
		return err
	}
	word, count := v.place(n)
	if err = v.d.WaitCount(s, v.word(v.whole, rank, signal, word), count); err != nil {
		l.taken[signal].Store(n - 1)
	} else if count == v.lap/2 {
		err = v.d.WriteFlag(s, v.word(v.whole, rank, signal, 1-word).Sub(0, 4), 0)
	}
	if err != nil {
		return l.wrong(op, err)
	}
	return nil
}

// claim takes the next signal for a stream, which may wait for it: also when the rank is gone, if the signal has come. Who
// notes that it is gone looks afterwards at what is claimed. waiting is held.
func (v *onDevice) claim(op string, rank, signal int) (n uint64, err error) {
	l := v.links[rank]
	l.deciding.Lock()
	defer l.deciding.Unlock()
	n = l.taken[signal].Load() + 1
	if err = l.p.failure(op); err != nil {
		if came, failed := v.came(rank, signal, n); !came || failed != nil {
			return 0, err
		}
	}
	l.taken[signal].Store(n)
	return n, nil
}

// claimed is how many signals were taken, when no claim is being decided.
func (l *link) claimed(signal int) uint64 {
	l.deciding.Lock()
	defer l.deciding.Unlock()
	return l.taken[signal].Load()
}

func (l *link) wrong(op string, err error) error {
	w := l.p.w
	return &van.Error{Op: op, Node: w.app.Name(), Peer: w.layer.Name(l.p.rank), Detail: w.String(), Err: err}
}

// came tells whether the n'th signal has come.
func (v *onDevice) came(rank, signal int, n uint64) (bool, error) {
	word, count := v.place(n)
	got, err := v.read(v.word(v.whole, rank, signal, word).Sub(0, 4))
	return uint64(got) >= count, err
}

// silence is how long a device may take to say what is in a word.
const silence = 10 * time.Second

// read reads 4 bytes of the device. It makes no stream and no event, and its copy is to pinned memory: the driver does
// nothing else while a launch waits for room in the queue of another stream, which may wait for who asks here.
func (v *onDevice) read(m backend.Mem) (uint32, error) {
	v.reading.Lock()
	defer v.reading.Unlock()
	if v.shut {
		return 0, errClosed
	}
	v.asked++
	err := v.d.CopyAsync(v.seen.Sub(0, 4), m, v.release)
	if err == nil {
		err = v.d.WriteFlag(v.release, v.seen.Sub(4, 4), v.asked)
	}
	if err != nil {
		return 0, err
	}
	done := (*atomic.Uint32)(v.seen.Sub(4, 4).Ptr())
	for begun := clock.Now(); done.Load() != v.asked; {
		switch took := elapsed(begun); {
		case took >= silence:
			return 0, fmt.Errorf("%w: a word of the device", van.ErrTimeout)
		case took >= 50*time.Microsecond:
			clock.Sleep(20 * time.Microsecond)
		default:
			runtime.Gosched()
		}
	}
	return (*atomic.Uint32)(v.seen.Ptr()).Load(), nil
}

// take takes a signal that has come.
func (v *onDevice) take(rank, signal int) (bool, error) {
	l := v.links[rank]
	l.waiting.Lock()
	defer l.waiting.Unlock()
	n := l.taken[signal].Load() + 1
	came, err := v.came(rank, signal, n)
	if !came || err != nil {
		return false, err
	}
	l.taken[signal].Store(n)
	if word, count := v.place(n); count == v.lap/2 {
		v.reading.Lock()
		defer v.reading.Unlock()
		if !v.shut {
			err = v.d.WriteFlag(v.release, v.word(v.whole, rank, signal, 1-word).Sub(0, 4), 0)
		}
	}
	return true, err
}

// maxPause bounds the time between two looks at a word of the device.
const maxPause = time.Millisecond

// await waits for a signal on the host.
func (v *onDevice) await(ctx context.Context, op string, rank, signal int) error {
	w, p := v.w, v.links[rank].p
	begun, limit := clock.Now(), w.layer.Limit(ctx)
	var timer *time.Timer
	for pause := 20 * time.Microsecond; ; {
		over := p.failure(op) // before the look: what has come before the failure counts
		if came, err := v.take(rank, signal); err != nil {
			return v.links[rank].wrong(op, err)
		} else if came {
			return nil
		}
		if err := w.app.Alive(); err != nil {
			w.fail(err)
		}
		took := elapsed(begun)
		x := waiter{p: p, what: waitSignal, n: uint64(signal)}
		switch {
		case over != nil:
			return over
		case limit > 0 && took >= limit:
			return x.late(op, begun, limit, van.ErrTimeout)
		case took < aliveEvery/500: // a look takes its time, too
			if ctx.Err() == nil {
				continue
			}
		}
		if timer == nil {
			timer = time.NewTimer(pause)
			defer timer.Stop()
		} else {
			timer.Reset(pause)
		}
		select {
		case <-timer.C:
			pause = min(2*pause, maxPause)
		case <-ctx.Done():
			return x.late(op, begun, 0, timeout(context.Cause(ctx)))
		}
	}
}

// flush waits until all that was put to a rank is there.
func (v *onDevice) flush(ctx context.Context, op string, rank int) error {
	w, l := v.w, v.links[rank]
	l.p.send.Lock()
	n, err := l.puts.Load(), l.broken
	l.reap()
	l.p.send.Unlock()
	if err == nil && l.arrived(n) {
		return nil
	}
	begun, limit := clock.Now(), w.layer.Limit(ctx)
	if err == nil {
		w.app.PollFor(ctx, limit, func() bool { return l.arrived(n) })
		err = v.sleep(ctx, begun, limit, func() bool { return l.arrived(n) })
	}
	l.p.send.Lock()
	l.reap()
	l.p.send.Unlock()
	if err != nil {
		return &van.Error{Op: op, Node: w.app.Name(), Peer: w.layer.Name(rank), Detail: w.String() + ": the stream has not come so far",
			Elapsed: elapsed(begun), Limit: limit, Err: err}
	}
	return nil
}

// The pauses of sleep, and how often it looks whether the device works: if not, streams do nothing any more.
const (
	minSleep   = 20 * time.Microsecond
	maxSleep   = 200 * time.Microsecond
	healthLook = 100 * time.Millisecond
)

// sleep waits until done, which streams make true.
func (v *onDevice) sleep(ctx context.Context, begun uint64, limit time.Duration, done func() bool) error {
	looked := begun
	for pause := minSleep; !done(); pause = min(2*pause, maxSleep) {
		switch {
		case ctx.Err() != nil:
			return timeout(context.Cause(ctx))
		case limit > 0 && elapsed(begun) >= limit:
			return van.ErrTimeout
		case elapsed(looked) >= healthLook:
			if _, err := v.read(v.whole.Sub(0, 4)); err != nil {
				return err
			}
			looked = clock.Now()
		}
		clock.Sleep(pause)
	}
	return nil
}

// flushIn makes stream s wait until all that was put to a rank is there.
func (v *onDevice) flushIn(op string, rank int, s uintptr) error {
	l := v.links[rank]
	l.p.send.Lock()
	defer l.p.send.Unlock()
	err := v.refuse(op, s)
	if err == nil {
		if err = v.behind(l, s); err != nil {
			err = l.wrong(op, err)
		}
	}
	return err
}

// awaited tells whether a stream waits for a signal of a rank that has not come.
func (v *onDevice) awaited(rank int) bool {
	for signal := range v.w.signals {
		if n := v.links[rank].claimed(signal); n > 0 {
			if came, err := v.came(rank, signal, n); !came || err != nil {
				return true
			}
		}
	}
	return false
}

// anyAwaited is a rank for which a stream waits, or -1.
func (v *onDevice) anyAwaited() int {
	for r := range v.links {
		if v.awaited(r) {
			return r
		}
	}
	return -1
}

// left ends the window if a stream waits for what a rank that has closed its end has not signalled. What it has signalled has come.
func (v *onDevice) left(rank int, err error) {
	if v.w.over.Load() == nil && v.awaited(rank) {
		v.w.fail(fmt.Errorf("%w; a stream waits for %s", err, v.w.layer.Name(rank)))
	}
}

// end is called when the window is over: the others are told, and when it is for them, too, streams that
// wait go on.
func (v *onDevice) end() {
	v.ending.Do(func() {
		defer close(v.freed)
		if !v.offered { // no other rank has this window
			return
		}
		v.tell()
		if !v.isReady() { // nothing is in streams
			return
		}
		v.parted()
		if err := v.free(); err != nil {
			v.w.app.Log().Error("streams that wait for a window may not go on", "window", v.w.String(), "err", err)
		}
	})
}

// tell tells the other ranks that the window is over here.
func (v *onDevice) tell() {
	for _, p := range v.w.peers {
		if p.rank == v.w.self {
			continue
		}
		p.recv.Lock()
		n := note{verb: verbOver, signal: noSignal}
		m := p.message(&p.answer, &n, false, v.w.timestamp(p.tells)|1)
		p.tells++
		err := v.w.app.Send(m)
		p.recv.Unlock()
		if err != nil && !errors.Is(err, van.ErrPeerLost) && !errors.Is(err, van.ErrClosed) {
			v.w.app.Log().Info("could not tell a rank that a window is over", "window", v.w.String(), "rank", p.rank, "err", err)
		}
	}
}

// parted waits until the window is over for all other ranks, as far as can be known.
func (v *onDevice) parted() {
	patience := time.NewTimer(partLimit)
	defer patience.Stop()
	for {
		v.mu.Lock()
		changed := v.changed
		i := slices.IndexFunc(v.links, func(l *link) bool { return l.p.rank != v.w.self && !l.over && l.p.gone.Load() == nil })
		v.mu.Unlock()
		if i < 0 {
			return
		}
		select {
		case <-changed:
		case <-v.w.app.Ended():
			return
		case <-patience.C:
			v.w.app.Log().Warn("streams go on, but a rank has not said that the window is over there, too", "window", v.w.String(), "rank", i)
			return
		}
	}
}

// free makes streams that wait go on: those for a signal wait in the word of the last one that was claimed, or in the one before.
func (v *onDevice) free() error {
	for rank, l := range v.links {
		for signal := range v.w.signals {
			n := l.claimed(signal) // the window is over: what is claimed from here on has come
			if n == 0 {
				continue
			}
			last, _ := v.place(n)
			for word := range 2 {
				if word != last && n <= v.lap {
					continue
				}
				if err := v.d.WriteFlag(v.release, v.word(v.whole, rank, signal, word).Sub(4, 4), 1); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// giveUp ends what Open has begun. It has not returned the window.
func (v *onDevice) giveUp() {
	v.end()
	if v.unwatch != nil {
		v.unwatch()
		v.stopExit()
	}
	_ = v.giveBack()
}

// giveBack gives the streams back.
func (v *onDevice) giveBack() (err error) {
	v.reading.Lock()
	defer v.reading.Unlock()
	v.shut = true
	for _, s := range []uintptr{v.own, v.release} {
		if s != 0 {
			err = errors.Join(err, v.d.FreeStream(s))
		}
	}
	return err
}

// letGo is the first part of Close. If a stream waits here the window is over, and the stream goes on, before anything waits for
// that: also a put in it that waits for room, with a lock held. The error says that what was put may be nothing good.
func (v *onDevice) letGo() error {
	r := v.anyAwaited()
	if r < 0 {
		return nil
	}
	late := slices.ContainsFunc(v.links, func(l *link) bool { return !l.arrived(l.puts.Load()) })
	w := v.w
	err := fmt.Errorf("%w: this window, while a stream waited for a signal of %s", van.ErrClosed, w.layer.Name(r))
	w.fail(err)
	v.end()
	if late {
		return &van.Error{Op: "close window", Node: w.app.Name(), Detail: w.String() + ": what was put and had not arrived is not whole", Err: err}
	}
	return nil
}

// close ends this rank's part, of a window that is over. Streams that were let go get the limit once more to
// come to what they have put.
func (v *onDevice) close(ctx context.Context) (err error) {
	if !errors.Is(*v.w.over.Load(), errClosed) || v.anyAwaited() >= 0 {
		v.end()
		var cancel context.CancelFunc
		ctx, cancel = v.w.limited()
		defer cancel()
	}
	for r := range v.links {
		err = cmp.Or(err, v.flush(ctx, "close window", r))
	}
	v.unwatch()
	v.stopExit()
	return errors.Join(err, v.giveBack())
}
