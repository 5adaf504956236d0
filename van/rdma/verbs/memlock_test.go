//go:build linux && cgo && !nordma

package verbs

import (
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// TestMemlock registers more than the process may lock. Root has no limit, so as root the test runs again as the user nobody.
func TestMemlock(t *testing.T) {
	const limit = 64 << 10
	r := newRig(t)
	var old unix.Rlimit
	r.must(unix.Getrlimit(unix.RLIMIT_MEMLOCK, &old))
	if os.Getuid() == 0 {
		r.must(unix.Setrlimit(unix.RLIMIT_MEMLOCK, &unix.Rlimit{Cur: limit, Max: old.Max}))
		c := exec.Command("/proc/self/exe", "-test.run=^TestMemlock$", "-test.v")
		c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
		c.Dir = "/"
		out, err := c.CombinedOutput()
		r.must(unix.Setrlimit(unix.RLIMIT_MEMLOCK, &old))
		if err != nil || !strings.Contains(string(out), "--- PASS: TestMemlock") {
			t.Fatalf("as nobody: %v\n%s", err, out)
		}
		return
	}
	if old.Cur > limit {
		t.Skipf("RLIMIT_MEMLOCK is %d bytes, want %d: run it as root, or after ulimit -l 64", old.Cur, limit)
	}
	buf := r.memory(64 * limit)
	d := r.resolve(r.listener().id.LocalAddr()).dev()
	_, err := d.Register(unsafe.Pointer(&buf[0]), len(buf), LocalWrite)
	wantText(t, err, syscall.ENOMEM, d.Name(), "register 4194304 bytes", "RLIMIT_MEMLOCK", "is 65536 bytes", "ulimit -l")
}
