package van

import (
	"fmt"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/stepaf/stepaf-go/van/backend"
)

func TestIDs(t *testing.T) {
	for _, tc := range []struct {
		id   int
		role Role
		rank int
		name string
	}{
		{SchedulerID, Scheduler, 0, "scheduler (id 1)"},
		{8, Server, 0, "server 0 (id 8)"},
		{9, Worker, 0, "worker 0 (id 9)"},
		{10, Server, 1, "server 1 (id 10)"},
		{11, Worker, 1, "worker 1 (id 11)"},
		{12, Server, 2, "server 2 (id 12)"},
		{13, Worker, 2, "worker 2 (id 13)"},
		{2007, Worker, 999, "worker 999 (id 2007)"},
	} {
		if got := RoleOf(tc.id); got != tc.role {
			t.Errorf("RoleOf(%d) = %v, want %v", tc.id, got, tc.role)
		}
		if got := RankOf(tc.id); got != tc.rank {
			t.Errorf("RankOf(%d) = %d, want %d", tc.id, got, tc.rank)
		}
		if got := NodeName(tc.id); got != tc.name {
			t.Errorf("NodeName(%d) = %q, want %q", tc.id, got, tc.name)
		}
		switch tc.role {
		case Server:
			if got := ServerID(tc.rank); got != tc.id {
				t.Errorf("ServerID(%d) = %d, want %d", tc.rank, got, tc.id)
			}
		case Worker:
			if got := WorkerID(tc.rank); got != tc.id {
				t.Errorf("WorkerID(%d) = %d, want %d", tc.rank, got, tc.id)
			}
		}
	}
	for id, want := range map[int]string{Empty: "a node without an id", -3: "pending node -3"} {
		if got := NodeName(id); got != want {
			t.Errorf("NodeName(%d) = %q, want %q", id, got, want)
		}
	}
	if AllNodes != 7 {
		t.Errorf("AllNodes = %d, want 7", AllNodes)
	}
}

func TestNames(t *testing.T) {
	for got, want := range map[string]string{
		Server.String():          "server",
		Worker.String():          "worker",
		Scheduler.String():       "scheduler",
		Joint.String():           "joint",
		Role(7).String():         "role(7)",
		Role(-1).String():        "role(-1)",
		EmptyCmd.String():        "EMPTY",
		AddrResolved.String():    "ADDR_RESOLVED",
		InstanceBarrier.String(): "INSTANCE_BARRIER",
		Command(10).String():     "command(10)",
		TypeChar.String():        "char",
		TypeInt8.String():        "int8",
		TypeUint64.String():      "uint64",
		TypeFloat.String():       "float32",
		TypeDouble.String():      "float64",
		TypeOther.String():       "other",
		DataType(12).String():    "datatype(12)",
		DataType(-1).String():    "datatype(-1)",
		Command(-1).String():     "command(-1)",
	} {
		if got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	for c := Command(-1); c <= 10; c++ {
		if got, want := c.Valid(), c >= EmptyCmd && c <= InstanceBarrier; got != want {
			t.Errorf("%v.Valid() = %t, want %t", c, got, want)
		}
	}
}

func TestMetaReset(t *testing.T) {
	m := Meta{Head: 1, Push: true, Key: 5, Dim: 2, Body: make([]byte, 3, 8), DataTypes: make([]DataType, 2, 4), IsTensor: true}
	m.Control = Control{Cmd: AddNode, Nodes: make([]Node, 1, 2)}
	m.Reset()
	want := Meta{Head: Empty, AppID: Empty, CustomerID: Empty, Timestamp: Empty,
		Src: backend.Device{ID: -1}, Dst: backend.Device{ID: -1}}
	wantMeta(t, &m, &want)
	if cap(m.Body) != 8 || cap(m.DataTypes) != 4 || cap(m.Control.Nodes) != 2 {
		t.Errorf("capacities %d, %d, %d, want 8, 4, 2", cap(m.Body), cap(m.DataTypes), cap(m.Control.Nodes))
	}
}

func TestMetaString(t *testing.T) {
	for vector, want := range map[string]string{
		"push_request_single":          "push request app=0 customer=0 ts=0 head=0 key=7 len=4096 data=4104",
		"pull_response":                "pull response app=0 customer=0 ts=4 head=3 key=16777216 len=1835008 data=1835016",
		"simple_app_request":           "simple request app=1 customer=1 ts=0 head=42 key=0 len=0 data=0",
		"instance_barrier_request_all": "INSTANCE_BARRIER request=true ts=1 customer=0 group=7 nodes=0",
	} {
		var m Meta
		if err := DecodeMeta(loadVector(t, vector), &m); err != nil {
			t.Fatal(err)
		}
		if got := m.String(); got != want {
			t.Errorf("%s: %q, want %q", vector, got, want)
		}
	}
}

func TestNodeAddr(t *testing.T) {
	n := Node{Hostname: "10.0.0.7", Port: 4021}
	if got := n.Addr(); got != "10.0.0.7:4021" {
		t.Errorf("Addr = %q", got)
	}
}

var registered atomic.Int32 // names are used once in a process

// TestTransports: transports are listed in alphabetical order, in any order of registration.
func TestTransports(t *testing.T) {
	first := registered.Add(1)
	for i := range 20 {
		Register(fmt.Sprintf("test %d, %02d", first, (7*i)%20), nil)
	}
	if l := Transports(); len(l) < 20 || !slices.IsSorted(l) {
		t.Errorf("the transports are %q, want them in order", l)
	}
}
