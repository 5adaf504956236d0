package doctor

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stepaf/stepaf-go/tools/internal/secret"
)

// TestSecret: the line names the protection in force and the source of the secret, and shows nothing of the secret.
func TestSecret(t *testing.T) {
	dir, text := t.TempDir(), secret.Make()
	file := func(name, text string, mode os.FileMode) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), mode); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
		return "STEPAF_SECRET_FILE=" + path
	}
	good := file("good", text, 0o600)
	old := func(m *Machine) { m.HasCurve = false }
	for _, c := range []struct {
		environ []string
		set     func(*Machine)
		status  Status
		text    string // of the finding or its remedy
	}{
		{nil, nil, OK, "none is set: a node serves every process that reaches it (STEPAF_AUTH is off)"},
		{[]string{"STEPAF_AUTH=off"}, nil, OK, "none is set"},
		{[]string{good}, nil, OK, fmt.Sprintf("from STEPAF_SECRET_FILE=%q: processes without it are refused", filepath.Join(dir, "good"))},
		{[]string{"STEPAF_SECRET=" + text}, nil, OK, "from STEPAF_SECRET: processes without it are refused"},
		{[]string{good, "STEPAF_AUTH=warn"}, nil, Warn, "STEPAF_AUTH=warn: processes without it are admitted, counted and named"},
		{[]string{good, "STEPAF_AUTH=off"}, nil, Warn, "STEPAF_AUTH=off: the secret is not used"},
		{[]string{"STEPAF_AUTH=require"}, nil, Fail, "STEPAF_AUTH=require, and no secret is set"},
		{[]string{file("readable", text, 0o644)}, nil, Fail, "(mode 0644): want mode 0600"},
		{[]string{file("group", text, 0o640)}, nil, Fail, "chmod 600 " + filepath.Join(dir, "group")},
		{[]string{"STEPAF_SECRET_FILE=" + filepath.Join(dir, "none")}, nil, Fail, "no such file or directory"},
		{[]string{"STEPAF_SECRET_FILE=" + filepath.Join(dir, "none")}, nil, Fail, "set STEPAF_SECRET_FILE to the file with the secret"},
		{[]string{file("short2", text[:15], 0o600)}, nil, Fail, `"stepaf secret FILE" creates a secret`},
		{[]string{good, "STEPAF_SECRET=" + text}, nil, Fail, "unset one of the two"},
		{[]string{file("empty", "", 0o600)}, nil, Fail, "it holds 0 bytes"},
		{[]string{file("short", text[:15], 0o600)}, nil, Fail, "it holds 15 bytes"},
		{[]string{"STEPAF_SECRET_FILE=" + dir}, nil, Fail, "a directory"},
		{[]string{good, "STEPAF_SECRET=" + text}, nil, Fail, "only one of the two"},
		{[]string{good}, old, Fail, "libzmq 4.3.5 was built without CURVE"},
		{[]string{good, "DMLC_ENABLE_RDMA=ibverbs"}, old, OK, "refused"},
		{nil, old, OK, "none is set"},
	} {
		m, _ := plain(append(c.environ, "DMLC_ROLE=worker", "DMLC_NUM_WORKER=1", "DMLC_NUM_SERVER=1", "DMLC_PS_ROOT_URI=127.0.0.1", "DMLC_PS_ROOT_PORT=8123")...)
		if c.set != nil {
			c.set(m)
		}
		r := examine(t, m)
		if f := find(t, r, "secret"); f.Status != c.status || !strings.Contains(f.Text+" "+f.Remedy, c.text) {
			t.Errorf("%q: %s %s; want %s %s", c.environ, f.Status, f.Text, c.status, c.text)
		}
		for _, f := range r.Findings {
			if all := fmt.Sprint(f); strings.Contains(all, text) || strings.Contains(all, text[:15]) {
				t.Errorf("%q: %s shows the secret: %s", c.environ, f.Name, all)
			}
			if f.Name == "environment" && f.Status == Fail {
				t.Errorf("%q: the same fault again: %s", c.environ, f.Text)
			}
		}
	}
}

