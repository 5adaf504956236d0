//go:build !race

package vantest

// Race tells whether the race detector is in the binary.
const Race = false
