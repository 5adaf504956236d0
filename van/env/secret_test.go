package env

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

const goodSecret = "0123456789abcdef-the-secret"

func TestReadSecret(t *testing.T) {
	dir := t.TempDir()
	file := func(name, text string, mode os.FileMode) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), mode); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(path, mode); err != nil { // independent of the umask
			t.Fatal(err)
		}
		return path
	}
	pipe := filepath.Join(dir, "pipe")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	good := file("good", goodSecret, 0o600)
	link := filepath.Join(dir, "link")
	if err := os.Symlink(good, link); err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		name   string
		cfg    Config
		secret string
		err    string // part of it
	}{
		{"none", Config{}, "", ""},
		{"file", Config{SecretFile: good}, goodSecret, ""},
		{"a line end and blanks are dropped", Config{SecretFile: file("line", " "+goodSecret+"\r\n", 0o600)}, goodSecret, ""},
		{"only readable by the owner", Config{SecretFile: file("0400", goodSecret, 0o400)}, goodSecret, ""},
		{"a link to a good file", Config{SecretFile: link}, goodSecret, ""},
		{"readable by the group", Config{SecretFile: file("0640", goodSecret, 0o640)}, "", "(mode 0640): want mode 0600"},
		{"readable by all", Config{SecretFile: file("0604", goodSecret, 0o604)}, "", "(mode 0604): want mode 0600"},
		{"empty", Config{SecretFile: file("empty", "", 0o600)}, "", "(it holds 0 bytes): want 16 to 4096 bytes"},
		{"blanks", Config{SecretFile: file("blanks", strings.Repeat(" \n", 50), 0o600)}, "", "(it holds 0 bytes)"},
		{"short", Config{SecretFile: file("short", "hunter2", 0o600)}, "", "(it holds 7 bytes)"},
		{"long", Config{SecretFile: file("long", strings.Repeat("x", MaxSecret+1), 0o600)}, "", "(it holds more than 4096 bytes)"},
		{"endless", Config{SecretFile: "/dev/zero"}, "", "(a device): want a regular file"},
		{"directory", Config{SecretFile: dir}, "", "(a directory): want a regular file"},
		{"named pipe that nobody writes to", Config{SecretFile: pipe}, "", "(a named pipe): want a regular file"},
		{"missing", Config{SecretFile: filepath.Join(dir, "missing")}, "", "(no such file or directory): want a file that this process can read"},
		{"the secret itself", Config{SecretFile: "hunter2hunter2hunter2"}, "", `STEPAF_SECRET_FILE="(not shown)" (no such file or directory): want a file that this process can read; a secret belongs into STEPAF_SECRET`},
		{"variable", Config{Secret: goodSecret}, goodSecret, ""},
		{"short variable", Config{Secret: "hunter2"}, "", `STEPAF_SECRET="(set)" (7 bytes): want 16`},
		{"both", Config{Secret: goodSecret, SecretFile: good}, "", "(STEPAF_SECRET is set too): want only one of the two"},
	}
	for _, c := range tests {
		t.Run(c.name, func(t *testing.T) {
			secret, err := c.cfg.ReadSecret()
			if string(secret) != c.secret || (err != nil) != (c.err != "") || err != nil && !strings.Contains(err.Error(), c.err) {
				t.Fatalf("%q, %v; want %q, %q", secret, err, c.secret, c.err)
			}
			if err == nil {
				return
			}
			if !errors.Is(err, ErrInvalid) {
				t.Errorf("%v is not ErrInvalid", err)
			}
			for _, s := range []string{"hunter2", goodSecret} {
				if strings.Contains(err.Error(), s) {
					t.Errorf("the error shows the secret: %v", err)
				}
			}
		})
	}
}

// TestForeignSecretFile refuses a file of another user, which only root can try.
func TestForeignSecretFile(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can make a file of another user")
	}
	path := filepath.Join(t.TempDir(), "secret")
	if err := errors.Join(os.WriteFile(path, []byte(goodSecret), 0o600), os.Chown(path, 12345, 0)); err != nil {
		t.Fatal(err)
	}
	if _, err := (&Config{SecretFile: path}).ReadSecret(); err == nil || !strings.Contains(err.Error(), "(owned by user 12345): want a file of user 0") {
		t.Error(err)
	}
}

