package window

// Memory of a device window: this rank's allocation, the mapped allocations of other ranks, and pinned host memory.
// Functions that read flags are here, too.

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/internal/gpusync"
	"github.com/stepaf/stepaf-go/internal/memfd"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

const (
	headLen  = 128 // offset of the flags
	wordsLen = 16  // of one signal of one rank: two flags, used alternately
	memAlign = 256

	hostStride = 64 // of the flags in host memory: one cache line each
)

// lap is how many signals are counted in one flag before the other flag is used. The waiter clears the other flag
// half-way: the driver compares signed 64-bit numbers, so a flag cannot wrap around.
var lap = uint64(1) << 31

// memory is the memory of a window. It is constant once Open has returned, except for the fields after reading.
type memory struct {
	b            *base
	d            backend.StreamDevice
	lap          uint64
	at           int           // offset of the window's memory in the allocations of all ranks
	whole        backend.Mem   // this rank's allocation
	far          []backend.Mem // allocations of all ranks
	words        backend.Mem   // pinned host memory: a buffer of read, and a put sequence for each rank
	host         hostWords     // for waits on the host
	offered      bool          // other ranks may map whole
	own, release uintptr       // the stream of calls with af.Complete, and the stream that releases waiting streams

	reading sync.Mutex  // guards the fields below
	seen    backend.Mem // two numbers in host memory: a flag of the device, and the number of the read that copied it
	asked   uint32
	shut    bool // the streams were freed
}

// place returns which of the two flags counts signal n, from 1, and the flag's value for it.
func (m *memory) place(n uint64) (word int, count uint64) {
	return int((n - 1) / m.lap % 2), (n-1)%m.lap + 1
}

// word returns one of the two flags of a signal of rank from, in the memory of its receiver.
func (m *memory) word(whole backend.Mem, from, signal, word int) gpusync.Flag {
	return gpusync.Flag{Mem: whole.Sub(headLen+(from*m.b.signals+signal)*wordsLen+gpusync.FlagLen*word, gpusync.FlagLen)}
}

// mark returns the put sequence of a rank in pinned host memory: the number of the last put to it that is done.
func (m *memory) mark(rank int) backend.Mem { return m.words.Sub((1+rank)*hostStride, 4) }

// allocate allocates and clears this rank's memory of n bytes, and returns the offer for other ranks.
func (m *memory) allocate(n int) (offer []byte, err error) {
	d := m.d
	if m.whole, err = d.Alloc((m.at + n + gpusync.PageLen) / gpusync.PageLen * gpusync.PageLen); err != nil {
		return nil, err
	}
	m.b.mem = m.whole.Sub(m.at, n)
	m.b.mem.Retain()
	zero := make([]byte, min(m.whole.Len(), gpusync.PageLen))
	for at := 0; at < m.whole.Len() && err == nil; at += len(zero) {
		err = d.Copy(m.whole.Sub(at, len(zero)), backend.Bytes(zero))
	}
	token := gpusync.NewToken()
	if err == nil {
		err = d.Copy(m.whole.Sub(0, len(token)), backend.Bytes(token[:]))
	}
	if err != nil {
		return nil, err
	}
	if m.words, err = d.AllocPinned((1 + len(m.far)) * hostStride); err != nil {
		return nil, err
	}
	clear(m.words.Host())
	m.seen = m.words.Sub(0, 8)
	m.far[m.b.self] = m.whole
	if m.own, err = d.NewStream(); err != nil {
		return nil, err
	}
	if m.release, err = d.NewStream(); err != nil {
		return nil, err
	}
	e, err := d.Export(m.whole)
	if err != nil {
		return nil, err
	}
	offer = make([]byte, van.ExportLen, offerLen)
	van.PutExport(offer, &e)
	offer = append(offer, token[:]...)
	name, err := m.host.offer(len(m.far), token)
	if err != nil {
		m.waitsLook(m.b.self, err)
	}
	return append(offer, name...), nil
}

// offerLen is the length of an offer: the export of the device memory, its token, and, if there is a page in host
// memory, its name.
const offerLen = van.ExportLen + gpusync.TokenLen + memfd.NameLen

func tokenOf(offer []byte) gpusync.Token { return gpusync.Token(offer[van.ExportLen:]) }

// waitsLook logs that signals of a rank, or to it, have no flag in host memory.
func (m *memory) waitsLook(rank int, err error) {
	m.b.app.Log().Info("host waits for signals of a window poll the device, which takes longer: no page of host memory is shared",
		"window", m.b.String(), "with", m.b.layer.Name(rank), "err", err)
}

// discard frees memory that no other rank knows, unless the driver would wait for waiting streams.
func (m *memory) discard() error {
	if m.offered || backend.MayBlockOf(m.d)() {
		return nil
	}
	var err error
	if m.whole.Len() > 0 {
		err = m.d.Free(m.whole)
	}
	if m.words.Len() > 0 {
		err = errors.Join(err, m.d.FreePinned(m.words))
	}
	return err
}

