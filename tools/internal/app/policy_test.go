package app

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stepaf/stepaf-go/tests/testcluster"
)

// TestPolicy: the command sets, lists and takes back what a running cluster does.
func TestPolicy(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{Over: testcluster.TCP, Workers: 2})
	environ := []string{"DMLC_PS_ROOT_URI=127.0.0.1", fmt.Sprint("DMLC_PS_ROOT_PORT=", c.Port), "DMLC_NODE_HOST=127.0.0.1"}
	address := fmt.Sprint("127.0.0.1:", c.Port)
	for _, x := range []struct {
		args   string
		status int
		want   string // words of the output, in order
	}{
		{"policy", 0, "no policies are set"},
		{"policy --scheduler " + address, 0, "no policies are set"},
		{"policy set --peer server:0 --rate 5M", 0, "TARGET server:0 5000000 B/s - - worker:0 worker:1"},
		{"policy set --app 7 --rate 1G --scheduler " + address, 0, "server:0 5000000 B/s app 7 1000000000 B/s waits for a connection, or the application"},
		{"policy set --peer server:0 --rate 6k", 0, "server:0 6000 B/s - - worker:0 worker:1"},
		{"policy set --comm 3 --order ring", 0, "app 7 comm 3 - - ring"},
		{"policy set --peer worker:2 --rate 5M", 1, `peer "worker 2 (id 13)": want a node of this cluster, which has 2 workers and 1 servers`},
		{"policy clear --peer worker:0", 1, `nothing is set for worker:0`},
		{"policy clear --peer server:0", 0, "app 7 comm 3"},
		{"policy clear --all", 0, "no policies are set"},
	} {
		out, err := command(t, environ, strings.Fields(x.args)...).CombinedOutput()
		status := 0
		if err != nil {
			status = 1
		}
		rest, found := string(out), true
		for _, w := range strings.Fields(x.want) {
			var here bool
			_, rest, here = strings.Cut(rest, w)
			found = found && here
		}
		if status != x.status || !found {
			t.Errorf("%s: status %d, want %d, and %q in\n%s", x.args, status, x.status, x.want, out)
		}
	}
	c.Finalize(t)
}
