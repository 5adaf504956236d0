//go:build linux && cgo && !nordma

package verbs

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

func load(t testing.TB, o Options) *stack {
	t.Helper()
	s, err := Load(o)
	if err != nil {
		t.Skip(err) // without the libraries, only the error texts can be tested
	}
	return s.(*stack)
}

// wantText checks that err wraps is and contains the words.
func wantText(t *testing.T, err, is error, words ...string) {
	t.Helper()
	if !errors.Is(err, is) {
		t.Fatalf("error %v, want one that wraps %q", err, is)
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("error %q does not name %q", err, w)
		}
	}
}

func TestLoadMissingLibrary(t *testing.T) {
	_, err := Load(Options{libVerbs: "libnone.so.7"})
	wantText(t, err, ErrUnavailable, "libnone.so.7", "cannot open shared object file", "libibverbs1", "ibverbs-providers")

	load(t, Options{})
	_, err = Load(Options{libCM: "libnone.so.7"})
	wantText(t, err, ErrUnavailable, "libnone.so.7", "cannot open shared object file", "librdmacm1")

	// Another library in their place.
	_, err = Load(Options{libVerbs: "libc.so.6"})
	wantText(t, err, ErrUnavailable, "libc.so.6", "ibv_get_device_list", "newer")
	_, err = Load(Options{libCM: "libc.so.6"})
	wantText(t, err, ErrUnavailable, "libc.so.6", "rdma_create_event_channel", "newer")
}

func TestLoadWithoutMLX5(t *testing.T) {
	load(t, Options{libMLX5: "libnone.so.7"})
}

func TestNotLinked(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(exe)
	if err != nil {
		t.Fatal(err)
	}
	// The name of a linked library is in the table of dynamic strings, between zeros. The name of a library for dlopen is among Go's strings, without zeros.
	for _, lib := range []string{"libibverbs.so.1", "librdmacm.so.1", "libmlx5.so.1"} {
		if strings.Contains(string(b), "\x00"+lib+"\x00") {
			t.Errorf("%s is linked", lib)
		}
	}
	if !strings.Contains(string(b), "\x00libc.so.6\x00") {
		t.Error("libc.so.6 is not linked: the test does not see what is")
	}
}

func TestDiagnose(t *testing.T) {
	dir := t.TempDir()
	sys, dev := filepath.Join(dir, "sys"), filepath.Join(dir, "dev")
	s := load(t, Options{sysfs: sys, dev: dev})
	channel := func() error {
		ch, err := s.NewChannel()
		if err == nil {
			t.Fatal("a channel without a device", ch.Close())
		}
		return err
	}
	mk := func(path string, mode os.FileMode) {
		t.Helper()
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, nil, mode); err != nil {
			t.Fatal(err)
		}
	}
	if d, err := s.Devices(); len(d) != 0 || err != nil {
		t.Fatalf("Devices = %v, %v, want none", d, err)
	}
	wantText(t, channel(), ErrUnavailable, "no RDMA device", sys, "no such file", "mlx5_ib", "rdma_rxe")
	if err := os.MkdirAll(sys, 0o755); err != nil {
		t.Fatal(err)
	}
	wantText(t, channel(), ErrUnavailable, "no RDMA device", sys, "is empty")
	mk(filepath.Join(sys, "nic7", "fw_ver"), 0o644)
	wantText(t, channel(), ErrUnavailable, "nic7", dev+"/uverbs*", "ib_uverbs", "--device=/dev/infiniband")
	if _, err := s.Devices(); !errors.Is(err, ErrUnavailable) || !strings.Contains(err.Error(), "nic7") {
		t.Errorf("Devices of a kernel device without a driver: %v", err)
	}
	if os.Getuid() != 0 {
		mk(filepath.Join(dev, "uverbs0"), 0)
		wantText(t, channel(), ErrUnavailable, "uverbs0", "permission denied")
	}
	mk(filepath.Join(dev, "uverbs1"), 0o644)
	wantText(t, channel(), ErrUnavailable, dev+"/rdma_cm", "missing", "rdma_ucm")
	if err := os.Mkdir(filepath.Join(dev, "rdma_cm"), 0o755); err != nil {
		t.Fatal(err)
	}
	wantText(t, channel(), ErrUnavailable, "cannot open", dev+"/rdma_cm", "is a directory")
	wantText(t, s.diagnose(syscall.EIO), ErrUnavailable, "rdma_cm")
}

// TestDiagnoseSomeDevices: a container may have only some of the host's devices. One that can be opened is enough.
func TestDiagnoseSomeDevices(t *testing.T) {
	dir := t.TempDir()
	s := &stack{opt: Options{sysfs: filepath.Join(dir, "sys"), dev: filepath.Join(dir, "dev")}}
	for _, d := range []string{"sys/nic7", "sys/nic8", "dev/uverbs0"} { // no user can open a directory for writing
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, f := range []string{"dev/rdma_cm", "dev/uverbs1"} {
		wantText(t, s.diagnose(nil), ErrUnavailable, "cannot open", "dev/uverbs0", "is a directory")
		if err := os.WriteFile(filepath.Join(dir, f), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.diagnose(nil); err != nil {
		t.Errorf("with one device that can be opened: %v", err)
	}
}

func TestFailure(t *testing.T) {
	if err := failure(0, "register", "nic7", "4 bytes"); err != nil {
		t.Fatal(err)
	}
	wantText(t, failure(12, "register", "nic7", "4 bytes"), syscall.ENOMEM, "nic7", "register", "4 bytes", "RLIMIT_MEMLOCK")
	wantText(t, failure(1, "register", "nic7", "4 bytes"), syscall.EPERM, "CAP_IPC_LOCK")
	wantText(t, failure(100001, "register", "nic7", "4 bytes"), ErrClosed, "nic7", "register", "4 bytes")
}

func TestRate(t *testing.T) {
	for in, want := range map[string]float64{"100 Gb/sec (4X EDR)": 100, "2.5 Gb/sec (1X SDR)": 2.5, "": 0, "fast": 0} {
		if got := rate(in); got != want {
			t.Errorf("rate(%q) = %v, want %v", in, got, want)
		}
	}
}
