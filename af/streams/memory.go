package streams

// Memory of exchanges, on the node's device and in pinned host memory: the flags by which streams synchronize, and
// the tensors that the streams copy.

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/gpusync"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

var le = binary.LittleEndian

// device is the backend interface that exchanges need.
type device = backend.StreamDevice

// Flags are in pages of gpusync.PageLen bytes of device memory. An exchange has a slot in a page: a head with a token,
// and for each peer a flag and a gate, each in a cache line of its own. The lower half of a flag is set when the peer
// has sent; that of a gate is set until the peer's end is over. The upper halves are set when this end is over. A
// receive waits for the flag, and its copies wait for the gate.
const (
	slotStride = 128
	slotHead   = slotStride
	gateAt     = 64 // from the flag
	maxBytes   = af.MaxTensorBytes
)

// poolBytes bounds the buffers for memory that cannot be shared.
const poolBytes = 4 << 30

// memory allocates flags for the exchanges of a node.
type memory struct {
	mu      sync.Mutex    // guards the fields below; held during calls of the driver
	dev     device        // nil before the first Prepare; afterwards constant, as are the next two fields
	release uintptr       // the stream that releases waiting streams
	loaded  bool          // the kernel that copies is loaded
	buffers *backend.Pool // for memory that cannot be shared
	page    gpusync.Page  // of device memory
	pinned  gpusync.Page  // of pinned host memory
	flags   flagPage      // of exchanges by hosts
}

// exchangeMemory is the memory that an exchange copies, and its flags unless it is an exchange by hosts. It is
// constant after its creation, except for reach and mapOut; Exchange.queueing guards the last four fields.
type exchangeMemory struct {
	m      *memory
	slot   backend.Mem  // slot of this end
	peers  []peerMemory // by peer
	copied []copied
	mapped []backend.Mem       // memory of peers' devices, with the tensors that they send
	begun  backend.Mem         // flag in pinned host memory: a round has begun; empty without a limit
	void   backend.Mem         // flag in pinned host memory: sends are invalid
	sends  []backend.FlagWrite // the words that a send writes, in this order; nil before the first
	copies []backend.GatedCopy // of a receive; nil before the first
	since  [6]uintptr          // the point after the latest captured send
	branch uintptr             // the stream of captured receives; 0 before the first
}

// peerMemory is the memory that an end and one of its peers share.
type peerMemory struct {
	flag   gpusync.Flag  // flag of this end, written by the peer
	gate   gpusync.Flag  // gate of this end, closed by the peer
	remote backend.Mem   // flag of the peer, written by this end
	closes backend.Mem   // gate of the peer
	to     []backend.Mem // tensors of this end
	from   []backend.Mem // the peer's tensors that are copied to them, of the same lengths
}

// copied is a tensor that cannot be shared, and the buffer that it is copied to for the peers.
type copied struct {
	src backend.Mem
	to  *backend.Buffer
}

// open determines the capabilities of the node's device, once. mu is held.
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