// hint is the hint of errors of mapping.
const hint = "device windows need GPUs of one host with access to each other (stepaf doctor); without Device the window is in host memory of all ranks"

// reach maps the memory that a rank has offered.
func (m *memory) reach(rank int, offer []byte) error {
	bad := func(err error) error {
		return &van.Error{Op: "map device memory", Peer: m.b.layer.Name(rank), Err: err, Hint: hint}
	}
	if n := len(offer); n != offerLen && n != offerLen-memfd.NameLen {
		return bad(fmt.Errorf("%w: an offer of %d bytes, want %d or %d", van.ErrMalformed, n, offerLen-memfd.NameLen, offerLen))
	}
	e, err := van.ParseExport(offer, m.whole.Len())
	if err != nil {
		return bad(err)
	}
	far, err := gpusync.Map(m.d, e, m.whole.Len(), tokenOf(offer), "the rank's")
	if err != nil {
		return bad(err)
	}
	m.far[rank] = far
	m.reachHost(rank, offer)
	return nil
}

// reachHost maps the page in host memory that a rank has offered. If that fails, the window works without it.
func (m *memory) reachHost(rank int, offer []byte) {
	if len(offer) < offerLen {
		return
	}
	if err := m.host.reach(m.d, rank, offer[van.ExportLen+gpusync.TokenLen:], tokenOf(offer)); err != nil {
		m.waitsLook(rank, err)
	}
}

// refuse returns why no work can be put into stream s, or nil.
func (m *memory) refuse(op string, s uintptr) error {
	captures, err := m.d.Capturing(s)
	if err == nil && captures {
		err = fmt.Errorf("%w: the stream is being captured, and a graph would count each signal once; exchanges of af/streams can be captured", backend.ErrUnsupported)
	}
	if err != nil {
		return m.b.bad(op, err)
	}
	return nil
}

// readable returns why streams cannot copy src, or nil. A copy of other host memory may wait for all work in the
// stream, with a lock held.
func (m *memory) readable(src backend.Mem) error {
	if src.Len() > 0 && src.OnHost() {
		if p, is := m.d.(backend.PinTeller); !is || !p.Pinned(src) {
			return fmt.Errorf("%w: %d bytes of host memory that is not pinned, want memory of the device, or of AllocPinned or RegisterHost of the node's backend", van.ErrInvalid, src.Len())
		}
	}
	return backend.CheckDevice(m.d, src)
}

// silence is the time limit for reading a flag of the device.
const silence = 10 * time.Second

// read reads 4 bytes of the device. It creates no stream and no event, and copies to pinned memory: while a launch is
// blocked because the queue of another stream is full, the driver does nothing else, and that stream may wait for the
// caller of read.
func (m *memory) read(word backend.Mem) (uint32, error) {
	m.reading.Lock()
	defer m.reading.Unlock()
	if m.shut {
		return 0, errClosed
	}
	m.asked++
	err := m.d.CopyAsync(m.seen.Sub(0, 4), word, m.release)
	if err == nil {
		err = m.d.WriteFlag(m.release, m.seen.Sub(4, 4), m.asked)
	}
	if err != nil {
		return 0, err
	}
	if err := gpusync.AwaitWrite(gpusync.OnHost(m.seen.Sub(4, 4)), m.asked, silence); err != nil {
		return 0, err
	}
	return gpusync.OnHost(m.seen).Load(), nil
}

// Pauses of sleep, and the interval of checks of the device: streams of a failed device do nothing.
const (
	minSleep   = 20 * time.Microsecond
	maxSleep   = 200 * time.Microsecond
	healthLook = 100 * time.Millisecond
)

// sleep waits until done returns true, which streams cause.
func (m *memory) sleep(ctx context.Context, begun uint64, limit time.Duration, done func() bool) error {
	looked := begun
	for pause := minSleep; !done(); pause = min(2*pause, maxSleep) {
		switch {
		case ctx.Err() != nil:
			return van.TimedOut(context.Cause(ctx))
		case limit > 0 && clock.Since(begun) >= limit:
			return van.ErrTimeout
		case clock.Since(looked) >= healthLook:
			if _, err := m.read(m.whole.Sub(0, 4)); err != nil {
				return err
			}
			looked = clock.Now()
		}
		clock.Sleep(pause)
	}
	return nil
}

// free frees the streams.
func (m *memory) free() (err error) {
	m.reading.Lock()
	defer m.reading.Unlock()
	m.shut = true
	for _, s := range []uintptr{m.own, m.release} {
		if s != 0 {
			err = errors.Join(err, m.d.FreeStream(s))
		}
	}
	return err
}
