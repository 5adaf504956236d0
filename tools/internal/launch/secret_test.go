package launch

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/stepaf/stepaf-go/tools/internal/exit"
	"github.com/stepaf/stepaf-go/tools/internal/secret"
)

// TestSecretChoice: a cluster with --role joint gets a secret unless the user has decided otherwise. On several
// machines a message explains the consequences of no secret.
func TestSecretChoice(t *testing.T) {
	file := filepath.Join(t.TempDir(), "secret")
	if err := secret.Write(file, secret.Make()); err != nil {
		t.Fatal(err)
	}
	share := func(part, host string) func(*Spec) {
		return func(s *Spec) { s.Part, s.Port, s.Host = part, 9, host }
	}
	joint := func(*Spec) {}
	for _, c := range []struct {
		name  string
		spec  func(*Spec)
		env   []string
		makes bool
		says  string // a part of the only message; "" means no message
	}{
		{"whole", joint, nil, true, ""},
		{"whole, on a network", func(s *Spec) { s.Interface = "eth0" }, nil, true, ""},
		{"whole, to require", joint, []string{"STEPAF_AUTH=require"}, true, ""},
		{"whole, to warn", joint, []string{"STEPAF_AUTH=warn"}, true, ""},
		{"whole, off", joint, []string{"STEPAF_AUTH=off"}, false, ""},
		{"whole, without", func(s *Spec) { s.NoSecret = true }, nil, false, ""},
		{"whole, a file", joint, []string{"STEPAF_SECRET_FILE=" + file}, false, ""},
		{"whole, a variable", joint, []string{"STEPAF_SECRET=" + secret.Make()}, false, ""},
		{"whole, a default file", func(s *Spec) { s.Defaults = []Default{{"", "STEPAF_SECRET_FILE", file}} }, nil, false, ""},
		{"whole, a default off", func(s *Spec) { s.Defaults = []Default{{"", "STEPAF_AUTH", "off"}} }, nil, false, ""},
		{"whole, off by default, required", func(s *Spec) { s.Defaults = []Default{{"", "STEPAF_AUTH", "off"}} }, []string{"STEPAF_AUTH=require"}, true, ""},
		{"whole, C++ programs", joint, []string{"STEPAF_FOREIGN=1"}, false, ""},
		{"whole, C++ programs by default", func(s *Spec) { s.Defaults = []Default{{"", "STEPAF_FOREIGN", "1"}} }, nil, false, ""},
		{"whole, no C++ programs", func(s *Spec) { s.Defaults = []Default{{"", "STEPAF_FOREIGN", "1"}} }, []string{"STEPAF_FOREIGN=0"}, true, ""},
		{"server, a default file", func(s *Spec) { share(Server, "")(s); s.Defaults = []Default{{"", "STEPAF_SECRET_FILE", file}} }, nil, false, ""},
		{"server", share(Server, ""), nil, false, "any process that reaches 192.0.2.1 can join the cluster"},
		{"worker", share(Worker, "192.0.2.9"), nil, false, "any process that reaches 192.0.2.1 can join the cluster"},
		{"slave", share(ServerSlave, "192.0.2.9"), nil, false, "set STEPAF_SECRET_FILE on all machines"},
		{"scheduler", share(Scheduler, "192.0.2.2"), nil, false, "any process that reaches 192.0.2.2"},
		{"server, without", func(s *Spec) { share(Server, "")(s); s.NoSecret = true }, nil, false, "any process that reaches"},
		{"server, off", share(Server, ""), []string{"STEPAF_AUTH=off"}, false, ""},
		{"server, a file", share(Server, ""), []string{"STEPAF_SECRET_FILE=" + file}, false, ""},
		{"worker, a variable", share(Worker, "192.0.2.9"), []string{"STEPAF_SECRET=" + secret.Make()}, false, ""},
		{"server on loopback", share(Server, "127.0.0.1"), nil, false, ""},
		{"worker on loopback", share(Worker, "127.0.0.1"), nil, false, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := base()
			s.DefaultVan = "zmq"
			c.spec(&s)
			p, err := Resolve(s, c.env, bigNode())
			if err != nil {
				t.Fatal(err)
			}
			if p.MakesSecret != c.makes {
				t.Errorf("makes a secret: %v, want %v", p.MakesSecret, c.makes)
			}
			if said := strings.Join(p.Messages, "\n"); (said == "") != (c.says == "") || !strings.Contains(said, c.says) || len(p.Messages) > 1 {
				t.Errorf("messages %q, want %q", p.Messages, c.says)
			}
			for _, v := range c.env {
				for _, child := range p.Children {
					if !slices.Contains(child.Env, v) {
						t.Errorf("%s is not given %s", child.Name(), v)
					}
				}
			}
		})
	}
}

