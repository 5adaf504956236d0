package membership

// Heartbeats: what a worker or server sends, and what is in their keys.

import (
	"math"
	"slices"
	"time"

	"github.com/stepaf/stepaf-go/van"
)

// returnBeat is the time between two heartbeats of a node whose scheduler does not know the
// cluster yet.
const returnBeat = time.Second

type beats struct {
	base
	due time.Duration // when the next one is sent
}

// beatKey is the key of a heartbeat to a scheduler of this library: the generation of the
// node's table, and the milliseconds between its heartbeats, 0 for none.
func beatKey(generation uint32, interval time.Duration) uint64 {
	return uint64(min(interval.Milliseconds(), math.MaxUint32))<<32 | uint64(generation)
}

func parseBeatKey(key uint64) (generation uint32, interval time.Duration) {
	return uint32(key), time.Duration(key>>32) * time.Millisecond
}

// begin is called when this node has become part of the cluster.
func (b *beats) begin(now time.Duration) {
	b.due = now + b.cfg.HeartbeatInterval
	if b.cfg.NativeInterval || b.table.native(van.SchedulerID) { // at once: from then on the scheduler watches this node
		b.due = now
	}
}

// send sends a heartbeat with this node's record; with whole, of the others' as well.
func (b *beats) send(whole bool) {
	meta := b.out.control(van.Heartbeat)
	meta.Control.Nodes = []van.Node{b.table.self}
	if whole {
		others := slices.DeleteFunc(slices.Clone(b.table.nodes), func(r van.Node) bool { return r.ID == b.table.self.ID })
		meta.Control.Nodes = append(meta.Control.Nodes, others...)
	}
	if b.table.native(van.SchedulerID) {
		meta.Key = beatKey(b.table.generation, b.cfg.HeartbeatInterval)
	}
	b.out.send(van.SchedulerID, meta)
}

func (b *beats) tick(now time.Duration) {
	if now < b.next() {
		return
	}
	b.due = now + b.cfg.HeartbeatInterval
	if b.life.rejoining {
		b.due = now + returnBeat
	}
	b.send(false)
}

func (b *beats) next() time.Duration {
	if b.alive.beating() || b.life.rejoining && !b.life.leaving {
		return b.due
	}
	return math.MaxInt64
}
