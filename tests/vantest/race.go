//go:build race

package vantest

// Race tells whether the race detector is in the binary. Then everything is several
// times slower and larger, calls allocate, and sync.Pool forgets on purpose.
const Race = true
