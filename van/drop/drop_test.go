package drop

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"

	"github.com/stepaf/stepaf-go/van"
)

// source is an inner van that delivers the test's messages.
type source struct {
	van.Van // nil: a call that a test does not expect panics
	recv    van.Receiver
}

func (s *source) Start(recv van.Receiver) { s.recv = recv }

// run passes n control and n data messages to a van and returns the delivered ones.
func run(t *testing.T, v *Van, s *source, n int) (kept []bool) {
	t.Helper()
	var got bool
	v.Start(func(*van.Message) { got = true })
	for i := range 2 * n {
		m := &van.Message{}
		m.Reset()
		if i%2 == 0 {
			m.Control.Cmd = van.Barrier
		}
		got = false
		s.recv(m)
		kept = append(kept, got)
	}
	return kept
}

func count(kept []bool) (dropped int) {
	for _, k := range kept {
		if !k {
			dropped++
		}
	}
	return dropped
}

func TestShare(t *testing.T) {
	const n = 5000
	for _, c := range []struct{ percent, min, max int }{
		{0, 0, 0}, {-5, 0, 0}, {1, 60, 140}, {20, 1800, 2200}, {50, 4800, 5200}, {100, 2 * n, 2 * n}, {300, 2 * n, 2 * n},
	} {
		s := &source{}
		v := New(s, c.percent, 1, nil)
		v.Enable()
		kept := run(t, v, s, n)
		if d := count(kept); d < c.min || d > c.max || uint64(d) != v.dropped.Load() {
			t.Errorf("%d%%: dropped %d of %d (counted %d), want %d to %d", c.percent, d, 2*n, v.dropped.Load(), c.min, c.max)
		}
		if c.percent == 20 {
			runs := 0
			for i := 1; i < len(kept); i++ {
				if kept[i] != kept[i-1] {
					runs++
				}
			}
			// Independent draws change 2*0.2*0.8 of the times.
			if runs < 2900 || runs > 3500 {
				t.Errorf("kept and dropped alternate %d times in %d, want about 3200", runs, 2*n)
			}
		}
	}
}

func TestSeedRepeats(t *testing.T) {
	var log bytes.Buffer
	draw := func(seed uint64) string {
		s := &source{}
		v := New(s, 50, seed, slog.New(slog.NewTextHandler(&log, nil)))
		v.Enable()
		var b strings.Builder
		for _, k := range run(t, v, s, 100) {
			if k {
				b.WriteByte('+')
			} else {
				b.WriteByte('-')
			}
		}
		return b.String()
	}
	a := draw(42)
	if !strings.Contains(log.String(), "seed=42") || !strings.Contains(log.String(), "dropped a message") || !strings.Contains(log.String(), "BARRIER") {
		t.Errorf("the log lacks the seed or what was dropped: %.500s", log.String())
	}
	if b := draw(42); a != b {
		t.Errorf("the same seed gave\n%s and\n%s", a, b)
	}
	if b := draw(43); a == b {
		t.Errorf("two seeds gave the same draws %s", a)
	}
}

func TestNothingBeforeEnable(t *testing.T) {
	s := &source{}
	v := New(s, 100, 0, nil)
	if d := count(run(t, v, s, 100)); d != 0 {
		t.Errorf("dropped %d messages before Enable", d)
	}
}
