package main

import (
	"testing"

	"github.com/stepaf/stepaf-go/tests/internal/real"
	_ "github.com/stepaf/stepaf-go/tests/testlimit"
)

// TestRandom: the plans of many seeds are plans, and those of one seed are the same.
func TestRandom(t *testing.T) {
	for seed := range uint64(2000) {
		for _, leg := range []real.Leg{real.TCP, real.SHM, real.RDMA} {
			p := random(seed, leg)
			if err := p.Check(); err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
			if why := real.Cannot(p, leg); why != "" {
				t.Fatalf("seed %d on %s: %s", seed, leg, why)
			}
		}
	}
}
