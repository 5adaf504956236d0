// Package clock gives the host's monotonic time in nanoseconds, the same for
// every process of the host, so that traces of two processes can be compared.
package clock

import (
	"time"

	"golang.org/x/sys/unix"
)

var base, baseNano = begin(monotonic)

// begin reads both clocks as close together as possible: if the process is descheduled
// between the two readings, all later times would be wrong by that.
func begin(monotonic func() uint64) (base time.Time, nano uint64) {
	const (
		near  = 500 // nanoseconds between the two readings that are good enough
		tries = 100
	)
	for best, i := ^uint64(0), 0; i < tries && best > near; i++ {
		before := monotonic()
		now := time.Now()
		if gap := monotonic() - before; gap < best {
			best, base, nano = gap, now, before+gap/2
		}
	}
	return base, nano
}

func monotonic() uint64 {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts) // cannot fail on Linux; traces would count from start
	return uint64(ts.Nano())
}

// Sleep sleeps in the kernel, for less than a millisecond or so: when nothing else runs,
// timers of Go's scheduler fire a millisecond late.
func Sleep(d time.Duration) {
	ts := unix.NsecToTimespec(int64(d))
	_ = unix.Nanosleep(&ts, nil) // woken early is fine
}

// Now returns nanoseconds of CLOCK_MONOTONIC. It costs one clock reading
// without a system call and allocates nothing.
func Now() uint64 { return baseNano + uint64(time.Since(base)) }
