package bench

import (
	"errors"
	"os/exec"
	"testing"
)

// children is a cluster of shell commands.
func children(t *testing.T, scripts map[string]string) processes {
	t.Helper()
	g := &group{ctx: t.Context()}
	for _, role := range roles {
		if err := g.start(role, []string{"sh", "-c", scripts[role]}, nil, nil); err != nil {
			t.Fatal(err)
		}
	}
	return g.all
}

// TestWaitTellsCause: of several failed children, a killed one is named first, since the other failures follow from it.
func TestWaitTellsCause(t *testing.T) {
	for _, c := range []struct{ scheduler, server, worker, want string }{
		{"cat", "kill -9 $$", "exit 1", "server: signal: killed; worker: exit status 1"},
		{"exit 2", "exit 3", "kill -9 $$", "worker: signal: killed; scheduler: exit status 2; server: exit status 3"},
		{"exit 2", "cat", "exit 1", "scheduler: exit status 2; worker: exit status 1"},
		{"cat", "cat", "cat", ""}, // they end with their standard input
	} {
		for range 5 {
			cpu, err := children(t, map[string]string{"scheduler": c.scheduler, "server": c.server, "worker": c.worker}).wait()
			got := ""
			if err != nil {
				got = err.Error()
				if e := (*exec.ExitError)(nil); !errors.As(err, &e) {
					t.Errorf("%q is no exec.ExitError", err)
				}
			}
			if got != c.want {
				t.Errorf("error %q, want %q", got, c.want)
			}
			if len(cpu) != 3 {
				t.Errorf("CPU time of %d children", len(cpu))
			}
		}
	}
}
