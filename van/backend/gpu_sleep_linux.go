package backend

import (
	"time"

	"golang.org/x/sys/unix"
)

// sleep sleeps in the kernel: when nothing else runs, timers of Go's scheduler fire a
// millisecond late.
func sleep(d time.Duration) {
	ts := unix.NsecToTimespec(int64(d))
	_ = unix.Nanosleep(&ts, nil) // woken early is fine
}
