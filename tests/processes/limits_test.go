package processes

import (
	"fmt"
	"os/exec"
	"strings"
	"testing"

	"github.com/stepaf/stepaf-go/internal/limits"
	"github.com/stepaf/stepaf-go/tests/internal/real"
	"github.com/stepaf/stepaf-go/tests/internal/sim/plan"
	"github.com/stepaf/stepaf-go/tests/vantest"
)

// TestDescriptors: a peer costs as many descriptors as nodes count for it before
// they start. Without messages it costs none: nodes of this library do not connect to each other.
func TestDescriptors(t *testing.T) {
	for _, x := range []struct {
		name string
		leg  real.Leg
		each int
		env  []string
		idle bool
	}{
		{"tcp", real.TCP, limits.FilesPerDataPeer, nil, false},
		{"shm", real.SHM, limits.FilesPerSharer, nil, false},
		{"zmq", real.TCP, limits.FilesPerPeer, []string{"STEPAF_DATA=zmq"}, false},
		{"no data over tcp", real.TCP, 0, nil, true},
		{"no data through shared memory", real.SHM, 0, nil, true},
	} {
		of := func(servers int) int {
			o := real.Options{Servers: servers, Leg: x.leg, Env: x.env}
			if x.idle {
				o.Loads = []plan.Load{}
			}
			c := start(t, o)
			defer c.Close()
			if !x.idle {
				try(t, c.Works(20, soon))
			}
			return c.Get("worker", 0).Descriptors()
		}
		const more = 6
		one, many := of(1), of(1+more)
		t.Logf("%s: %d descriptors with 1 server, %d with %d", x.name, one, many, 1+more)
		if got := many - one; got > x.each*more || got < (x.each-1)*more {
			t.Errorf("%s: %d more servers cost %d more descriptors, want %d for each", x.name, more, got, x.each)
		}
	}
}

// TestLimitIsEnough: with the limit of open files that a node asks for the cluster forms and
// works, and no descriptor is lacking meanwhile.
func TestLimitIsEnough(t *testing.T) {
	for _, leg := range []real.Leg{real.TCP, real.SHM} {
		for _, n := range []int{1, 3} {
			t.Run(fmt.Sprintf("%s %d", leg, n), func(t *testing.T) {
				under := func(limit int) []string {
					return []string{"sh", "-c", fmt.Sprintf(`ulimit -n %d; exec "$@"`, limit), "sh"}
				}
				need := 0
				for _, role := range []string{"scheduler", "server", "worker"} {
					c, err := real.New(real.Options{Workers: n, Servers: n, Leg: leg, Loads: []plan.Load{load}, Under: under(40)})
					try(t, err)
					defer c.Close()
					p, err := c.Spawn(role, 0)
					try(t, err)
					try(t, p.Await(soon, "it ends", func(s real.State) bool { return s.Ended }))
					_, text, _ := strings.Cut(p.State().Error, "this node needs ")
					own := 0
					if _, err := fmt.Sscan(text, &own); err != nil {
						t.Fatalf("the error of the %s is %q, want what it needs", role, p.State().Error)
					}
					need = max(need, own)
				}
				need += 2 // the number of open descriptors before a node starts varies
				c := start(t, real.Options{Workers: n, Servers: n, Leg: leg, Under: under(need)})
				try(t, c.Works(20, soon))
				for _, role := range []string{"scheduler", "server", "worker"} {
					if log := c.Get(role, 0).Log(); strings.Contains(log, "too many open files") || strings.Contains(log, "descriptors") {
						t.Errorf("with %d the %s lacks some:\n%s", need, role, log)
					}
				}
				try(t, c.Finish(soon))
			})
		}
	}
}

// TestLimitTooLow: a node whose limit is too low reports that before it starts, with
// the limit, its value, the needed value, and how to raise it.
func TestLimitTooLow(t *testing.T) {
	// With stacks of 1 GiB an address space of 11 GiB is enough for the threads of Go, but not for the threads of libzmq. The
	// race detector needs more address space than any usable limit.
	space := func(gib int) []string {
		if vantest.Race {
			return []string{"false"}
		}
		return []string{"sh", "-c", fmt.Sprintf(`ulimit -s 1048576 && ulimit -v %d && exec "$@"; exit 1`, gib<<20), "sh"}
	}
	for _, x := range []struct {
		name  string
		role  string
		under []string
		env   []string
		text  []string
	}{
		{"open files", "scheduler", []string{"sh", "-c", `ulimit -n 70; exec "$@"`, "sh"}, nil,
			[]string{"scheduler: start: too few open files: RLIMIT_NOFILE is 70, this node needs ", "(7 for each of 6 peers, ", "ulimit -Hn"}},
		{"address space", "scheduler", space(11), nil,
			[]string{"scheduler: start: too few bytes of address space: RLIMIT_AS is 11811160064 bytes, this node needs ", "(8 threads with stacks of 1073741824 (ulimit -s), ", "ulimit -v unlimited"}},
		// A worker also notifies its scheduler, without the threads that it lacks.
		{"address space of a worker", "worker", space(9), nil,
			[]string{"worker: start: too few bytes of address space: RLIMIT_AS is 9663676416 bytes, this node needs "}},
		{"sockets", "scheduler", nil, []string{"BYTEPS_ZMQ_MAX_SOCKET=6"},
			[]string{"scheduler: start: too few sockets of libzmq: BYTEPS_ZMQ_MAX_SOCKET is 6, this node needs 7", "set BYTEPS_ZMQ_MAX_SOCKET=7"}},
	} {
		t.Run(x.name, func(t *testing.T) {
			if x.under != nil && exec.CommandContext(t.Context(), x.under[0], append(x.under[1:], "true")...).Run() != nil {
				t.Skip("the limit cannot be set here")
			}
			c, err := real.New(real.Options{Workers: 3, Servers: 3, Leg: real.TCP, Loads: []plan.Load{load}, Under: x.under, Env: x.env})
			try(t, err)
			defer c.Close()
			p, err := c.Spawn(x.role, 0)
			try(t, err)
			try(t, p.Await(soon, "it ends", func(s real.State) bool { return s.Ended }))
			for _, text := range x.text {
				if got := p.State().Error; !strings.Contains(got, text) {
					t.Errorf("the error is %q, want %q in it", got, text)
				}
			}
		})
	}
}