// make allocates the flags of an exchange, and returns their location for the peers. For an end that sends first, its
// flags start as arrived: QueueSend clears them.
func (w *exchangeMemory) make(b backend.Backend, first, limited bool) (flags flagsName, err error) {
	m, peers := w.m, len(w.peers)
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.open(b); err != nil {
		return flags, err
	}
	n := slotHead + peers*slotStride
	if n > gpusync.PageLen {
		return flags, fmt.Errorf("%w: %d peers, want at most %d", van.ErrInvalid, peers, gpusync.PageLen/slotStride-1)
	}
	if w.slot, err = m.page.Take(n, gpusync.PageLen, m.dev.Alloc); err != nil {
		return flags, err
	}
	host, err := m.pinned.TakePinned(m.dev)
	if err != nil {
		return flags, err
	}
	w.void = host.Sub(4, 4)
	gpusync.OnHost(w.void).Store(0)
	if limited {
		w.begun = host.Sub(0, 4)
		gpusync.OnHost(w.begun).Store(0)
	}
	image := make([]byte, w.slot.Len())
	flags.token = gpusync.NewToken()
	copy(image, flags.token[:])
	for i := range w.peers {
		at := slotHead + i*slotStride
		w.peers[i].flag, w.peers[i].gate = gpusync.Flag{Mem: w.slot.Sub(at, gpusync.FlagLen)}, gpusync.Flag{Mem: w.slot.Sub(at+gateAt, gpusync.FlagLen)}
		le.PutUint32(image[at+gateAt:], gpusync.Set)
		if first {
			le.PutUint32(image[at:], gpusync.Set)
		}
	}
	if err := m.dev.Copy(w.slot, backend.Bytes(image)); err != nil {
		return flags, err
	}
	// Loading the kernel can wait for all streams, so it is not left to the first receive. The kernel waits for the
	// token, which is not 0: a peer that ends early closes its gate, and the release stream must not wait for that.
	if !m.loaded {
		if err := m.dev.CopyGated([]backend.GatedCopy{{Dst: w.slot.Sub(0, 0), Src: w.slot.Sub(0, 0), Gate: w.slot.Sub(0, gpusync.FlagLen)}}, m.release); err != nil {
			return flags, err
		}
		m.loaded = true
	}
	flags.export, err = m.dev.Export(w.slot)
	return flags, err
}

func parts(l []af.KeyTensor) []part {
	p := make([]part, len(l))
	for i := range l {
		p[i] = part{key: l[i].Key, len: l[i].Val.Len()}
	}
	return p
}

