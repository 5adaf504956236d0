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
	seenLen  = 64
)

// lap is how many signals are counted in a word before the other one's turn. Who waits clears the other
// one in the middle: the driver compares signed numbers of 64 bits, so a word cannot begin anew by itself.
var lap = uint64(1) << 31

// place is the word of the n'th signal, from 1, and what it says then.
func place(n uint64) (word int, count uint64) { return int((n - 1) / lap % 2), (n-1)%lap + 1 }

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
	whole        backend.Mem // this rank's allocation
	at           int         // where the window's memory begins in all of them
	own, release uintptr     // the stream of calls with af.Complete; that which makes others go on
	links        []*link     // by rank
	unwatch      func()
	stopExit     func()

	mu      sync.Mutex
	ready   bool          // Open has returned it
	changed chan struct{} // closed when that, or what is known of a link, has changed

	reading sync.Mutex
	seen    backend.Mem // pinned host memory of two words: one of the device, and how often that was asked for
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

	// Guarded by p.send.
	used bool     // something was put
	last uintptr  // the stream in which
	sent []uint64 // signals

	waiting sync.Mutex      // held while a wait is put into a stream
	taken   []atomic.Uint64 // signals that have come or that a stream waits for; changed with waiting held
}

// newOnDevice allocates and clears this rank's memory of n bytes.
func newOnDevice(w *Window, n int) (*onDevice, error) {
	d, err := backend.StreamDeviceOf(w.app.Backend())
	if err != nil {
		return nil, err
	}
	v := &onDevice{w: w, d: d, changed: make(chan struct{}), freed: make(chan struct{})}
	v.at = (headLen + len(w.peers)*w.signals*wordsLen + memAlign - 1) / memAlign * memAlign
	if v.whole, err = d.Alloc((v.at + n + page) / page * page); err != nil {
		return nil, err
	}
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
	if v.seen, err = d.AllocPinned(seenLen); err != nil {
		return nil, err
	}
	(*atomic.Uint32)(v.seen.Sub(4, 4).Ptr()).Store(0)
	for r, p := range w.peers {
		l := &link{p: p, sent: make([]uint64, w.signals), taken: make([]atomic.Uint64, w.signals)}
		if r == w.self {
			l.far = v.whole
		}
		v.links = append(v.links, l)
	}
	if v.own, err = d.NewStream(); err != nil {
		return nil, err
	}
	if v.release, err = d.NewStream(); err != nil {
		return nil, errors.Join(err, d.FreeStream(v.own))
	}
	return v, nil
}

// hint says what to do where ranks cannot map each other's memory.
const hint = "windows on devices are for GPUs of one host that reach each other (stepaf doctor); without Device all ranks have one on their hosts"

// meet maps the memory of all ranks, or fails on all.
func (v *onDevice) meet(ctx context.Context, c *collective.Comm) error {
	w := v.w
	offer, bad := v.offer()
	all, err := Exchange(ctx, c, offer)
	if err != nil {
		return cmp.Or(bad, err)
	}
	for r, b := range all {
		if r != w.self && bad == nil && len(b) > 0 { // it says why not
			bad = v.reach(r, b)
		}
	}
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
			return fmt.Errorf("%w at %s: %s", backend.ErrUnavailable, w.layer.Name(r), text)
		}
		if v.links[r].far.Len() == 0 {
			return fmt.Errorf("%w: %s offers no memory", van.ErrMalformed, w.layer.Name(r))
		}
	}
	return nil
}

// offer names this rank's memory for others.
func (v *onDevice) offer() ([]byte, error) {
	e, err := v.d.Export(v.whole)
	if err != nil {
		return nil, err
	}
	b := make([]byte, van.ExportLen+tokenLen)
	van.PutExport(b, &e)
	return b, v.d.Copy(backend.Bytes(b[van.ExportLen:]), v.whole.Sub(0, tokenLen))
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
	m, err := v.d.Map(e, v.whole.Len())
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
	v.ready = true
	v.mu.Unlock()
	if err := v.w.over.Load(); err != nil { // meanwhile
		return *err
	}
	return nil
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
	err := backend.CheckDevice(v.d, src)
	if err == nil {
		err = v.behind(l, s)
	}
	if err == nil && src.Len() > 0 {
		err = v.d.CopyAsync(l.far.Sub(v.at+offset, src.Len()), src, s)
	}
	if err == nil {
		l.last, l.used = s, true
	}
	if err == nil && signal != noSignal {
		word, count := place(l.sent[signal] + 1)
		if err = v.d.WriteFlag(s, v.word(l.far, v.w.self, int(signal), word).Sub(0, 4), uint32(count)); err == nil {
			l.sent[signal]++
		}
	}
	if err != nil {
		return &van.Error{Op: op, Node: v.w.app.Name(), Peer: v.w.layer.Name(rank), Detail: v.w.String(), Err: err}
	}
	return nil
}

