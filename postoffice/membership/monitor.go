package membership

// The scheduler's view of live and dead nodes: the effects of a death or a return on open barriers, and the records
// and notices that nodes receive about each other.

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/stepaf/stepaf-go/van"
)

// monitor tracks the nodes of a formed cluster on the scheduler.
type monitor struct {
	core
	barriers     *barriers
	lastReplaced time.Duration             // time of the latest replacement of a node; 0: never
	unconfirmed  map[int]*unconfirmedTable // by id, of replacement processes
}

// unconfirmedTable is a table that was sent to a replacement process of this library that has sent no message since.
// The table may be lost: the connection to the earlier process at the same address may take the place of the new one
// after the table was written. A node without the table only waits, so the table is sent again.
type unconfirmedTable struct {
	next  time.Duration // time of the next repetition
	pause time.Duration
	left  int
}

const (
	tableRepeats = 4               // at most
	tableRepeat  = 2 * time.Second // after the first time; each pause is twice the one before
)

// openCluster begins the life of a cluster of these nodes.
func (w *monitor) openCluster(now time.Duration, nodes []van.Node) {
	w.life.phase, w.alive.lastCheck = ready, now
	w.table.fill(nodes)
	w.alive.begin(now, van.SchedulerID)
	for id, i := range w.table.at {
		w.alive.begin(now, id)
		w.table.learn(id, &nodes[i])
	}
}

func (w *monitor) markDead(now time.Duration, id int, r deathReason, cause error) {
	h := w.alive.peers[id]
	wasCut := h.deadFor != 0 && lossVerb(h.cause) == verbCut
	switch first := w.alive.markDead(now, id, r, cause); {
	case first:
		w.notifyOthers(id, notice{verb: lossVerb(cause), id: id, text: cause.Error()})
		w.barriers.recheck(now)
	case wasCut && r == silent && !w.life.leaving: // a node that has ignored the cut must learn this
		h.cause = &lossError{text: fmt.Sprintf("%s, and %s", h.cause, cause)}
		w.notifyOthers(id, notice{verb: verbDead, id: id, text: h.cause.Error()})
	}
}

func (w *monitor) markAlive(now time.Duration, id int, r deathReason) {
	if w.alive.markAlive(now, id, r) {
		w.notifyOthers(id, notice{verb: verbBack, id: id})
		w.resync(id)
		w.barriers.recheck(now)
	}
}

func (w *monitor) heard(now time.Duration, id int) {
	if w.alive.heard(now, id) {
		w.markAlive(now, id, silent)
	}
}

func (w *monitor) sendRecords(id int, nodes []van.Node) {
	meta := w.out.control(van.AddNode)
	meta.Control.Nodes = nodes
	if w.table.native(id) {
		meta.Key = uint64(w.table.tableGeneration)
	}
	w.out.send(id, meta)
}

// sendTableToAll sends the whole table to all nodes.
func (w *monitor) sendTableToAll() {
	whole := w.table.whole()
	for _, id := range w.table.ids() {
		w.sendRecords(id, whole)
	}
}

// sendTable sends a node the whole table, and notices about the dead nodes in it.
func (w *monitor) sendTable(to int) {
	w.sendRecords(to, w.table.whole())
	for _, id := range w.table.ids() {
		if id != to && w.alive.isDead(id) {
			cause := w.alive.peers[id].cause
			w.out.notifyAbout(to, notice{verb: lossVerb(cause), id: id, text: cause.Error()}, uint64(w.table.incs[id]))
		}
	}
}

// notifyOthers sends a notice about one worker or server to every other live one. Its key names the process that it
// is about, since it may arrive after the record of the next one.
func (w *monitor) notifyOthers(about int, n notice) {
	for _, id := range w.table.ids() {
		if id != about && !w.alive.isDead(id) {
			w.out.notifyAbout(id, n, uint64(w.table.incs[about]))
		}
	}
}

// resync sends a node that is back the messages that it may have missed: notices and records that were sent while its
// connection was broken, or were in flight when it broke. A C++ StepMesh node gets the records of all live
// replacement processes, each in a message of its own, as at first; it ignores those at whose address it is
// connected.
func (w *monitor) resync(id int) {
	h := w.alive.peers[id] // a message sent after its last one, or shortly before, may have been in flight for as long
	replaced := w.lastReplaced > 0 && w.lastReplaced >= min(h.heard, h.deadSince-time.Second)
	if !w.table.native(id) {
		for i := range w.table.nodes {
			if n := &w.table.nodes[i]; replaced && n.ID != id && n.IsRecovery && !w.alive.isDead(n.ID) {
				w.sendRecords(id, []van.Node{*n})
			}
		}
		return
	}
	if replaced {
		w.sendRecords(id, w.table.whole())
	}
	var dead []string
	for _, o := range w.table.ids() {
		if o != id && w.alive.isDead(o) {
			dead = append(dead, strconv.Itoa(o))
		}
	}
	w.out.notify(id, notice{verb: verbDown, text: strings.Join(dead, ",")})
}

// expectMessage starts the wait for a message of id, to which the table was sent.
func (w *monitor) expectMessage(now time.Duration, id int) {
	delete(w.unconfirmed, id)
	if w.table.native(id) { // C++ StepMesh takes a second table for one of other nodes
		w.unconfirmed[id] = &unconfirmedTable{next: now + tableRepeat, pause: tableRepeat, left: tableRepeats}
	}
}

func (w *monitor) tick(now time.Duration) {
	for _, id := range w.alive.timedOut(now) {
		w.markDead(now, id, silent, w.alive.silenceError(now, id))
	}
	for _, id := range sortedIDs(w.unconfirmed) {
		u := w.unconfirmed[id]
		switch {
		case w.alive.peers[id].heard > 0 || w.alive.isDead(id) || u.left == 0:
			delete(w.unconfirmed, id)
		case now >= u.next:
			w.sendTable(id)
			u.pause *= 2
			u.next, u.left = now+u.pause, u.left-1
		}
	}
}

func (w *monitor) next() time.Duration {
	next := w.alive.nextCheck()
	for _, u := range w.unconfirmed {
		next = min(next, u.next)
	}
	return next
}
