package engine

import (
	"testing"
	"time"
)

// TestAdaptiveSpin: waits that were short make the next one spin, long ones do not.
func TestAdaptiveSpin(t *testing.T) {
	const most = 50 * time.Microsecond
	var p adaptiveSpin
	wait := func(d time.Duration) {
		p.begin(1000)
		p.came(1000+uint64(d), most)
	}
	if got := p.spin(most); got != most {
		t.Errorf("at first it spins for %s, want %s", got, most)
	}
	for range 3 {
		wait(time.Second)
	}
	if got := p.spin(most); got != shortSpin {
		t.Errorf("after long waits it spins for %s, want %s", got, shortSpin)
	}
	if got := p.spin(0); got != 0 {
		t.Errorf("where it is not to spin it spins for %s", got)
	}
	for range 100 {
		wait(time.Second)
	}
	for range maxScore {
		wait(time.Microsecond)
	}
	if got := p.spin(most); got != most {
		t.Errorf("after short waits it spins for %s, want %s", got, most)
	}
}
