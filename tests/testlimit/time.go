package testlimit

// Processor time and load, as Linux reports them.

import (
	"fmt"
	"os"
	"path/filepath"
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

// window is how long demand observes.
const window = 3 * time.Second

// demand is a sum for one window: the time for which the threads of this process and its descendants use a processor or wait for one,
// and the time in which at least one of them waits for a disk. A process waits for a processor if other programs use all of them. A process that hangs waits for
// neither.
func demand() time.Duration {
	before := map[string]time.Duration{}
	wanted(func(thread string, t time.Duration) { before[thread] = t })
	var sum time.Duration
	const samples = 30
	for range samples {
		<-time.After(window / samples)
		if readsDisk() {
			sum += window / samples
		}
	}
	wanted(func(thread string, t time.Duration) { sum += t - before[thread] })
	return sum
}

// readsDisk reports whether a thread of this process or its descendants waits for a disk: state D of Linux.
func readsDisk() (reads bool) {
	threads("stat", func(_, text string) {
		_, rest, _ := strings.Cut(text[strings.LastIndexByte(text, ')')+1:], " ")
		reads = reads || strings.HasPrefix(rest, "D")
	})
	return reads
}

// wanted calls f for each thread of this process and its descendants, with the time that it has used a
// processor or waited for one.
func wanted(f func(thread string, t time.Duration)) {
	threads("schedstat", func(name, text string) {
		var ran, waited time.Duration
		if _, err := fmt.Sscan(text, &ran, &waited); err == nil {
			f(name, ran+waited)
		}
	})
}

// threads calls f with the path and the content of /proc/PID/task/TID/file, for each thread of this process and its descendants.
func threads(file string, f func(name, text string)) {
	each := func(pid int) {
		names, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/%s", pid, file))
		for _, name := range names {
			if text, err := os.ReadFile(name); err == nil {
				f(name, string(text))
			}
		}
	}
	each(os.Getpid())
	descendants(os.Getpid(), each)
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

// load is the number of runnable processes for each processor, 0 if it is not known.
func load() float64 {
	text, _ := os.ReadFile("/proc/loadavg")
	word, _, _ := strings.Cut(string(text), " ")
	n, err := strconv.ParseFloat(word, 64)
	if err != nil {
		return 0
	}
	return n / float64(runtime.NumCPU())
}
