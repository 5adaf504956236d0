package backend

import (
	"time"

	"golang.org/x/sys/unix"
)

// nap sleeps in the kernel: when nothing else runs, the timers of Go's scheduler fire
// a millisecond late.
func nap(d time.Duration) {
	ts := unix.NsecToTimespec(int64(d))
	_ = unix.Nanosleep(&ts, nil) // woken early is fine
}
