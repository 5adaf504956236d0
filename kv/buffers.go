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

// RecvPlace is the place of what the worker with the given group rank pushes under
// a key.
type RecvPlace struct {
	Worker int
	Key    Key
	Dst    backend.Mem
}

// Register makes all places known, or none when one makes no sense or has been named
// before. Should the van refuse one after it has taken others, those stay registered,
// and the error says so. What is registered is retained, for good. Register before the
// worker's first push of the key.
func (b *RecvBuffers) Register(places ...RecvPlace) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := b.check(places); err != nil {
		return err
	}
	reg, direct := b.node.Registrar()
	for i, p := range places {
		k := b.keyOf(p)
		if direct {
			if err := reg.RegisterRecvBuffer(k.sender, p.Key, p.Dst); err != nil {
				if i > 0 {
					err = fmt.Errorf("worker %d, key %d: %w (the %d before it of %d stay registered)", p.Worker, p.Key, err, i, len(places))
				}
				return err
			}
		}
		p.Dst.Retain()
		b.m[k] = p.Dst
	}
	return nil
}

func (b *RecvBuffers) keyOf(p RecvPlace) bufferKey {
	return bufferKey{b.node.WorkerInstance(p.Worker), p.Key}
}

// check tells why places cannot be registered. b.mu is held.
func (b *RecvBuffers) check(places []RecvPlace) error {
	first := make(map[bufferKey]int, len(places))
	for i, p := range places {
		if p.Worker < 0 || p.Worker >= b.node.NumWorkers() {
			return fmt.Errorf("register receive buffer: %w: worker rank %d, want 0 to %d", van.ErrInvalid, p.Worker, b.node.NumWorkers()-1)
		}
		k := b.keyOf(p)
		if _, taken := b.m[k]; taken {
			return fmt.Errorf("register receive buffer: %w: worker %d, key %d has one already", van.ErrInvalid, p.Worker, p.Key)
		}
		if j, twice := first[k]; twice {
			return fmt.Errorf("register receive buffer: %w: worker %d, key %d is there twice, at %d and %d", van.ErrInvalid, p.Worker, p.Key, j, i)
		}
		first[k] = i
	}
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
