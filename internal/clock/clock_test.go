package clock

import (
	"testing"
	"time"

	_ "github.com/stepaf/stepaf-go/tests/testlimit"
)

// TestBegin: Now is the host's clock, also if the process was descheduled during begin.
func TestBegin(t *testing.T) {
	const pause, off = uint64(5 * time.Millisecond), uint64(time.Millisecond)
	for late := range 6 { // the reading after which the process is descheduled
		readings := 0
		base, nano := begin(func() uint64 {
			now := monotonic()
			if readings++; readings-1 == late {
				for monotonic() < now+pause {
				}
			}
			return now
		})
		before := monotonic()
		now := nano + uint64(time.Since(base))
		after := monotonic()
		if now+off < before || now > after+off {
			t.Errorf("late after reading %d: it says %d between %d and %d of the host's clock", late, now, before, after)
		}
	}
}
