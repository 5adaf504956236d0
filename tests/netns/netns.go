// Package netns runs a test in its own network namespace.
package netns

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"slices"
	"syscall"
	"testing"
	"time"
)

// inside is an argument that tells a test binary that it runs in its own network namespace.
const inside = "in-a-network-of-its-own"

// Enter runs the calling test a second time, in a child process with its own network namespace and a time limit. In the child
// Enter returns true, and the loopback interface is up. In the caller's process Enter waits for the child and returns false,
// and the test must then return. The test is skipped if the namespace cannot be created, or if the child skips it.
// It fails if the child fails.
func Enter(t *testing.T, limit time.Duration) bool {
	t.Helper()
	if slices.Contains(os.Args, inside) {
		if out, err := exec.Command("ip", "link", "set", "lo", "up").CombinedOutput(); err != nil {
			t.Skipf("ip link: %v: %s", err, out)
		}
		return true
	}
	if os.Geteuid() != 0 {
		t.Skip("a network of its own needs the rights of root")
	}
	cmd := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v", "-test.timeout="+limit.String(), inside)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	out, err := cmd.CombinedOutput()
	switch {
	case errors.Is(err, syscall.EPERM) || bytes.Contains(out, []byte("--- SKIP")):
		t.Skipf("no network of its own: %v\n%s", err, out)
	case err != nil:
		t.Fatalf("%v\n%s", err, out)
	case !bytes.Contains(out, []byte("--- PASS: "+t.Name())):
		t.Fatalf("the test did not run in the other process:\n%s", out)
	}
	return false
}
