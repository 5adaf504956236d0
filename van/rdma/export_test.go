package rdma

import (
	"time"

	"github.com/stepaf/stepaf-go/van"
)

// LongNets makes the bounds so long that heal a lost wake-up that a test which needs one fails by its own limit. What
// probes find is not found then.
func LongNets(v van.Van) {
	x := v.(*rvan)
	x.times.sleep, x.times.probe = time.Minute, time.Minute
}
