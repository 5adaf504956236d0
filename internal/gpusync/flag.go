// Package gpusync is the core of the exchanges between GPUs of one host whose streams synchronize by flags in memory:
// prepared exchanges (af/streams), windows on devices (af/window), and rounds that streams start (af). It has what
// these have in common:
//
//   - flags, of which one half is for the exchange and the other releases waiting streams (Flag)
//   - pages of memory for flags (Page)
//   - memory that other processes map, and the token that identifies it (Token)
//   - the end of an exchange on all of its nodes (Ending)
//   - the periodic check for rounds that make no progress (Watch)
package gpusync

import (
	"fmt"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// FlagLen is the length of a flag in bytes, and its alignment.
const FlagLen = 8

// Flag is a flag of 8 bytes, for which streams wait. The lower half is for the exchange: the peer, or a stream, writes
// it. The upper half is for its owner: once it is Set, all waits for the flag end, and nothing that is written
// to the lower half changes that.
type Flag struct{ backend.Mem }

// Set is the value of a half for which a wait for Either ends.
const Set = 1

// Either are the bits of a wait (WaitBits) that ends when either half is Set.
const Either = uint64(Set)<<32 | Set

// Lower returns the half for the exchange.
func (f Flag) Lower() backend.Mem { return f.Sub(0, 4) }

// Upper returns the half that releases waiting streams.
func (f Flag) Upper() backend.Mem { return f.Sub(4, 4) }

// Release queues the write that releases the waiting streams, in a stream that contains nothing that waits.
func (f Flag) Release(d backend.StreamFlagger, stream uintptr) error {
	return d.WriteFlag(stream, f.Upper(), Set)
}

// OnHost returns 4 bytes of pinned host memory, such as a half of a flag, as an atomic integer.
func OnHost(half backend.Mem) *atomic.Uint32 { return (*atomic.Uint32)(half.Ptr()) }

// Pauses of AwaitWrite.
const (
	writeSpin  = 50 * time.Microsecond
	writePause = 20 * time.Microsecond
)

// AwaitWrite waits until a stream that contains nothing that waits has written v to pinned host memory, for at most
// limit. It does not call the driver: while a launch is blocked because the queue of another stream is full, the driver
// does nothing else.
func AwaitWrite(word *atomic.Uint32, v uint32, limit time.Duration) error {
	for begun := clock.Now(); word.Load() != v; {
		switch took := clock.Since(begun); {
		case took >= limit:
			return fmt.Errorf("%w: the device did not write a flag", van.ErrTimeout)
		case took >= writeSpin:
			clock.Sleep(writePause)
		default:
			runtime.Gosched()
		}
	}
	return nil
}

// Page is the free part of a page of memory that is divided into flags. Its zero value has none.
type Page struct{ free backend.Mem }

// Take returns n bytes. If fewer are left, Take allocates a new page of size bytes.
func (p *Page) Take(n, size int, alloc func(int) (backend.Mem, error)) (m backend.Mem, err error) {
	if p.free.Len() < n {
		if p.free, err = alloc(size); err != nil {
			return m, err
		}
	}
	m = p.free.Sub(0, n)
	if p.free.Len() == n { // the rest would point past the allocation
		p.free = backend.Mem{}
	} else {
		p.free = p.free.Sub(n, p.free.Len()-n)
	}
	return m, nil
}

// TakePinned returns 128 bytes of pinned host memory: flags share no cache lines, also where these are fetched in
// pairs.
func (p *Page) TakePinned(d backend.HostPinner) (backend.Mem, error) {
	return p.Take(128, 4096, d.AllocPinned)
}
