// Package random draws the numbers by which nodes are told apart: incarnations, clusters,
// first timestamps, epochs.
package random

import (
	"crypto/rand"
	"encoding/binary"
)

// Uint64 is a random number from the kernel. Those of math/rand will not do: its start is
// what the kernel gave the process when its program began, which forked processes share
// until their next exec, so copies of one Python program would all draw the same numbers.
func Uint64() uint64 {
	var b [8]byte
	rand.Read(b[:]) // never fails, see there
	return binary.LittleEndian.Uint64(b[:])
}
