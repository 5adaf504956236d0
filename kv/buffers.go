package kv

import (
	"fmt"
	"sync"

	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// RecvBuffers are the places that a server has registered for pushes, by sender
// and key. A van that can put values there itself does; for others Place copies.
// It is safe for concurrent use.
type RecvBuffers struct {
	node *postoffice.Node
	mu   sync.RWMutex
	m    map[bufferKey]backend.Mem
}

type bufferKey struct {
	sender int
	key    Key
}

// NewRecvBuffers returns an empty set of buffers for a node.
func NewRecvBuffers(n *postoffice.Node) *RecvBuffers {
	return &RecvBuffers{node: n, m: map[bufferKey]backend.Mem{}}
}

// Register makes dst the place of what the worker with the given group rank
// pushes under key. Register before that worker's first push of the key.
func (b *RecvBuffers) Register(workerRank int, key Key, dst backend.Mem) error {
	if workerRank < 0 || workerRank >= b.node.NumWorkers() {
		return fmt.Errorf("register receive buffer: %w: worker rank %d, want 0 to %d", van.ErrInvalid, workerRank, b.node.NumWorkers()-1)
	}
	k := bufferKey{b.node.WorkerInstance(workerRank), key}
	b.mu.Lock()
	defer b.mu.Unlock()
	if _, dup := b.m[k]; dup {
		return fmt.Errorf("register receive buffer: %w: worker %d, key %d has one already", van.ErrInvalid, workerRank, key)
	}
	if reg, ok := b.node.Registrar(); ok {
		if err := reg.RegisterRecvBuffer(k.sender, key, dst); err != nil {
			return err
		}
	}
	b.m[k] = dst
	return nil
}

// Place returns where the value of a push lies: in the registered buffer, to
// which it is copied unless the van has done so, or in the message itself. owned
// tells that it is the registered buffer, so that the message is not needed.
func (b *RecvBuffers) Place(msg *van.Message, key Key) (vals backend.Mem, owned bool, err error) {
	if msg.Placed {
		return msg.Vals, true, nil
	}
	b.mu.RLock()
	dst, ok := b.m[bufferKey{msg.Sender, key}]
	b.mu.RUnlock()
	if !ok {
		return msg.Vals, false, nil
	}
	if msg.Vals.Len() > dst.Len() {
		return msg.Vals, false, fmt.Errorf("%w: %s pushed %d bytes under key %d, the registered receive buffer has %d",
			van.ErrInvalid, van.NodeName(msg.Sender), msg.Vals.Len(), key, dst.Len())
	}
	dst = dst.Sub(0, msg.Vals.Len())
	return dst, true, b.node.Backend().Copy(dst, msg.Vals)
}
