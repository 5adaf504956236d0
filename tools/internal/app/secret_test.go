package app

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tools/internal/secret"
	"github.com/stepaf/stepaf-go/van/env"
)

// node is an environment in which a worker could start.
var node = []string{"DMLC_ROLE=worker", "DMLC_NUM_WORKER=1", "DMLC_NUM_SERVER=1", "DMLC_PS_ROOT_URI=127.0.0.1", "DMLC_PS_ROOT_PORT=1"}

// TestSecret: a node accepts the secret of the command; a second call does not overwrite the file.
func TestSecret(t *testing.T) {
	path := filepath.Join(t.TempDir(), "secret")
	for _, want := range []string{"", "stepaf: secret: open " + path + ": file exists: want the name of a new file"} {
		out, err := command(t, nil, "secret", path).CombinedOutput()
		if (err != nil) != (want != "") || !strings.Contains(string(out), want) || want == "" && len(out) > 0 {
			t.Fatalf("%v\n%s", err, out)
		}
	}
	out, err := command(t, nil, "secret").Output()
	printed := strings.TrimSuffix(string(out), "\n")
	if err != nil || len(printed) != 43 {
		t.Fatalf("%d characters: %v", len(printed), err)
	}
	for _, set := range []string{"STEPAF_SECRET_FILE=" + path, "STEPAF_SECRET=" + printed} {
		var b bytes.Buffer
		if err := showEnv(&b, env.FromList(append([]string{set}, node...)), envOptions{check: true, set: true}); err != nil || strings.Contains(b.String(), printed) {
			t.Errorf("%v\n%s", err, b.String())
		}
	}
}

// TestEnvCheckSecret: "stepaf env --check" refuses a secret that a node would refuse, and shows nothing of it.
func TestEnvCheckSecret(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string, mode os.FileMode) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), mode); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
		return path
	}
	good := secret.Make()
	file := func(path string) string { return "STEPAF_SECRET_FILE=" + path }
	for _, c := range []struct {
		set  []string
		want string // of the error; "" means no error
	}{
		{[]string{file(write("good", good+"\n", 0o600))}, ""},
		{[]string{file(write("readonly", good, 0o400))}, ""},
		{[]string{"STEPAF_SECRET=" + good}, ""},
		{[]string{file(write("readable", good, 0o644))}, "(mode 0644): want mode 0600"},
		{[]string{file(write("group", good, 0o640))}, "(mode 0640): want mode 0600"},
		{[]string{file(write("empty", "", 0o600))}, "(it holds 0 bytes): want 16 to 4096 bytes"},
		{[]string{file(write("short", "hunter2", 0o600))}, "(it holds 7 bytes): want 16 to 4096 bytes"},
		{[]string{file(dir)}, "(a directory): want a regular file"},
		{[]string{file(filepath.Join(dir, "none"))}, "no such file or directory"},
		{[]string{"STEPAF_SECRET=hunter2"}, `STEPAF_SECRET="(set)" (7 bytes): want 16 to 4096 bytes`},
		{[]string{"STEPAF_SECRET=" + good, file(filepath.Join(dir, "good"))}, "(STEPAF_SECRET is set too): want only one of the two"},
		{[]string{"STEPAF_AUTH=require"}, `STEPAF_AUTH="require" (no secret is set): want STEPAF_SECRET_FILE`},
		{[]string{"STEPAF_AUTH=maybe"}, `STEPAF_AUTH="maybe": want one of off, warn, require`},
	} {
		var b bytes.Buffer
		err := showEnv(&b, env.FromList(append(c.set, node...)), envOptions{check: true, set: true})
		_, errs, _ := strings.Cut(b.String(), "Errors")
		if (err != nil) != (c.want != "") || !strings.Contains(errs, c.want) || strings.Contains(b.String(), good) || strings.Contains(b.String(), "hunter2") {
			t.Errorf("%q: %v, want %q\n%s", c.set, err, c.want, b.String())
		}
	}
}

