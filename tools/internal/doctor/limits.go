package doctor

import (
	"context"
	"fmt"
	"slices"

	"github.com/stepaf/stepaf-go/internal/limits"
)

// limits compares the needs of each node of the cluster with this process's limits, as a node does when it starts.
// Without the shape of a cluster it reports for how many peers the limit of open files is enough. Locked memory has a
// finding of its own.
func (x *exam) limits(context.Context) []Finding {
	_, hard, err := x.m.Limits.Files()
	if err != nil {
		return []Finding{{Status: Warn, Text: err.Error(), Remedy: "see ulimit -Hn"}}
	}
	f := Finding{Data: map[string]any{"open_files": hard}}
	f.Text = fmt.Sprintf("%d open files: enough for a node of this cluster", hard)
	var found []Finding
	roles := x.roles(true)
	if x.cfg.NumWorkers == 0 || x.cfg.NumServers == 0 {
		f.Text = fmt.Sprintf("%d open files, enough for %d peers over zmq", hard, hard/limits.FilesPerPeer)
		found, roles = judge("node", limits.Threads(x.cfg, x.m.Limits)), nil
	}
	for _, role := range roles {
		needs, err := limits.Of(x.cfg, role, x.m.Limits)
		if err != nil {
			return append(found, Finding{Status: Warn, Text: err.Error(), Remedy: "see ulimit -a"})
		}
		if x.capable(capIPCLock) { // the limit of locked memory does not apply
			needs = slices.DeleteFunc(needs, func(n limits.Need) bool { return n.Name == "RLIMIT_MEMLOCK" })
		}
		found = append(found, judge(role, needs)...)
	}
	if len(found) == 0 {
		return []Finding{f}
	}
	return found
}

// judge returns the limits that are too low for a node of a role, and the limits that the node may exceed later.
func judge(role string, needs []limits.Need) (found []Finding) {
	for _, n := range needs {
		f := Finding{Remedy: n.Raise}
		switch {
		case !n.Enough():
			f.Status = Fail
			f.Text = fmt.Sprintf("too few %s for a %s: %s is %d, and it needs %d (%s)", n.What, role, n.Name, n.Have, n.Needed, n.Why)
		case n.Tight():
			f.Status = Warn
			f.Text = fmt.Sprintf("few %s for a %s: %s is %d, and it needs %d at least and may need %d (%s)", n.What, role, n.Name, n.Have, n.Needed, n.Ample, n.Why)
		default:
			continue
		}
		found = append(found, f)
	}
	return found
}
