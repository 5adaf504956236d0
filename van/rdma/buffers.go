package rdma

import (
	"fmt"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// This file owns the receive buffers that the application has registered.

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

func (v *node) buffer(sender int, key uint64) (backend.Mem, bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	m, ok := v.buffers[bufferKey{sender, key}]
	return m, ok
}
