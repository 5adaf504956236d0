package app

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tools/internal/secret"
)

// TestPolicy: the command sets, lists and removes policies of a running cluster.
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

// TestPolicySecret: the command proves that it knows the cluster's secret. With another secret, without one, and with a bad
// file it ends with the reason, and not with the status of its time limit.
func TestPolicySecret(t *testing.T) {
	own, dir := secret.Make(), t.TempDir()
	file := func(name, text string, mode os.FileMode) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), mode); err != nil {
			t.Fatal(err)
		}
		return "STEPAF_SECRET_FILE=" + path
	}
	good := file("good", own+"\n", 0o600)
	c := testcluster.Start(t, testcluster.Options{Over: testcluster.TCP, Set: func(cfg *postoffice.Config) {
		cfg.SecretFile, cfg.ClusterID = filepath.Join(dir, "good"), "a"
	}})
	for _, x := range []struct {
		set    []string
		status int
		want   string
	}{
		{[]string{good, "STEPAF_CLUSTER_ID=a"}, 0, "no policies are set"},
		{[]string{"STEPAF_SECRET=" + own, "STEPAF_CLUSTER_ID=a"}, 0, "no policies are set"},
		{[]string{good}, 1, "STEPAF_CLUSTER_ID"},
		{[]string{file("other", secret.Make(), 0o600), "STEPAF_CLUSTER_ID=a"}, 1, "its secret (STEPAF_SECRET_FILE)"},
		{[]string{"STEPAF_CLUSTER_ID=a"}, 1, "it requires the cluster's secret, which this node does not have (STEPAF_SECRET_FILE)"},
		{[]string{good, "STEPAF_CLUSTER_ID=a", "STEPAF_AUTH=off"}, 1, "it requires the cluster's secret"},
		{[]string{file("readable", own, 0o644), "STEPAF_CLUSTER_ID=a"}, 2, "(mode 0644): want mode 0600"},
		{[]string{"STEPAF_AUTH=require"}, 1, "no secret is set"},
	} {
		cmd := command(t, append(x.set, "DMLC_PS_ROOT_URI=127.0.0.1", fmt.Sprint("DMLC_PS_ROOT_PORT=", c.Port)), "policy")
		out, _ := cmd.CombinedOutput() // the status is checked below
		if s := cmd.ProcessState.ExitCode(); s != x.status || !strings.Contains(string(out), x.want) || strings.Contains(string(out), own) {
			t.Errorf("%q: status %d, want %d, and %q in\n%s", x.set, s, x.status, x.want, out)
		}
	}
	c.Finalize(t)
}
