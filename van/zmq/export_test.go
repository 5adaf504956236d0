package zmq

import (
	"time"

	"github.com/stepaf/stepaf-go/van"
)

// LongNets makes the bounds so long that heal a lost notice that a test which needs one fails by its own limit.
func LongNets(v van.Van) {
	z := v.(*zvan)
	z.early.admitTime = time.Minute
}
