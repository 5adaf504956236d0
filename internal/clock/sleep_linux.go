package clock

import (
	"time"

	"golang.org/x/sys/unix"
)

// Sleep sleeps in the kernel, for less than a millisecond or so: when nothing else runs,
// timers of Go's scheduler fire a millisecond late.
func Sleep(d time.Duration) {
	ts := unix.NsecToTimespec(int64(d))
	_ = unix.Nanosleep(&ts, nil) // woken early is fine
}
