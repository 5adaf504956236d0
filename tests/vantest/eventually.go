package vantest

import (
	"testing"
	"time"

	_ "github.com/stepaf/stepaf-go/tests/testlimit" // the limit applies to all tests that use this package
)

// Eventually waits, for d at most, for a condition without a signal.
func Eventually(t testing.TB, d time.Duration, what string, ok func() bool) {
	t.Helper()
	tick := time.Tick(time.Millisecond)
	for end := time.After(d); !ok(); {
		select {
		case <-tick:
		case <-end:
			t.Fatalf("not within %s: %s", d, what)
		}
	}
}
