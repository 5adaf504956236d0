package bench

import (
	"fmt"
	"strings"

	"github.com/urfave/cli/v2"
)

// payload is the size of a round trip: bytes from worker to server, and back.
type payload struct{ push, pull int }

// attention is what one layer of a large model moves.
var attention = payload{917504, 1835008}

func (p payload) String() string { return fmt.Sprintf("push %d, pull %d", p.push, p.pull) }

func both(n int) payload { return payload{n, n} }

// What figures are compared with, besides the floor.
const (
	ibWriteLat = "ib_write_lat"
	ibWriteBW  = "ib_write_bw"
	ourFloor   = "the floor"
	gloo       = "gloo"
)

// goal bounds the ratio of a payload's figure to another one of the same run. The zero
// goal is none.
type goal struct {
	of    string // what the figure is compared with
	limit float64
	least bool // the ratio is to be at least limit, not at most
}

func (g goal) String() string {
	if g.least {
		return fmt.Sprintf("at least %g", g.limit)
	}
	return fmt.Sprintf("at most %g", g.limit)
}

// reached tells whether a ratio is within the goal.
func (g goal) reached(ratio float64) bool {
	if g.least {
		return ratio >= g.limit
	}
	return ratio <= g.limit
}

// course is a way of measuring that has payloads of its own, and goals for some.
type course struct{ van, device string }

// courses say what is measured when no size is asked for.
var (
	courses = map[course][]payload{
		{ibverbs, cpu}:    {both(1 << 10), both(64 << 10), attention},
		{local, gpu}:      gpuPayloads,
		{local, prepared}: gpuPayloads,
		{zmq, gpu}:        gpuPayloads,
	}
	gpuPayloads = []payload{both(1 << 10), attention, both(16 << 20), both(256 << 20)}
)

// goals are those of some payloads.
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

// payloads are what is measured when no size is asked for: one, unless way is a course
// of its own.
func (way course) payloads(one payload) []payload {
	if all := courses[way]; all != nil {
		return all
	}
	return []payload{one}
}

// goal is that of one payload.
func (way course) goal(p payload) goal { return goals[way][p] }

// goalText is a goal, or none, in a table.
func goalText(none string, limit float64, missed bool) string {
	if limit > 0 {
		none = fmt.Sprintf("%g", limit)
	}
	if missed {
		none += " missed"
	}
	return none
}

// verdict collects what --check is told of.
type verdict struct{ missed []string }

// judge compares a ratio with a goal, and tells whether the goal is missed.
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

// check is the error of --check.
func (v *verdict) check(c *cli.Context) error {
	if !c.Bool("check") {
		return nil
	}
	return v.err()
}

// err says what was missed.
func (v *verdict) err() error {
	if len(v.missed) == 0 {
		return nil
	}
	return fmt.Errorf("bench: goals missed: %s", strings.Join(v.missed, "; "))
}
