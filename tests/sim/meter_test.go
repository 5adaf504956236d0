package sim

import (
	"os/exec"
	"strings"
	"testing"
	"time"
)

// TestMeter: a seed has a limit of processor time, but none of wall time. A seed that hangs is ended.
func TestMeter(t *testing.T) {
	for _, c := range []struct {
		name  string
		share float64 // of a processor that the process gets
		want  string
		after time.Duration
	}{
		{"alone", 1, "20s of processor time", 20 * time.Second},
		{"a load of 40 on two processors", 0.05, "20s of processor time", 400 * time.Second},
		{"hangs", 0.0001, "it hangs", time.Minute},
	} {
		var m meter
		begun := time.Unix(0, 0)
		for real := time.Duration(0); ; real += time.Second {
			why := m.over(begun.Add(real), 7*time.Second+time.Duration(float64(real)*c.share))
			if why == "" && real < time.Hour {
				continue
			}
			if !strings.Contains(why, c.want) || real < c.after || real > c.after+2*time.Second {
				t.Errorf("%s: after %s %q, want %q after %s", c.name, real, why, c.want, c.after)
			}
			break
		}
	}
}

// TestSeedThatDoesNotEnd: the seed fails with the reason and with the output of its process on SIGQUIT.
func TestSeedThatDoesNotEnd(t *testing.T) {
	old := oneTime
	t.Cleanup(func() { oneTime = old })
	oneTime = 200 * time.Millisecond
	p, err := start(exec.CommandContext(t.Context(), "sh", "-c", "trap 'echo where it is >&2; exit 2' QUIT; while :; do :; done"))
	if err != nil {
		t.Fatal(err)
	}
	o, ok := p.run(2)
	want := "it has not ended after 200ms of processor time:\nwhere it is\n"
	if ok || o.Seed != 2 || len(o.Violations) != 1 || o.Violations[0] != want {
		t.Errorf("seed %d, and the process goes on: %t: %q, want %q", o.Seed, ok, o.Violations, want)
	}
}