// share exports tensors to peers.
func (w *exchangeMemory) share(l []af.KeyTensor) ([]part, error) {
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
				return nil, fmt.Errorf("%w: tensors that other processes cannot map, and that are copied for them, need more than %d bytes of this device, with %d for the one with key %d", backend.ErrNoMemory, poolBytes, m.Len(), l[i].Key)
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

// putBack returns the buffers of an ended exchange that was not captured.
func (w *exchangeMemory) putBack() {
	for _, c := range w.copied {
		c.to.Put()
	}
	w.copied = nil
}

// unmap unmaps the memory of peers, which no stream of this end reads any more. If streams of the device may wait,
// the driver would wait for them; the memory then stays mapped until the backend is closed.
func (w *exchangeMemory) unmap() (err error) {
	if backend.MayBlockOf(w.m.dev)() {
		return nil
	}
	for _, m := range w.mapped {
		err = errors.Join(err, w.m.dev.CloseImport(m))
	}
	w.mapped = nil
	return err
}

// reach maps the flags of peer i.
func (w *exchangeMemory) reach(i int, flags *flagsName) error {
	m, err := gpusync.Map(w.m.dev, flags.export, int(flags.at)+slotStride, flags.token, "the peer's")
	if err != nil {
		return err
	}
	w.peers[i].remote, w.peers[i].closes = m.Sub(int(flags.at), 4), m.Sub(int(flags.at)+gateAt, 4)
	return nil
}

// mapOut maps what peer i sends, for tensors of l.
func (w *exchangeMemory) mapOut(i int, out []part, l []af.KeyTensor) error {
	of := &w.peers[i]
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

// copyPrivate queues copies of tensors that cannot be shared in stream s.
func (w *exchangeMemory) copyPrivate(s uintptr) error {
	gate := w.peers[0].gate.Mem
	for _, c := range w.copied {
		var err error
		if to := c.to.Mem().Sub(0, c.src.Len()); gate.Len() > 0 {
			err = w.m.dev.CopyGated([]backend.GatedCopy{{Dst: to, Src: c.src, Gate: gate}}, s)
		} else { // an exchange by hosts, whose streams never wait for a peer
			err = w.m.dev.CopyAsync(to, c.src, s)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// send queues a send in stream s.
func (w *exchangeMemory) send(s uintptr, captures bool) error {
	if err := w.copyPrivate(s); err != nil {
		return err
	}
	if w.sends == nil {
		if w.begun.Len() > 0 { // first: a query of the device must not take this round for the former one
			w.sends = append(w.sends, backend.FlagWrite{Word: w.begun, V: unseen})
		}
		for i := range w.peers {
			w.sends = append(w.sends, backend.FlagWrite{Word: w.peers[i].flag.Lower(), V: 0})
		}
		for i := range w.peers {
			w.sends = append(w.sends, backend.FlagWrite{Word: w.peers[i].remote, V: gpusync.Set})
		}
	}
	if err := w.m.dev.WriteFlags(s, w.sends); err != nil {
		return err
	}
	if captures {
		w.since = point(w.m.dev, s)
	}
	return nil
}

// receive queues a receive in stream s. A captured receive overlaps the work captured in s since the send before it, if that is in the
// same graph.
func (w *exchangeMemory) receive(s uintptr, captures bool) error {
	if captures {
		if now := point(w.m.dev, s); now[0] != 0 && now[0] == w.since[0] && now != w.since {
			return w.receiveInBranch(s)
		}
	}
	return w.receiveIn(s)
}

// receiveInBranch captures a receive in another stream, after the latest send, and makes stream s wait for it.
func (w *exchangeMemory) receiveInBranch(s uintptr) (err error) {
	d := w.m.dev
	if w.branch == 0 {
		if w.branch, err = d.NewStream(); err != nil {
			return err
		}
	}
	if err = d.Follow(w.branch, s); err == nil {
		err = d.Rewind(w.branch, w.since)
	}
	if err == nil {
		err = w.receiveIn(w.branch)
	}
	if err == nil {
		err = d.Follow(s, w.branch)
	}
	return err
}

// point returns d.Point, or a point of no capture if the driver lacks it.
func point(d device, s uintptr) [6]uintptr {
	at, err := d.Point(s)
	if err != nil {
		return [6]uintptr{}
	}
	return at
}

// receiveIn queues a receive in stream s: it waits for all peers, and copies from all at the same time.
func (w *exchangeMemory) receiveIn(s uintptr) error {
	for i := range w.peers {
		if err := w.m.dev.WaitBits(s, w.peers[i].flag.Mem, gpusync.Either); err != nil {
			return err
		}
	}
	if w.copies == nil {
		for i := range w.peers {
			l := &w.peers[i]
			for k := range l.to {
				w.copies = append(w.copies, backend.GatedCopy{Dst: l.to[k], Src: l.from[k], Gate: l.gate.Mem})
			}
		}
	}
	return w.m.dev.CopyGated(w.copies, s)
}

// wait reports whether a round is under way according to the flags in device memory.
func (w *exchangeMemory) wait() bool {
	waits := false
	for i := range w.peers {
		var word [4]byte
		err := w.m.dev.Copy(backend.Bytes(word[:]), w.peers[i].flag.Lower())
		waits = waits || err != nil || le.Uint32(word[:]) != gpusync.Set
	}
	return waits
}

// silence is the minimum time that a device is given to answer a query.
const silence = time.Second

// end closes the gates of the peers, which then accept no send that they have not seen, and no later send of the
// exchange's streams: if this node cannot notify them, they may learn of the end after its streams have continued.
//
// end only writes flags, and polls for the last one in host memory. The driver accepts such writes also while a
// kernel launch is blocked because the queue of another stream is full, unless that is the default stream.
func (w *exchangeMemory) end() error {
	d, s := w.m.dev, w.m.release
	var err error
	for i := range w.peers {
		if err == nil {
			err = d.WriteFlag(s, w.peers[i].closes, 0)
		}
	}
	if err == nil {
		err = d.WriteFlag(s, w.void, 1)
	}
	if err != nil {
		return err
	}
	// The peers must not be notified before the writes are done. This stream contains nothing that waits.
	return gpusync.AwaitWrite(gpusync.OnHost(w.void), 1, silence)
}

// free releases the waiting streams of the exchange.
func (w *exchangeMemory) free() (err error) {
	for i := range w.peers { // gates first: a receive whose flags are released copies nothing
		if err == nil {
			err = w.peers[i].gate.Release(w.m.dev, w.m.release)
		}
	}
	for i := range w.peers {
		if err == nil {
			err = w.peers[i].flag.Release(w.m.dev, w.m.release)
		}
	}
	return err
}
