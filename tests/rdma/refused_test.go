package rdma

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/internal/nodetest"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// TestMemlock: a node that may not lock memory reports it. Root may, so the node is a child with another user's rights.
func TestMemlock(t *testing.T) {
	c := prepare(t, options{})
	if os.Getuid() != 0 {
		t.Skip("needs to be root, to start a process as nobody")
	}
	c.Cluster = testcluster.New(t, c.testOptions())
	go func() {
		n, err := c.Join(t.Context(), "scheduler", 0, func(c *postoffice.Config) { c.StartTimeout = 25 * time.Second })
		if err == nil {
			n.Close()
		}
	}()
	var old unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &old); err != nil {
		t.Fatal(err)
	}
	p := exec.Command("/proc/self/exe")
	p.Dir = "/"
	p.Env = append(c.environ("worker", 0, 1), nodetest.As("unused"), "STEPAF_START_TIMEOUT=3")
	p.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	var out nodetest.Text
	p.Stdout, p.Stderr = &out, &out
	if err := unix.Setrlimit(unix.RLIMIT_MEMLOCK, &unix.Rlimit{Cur: 64 << 10, Max: old.Max}); err != nil {
		t.Fatal(err)
	}
	err := p.Start()
	if e := unix.Setrlimit(unix.RLIMIT_MEMLOCK, &old); e != nil {
		t.Fatal(e)
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Wait(); err == nil {
		t.Errorf("the node has started")
	}
	says(t, out.String(), "RLIMIT_MEMLOCK", "is 65536 bytes", "ulimit -l")
}

// refused starts a worker with additional environment variables, and returns its output.
func refused(t *testing.T, command []string, env ...string) string {
	t.Helper()
	p := exec.Command(command[0], command[1:]...)
	p.Env = append(append(os.Environ(), "DMLC_ROLE=worker", "DMLC_NUM_WORKER=1", "DMLC_NUM_SERVER=1", "DMLC_PS_ROOT_URI=10.77.0.1", "DMLC_PS_ROOT_PORT=9000",
		"DMLC_ENABLE_RDMA=ibverbs", "STEPMESH_BAKCEND=CPU", "STEPAF_START_TIMEOUT=3", nodetest.As("unused")), env...)
	out, err := p.CombinedOutput()
	if err == nil {
		t.Errorf("the node has started")
	}
	return string(out)
}

// says checks that a text contains all these.
func says(t *testing.T, out string, want ...string) {
	t.Helper()
	for _, s := range want {
		if !strings.Contains(out, s) {
			t.Errorf("it does not say %q:\n%s", s, out)
		}
	}
}

// TestNoDevice: without RDMA, the error says what is missing.
func TestNoDevice(t *testing.T) {
	stack, err := verbs.Load(verbs.Options{})
	if err == nil {
		var all []verbs.DeviceInfo
		if all, err = stack.Devices(); err == nil && len(all) > 0 {
			t.Skipf("there is %s", all[0].Name)
		}
	}
	out := refused(t, []string{os.Args[0]})
	says(t, out, "RDMA")
	t.Log(out)
}

// TestHiddenDevice: the device files are missing, as in a container without access to them.
func TestHiddenDevice(t *testing.T) {
	addresses(t)
	if os.Getuid() != 0 {
		t.Skip("needs to be root, to hide /dev/infiniband from a process")
	}
	out := refused(t, []string{"unshare", "-m", "sh", "-c", fmt.Sprintf("mount -t tmpfs none /dev/infiniband && exec %s", os.Args[0])}, "DMLC_NODE_HOST=10.77.0.1")
	says(t, out, "RDMA is not available", "/dev/infiniband")
}

// TestWrongInterface: an interface or address without an RDMA device.
func TestWrongInterface(t *testing.T) {
	addresses(t)
	for _, tt := range []struct {
		name, env string
		want      []string
	}{
		{"no such interface", "DMLC_INTERFACE=eth77", []string{"eth77"}},
		{"no RDMA there", "DMLC_INTERFACE=lo", []string{"lo", "rxe0"}},
		{"not of this host", "DMLC_NODE_HOST=10.1.2.3", []string{"10.1.2.3"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			out := refused(t, []string{os.Args[0]}, tt.env)
			t.Log(out)
			says(t, out, tt.want...)
		})
	}
}
