//go:build race

package local

import "sync/atomic"

// order stands in for the shared indices, which order the memory of both ends when
// they are in one process, as in tests: the race detector does not see those.
var order atomic.Uint64

// published is called before an index is written, noticed after one was read.
func published() { order.Add(1) }
func noticed()   { order.Load() }
