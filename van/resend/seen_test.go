package resend

import (
	"math"
	"testing"
)

// TestWindowWraps: after the largest timestamp, the small ones are new, once.
func TestWindowWraps(t *testing.T) {
	for _, jump := range []int32{0, 2, 100, windowSize - 300, 3 * windowSize} { // left out at the end
		var w window
		last := int32(math.MaxInt32) - jump
		for ts := last - 100; ; ts++ {
			if w.add(ts) {
				t.Fatalf("timestamp %d is taken for a duplicate", ts)
			}
			if ts == last {
				break
			}
		}
		for ts := range int32(200) {
			if w.add(ts) {
				t.Fatalf("timestamp %d after %d is taken for a duplicate", ts, last)
			}
			if !w.add(ts) {
				t.Fatalf("timestamp %d is not taken for a duplicate", ts)
			}
		}
		if !w.add(last) {
			t.Errorf("timestamp %d is not taken for a duplicate after the wrap", last)
		}
	}
}

// TestWindowForgets: what is behind the window cannot be told from a duplicate.
func TestWindowForgets(t *testing.T) {
	var w window
	w.add(10)
	w.add(windowSize + 20)
	if !w.add(11) {
		t.Error("a timestamp behind the window is taken for a new one")
	}
	if w.add(windowSize + 19) {
		t.Error("a timestamp inside the window is taken for a duplicate")
	}
}
