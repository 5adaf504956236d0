package postoffice

import (
	"testing"
	"time"
)

// TestOneExpiry: requests that are kept, taken and kept again, for whatever application,
// are looked after by one timer, which ends with the node.
func TestOneExpiry(t *testing.T) {
	var a apps
	a.expireIn(nil, time.Hour)
	first := a.expiry
	a.expireIn(nil, time.Hour)
	if first.Stop() {
		t.Error("the earlier timer still runs")
	}
	a.discard()
	if a.expiry.Stop() {
		t.Error("a timer runs on after the end")
	}
}
