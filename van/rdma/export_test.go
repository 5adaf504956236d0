package rdma

import (
	"time"

	"github.com/stepaf/stepaf-go/van"
)

// LongNets makes the time limits so long that a test with a lost wake-up exceeds its own limit, instead of being rescued by one of them. Probes then find nothing.
func LongNets(v van.Van) {
	x := v.(*rvan)
	x.times.sleep, x.times.probe = time.Minute, time.Minute
}
