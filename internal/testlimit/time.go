package testlimit

// Processor time and load, as Linux tells them.

import (
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// ProcessorTime is the processor time that a process has used, all threads together.
func ProcessorTime(pid int) (time.Duration, error) {
	const all = 2 // CPUCLOCK_SCHED, of a process
	var t unix.Timespec
	if err := unix.ClockGettime(int32(^pid<<3|all), &t); err != nil {
		return 0, os.NewSyscallError("clock_gettime", err)
	}
	return time.Duration(t.Nano()), nil
}

// ownTime is the processor time of this process and of its children that have ended.
func ownTime() time.Duration {
	var sum time.Duration
	for _, who := range [...]int{unix.RUSAGE_SELF, unix.RUSAGE_CHILDREN} {
		var u unix.Rusage
		if unix.Getrusage(who, &u) == nil {
			sum += time.Duration(u.Utime.Nano() + u.Stime.Nano())
		}
	}
	return sum
}

// childrenWindow is how long children observes.
const childrenWindow = time.Second

// children is the processor time that all descendants of this process use within a window.
func children() time.Duration {
	before := map[int]time.Duration{}
	descendants(os.Getpid(), func(pid int) {
		before[pid], _ = ProcessorTime(pid)
	})
	if len(before) == 0 {
		return 0
	}
	<-time.After(childrenWindow)
	var sum time.Duration
	for pid, b := range before {
		if t, err := ProcessorTime(pid); err == nil {
			sum += t - b
		}
	}
	return sum
}

func descendants(pid int, f func(pid int)) {
	tasks, _ := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	for _, task := range tasks {
		text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/children", pid, task.Name()))
		for _, word := range strings.Fields(string(text)) {
			if child, err := strconv.Atoi(word); err == nil {
				f(child)
				descendants(child, f)
			}
		}
	}
}

// load is the number of processes that want a processor, for each processor; 0 where it is not known.
func load() float64 {
	text, _ := os.ReadFile("/proc/loadavg")
	word, _, _ := strings.Cut(string(text), " ")
	n, err := strconv.ParseFloat(word, 64)
	if err != nil {
		return 0
	}
	return n / float64(runtime.NumCPU())
}
