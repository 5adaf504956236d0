package prog

import (
	"testing"
	"time"

	_ "github.com/stepaf/stepaf-go/tests/testlimit"
)

func TestLine(t *testing.T) {
	var l Latencies
	for i := 1000; i > 0; i-- {
		l.Add(time.Duration(i) * time.Microsecond)
	}
	want := "push batch latency: : mean=500.5us, min=1us, p50=500us, p90=900us, p99=990us, max=1000us"
	if got := l.Line("push batch latency: "); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	l.Reset()
	l.Add(1234567 * time.Nanosecond)
	want = "x: mean=1234.57us, min=1234.57us, p50=1234.57us, p90=1234.57us, p99=1234.57us, max=1234.57us"
	if got := l.Line("x"); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

func TestRounds(t *testing.T) {
	for _, tt := range []struct{ n, stop, want int }{{3, 10, 3}, {0, 10, 10}, {1, 10, 1}} {
		got := 0
		for i := range Rounds(tt.n) {
			if i != got {
				t.Fatalf("round %d comes as number %d", i, got)
			}
			if got++; got == tt.stop {
				break
			}
		}
		if got != tt.want {
			t.Errorf("Rounds(%d): %d rounds, want %d", tt.n, got, tt.want)
		}
	}
}
