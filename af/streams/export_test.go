package streams

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/internal/gpusync"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van/backend"
)

// PartLimit is for how long streams wait for the end of a peer's exchange.
const PartLimit = gpusync.EndLimit

// Deaf makes e receive no messages of its peers until the returned function is called.
func (e *Ends) Deaf() (hear func()) {
	e.mu.Lock()
	return e.mu.Unlock
}

// Waiting waits until a server's Prepare calls wait for n exchanges.
func (e *Ends) Waiting(t testing.TB, n int) {
	t.Helper()
	vantest.Eventually(t, 20*time.Second, "Prepare calls wait", func() bool {
		e.mu.Lock()
		defer e.mu.Unlock()
		return len(e.waiting) == n
	})
}

// Left is what a node that is closed still has of exchanges, "" if that is nothing.
func (e *Ends) Left() string {
	e.mu.Lock()
	defer e.mu.Unlock()
	if len(e.all)+len(e.offers)+len(e.waiting) == 0 && e.over != nil {
		return ""
	}
	return fmt.Sprintf("%d exchanges, %d offers and %d that wait for offers; over: %v", len(e.all), len(e.offers), len(e.waiting), e.over)
}

// HostStream is the stream in which x copies from its first peer.
func (x *Exchange) HostStream() uintptr { return x.host.copies[0].stream }

// Busy reports whether a Send or a Receive of x is under way.
func (x *Exchange) Busy() bool {
	free := x.queueing.TryLock()
	if free {
		x.queueing.Unlock()
	}
	return !free
}

// BuffersAtMost bounds the buffers for memory that cannot be shared.
func (e *Ends) BuffersAtMost(b backend.Backend, n int) error {
	m := &e.memory
	m.mu.Lock()
	defer m.mu.Unlock()
	err := m.open(b)
	m.buffers = backend.NewPool(n, b.Alloc, b.Free).For(b)
	return err
}

// blocked is a device whose WriteFlag waits for the end of a gate.
type blocked struct {
	device
	gate chan struct{}
}

func (b blocked) WriteFlag(s uintptr, word backend.Mem, v uint32) error {
	<-b.gate
	return b.device.WriteFlag(s, word, v)
}

// BlockDriver makes WriteFlag of the device of e wait until the returned function is called. No call may be under way.
func (e *Ends) BlockDriver() (unblock func()) {
	e.memory.mu.Lock()
	defer e.memory.mu.Unlock()
	gate := make(chan struct{})
	e.memory.dev = blocked{e.memory.dev, gate}
	return sync.OnceFunc(func() { close(gate) })
}

// Settled reports whether x has ended, here and for its peers.
func (x *Exchange) Settled() bool {
	select {
	case <-x.done:
		return true
	default:
		return false
	}
}

// recorded is a device that records the words that WriteFlag writes.
type recorded struct {
	device
	words chan<- uint64
}

func (r recorded) WriteFlag(s uintptr, word backend.Mem, v uint32) error {
	r.words <- word.Addr()
	return r.device.WriteFlag(s, word, v)
}

// RecordWords makes the device of e record the words of up to 64 calls of WriteFlag. No call may be under way.
func (e *Ends) RecordWords() <-chan uint64 {
	e.memory.mu.Lock()
	defer e.memory.mu.Unlock()
	words := make(chan uint64, 64)
	e.memory.dev = recorded{e.memory.dev, words}
	return words
}

// Releases returns the words that release the streams of x: those of the gates, and those of the flags.
func (x *Exchange) Releases() (gates, flags []uint64) {
	for i := range x.mem.peers {
		gates = append(gates, x.mem.peers[i].gate.Upper().Addr())
		flags = append(flags, x.mem.peers[i].flag.Upper().Addr())
	}
	return gates, flags
}
