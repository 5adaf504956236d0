// Package random makes the random numbers that distinguish nodes: incarnations, clusters, first timestamps, epochs.
package random

import (
	"crypto/rand"
	"encoding/binary"
)

// Uint64 returns a random number from the kernel. math/rand is not suitable: its seed is the kernel's value at the
// start of the program, which forked processes share until their next exec, so that all copies of one Python program
// would get the same numbers.
func Uint64() uint64 {
	var b [8]byte
	rand.Read(b[:]) // never fails; see crypto/rand
	return binary.LittleEndian.Uint64(b[:])
}
