package passes

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

func TestDevice(t *testing.T) {
	if _, err := os.Stat("/sys/class/infiniband/" + os.Getenv("RDMA_VM_DEVICE")); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat("rdma_test.go"); err != nil {
		t.Error("not in the directory of the package")
	}
	if want, err := filepath.Abs("../../../../bin"); err != nil || os.Getenv("STEPAF_BIN") != want {
		t.Errorf("STEPAF_BIN is %q, want %q (%v)", os.Getenv("STEPAF_BIN"), want, err)
	}
}

func TestParts(t *testing.T) {
	t.Run("one", func(*testing.T) {})
	t.Run("two", func(t *testing.T) { t.Skip("only one part") })
}

func TestLeaves(t *testing.T) {
	if err := exec.Command("sleep", "1000").Start(); err != nil {
		t.Fatal(err)
	}
}
