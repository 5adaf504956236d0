//go:build race

package memfd

import "sync/atomic"

// wrote stands for all words of shared memory.
var wrote atomic.Uint32

// Wrote is for the race detector, which does not see words in memory that is not Go's: it is called before one is written.
func Wrote() { wrote.Add(1) }

// Read is called after a word was read: what came before any Wrote until now comes before what follows.
func Read() { wrote.Load() }
