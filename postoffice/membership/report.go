package membership

// Reports of the state of start-up and of the cluster, for logs and errors.

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/stepaf/stepaf-go/van"
)

// Report describes the state of start-up or of the cluster: which nodes are present, with
// the records that they have sent, and which are missing.
type Report struct {
	Elapsed time.Duration // since Start
	Ready   bool
	Present []van.Node // in order of arrival, later of assignment
	Missing []string   // "1 of 2 workers (rank 1)"
	// Vanished and Refused are the nodes that disconnected or were refused during
	// start-up, the latest 16 of each.
	Vanished, Refused []string
	Dead              []string // with the cause
	Returned          string   // on a restarted scheduler: how many nodes have come back
	Barriers          string   // on the scheduler: the missing nodes of open barriers
	Note              string   // on workers and servers: what is known of the scheduler
}

// Report describes the present state.
func (m *Machine) Report(now time.Duration) Report {
	r := Report{Elapsed: now - m.life.started, Ready: m.life.phase == ready}
	if m.life.phase == created {
		r.Elapsed = 0
	}
	r.Present = append(r.Present, m.table.nodes...)
	for _, id := range m.table.members(van.AllNodes) {
		if m.alive.isDown(id) {
			r.Dead = append(r.Dead, fmt.Sprintf("%s: %s", m.table.peer(id), m.alive.peers[id].cause))
		}
	}
	if s := m.sched; s != nil {
		r.Vanished, r.Refused = slices.Clone(s.vanished), slices.Clone(s.refused)
		r.Barriers = m.barriersText()
		if !r.Ready {
			r.Present = append(r.Present, s.present()...)
			r.Missing = m.missing(r.Present)
			if s.back != nil {
				r.Returned = fmt.Sprintf("%d of the %d nodes of an earlier scheduler's cluster have come back", len(s.back.nodes),
					m.cfg.groupLen(van.WorkerGroup|van.ServerGroup))
			}
		}
		return r
	}
	if !r.Ready {
		r.Note = m.schedulerNote()
	}
	return r
}

func (m *Machine) schedulerNote() string {
	at := "the scheduler at " + m.table.scheduler.Addr()
	switch {
	case m.schedulerLost != nil:
		return fmt.Sprintf("the connection to %s broke: %s", at, m.schedulerLost)
	case m.schedulerSaid != "":
		return "the scheduler says: " + m.schedulerSaid
	}
	return fmt.Sprintf("%s has not answered to %s; it does not run there (check DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT), or over another transport (DMLC_ENABLE_RDMA), "+
		"or it waits for other nodes without saying so, as the C++ one does", at, describe(&m.table.self))
}

// missing lists, by role, how many nodes and which ranks have not registered.
func (m *Machine) missing(present []van.Node) []string {
	var out []string
	for _, role := range []van.Role{van.Worker, van.Server} {
		n := m.cfg.instances(role)
		count, ranked := 0, false
		has := make([]bool, n)
		for i := range present {
			if p := &present[i]; p.Role == role {
				count++
				if p.AuxID >= 0 && p.AuxID < n {
					has[p.AuxID] = true
				}
			}
			ranked = ranked || present[i].AuxID != -1
		}
		if count == n {
			continue
		}
		s := fmt.Sprintf("%d of %d %ss", n-count, n, role)
		if ranked {
			var ranks []string
			for r, ok := range has {
				if !ok {
					ranks = append(ranks, fmt.Sprint(r))
				}
			}
			s += " (rank " + list(ranks) + ")"
		}
		out = append(out, s)
	}
	return out
}

// String puts the report on one line.
func (r Report) String() string {
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
			names = append(names, describe(&r.Present[i]))
		}
		if len(names) > 0 {
			fmt.Fprintf(&b, "; present: %s", list(names))
		} else {
			b.WriteString("; nobody has registered")
		}
	}
	for _, part := range []struct {
		name  string
		items []string
	}{{"vanished", r.Vanished}, {"refused", r.Refused}, {"dead", r.Dead}} {
		if len(part.items) > 0 {
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

func (m *Machine) joinedText(role van.Role) string {
	var names []string
	for _, n := range m.sched.present() {
		if n.Role == role {
			names = append(names, n.Addr())
		}
	}
	return list(names)
}

// list joins names; after the first 20 it only counts.
func list(names []string) string {
	const most = 20
	if len(names) > most {
		return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ", "), len(names)-most)
	}
	return strings.Join(names, ", ")
}
