package stage

// The wrapper: copies of outgoing and incoming values, and the pools of their buffers.

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// Options are what New needs besides the van.
type Options struct {
	// Backend is the node's device.
	Backend backend.Backend
	// Log may be nil.
	Log *slog.Logger
	// Pinned and Device limit the buffers of each kind of memory, in bytes. 0 means
	// DefaultLimit. Beyond that, values are sent through ordinary host memory, and
	// received values stay in host memory.
	Pinned, Device int
	// Direct, if not nil, reports whether the wrapped van can send values on the device to
	// that peer. They are then not copied here, unless its Send returns
	// backend.ErrNotExportable. Receive buffers on the device are also registered with it.
	Direct func(peer int) bool
}

// DefaultLimit is 4 GiB.
const DefaultLimit = 4 << 30

// Van carries values on a device. The embedded van.Van implements all other methods.
type Van struct {
	van.Van
	back   backend.Backend
	log    *slog.Logger
	pinned *backend.Pool
	device *backend.Pool
	direct func(peer int) bool // nil: never

	sends sync.Pool // of *sending
	holds sync.Pool // of *received

	mu    sync.RWMutex
	dsts  map[destination]backend.Mem
	lower van.BufferRegistrar // of the wrapped van, nil when it has none

	staged, unpinned, refused, unshared atomic.Uint64
}

// received owns a received message with values in buffers of this van.
type received struct {
	v      *Van
	bufs   []*backend.Buffer
	owner  van.Owner
	native unsafe.Pointer
}

// Free returns the message to its transport, and the buffers to their pool.
func (h *received) Free(m *van.Message) {
	owner, native := h.owner, h.native
	for i, b := range h.bufs {
		b.Put()
		h.bufs[i] = nil
	}
	h.bufs, h.owner, h.native = h.bufs[:0], nil, nil
	h.v.holds.Put(h)
	m.Adopt(owner, native)
	owner.Free(m)
}

// destination identifies a registered buffer.
type destination struct {
	sender int
	key    uint64
}

var (
	_ van.Van             = (*Van)(nil)
	_ van.Wrapper         = (*Van)(nil)
	_ van.BufferRegistrar = (*Van)(nil)
	_ van.Meter           = (*Van)(nil)
)

// New wraps inner. Without a backend, or with that of ordinary memory, staging is not
// needed and New returns inner itself.
func New(inner van.Van, o Options) van.Van {
	if o.Backend == nil || o.Backend.Device().Type == backend.CPU {
		return inner
	}
	o.Log = cmp.Or(o.Log, slog.New(slog.DiscardHandler))
	o.Pinned = cmp.Or(o.Pinned, DefaultLimit)
	o.Device = cmp.Or(o.Device, DefaultLimit)
	v := &Van{Van: inner, back: o.Backend, log: o.Log, direct: o.Direct, dsts: map[destination]backend.Mem{}}
	v.sends.New = func() any { return &sending{v: v} }
	v.holds.New = func() any { return &received{v: v} }
	v.lower, _ = van.As[van.BufferRegistrar](inner)
	if p, ok := o.Backend.(backend.HostPinner); ok {
		v.pinned = backend.NewPool(o.Pinned, p.AllocPinned, p.FreePinned).For(o.Backend)
	} else {
		v.pinned = backend.NewPool(0, nil, nil)
	}
	v.device = backend.NewPool(o.Device, o.Backend.Alloc, o.Backend.Free).For(o.Backend)
	return v
}

// Unwrap implements van.Wrapper.
func (v *Van) Unwrap() van.Van { return v.Van }

// Stats implements van.Meter: the counters of the wrapped van, and UnsharedValues.
func (v *Van) Stats() van.Stats {
	var s van.Stats
	if m, ok := van.As[van.Meter](v.Van); ok {
		s = m.Stats()
	}
	s.UnsharedValues += v.unshared.Load()
	return s
}

// sending has the values of a message that is being sent, in pinned buffers or in ordinary memory.
type sending struct {
	v    *Van
	bufs []*backend.Buffer
	done van.Completion
}

// Sent implements van.Completion.
func (s *sending) Sent() {
	if done := s.release(); done != nil {
		done.Sent()
	}
}

func (s *sending) release() van.Completion {
	done, v := s.done, s.v
	for i, b := range s.bufs {
		b.Put()
		s.bufs[i] = nil
	}
	s.bufs, s.done = s.bufs[:0], nil
	v.sends.Put(s)
	return done
}

// copy replaces *mem, if it lies on the device, with a copy on the host.
func (s *sending) copy(mem *backend.Mem) error {
	v, m, host := s.v, *mem, backend.Mem{}
	if m.OnHost() {
		return nil
	}
	if err := backend.CheckDevice(v.back, m); err != nil {
		return fmt.Errorf("%w: %w", van.ErrInvalid, err)
	}
	buf, err := v.pinned.Get(m.Len())
	if err != nil && v.unpinned.Load() == 0 {
		v.log.Warn("no pinned memory for a value; it goes through ordinary memory", "bytes", m.Len(), "err", err)
	}
	if buf != nil {
		s.bufs = append(s.bufs, buf)
		host = buf.Mem().Sub(0, m.Len())
	} else {
		v.unpinned.Add(1)
		host = backend.Bytes(make([]byte, m.Len()))
	}
	v.staged.Add(1)
	*mem = host
	return v.back.Copy(host, m)
}

// onDevice reports whether a value of m lies on a device.
func onDevice(m *van.Message) bool {
	for i := range m.Parts {
		if !m.Parts[i].Vals.OnHost() {
			return true
		}
	}
	return m.Frames >= 2 && !m.Vals.OnHost()
}

