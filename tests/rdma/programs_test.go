package rdma

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestLaunch: the programs that users start.
func TestLaunch(t *testing.T) {
	host := addresses(t)[0]
	dir := os.Getenv("STEPAF_BIN")
	if dir == "" {
		t.Skip("STEPAF_BIN is not set; make rdma-test sets it to the directory of the programs")
	}
	program := func(name string) string { return filepath.Join(dir, name) }
	for _, tt := range []struct {
		name    string
		options []string // of stepaf launch
		want    []string
	}{
		{"demo", []string{"-n", "1", "-s", "2", "--", program("stepaf"), "demo", "--rounds", "20"}, []string{"[worker 0"}},
		{"groups", []string{"-n", "1", "-s", "1", "-g", "2", "--fserver", "--", program("test_fserver")}, []string{"worker test done"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if tt.name == "groups" {
				notShort(t)
			}
			p := exec.Command(program("stepaf"), append([]string{"launch", "--timeout", "60s"}, tt.options...)...)
			p.Env = append(os.Environ(), "DMLC_ENABLE_RDMA=ibverbs", "BYTEPS_ENABLE_IPC=0", "DMLC_NODE_HOST="+host, "DMLC_PS_ROOT_URI="+host, "STEPMESH_BAKCEND=CPU",
				fmt.Sprintf("STEPAF_RDMA_ACK_TIMEOUT=%d", patientAck))
			out, err := p.CombinedOutput()
			if err != nil {
				t.Fatalf("%s: %v\n%s", strings.Join(p.Args, " "), err, out)
			}
			says(t, string(out), tt.want...)
		})
	}
}