func TestAuthMode(t *testing.T) {
	tests := []struct{ secret, auth, mode, err string }{
		{"", "", AuthOff, ""},
		{"", AuthOff, AuthOff, ""},
		{"", AuthWarn, AuthWarn, `STEPAF_AUTH="warn" (no secret is set): want STEPAF_SECRET_FILE, or STEPAF_SECRET`},
		{"", AuthRequire, AuthRequire, `STEPAF_AUTH="require" (no secret is set): want STEPAF_SECRET_FILE, or STEPAF_SECRET`},
		{goodSecret, "", AuthRequire, ""},
		{goodSecret, AuthOff, AuthOff, ""},
		{goodSecret, AuthWarn, AuthWarn, ""},
		{goodSecret, AuthRequire, AuthRequire, ""},
	}
	for _, c := range tests {
		vars := []string{"DMLC_ROLE=scheduler", "DMLC_NUM_WORKER=1", "DMLC_NUM_SERVER=1", "DMLC_PS_ROOT_URI=127.0.0.1", "DMLC_PS_ROOT_PORT=9000"}
		if c.secret != "" {
			vars = append(vars, "STEPAF_SECRET="+c.secret)
		}
		if c.auth != "" {
			vars = append(vars, "STEPAF_AUTH="+c.auth)
		}
		cfg, err := LoadFrom(FromList(vars))
		if err != nil {
			t.Fatal(err)
		}
		err = cfg.Validate()
		if cfg.AuthMode() != c.mode || (err != nil) != (c.err != "") || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("secret %q, STEPAF_AUTH %q: mode %s, %v; want %s, %q", c.secret, c.auth, cfg.AuthMode(), err, c.mode, c.err)
		}
	}
}

// TestTLS: STEPAF_TLS=1 needs a secret that is required, and a transport that can be encrypted.
func TestTLS(t *testing.T) {
	tests := []struct{ vars, err string }{
		{"", `STEPAF_TLS="1" (no secret is set): want STEPAF_SECRET_FILE, or STEPAF_SECRET`},
		{"STEPAF_AUTH=off", `STEPAF_TLS="1" (no secret is set)`},
		{"STEPAF_SECRET=" + goodSecret, ""},
		{"STEPAF_SECRET=" + goodSecret + " STEPAF_AUTH=require STEPAF_DATA=zmq", ""},
		{"STEPAF_SECRET=" + goodSecret + " STEPAF_AUTH=warn", `STEPAF_TLS="1" (STEPAF_AUTH=warn): want STEPAF_AUTH=require, or unset it`},
		{"STEPAF_SECRET=" + goodSecret + " STEPAF_AUTH=off", `STEPAF_TLS="1" (STEPAF_AUTH=off)`},
		{"STEPAF_SECRET=" + goodSecret + " DMLC_ENABLE_RDMA=ibverbs", `STEPAF_TLS="1" (transport ibverbs): want DMLC_ENABLE_RDMA=zmq`},
		{"STEPAF_SECRET=short", `want 16 to 4096 bytes`},
	}
	for _, c := range tests {
		cfg, err := LoadFrom(FromList(append(strings.Fields(c.vars), "STEPAF_TLS=1",
			"DMLC_ROLE=worker", "DMLC_NUM_WORKER=1", "DMLC_NUM_SERVER=1", "DMLC_PS_ROOT_URI=127.0.0.1", "DMLC_PS_ROOT_PORT=9000")))
		if err == nil {
			err = cfg.Validate()
		}
		if (err != nil) != (c.err != "") || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("%s: %v, want %q", c.vars, err, c.err)
		}
	}
}

// TestEmptySecret: a variable that is set and empty is a mistake, not a cluster without a secret.
func TestEmptySecret(t *testing.T) {
	for _, name := range []string{"STEPAF_SECRET", "STEPAF_SECRET_FILE"} {
		_, err := LoadFrom(FromList([]string{name + "="}))
		if want := name + " is not set (it is empty): want a secret, or a file with one; without a secret, unset it"; err == nil || err.Error() != want {
			t.Errorf("%v, want %s", err, want)
		}
	}
}

// TestSecretIsNotShown formats a configuration in every way that a log or a report uses.
func TestSecretIsNotShown(t *testing.T) {
	cfg, err := LoadFrom(FromList([]string{"STEPAF_SECRET=" + goodSecret}))
	if err != nil {
		t.Fatal(err)
	}
	if string(cfg.Secret) != goodSecret {
		t.Fatalf("%q", string(cfg.Secret))
	}
	js, err := json.Marshal(cfg)
	if err != nil {
		t.Fatal(err)
	}
	table, err := json.Marshal(cfg.Table())
	if err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{fmt.Sprint(*cfg), fmt.Sprintf("%+v", *cfg), fmt.Sprintf("%#v", cfg.Secret), fmt.Sprintf("%q", cfg.Secret), string(js), string(table), cfg.Secret.LogValue().String()} {
		if strings.Contains(text, goodSecret) {
			t.Errorf("the secret is in %s", text)
		}
	}
	if !strings.Contains(string(table), "(set)") {
		t.Errorf("the table does not say that the secret is set: %s", table)
	}
}