// Send implements van.Van. A value on the device must be complete: no stream may still be
// writing it. Send returns when the value has been copied; Done is called when the
// transport no longer needs the copy.
func (v *Van) Send(m *van.Message) error {
	if !onDevice(m) {
		return v.Van.Send(m)
	}
	if v.direct != nil && v.direct(m.Receiver) {
		err := v.Van.Send(m)
		if !errors.Is(err, backend.ErrNotExportable) {
			return err
		}
		// If the link has ended meanwhile, the memory is not the cause.
		if v.direct(m.Receiver) && v.unshared.Add(1) == 1 { // Stats counts the others
			v.log.Warn("a value cannot be shared with its receiver as it lies; it goes through host memory, and so do others like it, which is slow",
				"to", van.NodeName(m.Receiver), "key", m.Key, "bytes", m.PayloadLen(), "err", err)
		}
	}
	s := v.sends.Get().(*sending)
	s.done = m.Done
	x := staged.Get().(*van.Message)
	defer staged.Put(x)
	x.Reset()
	x.CopyFrom(&m.Meta)
	x.Receiver, x.ProcessEpoch, x.Frames, x.Into, x.Done = m.Receiver, m.ProcessEpoch, m.Frames, m.Into, s
	x.Keys, x.Vals, x.Lens, x.Parts = m.Keys, m.Vals, m.Lens, append(x.Parts, m.Parts...)
	err := s.copy(&x.Vals)
	for i := range x.Parts {
		err = errors.Join(err, s.copy(&x.Parts[i].Vals))
	}
	if err != nil {
		err = &van.Error{Op: "send", Peer: van.NodeName(m.Receiver), Detail: m.Meta.String(), Err: err}
	} else {
		err = v.Van.Send(x)
	}
	m.RequestTrace.PostSend, m.ResponseTrace.PostSend = x.RequestTrace.PostSend, x.ResponseTrace.PostSend
	x.Reset()
	if err != nil {
		s.release() // Done is not called when Send fails
	}
	return err
}

// staged are messages whose values on the device are replaced with copies on the host.
var staged = sync.Pool{New: func() any { return new(van.Message) }}

// Start implements van.Van.
func (v *Van) Start(recv van.Receiver) {
	v.Van.Start(func(m *van.Message) {
		if m.Request && m.IsTensor {
			if m.Push && m.Frames >= 2 && m.Dst.Type == backend.GPU {
				v.place(m, m.Key, &m.Vals, &m.Placed)
			}
			for i := range m.Parts {
				if p := &m.Parts[i]; p.Push && p.Device.Type == backend.GPU {
					v.place(m, p.Key, &p.Vals, &p.Placed)
				}
			}
		}
		recv(m)
	})
}

// place copies a received value of m into device memory. If that fails the value
// stays in host memory, as its Device tells the receiver.
func (v *Van) place(m *van.Message, key uint64, vals *backend.Mem, placed *bool) {
	n := vals.Len()
	if n == 0 || *placed || !vals.OnHost() {
		return
	}
	dst, registered := v.registered(m.Sender, key)
	if registered {
		if n > dst.Len() {
			return // kv reports the value that is too long for its buffer
		}
		if err := v.back.Copy(dst.Sub(0, n), *vals); err != nil {
			v.refuse(m, key, n, err)
			return
		}
		*placed = true
	} else {
		b, err := v.device.Get(n)
		if b == nil {
			if err == nil {
				err = fmt.Errorf("received values hold %d bytes of the device's memory already: %w", v.device.Limit(), backend.ErrNoMemory)
			}
			v.refuse(m, key, n, err)
			return
		}
		dst = b.Mem()
		if err := v.back.Copy(dst.Sub(0, n), *vals); err != nil {
			b.Put()
			v.refuse(m, key, n, err)
			return
		}
		h, own := m.Owner().(*received)
		if !own {
			h = v.holds.Get().(*received)
			h.owner, h.native = m.Owner(), m.Native()
			m.Adopt(h, h.native)
		}
		h.bufs = append(h.bufs, b)
	}
	*vals = dst.Sub(0, n)
	v.staged.Add(1)
}

func (v *Van) refuse(m *van.Message, key uint64, bytes int, err error) {
	if n := v.refused.Add(1); n&(n-1) == 0 {
		v.log.Warn("a pushed value stays in host memory", "from", van.NodeName(m.Sender), "key", key, "bytes", bytes, "count", n, "err", err)
	}
}

func (v *Van) registered(sender int, key uint64) (backend.Mem, bool) {
	v.mu.RLock()
	defer v.mu.RUnlock()
	dst, ok := v.dsts[destination{sender, key}]
	return dst, ok
}

// RegisterRecvBuffer implements van.BufferRegistrar: this van fills buffers on the device,
// the wrapped one those on the host, if it can.
func (v *Van) RegisterRecvBuffer(sender int, key uint64, dst backend.Mem) error {
	if dst.OnHost() {
		if v.lower != nil {
			return v.lower.RegisterRecvBuffer(sender, key, dst)
		}
		return nil
	}
	if err := backend.CheckDevice(v.back, dst); err != nil {
		return fmt.Errorf("register receive buffer: %w: %w", van.ErrInvalid, err)
	}
	if v.direct != nil && v.lower != nil {
		if err := v.lower.RegisterRecvBuffer(sender, key, dst); err != nil {
			return err
		}
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.dsts[destination{sender, key}] = dst
	return nil
}

// Close implements van.Van. If streams may wait for the CPU (backend.StreamBlocker), the
// backend's Close frees the buffers.
func (v *Van) Close(ctx context.Context) error {
	return errors.Join(v.Van.Close(ctx), v.pinned.Close(), v.device.Close())
}
