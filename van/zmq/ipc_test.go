package zmq

import (
	"net"
	"os"
	"strconv"
	"syscall"
	"testing"

	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/env"
)

func localTest(t *testing.T) {
	t.Helper()
	dir, user := localDir, localUser
	localDir = t.TempDir()
	t.Cleanup(func() { localDir, localUser = dir, user })
}

func local(c *env.Config) { c.Local = true }

// TestLocalRights: other users cannot connect to the Unix socket, with any umask. The private directory is removed, and
// the socket's name is removed with the node.
func TestLocalRights(t *testing.T) {
	localTest(t)
	mask := syscall.Umask(0)
	defer syscall.Umask(mask)
	t.Run("node", func(t *testing.T) {
		n := newNode(t, 8, 5, nil, local)
		st, err := os.Stat(localPath(n.self.Port))
		if err != nil || st.Mode().Perm() != 0o600 || st.Mode()&os.ModeSocket == 0 {
			t.Errorf("mode %v, %v; want a socket with rights 0600", st.Mode(), err)
		}
		if all, _ := os.ReadDir(localDir); len(all) != 1 {
			t.Errorf("%d entries, want 1", len(all))
		}
	})
	if all, _ := os.ReadDir(localDir); len(all) != 0 {
		t.Errorf("%d entries are left", len(all))
	}
}

// TestLocalOfOthers: a file of another user at the path of a socket is an error that names the
// owner, both for the node that listens there and for a node that connects.
func TestLocalOfOthers(t *testing.T) {
	localTest(t)
	n := newNode(t, 8, 5, nil, local)
	l, err := net.Listen("unix", localPath(20000))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	localUser = func() int { return os.Geteuid() + 1 }
	cfg := env.Default()
	cfg.Local = true
	v, err := New(van.Options{Config: cfg})
	if err != nil {
		t.Fatal(err)
	}
	defer v.Close(t.Context())
	texts := []string{localPath(20000), "belongs to user " + strconv.Itoa(os.Geteuid())}
	_, err = v.Bind(t.Context(), van.Node{Role: van.Worker, ID: van.Empty, Hostname: "127.0.0.1", Port: 20000})
	vantest.Fails(t, err, van.ErrInvalid, texts...)
	err = n.Connect(t.Context(), 9, van.Node{Role: van.Worker, ID: 9, Hostname: "127.0.0.1", Port: 20000})
	vantest.Fails(t, err, van.ErrInvalid, texts...)
	if err := n.Connect(t.Context(), 9, van.Node{Role: van.Worker, ID: 9, Hostname: "127.0.0.1", Port: 20001}); err != nil {
		t.Errorf("a socket that is not there yet: %v", err)
	}
}

// TestLocalFile: a file that is no socket is left alone.
func TestLocalFile(t *testing.T) {
	localTest(t)
	if err := os.WriteFile(localPath(20000), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	cfg := env.Default()
	cfg.Local = true
	v, err := New(van.Options{Config: cfg})
	if err != nil {
		t.Fatal(err)
	}
	defer v.Close(t.Context())
	_, err = v.Bind(t.Context(), van.Node{Role: van.Worker, ID: van.Empty, Hostname: "127.0.0.1", Port: 20000})
	vantest.Fails(t, err, syscall.EADDRINUSE, "is not a socket")
	if b, err := os.ReadFile(localPath(20000)); err != nil || string(b) != "x" {
		t.Errorf("the file is %q, %v", b, err)
	}
}
