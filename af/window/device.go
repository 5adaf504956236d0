package window

// Windows on devices. Each rank has one allocation: a token, two words for each signal of each rank, and
// behind them the window's memory. All ranks map all of them at Open. A Put is a copy into the receiver's memory, by the
// stream that it names; a signal is a write, behind it in that stream, of how many there have been, into a
// word of the receiver. Who waits has its stream wait until the word says so many. There is no message and no
// kernel in it, and the CPU only queues.
//
// Who owns what: the allocation is this library's, and once it was offered never used again, not even when the window is closed, so what a
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
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/af/collective"
	"github.com/stepaf/stepaf-go/internal/random"
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
