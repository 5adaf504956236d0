package secret

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	_ "github.com/stepaf/stepaf-go/tests/testlimit"
	"github.com/stepaf/stepaf-go/van/env"
)

// TestMake: secrets differ, and a node accepts one as a variable.
func TestMake(t *testing.T) {
	seen := map[string]bool{}
	for range 100 {
		s := Make()
		if len(s) != 43 || seen[s] {
			t.Fatalf("secret of %d characters (want 43), seen before: %v", len(s), seen[s])
		}
		seen[s] = true
		c := env.Default()
		c.Secret = env.Secret(s)
		if got, err := c.ReadSecret(); err != nil || string(got) != s {
			t.Fatalf("a node reads %d bytes of it: %v", len(got), err)
		}
	}
}

// TestWrite: a node accepts the file for any umask. The test changes the umask of the process, so it is not
// parallel.
func TestWrite(t *testing.T) {
	for _, mask := range []int{0, 0o022, 0o077, 0o777} {
		path := filepath.Join(t.TempDir(), "secret")
		s := Make()
		old := syscall.Umask(mask)
		err := Write(path, s)
		syscall.Umask(old)
		if err != nil {
			t.Fatal(err)
		}
		st, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		c := env.Default()
		c.SecretFile = path
		if got, err := c.ReadSecret(); err != nil || string(got) != s || st.Mode().Perm() != 0o600 {
			t.Errorf("umask %03o: mode %04o, and a node: %v", mask, st.Mode().Perm(), err)
		}
	}
}

// TestWriteRefuses: an existing file stays, and an error leaves no file.
func TestWriteRefuses(t *testing.T) {
	dir := t.TempDir()
	kept := filepath.Join(dir, "kept")
	if err := os.WriteFile(kept, []byte("of a cluster that runs"), 0o600); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(dir, "link")
	target := filepath.Join(dir, "target")
	if err := os.Symlink(target, link); err != nil {
		t.Fatal(err)
	}
	device := filepath.Join(dir, "device") // a link: root could remove the device itself if Write were wrong
	if err := os.Symlink("/dev/full", device); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]error{kept: fs.ErrExist, link: fs.ErrExist, dir: fs.ErrExist, device: fs.ErrExist,
		filepath.Join(dir, "none", "secret"): fs.ErrNotExist} {
		if err := Write(path, Make()); !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", path, err, want)
		}
	}
	if b, err := os.ReadFile(kept); err != nil || string(b) != "of a cluster that runs" {
		t.Errorf("the existing file has %q: %v", b, err)
	}
	if _, err := os.Lstat(target); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a file was made at the end of a link: %v", err)
	}
}
