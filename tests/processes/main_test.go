// Package processes tests clusters of real processes: programs as people write them, to
// which happens what happens to processes.
package processes

import (
	"flag"
	"fmt"
	"os"
	"slices"
	"testing"

	"github.com/stepaf/stepaf-go/tests/internal/real"
)

var leg = flag.String("leg", "", "run the tests on this leg only: tcp or shm")

func TestMain(m *testing.M) {
	real.Main()
	flag.Parse()
	if *leg != "" {
		if !slices.Contains(legs, real.Leg(*leg)) {
			fmt.Fprintf(os.Stderr, "-leg=%s: want one of %v\n", *leg, legs)
			os.Exit(2)
		}
		legs = []real.Leg{real.Leg(*leg)}
	}
	os.Exit(m.Run())
}
