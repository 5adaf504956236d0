package streams

// What exchanges have on the node's device, and in pinned memory of the host: words, with which the streams of the
// ends go on, and what these streams copy.

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/random"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

var le = binary.LittleEndian

// A word's lower half is arrived when its peer has sent. The upper one is when the exchange is over.
const (
	arrived = 1
	goOn    = uint64(arrived)<<32 | arrived
)

// device is what exchanges need of a node's backend.
type device = backend.StreamDevice

// Words lie in device memory of pageLen bytes, which is what drivers share at least, each in a
// line of its own. An exchange has a slot there: a head with a token and with what it copies to peers' words, and
// a word for each peer.
const (
	pageLen    = 2 << 20
	wordStride = 128
	slotHead   = wordStride
	validAt    = 64 // in the head: 1, and 0 when the exchange is over
	maxBytes   = af.MaxTensorBytes
)

// poolBytes bounds the buffers for memory that cannot be shared.
const poolBytes = 4 << 30

// hostPage is how much host memory is pinned at a time.
const hostPage = 4096

// memory is what a node's exchanges take words from.
type memory struct {
	mu      sync.Mutex    // guards what follows; held while the driver is called
	dev     device        // nil before the first Prepare; then it does not change, nor do the next two
	release uintptr       // the stream that lets others go on
	buffers *backend.Pool // for memory that cannot be shared
	page    backend.Mem   // of the device, what is left of the last one
	pinned  backend.Mem   // the same of the host
	lines   lines         // of exchanges by hosts
}

// words are what an exchange copies, and, of one in streams, the words. Once made they do not change, but for what reach adds.
type words struct {
	m      *memory
	slot   backend.Mem // of this end
	lines  []reached   // by peer
	copied []copied
	mapped []backend.Mem // of peers' devices: what they send lies there
	begun  backend.Mem   // pinned host memory: a round has begun; none without a limit
	void   backend.Mem   // likewise: nothing is sent any more
}

// reached is what an end and one of its peers have for each other.
type reached struct {
	word backend.Mem   // of this end, where the peer signals
	far  backend.Mem   // the peer's word, where this end signals
	to   []backend.Mem // of this end's tensors
	from []backend.Mem // what they are copied from, of the same lengths
}

// copied is memory that cannot be shared, and where it is copied for the peers.
type copied struct {
	src backend.Mem
	to  *backend.Buffer
}

// open finds out what the node's device can do, once. mu is held.
func (m *memory) open(b backend.Backend) error {
	if m.dev != nil {
		return nil
	}
	d, err := backend.StreamDeviceOf(b)
	if err != nil {
		return err
	}
	if m.release, err = d.NewStream(); err != nil {
		return err
	}
	m.buffers = backend.NewPool(poolBytes, b.Alloc, b.Free).For(b)
	m.dev = d
	return nil
}

// take takes n bytes of page, which is a new one of size bytes if too little is left. An empty rest is no memory: it would
// point behind the allocation.
func take(page *backend.Mem, n, size int, alloc func(int) (backend.Mem, error)) (m backend.Mem, err error) {
	if page.Len() < n {
		if *page, err = alloc(size); err != nil {
			return m, err
		}
	}
	m = page.Sub(0, n)
	if page.Len() == n {
		*page = backend.Mem{}
	} else {
		*page = page.Sub(n, page.Len()-n)
	}
	return m, nil
}

// make makes the words of an exchange, and says what the peers are to know of them. Who sends first
// finds its own as if answers were there: QueueSend clears them.
func (w *words) make(b backend.Backend, first, limited bool) (flags slot, err error) {
	m, peers := w.m, len(w.lines)
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.open(b); err != nil {
		return flags, err
	}
	n := slotHead + peers*wordStride
	if n > pageLen {
		return flags, fmt.Errorf("%w: %d peers, want at most %d", van.ErrInvalid, peers, pageLen/wordStride-1)
	}
	if w.slot, err = take(&m.page, n, pageLen, m.dev.Alloc); err != nil {
		return flags, err
	}
	host, err := take(&m.pinned, wordStride, hostPage, m.dev.AllocPinned)
	if err != nil {
		return flags, err
	}
	w.void = host.Sub(4, 4)
	half(w.void).Store(0)
	if limited {
		w.begun = host.Sub(0, 4)
		half(w.begun).Store(0)
	}
	image := make([]byte, w.slot.Len())
	le.PutUint64(image, random.Uint64())
	le.PutUint64(image[8:], random.Uint64())
	copy(flags.token[:], image)
	le.PutUint32(image[validAt:], 1)
	for i := range w.lines {
		at := slotHead + i*wordStride
		w.lines[i].word = w.slot.Sub(at, 8)
		if first {
			le.PutUint32(image[at:], arrived)
		}
	}
	if err := m.dev.Copy(w.slot, backend.Bytes(image)); err != nil {
		return flags, err
	}
	flags.export, err = m.dev.Export(w.slot)
	return flags, err
}

// half is 4 bytes of pinned host memory.
func half(m backend.Mem) *atomic.Uint32 { return (*atomic.Uint32)(m.Ptr()) }

func parts(l []af.KeyTensor) []part {
	p := make([]part, len(l))
	for i := range l {
		p[i] = part{key: l[i].Key, len: l[i].Val.Len()}
	}
	return p
}

