package membership

import (
	"fmt"
	"slices"
	"testing"

	"github.com/stepaf/stepaf-go/van"
)

func TestMembers(t *testing.T) {
	cfg := Config{NumWorkers: 1, NumServers: 2, GroupSize: 2}
	workers, servers := []int{9, 11}, []int{8, 10, 12, 14}
	for group, want := range map[int][]int{
		1: {1}, 2: servers, 4: workers,
		3: append(slices.Clone(servers), 1),
		5: append(slices.Clone(workers), 1),
		6: append(slices.Clone(workers), servers...),
		7: append(append(slices.Clone(workers), servers...), 1),
		8: {8}, 14: {14}, 11: {11},
		0: nil, -1: nil, 13: nil, 16: nil, van.Empty: nil,
	} {
		if got := cfg.members(group); !slices.Equal(got, want) {
			t.Errorf("members(%d) = %v, want %v", group, got, want)
		}
	}
}

// TestIDs checks the formulas of the protocol, which this package builds on.
func TestIDs(t *testing.T) {
	for _, c := range []struct {
		id, rank int
		role     van.Role
	}{{1, 0, van.Scheduler}, {8, 0, van.Server}, {9, 0, van.Worker}, {10, 1, van.Server}, {11, 1, van.Worker},
		{134, 63, van.Server}, {135, 63, van.Worker}} {
		if van.RankOf(c.id) != c.rank || van.RoleOf(c.id) != c.role {
			t.Errorf("id %d: rank %d role %s, want %d %s", c.id, van.RankOf(c.id), van.RoleOf(c.id), c.rank, c.role)
		}
		if c.role == van.Server && van.ServerID(c.rank) != c.id || c.role == van.Worker && van.WorkerID(c.rank) != c.id {
			t.Errorf("the id of %s rank %d is not %d", c.role, c.rank, c.id)
		}
	}
}

func TestExpectedRequests(t *testing.T) {
	for _, c := range []struct {
		workers, servers, size int
		group                  int
		instance, groups       int // expected requests of the two kinds
		trivialI, trivialG     bool
	}{
		{1, 1, 1, 7, 3, 3, false, false},
		{1, 1, 1, 6, 2, 2, false, false},
		{1, 1, 1, 4, 1, 1, true, true},
		{1, 1, 1, 1, 1, 1, true, true},
		{2, 3, 1, 3, 4, 4, false, false},
		{1, 1, 2, 7, 5, 3, false, false},
		{1, 1, 2, 6, 4, 2, false, false},
		{1, 1, 2, 4, 2, 1, false, true},
		{1, 1, 2, 5, 3, 2, false, false},
		{1, 1, 2, 1, 1, 1, true, true},
		{3, 2, 8, 7, 41, 6, false, false},
		{3, 2, 8, 2, 16, 2, false, false},
	} {
		cfg := Config{NumWorkers: c.workers, NumServers: c.servers, GroupSize: c.size}
		name := fmt.Sprintf("%dx%dx%d group %d", c.workers, c.servers, c.size, c.group)
		if i, g := cfg.expected(c.group, true), cfg.expected(c.group, false); i != c.instance || g != c.groups {
			t.Errorf("%s: %d and %d requests, want %d and %d", name, i, g, c.instance, c.groups)
		}
		if i, g := cfg.trivial(c.group, true), cfg.trivial(c.group, false); i != c.trivialI || g != c.trivialG {
			t.Errorf("%s: trivial %t and %t, want %t and %t", name, i, g, c.trivialI, c.trivialG)
		}
	}
}

func rec(role van.Role, host string, port, aux int) van.Node {
	return van.Node{Role: role, ID: van.Empty, Hostname: host, Port: port, AuxID: aux}
}

func TestAssignIDs(t *testing.T) {
	s, w := van.Server, van.Worker
	for _, c := range []struct {
		name   string
		in     []van.Node
		hosts  []string
		want   string
		shared string
	}{
		{"hosts descending as bytes, ports ascending as numbers",
			[]van.Node{rec(s, "10.0.0.10", 9, -1), rec(w, "10.0.0.9", 10000, -1), rec(s, "10.0.0.9", 9999, -1),
				rec(w, "10.0.0.10", 10, -1), rec(w, "b", 1, -1)}, nil,
			"9 b:1, 8 10.0.0.9:9999, 11 10.0.0.9:10000, 10 10.0.0.10:9, 13 10.0.0.10:10", "map[]"},
		{"preferred ranks do not change the order",
			[]van.Node{rec(w, "a", 1, 0), rec(w, "b", 1, 1), rec(s, "a", 2, 1), rec(s, "b", 2, 0)}, nil,
			"11 b:1, 8 b:2, 9 a:1, 10 a:2", "map[]"},
		{"BYTEPS_ORDERED_HOSTS",
			[]van.Node{rec(w, "b", 1, -1), rec(w, "a", 2, -1), rec(w, "a", 1, -1), rec(s, "c", 1, -1)}, []string{"c", "a:99", "b"},
			"8 c:1, 9 a:1, 11 a:2, 13 b:1", "map[]"},
		{"a second record of one address",
			[]van.Node{rec(w, "a", 1, -1), rec(w, "a", 1, -1), rec(w, "a", 2, -1)}, nil,
			"9 a:1, 9 a:1, 13 a:2", "map[11:9]"},
	} {
		hosts, err := hostOrder(c.hosts)
		if err != nil {
			t.Fatal(err)
		}
		sortByAddress(c.in, hosts)
		shared := assignIDs(c.in)
		got := ""
		for i := range c.in {
			got += fmt.Sprintf(", %d %s", c.in[i].ID, c.in[i].Addr())
		}
		if got[2:] != c.want || fmt.Sprint(shared) != c.shared {
			t.Errorf("%s:\ngot  %s %v\nwant %s %s", c.name, got[2:], shared, c.want, c.shared)
		}
	}
}
