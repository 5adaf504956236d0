package rdma

import (
	"fmt"
	"maps"
	"sync/atomic"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/rdma/conn"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
	"github.com/stepaf/stepaf-go/van/rendezvous"
)

// This file owns the receive buffers that the application registers.

// bufferKey names a registered receive buffer.
type bufferKey struct {
	sender int
	key    uint64
}

// recvBuffers is the receive buffers of the application.
type recvBuffers struct {
	m    map[bufferKey]backend.Mem                 // node.mu guards it
	seen atomic.Pointer[map[bufferKey]backend.Mem] // a copy of m; nil after m has changed
}

// recvBuffers returns the receive buffers. It takes a lock only after a change.
func (v *node) recvBuffers() map[bufferKey]backend.Mem {
	if m := v.buffers.seen.Load(); m != nil {
		return *m
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	m := maps.Clone(v.buffers.m)
	v.buffers.seen.Store(&m)
	return m
}

// RegisterRecvBuffer implements van.BufferRegistrar.
func (v *node) RegisterRecvBuffer(sender int, key uint64, dst backend.Mem) error {
	if dst.Len() == 0 {
		return fmt.Errorf("register receive buffer: %w: 0 bytes for key %d of %s", van.ErrInvalid, key, van.NodeName(sender))
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.buffers.m[bufferKey{sender, key}] = dst
	v.buffers.seen.Store(nil)
	return nil
}

// registeredBuffer returns the application's buffer for the message of a StepMesh node, if it is large enough. Buffers are announced to
// native nodes.
func (in slotSet) registeredBuffer(s *slotRequest, need rendezvous.Need) (backend.Mem, bool) {
	if in.handshake.native {
		return backend.Mem{}, false
	}
	dst, ok := in.bufferOf(s.key)
	return dst, ok && dst.Len() >= need.Data
}

// bufferAt names a receive buffer that was announced to a peer.
type bufferAt struct{ key, addr uint64 }

// announcedBuffer is a receive buffer that the peer may write to until its connection ends.
type announcedBuffer struct {
	mem    backend.Mem
	region *conn.Region // nil: the device has not registered it, and the peer does not know it
}

// announceBuffer tells the peer where to write values of key, if the application has registered host memory of n bytes for it. It returns
// false if there is none, or if it was announced before. The feed is held.
func (in slotSet) announceBuffer(key uint64, n int) bool {
	dst, ok := in.bufferOf(key)
	at := bufferAt{key, dst.Addr()}
	if _, known := in.slots.buffers[at]; known || !ok || !dst.OnHost() || dst.Len() < n {
		return false
	}
	reg, err := in.device.regions.Get(dst, verbs.LocalWrite|verbs.RemoteWrite)
	if in.slots.buffers == nil {
		in.slots.buffers = map[bufferAt]announcedBuffer{}
	}
	in.slots.buffers[at] = announcedBuffer{dst, reg}
	if err != nil {
		in.v.log.Error("rdma: a receive buffer is not registered with the device; its values are copied", "peer", in.name(), "key", key, "bytes", dst.Len(), "err", err)
		return false
	}
	var b [remoteBufferLen]byte
	(&remoteBuffer{key: key, addr: dst.Addr(), rkey: reg.MR.RKey(), len: dst.Len()}).put(b[:])
	in.mu.Lock()
	in.send(immBuffer, b[:])
	in.mu.Unlock()
	return true
}

// copyToBuffers copies the pushed values of rx, a complete message of a native node, that were not written to the application's receive
// buffers there, and announces the buffers. The copies are in the order of the messages. The peer writes to a buffer only when it knows that
// its earlier messages were decoded (peerBuffer), so no copy replaces a newer value. The feed is held.
func (in slotSet) copyToBuffers(rx *received) {
	m := &rx.msg
	if !in.handshake.native || !m.Request || rx.usesControlQueue() || len(in.v.recvBuffers()) == 0 {
		return
	}
	left := false // a value is still in the slot
	if m.IsBatch() {
		for i := range m.Parts {
			if x := &m.Parts[i]; x.Push && x.Vals.Len() > 0 && !x.Placed {
				x.Placed = in.copyToBuffer(x.Key, &x.Vals)
				left = left || !x.Placed
			}
		}
	} else if m.Vals.Len() > 0 && !m.Placed {
		m.Placed = m.Push && m.Keys.Len() >= 8 && in.copyToBuffer(le.Uint64(m.Keys.Host()), &m.Vals)
		left = !m.Placed
	}
	if l := rx.slot; l != nil && !left && !in.stalled.Load() {
		rx.slot = nil
		in.release(l)
	}
}

// copyToBuffer copies the value v of key to its receive buffer in host memory, and makes v a view of that. It returns false if there is
// none of that length.
func (in slotSet) copyToBuffer(key uint64, v *backend.Mem) bool {
	dst, ok := in.bufferOf(key)
	if !ok || !dst.OnHost() || dst.Len() < v.Len() {
		return false
	}
	dst = dst.Sub(0, v.Len())
	if v.OnHost() {
		copy(dst.Host(), v.Host())
	} else if err := in.v.backend.Copy(dst, *v); err != nil {
		in.malformed(fmt.Errorf("copy a value of %d bytes to the receive buffer of key %d: %w", v.Len(), key, err))
		return false
	}
	if v.Len() > inlineValue { // the peer writes others with the meta
		in.announceBuffer(key, v.Len())
	}
	*v = dst
	return true
}

// announced returns the memory of n bytes that were pushed under key to the receive buffer at addr. The feed is held.
func (in slotSet) announced(key uint64, n int, addr uint64) (backend.Mem, error) {
	b, ok := in.slots.buffers[bufferAt{key, addr}]
	if !ok || b.region == nil || b.mem.Len() < n {
		return backend.Mem{}, &van.FieldError{Field: fmt.Sprintf("placement of key %d", key), Value: fmt.Sprintf("%d bytes at %#x", n, addr), Want: "a receive buffer that was announced"}
	}
	return b.mem.Sub(0, n), nil
}

// bufferOf returns the application's buffer for values of key.
func (in slotSet) bufferOf(key uint64) (backend.Mem, bool) {
	dst, ok := in.v.recvBuffers()[bufferKey{in.handshake.node, key}]
	return dst, ok
}
