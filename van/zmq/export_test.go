package zmq

import (
	"time"

	"github.com/stepaf/stepaf-go/van"
)

// LongNets raises the time that messages wait for Admit to a minute. A test that lacks an Admit then fails by its own limit.
func LongNets(v van.Van) {
	z := v.(*zvan)
	z.early.admitTime = time.Minute
}
