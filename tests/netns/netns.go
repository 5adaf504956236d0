// Package netns runs a test in a network namespace of its own.
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

// inside is an argument of a test binary that runs in its own network.
const inside = "in-a-network-of-its-own"

// Enter runs the calling test again, in a process that has a network namespace of its own and a limit. There it returns true,
// and the loopback is up. In the caller's process it returns false when the other process has ended, and the test is over.
// The test is skipped where the namespace cannot be had, and if the other process skips it.
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
