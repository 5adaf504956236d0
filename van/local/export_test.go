package local

import (
	"log/slog"
	"time"

	"github.com/stepaf/stepaf-go/van"
)

// StreamOnly makes v work as where reading other processes is forbidden.
func StreamOnly(v *Van) { v.acceptor.streamOnly = true }

// LongNets makes the bounds so long that heal a lost wake-up that a test which needs one fails by its own limit.
func LongNets(v *Van) { v.receiver.maxSleep, v.peers.O.HoldTime = time.Minute, time.Minute }

// Endpoint is the endpoint field of a node whose transport says local of itself.
func Endpoint(local []byte) []byte {
	id := van.NodeExtension{Incarnation: 1, Local: local}
	return id.Encode()
}

// Linked reports whether data to node id goes through shared memory.
func (v *Van) Linked(id int) bool {
	n := v.peers.Await(id)
	return n != nil && n.Link() != nil
}

// TakesDevice reports whether values on the node's device go there as they are.
func (v *Van) TakesDevice(id int) bool { return v.Linked(id) && v.PathTo(id, false).Device }

// logTo makes v log to log.
func (v *Van) logTo(log *slog.Logger) {
	v.log, v.rx.log, v.tx.log, v.peers.O.Log, v.dialer.log, v.acceptor.log, v.receiver.log, v.own.guard.Log = log, log, log, log, log, log, log, log
}
