package gpusync

// The end of exchanges, and the watch that ends those without progress.

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// EndLimit is how long the streams of an ended exchange wait for a peer to confirm the end. closeLimit replaces it
// while a node closes, and limits calls of the driver then.
const (
	EndLimit   = 10 * time.Second
	closeLimit = time.Second
)

// Ending is the end of an exchange on all of its peers. When an exchange has ended here, its waiting streams are
// released only after the exchange is over on all peers: until then a peer could take data that a released stream has
// written for valid data.
type Ending struct {
	mu      sync.Mutex // guards the fields below
	begun   bool       // streams may contain work of the exchange
	over    []bool     // by peer: the exchange is over there, or the peer is lost
	changed chan struct{}
}

// NewEnding returns the Ending of an exchange with n peers.
func NewEnding(n int) *Ending { return &Ending{over: make([]bool, n), changed: make(chan struct{})} }

// Begin lets streams use the exchange, unless it has ended: failed is set then, and Begin returns the error.
func (e *Ending) Begin(failed *atomic.Pointer[error]) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if err := failed.Load(); err != nil {
		return *err
	}
	e.begun = true
	return nil
}

// Begun reports whether streams may use the exchange. It is constant once the pointer that was passed to Begin is set.
func (e *Ending) Begun() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.begun
}

// Over records that the exchange is over on a peer, or that the peer is lost.
func (e *Ending) Over(peer int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.over[peer] = true
	close(e.changed)
	e.changed = make(chan struct{})
}

// Await waits until all peers have confirmed the end, or the node has ended, and returns -1 then. After EndLimit, or closeLimit after
// closing is closed, it returns the first peer that has not confirmed. closing may be nil.
func (e *Ending) Await(ended, closing <-chan struct{}) (late int) {
	patience := time.NewTimer(EndLimit)
	defer patience.Stop()
	for {
		e.mu.Lock()
		changed, i := e.changed, slices.Index(e.over, false)
		e.mu.Unlock()
		if i < 0 {
			return i
		}
		select {
		case <-changed:
		case <-ended:
			return -1
		case <-closing:
			closing = nil
			patience.Reset(closeLimit)
		case <-patience.C:
			return i
		}
	}
}

// AwaitClose waits until done is closed, closeLimit at most. If it returns false, a goroutine may still be in the
// driver.
func AwaitClose(done <-chan struct{}) bool {
	select {
	case <-done:
		return true
	case <-time.After(closeLimit):
		return false
	}
}

// watchEvery is the period of Watch.
const watchEvery = 100 * time.Millisecond

// Watch calls check periodically until over or ended is closed, and returns true if ended was. check ends the exchanges whose streams
// make no progress. It must not call the driver, which may be blocked until such a stream continues.
func Watch(check func(), over, ended <-chan struct{}) bool {
	tick := time.NewTicker(watchEvery)
	defer tick.Stop()
	for {
		select {
		case <-over:
			return false
		case <-ended:
			return true
		case <-tick.C:
			check()
		}
	}
}