// TestExposed: the line names each port that the configuration opens, the hosts that reach it, and the rights of a
// process without the secret.
func TestExposed(t *testing.T) {
	const (
		join      = ": any process can join the cluster there, and read and change tensors"
		refuse    = ": a process without the secret is refused in the handshake"
		pose      = ": a process that has read a member's incarnation can send tensors in its name"
		plainData = "; tensors are not encrypted, unless STEPAF_TLS=1"
	)
	kept := "STEPAF_SECRET=" + secret.Make()
	for _, c := range []struct {
		environ string
		want    []string // status, role and text
	}{
		{"DMLC_ROLE=scheduler DMLC_PS_ROOT_URI=10.1.0.1", []string{"warn scheduler TCP 10.1.0.1:8123, reached from other hosts" + join}},
		{"DMLC_ROLE=scheduler DMLC_PS_ROOT_URI=127.0.0.1", []string{"ok scheduler TCP 127.0.0.1:8123, reached from this host only" + join}},
		{"DMLC_ROLE=scheduler DMLC_PS_ROOT_URI=127.0.0.1 DMLC_USE_KUBERNETES=1", []string{"warn scheduler TCP 0.0.0.0:8123, reached from other hosts" + join}},
		{"DMLC_ROLE=scheduler DMLC_PS_ROOT_URI=10.1.0.1 STEPAF_AUTH=off", []string{"ok scheduler TCP 10.1.0.1:8123, reached from other hosts" + join}},
		{"DMLC_ROLE=scheduler DMLC_PS_ROOT_URI=10.1.0.1 " + kept, []string{"ok scheduler TCP 10.1.0.1:8123, reached from other hosts" + refuse}},
		{"DMLC_ROLE=scheduler DMLC_PS_ROOT_URI=10.1.0.1 STEPAF_AUTH=warn " + kept,
			[]string{"ok scheduler TCP 10.1.0.1:8123, reached from other hosts: a process without the secret is admitted, and logged"}},
		{"DMLC_ROLE=worker DMLC_PS_ROOT_URI=10.1.0.7", []string{"warn worker TCP 10.1.0.1, any free port, reached from other hosts" + join, "ok worker TCP 10.1.0.1, any free port, for data, reached from other hosts" + pose,
			"ok worker an abstract Unix socket, for processes of this user in this container: any of them can read and change tensors"}},
		{"DMLC_ROLE=server DMLC_PS_ROOT_URI=10.1.0.7 BYTEPS_ENABLE_IPC=0 DMLC_INTERFACE=eth1 DMLC_PORT=9000", []string{"warn server TCP 10.1.1.1:9000, reached from other hosts" + join, "ok server TCP 10.1.1.1, any free port, for data, reached from other hosts" + pose}},
		{"DMLC_ROLE=server DMLC_PS_ROOT_URI=127.0.0.1 BYTEPS_ENABLE_IPC=0 DMLC_NODE_HOST=127.0.0.1", []string{"ok server TCP 127.0.0.1, any free port, reached from this host only" + join, "ok server TCP 127.0.0.1, any free port, for data, reached from this host only" + pose}},
		{"DMLC_ROLE=joint DMLC_PS_ROOT_URI=10.1.0.7 BYTEPS_ENABLE_IPC=0 DMLC_NODE_HOST=10.1.1.1 DMLC_PORT=9000 " + kept,
			[]string{"ok server TCP 10.1.1.1:9000, reached from other hosts" + refuse, "ok server TCP 10.1.1.1, any free port, for data, reached from other hosts" + refuse + plainData, "ok worker TCP 10.1.1.1:9001, reached from other hosts" + refuse, "ok worker TCP 10.1.1.1, any free port, for data, reached from other hosts" + refuse + plainData}},
		{"DMLC_ROLE=worker DMLC_PS_ROOT_URI=10.1.0.7 BYTEPS_ENABLE_IPC=0 STEPAF_TLS=1 " + kept, []string{"ok worker TCP 10.1.0.1, any free port, reached from other hosts" + refuse,
			"ok worker TCP 10.1.0.1, any free port, for data, reached from other hosts" + refuse + "; tensors are encrypted (STEPAF_TLS=1)"}},
		{"DMLC_PS_ROOT_URI=10.1.0.1 BYTEPS_ENABLE_IPC=0", []string{"warn scheduler TCP 10.1.0.1:8123, reached from other hosts" + join,
			"warn server TCP 10.1.0.1, any free port, reached from other hosts" + join, "ok server TCP 10.1.0.1, any free port, for data, reached from other hosts" + pose, "warn worker TCP 10.1.0.1, any free port, reached from other hosts" + join, "ok worker TCP 10.1.0.1, any free port, for data, reached from other hosts" + pose}},
		{"DMLC_PS_ROOT_URI=10.1.0.7 " + kept, []string{
			"ok server TCP 10.1.0.1, any free port, reached from other hosts" + refuse, "ok server TCP 10.1.0.1, any free port, for data, reached from other hosts" + refuse + plainData, "ok server an abstract Unix socket, for processes of this user in this container" + refuse,
			"ok worker TCP 10.1.0.1, any free port, reached from other hosts" + refuse, "ok worker TCP 10.1.0.1, any free port, for data, reached from other hosts" + refuse + plainData, "ok worker an abstract Unix socket, for processes of this user in this container" + refuse}},
		{"DMLC_ROLE=worker DMLC_PS_ROOT_URI=127.0.0.1 DMLC_LOCAL=1 BYTEPS_ENABLE_IPC=0", []string{"ok worker a Unix socket in /tmp that only this user may open, reached from this host only" + join}},
		{"DMLC_ROLE=worker DMLC_PS_ROOT_URI=10.1.0.7 DMLC_INTERFACE=nosuch0 BYTEPS_ENABLE_IPC=0",
			[]string{"warn worker TCP an address that is not known, any free port, reached from other hosts" + join, "ok worker TCP an address that is not known, any free port, for data, reached from other hosts" + pose}},
	} {
		m, _ := plain(append(strings.Fields(c.environ), "DMLC_PS_ROOT_PORT=8123", "DMLC_NUM_WORKER=1", "DMLC_NUM_SERVER=1")...)
		var got []string
		for _, f := range examine(t, m).Findings {
			if role, ok := strings.CutPrefix(f.Name, "exposed "); ok {
				got = append(got, fmt.Sprintf("%s %s %s", f.Status, role, f.Text))
			}
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%s:\n  got  %q\n  want %q", c.environ, got, c.want)
		}
	}
}

