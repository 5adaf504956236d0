// Package testlimit ends a test binary whose test hangs, and names the place. It acts in every test
// binary that imports it. A test fails in two cases:
//   - Its goroutine has waited in one place for Still, and the process and its children hardly used a
//     processor, or waited for one or for a disk, meanwhile.
//   - Its goroutine has waited in one place for Busy. This limit grows with the load of the machine.
//
// "go test" itself has one limit of minutes for a whole package. "go test -timeout 0" switches the
// limits off, for debuggers.
package testlimit

import (
	"bytes"
	"flag"
	"fmt"
	"hash/maphash"
	"math"
	"runtime"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// The limits on a machine that is not overloaded.
const (
	Still = 35 * time.Second
	Busy  = 2 * time.Minute
)

const (
	share = 0.2         // of one processor: a process that uses more counts as busy
	every = time.Second // a sample of the goroutines
)

// still is Still; the test of this package shortens it.
var still atomic.Int64

func init() {
	still.Store(int64(Still))
	if testing.Testing() {
		go watch()
	}
}

// Longer replaces Still and Busy by d for the test, if d is longer. It is for tests that have a limit of
// their own, and wait in one place for a long time for processes that hardly run. Tests that run at the
// same time get the same limit.
func Longer(t testing.TB, d time.Duration) {
	longer.Lock()
	defer longer.Unlock()
	longer.all = append(longer.all, d)
	longer.apply()
	t.Cleanup(func() {
		longer.Lock()
		defer longer.Unlock()
		longer.all = slices.Delete(longer.all, slices.Index(longer.all, d), slices.Index(longer.all, d)+1)
		longer.apply()
	})
}

// longer has the limits of running tests.
var longer limits

type limits struct {
	sync.Mutex
	all []time.Duration
}

// apply makes the longest one the limit.
func (l *limits) apply() { still.Store(int64(max(Still, slices.Max(append(l.all, 0))))) }

// watch samples the goroutines of tests until the process ends. It allocates no memory before a test
// exceeds a limit, since tests count the allocations of the whole process.
func watch() {
	w := watcher{seed: maphash.MakeSeed(), places: make([]place, 0, 256)}
	buf := make([]byte, 1<<20)
	for range time.Tick(every) {
		n := runtime.Stack(buf, true)
		if n == len(buf) && n < 1<<26 {
			buf = make([]byte, 2*n)
			continue
		}
		now, own := time.Now(), ownTime()
		w.sample(buf[:n], now, own)
		for i := range w.places {
			p := &w.places[i]
			if now.Sub(p.since) < time.Duration(still.Load()) {
				continue
			}
			if why := p.judge(now, own); why != "" && limited() {
				debug.SetTraceback("all")
				panic(fmt.Sprintf("testlimit: %s:\n%s", why, stackOf(buf[:n], p.goroutine)))
			}
		}
	}
}

// limited reports whether the tests may be ended: "-timeout 0" means that a debugger is at work.
func limited() bool {
	f := flag.Lookup("test.timeout")
	return f == nil || f.Value.String() != "0s"
}

// place is the place at which the goroutine of a test waits.
type place struct {
	goroutine uint64
	stack     uint64 // hash
	since     time.Time
	own       time.Duration // processor time of this process at since
	seen      bool          // in the sample
}

type watcher struct {
	seed   maphash.Seed
	places []place
}

// sample notes where the goroutines of tests are.
func (w *watcher) sample(stacks []byte, now time.Time, own time.Duration) {
	for i := range w.places {
		w.places[i].seen = false
	}
	for len(stacks) > 0 {
		var one []byte
		one, stacks, _ = bytes.Cut(stacks, []byte("\n\n"))
		id, frames, ok := testGoroutine(one)
		if !ok {
			continue
		}
		w.note(place{goroutine: id, stack: maphash.Bytes(w.seed, frames), since: now, own: own, seen: true})
	}
	kept := w.places[:0]
	for _, p := range w.places {
		if p.seen {
			kept = append(kept, p)
		}
	}
	w.places = kept
}

// note records a goroutine. If it is still in the same place, note keeps the time of its first sample there.
func (w *watcher) note(p place) {
	for i := range w.places {
		if old := &w.places[i]; old.goroutine == p.goroutine {
			if old.stack != p.stack {
				*old = p
			}
			old.seen = true
			return
		}
	}
	if len(w.places) < cap(w.places) {
		w.places = append(w.places, p)
	}
}

// testGoroutine returns the number and the frames of a goroutine that runs a test and does not wait for
// other tests. Frames contain the arguments of functions; these usually change in each round of a loop
// that makes progress.
func testGoroutine(stack []byte) (id uint64, frames []byte, ok bool) {
	head, frames, _ := bytes.Cut(stack, []byte("\n"))
	number, ours := bytes.CutPrefix(head, []byte("goroutine "))
	if !ours || !bytes.Contains(frames, []byte("\ntesting.tRunner(")) {
		return 0, nil, false
	}
	for _, tests := range [...]string{"testing.(*T).Run(", "testing.(*T).Parallel(", "testing.(*testState)", "testing.tRunner", "internal/synctest.Run("} {
		if len(frames) > len(tests) && string(frames[:len(tests)]) == tests {
			return 0, nil, false
		}
	}
	for _, c := range number {
		if c < '0' || c > '9' {
			break
		}
		id = 10*id + uint64(c-'0')
	}
	return id, frames, true
}

// stackOf is the stack of one goroutine.
func stackOf(stacks []byte, goroutine uint64) string {
	for one := range bytes.SplitSeq(stacks, []byte("\n\n")) {
		if id, _, ok := testGoroutine(one); ok && id == goroutine {
			return string(one)
		}
	}
	return ""
}

// judge returns the reason why a test has failed that may have exceeded a limit, or "".
func (p *place) judge(now time.Time, own time.Duration) string {
	return verdict(now.Sub(p.since), time.Duration(still.Load()), own-p.own, max(load(), 1)*handicap(), demand)
}

// handicap is how many times less processor time this process gets than one of the usual priority: 1.25 times for each step of
// niceness.
func handicap() float64 {
	priority, err := syscall.Getpriority(syscall.PRIO_PROCESS, 0) // 20 minus the niceness
	if err != nil {
		return 1
	}
	return math.Pow(1.25, float64(max(20-priority, 0)))
}

// verdict is judge for a test that has waited for the time waited, while its process used the processor time used. demand
// returns the present processor demand of the process and its descendants. A load above 1 makes Busy longer.
func verdict(waited, still, used time.Duration, load float64, demand func() time.Duration) string {
	hardly := func(used, in time.Duration) bool { return used.Seconds() < share*in.Seconds() }
	waitedFor := fmt.Sprintf("a test has waited in one place for %s", waited.Round(time.Second))
	switch {
	case waited < still:
		return ""
	case waited.Seconds() >= max(load, 1)*max(Busy, still).Seconds():
		return fmt.Sprintf("%s, limit %s times the load of %.1f for each processor", waitedFor, max(Busy, still), max(load, 1))
	case hardly(used, waited):
		if now := demand(); hardly(now, window) {
			return fmt.Sprintf("%s, limit %s: its process used %s of processor time, and now wants %s of a processor or a disk in %s with its children",
				waitedFor, still, used.Round(time.Millisecond), now.Round(time.Millisecond), window)
		}
	}
	return ""
}
