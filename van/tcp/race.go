//go:build race

package tcp

import (
	"runtime"
	"unsafe"
)

// A message that one node sends and another one of the same process receives orders what each of them does with memory. The race
// detector does not see that order, since the bytes travel through the kernel.
var throughKernel int

func raceSent()     { runtime.RaceReleaseMerge(unsafe.Pointer(&throughKernel)) }
func raceReceived() { runtime.RaceAcquire(unsafe.Pointer(&throughKernel)) }
