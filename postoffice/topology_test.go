package postoffice_test

import (
	"slices"
	"testing"

	"github.com/stepaf/stepaf-go/postoffice"
	_ "github.com/stepaf/stepaf-go/tests/testlimit"
)

// TestTopology: if groups have several instances, each instance exchanges messages with the instances of its own
// index. Workers have the odd ids from 9 on, servers the even ones from 8 on.
func TestTopology(t *testing.T) {
	for _, c := range []struct {
		groups  postoffice.Topology
		servers []postoffice.NodeID
		workers [2]postoffice.NodeID // that a server of this index talks to, in groups 0 and 1
		n       int
	}{
		{postoffice.Topology{NumWorkers: 2, NumServers: 3, GroupSize: 1}, []postoffice.NodeID{8, 10, 12}, [2]postoffice.NodeID{9, 11}, 2},
		{postoffice.Topology{NumWorkers: 2, NumServers: 2, GroupSize: 4}, []postoffice.NodeID{8, 16}, [2]postoffice.NodeID{9, 17}, 8},
		{postoffice.Topology{NumWorkers: 2, NumServers: 2, GroupSize: 4, GroupRank: 1, Instance: 3}, []postoffice.NodeID{14, 22}, [2]postoffice.NodeID{15, 23}, 8},
	} {
		if got := c.groups.ServerInstances(); !slices.Equal(got, c.servers) {
			t.Errorf("%+v: servers %d, want %d", c.groups, got, c.servers)
		}
		if got := [2]postoffice.NodeID{c.groups.WorkerInstance(0), c.groups.WorkerInstance(1)}; got != c.workers {
			t.Errorf("%+v: workers %d, want %d", c.groups, got, c.workers)
		}
		if got := c.groups.NumWorkerInstances(); got != c.n {
			t.Errorf("%+v: %d workers, want %d", c.groups, got, c.n)
		}
	}
}