// TestBadSecret: the launcher itself refuses a secret that its children would refuse.
func TestBadSecret(t *testing.T) {
	file := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(file, []byte(secret.Make()), 0o644); err != nil {
		t.Fatal(err)
	}
	for set, want := range map[string]string{
		"STEPAF_SECRET_FILE=" + file: fmt.Sprintf("environment: STEPAF_SECRET_FILE=%q (mode 0644): want mode 0600", file),
		"STEPAF_SECRET=hunter2":      `environment: STEPAF_SECRET="(set)" (7 bytes): want 16 to 4096 bytes`,
	} {
		_, err := Resolve(base(), []string{set}, laptop())
		if err == nil || !strings.HasPrefix(err.Error(), want) || exit.Status(err) != exit.Misuse {
			t.Errorf("%v, want %s", err, want)
		}
	}
}

var told = regexp.MustCompile(`^\[.*\] secret "([\w-]{43})" file "(.*)": <nil>$`)

// TestSecretOfChildren: all children read the same secret from a file, which is removed at the end, however the launch
// ends.
func TestSecretOfChildren(t *testing.T) {
	v := newVisits(t)
	hang := "secret; hang " + v.Addr().String()
	for _, c := range []struct {
		name    string
		scripts map[string]string
		hanging int
		signal  os.Signal
		status  int
	}{
		{"well", map[string]string{"worker": "secret", "server": "secret", "scheduler": "secret"}, 0, nil, 0},
		{"a failure", map[string]string{"worker": "secret; exit 3", "server": "secret", "scheduler": "secret"}, 0, nil, 3},
		{"SIGTERM", map[string]string{"worker": hang, "server": hang, "scheduler": hang}, 3, syscall.SIGTERM, 143},
		{"SIGINT", map[string]string{"worker": hang, "server": hang, "scheduler": hang}, 3, syscall.SIGINT, 130},
		{"SIGHUP", map[string]string{"worker": hang, "server": hang, "scheduler": hang}, 3, syscall.SIGHUP, 129},
	} {
		t.Run(c.name, func(t *testing.T) {
			tmp := t.TempDir()
			t.Setenv("TMPDIR", tmp)
			l := newCluster(c.scripts)
			if c.signal != nil {
				go func() {
					v.await(t, c.hanging)
					l.signals <- c.signal
				}()
			}
			if s := exit.Status(l.run(t)); s != c.status {
				t.Errorf("status %d, want %d", s, c.status)
			}
			seen := map[string]int{}
			for _, line := range l.out.lines() {
				if m := told.FindStringSubmatch(line); m != nil {
					seen[m[1]+" "+m[2]]++
				} else {
					t.Errorf("a child says %q", line)
				}
			}
			if len(seen) != 1 {
				t.Errorf("the children are told of %d secrets, want 1", len(seen))
			}
			if left, err := os.ReadDir(tmp); err != nil || len(left) > 0 {
				t.Errorf("%v stays behind (%v)", left, err)
			}
		})
	}
}

// TestSecretUnwritable: without a directory for the secret, no process is started.
func TestSecretUnwritable(t *testing.T) {
	t.Setenv("TMPDIR", filepath.Join(t.TempDir(), "none"))
	c := newCluster(map[string]string{"worker": "say started", "server": "say started", "scheduler": "say started"})
	err := c.run(t)
	if err == nil || !strings.Contains(err.Error(), "set TMPDIR to a directory") || exit.Status(err) != exit.Failure {
		t.Error(err)
	}
	if out := strings.Join(c.out.lines(), ""); out != "" {
		t.Errorf("printed %q", out)
	}
}

// TestSecretPassedOn: the children get the secret of the user's environment unchanged, and no file is created.
func TestSecretPassedOn(t *testing.T) {
	tmp, own := t.TempDir(), secret.Make()
	t.Setenv("TMPDIR", tmp)
	t.Setenv("STEPAF_SECRET", own)
	c := newCluster(map[string]string{"worker": "secret", "server": "secret", "scheduler": "secret"})
	if err := c.run(t); err != nil {
		t.Error(err)
	}
	for _, line := range c.out.lines() {
		if !strings.HasSuffix(line, fmt.Sprintf("secret %q file \"\": <nil>", own)) {
			t.Errorf("a child says %q", line)
		}
	}
	if left, err := os.ReadDir(tmp); err != nil || len(left) > 0 {
		t.Errorf("%v stays behind (%v)", left, err)
	}
}