// share names tensors for peers.
func (w *words) share(l []af.KeyTensor) ([]part, error) {
	w.m.mu.Lock()
	defer w.m.mu.Unlock()
	p := parts(l)
	for i := range p {
		if p[i].len == 0 {
			continue
		}
		m := l[i].Val.Mem()
		e, err := w.m.dev.Export(m)
		if errors.Is(err, backend.ErrNotExportable) {
			b, err := w.m.buffers.Get(m.Len())
			if err != nil {
				return nil, err
			}
			if b == nil {
				return nil, fmt.Errorf("%w: tensors that other processes cannot map, and that are copied for them, want more than %d bytes of this device, with %d for the one with key %d", backend.ErrNoMemory, poolBytes, m.Len(), l[i].Key)
			}
			w.copied = append(w.copied, copied{m, b})
			if e, err = w.m.dev.Export(b.Mem()); err != nil {
				return nil, err
			}
		} else if err != nil {
			return nil, err
		}
		p[i].export = e
	}
	return p, nil
}

// putBack ends the use of buffers, of an exchange that is over and was not captured.
func (w *words) putBack() {
	for _, c := range w.copied {
		c.to.Put()
	}
	w.copied = nil
}

// unmap lets go of peers' memory, which streams of this end read no more. Where streams may wait the driver would wait for them: then it
// stays mapped until the backend is closed.
func (w *words) unmap() (err error) {
	if b, is := w.m.dev.(backend.StreamBlocker); is && b.MayBlock() {
		return nil
	}
	for _, m := range w.mapped {
		err = errors.Join(err, w.m.dev.CloseImport(m))
	}
	w.mapped = nil
	return err
}

// reach maps the words of peer i.
func (w *words) reach(i int, flags *slot) error {
	m, _, err := van.MapExport(w.m.dev, flags.export, int(flags.at)+wordStride)
	if err != nil {
		return err
	}
	var token [tokenLen]byte
	if err := w.m.dev.Copy(backend.Bytes(token[:]), m.Sub(0, tokenLen)); err != nil {
		return err
	}
	if !bytes.Equal(token[:], flags.token[:]) {
		return fmt.Errorf("%w: the memory mapped is not the peer's; it may be on another host", van.ErrMalformed)
	}
	w.lines[i].far = m.Sub(int(flags.at), 4)
	return nil
}

// mapOut maps what peer i sends, for tensors of l.
func (w *words) mapOut(i int, out []part, l []af.KeyTensor) error {
	of := &w.lines[i]
	for k := range l {
		if t := &out[k]; t.len > 0 {
			from, all, err := van.MapExport(w.m.dev, t.export, t.len)
			if all.Len() > 0 {
				w.mapped = append(w.mapped, all)
			}
			if err != nil {
				return err
			}
			of.to, of.from = append(of.to, l[k].Val.Mem()), append(of.from, from)
		}
	}
	return nil
}

// copyPrivate puts copies of memory that cannot be shared into stream s.
func (w *words) copyPrivate(s uintptr) error {
	for _, c := range w.copied {
		if err := w.m.dev.CopyAsync(c.to.Mem().Sub(0, c.src.Len()), c.src, s); err != nil {
			return err
		}
	}
	return nil
}

// send puts a send into stream s.
func (w *words) send(s uintptr) error {
	if err := w.copyPrivate(s); err != nil {
		return err
	}
	for i := range w.lines {
		if err := w.m.dev.WriteFlag(s, w.lines[i].word.Sub(0, 4), 0); err != nil {
			return err
		}
	}
	valid := w.slot.Sub(validAt, 4)
	for i := range w.lines {
		if err := w.m.dev.CopyAsync(w.lines[i].far, valid, s); err != nil {
			return err
		}
	}
	if w.begun.Len() == 0 {
		return nil
	}
	return w.m.dev.WriteFlag(s, w.begun, unseen)
}

// receive puts a receive into stream s.
func (w *words) receive(s uintptr) error {
	for i := range w.lines {
		l := &w.lines[i]
		if err := w.m.dev.WaitBits(s, l.word, goOn); err != nil {
			return err
		}
		for k, m := range l.to {
			if err := w.m.dev.CopyAsync(m, l.from[k], s); err != nil {
				return err
			}
		}
	}
	return nil
}

// wait tells whether a round is under way, as the words in the device's memory say.
func (w *words) wait() bool {
	waits := false
	for i := range w.lines {
		var word [4]byte
		err := w.m.dev.Copy(backend.Bytes(word[:]), w.lines[i].word.Sub(0, 4))
		waits = waits || err != nil || le.Uint32(word[:]) != arrived
	}
	return waits
}

// silence is how long a device may take at least to say what is in its memory.
const silence = time.Second

// end makes nothing count that the streams of the exchange send from now on, and takes back what peers have not
// seen: they may hear of the end later than this node's streams go on, if it cannot tell them.
//
// Only words are written, and the end of that is seen in host memory: the driver takes such writes also while a launch
// waits for room in the queue of another stream, unless that is the default stream.
func (w *words) end() error {
	d, s := w.m.dev, w.m.release
	err := d.WriteFlag(s, w.slot.Sub(validAt, 4), 0)
	for i := range w.lines {
		if err == nil {
			err = d.WriteFlag(s, w.lines[i].far, 0)
		}
	}
	if err == nil {
		err = d.WriteFlag(s, w.void, 1)
	}
	if err != nil {
		return err
	}
	// The peers must not be told before it is done. Nothing in this stream waits.
	late := time.After(silence)
	for pause := 5 * time.Microsecond; half(w.void).Load() == 0; pause = min(2*pause, time.Millisecond) {
		select {
		case <-time.After(pause):
		case <-late:
			return fmt.Errorf("%w: a word of the device", van.ErrTimeout)
		}
	}
	return nil
}

// free makes the streams of the exchange go on.
func (w *words) free() (err error) {
	for i := range w.lines {
		if err == nil {
			err = w.m.dev.WriteFlag(w.m.release, w.lines[i].word.Sub(4, 4), arrived)
		}
	}
	return err
}
