package rdma

import (
	"fmt"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
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

// registeredBuffer returns the application's buffer for the message, if the request may use it and it is large enough.
func (in slotSet) registeredBuffer(s *slotRequest, need rendezvous.Need, kind uint64) (backend.Mem, bool) {
	if !in.dialect.usesBuffer(kind) {
		return backend.Mem{}, false
	}
	in.v.mu.Lock()
	defer in.v.mu.Unlock()
	dst, ok := in.v.buffers[bufferKey{in.handshake.node, s.key}]
	return dst, ok && dst.Len() >= need.Exact
}
