// Package clock returns the host's monotonic time in nanoseconds. The time is the same for all processes of the host,
// so that traces of two processes can be compared.
package clock

import (
	"time"

	"golang.org/x/sys/unix"
)

var base, baseNano = begin(monotonic)

// begin reads both clocks at nearly the same time. If the process is descheduled between the two readings, all later
// times are wrong by that delay.
func begin(monotonic func() uint64) (base time.Time, nano uint64) {
	const (
		near  = 500 // nanoseconds between the two readings; a smaller distance is accepted
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
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts) // does not fail on Linux; after a failure traces would count from 0
	return uint64(ts.Nano())
}

// Sleep sleeps in the kernel. It is for durations below a millisecond: when no other goroutine runs, timers of Go's
// scheduler fire a millisecond late.
func Sleep(d time.Duration) {
	ts := unix.NsecToTimespec(int64(d))
	_ = unix.Nanosleep(&ts, nil) // an early return does no harm
}

// Now returns nanoseconds of CLOCK_MONOTONIC. It reads the clock once, without a system call, and allocates nothing.
func Now() uint64 { return baseNano + uint64(time.Since(base)) }

// Since returns the time since begun, a result of Now.
func Since(begun uint64) time.Duration { return time.Duration(Now() - begun) }
