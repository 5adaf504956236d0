package pace_test

import (
	"testing"

	"github.com/stepaf/stepaf-go/tests/inproc"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/pace"
)

// TestConformance: without a rate, and with rates that make messages wait.
func TestConformance(t *testing.T) {
	for name, rate := range map[string]int64{"none": 0, "some": 50_000_000} {
		t.Run(name, func(t *testing.T) {
			make := inproc.NewNetwork().Factory()
			vantest.Run(t, vantest.Suite{BadHost: "no host", New: func(t testing.TB) van.Van {
				inner, err := make(van.Options{})
				if err != nil {
					t.Fatal(err)
				}
				v := pace.New(inner, pace.Options{})
				if rate > 0 {
					peers := map[int]int64{}
					for id := range 64 {
						peers[id] = rate
					}
					v.SetRates(pace.Rates{Peers: peers})
				}
				return v
			}})
		})
	}
}
