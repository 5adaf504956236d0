//go:build race

package memfd

import "sync/atomic"

// wrote stands for all flags in shared memory.
var wrote atomic.Uint32

// Wrote is for the race detector, which does not see accesses to memory outside of Go's heap. It is called before a
// flag is written.
func Wrote() { wrote.Add(1) }

// Read is called after a flag was read. For the race detector, everything before any Wrote until now happens before
// everything after Read.
func Read() { wrote.Load() }