// word is one of the two of a signal of rank from, in the memory of its receiver.
func (v *onDevice) word(whole backend.Mem, from, signal, word int) backend.Mem {
	return whole.Sub(headLen+(from*v.w.signals+signal)*wordsLen+8*word, 8)
}

// behind makes stream s wait for what was put to the rank in another one. p.send is held.
func (v *onDevice) behind(l *link, s uintptr) error {
	if !l.used || l.last == s {
		return nil
	}
	e, err := v.d.NewEvent()
	if err != nil {
		return err
	}
	if err = e.Record(l.last); err == nil {
		err = v.d.WaitEvent(s, e)
	}
	return errors.Join(err, e.Close())
}

// wait makes stream s wait for a signal of a rank.
func (v *onDevice) wait(op string, rank, signal int, s uintptr) error {
	l := v.links[rank]
	l.waiting.Lock()
	defer l.waiting.Unlock()
	if err := v.refuse(op, s); err != nil {
		return err
	}
	n := l.taken[signal].Add(1) // before the look at what has failed: who notes that looks at this then
	err := l.p.failure(op)
	if err != nil { // but what has come before may be taken
		if came, failed := v.came(rank, signal, n); came && failed == nil {
			err = nil
		}
	}
	if err != nil {
		l.taken[signal].Add(^uint64(0))
		return err
	}
	word, count := place(n)
	if err = v.d.WaitCount(s, v.word(v.whole, rank, signal, word), count); err != nil {
		l.taken[signal].Add(^uint64(0))
	} else if count == lap/2 {
		err = v.d.WriteFlag(s, v.word(v.whole, rank, signal, 1-word).Sub(0, 4), 0)
	}
	if err != nil {
		return l.wrong(op, err)
	}
	return nil
}

func (l *link) wrong(op string, err error) error {
	w := l.p.w
	return &van.Error{Op: op, Node: w.app.Name(), Peer: w.layer.Name(l.p.rank), Detail: w.String(), Err: err}
}

// came tells whether the n'th signal has come.
func (v *onDevice) came(rank, signal int, n uint64) (bool, error) {
	word, count := place(n)
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
	if word, count := place(n); count == lap/2 {
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
	l := v.links[rank]
	l.p.send.Lock()
	var e backend.Event
	var err error
	if l.used {
		if e, err = v.d.NewEvent(); err == nil {
			err = e.Record(l.last)
		}
	}
	l.p.send.Unlock()
	if e == nil && err == nil {
		return nil
	}
	begun, limit := clock.Now(), v.w.layer.Limit(ctx)
	if limit > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, limit, van.ErrTimeout)
		defer cancel()
	}
	if err == nil {
		if err = e.Sync(ctx); err != nil && ctx.Err() != nil {
			err = timeout(context.Cause(ctx))
		}
	}
	if e != nil {
		err = errors.Join(err, e.Close())
	}
	if err != nil {
		return &van.Error{Op: op, Node: v.w.app.Name(), Peer: v.w.layer.Name(rank), Detail: v.w.String() + ": the stream has not come so far",
			Elapsed: elapsed(begun), Limit: limit, Err: err}
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
	taken := v.links[rank].taken
	for signal := range taken {
		n := taken[signal].Load()
		if n == 0 {
			continue
		}
		if came, err := v.came(rank, signal, n); !came || err != nil {
			return true
		}
	}
	return false
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
		v.tell()
		v.mu.Lock()
		ready := v.ready
		v.mu.Unlock()
		if !ready { // nothing is in streams
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

// free makes streams that wait go on.
func (v *onDevice) free() error {
	for rank := range v.links {
		for signal := range v.w.signals {
			for word := range 2 {
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
	<-v.freed
	if v.unwatch != nil {
		v.unwatch()
		v.stopExit()
	}
	_ = v.giveBack()
}

// giveBack gives the streams back.
func (v *onDevice) giveBack() error {
	v.reading.Lock()
	defer v.reading.Unlock()
	v.shut = true
	return errors.Join(v.d.FreeStream(v.own), v.d.FreeStream(v.release))
}

// close ends this rank's part, of a window that is over.
func (v *onDevice) close(ctx context.Context) (err error) {
	waits := false
	for r := range v.links {
		waits = waits || v.awaited(r)
	}
	if waits || !errors.Is(*v.w.over.Load(), errClosed) {
		v.end()
		<-v.freed
	}
	for r := range v.links { // in streams that have waited
		err = cmp.Or(err, v.flush(ctx, "close window", r))
	}
	v.unwatch()
	v.stopExit()
	return errors.Join(err, v.giveBack())
}
