package membership

// Reports of the state of start-up and of the cluster, for logs and errors.

import (
	"fmt"
	"strings"
	"time"

	"github.com/stepaf/stepaf-go/van"
)

// Report describes the state of start-up or of the cluster: the present nodes, with the records that they have sent,
// and the missing ones.
type Report struct {
	Elapsed time.Duration // since Start
	Ready   bool
	Present []van.Node // in order of arrival, later of assignment
	Missing []string   // "1 of 2 workers (rank 1)"
	// Vanished and Refused are the nodes that disconnected or were refused during start-up, the latest 16 of each.
	Vanished, Refused []string
	Ended             []string // texts of processes that ended before they registered, the latest 16
	Unreached         []string // why nodes that have registered cannot be reached
	Dead              []string // with the cause
	Returned          string   // on a restarted scheduler: how many nodes have returned
	Barriers          string   // on the scheduler: the missing nodes of open barriers
	Note              string   // on workers and servers: the known state of the scheduler
}

// String puts the report on one line.
func (r Report) String() string { return r.format(describe, true) }

// withoutAddresses is String for processes that have registered with a scheduler, and may not be nodes of its
// cluster: it has no address of another node. The scheduler's log has the addresses.
func (r Report) withoutAddresses() string {
	of := func(n *van.Node) string { return fmt.Sprintf("%s (%s)", n.Role, rankText(n)) }
	return r.format(of, false)
}

// format is the report in which of describes each present node. If details is true, it describes lost and refused
// nodes, otherwise it only counts them.
func (r Report) format(of func(*van.Node) string, details bool) string {
	var b strings.Builder
	fmt.Fprintf(&b, "after %s: ", r.Elapsed.Round(time.Millisecond))
	switch {
	case r.Ready:
		fmt.Fprintf(&b, "complete with %d nodes", len(r.Present))
	case r.Note != "":
		b.WriteString(r.Note)
	default:
		fmt.Fprintf(&b, "waiting for %s", list(r.Missing))
		var names []string
		for i := range r.Present {
			names = append(names, of(&r.Present[i]))
		}
		if len(names) > 0 {
			fmt.Fprintf(&b, "; present: %s", list(names))
		} else {
			b.WriteString("; no node has registered")
		}
	}
	for _, part := range []struct {
		name  string
		items []string
	}{{"not reached", r.Unreached}, {"disconnected", r.Vanished}, {"refused", r.Refused}, {"dead", r.Dead}, {"ended", r.Ended}} {
		if len(part.items) > 0 && !details && part.name != "ended" {
			fmt.Fprintf(&b, "; %s: %d, see the scheduler's log", part.name, len(part.items))
		} else if len(part.items) > 0 {
			fmt.Fprintf(&b, "; %s: %s", part.name, strings.Join(part.items, "; "))
		}
	}
	if r.Returned != "" {
		b.WriteString("; " + r.Returned)
	}
	if r.Barriers != "" {
		b.WriteString("; " + r.Barriers)
	}
	return b.String()
}
