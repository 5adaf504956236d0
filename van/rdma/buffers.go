package rdma

import (
	"fmt"

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

// RegisterRecvBuffer implements van.BufferRegistrar.
func (v *node) RegisterRecvBuffer(sender int, key uint64, dst backend.Mem) error {
	if dst.Len() == 0 {
		return fmt.Errorf("register receive buffer: %w: 0 bytes for key %d of %s", van.ErrInvalid, key, van.NodeName(sender))
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.buffers[bufferKey{sender, key}] = dst
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
	region *conn.Region
}

// announceBuffer tells the peer where to write values of key, if the application has registered a buffer for n bytes. It returns false if
// there is none, or if it has been announced before. Values that arrive elsewhere are copied there. The feed is held.
func (in slotSet) announceBuffer(key uint64, n int) bool {
	dst, ok := in.bufferOf(key)
	at := bufferAt{key, dst.Addr()}
	if _, known := in.slots.buffers[at]; known || !ok || dst.Len() < n {
		return false
	}
	reg, err := in.device.regions.Get(dst, verbs.LocalWrite|verbs.RemoteWrite)
	if err != nil {
		in.v.log.Error("rdma: a receive buffer is not registered with the device; its values are copied", "peer", in.name(), "key", key, "bytes", dst.Len(), "err", err)
		return false
	}
	if in.slots.buffers == nil {
		in.slots.buffers = map[bufferAt]announcedBuffer{}
	}
	in.slots.buffers[at] = announcedBuffer{dst, reg}
	var b [remoteBufferLen]byte
	(&remoteBuffer{key: key, addr: dst.Addr(), rkey: reg.MR.RKey(), len: dst.Len()}).put(b[:])
	in.mu.Lock()
	in.send(immBuffer, b[:])
	in.mu.Unlock()
	return true
}

// announced returns the memory of n bytes that were pushed under key to the receive buffer at addr. The feed is held.
func (in slotSet) announced(key uint64, n int, addr uint64) (backend.Mem, error) {
	b, ok := in.slots.buffers[bufferAt{key, addr}]
	if !ok || b.mem.Len() < n {
		return backend.Mem{}, &van.FieldError{Field: fmt.Sprintf("placement of key %d", key), Value: fmt.Sprintf("%d bytes at %#x", n, addr), Want: "a receive buffer that was announced"}
	}
	return b.mem.Sub(0, n), nil
}

// bufferOf returns the application's buffer for values of key.
func (in slotSet) bufferOf(key uint64) (backend.Mem, bool) {
	in.v.mu.Lock()
	defer in.v.mu.Unlock()
	dst, ok := in.v.buffers[bufferKey{in.handshake.node, key}]
	return dst, ok
}
