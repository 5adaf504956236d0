//go:build !race

// Tests of the virtual machine with RDMA devices. They boot it, so -short leaves them out. They run without the race
// detector: the machine runs no Go code of this test.

package tests

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// machine gives the variables with which a tool finds the virtual machine of this
// user, and skips where there is none.
func machine(t *testing.T) []string {
	t.Helper()
	if os.Getenv("RDMA_VM") != "" {
		t.Skip("this is the virtual machine")
	}
	own := []string{"RDMA_VM_CACHE=" + os.Getenv("RDMA_VM_CACHE"), "USE_RDMA=" + os.Getenv("USE_RDMA")}
	if r := tool(t, "rdma_test.sh --ready", own...); r.status != 0 {
		t.Skipf("no virtual machine: %s", r.err)
	}
	return own
}

// TestRDMAMachine: a command of a host of the machine has its variables, and its output and status are those of rdma-vm.
func TestRDMAMachine(t *testing.T) {
	if testing.Short() {
		t.Skip("boots a virtual machine")
	}
	own := machine(t)
	command := filepath.Join(t.TempDir(), "command")
	write(t, command, "#!/bin/sh\nprintenv RDMA_VM_ADDR RDMA_VM_DEVICE\nexit 5\n", 0o755)
	r := tool(t, "rdma-vm --hosts 2 -- rdma-host 2 "+command, own...)
	if again := regexp.MustCompile("(?m)^.* did not boot in .*\n").ReplaceAllString(r.err, ""); r.status != 5 || r.out != "10.77.0.2\nrxe1\n" || again != "" {
		t.Errorf("status %d, output %q, standard error %q; want status 5", r.status, r.out, r.err)
	}
	if r := tool(t, "rdma-vm --timeout 1 -- true", own...); r.status != 124 || !strings.Contains(r.err, "timed out after 1 s") {
		t.Errorf("too short a limit: status %d, %q", r.status, r.err)
	}
}

// TestRDMATest: rdma_test.sh reports tests that fail, hang, are skipped, or leave processes behind.
func TestRDMATest(t *testing.T) {
	if testing.Short() {
		t.Skip("boots a virtual machine")
	}
	own := machine(t)
	r := tool(t, "rdma_test.sh --limit 10 ./tests/testdata/rdma/passes ./tests/testdata/rdma/skips ./tests/testdata/rdma/hangs ./tests/testdata/rdma/fails", own...)
	const in = " tests/testdata/rdma/"
	for _, want := range []string{
		"ok  " + in + "passes: 3 passed, 0 failed, 1 skipped, ", "       skipped: TestParts/two: only one part\n", "       note: processes still running: 1\n",
		"FAIL" + in + "skips: 0 passed, 0 failed, 1 skipped, ", ": nothing but skipped tests\n       skipped: TestSkips: no device\n",
		"FAIL" + in + "fails: 0 passed, 1 failed, 0 skipped, ", "       failed: TestFails\n", "rdma_test.go:5: as it should\n",
		"FAIL" + in + "hangs: 0 passed, 0 failed, 0 skipped, ", "       did not end: TestHangs\n", "panic: test timed out after 10s\n",
		": 3 passed, 1 failed, 2 skipped, ",
	} {
		if !strings.Contains(r.out, want) {
			t.Errorf("no %q", want)
		}
	}
	if r.status != 1 || t.Failed() {
		t.Errorf("status %d, want 1\n%s%s", r.status, r.out, r.err)
	}
}
