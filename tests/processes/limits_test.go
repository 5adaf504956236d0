package processes

import (
	"strings"
	"testing"

	"github.com/stepaf/stepaf-go/internal/limits"
	"github.com/stepaf/stepaf-go/tests/internal/real"
	"github.com/stepaf/stepaf-go/tests/internal/sim/plan"
)

// TestDescriptors: a peer costs as many descriptors as nodes are told that it does before
// they start.
func TestDescriptors(t *testing.T) {
	of := func(servers int) int {
		c := start(t, real.Options{Servers: servers, Leg: real.TCP})
		try(t, c.Works(20, soon))
		defer c.Close()
		return c.Get("worker", 0).Descriptors()
	}
	const more = 6
	one, many := of(1), of(1+more)
	t.Logf("%d descriptors with 1 server, %d with %d", one, many, 1+more)
	if got := many - one; got > limits.FilesPerPeer*more || got < (limits.FilesPerPeer-1)*more {
		t.Errorf("%d more servers cost %d more descriptors, want %d for each", more, got, limits.FilesPerPeer)
	}
}

// TestLimitTooLow: a node that may not have what it will need says so before it starts,
// with the limit, what it is, what is needed, and how to raise it.
func TestLimitTooLow(t *testing.T) {
	for _, x := range []struct {
		name  string
		under []string
		env   []string
		text  []string
	}{
		{"open files", []string{"sh", "-c", `ulimit -n 70; exec "$@"`, "sh"}, nil,
			[]string{"scheduler: start: too few open files: RLIMIT_NOFILE is 70, this node needs ", "(9 for each of 6 peers, ", "ulimit -Hn"}},
		{"sockets", nil, []string{"BYTEPS_ZMQ_MAX_SOCKET=6"},
			[]string{"scheduler: start: too few sockets of libzmq: BYTEPS_ZMQ_MAX_SOCKET is 6, this node needs 7", "set BYTEPS_ZMQ_MAX_SOCKET=7"}},
	} {
		t.Run(x.name, func(t *testing.T) {
			c, err := real.New(real.Options{Workers: 3, Servers: 3, Leg: real.TCP, Loads: []plan.Load{load}, Under: x.under, Env: x.env})
			try(t, err)
			defer c.Close()
			p, err := c.Spawn("scheduler", 0)
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
