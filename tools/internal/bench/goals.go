package bench

import (
	"fmt"
	"strings"

	"github.com/urfave/cli/v2"
)

// payload is the size of a round trip: bytes from worker to server, and back.
type payload struct{ push, pull int }

// attention is the payload of one layer of a large model.
var attention = payload{917504, 1835008}

func (p payload) String() string { return fmt.Sprintf("push %d, pull %d", p.push, p.pull) }

func both(n int) payload { return payload{n, n} }

// Baselines of goals, besides the floor.
const (
	ibWriteLat = "ib_write_lat"
	ibWriteBW  = "ib_write_bw"
	ourFloor   = "the floor"
	gloo       = "gloo"
)

// goal bounds the ratio of a payload's figure to a baseline of the same run. The zero goal means no goal.
type goal struct {
	of    string // the baseline
	limit float64
	least bool // limit is a minimum, not a maximum
}

func (g goal) String() string {
	if g.least {
		return fmt.Sprintf("at least %g", g.limit)
	}
	return fmt.Sprintf("at most %g", g.limit)
}

// text returns the goal in parentheses after a figure, "" if there is none.
func (g goal) text() string {
	if g.limit == 0 {
		return ""
	}
	return fmt.Sprintf(" (goal: %s)", g)
}

// reached reports whether a ratio meets the goal.
func (g goal) reached(ratio float64) bool {
	if g.least {
		return ratio >= g.limit
	}
	return ratio <= g.limit
}

// course is a transport and a device that have default payloads and goals.
type course struct{ van, device string }

// courses has the payloads that are measured by default; for a transport and device that it lacks, the attention payload is measured.
var (
	courses = map[course][]payload{
		{ibverbs, cpu}:    {both(1 << 10), both(64 << 10), attention},
		{local, gpu}:      gpuPayloads,
		{local, prepared}: gpuPayloads,
		{zmq, gpu}:        gpuPayloads,
	}
	gpuPayloads = []payload{both(1 << 10), attention, both(16 << 20), both(256 << 20)}
)

// goals are the goals of some payloads.
var goals = map[course]map[payload]goal{
	{ibverbs, cpu}: {
		both(1 << 10):  {of: ibWriteLat, limit: 12},
		both(64 << 10): {of: ibWriteLat, limit: 6},
		attention:      {of: ibWriteBW, limit: 0.75, least: true},
	},
	{local, gpu}: {
		both(1 << 10):   {of: ourFloor, limit: 2},
		attention:       {of: ourFloor, limit: 1.6},
		both(256 << 20): {of: ourFloor, limit: 1.05},
	},
	{local, prepared}: {
		both(1 << 10):   {of: ourFloor, limit: 1.4},
		attention:       {of: ourFloor, limit: 1.25},
		both(256 << 20): {of: ourFloor, limit: 1.03},
	},
}

// goal returns the goal of a payload.
func (way course) goal(p payload) goal { return goals[way][p] }

// text returns the goal, or none, for a table.
func (x *comparison) text(none string) string {
	if x.Goal > 0 {
		none = fmt.Sprintf("%g", x.Goal)
	}
	if x.Missed {
		none += " missed"
	}
	return none
}

// judge compares the ratio of p with a goal.
func (x *comparison) judge(p fmt.Stringer, g goal, v *verdict) {
	x.Goal, x.Missed = g.limit, v.judge(p, g, x.RatioP50)
}

// verdict collects the missed goals for --check.
type verdict struct{ missed []string }

// judge compares a ratio with a goal, and reports whether the goal is missed.
func (v *verdict) judge(p fmt.Stringer, g goal, ratio float64) bool {
	if g.limit == 0 || g.reached(ratio) {
		return false
	}
	word := "times"
	if g.least {
		word = "of"
	}
	v.miss(p, fmt.Sprintf("%.2f %s %s, want %s", ratio, word, g.of, g))
	return true
}

func (v *verdict) miss(p fmt.Stringer, why string) {
	v.missed = append(v.missed, fmt.Sprintf("%s: %s", p, why))
}

// check returns the error of --check.
func (v *verdict) check(c *cli.Context) error {
	if !c.Bool("check") {
		return nil
	}
	return v.err()
}

// err returns an error that names the missed goals.
func (v *verdict) err() error {
	if len(v.missed) == 0 {
		return nil
	}
	return fmt.Errorf("bench: goals missed: %s", strings.Join(v.missed, "; "))
}
