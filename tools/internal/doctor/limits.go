package doctor

import (
	"context"
	"fmt"

	"github.com/stepaf/stepaf-go/internal/limits"
)

// ofDoctor is how many files a node has open that does not run under this examination.
const ofDoctor = 8

// limits compares what each node of the cluster would need with what it may have, as the
// node does when it starts. Without the shape of a cluster it says how many peers the limit
// of open files is enough for. Locked memory has a finding of its own.
func (x *exam) limits(context.Context) []Finding {
	_, hard, err := x.m.Files()
	if err != nil {
		return []Finding{{Status: Warn, Text: err.Error(), Remedy: "see ulimit -Hn"}}
	}
	f := Finding{Data: map[string]any{"open_files": hard}}
	if x.cfg.NumWorkers == 0 || x.cfg.NumServers == 0 {
		f.Text = fmt.Sprintf("%d open files, enough for %d peers over zmq",
			hard, hard/uint64(limits.PerPeer(x.cfg)))
		return []Finding{f}
	}
	roles := []string{"scheduler", "server", "worker"}
	switch x.cfg.Role {
	case "joint":
		roles = roles[1:]
	case "":
	default:
		roles = []string{x.cfg.Role}
	}
	sys := limits.System{Files: x.m.Files, Open: func() int { return ofDoctor }, Memlock: x.m.Memlock}
	var found []Finding
	for _, role := range roles {
		needs, err := limits.Of(x.cfg, role, sys)
		if err != nil {
			return append(found, Finding{Status: Warn, Text: err.Error(), Remedy: "see ulimit -a"})
		}
		for _, n := range needs {
			if n.Name == "RLIMIT_MEMLOCK" && x.capable(capIPCLock) {
				continue // which does not bind
			}
			if !n.Enough() {
				found = append(found, Finding{Status: Fail, Remedy: n.Raise,
					Text: fmt.Sprintf("too few %s for a %s: %s is %d, and it needs %d (%s)", n.What, role, n.Name, n.Have, n.Needed, n.Why)})
			}
		}
	}
	if len(found) == 0 {
		f.Text = fmt.Sprintf("%d open files: enough for a node of this cluster", hard)
		found = []Finding{f}
	}
	return found
}