// TestExposedRDMA: over RDMA the address is that of the port, and the tensors are not encrypted.
func TestExposedRDMA(t *testing.T) {
	m, _, _ := equipped(t, "DMLC_ENABLE_RDMA=ibverbs", "DMLC_INTERFACE=auto", "DMLC_ROLE=worker", "DMLC_NUM_WORKER=1", "DMLC_NUM_SERVER=1",
		"DMLC_PS_ROOT_URI=10.1.0.1", "DMLC_PS_ROOT_PORT=8123", "STEPAF_SECRET="+secret.Make())
	want := "RDMA 10.1.1.1, any free port, reached from other hosts: a process without the secret is refused in the handshake; tensors are not encrypted"
	if f := find(t, examine(t, m), "exposed worker"); f.Status != OK || f.Text != want {
		t.Errorf("%s %s, want %s", f.Status, f.Text, want)
	}
}

// TestSecretOwner: a file of another user is refused, and the remedy explains how to get a file of this user.
func TestSecretOwner(t *testing.T) {
	path := filepath.Join(t.TempDir(), "secret")
	if err := secret.Write(path, secret.Make()); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(path, 65534, -1); err != nil {
		t.Skip("only root can give a file away: ", err)
	}
	m, _ := plain("STEPAF_SECRET_FILE=" + path)
	want := fmt.Sprintf("owned by user 65534): want a file of user %d", os.Geteuid())
	if f := find(t, examine(t, m), "secret"); f.Status != Fail || !strings.Contains(f.Text, want) || !strings.Contains(f.Remedy, "copy it as the user who runs the node") {
		t.Errorf("%+v, want %q", f, want)
	}
}
