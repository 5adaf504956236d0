//go:build countlocks

package bench

import (
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
)

// This file needs the package sync of tools/count_locks.sh.

func init() { sync.OnLock(taken) }

// lockCallers counts by the callers of a lock. Its own lock is not one of package sync.
var lockCallers struct {
	busy atomic.Bool
	n    map[[callerDepth]uintptr]uint64
}

// callerDepth is enough to get out of package sync.
const callerDepth = 6

func taken() {
	var pcs [callerDepth]uintptr
	runtime.Callers(3, pcs[:])
	lockCallersDo(func(n map[[callerDepth]uintptr]uint64) { n[pcs]++ })
}

func lockCallersDo(f func(map[[callerDepth]uintptr]uint64)) {
	c := &lockCallers
	for !c.busy.CompareAndSwap(false, true) {
		runtime.Gosched()
	}
	defer c.busy.Store(false)
	if c.n == nil {
		c.n = map[[callerDepth]uintptr]uint64{}
	}
	f(c.n)
}

// countLocks returns how often a sync.Mutex or sync.RWMutex was locked in this process, by the package of the caller.
func countLocks() map[string]uint64 {
	sums := map[string]uint64{}
	lockCallersDo(func(n map[[callerDepth]uintptr]uint64) {
		for pcs, count := range n {
			sums[lockingPackage(pcs[:])] += count
		}
	})
	return sums
}

// lockingPackage returns the package of the first caller outside of sync.
func lockingPackage(pcs []uintptr) string {
	for frames, more := runtime.CallersFrames(pcs), true; more; {
		var f runtime.Frame
		f, more = frames.Next()
		dir := strings.LastIndexByte(f.Function, '/') + 1
		name, _, _ := strings.Cut(f.Function[dir:], ".")
		if pkg := f.Function[:dir] + name; pkg != "sync" && pkg != "internal/sync" {
			return pkg
		}
	}
	return "sync"
}
