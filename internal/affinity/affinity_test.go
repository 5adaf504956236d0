package affinity

import (
	"testing"

	_ "github.com/stepaf/stepaf-go/tests/testlimit"
)

func TestCheck(t *testing.T) {
	for _, core := range []int{-1, 1 << 20} {
		if Check(core) == nil {
			t.Errorf("core %d passed", core)
		}
	}
	for core := range 1024 {
		if Check(core) == nil {
			return
		}
	}
	t.Error("no core passed")
}
