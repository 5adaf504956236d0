package engine

import (
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
)

// TestCoresTaken: each time that the cores are busy again at once, the pause in spinning doubles, up to a
// second. After a calm time it starts again with the first pause.
func TestCoresTaken(t *testing.T) {
	var c cores
	if c.wanted() {
		t.Error("wanted at first")
	}
	now := uint64(time.Hour)
	for _, want := range []time.Duration{firstPause, 2 * firstPause, 4 * firstPause, 8 * firstPause, 16 * firstPause, 32 * firstPause, maxPause, maxPause} {
		c.taken(now)
		if got := c.until.Load() - now; got != uint64(want) {
			t.Fatalf("the pause in spinning is %s, want %s", time.Duration(got), want)
		}
		c.taken(now + 1) // by another wait
		if got := c.until.Load() - now; got != uint64(want) {
			t.Fatalf("said twice, the pause in spinning is %s, want %s", time.Duration(got), want)
		}
		if c.doubt.Load() <= c.until.Load() {
			t.Fatal("the next yield is not examined")
		}
		now = c.until.Load() + uint64(time.Millisecond)
	}
	now += 5 * uint64(maxPause)
	c.taken(now)
	if got := c.until.Load() - now; got != uint64(firstPause) {
		t.Errorf("after a calm time the pause in spinning is %s, want %s", time.Duration(got), firstPause)
	}
}

// TestCoresWanted: while other programs want the cores, neither a Poll nor a loop spins; after that both do. With an unlimited spin, the cores are not watched.
func TestCoresWanted(t *testing.T) {
	e := New(time.Second)
	asked := 0
	done := func() bool { asked++; return true }
	e.spinner.cores.until.Store(clock.Now() + uint64(time.Hour))
	if e.Poll(done); asked != 0 || !e.spinner.cores.wanted() {
		t.Errorf("a Poll began to spin while other programs want the cores")
	}
	e.spinner.cores.until.Store(clock.Now() - 1)
	if e.Poll(done); asked == 0 || e.spinner.cores.wanted() {
		t.Errorf("a Poll does not spin, though other programs no longer want the cores")
	}
	for _, spin := range []time.Duration{0, -1} {
		if e := New(spin); e.spinner.cores != nil || e.spinner.cores.wanted() {
			t.Errorf("with a spin of %s the cores are watched", spin)
		}
	}
}

// TestCoresExamined: yields are examined for a while after a long time between two polls. A yield after which no other
// thread ran for long changes nothing.
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
			t.Fatal("a yield within its limit counts as taken by other programs")
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

// TestTakesExamined: spinning in a source's Take detects that other programs want the cores.
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

// TestCoresIgnored: with a source without DetectsBusyCores, an Engine never considers the cores busy, even if its
// other sources and its own yields indicate it.
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
		t.Error("polls and yields are examined")
	}
}
