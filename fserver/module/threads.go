//go:build fserver

package main

// The stack of the program's threads in Go, see threads.c.

/*
#cgo LDFLAGS: -Wl,--wrap=pthread_create -Wl,--wrap=pthread_key_create -Wl,--wrap=_cgo_wait_runtime_init_done
*/
import "C"

// deepenings times the 32 KiB of deepen's frame is the stack of a signal handler without SA_ONSTACK, less the stack
// that the call itself uses. The runtime doubles stacks, so the stack is 256 KiB.
const deepenings = 6

// sf_deepen grows the stack of this thread's goroutine to that size. The runtime keeps the goroutine for the thread's
// next calls.
//
//export sf_deepen
func sf_deepen() { deepen(deepenings) }

//go:noinline
func deepen(n int) byte {
	var frame [32 << 10]byte
	frame[n] = byte(n)
	if n > 0 {
		frame[n] += deepen(n - 1)
	}
	return frame[n]
}
