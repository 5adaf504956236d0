package engine

import (
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
)

// TestCoresTaken: each time that the cores are found busy at once again, waits do not look for twice as long, up to a
// second; after a calm time it begins anew.
func TestCoresTaken(t *testing.T) {
	var c cores
	if c.wanted() {
		t.Error("wanted at first")
	}
	now := uint64(time.Hour)
	for _, want := range []time.Duration{firstPause, 2 * firstPause, 4 * firstPause, 8 * firstPause, 16 * firstPause, 32 * firstPause, maxPause, maxPause} {
		c.taken(now)
		if got := c.until.Load() - now; got != uint64(want) {
			t.Fatalf("waits do not look for %s, want %s", time.Duration(got), want)
		}
		c.taken(now + 1) // by another wait
		if got := c.until.Load() - now; got != uint64(want) {
			t.Fatalf("said twice, waits do not look for %s, want %s", time.Duration(got), want)
		}
		if c.doubt.Load() <= c.until.Load() {
			t.Fatal("the next yield is not examined")
		}
		now = c.until.Load() + uint64(time.Millisecond)
	}
	now += 5 * uint64(maxPause)
	c.taken(now)
	if got := c.until.Load() - now; got != uint64(firstPause) {
		t.Errorf("after a calm time waits do not look for %s, want %s", time.Duration(got), firstPause)
	}
}

// TestCoresWanted: while others want the cores, neither a Poll nor a loop looks; then both do. Without a limit they are not asked.
func TestCoresWanted(t *testing.T) {
	e := New(time.Second)
	asked := 0
	done := func() bool { asked++; return true }
	e.spinner.cores.until.Store(clock.Now() + uint64(time.Hour))
	if e.Poll(done); asked != 0 || !e.spinner.cores.wanted() {
		t.Errorf("a Poll began to look where others want the cores")
	}
	e.spinner.cores.until.Store(clock.Now() - 1)
	if e.Poll(done); asked == 0 || e.spinner.cores.wanted() {
		t.Errorf("a Poll does not look, though others no longer want the cores")
	}
	for _, spin := range []time.Duration{0, -1} {
		if e := New(spin); e.spinner.cores != nil || e.spinner.cores.wanted() {
			t.Errorf("with a look of %s the cores are watched", spin)
		}
	}
}

// TestCoresExamined: yields are examined for a while when a long time has passed between two looks, and one that gave the
// core to nobody for long changes nothing.
func TestCoresExamined(t *testing.T) {
	if _, ok := switches(); !ok {
		t.Skip("the system does not count switches of a thread")
	}
	var c cores
	now := clock.Now()
	if c.passed(now, uint64(longYield), time.Millisecond); c.doubt.Load() != 0 || c.begin() != (yields{}) {
		t.Error("yields are examined after a short time")
	}
	if c.passed(now, uint64(2*longYield), time.Millisecond); c.doubt.Load() != now+uint64(doubtTime) {
		t.Error("yields are not examined after a long time")
	}
	for range 100 {
		before := clock.Now()
		c.until.Store(0) // a yield before may have been long
		c.doubt.Store(before + uint64(time.Hour))
		y := c.begin()
		if y.c != &c {
			t.Fatal("a yield is not examined")
		}
		if y.end(time.Hour); c.wanted() {
			t.Fatal("what may take so long tells that others want the core")
		}
		if c.yield(); clock.Now()-before < uint64(longYield) && c.wanted() {
			t.Fatal("a short yield tells that others want the core")
		}
	}
	c.until.Store(0)
	c.doubt.Store(clock.Now() + uint64(time.Hour))
	y := c.begin()
	y.begun -= uint64(2 * longYield)
	y.switches--
	if y.end(0); c.until.Load() == 0 { // not wanted, which ends soon
		t.Error("a long yield after which the thread was switched tells nothing")
	}
	c.doubt.Store(1)
	if c.begin() != (yields{}) || c.doubt.Load() != 0 {
		t.Error("yields are examined for ever")
	}
	(*cores)(nil).yield()
	(*cores)(nil).passed(now, uint64(time.Hour), 0)
}

// TestTakesExamined: looks of a source tell whether others want the cores.
func TestTakesExamined(t *testing.T) {
	f := NewFeed(New(time.Second), Source[int](newMemory(false, nil)), FeedOptions{DetectsBusyCores: true})
	c := f.e.spinner.cores
	for _, slice := range []time.Duration{0, time.Nanosecond} {
		c.doubt.Store(1) // which an examination would find over
		f.takeFrom(slice, false)
		if looked := c.doubt.Load() == 0; looked != (slice > 0) {
			t.Errorf("a Take of %s is examined: %t", slice, looked)
		}
	}
}

// TestCoresIgnored: with a source that tells nothing about it, an Engine never takes the cores for busy, whatever its
// other sources and its waits have seen.
func TestCoresIgnored(t *testing.T) {
	e := New(time.Second)
	NewFeed(e, Source[int](newMemory(false, nil)), FeedOptions{DetectsBusyCores: true})
	c := e.spinner.cores
	c.taken(clock.Now() + uint64(time.Hour)) // else it ends soon
	if !c.wanted() {
		t.Fatal("with sources that tell it, the cores are not taken for busy")
	}
	f := NewFeed(e, Source[int](newMemory(false, nil)), FeedOptions{})
	if c.wanted() {
		t.Error("the cores are taken for busy")
	}
	c.doubt.Store(1)
	f.takeFrom(time.Nanosecond, false)
	if c.yield(); c.doubt.Load() == 0 {
		t.Error("looks and yields are examined")
	}
}