// TestLaunchSecretFlags: the options that give the processes a secret, and the options that allow C++ programs.
func TestLaunchSecretFlags(t *testing.T) {
	for _, c := range []struct{ args, want string }{
		{"", "secret=yes foreign="},
		{"--no-secret", "secret= foreign="},
		{"--fserver", "secret= foreign=1"},
		{"--fserver --default STEPAF_FOREIGN=0", "secret=yes foreign=0"},
		{"--default STEPAF_FOREIGN=1", "secret= foreign=1"},
		{"--default STEPAF_AUTH=off", "secret= foreign="},
	} {
		args := append(append([]string{"launch"}, strings.Fields(c.args)...), "--scheduler-command", "true", "--server-command", "true", "--",
			"sh", "-c", `test -z "$STEPAF_SECRET_FILE" || yes=$(test -f "$STEPAF_SECRET_FILE" && echo yes); echo "secret=$yes foreign=$STEPAF_FOREIGN"`)
		out, err := command(t, nil, args...).Output()
		if got := strings.TrimPrefix(strings.TrimSpace(string(out)), "[worker 0] "); err != nil || got != c.want {
			t.Errorf("launch %s: %v, %q; want %q", c.args, err, got, c.want)
		}
	}
}

// TestLaunchProtects: a cluster with --role joint answers only processes with its secret, which is in no other place.
// With a secret and a cluster name of the user it answers the user.
func TestLaunchProtects(t *testing.T) {
	file := filepath.Join(t.TempDir(), "secret")
	if err := secret.Write(file, secret.Make()); err != nil {
		t.Fatal(err)
	}
	own := []string{"STEPAF_SECRET_FILE=" + file, "STEPAF_CLUSTER_ID=mine"}
	const refused = "it requires the cluster's secret, which this node does not have (STEPAF_SECRET_FILE)"
	for _, c := range []struct {
		launch []string // environment
		asks   map[string][]string
	}{
		{nil, map[string][]string{refused: nil, "its secret (STEPAF_SECRET_FILE)": own}},
		{own, map[string][]string{refused: nil, "no policies are set": own}},
		{[]string{"STEPAF_AUTH=off", "STEPAF_CLUSTER_ID=mine"}, map[string][]string{"no policies are set": nil}},
	} {
		port := fmt.Sprint(testcluster.FreePort(t))
		tmp := t.TempDir()
		launch := command(t, append(c.launch, "TMPDIR="+tmp), "launch", "--port", port, "--timeout", "60s", "--", os.Args[0], "demo", "--rounds", "1000000000")
		var out bytes.Buffer
		launch.Stdout, launch.Stderr = &out, &out
		if err := launch.Start(); err != nil {
			t.Fatal(err)
		}
		for want, environ := range c.asks {
			var got []byte
			for end := time.Now().Add(30 * time.Second); time.Now().Before(end) && !strings.Contains(string(got), want); { // the scheduler may not listen yet
				got, _ = command(t, append(environ, "NO_COLOR=1"), "policy", "--scheduler", "127.0.0.1:"+port, "--timeout", "5s").CombinedOutput()
			}
			if !strings.Contains(string(got), want) {
				t.Errorf("%q asked with %q: want %q in\n%s", c.launch, environ, want, got)
			}
		}
		if err := launch.Process.Signal(syscall.SIGTERM); err != nil {
			t.Error(err)
		}
		_ = launch.Wait() // the status is checked below
		if s := launch.ProcessState.ExitCode(); s != 143 {
			t.Errorf("%q: status %d, want 143\n%s", c.launch, s, out.String())
		}
		if left, err := os.ReadDir(tmp); err != nil || len(left) > 0 {
			t.Errorf("%v stays behind (%v)", left, err)
		}
	}
}

// TestSharesWithSecret: the parts of a cluster get its secret, one from a file and one from a variable.
func TestSharesWithSecret(t *testing.T) {
	file, text := filepath.Join(t.TempDir(), "secret"), secret.Make()
	if err := secret.Write(file, text); err != nil {
		t.Fatal(err)
	}
	port := fmt.Sprint(testcluster.FreePort(t))
	var shares []*exec.Cmd
	outs := make([]bytes.Buffer, 2)
	for i, x := range []struct{ role, set string }{{"server", "STEPAF_SECRET_FILE=" + file}, {"worker", "STEPAF_SECRET=" + text}} {
		cmd := command(t, []string{x.set, "STEPAF_CLUSTER_ID=mine"}, "launch", "--role", x.role, "--host", "127.0.0.1", "--port", port, "--timeout", "60s",
			"--", os.Args[0], "demo", "--rounds", "20")
		cmd.Stdout, cmd.Stderr = &outs[i], &outs[i]
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		shares = append(shares, cmd)
	}
	for i, cmd := range shares {
		if err := cmd.Wait(); err != nil || strings.Contains(outs[i].String(), text) || strings.Contains(outs[i].String(), "no secret") {
			t.Errorf("%v\n%s", err, outs[i].String())
		}
	}
	if out := outs[1].String(); !strings.Contains(out, "[worker 0] every sum is right") {
		t.Errorf("the worker says\n%s", out)
	}
}
