// Package processes tests clusters of real processes: programs as people write them, to
// which happens what happens to processes.
package processes

import (
	"os"
	"testing"

	"github.com/stepaf/stepaf-go/tests/internal/real"
)

func TestMain(m *testing.M) {
	real.Main()
	os.Exit(m.Run())
}
